"""A running broker verifies stored batches before their first delivery, and its scrubber finds later damage."""

from __future__ import annotations

import contextlib
import errno
import os
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import CorruptMessage
from mansio.state.share_partition.acquisition import READ_RANGES_MAX
from mansio.testing.broker import TestBroker
from mansio.wire.batch.record_batch import HEADER_BYTES, iterate_batches
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "stored"
SETTINGS: dict[str, Any] = {"log_scrub_interval_ms": 200, "log_scrub_io_max_bytes_per_second": 1 << 30}
COUNT = 40


def segments(data: Path) -> list[Path]:
    return sorted(data.glob(f"topics/{TOPIC}.*/0/*.log"))


def flip(path: Path, batch: int) -> int:
    """Flip a bit of the value in one batch; its offset."""
    content = bytearray(path.read_bytes())
    position, header = list(iterate_batches(content))[batch]
    with path.open("r+b") as file:
        file.seek(position + HEADER_BYTES + 20)
        file.write(bytes([content[position + HEADER_BYTES + 20] ^ 4]))
    return header.base_offset


def write(client: mansio.blocking.Client) -> None:
    client.admin.create_topic(TOPIC, partitions=1, config={"segment.bytes": "4000"})
    for number in range(COUNT):
        client.publish(TOPIC, b"value-%03d" % number * 40, partition=0)


def read_from(client: mansio.blocking.Client, offset: int, count: int) -> list[int]:
    where = mansio.TopicPartition(TOPIC, 0)
    found = []
    for message in client.consume([where], from_=offset, max_records=count):
        assert message.value == b"value-%03d" % message.offset * 40
        found.append(message.offset)
    return found


def test_scrub_finds_a_flip_after_verification_and_readers_get_an_error_from_then_on(tmp_path: Path) -> None:
    with (
        mansio.Broker(tmp_path, **SETTINGS) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        write(client)
        assert read_from(client, 0, COUNT) == list(range(COUNT))
        scrubber = present(broker._broker).service.log_scrubber
        bad = flip(segments(tmp_path)[1], 3)
        wait_until(lambda: scrubber.counts.damaged_ranges > 0)
        assert present(broker._broker).service.partitions.storage_health.damaged[TOPIC, 0].offset == bad
        assert read_from(client, 0, bad) == list(range(bad))
        with pytest.raises(CorruptMessage, match=f"at offset {bad}"):
            read_from(client, bad, 1)
        assert read_from(client, bad + 1, COUNT - bad - 1) == list(range(bad + 1, COUNT))


def test_scrub_of_intact_logs_reports_nothing_and_counts_what_it_read(tmp_path: Path) -> None:
    with (
        mansio.Broker(tmp_path, **SETTINGS) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        write(client)
        service = present(broker._broker).service
        rounds = service.log_scrubber.counts.rounds
        wait_until(lambda: service.log_scrubber.counts.rounds >= rounds + 2)
        assert service.log_scrubber.counts.damaged_ranges == 0
        assert service.log_scrubber.counts.read_bytes >= sum(
            path.stat().st_size for path in segments(tmp_path)[:-1]
        )
        assert not service.partitions.storage_health.damaged


def test_large_batches_are_verified_off_the_event_loop_while_the_fetch_waits(tmp_path: Path) -> None:
    big = b"x" * (3 << 20)
    config = {"max.message.bytes": str(8 << 20)}
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(TOPIC, partitions=1, config=config)
        for _ in range(3):
            client.publish(TOPIC, big, partition=0)
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        where = mansio.TopicPartition(TOPIC, 0)
        assert [m.value == big for m in client.consume([where], from_=0, max_records=3)] == [True] * 3
        verifier = present(broker._broker).service.partitions.verifier
        assert verifier.checked_bytes >= 3 * len(big)
        checked = verifier.checked_bytes
        assert [m.value == big for m in client.consume([where], from_=0, max_records=3)] == [True] * 3
        assert verifier.checked_bytes == checked


def test_share_group_passes_over_more_damaged_ranges_than_it_reads_at_once(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        write(client)
    bad = {flip(path, batch) for path in segments(tmp_path)[:3] for batch in (0, 2, 4, 6)}
    assert len(bad) > READ_RANGES_MAX
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        found: set[int] = set()

        def received() -> bool:
            with contextlib.suppress(CorruptMessage):
                messages = receiver.poll(timeout_ms=100)
                found.update(message.offset for message in messages)
                receiver.ack(messages)
            return len(found) == COUNT - len(bad)

        with client.receive(TOPIC, group="g") as receiver:
            wait_until(received)
        assert found == set(range(COUNT)) - bad


@pytest.mark.full
def test_end_of_a_segment_that_was_closed_and_has_to_be_verified_again_is_no_damage() -> None:
    with TestBroker() as broker, broker.client() as client:
        client.admin.create_topic(TOPIC, partitions=1, config={"retention.ms": "-1"})
        client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        with client.receive(TOPIC, group="g") as receiver:
            for number in range(3):
                client.publish(TOPIC, b"%d" % number)
                found: list[bytes | None] = []

                def received(found: list[bytes | None] = found) -> bool:
                    messages = receiver.poll(timeout_ms=100)
                    receiver.ack(messages)
                    found += [message.value for message in messages]
                    return bool(found)

                wait_until(received)
                assert found == [b"%d" % number]
                broker.clock.advance(days=8)  # the next record begins a segment


@pytest.mark.parametrize("size", [400, 100_000], ids=["small", "large"])
def test_part_that_the_disk_cannot_read_when_it_is_sent_is_reported_and_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    failing: list[int] = []

    def once(true: Any) -> Any:
        def call(descriptor: int, *arguments: Any) -> Any:
            callers = [frame.name for frame in traceback.extract_stack(limit=8)] if failing else ()
            if "_send_waiting_parts" in callers or "_enqueue" in callers:
                failing.pop()
                raise OSError(errno.EIO, "Input/output error")
            return true(descriptor, *arguments)

        return call

    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(TOPIC, partitions=1)
        client.publish(TOPIC, b"x" * size, partition=0)
        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, once(getattr(os, name)))
        where = mansio.TopicPartition(TOPIC, 0)
        health = present(broker._broker).service.partitions.storage_health
        failing.append(1)
        with contextlib.suppress(mansio.MansioError):
            list(client.consume([where], from_=0, max_records=1))
        wait_until(lambda: not failing and health.damaged)
        assert health.damaged[TOPIC, 0].offset == 0
        assert "Input/output error" in health.damaged[TOPIC, 0].reason
        (found,) = client.consume([where], from_=0, max_records=1)
        assert found.value == b"x" * size
