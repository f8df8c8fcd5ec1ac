"""Apache Kafka's command-line tools, each subcommand a test: what it prints has to be what it is there to say.

The jars come from Maven by `tools/java_tools.sh`. The tests run in their order: later ones use what earlier ones made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nightly.suites.brokers import one_broker
from nightly.suites.commands import TimeLimitExceeded, checked
from nightly.suites.commands import run as run_command
from nightly.suites.suite import Outcome, Suite
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

FETCH_LIMIT_S = 600
LIMIT_S = 120
ENDLESS_S = 15
"""Time after which a tool that does not end is stopped."""
FETCH_JARS: Final = ROOT / "tools" / "java_tools.sh"
POM: Final = ROOT / "tools" / "java_tools.pom.xml"
JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
TOOLS = "org.apache.kafka.tools"
PROGRAMS: Final = {
    "kafka-topics": f"{TOOLS}.TopicCommand",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-producer": f"{TOOLS}.ConsoleProducer",
    "kafka-console-consumer": f"{TOOLS}.consumer.ConsoleConsumer",
    "kafka-console-share-consumer": f"{TOOLS}.consumer.ConsoleShareConsumer",
    "kafka-consumer-groups": f"{TOOLS}.consumer.group.ConsumerGroupCommand",
    "kafka-share-groups": f"{TOOLS}.consumer.group.ShareGroupCommand",
    "kafka-groups": f"{TOOLS}.GroupsCommand",
    "kafka-get-offsets": f"{TOOLS}.GetOffsetShell",
    "kafka-delete-records": f"{TOOLS}.DeleteRecordsCommand",
    "kafka-reassign-partitions": f"{TOOLS}.reassign.ReassignPartitionsCommand",
    "kafka-leader-election": f"{TOOLS}.LeaderElectionCommand",
    "kafka-log-dirs": f"{TOOLS}.LogDirsCommand",
    "kafka-features": f"{TOOLS}.FeatureCommand",
    "kafka-metadata-quorum": f"{TOOLS}.MetadataQuorumCommand",
    "kafka-cluster": f"{TOOLS}.ClusterTool",
    "kafka-broker-api-versions": f"{TOOLS}.BrokerApiVersionsCommand",
    "kafka-transactions": f"{TOOLS}.TransactionsCommand",
    "kafka-client-metrics": f"{TOOLS}.ClientMetricsCommand",
    "kafka-acls": f"{TOOLS}.AclCommand",
    "kafka-producer-perf-test": f"{TOOLS}.ProducerPerformance",
    "kafka-consumer-perf-test": f"{TOOLS}.ConsumerPerformance",
    "kafka-replica-verification": f"{TOOLS}.ReplicaVerificationTool",
    "kafka-verifiable-producer": f"{TOOLS}.VerifiableProducer",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a tool. `{server}` in an argument is the broker, `{folder}` where `files` are."""

    arguments: str
    wanted: str
    """A regular expression that its output has to match."""
    code: int | None = 0
    stdin: str = ""
    is_endless: bool = False
    """The tool does not end; it is stopped after `ENDLESS_S`, and has no exit code."""


T = "--topic suite"
B = "--bootstrap-server {server}"
FILES: Final = {
    "offsets.json": '{"version": 1, "partitions": [{"topic": "suite", "partition": 0, "offset": 1}]}',
    "same.json": '{"version": 1, "partitions": [{"topic": "suite", "partition": 0, "replicas": [1]}]}',
    "topics.json": '{"version": 1, "topics": [{"topic": "suite"}]}',
}

