"""Record batches: golden bytes, rules of a valid batch, compatibility with other clients."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from crc32c import crc32c

from mansio.errors import (
    CorruptMessage,
    InvalidRecord,
    UnsupportedCompression,
    UnsupportedMessageFormat,
)
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    TimestampType,
    build_batch,
    check_batch,
    iterate_batches,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import read_records
from unit.wire.kafka_python_codec import kafka_records

PLENTY = 1 << 20
NOW = 1_700_000_000_000
ROWS: list[Any] = [
    (NOW, b"key", b"value", []),
    (NOW + 5, None, b"", [("a", b"1"), ("a", None), ("\u00fc", b"")]),
    (NOW - 7, b"", None, []),
    (NOW + 100_000, b"k" * 200, b"v" * 70_000, []),
]
every_codec = pytest.mark.parametrize("codec", Codec)

# Written by kafka-python 3.0.12 (base offset and leader epoch set afterwards).
GOLDEN = bytes.fromhex(
    "00000000000000070000004200000003028209e4600000000000010000000000001388000000000000138a"
    "ffffffffffffffffffffffffffff00000002"
    "12000000026b047631000c000402010100"
)


def patched(batch: bytes, position: int, layout: str, *values: int) -> bytes:
    """The batch with some header fields changed and the checksum made right again."""
    out = bytearray(batch)
    struct.pack_into(layout, out, position, *values)
    struct.pack_into(">I", out, 17, crc32c(out[21:]))
    return bytes(out)


def rows(records: list[Any]) -> list[Any]:
    return [(r.timestamp_ms, r.key, r.value, list(r.headers)) for r in records]


@every_codec
def test_round_trip(codec: Codec) -> None:
    batch = build_batch(
        ROWS,
        codec=codec,
        base_offset=1 << 40,
        leader_epoch=7,
        producer_id=12,
        producer_epoch=3,
        base_sequence=9,
        transactional=True,
    )
    header = check_batch(memoryview(bytearray(batch)))
    assert header == read_header(b"xyz" + batch, 3)
    assert (header.size, header.codec, header.leader_epoch) == (len(batch), codec, 7)
    assert (header.base_offset, header.last_offset, header.record_count) == (1 << 40, (1 << 40) + 3, 4)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (12, 3, 9)
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (NOW, NOW + 100_000)
    assert header.timestamp_type == TimestampType.CREATE
    assert header.is_transactional
    assert not header.is_control
    records = read_records(memoryview(bytearray(batch)), output_bytes_max=PLENTY)
    assert rows(records) == ROWS
    assert [record.offset - (1 << 40) for record in records] == [0, 1, 2, 3]


@every_codec
def test_aiokafka_decodes_our_batches(codec: Codec) -> None:
    batch = AioBatch(build_batch(ROWS, codec=codec, base_offset=40))
    assert batch.validate_crc()
    assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in batch] == ROWS


@every_codec
def test_kafka_python_decodes_our_batches(codec: Codec) -> None:
    batch = kafka_records.DefaultRecordBatch(build_batch(ROWS, codec=codec, base_offset=40))
    assert batch.validate_crc()
    assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in batch] == ROWS


@every_codec
@pytest.mark.parametrize("client", ["aiokafka", "kafka-python"])
def test_batches_of_other_clients_are_decoded(codec: Codec, client: str) -> None:
    kind = AioBuilder if client == "aiokafka" else kafka_records.DefaultRecordBatchBuilder
    builder = kind(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=5,
        producer_epoch=1,
        base_sequence=0,
        batch_size=PLENTY,
    )
    for delta, (timestamp, key, value, headers) in enumerate(ROWS):
        builder.append(delta, timestamp, key, value, headers)
    batch = bytes(builder.build())
    assert check_batch(batch).codec == codec
    assert rows(read_records(batch, output_bytes_max=PLENTY)) == ROWS


def test_golden_bytes() -> None:
    records: list[Any] = [(5000, b"k", b"v1", []), (5002, None, None, [])]
    batch = build_batch(records, base_offset=7, leader_epoch=3)
    assert batch.hex() == GOLDEN.hex()


def test_base_offset_and_leader_epoch_are_outside_the_checksum() -> None:
    batch = bytearray(build_batch(ROWS))
    struct.pack_into(">q", batch, 0, 123_456)
    struct.pack_into(">i", batch, 12, 42)
    header = check_batch(batch)
    assert (header.base_offset, header.leader_epoch) == (123_456, 42)


@pytest.mark.parametrize("position", [17, 21, 30, 50, 61, 80, -1])
def test_flipped_bit_is_corrupt(position: int) -> None:
    batch = bytearray(build_batch(ROWS))
    batch[position] ^= 0x10
    with pytest.raises(CorruptMessage):
        check_batch(batch)


@pytest.mark.parametrize("change", [b"", b"x"])
def test_wrong_length_is_corrupt(change: bytes) -> None:
    batch = build_batch(ROWS)
    with pytest.raises(CorruptMessage):
        check_batch(batch[: -1 if not change else None] + change)
    with pytest.raises(CorruptMessage):
        check_batch(batch[: HEADER_BYTES - 1])
    with pytest.raises(CorruptMessage):
        check_batch(b"")


def test_second_batch_is_a_non_retriable_error() -> None:
    batch = build_batch(ROWS)
    with pytest.raises(InvalidRecord, match="more than one batch"):
        check_batch(batch + batch)
    with pytest.raises(CorruptMessage):
        check_batch(batch[:-1] + b"x" + batch)


@pytest.mark.parametrize("magic", [0, 1, 3])
def test_error_names_other_message_formats(magic: int) -> None:
    batch = bytearray(build_batch(ROWS))
    batch[16] = magic
    with pytest.raises(UnsupportedMessageFormat):
        check_batch(batch)
    with pytest.raises(UnsupportedMessageFormat):
        check_batch(batch[:20])
    with pytest.raises(UnsupportedMessageFormat):
        list(iterate_batches(batch))


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_unknown_codec_is_refused(codec: int) -> None:
    with pytest.raises(UnsupportedCompression):
        check_batch(patched(build_batch(ROWS), 21, ">h", codec))


@pytest.mark.parametrize(("delta", "count"), [(3, 5), (4, 4), (-1, 0), (-2, -1), (3, -4), (3, 0)])
def test_inconsistent_counts_are_invalid(delta: int, count: int) -> None:
    batch = patched(patched(build_batch(ROWS), 23, ">i", delta), 57, ">i", count)
    with pytest.raises(InvalidRecord):
        check_batch(batch)


def test_idempotent_batch_needs_a_sequence_and_a_transaction_a_producer() -> None:
    with pytest.raises(InvalidRecord):
        check_batch(build_batch(ROWS, producer_id=1, producer_epoch=0, base_sequence=-1))
    with pytest.raises(InvalidRecord):
        check_batch(build_batch(ROWS, transactional=True))
    assert check_batch(build_batch(ROWS, producer_id=1, producer_epoch=0, control=True)).is_control


@every_codec
def test_log_append_time_does_not_change_the_records(codec: Codec) -> None:
    batch = build_batch(ROWS, codec=codec)
    front = with_log_append_time(memoryview(batch), check_batch(batch), NOW + 99)
    assert len(front) == HEADER_BYTES
    stamped = front + batch[HEADER_BYTES:]
    header = check_batch(stamped)
    assert header.timestamp_type == TimestampType.LOG_APPEND
    assert header.max_timestamp_ms == NOW + 99
    assert header.codec == codec
    assert {r.timestamp_ms for r in read_records(stamped, output_bytes_max=PLENTY)} == {NOW + 99}
    assert {r.timestamp for r in AioBatch(stamped)} == {NOW + 99}


def test_iteration_ends_before_an_incomplete_batch() -> None:
    one, two = build_batch(ROWS[:1]), build_batch(ROWS, base_offset=1)
    both = one + two
    assert [(position, header.base_offset) for position, header in iterate_batches(both)] == [
        (0, 0),
        (len(one), 1),
    ]
    for cut in (1, len(two) - HEADER_BYTES, len(two) - 5):
        assert [position for position, _ in iterate_batches(memoryview(both[:-cut]))] == [0]
    assert [position for position, _ in iterate_batches(both, len(one))] == [len(one)]
    assert list(iterate_batches(b"")) == []


def test_iteration_refuses_a_length_that_would_not_advance() -> None:
    batch = bytearray(build_batch(ROWS))
    for length in (-12, 0, 48):
        struct.pack_into(">i", batch, 8, length)
        with pytest.raises(CorruptMessage):
            list(iterate_batches(batch))


BAD_RECORDS = {
    "shorter than a record can be": "0a0000000101",
    "longer than the batch": "7e00000002610261000000",
    "a key longer than the batch": "10000000fe7f610161000000",
    "a negative length that is not null": "0e000000030101000000",
    "a negative count of headers": "0c000000010101",
    "more headers than bytes": "0c00000001017e",
    "bytes after its end": "0c00000001010000",
    "bytes within it that nothing explains": "0e00000001010000",
    "an offset beyond the batch": "0c000002010100",
    "a negative offset": "0c000001010100",
    "a header without a name": "1200000001010201 0000".replace(" ", ""),
    "a header name that is not UTF-8": "1200000001010202ff01",
    "an endless number": "0cffffffffffffffffffffffff",
}


@pytest.mark.parametrize("body", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_inconsistent_record_is_invalid(body: str) -> None:
    good = build_batch([(0, None, None, [])])
    batch = good[:HEADER_BYTES] + bytes.fromhex(body)
    batch = patched(batch, 8, ">i", len(batch) - 12)
    with pytest.raises(InvalidRecord):
        read_records(batch, output_bytes_max=PLENTY)


def test_compacted_batch_with_gaps_keeps_its_offsets() -> None:
    parts = [build_batch(ROWS[:1], base_offset=0)[HEADER_BYTES:], bytes.fromhex("0c000008010100")]
    batch = build_batch(ROWS[:2], base_offset=10)[:HEADER_BYTES] + b"".join(parts)
    batch = patched(patched(batch, 8, ">i", len(batch) - 12), 23, ">i", 6)
    assert [record.offset for record in read_records(batch, output_bytes_max=PLENTY)] == [10, 14]


@every_codec
def test_impossible_record_count_is_refused_before_decompression(codec: Codec) -> None:
    """Its offsets would be given out: two of them would fill a segment's range."""
    batch = patched(patched(build_batch(ROWS[:1], codec=codec), 57, ">i", 2**31 - 1), 23, ">i", 2**31 - 2)
    with pytest.raises(InvalidRecord):
        check_batch(batch)
    with pytest.raises(InvalidRecord):
        read_records(batch, output_bytes_max=PLENTY)


@every_codec
def test_batch_above_the_decompressed_limit_is_invalid(codec: Codec) -> None:
    batch = build_batch([(0, None, bytes(100_000), [])], codec=codec)
    with pytest.raises(InvalidRecord):
        read_records(batch, output_bytes_max=100_000)
    assert len(read_records(batch, output_bytes_max=100_100)) == 1


@every_codec
def test_hundred_thousand_empty_records_are_accepted(codec: Codec) -> None:
    batch = build_batch([(0, None, None, [])] * 100_000, codec=codec)
    assert check_batch(batch).record_count == 100_000


def test_empty_batch_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_batch([])
