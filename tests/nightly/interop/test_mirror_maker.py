"""MirrorMaker 2 of Kafka 4 between two Mansio brokers: records, settings and group offsets arrive, also after a kill.

Nightly: needs Java and Maven. The configuration is that of docs/reference/compatibility.md, with short intervals.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.types import OutgoingRecord
from nightly.interop.java_client import fetched
from support.machine import scaled
from support.process import served
from support.waiting import wait_until
from system.interop.conftest import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.client.types import Message
    from support.process import ServedBroker

pytestmark = pytest.mark.timeout(1200)

MAIN = "org.apache.kafka.connect.mirror.MirrorMaker"
QUICK_JVM = ("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
DEADLINE_S = 180.0
"""Longer than the session timeout of Connect's group, for which the tasks of a killed process wait."""
CONFIG = """
clusters = a, b
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
sync.group.offsets.interval.seconds = 2
emit.checkpoints.interval.seconds = 2
refresh.topics.interval.seconds = 2
refresh.groups.interval.seconds = 2
"""


@pytest.fixture(scope="module")
def jars() -> Path:
    """The jars of MirrorMaker, fetched once."""
    return fetched("mirror_maker")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[ServedBroker, ServedBroker]]:
    with (
        served(tmp_path / "a", arguments=ARGUMENTS, http=False) as source,
        served(tmp_path / "b", arguments=ARGUMENTS, http=False) as target,
    ):
        yield source, target


def publish(broker: ServedBroker, begin: int, end: int) -> None:
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        records = [
            OutgoingRecord(b"%d" % n, key=b"k%d" % (n % 7), headers=(("n", b"%d" % n),))
            for n in range(begin, end)
        ]
        client.publish_many("orders", records)


def contents(broker: ServedBroker, topic: str) -> list[Message]:
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        if topic not in client.admin.list_topics():
            return []
        with client.consume(topic, to_end=True) as consumer:
            return sorted(consumer, key=lambda message: (message.partition, message.offset))


def test_mirror_maker_copies_records_settings_and_group_offsets_also_after_a_kill(
    jars: Path, brokers: tuple[ServedBroker, ServedBroker], tmp_path: Path
) -> None:
    source, target = brokers
    config = tmp_path / "mm2.properties"
    addresses = f"a.bootstrap.servers = {source.bootstrap_servers}\nb.bootstrap.servers = {target.bootstrap_servers}\n"
    config.write_text(CONFIG + addresses)
    with mansio.blocking.connect(source.bootstrap_servers) as client:
        client.admin.create_topic("orders", partitions=3, config={"retention.ms": "7200000"})
    publish(source, 0, 100)
    with (
        mansio.blocking.connect(source.bootstrap_servers) as client,
        client.consume("orders", group="billing", from_="earliest", to_end=True) as consumer,
    ):
        assert len(list(consumer)) == 100
        consumer.commit()

    def start() -> subprocess.Popen[bytes]:
        with open(tmp_path / "mm2.log", "ab") as log:
            command = ["java", *QUICK_JVM, "-cp", f"{jars}/*", MAIN, str(config)]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def committed() -> int:
        with mansio.blocking.connect(target.bootstrap_servers) as client:
            offsets = client.admin.group_offsets("billing")
        return sum(offset.offset for place, offset in offsets.items() if place.topic == "a.orders")

    mirror = start()
    try:
        wait_until(lambda: len(contents(target, "a.orders")) >= 100, DEADLINE_S)
        copied = [
            (one.partition, one.offset, one.timestamp_ms, one.key, one.value, one.headers)
            for one in contents(target, "a.orders")
        ]
        assert copied == [
            (one.partition, one.offset, one.timestamp_ms, one.key, one.value, one.headers)
            for one in contents(source, "orders")
        ]
        with mansio.blocking.connect(target.bootstrap_servers) as client:
            assert client.admin.describe_config("a.orders")["retention.ms"].value == "7200000"
        publish(source, 100, 110)
        wait_until(lambda: committed() > 0, DEADLINE_S, "the group's offsets are translated")
        assert committed() <= 100, "never beyond what the group has read; MirrorMaker may round down"
        mirror.kill()
        mirror.wait(scaled(DEADLINE_S))
        publish(source, 110, 120)
        mirror = start()
        wait_until(
            lambda: {one.value for one in contents(target, "a.orders")} == {b"%d" % n for n in range(120)},
            DEADLINE_S,
        )
    finally:
        mirror.kill()
        mirror.wait(scaled(DEADLINE_S))
