"""`mansio.spark.mirror` from Apache Kafka to Mansio and back: each record once, and groups continue.

Nightly: needs a JDK and Maven.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

import mansio
from mansio.client.types import OutgoingRecord, TopicPartition
from mansio.errors import MansioError
from mansio.pipelines.mirroring.mirror import MirrorJob, mirror, translate_offsets
from mansio.pipelines.mirroring.passed_clusters import CLUSTER_HEADER
from mansio.spark.sync_client import close_sync_clients
from nightly.interop.java_client import QUICK_JVM, fetched
from support.machine import scaled
from support.paths import free_port
from support.process import ServedBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

DEADLINE_S = 120.0
PARTITIONS, RECORDS = 3, 600
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[str]:
    """The address of a broker of Apache Kafka."""
    jars, directory, port = fetched("kafka_broker"), tmp_path / "kafka", free_port()
    directory.mkdir()
    properties = directory / "server.properties"
    properties.write_text(PROPERTIES.format(port=port, controller_port=free_port(), directory=directory))
    run = ["java", *QUICK_JVM, "-cp", f"{jars}/*"]
    words = ["format", "-t", uuid4().hex[:22], "-c", str(properties)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": directory}
    subprocess.run([*run, "kafka.tools.StorageTool", *words], check=True, timeout=scaled(DEADLINE_S), **quiet)
    process = subprocess.Popen([*run, "kafka.Kafka", str(properties)], **quiet)
    address = f"127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with mansio.blocking.connect(address) as client:
                client.admin.list_topics()
        except MansioError:
            assert process.poll() is None
            return False
        return True

    try:
        wait_until(answers, DEADLINE_S, "Kafka answers")
        yield address
    finally:
        close_sync_clients()
        process.kill()
        process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    started = ServedBroker(tmp_path / "mansio" / "data", http=False)
    try:
        yield started.start().bootstrap_servers
    finally:
        started.kill()


def contents(servers: str, topic: str) -> list[Any]:
    with mansio.blocking.connect(servers) as client, client.consume(topic, to_end=True) as consumer:
        messages = sorted(consumer, key=lambda message: (message.partition, message.offset))
    return [
        (
            one.partition,
            one.timestamp_ms,
            one.key,
            one.value,
            [header for header in one.headers if header[0] != CLUSTER_HEADER],
        )
        for one in messages
    ]


@pytest.mark.row("S10", "C7")
def test_mirrors_between_kafka_and_mansio_copy_each_record_once(kafka: str, broker: str) -> None:
    for topic, source, target in (("orders", kafka, broker), ("bills", broker, kafka)):
        job = MirrorJob((topic,), source, target, name=f"mirror-{topic}", stops_when_caught_up=True)
        place = TopicPartition(topic, 0)
        with mansio.blocking.connect(source) as client:
            client.admin.create_topic(topic, partitions=PARTITIONS, config={"retention.ms": "7200000"})
            for begin in (0, RECORDS):
                client.publish_many(
                    topic,
                    [
                        OutgoingRecord(
                            b"%d" % n, key=b"k%d" % n, headers=(("n", b"1"),), partition=n % PARTITIONS
                        )
                        for n in range(begin, begin + RECORDS)
                    ],
                )
                client.admin.reset_offsets("billing", [place], to=begin // 2 + 50)
                assert mirror(job).records == RECORDS
        assert mirror(replace(job, commits_on_source=False)).records == 0
        wait_until(
            lambda s=source, t=target, n=topic: contents(t, n) == contents(s, n), what="the same records"
        )
        with mansio.blocking.connect(target) as client:
            assert client.admin.describe_config(topic)["retention.ms"].value == "7200000"
            committed = client.admin.group_offsets("billing")[place].offset
        assert committed == translate_offsets(job, {place: RECORDS // 2 + 50})[place] == RECORDS // 2 + 50 + 1
    assert mirror(replace(job, source_servers=kafka, target_servers=broker)).records == 0, (
        "they come from there"
    )