STEPS: Final[dict[str, Step]] = {
    "kafka-topics --create": Step(
        f"{B} --create {T} --partitions 3 --config retention.ms=3600000", "Created topic suite"
    ),
    "kafka-topics --create, compressed": Step(
        f"{B} --create --topic zipped --config compression.type=zstd", "Created topic zipped"
    ),
    "kafka-topics --describe": Step(f"{B} --describe {T}", r"PartitionCount: 3(.|\n)*retention\.ms=3600000"),
    "kafka-topics --alter": Step(f"{B} --alter {T} --partitions 4", ""),
    "kafka-topics --list": Step(f"{B} --list", r"(?m)^suite$"),
    "kafka-configs --alter a topic": Step(
        f"{B} --alter {T} --add-config segment.jitter.ms=5", "Completed updating"
    ),
    "kafka-configs --describe a topic": Step(f"{B} --describe {T}", r"segment\.jitter\.ms=5"),
    "kafka-configs --delete-config": Step(
        f"{B} --alter {T} --delete-config segment.jitter.ms", "Completed updating"
    ),
    "kafka-configs --describe a broker": Step(f"{B} --describe --broker 1 --all", r"node\.id=1"),
    "kafka-configs --alter a broker": Step(
        f"{B} --alter --broker 1 --add-config log.retention.ms=7200000", "Completed updating"
    ),
    "kafka-configs --alter the brokers' default": Step(
        f"{B} --alter --broker-defaults --add-config log.retention.ms=7200000", "Completed updating"
    ),
    "kafka-configs --alter a group": Step(
        f"{B} --alter --group shared --add-config share.auto.offset.reset=earliest", "Completed updating"
    ),
    "kafka-configs --alter a client's quota": Step(
        f"{B} --alter --client loader --add-config producer_byte_rate=100000", "Completed updating"
    ),
    "kafka-configs --describe quotas": Step(
        f"{B} --describe --entity-type clients", r"producer_byte_rate=100000\.0"
    ),
    "kafka-configs --alter a user's password": Step(
        f"{B} --alter --entity-type users --entity-name ann --add-config "
        "SCRAM-SHA-256=[iterations=8192,password=secret],SCRAM-SHA-512=[password=secret]",
        "Completed updating",
    ),
    "kafka-configs --describe users": Step(
        f"{B} --describe --entity-type users",
        "user-principal 'ann' are SCRAM-SHA-256=iterations=8192, SCRAM-SHA-512=iterations=4096",
    ),
    "kafka-configs --delete-config of a user": Step(
        f"{B} --alter --entity-type users --entity-name ann --delete-config SCRAM-SHA-256,SCRAM-SHA-512",
        "Completed updating",
    ),
    "kafka-console-producer": Step(
        f"{B} {T} --property parse.key=true --property key.separator=:", "", stdin="a:one\nb:two\nc:three\n"
    ),
    "kafka-console-producer, compressed": Step(
        f"{B} --topic zipped --compression-codec gzip", "", stdin="one\ntwo\n"
    ),
    "kafka-console-consumer": Step(
        f"{B} {T} --group grouped --from-beginning --max-messages 3 --timeout-ms 60000",
        "Processed a total of 3 messages",
    ),
    "kafka-console-consumer, group protocol consumer": Step(
        f"{B} {T} --group modern --consumer-property group.protocol=consumer --from-beginning --max-messages 3 "
        "--timeout-ms 60000",
        "Processed a total of 3 messages",
    ),
    "kafka-console-consumer --include": Step(
        f"{B} --include sui.* --group patterned --consumer-property group.protocol=consumer --from-beginning "
        "--max-messages 3 --timeout-ms 60000",
        "Processed a total of 3 messages",
    ),
    "kafka-console-consumer, recompressed": Step(
        f"{B} --topic zipped --from-beginning --max-messages 2 --timeout-ms 60000",
        "Processed a total of 2 messages",
    ),
    "kafka-console-share-consumer": Step(
        f"{B} {T} --group shared --max-messages 3 --timeout-ms 60000", "Processed a total of 3 messages"
    ),
    "kafka-get-offsets": Step(f"{B} {T}", r"(?m)^suite:0:\d+$"),
    "kafka-get-offsets --time earliest": Step(f"{B} {T} --time earliest", r"(?m)^suite:0:0$"),
    "kafka-replica-verification": Step(
        "--broker-list {server} --topics-include suite --report-interval-ms 1000",
        "max lag is 0 for partition suite-",
        code=None,
        is_endless=True,
    ),
    "kafka-consumer-groups --list": Step(f"{B} --list", r"(?m)^grouped$"),
    "kafka-consumer-groups --describe": Step(f"{B} --describe --group grouped", r"grouped +suite +\d"),
    "kafka-consumer-groups --describe --state": Step(f"{B} --describe --group grouped --state", "Empty"),
    "kafka-consumer-groups --reset-offsets": Step(
        f"{B} --group grouped {T} --reset-offsets --to-earliest --execute", r"suite +0 +0"
    ),
    "kafka-consumer-groups --delete-offsets": Step(f"{B} --group modern {T} --delete-offsets", "Successful"),
    "kafka-consumer-groups --delete": Step(f"{B} --group grouped --delete", "was successful"),
    "kafka-share-groups --list": Step(f"{B} --list", r"(?m)^shared$"),
    "kafka-share-groups --describe": Step(f"{B} --describe --group shared", r"shared +suite +\d"),
    "kafka-share-groups --describe --state": Step(f"{B} --describe --group shared --state", "Empty"),
    "kafka-share-groups --reset-offsets": Step(
        f"{B} --group shared {T} --reset-offsets --to-earliest --execute", r"suite +0 +0"
    ),
    "kafka-share-groups --delete-offsets": Step(f"{B} --group shared {T} --delete-offsets", "Successful"),
    "kafka-share-groups --delete": Step(f"{B} --group shared --delete", "was successful"),
    "kafka-groups --list": Step(f"{B} --list", "modern"),
    "kafka-delete-records": Step(
        f"{B} --offset-json-file {{folder}}/offsets.json", r"partition: suite-0\s+low_watermark: 1"
    ),
    "kafka-reassign-partitions --generate": Step(
        f"{B} --generate --topics-to-move-json-file {{folder}}/topics.json --broker-list 1",
        "Proposed partition reassignment",
    ),
    "kafka-reassign-partitions --verify": Step(
        f"{B} --verify --reassignment-json-file {{folder}}/same.json",
        r"Reassignment of partition suite-0 is completed",
    ),
    "kafka-reassign-partitions --execute": Step(
        f"{B} --execute --reassignment-json-file {{folder}}/same.json",
        "Successfully started partition reassignment",
    ),
    "kafka-reassign-partitions --list": Step(f"{B} --list", "No partition reassignments found"),
    "kafka-leader-election": Step(f"{B} --election-type preferred --all-topic-partitions", "", code=None),
    "kafka-log-dirs --describe": Step(f"{B} --describe --topic-list suite", r'"partition":"suite-0"'),
    "kafka-features describe": Step(f"{B} describe", r"Feature: \S+"),
    "kafka-features upgrade": Step(f"{B} upgrade --feature share.version=1 --dry-run", "share.version"),
    "kafka-metadata-quorum describe --status": Step(f"{B} describe --status", "LeaderId"),
    "kafka-metadata-quorum describe --replication": Step(f"{B} describe --replication", "LogEndOffset"),
    "kafka-cluster cluster-id": Step(f"cluster-id {B}", "Cluster ID: "),
    "kafka-cluster list-endpoints": Step(f"list-endpoints {B}", "127.0.0.1"),
    "kafka-broker-api-versions": Step(B, r"ShareFetch\(78\): \d"),
    "kafka-transactions list": Step(f"{B} list", "TransactionalId"),
    "kafka-transactions describe-producers": Step(f"{B} describe-producers {T} --partition 0", "ProducerId"),
    "kafka-transactions find-hanging": Step(f"{B} find-hanging --broker-id 1", "Topic"),
    "kafka-client-metrics --list": Step(f"{B} --list", ""),
    "kafka-acls --add": Step(
        f"{B} --add --allow-principal User:ann --operation Read --topic guarded --group guards",
        "Adding ACLs for resource",
    ),
    "kafka-acls --add with a prefix": Step(
        f"{B} --add --deny-principal User:bob --deny-host 10.0.0.1 --operation All --topic guarded- "
        "--resource-pattern-type prefixed",
        "Adding ACLs for resource",
    ),
    "kafka-acls --add --producer": Step(
        f"{B} --add --allow-principal User:ann --producer --topic guarded --transactional-id guarded",
        "Adding ACLs for resource",
    ),
    "kafka-acls --list": Step(
        f"{B} --list --topic guarded-x --resource-pattern-type match",
        r"principal=User:bob, host=10.0.0.1, operation=ALL, permissionType=DENY",
    ),
    "kafka-acls --list of a principal": Step(
        f"{B} --list --principal User:ann", "operation=WRITE, permissionType=ALLOW"
    ),
    "kafka-acls --remove": Step(
        f"{B} --remove --force --topic guarded --group guards --transactional-id guarded", ""
    ),
    "kafka-acls --list after that": Step(
        f"{B} --list", r"(?s)\A(?!.*User:ann).*principal=User:bob, host=10.0.0.1, operation=ALL"
    ),
    "kafka-producer-perf-test": Step(
        f"{T} --num-records 20000 --record-size 100 --throughput -1 "
        "--producer-props bootstrap.servers={server} acks=all compression.type=lz4",
        "20000 records sent",
    ),
    "kafka-producer-perf-test, transactions": Step(
        f"{T} --num-records 1000 --record-size 100 --throughput -1 --transactional-id perf "
        "--producer-props bootstrap.servers={server}",
        "1000 records sent",
    ),
    "kafka-consumer-perf-test": Step(f"{B} {T} --messages 20000 --timeout 60000", r"\d+\.\d+, \d+"),
    "kafka-verifiable-producer": Step(f"{B} {T} --max-messages 1000 --throughput -1", r'"acked":1000'),
    "kafka-topics --delete": Step(f"{B} --delete {T}", ""),
}
EXCEPTION = re.compile(r"^\s+at [\w.$]+\(|Exception in thread", re.MULTILINE)


