"""A killed broker starts on a full disk, with a torn or damaged end of a log.

Either the partition is served with all acknowledged records, or it is refused with the error until there is space;
nothing is destroyed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.storage.recovery.quarantine import parse_quarantine_name
from mansio.wire.batch.record_batch import iterate_batches
from support.process import served
from support.raw_peer import RawPeer, batch_of
from support.small_disk import SmallDisk
from support.waiting import wait_until
from system.crash.test_real_faults import (
    DEADLINE_S,
    DISK_BYTES,
    KAFKA_STORAGE_ERROR,
    end_offset_and_values,
    ready,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

BEFORE, AFTER = 5, 8
VALUE_BYTES = 30_000


def partition_of(disk: SmallDisk, topic: str) -> Path:
    (directory,) = (disk.outside / "data" / "topics").glob(f"{topic}.*/0")
    return directory


def value(number: int) -> bytes:
    return bytes([number + 1]) * VALUE_BYTES


@pytest.mark.parametrize("behind", [False, True], ids=["torn tail", "whole batches behind damage"])
@pytest.mark.row("L5", "L10")
def test_killed_broker_starts_on_a_full_disk_without_destroying_what_was_acknowledged(
    tmp_path: Path, behind: bool
) -> None:
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        served(disk.path / "data", command=disk.command) as broker,
    ):
        with RawPeer(broker.kafka_port) as peer:
            for topic in ("t", "other"):
                peer.create_topic(topic)
                for number in range(BEFORE):
                    assert peer.produce(topic, batch_of(value(number))).error_code == 0
        assert broker.stop() == 0
        checkpoint = (partition_of(disk, "t") / "checkpoint").read_bytes()
        broker.start()
        with RawPeer(broker.kafka_port) as peer:
            for number in range(BEFORE, BEFORE + AFTER):
                assert peer.produce("t", batch_of(value(number))).error_code == 0
        broker.kill()
        directory = partition_of(disk, "t")
        (segment,) = directory.glob("*.log")
        content = bytearray(segment.read_bytes())
        batches = list(iterate_batches(bytes(content).rstrip(b"\0") + b"\0"))
        assert len(batches) == BEFORE + AFTER
        if behind:  # the checkpoint is one of the last second, as after a power loss
            (directory / "checkpoint").write_bytes(checkpoint)
            content[batches[BEFORE + 2][0] + 1000] ^= 1
        else:
            end = batches[-1][0] + batches[-1][1].size
            content[end : end + VALUE_BYTES // 2] = content[: VALUE_BYTES // 2]
        segment.write_bytes(content)
        disk.fill()
        broker.start()
        with RawPeer(broker.kafka_port) as peer:
            assert len(end_offset_and_values(peer, "other")) == BEFORE
            refused = peer.produce("t", batch_of(b"x")).error_code
            if behind:
                assert refused == KAFKA_STORAGE_ERROR
                assert "nothing was truncated" in broker.text()
                assert ready(broker)[0] == 503
                assert segment.read_bytes() == content
            else:
                values = end_offset_and_values(peer, "t")
                assert all(value(number) in values[number] for number in range(BEFORE + AFTER))
                assert len(values) == BEFORE + AFTER + (not refused)
        broker.kill()
        disk.free()
        broker.start()
        with RawPeer(broker.kafka_port) as peer:
            wait_until(lambda: ready(broker)[0] == 200, DEADLINE_S, "the broker is ready")
            kept = BEFORE + 2 if behind else BEFORE + AFTER
            values = end_offset_and_values(peer, "t")
            assert all(value(number) in values[number] for number in range(kept))
            assert peer.produce("t", batch_of(b"after")).error_code == 0
        files = [path for path in directory.iterdir() if parse_quarantine_name(path.name)]
        assert len(files) == behind
        if behind:
            data = files[0].read_bytes()
            assert all(value(number) in data for number in range(BEFORE + 3, BEFORE + AFTER))
            assert "ERROR log_truncated" in broker.text()
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
