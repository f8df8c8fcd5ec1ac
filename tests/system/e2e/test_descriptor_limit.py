"""A broker with few file descriptors serves more partitions than it has descriptors, and refuses what is beyond."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest

import mansio
from mansio import errors
from mansio.wire.apis import produce
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.field_values import ACKS_ALL
from support.machine import scaled
from support.paths import mansio_command
from support.process import ServedBroker
from support.raw_peer import RawPeer, produce_frame
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DESCRIPTORS = 256
USUAL_DESCRIPTORS = 1024
TIMEOUT_S = 60


def limited_broker(
    directory: Path, descriptors: int = DESCRIPTORS, environment: Mapping[str, str] | None = None
) -> ServedBroker:
    """A broker process whose soft and hard limit is `descriptors`."""
    command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *mansio_command()]
    return ServedBroker(directory / "data", command=command, environment=environment)


def assert_ready(broker: ServedBroker) -> None:
    answer = httpx.get(f"{broker.http_url}/health/ready", timeout=scaled(TIMEOUT_S)).json()
    assert not [each for each in answer["reasons"] if each["reason"] != "event_loop_stalled"], answer


def open_descriptors(broker: ServedBroker) -> int:
    from pathlib import Path

    return sum(1 for _ in Path(f"/proc/{broker.pid}/fd").iterdir())


def compactions(broker: ServedBroker) -> float:
    """Number of compactions that have succeeded."""
    metrics = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(TIMEOUT_S)).text
    name = "mansio_compaction_runs_total "
    return next(float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name))


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
def test_1500_partitions_with_1024_descriptors_take_a_batch_each_at_once_and_are_read_after_a_restart(
    tmp_path: Path,
) -> None:
    """Each request has a batch for every partition: as many files have unflushed records at the same time, and a flush
    needs descriptors itself."""
    partitions = 1500
    broker = limited_broker(tmp_path, USUAL_DESCRIPTORS)
    broker.start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client, RawPeer(broker.kafka_port) as peer:
            client.admin.create_topic("t", partitions=partitions)
            for number, acks in enumerate((ACKS_ALL, 1, ACKS_ALL)):
                batch = build_batch([(0, None, b"%d" % number, ())])
                batches = [(each, batch) for each in range(partitions)]
                timeout_ms = int(scaled(TIMEOUT_S) * 1000)
                peer.send(produce_frame([("t", None, batches)], acks=acks, timeout_ms=timeout_ms))
                answer = peer.frame(scaled(TIMEOUT_S))
                assert answer is not None
                ((_, _, results),) = produce.decode_response(9, answer).topics
                assert {each.error_code for each in results} == {0}
                assert {each.base_offset for each in results} == {number}
                assert open_descriptors(broker) < USUAL_DESCRIPTORS // 2
            client.publish("t", b"3", partition=7)  # on a new connection
        assert_ready(broker)
        broker.stop()
        broker.start()
        read: dict[int, list[bytes | None]] = {each: [] for each in range(partitions)}
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            for message in client.consume("t", from_="earliest", max_records=3 * partitions + 1):
                read[message.partition].append(message.value)
            assert read.pop(7) == [b"0", b"1", b"2", b"3"]
            assert all(values == [b"0", b"1", b"2"] for values in read.values())
            assert open_descriptors(broker) < USUAL_DESCRIPTORS // 2
        assert_ready(broker)
    finally:
        broker.stop()
    assert "log_failed" not in broker.text()
    assert "log_waits_for_descriptors" not in broker.text()
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


@pytest.mark.full
def test_1500_partitions_with_1024_descriptors_are_compacted_and_their_old_records_deleted(
    tmp_path: Path,
) -> None:
    """All records are in active segments: each partition has to begin a segment first, with two open files until it is
    flushed, while clients append."""
    old, compacted = 1480, 20
    checks = {"MANSIO_LOG_RETENTION_CHECK_INTERVAL_MS": "1000", "MANSIO_LOG_CLEANER_BACKOFF_MS": "1000"}
    broker = limited_broker(tmp_path, USUAL_DESCRIPTORS, checks)
    broker.start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client, RawPeer(broker.kafka_port) as peer:
            peer.create_topic("old", old, retention_ms="1000")
            peer.create_topic(
                "keys",
                compacted,
                cleanup_policy="compact",
                max_compaction_lag_ms="1",
                min_compaction_lag_ms="0",
            )
            client.admin.create_topic("hot", partitions=8)
            batch = build_batch([(0, b"key", b"first", ()), (1, b"key", b"last", ())])
            timeout_ms = int(scaled(TIMEOUT_S) * 1000)
            for topic, partitions in ("keys", compacted), ("old", old):
                batches = [(each, batch) for each in range(partitions)]
                peer.send(produce_frame([(topic, None, batches)], acks=ACKS_ALL, timeout_ms=timeout_ms))
                answer = peer.frame(scaled(TIMEOUT_S))
                assert answer is not None
                ((_, _, results),) = produce.decode_response(9, answer).topics
                assert {each.error_code for each in results} == {0}
            expired = [mansio.TopicPartition("old", each) for each in range(old)]

            def are_old_deleted() -> bool:
                for partition in range(8):
                    client.publish("hot", b"meanwhile", partition=partition)
                return all(
                    each.offset == 2 for each in client.admin.list_offsets(expired, "earliest").values()
                )

            assert wait_until(are_old_deleted, scaled(TIMEOUT_S), "deletion of what is old")
            assert wait_until(lambda: compactions(broker) >= compacted, scaled(TIMEOUT_S), "compaction")
            assert open_descriptors(broker) < USUAL_DESCRIPTORS // 2
            values = [each.value for each in client.consume("keys", from_="earliest", max_records=compacted)]
            assert values == [b"last"] * compacted
        assert_ready(broker)
        text = broker.text()
    finally:
        broker.stop()
    for line in ("ERROR", "log_failed", "log_waits_for_descriptors", "_postponed", "Too many open files"):
        assert line not in text, [each for each in text.splitlines() if line in each][:3]
