"""`read_record_tuples` and `read_records` return the same records and raise the same errors as the reference reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.client.types import Message
from mansio.errors import MansioError
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    BatchHeader,
    build_batch,
    encode_batch,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import Record, read_record_tuples, read_records
from support.tiers import examples, repetitions
from unit.wire import record_oracle

if TYPE_CHECKING:
    from collections.abc import Callable

DECODED_BYTES_MAX = 1 << 20

contents = st.none() | st.binary(max_size=70) | st.sampled_from([bytes(64), bytes(8191), bytes(8192)])
headers = st.lists(st.tuples(st.text(max_size=5), contents), max_size=3)
records = st.lists(
    st.tuples(st.integers(0, 1 << 40), contents, contents, headers.map(tuple)), min_size=1, max_size=12
)


def outcome(read: Callable[[], list[Any]]) -> Any:
    """The result of a reader: its records, or an error's type and message."""
    try:
        return read()
    except MansioError as error:
        return type(error), str(error)


def as_rows(batch: bytes) -> Any:
    """What `read_record_tuples` returns or raises; `read_records` must agree."""
    rows = outcome(lambda: read_record_tuples(batch, Message, "t", 3, output_bytes_max=DECODED_BYTES_MAX))
    records = outcome(lambda: read_records(batch, output_bytes_max=DECODED_BYTES_MAX))
    assert (records if isinstance(records, tuple) else [Message("t", 3, *each) for each in records]) == rows
    assert isinstance(records, tuple) or all(type(record) is Record for record in records)
    return rows


def expected(batch: bytes) -> Any:
    """What the reference reader returns or raises."""
    return outcome(
        lambda: [
            Message("t", 3, *record)
            for record in record_oracle.read_records(batch, output_bytes_max=DECODED_BYTES_MAX)
        ]
    )


@settings(max_examples=examples(25, 300), deadline=None)
@given(
    given=records,
    codec=st.sampled_from([Codec.NONE, Codec.GZIP, Codec.ZSTD]),
    base_offset=st.integers(0, 1 << 60),
    is_stamped=st.booleans(),
)
def test_rows_equal_the_reference(given: list[Any], codec: Codec, base_offset: int, is_stamped: bool) -> None:
    batch = build_batch(given, codec=codec, base_offset=base_offset)
    if is_stamped:
        batch = with_log_append_time(batch, read_header(batch), 1_700_000_000_000) + batch[HEADER_BYTES:]
    rows = as_rows(batch)
    assert rows == expected(batch)
    assert all(type(row) is Message for row in rows)
    assert [row.value for row in rows] == [value for _, _, value, _ in given]


def test_many_and_long_records_equal_the_reference() -> None:
    """Deltas and lengths of one, two and three bytes."""
    many = build_batch([(5, None, b"", ())] * 20_000)
    long = build_batch([(1, bytes(size), bytes(size), ()) for size in (63, 64, 8191, 8192, 70_000)])
    for batch in (many, long):
        assert as_rows(batch) == expected(batch)


@settings(max_examples=examples(50, repetitions(300, 800), 8_000), deadline=None)
@given(
    given=records,
    position=st.integers(0, 300),
    change=st.integers(1, 255),
    cut=st.integers(0, 12),
    more=st.binary(max_size=4),
    count_change=st.integers(-2, 2),
    span_change=st.integers(-2, 1),
)
def test_damaged_records_raise_the_same_error(
    given: list[Any],
    position: int,
    change: int,
    cut: int,
    more: bytes,
    count_change: int,
    span_change: int,
) -> None:
    batch = build_batch(given)
    header = read_header(batch)
    body = bytearray(batch[HEADER_BYTES : len(batch) - cut] + more)
    if position < len(body):
        body[position] ^= change
    changed = BatchHeader._make(
        header._replace(
            record_count=header.record_count + count_change,
            last_offset_delta=header.last_offset_delta + span_change,
        )
    )
    damaged = encode_batch(changed, bytes(body))
    assert as_rows(damaged) == expected(damaged)


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_truncated_batches_raise_the_same_error(size: int) -> None:
    batch = build_batch([(1, b"k", b"v", ())])[:size]
    assert as_rows(batch) == expected(batch)
    assert isinstance(as_rows(batch), tuple)
