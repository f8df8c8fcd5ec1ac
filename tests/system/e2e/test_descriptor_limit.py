"""A broker with few file descriptors serves more partitions than it has descriptors, and refuses what is beyond."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest

import mansio
from mansio import errors
from support.machine import scaled
from support.paths import mansio_command
from support.process import ServedBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

DESCRIPTORS = 256
TIMEOUT_S = 60


def limited_broker(directory: Path) -> ServedBroker:
    """A broker process whose soft and hard limit is `DESCRIPTORS`."""
    command = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *mansio_command()]
    return ServedBroker(directory / "data", command=command)


def assert_ready(broker: ServedBroker) -> None:
    answer = httpx.get(f"{broker.http_url}/health/ready", timeout=scaled(TIMEOUT_S)).json()
    assert not [each for each in answer["reasons"] if each["reason"] != "event_loop_stalled"], answer


def open_descriptors(broker: ServedBroker) -> int:
    from pathlib import Path

    return sum(1 for _ in Path(f"/proc/{broker.pid}/fd").iterdir())


@pytest.mark.full
def test_more_partitions_than_descriptors_are_written_restarted_and_read(tmp_path: Path) -> None:
    topics = [f"t{number}" for number in range(12)]
    partitions = 40  # of each: 480 in all
    broker = limited_broker(tmp_path)
    for start in range(2):
        broker.start()
        try:
            with mansio.blocking.connect(broker.bootstrap_servers) as client:
                for topic in topics:
                    if start == 0:
                        client.admin.create_topic(topic, partitions=partitions)
                for round_ in range(2):
                    for topic in topics:
                        for partition in range(partitions):
                            client.publish(topic, b"%d-%d" % (start, round_), partition=partition)
                for topic in topics:
                    ends = client.admin.list_offsets(
                        [mansio.TopicPartition(topic, each) for each in range(partitions)], "latest"
                    )
                    assert {each.offset for each in ends.values()} == {2 * (start + 1)}
            assert open_descriptors(broker) < DESCRIPTORS
            assert_ready(broker)
        finally:
            broker.stop()
    assert "log_failed" not in broker.text()
    assert "Too many open files" not in broker.text()


@pytest.mark.full
def test_partitions_beyond_the_limit_of_descriptors_are_refused_with_the_numbers(tmp_path: Path) -> None:
    broker = limited_broker(tmp_path)
    broker.start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("small", partitions=1)
            with pytest.raises(
                errors.PolicyViolation, match=r"2000 more partitions: there are \d+, .*allows 1152"
            ):
                client.admin.create_topic("large", partitions=2000)
            with pytest.raises(errors.PolicyViolation, match="limit of file descriptors"):
                client.admin.create_partitions("small", 1500)
            client.publish("small", b"served")
    finally:
        broker.stop()


@pytest.mark.full
def test_connections_of_every_client_leave_descriptors_for_logs(tmp_path: Path) -> None:
    """As many idle connections as the listeners accept, on both protocols: new topics and segments can be written."""
    broker = limited_broker(tmp_path)
    broker.start()
    try:
        with ExitStack() as stack, mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("first", partitions=1)
            client.publish("first", b"served")
            for _ in range(DESCRIPTORS):
                for port in (broker.kafka_port, broker.http_port):
                    idle = stack.enter_context(socket.socket())
                    idle.settimeout(scaled(TIMEOUT_S))
                    idle.connect(("127.0.0.1", port))
            for number in range(30):
                client.admin.create_topic(f"t{number}", partitions=4)
                client.publish(f"t{number}", b"served")
            assert wait_until(lambda: open_descriptors(broker) < DESCRIPTORS, scaled(30), "free descriptors")
        assert_ready(broker)
        assert "log_failed" not in broker.text()
    finally:
        broker.stop()