def java(program: str) -> list[str]:
    """The command that runs a main class of the tools."""
    return ["java", *JVM, "-cp", f"{ROOT}/.tools/java/*", program]


def program_of(step: str) -> str:
    """The main class of the tool with which the step's name begins."""
    return PROGRAMS[re.split("[ ,]", step)[0]]


def version() -> str:
    """Of the tools, as pinned in the POM."""
    found = re.search(r"kafka-tools</artifactId>\s*<version>([\d.]+)<", POM.read_text())
    assert found is not None
    return found[1]


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    log = directory / "tests.log"
    checked([FETCH_JARS], log=log, limit_s=FETCH_LIMIT_S)
    folder = directory / "files"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    outcomes: Outcomes = {}
    with one_broker(directory) as broker:
        for name, step in STEPS.items():
            if name in expected.skipped or (only is not None and name not in only):
                continue
            arguments = step.arguments.format(server=broker.bootstrap_servers, folder=folder).split()
            try:
                code, output = run_command(
                    [*java(program_of(name)), *arguments],
                    log=log,
                    limit_s=ENDLESS_S if step.is_endless else LIMIT_S,
                    stdin=step.stdin,
                )
            except TimeLimitExceeded as error:
                if not step.is_endless:
                    outcomes[name] = Outcome.FAILED
                    continue
                code, output = None, error.output
            right = (
                step.code in (None, code) and re.search(step.wanted, output) and not EXCEPTION.search(output)
            )
            outcomes[name] = Outcome.PASSED if right else Outcome.FAILED
    return outcomes


JAVA_TOOLS = Suite(
    "kafka-java-tools",
    version(),
    ("java", "mvn"),
    run,
    "one broker; each subcommand is a test",
    once_more=False,
)
