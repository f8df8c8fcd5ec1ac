"""End markers of transactions have Kafka's format, and no other control batch is taken for one."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from mansio.errors import CorruptMessage
from mansio.wire.batch.control_records import control_key, encode_control_batch
from mansio.wire.batch.end_marker import EndMarker, decode_end_marker, encode_end_marker
from mansio.wire.batch.record_batch import build_batch, check_batch, encode_batch, read_header
from mansio.wire.batch.record_reader import read_records


@pytest.mark.parametrize("is_commit", [False, True])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (2**62, 32_767, 2**31 - 1), (5, 1, -1)])
def test_a_marker_is_read_as_it_was_written(numbers: tuple[int, int, int], *, is_commit: bool) -> None:
    producer_id, epoch, coordinator_epoch = numbers
    marker = EndMarker(producer_id, epoch, is_commit, coordinator_epoch)
    batch = encode_end_marker(marker, 1_700_000_000_000)
    check_batch(batch)
    assert decode_end_marker(batch) == decode_end_marker(memoryview(batch)) == marker


def test_key_value_and_header_are_those_of_kafka() -> None:
    batch = encode_end_marker(EndMarker(9, 3, True, 7), 1_700_000_000_000)
    header = read_header(batch)
    assert (header.attributes, header.base_offset, header.base_sequence) == (0x30, 0, -1)
    assert (header.producer_id, header.producer_epoch) == (9, 3)
    [record] = read_records(batch, output_bytes_max=1000)
    assert (record.key, record.value) == (struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 7))
    assert record.timestamp_ms == 1_700_000_000_000
    aborted = read_records(encode_end_marker(EndMarker(9, 3, False, 7), 0), output_bytes_max=1000)
    assert aborted[0].key == struct.pack(">hh", 0, 0)


def test_other_batches_are_no_markers() -> None:
    marker = encode_end_marker(EndMarker(9, 3, True, 7), 0)
    empty = encode_batch(read_header(marker)._replace(record_count=0), b"")
    data = build_batch([(0, control_key(1), b"\0" * 6, ())], producer_id=9, producer_epoch=0, base_sequence=0)
    for other in (encode_control_batch(20_001, b"\0" * 6), encode_control_batch(2, b"\0" * 6), empty, data):
        assert decode_end_marker(other) is None


def test_a_marker_without_a_coordinator_epoch_is_damaged() -> None:
    identity: dict[str, Any] = {"producer_id": 9, "producer_epoch": 0, "transactional": True, "control": True}
    with pytest.raises(CorruptMessage):
        decode_end_marker(build_batch([(0, control_key(1), b"\0" * 5, ())], **identity))
