"""A producer's batch whose records are inspected: decompressed once, and its headers found in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.batch.record_batch import varint
from mansio.wire.batch.record_reader import check_header_count, decompress_batch, header_bounds, record_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer

    FoundHeader = tuple[int, bytes | None]
    """Index of a record in its batch, and the value of a header."""


REPORTED_RECORDS_MAX: Final = 1000
"""Maximum number of record errors in one response."""


class InspectedBatch:
    """A batch and what was found in it so far. The CRC is not checked."""

    __slots__ = ("_are_headers_counted", "_bounds", "_found", "_names", "batch", "data", "header")

    def __init__(self, batch: Buffer, names: Sequence[bytes] = ()) -> None:
        """`names`: of the headers that will be looked up. Raises the errors of `decompress_batch`."""
        self.batch = batch
        self.header, self.data = decompress_batch(batch)
        self._names = names
        self._bounds: list[int] | None = None
        self._are_headers_counted = False
        self._found: dict[bytes, list[FoundHeader]] | None = None

    @property
    def bounds(self) -> list[int]:
        """The positions of the encoded records in `data`, and the end of the last one. Raises `InvalidRecord`."""
        if self._bounds is None:
            self._bounds = record_bounds(self.data, self.header.record_count)
        return self._bounds

    def check_header_count(self, name: str) -> None:
        """Check that the records of the batch have at most `HEADERS_MAX` headers together. `name`: that of the
        partition, for errors. Raises `MessageTooLarge`, `InvalidRecord`."""
        if not self._are_headers_counted:
            check_header_count(self.data, self.bounds, name)
            self._are_headers_counted = True

    def find(self, name: bytes) -> Sequence[FoundHeader]:
        """Return the headers with one of the names, in the order of the batch. Raises `InvalidRecord`."""
        if name not in self.data:
            return ()
        if self._found is None:
            self._found = self._find_all()
        return self._found[name]

    def _find_all(self) -> dict[bytes, list[FoundHeader]]:
        data, bounds = self.data, self.bounds
        wanted = [(varint(len(name)) + name, name) for name in self._names if name in data]
        found: dict[bytes, list[FoundHeader]] = {name: [] for _, name in wanted}
        places = [data.find(name) for _, name in wanted]  # the next place of each name, or -1
        following = min(places, default=-1)
        for index in range(self.header.record_count if wanted else 0):
            end = bounds[index + 1]
            if following >= end:
                continue
            if following < 0:
                break
            for name_begin, value_begin, value_end in header_bounds(data, bounds[index], end):
                for encoded, name in wanted:
                    if data.startswith(encoded, name_begin):
                        value = None if value_begin < 0 else data[value_begin:value_end]
                        found[name].append((index, value))
            # A name is searched again only when its place is passed, so that each byte is searched once for each name.
            places = [
                data.find(name, end) if 0 <= place < end else place
                for place, (_, name) in zip(places, wanted, strict=True)
            ]
            following = min((place for place in places if place >= 0), default=-1)
        return found
