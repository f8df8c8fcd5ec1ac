"""Fast path for records of uniform layout compared with the reference reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.client.types import Message
from mansio.errors import MansioError
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    build_batch,
    build_value_only_batch,
    encode_batch,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import UNIFORM_RECORDS_MIN, read_record_tuples, read_uniform_records
from support.tiers import examples
from unit.wire.record_oracle import read_records

DECODED_BYTES_MAX = 8 << 20
BASE_MS = 1_700_000_000_000


def as_rows(batch: bytes) -> Any:
    """What is read: rows, or an error's kind and words."""
    try:
        return read_record_tuples(batch, Message, "t", 3, output_bytes_max=DECODED_BYTES_MAX)
    except MansioError as error:
        return type(error), str(error)


def one_by_one(batch: bytes) -> Any:
    try:
        return [
            Message("t", 3, *record) for record in read_records(batch, output_bytes_max=DECODED_BYTES_MAX)
        ]
    except MansioError as error:
        return type(error), str(error)


@pytest.mark.parametrize("size", [0, 1, 52, 8200])
@pytest.mark.parametrize("step_ms", [0, 0.05, 1])
def test_uniform_records_equal_the_reference(size: int, step_ms: float) -> None:
    counts = {1, 15, 16, 17, 63, 64, 65, 80, 81, 8191, 8192, 8300}
    for count in sorted({min(count, (1 << 20) // (size + 20)) for count in counts}):
        stamps = [BASE_MS + int(number * step_ms) for number in range(count)]
        batch = build_value_only_batch(
            stamps, [b"%0*d" % (size, number) if size > 4 else bytes(size) for number in range(count)]
        )
        assert as_rows(batch) == one_by_one(batch), count
        stamped = with_log_append_time(batch, read_header(batch), 5) + batch[HEADER_BYTES:]
        assert as_rows(stamped) == one_by_one(stamped), count


def test_uniform_records_use_the_fast_path() -> None:
    """Otherwise the others here would prove nothing."""
    batch = build_value_only_batch([1] * 200, [b"%03d" % number for number in range(200)])
    first = read_uniform_records(batch[HEADER_BYTES:], 0, 0, 200)
    assert first is not None
    assert first.record_count == 64
    second = read_uniform_records(batch[HEADER_BYTES:], first.end, 64, 136)
    assert second is not None
    assert (second.record_count, second.end) == (136, len(batch) - HEADER_BYTES)


@settings(max_examples=examples(40, 600), deadline=None)
@given(
    count=st.integers(UNIFORM_RECORDS_MIN, 90),
    odd=st.dictionaries(
        st.integers(0, 89),
        st.tuples(
            st.sampled_from([0, 0, 63, 64, -1]),
            st.sampled_from([None, None, b"", b"k"]),
            st.sampled_from([b"same", b"same", b"more!", None]),
            st.sampled_from([(), (), (("h", b"v"),)]),
        ),
        max_size=2,
    ),
    changes=st.dictionaries(st.integers(0, 90 * 12), st.integers(1, 255), max_size=2),
    count_change=st.sampled_from([0, 0, 0, -1, 1]),
    span_change=st.sampled_from([0, 0, 0, -1, 1]),
)
def test_different_or_damaged_record_is_detected(
    count: int, odd: dict[int, Any], changes: dict[int, int], count_change: int, span_change: int
) -> None:
    rows: list[Any] = [(BASE_MS, None, b"same", ())] * count
    for index, (more_ms, key, value, headers) in odd.items():
        if index < count:
            rows[index] = (BASE_MS + more_ms, key, value, headers)
    batch = build_batch(rows)
    header = read_header(batch)
    body = bytearray(batch[HEADER_BYTES:])
    for position, change in changes.items():
        if position < len(body):
            body[position] ^= change
    changed = header._replace(
        record_count=count + count_change, last_offset_delta=header.last_offset_delta + span_change
    )
    damaged = encode_batch(changed, bytes(body))
    assert as_rows(damaged) == one_by_one(damaged)


def test_equal_headers_of_consecutive_records_are_encoded_and_decoded_once() -> None:
    shared, other = (("trace", b"1"), ("a", None)), (("trace", b"2"),)
    order = [shared, shared, (), shared, other, other, shared]
    rows: list[Any] = [
        (BASE_MS, b"k" if number % 2 else None, b"v", each) for number, each in enumerate(order)
    ]
    batch = build_batch(rows)
    assert batch == build_batch([(*row[:3], list(row[3])) for row in rows])
    found = as_rows(batch)
    assert [record.headers for record in found] == order
    assert found[0].headers is found[1].headers is found[3].headers
    assert found[4].headers is found[5].headers
