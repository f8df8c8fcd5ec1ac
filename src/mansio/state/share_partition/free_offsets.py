"""Free records of one group key of a share partition without order: the lowest one at once, the others ascending.

The offsets are a heap. One that is removed and not the lowest stays in it, outdated, until it is the lowest or too many
are. All take about the time of an operation of a heap, however many records of the key are not free.

Invariants:
* The lowest offset of the heap is not outdated.
* Each offset is in the heap once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTDATED_MAX: Final = 1_000
"""Maximum number of outdated offsets of a key."""

_OUTDATED_SPARE: Final = 16
"""Number of outdated offsets that is allowed in addition to half of the heap."""


class FreeOffsets:
    """Offsets of one group key. `outdated`: the outdated offsets of all keys of the share partition."""

    __slots__ = ("_heap", "_outdated", "_outdated_count")

    def __init__(self, outdated: set[int]) -> None:
        """Without offsets."""
        self._heap: list[int] = []
        self._outdated = outdated
        self._outdated_count = 0

    @property
    def first(self) -> int | None:
        """The lowest offset; None if there are none."""
        return self._heap[0] if self._heap else None

    def add(self, offset: int) -> None:
        """Add an offset that is not contained."""
        if self._outdated_count and offset in self._outdated:
            self._outdated.remove(offset)
            self._outdated_count -= 1
        else:
            heappush(self._heap, offset)

    def remove(self, offset: int) -> None:
        """Remove an offset that is contained."""
        heap, outdated = self._heap, self._outdated
        if offset != heap[0]:
            outdated.add(offset)
            self._outdated_count += 1
            if self._outdated_count > min(OUTDATED_MAX, len(heap) // 2 + _OUTDATED_SPARE):
                self._drop_outdated()
            return
        heappop(heap)
        while self._outdated_count and heap[0] in outdated:
            outdated.remove(heappop(heap))
            self._outdated_count -= 1

    def _drop_outdated(self) -> None:
        kept = [offset for offset in self._heap if offset not in self._outdated]
        self._outdated.difference_update(self._heap)
        self._outdated_count = 0
        heapify(kept)
        self._heap = kept

    def after_first(self) -> Iterator[int]:
        """Yield all offsets but the lowest one, ascending. There must be no change while the iterator is in use."""
        heap, outdated = self._heap, self._outdated
        size = len(heap)
        places = [
            (heap[place], place) for place in (1, 2) if place < size
        ]  # of the heap, whose parents were yielded
        heapify(places)
        while places:
            offset, parent = heappop(places)
            if offset not in outdated:
                yield offset
            for place in (2 * parent + 1, 2 * parent + 2):
                if place < size:
                    heappush(places, (heap[place], place))
