"""The check of records by their lengths against a walk of one record after the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRecord, MessageTooLarge
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    build_batch,
    read_header,
    read_varint,
    varint,
)
from mansio.wire.batch.record_reader import CHECKED_RECORDS_MAX, check_content, check_records
from support.tiers import examples, repetitions

LENGTHS = st.sampled_from((6, 7, 63, 64, 100, 200))
RUNS = st.lists(st.tuples(LENGTHS, st.sampled_from((1, 1, 2, 5, 9, 40))), min_size=1, max_size=6)
CHANGES = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=2)


def is_walkable(data: bytes, count: int) -> bool:
    position = 0
    try:
        for _ in range(count):
            length, position = read_varint(data, position)
            if length < RECORD_BYTES_MIN - 1:
                return False
            position += length
    except (IndexError, InvalidRecord):
        return False
    return position == len(data)


@settings(max_examples=examples(100, repetitions(1_000, 3_000), 30_000), deadline=None)
@given(
    runs=RUNS,
    fill=st.booleans(),
    changes=CHANGES,
    more=st.sampled_from((0, 0, 0, 1, -1)),
    cut=st.sampled_from((0, 0, 1)),
)
def test_the_check_accepts_what_can_be_walked_to_the_end_and_nothing_else(
    runs: list[tuple[int, int]], fill: bool, changes: list[tuple[int, int]], more: int, cut: int
) -> None:
    """`fill`: the content of each record looks like lengths of records."""
    lengths = [length for length, count in runs for _ in range(count)]
    data = bytearray(
        b"".join(varint(each) + (varint(each) if fill else b"\0")[:1] * each for each in lengths)
    )
    for at, value in changes:
        data[at % len(data)] = value
    content = bytes(data[: len(data) - cut])
    count = len(lengths) + more
    try:
        check_records(content, count)
        accepted = True
    except InvalidRecord:
        accepted = False
    assert accepted == is_walkable(content, count)


class CountedSlices(bytes):
    """Bytes that count the bytes of their slices."""

    sliced_bytes = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            self.sliced_bytes += len(found)
        return found


@pytest.mark.parametrize("run", [1, 2, 9, 64, 65, 5_000])
def test_the_work_of_the_check_grows_with_the_number_of_records_only(run: int) -> None:
    """Runs of records of two lengths: no slice may reach from each run to the end of the batch."""
    short, long = varint(6) + bytes(6), varint(70) + bytes(70)
    count = 20_000
    data = CountedSlices(b"".join(long if n // run % 2 else short for n in range(count)))
    check_records(data, count)
    assert data.sliced_bytes < 20 * count


def test_a_compressed_batch_of_too_many_records_is_refused_before_it_is_decompressed() -> None:
    batch = build_batch([(0, None, b"", ())], codec=Codec.ZSTD)
    header = read_header(batch)._replace(record_count=CHECKED_RECORDS_MAX + 1)
    with pytest.raises(MessageTooLarge, match="at most 1000000"):
        check_content(batch[:HEADER_BYTES] + b"no frame", header, 1 << 20)
