"""Records of many lengths are found without a loop over them, and bytes that only look like records cost no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mansio.spark.arrow import record_index
from mansio.spark.arrow.decode import decode_batches
from mansio.spark.arrow.record_index import find_record_boundaries
from mansio.wire.batch.record_batch import build_batch

if TYPE_CHECKING:
    from collections.abc import Sequence


def log_of(values: Sequence[bytes], rows_per_batch: int = 50) -> bytes:
    return b"".join(
        build_batch(
            [(1_700_000_000_000, b"key", value, ()) for value in values[first : first + rows_per_batch]],
            base_offset=first,
        )
        for first in range(0, len(values), rows_per_batch)
    )


def values_read(log: bytes) -> list[bytes]:
    return [value for part in decode_batches(log, "t", 0) for value in part.column("value").to_pylist()]


@pytest.mark.parametrize("longest", [40, 140])
def test_text_of_unequal_lengths_is_not_walked(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    values = [(b"a,b;" * 50)[: int(number**1.7) % longest] for number in range(2_000)]
    log = log_of(values)
    walked: list[int] = []

    def walk_records(_body: memoryview, count: int) -> None:
        walked.append(count)
        raise AssertionError("walked")

    monkeypatch.setattr(record_index, "walk_records", walk_records)
    # The last batch of an answer has no room behind it, and is a stretch of its own.
    assert values_read(log + bytes(16)) == values
    assert walked == []


def test_values_that_look_like_records_are_read_as_they_are() -> None:
    inner = log_of([b"x" * 70] * 8)
    values = [inner[61:][: 90 + number * 31 % 400] for number in range(400)]
    assert values_read(log_of(values)) == values


def test_bytes_that_look_like_records_everywhere_are_given_up() -> None:
    zeros = bytes(1 << 20)
    assert find_record_boundaries(np.frombuffer(zeros, np.uint8)) is None
    values = [bytes(200 + number % 60) for number in range(300)]
    assert values_read(log_of(values)) == values
