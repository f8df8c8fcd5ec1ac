"""docs/reference/compatibility.md, generated from `mansio.wire.api_versions`: APIs and versions that are supported.

The table of test suites is made from the results that `python -m nightly.suites --write` recorded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.wire.api_versions import SUPPORTED_APIS, UNSUPPORTED_APIS

if TYPE_CHECKING:
    from mansio.wire.api_versions import Api

_ROOT: Final = Path(__file__).resolve().parent.parent
_RESULTS: Final = _ROOT / "tests/nightly/suites/results.json"
_OLDEST: Final = _ROOT / "tests/nightly/interop/oldest_clients/versions.json"
_CONSTRAINTS: Final = _ROOT / "constraints.txt"

_INTRODUCTION: Final = """\
# Compatibility with Kafka

Mansio implements Kafka's protocol; clients request the supported versions with ApiVersions. Generated from
`src/mansio/wire/api_versions.py` by `make format`: a version is listed only when it is implemented and tested.

Only record batch format 2 (Kafka 0.11 and newer) is supported; batches are stored unchanged, unless the
topic's `compression.type` names another codec than theirs. A compressed batch is decompressed and its records are
counted at produce (`check_compressed_batches`); unlike in Kafka, keys, values, headers and offsets within a record are
not read there, and the records of a batch without compression are not counted.

## Supported

| API | key | versions | remarks |
|---|---|---|---|
"""

_CLIENTS: Final = """
## Client versions

The newest version is the one with which the named tests run. The oldest version of confluent-kafka, kafka-python,
aiokafka and boto3 creates a topic or a queue, writes to it and reads from it in `make nightly`, which also runs the
tests of Spark with PySpark 4.1; Celery 5.4.0 and grpcio 1.80.0 passed the named tests by hand. Older versions may work
and are not tested.

Over TLS, Java's client, franz-go, sarama, kafka-go and Spark's Kafka connector connect with SCRAM-SHA-256,
SCRAM-SHA-512, PLAIN and a certificate in `make nightly`; confluent-kafka, kafka-python and aiokafka with each
mechanism, and confluent-kafka with a certificate, in `make full`.
[Connect with TLS and a password](../how-to/connect-securely.md) has an example for each client.

| client | oldest tested | newest tested | tests of the newest |
|---|---|---|---|
"""


class _Client(NamedTuple):
    """`distribution`: in constraints.txt, "" if there is `newest`. `oldest`: where versions.json has none."""

    name: str
    distribution: str
    tests: str
    oldest: str = ""
    newest: str = ""


_TESTED_CLIENTS: Final = (
    _Client(
        "confluent-kafka (librdkafka)", "confluent-kafka", "`tests/system/interop`, `tests/system/cluster`"
    ),
    _Client("kafka-python", "kafka-python", "`tests/system/interop`"),
    _Client("aiokafka", "aiokafka", "`tests/system/interop`"),
    _Client("kcat of Debian 12", "", "`tests/system/interop`", "1.7.1", "1.7.1"),
    _Client("Apache Kafka's Java client, Streams", "", "`tests/nightly/interop`, nightly", "4.2.1", "4.2.1"),
    _Client("Apache Kafka's command line tools", "", "`make nightly-suites`", "4.3.1", "4.3.1"),
    _Client("franz-go", "", "`make nightly-suites`", "1.22.2", "1.22.2"),
    _Client("sarama", "", "`make nightly-suites`", "1.61.1", "1.61.1"),
    _Client("kafka-go", "", "`make nightly-suites`", "0.4.51", "0.4.51"),
    _Client("boto3", "boto3", "`tests/component/sqs`"),
    _Client("Celery with `mansio://`", "celery", "`tests/system/e2e/test_celery.py`", "5.4.0"),
    _Client("grpcio", "grpcio", "`tests/component/grpc`", "1.80.0"),
    _Client("PySpark", "pyspark", "`tests/system/spark`", "4.1"),
)

_CLIENT_FAULTS: Final = """
## Faults of clients

