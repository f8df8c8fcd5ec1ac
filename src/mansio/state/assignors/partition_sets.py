"""The set of all partitions of some topics. A group needs the same one again and again while its members come, and to
make one of 10,000 takes longer than the rest of an assignment.

Always true: no more than 4 sets of `CACHED_PARTITIONS_MAX` are kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.state.assignors import TopicPartition

CACHED_PARTITIONS_MAX: Final = 20_000
"""A set of more is made anew each time. One of so many takes 3 MB."""


def all_partitions(topics: Iterable[bytes], partitions: Mapping[bytes, int]) -> frozenset[TopicPartition]:
    """All there are; `partitions`: topic id -> how many."""
    counts = tuple((topic, partitions.get(topic, 0)) for topic in sorted(topics))
    few = sum(count for _, count in counts) <= CACHED_PARTITIONS_MAX
    return _cached(counts) if few else _build(counts)


def _build(counts: Sequence[tuple[bytes, int]]) -> frozenset[TopicPartition]:
    return frozenset((topic, index) for topic, count in counts for index in range(count))


_cached = lru_cache(maxsize=4)(_build)
