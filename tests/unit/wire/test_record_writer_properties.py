"""Fast path for encoding values compared with the general writer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    build_batch,
    build_single_record_batch,
    build_value_only_batch,
    encode_records,
    encode_value_only_records,
)

BASE_MS = 1_700_000_000_000


def rows(stamps: list[int], values: list[bytes]) -> list[tuple[int, None, bytes, tuple[()]]]:
    return [(stamp, None, value, ()) for stamp, value in zip(stamps, values, strict=True)]


@given(
    st.lists(st.binary(max_size=200), min_size=1, max_size=150),
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 63, 64, 8191, 8192, 10**7, -1, -70]), min_size=1, max_size=4),
    st.booleans(),
)
@example([b"a", b"b"], [0, 63], False)
@example([b"a", b"b"], [0, 64], False)
@example([b"a", b"b"], [0, -1], False)
def test_columns_equal_rows(values: list[bytes], deltas: list[int], equal: bool) -> None:
    if equal:
        values = [values[0]] * len(values)
    stamps = [BASE_MS + deltas[number % len(deltas)] for number in range(len(values))]
    assert encode_value_only_records(stamps, values) == bytes(encode_records(rows(stamps, values)))


@pytest.mark.parametrize("sizes", [(0,), (1,), (52,), (53,), (54,), (8180,), (0, 100), (57, 58, 59)])
def test_columns_equal_rows_where_varints_grow(sizes: tuple[int, ...]) -> None:
    largest = 20_000 if max(sizes) < 1000 else 200
    for count in sorted({min(count, largest) for count in (1, 2, 63, 64, 65, 128, 8191, 8192, 8193, 20_000)}):
        values = [b"v" * sizes[number % len(sizes)] for number in range(count)]
        for stamps in ([BASE_MS] * count, [BASE_MS + number * 60 // count for number in range(count)]):
            expected = bytes(encode_records(rows(stamps, values)))
            assert encode_value_only_records(stamps, values) == expected, count


@pytest.mark.parametrize("key", [None, b"", b"k" * 70, b"k" * 9000])
@pytest.mark.parametrize("value", [None, b"", b"v" * 70, b"v" * 9000])
def test_the_batch_of_a_single_record_equals_the_general_batch(
    key: bytes | None, value: bytes | None
) -> None:
    assert build_single_record_batch(BASE_MS, key, value) == build_batch([(BASE_MS, key, value, ())])


@pytest.mark.parametrize("codec", Codec)
def test_values_batch_equals_the_general_batch(codec: Codec) -> None:
    stamps, values = [5, 4, 9], [b"one", b"", b"three" * 100]
    fields: dict[str, Any] = {"producer_id": 7, "producer_epoch": 2, "base_sequence": 11}
    expected = build_batch(rows(stamps, values), codec=codec, **fields)
    assert build_value_only_batch(stamps, values, codec=codec, **fields) == expected