Seen with Mansio and with Apache Kafka 4.1.1 alike.

| client | request | fault |
|---|---|---|
| confluent-kafka 2.16.1 (librdkafka 2.16.0) | `AdminClient.describe_user_scram_credentials` | When it is refused \
(CLUSTER_AUTHORIZATION_FAILED), the process crashes: librdkafka frees the text of the error, which it has not \
allocated. Users who call it need DESCRIBE on the cluster. |
| confluent-kafka 2.16.1 (librdkafka 2.16.0) | `AdminClient.describe_acls` | When it is refused, it returns an empty \
list: librdkafka does not report the error. |
"""

_NOT_OFFERED: Final = """
## Not supported

| API | reason |
|---|---|
"""

_DEFAULTS: Final = """
## Work that holds the event loop

Requests that may delay the others by more than 50 ms, with the processor time of the event loop \
(two shared cores, Python 3.11). A request has at most 32,000 items (topics, partitions, groups \
and names together; CommitBatch and requests between brokers 100,000); one with more closes its connection, with one \
line in the log.

| request | held |
|---|---|
| CommitBatch of 100,000 transactions, which is one record | 0.3 to 0.6 s |
| OffsetCommit of 32,000 offsets, which are committed at once; TxnOffsetCommit and OffsetDelete are not measured | \
0.3 to 0.5 s |
| Produce of 10,000 records with deduplication ids; with delays | up to 60 ms; up to 40 ms |
| compressed batches that wait to be checked while a setting of their topic changes: each one is decompressed again \
| up to 0.8 s for 90 MB |
| delivery of delayed records, followers that read delays, ids or priorities, and order by key: a batch of 128 MiB \
when decompressed | 0.3 to 1 s |
| gRPC reads of records and receives of share groups: a record of 60 MiB | 50 to 70 ms: gRPC copies the message |
| HTTP reads, event streams, receives of share groups: a record with 900,000 headers | up to 90 ms |

## Defaults that differ from Kafka's

| setting | Kafka | Mansio | effect |
|---|---|---|---|
| `auto.create.topics.enable` | true | false | A program that relies on created topics (Spark's connector as a sink, \
Connect's sources) waits for them until it times out. The broker's log names such a topic once \
(`topic_not_auto_created`). Create it before, or set `auto_create_topics_enable` (for development: \
`mansio serve --dev`). |
"""

_MIRROR_MAKER: Final = """
## MirrorMaker 2

Tried with MirrorMaker 2 of Kafka 4.1.1 (dedicated mode, `connect-mirror-maker`) from one broker to another, with the
configuration of `tests/nightly/interop/test_mirror_maker.py`, which `make nightly` runs.

