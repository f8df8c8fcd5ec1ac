"""Apache Kafka's own command line tools, and with them its Java clients: create, describe, write, read, limit, delete.

Nightly: needs Java and Maven, and says what to install where they are missing. Always true: every command's output is
asked for what it is there to say; a stack trace in it is a failure.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.paths import ROOT
from support.process import served
from system.interop.conftest import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.process import ServedBroker

TOOLS = "org.apache.kafka.tools"
TOPICS = f"{TOOLS}.TopicCommand"
CONFIGS = "kafka.admin.ConfigCommand"
GROUPS = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
TRANSACTIONS = f"{TOOLS}.TransactionsCommand"
QUICK_JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
DEADLINE_S = 90


class Java:
    """Runs a tool's main class against a broker."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def __call__(self, tool: str, *arguments: str, stdin: str = "", code: int | None = 0) -> str:
        """What it printed. `code` None: whatever its exit code."""
        command = ["java", *QUICK_JVM, "-cp", f"{ROOT}/.tools/java/*", tool]
        done = subprocess.run(
            [*command, "--bootstrap-server", self.bootstrap_servers, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=scaled(DEADLINE_S),
            check=False,
        )
        lines = (done.stdout + done.stderr).splitlines()
        output = "\n".join(line for line in lines if not line.startswith("SLF4J"))
        assert code is None or done.returncode == code, output
        return output


@pytest.fixture(scope="module")
def java_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(tmp_path_factory.mktemp("java") / "data", arguments=ARGUMENTS, http=False) as running:
        yield running
        assert "Traceback" not in running.text()
        assert running.stop() == 0


def fetch_tools() -> None:
    """Fetch the tools, unless they are there."""
    fetched = subprocess.run(
        [ROOT / "tools" / "java_tools.sh"], capture_output=True, text=True, timeout=scaled(600), check=False
    )
    if fetched.returncode:
        pytest.fail(f"Kafka's Java tools are missing: {fetched.stderr}{fetched.stdout}", pytrace=False)


@pytest.fixture(scope="module")
def java(java_broker: ServedBroker) -> Java:
    fetch_tools()
    return Java(java_broker.bootstrap_servers)


@pytest.mark.row("L1", "A1")
def test_topics_and_their_settings(java: Java) -> None:
    topic = "java-topics"
    java(TOPICS, "--create", "--topic", topic, "--partitions", "3", "--config", "retention.ms=3600000")
    described = java(TOPICS, "--describe", "--topic", topic)
    assert "PartitionCount: 3" in described
    assert "retention.ms=3600000" in described
    assert described.count("Leader: 1") == 3
    java(TOPICS, "--alter", "--topic", topic, "--partitions", "4")
    java(CONFIGS, "--alter", "--topic", topic, "--add-config", "max.message.bytes=5000")
    assert "max.message.bytes=5000" in java(CONFIGS, "--describe", "--topic", topic)
    java(CONFIGS, "--alter", "--topic", topic, "--delete-config", "max.message.bytes")
    assert "max.message.bytes" not in java(CONFIGS, "--describe", "--topic", topic)
    assert "node.id=1" in java(CONFIGS, "--describe", "--bootstrap-servers", "1", "--all")
    java(TOPICS, "--delete", "--topic", topic)
    assert topic not in java(TOPICS, "--list")


@pytest.mark.row("L1", "G4")
def test_records_and_groups(java: Java) -> None:
    topic, group = "java-records", "java-group"
    java(TOPICS, "--create", "--topic", topic)
    keyed = ("--property", "parse.key=true", "--property", "key.separator=:")
    java(f"{TOOLS}.ConsoleProducer", "--topic", topic, *keyed, stdin="a:one\nb:two\n")
    wanted = ("--topic", topic, "--group", group, "--from-beginning", "--max-messages", "2")
    read = java(f"{TOOLS}.consumer.ConsoleConsumer", *wanted, "--timeout-ms", "30000")
    assert {"one", "two"} <= set(read.splitlines())
    assert f"{topic}:0:2" in java(f"{TOOLS}.GetOffsetShell", "--topic", topic)
    assert group in java(GROUPS, "--list")
    assert group in java(f"{TOOLS}.GroupsCommand", "--list")
    (line,) = [
        one for one in java(GROUPS, "--describe", "--group", group).splitlines() if one.startswith(group)
    ]
    assert line.split()[1:6] == [topic, "0", "2", "2", "0"]
    assert "Empty" in java(GROUPS, "--describe", "--group", group, "--state")
    moved = ("--group", group, "--topic", topic, "--reset-offsets", "--to-earliest", "--execute")
    assert java(GROUPS, *moved).split()[-1] == "0"
    java(GROUPS, "--delete", "--group", group)
    assert group not in java(GROUPS, "--list")


@pytest.mark.row("A1")
def test_quotas(java: Java) -> None:
    rates = "producer_byte_rate=100000,consumer_byte_rate=200000"
    java(CONFIGS, "--alter", "--client", "loader", "--add-config", rates)
    java(CONFIGS, "--alter", "--client-defaults", "--add-config", "producer_byte_rate=300000")
    described = java(CONFIGS, "--describe", "--entity-type", "clients")
    assert "'loader'" in described
    assert "producer_byte_rate=100000.0" in described
    assert "producer_byte_rate=300000.0" in described
    assert "producer_byte_rate=100000" not in java(CONFIGS, "--describe", "--entity-type", "users")
    only = java(CONFIGS, "--describe", "--client", "loader")
    assert "300000" not in only
    refused = java(
        CONFIGS, "--alter", "--client", "loader", "--add-config", "request_percentage=50", code=None
    )
    assert "not offered" in refused
    names = "producer_byte_rate,consumer_byte_rate"
    java(CONFIGS, "--alter", "--client", "loader", "--delete-config", names)
    java(CONFIGS, "--alter", "--client-defaults", "--delete-config", "producer_byte_rate")
    assert "byte_rate" not in java(CONFIGS, "--describe", "--entity-type", "clients")


@pytest.mark.row("A1")
def test_what_else_administrators_ask(java: Java) -> None:
    topic = "java-others"
    java(TOPICS, "--create", "--topic", topic)
    java(f"{TOOLS}.ConsoleProducer", "--topic", topic, stdin="one\n")
    sizes = java(f"{TOOLS}.LogDirsCommand", "--describe", "--topic-list", topic)
    assert f'"partition":"{topic}-0"' in sizes
    assert "No authorizer is configured" in java(f"{TOOLS}.AclCommand", "--list", code=None)
    elected = java(
        f"{TOOLS}.LeaderElectionCommand", "--election-type", "preferred", "--all-topic-partitions", code=None
    )
    assert "Exception" not in elected
    assert "TransactionalId" in java(TRANSACTIONS, "list")
    producers = java(TRANSACTIONS, "describe-producers", "--topic", topic, "--partition", "0")
    assert "ProducerId" in producers
    assert len(producers.strip().splitlines()) == 2, producers
    assert "No partition reassignments found" in java(f"{TOOLS}.reassign.ReassignPartitionsCommand", "--list")
    versions = java(f"{TOOLS}.BrokerApiVersionsCommand")
    assert "DescribeTopicPartitions(75): 0" in versions
    assert "DescribeClientQuotas(48): 0 to 1" in versions
