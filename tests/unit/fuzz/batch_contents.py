"""Batches with a valid CRC and any content, read by every decoder of batches: what each delivers, skips and reports."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.client import TopicPartition
from mansio.client.consumer.batch_decoder import decode_fetch
from mansio.client.consumer.fetcher import CompletedFetch, PartitionState
from mansio.client.share.in_flight_records import AcquiredRecordReader
from mansio.client.share.leased import GAP, REJECT
from mansio.spark.arrow.readable import ReadableRows, UnreadableRows
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX
from mansio.wire.batch.record_batch import read_header
from support.batch_contents import encoded_record, random_case, raw_batch, with_base_offset

if TYPE_CHECKING:
    from random import Random

    from support.batch_contents import Case

    Range = tuple[int, int]

PLACE: Final = TopicPartition("t", 0)
CASES_PER_LOG: Final = 8
LARGE_BYTES: Final = 1 << 20


class StoredCase(NamedTuple):
    """A case at an offset of a log, and the offset of the good record directly behind it."""

    case: Case
    first: int
    good: int


class Log(NamedTuple):
    """Batches of a partition: cases, with a good record before and behind each."""

    records: memoryview
    cases: list[StoredCase]
    end: int


class Found(NamedTuple):
    """What a reader has delivered, offset -> value, and the ranges that it has reported as unreadable."""

    values: dict[int, bytes | None]
    unreadable: list[Range]


def good_value(offset: int) -> bytes:
    return b"good at %d" % offset


def kept(value: bytes | None) -> bytes | None:
    """The value, or its size if it is large: a test of memory does not hold it."""
    return value if value is None or len(value) < LARGE_BYTES else b"%d bytes" % len(value)


def kept_scalar(value: Any) -> bytes | None:
    buffer = value.as_buffer()
    return kept(buffer if buffer is None or buffer.size >= LARGE_BYTES else buffer.to_pybytes())


def log_of(cases: list[Case]) -> Log:
    """A log with these cases."""
    batches, stored = [], []
    offset = 0

    def add(batch: bytes) -> int:
        nonlocal offset
        batches.append(with_base_offset(batch, offset))
        offset += read_header(batch).last_offset_delta + 1
        return offset

    add(raw_batch(encoded_record(0, good_value(0)), 1))
    for case in cases:
        first = offset
        good = add(case.batch)
        add(raw_batch(encoded_record(0, good_value(good)), 1))
        stored.append(StoredCase(case, first, good))
    return Log(memoryview(b"".join(batches)), stored, offset)


def read_as_consumer(log: Log) -> Found:
    state = PartitionState(PLACE, 0, None)
    found = Found({}, [])
    position = 0
    for each in decode_fetch(CompletedFetch(state, 0, log.records, ()), True):
        for message in each.messages:
            assert message.offset >= position, f"offset {message.offset} after {position}"
            position = message.offset + 1
            found.values[message.offset] = kept(message.value)
        if each.unreadable is not None:
            assert each.unreadable.reason
            found.unreadable.append(each.unreadable[:2])
        assert each.next_offset >= position
        position = each.next_offset
    assert position == log.end
    return found


def read_as_share_member(log: Log, random: Random) -> Found:
    """Reads the log in several fetches, with leases of random ranges."""
    reader = AcquiredRecordReader(DECOMPRESSED_BYTES_MAX)
    found = Found({}, [])
    cuts = sorted({0, log.end, *(random.randrange(log.end) for _ in range(random.randrange(4)))})
    for first, stop in pairwise(cuts):
        records, holes = reader.read(PLACE, log.records, ((first, stop - 1, 1),))
        for message in records:
            assert first <= message.offset < stop
            assert message.offset not in found.values
            found.values[message.offset] = kept(message.value)
        assert {hole.ack_type for hole in holes} <= {GAP, REJECT}
        for hole in holes:
            assert not found.values.keys() & set(range(hole.first, min(hole.last + 1, hole.first + 100)))
            if hole.ack_type == REJECT:
                assert hole.reason
                found.unreadable.append((hole.first, hole.last))
    return found


def read_as_arrow(log: Log) -> Found:
    found = Found({}, [])
    readable = ReadableRows("t", 0, log.end, ("offset", "value", "key", "headers", "timestamp"))
    position = 0
    for piece in readable.read(log.records, (), 0):
        if isinstance(piece, UnreadableRows):
            assert piece.first >= position
            position = piece.last + 1
            found.unreadable.append((piece.first, piece.last))
            continue
        offsets = piece.column("offset").to_pylist()
        assert offsets[0] >= position
        assert offsets == sorted(set(offsets))
        position = offsets[-1] + 1
        found.values.update(zip(offsets, map(kept_scalar, piece.column("value")), strict=True))
        del piece
    return found


def check(log: Log, found: Found, reader: str) -> None:
    """Nothing good is missing, nothing behind a bad batch waits, and what is bad is reported."""
    assert found.values[0] == good_value(0)
    for case, first, good in log.cases:
        where = f"{reader}: {case.kind} at {first}: {case.batch.hex()}"
        assert found.values.get(good) == good_value(good), where
        inside = [offset for offset in range(first, min(good, first + 1_000)) if offset in found.values]
        reported = [each for each in found.unreadable if first <= each[0] < good]
        if case.is_readable:
            assert inside == list(range(first, good)), where
            assert not reported, where
        else:
            assert reported or case.kind == "flipped" or reader == "share", where
        assert all(last < good for _, last in reported), where


def run(random: Random, count: int, *, arrow_share: float = 0.25) -> None:
    """Read `count` random cases with every decoder. `arrow_share`: part of the cases that Arrow decodes, too."""
    for _ in range(0, count, CASES_PER_LOG):
        log = log_of([random_case(random) for _ in range(CASES_PER_LOG)])
        consumed = read_as_consumer(log)
        check(log, consumed, "consumer")
        shared = read_as_share_member(log, random)
        check(log, shared, "share")
        assert shared.values == consumed.values
        rejected = {offset for first, last in shared.unreadable for offset in (first, last)}
        assert all(any(a <= offset <= b for a, b in consumed.unreadable) for offset in rejected)
        if random.random() < arrow_share:
            columns = read_as_arrow(log)
            check(log, columns, "arrow")
            # Arrow steps over single records if the others can be located.
            for offset in columns.values.keys() - consumed.values.keys():
                assert any(first <= offset <= last for first, last in consumed.unreadable)
            assert all(value == consumed.values.get(at, value) for at, value in columns.values.items())