| function | result |
|---|---|
| records: key, value, headers, timestamp, partition | works; a topic `T` of cluster `a` becomes `a.T` |
| new topics, new partitions, settings of topics (`retention.ms`) | works: MirrorMaker creates and alters them |
| group offsets (`sync.group.offsets.enabled=true`, checkpoints, heartbeats) | works for consumer groups; MirrorMaker \
rounds translated offsets down (`offset.lag.max`, as with Kafka), and does not translate those of share groups |
| Kafka Connect's own topics and its group | works; `*.storage.replication.factor=1` for a single broker |
| MirrorMaker killed and started again | continues; records whose offsets it had not stored are written again \
(at least once, as with Kafka) |
| ACLs (`sync.topic.acls.enabled`) | set it to `false`: it is not tested |
| exactly once (`exactly.once.source.support=enabled`) | [tested by hand](#tested-by-hand); by `make nightly` \
with Connect's source of lines: see [Transactions](#transactions); \
[`mansio pipeline mirror`](../how-to/pipelines.md#mirror) is exactly once |

```properties
clusters = a, b
a.bootstrap.servers = 127.0.0.1:9092
b.bootstrap.servers = 127.0.0.1:9093
a->b.enabled = true
b->a.enabled = false
a->b.topics = orders.*
replication.factor = 1
offset-syncs.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
checkpoints.topic.replication.factor = 1
config.storage.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
sync.topic.acls.enabled = false
sync.group.offsets.enabled = true
```
"""

_TRANSACTIONS: Final = """
## Transactions

What [transactions](../how-to/transactions.md) were tested with. "v1" and "v2" are the transaction versions of
KIP-890: in v2 the broker adds partitions and groups to a transaction, and each transaction has an epoch of its own.
The first three are in `tests/system/interop`, the others in `tests/nightly`.

| client | version | tested |
|---|---|---|
| librdkafka (confluent-kafka) 2.x | v1 | commit, abort, fencing, timeout, offsets of a group, kills of a broker and \
of each broker of a cluster |
| kafka-python 3.0 | v1 | commit, abort, fencing, offsets of a group (KIP-447), `read_committed` |
| aiokafka 0.14 | v1 | commit, abort, fencing, offsets of a group by its name only (before KIP-447), `read_committed` |
| Apache Kafka's Java client 4.2.1 | v2 | commit, abort, fencing, timeout, interleaved transactions in fetches of any \
size, offsets of groups of both protocols (`classic` and `consumer`, KIP-848), fenced static members |
| Kafka Streams 4.2.1, `exactly_once_v2` | v2 | a word count with repartition and changelog topics, killed 6 times, \
alone and together with the broker: the count is exact |
| Kafka Connect 4.1.1, `exactly.once.source.support=enabled` | v2 | a distributed worker with the source of lines \
(FileStreamSource), killed 5 times, alone and together with the broker: each line once and in order |
| Spark's Kafka connector, `kafka.isolation.level=read_committed` | reads only | batch and stream in small \
micro-batches with `failOnDataLoss`, over aborted and open transactions and control records |
| librdkafka 2.15.1, its own tests (`0103_transactions`, `0129_fetch_aborted_msgs`, \
`0177_share_consumer_transactions`) | v1 | pass, the first one on three brokers |
| sarama 1.61.1, its own tests (`TestFuncTxn...`) | v1 | pass on three brokers, also when one fails |
| franz-go 1.22.2 (`TestTxnEtl`) | v2 | consume, transform, produce in groups of both protocols with every balancer |
"""

_BY_HAND: Final = """
## Tested by hand

No run of `make nightly` repeats these; the reason is beside each.

| program | result | not in `make nightly`, because |
|---|---|---|
| Apache Flink 2.2.1, Kafka connector 5.0, exactly-once sink with both strategies of naming transactional ids | each \
record once | it needs a job in Java and a Flink cluster, which no test builds yet |
| MirrorMaker 2, `exactly.once.source.support=enabled` | each record once | the nightly test of MirrorMaker runs one \
process at least once; exactly once is tested with Connect's source of lines |
"""

_WEB_UI: Final = """
## Web UIs

Tested with this broker: the Kafka pages of the Quarkus Dev UI 3.27.2, which use Apache Kafka's Java client 4.0.0.
`make nightly` makes every call of its pages (`tests/nightly/interop/test_web_ui.py`); `make test` replays the recorded
requests (`tests/system/interop/test_web_ui_replay.py`).

| page | requests | result |
|---|---|---|
| Nodes | DescribeCluster 2, Metadata 13 | works |
| Topics: list, partitions, number of records | Metadata 13, DescribeTopicPartitions 0, ListOffsets 10 | works |
| Topics: create, delete | CreateTopics 7, DeleteTopics 6 | works; a replication factor above the number of brokers: \
INVALID_REPLICATION_FACTOR, as in Kafka, which this page does not show |
| Messages: newest of every partition | Metadata 13, ListOffsets 10, Fetch 17 | works, also for compacted topics |
| Messages: write one | InitProducerId 5, Produce 12 | works |
| Consumer groups: state, members, lag | ListGroups 5, FindCoordinator 6, DescribeGroups 6, OffsetFetch 9 | works |
| Access control list | DescribeCluster 2, DescribeAcls 3 | refused: SECURITY_DISABLED, as in Kafka without an \
authorizer; the page shows an empty list |

It has no pages for settings, quotas, log directories, transactions, reassignments or offsets; those APIs are tested
with client libraries, most of them also with Apache Kafka's command line tools. Redpanda Console, AKHQ and Kafdrop have
not been tested.
"""

_SUITES: Final = """
## Test suites of clients and tools

Test suites of other projects, run against Mansio. `make nightly-suites` compares each test with the lists in
`tests/nightly/suites/expected`, which give a reason for every failure and every skipped test, and reports unexpected
failures, passes and skips. `make nightly-suites ARGS=--write` records the figures. The commit is the last one that
changed the broker before the run.

| suite | set-up | passed at 80df832 | commit | passed | failed, as expected | skipped |
|---|---|---|---|---|---|---|
"""

_EARLIER_SUITES: Final = """
Other suites, of which `make nightly-suites` runs none: passed of the tests that apply, measured at commit 80df832.

| suite | passed |
|---|---|
"""


def render() -> str:
    """The document in Markdown."""
    suites = suite_tables(json.loads(_RESULTS.read_text(encoding="utf-8")))
    offered = "".join(map(_row, SUPPORTED_APIS.values()))
    skipped = "".join(f"| {name} | {reason} |\n" for name, reason in UNSUPPORTED_APIS.items())
    return (
        _INTRODUCTION
        + offered
        + client_versions(
            json.loads(_OLDEST.read_text(encoding="utf-8")), _CONSTRAINTS.read_text(encoding="utf-8")
        )
        + _CLIENT_FAULTS
        + _NOT_OFFERED
        + skipped
        + _DEFAULTS
        + suites
        + _TRANSACTIONS
        + _MIRROR_MAKER
        + _BY_HAND
        + _WEB_UI
    )


def client_versions(oldest: dict[str, str], constraints: str) -> str:
    """The section on versions of clients."""
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", constraints, re.MULTILINE))
    rows = (
        f"| {each.name} | {each.oldest or oldest[each.distribution]} "
        f"| {each.newest or pinned[each.distribution]} | {each.tests} |\n"
        for each in _TESTED_CLIENTS
    )
    return _CLIENTS + "".join(rows)


def suite_tables(recorded: dict[str, Any]) -> str:
    """The section on test suites, from what is recorded of them."""
    run = {name: entry for name, entry in recorded.items() if "passed" in entry}
    rows = "".join(_suite_row(name, entry) for name, entry in run.items())
    earlier = "".join(
        f"| {' '.join((name, entry['version'])).strip()} | {entry['before']} |\n"
        for name, entry in recorded.items()
        if name not in run
    )
    return _SUITES + rows + _EARLIER_SUITES + earlier


def _suite_row(name: str, entry: dict[str, Any]) -> str:
    cells = [f"{name} {entry['version']}", entry["setup"], entry.get("before", "not run")]
    cells += [entry["commit"], str(entry["passed"])]
    cells += [_by_reason(entry["failed"]), _by_reason(entry["skipped"])]
    return f"| {' | '.join(cells)} |\n"


def _by_reason(counts: dict[str, int]) -> str:
    """ "3: two of one reason (2), another (1)", most frequent first."""
    listed = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return (
        f"{sum(counts.values())}: " + "; ".join(f"{reason} ({n})" for reason, n in listed) if counts else "0"
    )


def _row(api: Api) -> str:
    versions = (
        str(api.min_version) if api.min_version == api.max_version else f"{api.min_version}-{api.max_version}"
    )
    newer = (
        f"Newer versions are not supported: {api.newer_unsupported_reason}"
        if api.newer_unsupported_reason
        else ""
    )
    remarks = " ".join(filter(None, (api.note, newer)))
    return f"| {_name(api)} | {int(api.key)} | {versions} | {remarks} |\n"


def _name(api: Api) -> str:
    """Kafka's spelling: OFFSET_FOR_LEADER_EPOCH -> OffsetForLeaderEpoch."""
    return "".join(word.capitalize() for word in api.key.name.split("_"))
