"""With the rights of `mansio.pipelines.rights`, and no others, the client parts of the jobs are refused nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest

import mansio.blocking
from mansio.broker.services.authorization import Authorization
from mansio.cli.main import main
from mansio.errors import TransactionalIdAuthorizationFailed
from mansio.net.offsets import CommittedOffset, commit_offsets, fetch_offsets
from mansio.pipelines.lag import pipeline_lag
from mansio.pipelines.mirroring.mirror import MirrorJob, mirror
from mansio.pipelines.rights import Job, rights_of
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import (
    ProducerEpoch,
    SinkTransaction,
    SinkTransactionOptions,
    commit_batch,
    open_transactions,
)
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.source.fetch import fetch_range
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.state.authorization.acls import WILDCARD, Acl, PatternType, Permission
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, pipeline_group_id
from mansio.wire.topic_partition import TopicPartition
from support.sasl_broker import SaslBroker, sasl_broker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from mansio.pipelines.rights import Right

pytestmark = [pytest.mark.full, pytest.mark.row("A8")]

USER, PASSWORD = "job", "a password"
COPIED, WRITTEN, READ = "copied", "written", "read"
"""Topics, one for each test."""
RECORDS: Final = 20
SETTINGS: Final = {"authorizer": "acl", "super_users": "User:admin"}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SaslBroker, SaslBroker]]:
    directory = tmp_path_factory.mktemp("brokers")
    with sasl_broker(directory / "a", **SETTINGS) as a, sasl_broker(directory / "b", **SETTINGS) as b:
        for broker in (a, b):
            for user in ("admin", USER):
                broker.set_user(user, PASSWORD)
        with admin_of(a) as admin:
            for topic in (COPIED, WRITTEN, READ):
                admin.admin.create_topic(topic, partitions=2, config={"retention.ms": "86400000000"})
                for number in range(RECORDS):
                    admin.publish(topic, b"%d" % number, partition=number % 2)
            admin.admin.reset_offsets("billing", [COPIED], to=3)
        yield a, b


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the user of the job was refused."""
    found: list[str] = []
    refusal = Authorization.refusal

    def recording(self: Authorization, *asked: Any) -> Any:
        found.append(" ".join(map(str, asked)))
        return refusal(self, *asked)

    monkeypatch.setattr(Authorization, "refusal", recording)
    monkeypatch.setenv("MANSIO_USER", USER)
    monkeypatch.setenv("MANSIO_PASSWORD", PASSWORD)
    yield found
    close_sync_clients()


def admin_of(broker: SaslBroker) -> mansio.blocking.Client:
    return mansio.blocking.connect(broker.address, user="admin", password=PASSWORD)


def allow(broker: SaslBroker, rights: list[Right]) -> None:
    """Let the user of the job have these rights and no others."""

    def acl(right: Right) -> Acl:
        pattern = PatternType.PREFIXED if right.is_prefix else PatternType.LITERAL
        named = right.resource_type, pattern, right.name
        return Acl(*named, f"User:{USER}", WILDCARD, right.operation, Permission.ALLOW)

    with admin_of(broker) as admin:
        admin.admin.acls.delete([mansio.AclFilter(principal=f"User:{USER}")])
        admin.admin.acls.create([acl(right) for right in rights])


def test_a_mirror_copies_what_is_new_with_settings_partitions_and_offsets(
    brokers: tuple[SaslBroker, SaslBroker], refused: list[str]
) -> None:
    a, b = brokers
    allow(a, rights_of(Job.MIRROR_SOURCE, topics=[COPIED], pipeline="m"))
    allow(b, rights_of(Job.MIRROR_TARGET, targets=[COPIED]))
    job = MirrorJob((COPIED,), a.address, b.address, name="m", stops_when_caught_up=True, trigger_s=0.05)
    copied = mirror(job)
    assert (copied.records, copied.group_offsets, copied.lag) == (RECORDS, 2, 0)
    with admin_of(a) as admin:
        admin.admin.create_partitions(COPIED, 3)
        admin.admin.alter_topic_config(COPIED, {"retention.ms": "172800000000"})
        admin.publish(COPIED, b"more", partition=2)
    assert mirror(job).records == 1
    with admin_of(b) as admin:
        assert len(admin.admin.describe_topic(COPIED).partitions) == 3
        assert admin.admin.describe_config(COPIED)["retention.ms"].value == "172800000000"
    with admin_of(a) as admin:
        assert admin.admin.group_offsets(pipeline_group_id("m"))
    assert refused == []


def write_batch(broker: SaslBroker, query_id: str, batch_id: int) -> None:
    """What one task and the driver of a query do for a batch."""
    client = sync_client(broker.address)
    options = SinkOptions.parse({"kafka.bootstrap.servers": broker.address, "topic": WRITTEN})
    transaction = SinkTransaction(client, SinkTransactionOptions(query_id, 0, 0, 60_000))
    sender = TaskSender(client, options, transaction=transaction)
    sender.send(WRITTEN, pa.record_batch({"value": pa.array([b"written"])}))
    report = sender.finish()
    written = ProducerEpoch(report.transactional_id, report.producer_id, report.producer_epoch)
    commit_batch(client, query_id, batch_id, [written], open_transactions(client, query_id, [written]))


def test_a_sink_writes_batches_exactly_once(
    brokers: tuple[SaslBroker, SaslBroker], refused: list[str]
) -> None:
    broker, _ = brokers
    rights = rights_of(Job.WRITE, targets=[WRITTEN])
    allow(broker, rights)
    for batch_id in range(2):
        write_batch(broker, "a-query", batch_id)
    assert refused == []
    close_sync_clients()
    allow(broker, rights[:1])
    with pytest.raises(
        TransactionalIdAuthorizationFailed, match=r"DESCRIBE the transactional id mansio-spark:"
    ):
        write_batch(broker, "a-query", 2)


def test_a_source_reads_and_holds_and_its_position_is_shown_and_released(
    brokers: tuple[SaslBroker, SaslBroker], refused: list[str]
) -> None:
    broker, _ = brokers
    place, group = TopicPartition(READ, 0), pipeline_group_id("p")
    allow(broker, rights_of(Job.ARCHIVE, topics=[READ], pipeline="p"))
    client = sync_client(broker.address)
    assert any(fetch_range(client, place, 0, 5))
    held = {place: CommittedOffset(5, encode_hold_metadata("query"))}
    client.run(commit_offsets(client.cluster, group, held))
    assert client.run(fetch_offsets(client.cluster, group, [place]))[place].offset == 5
    allow(broker, rights_of(Job.LAG, topics=[READ]))
    (lag,) = [each for each in pipeline_lag(client) if each.pipeline == "p"]
    assert lag.committed == 5
    allow(broker, rights_of(Job.RELEASE, topics=[READ], pipeline="p"))
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "release", "p", "-b", broker.address])
    assert ended.value.code == 0
    with admin_of(broker) as admin:
        assert admin.admin.group_offsets(group) == {}
    assert refused == []
