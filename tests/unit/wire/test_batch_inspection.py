"""Inspection of a producer's batch: the headers that it finds are those of the records, in one pass over the batch."""

from __future__ import annotations

from typing import Any, Final, SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from mansio.wire.batch.compression import Codec
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.record_batch import build_batch

NAMES: Final = (b"mansio-dedup-id", b"mansio-priority", b"mansio-delay-ms")
TEXTS: Final = st.sampled_from((*NAMES, b"", b"x", b"mansio-", b"-mansio-priority-", b"mansio-delay-ms" * 3))
HEADERS: Final = st.lists(st.tuples(TEXTS.map(bytes.decode), st.none() | TEXTS), max_size=3)
RECORDS: Final = st.lists(st.tuples(st.none() | TEXTS, TEXTS, HEADERS), min_size=1, max_size=12)


class CountedBytes(bytes):
    """Bytes that count how many of them are searched."""

    searched = 0

    def find(self, sub: Any, start: SupportsIndex | None = None, end: SupportsIndex | None = None) -> int:
        begin = 0 if start is None else int(start)
        place = super().find(sub, start, end)
        self.searched += (len(self) if place < 0 else place) - begin
        return place


def inspect(records: list[tuple[bytes | None, bytes, list[tuple[str, bytes | None]]]]) -> InspectedBatch:
    batch = build_batch([(0, key, value, headers) for key, value, headers in records], codec=Codec.LZ4)
    return InspectedBatch(batch, NAMES)


@given(RECORDS)
def test_found_headers_are_those_of_the_records_in_their_order(records: list[Any]) -> None:
    inspected = inspect(records)
    for name in NAMES:
        expected = [
            (index, value)
            for index, (_, _, headers) in enumerate(records)
            for header, value in headers
            if header == name.decode()
        ]
        assert list(inspected.find(name)) == expected


def test_each_byte_is_searched_once_for_each_name() -> None:
    """A name that occurs only at the end of a batch is not searched again after each record with another name."""
    records: list[Any] = [(None, b"x" * 100, [("mansio-dedup-id", b"%d" % index)]) for index in range(1000)]
    records[-1] = (None, b"mansio-priority", [("mansio-dedup-id", b"last")])
    inspected = inspect(records)
    inspected.data = data = CountedBytes(inspected.data)
    assert len(inspected.find(b"mansio-dedup-id")) == 1000
    assert data.searched <= len(NAMES) * len(data)
