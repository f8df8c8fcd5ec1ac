"""Cached sets of all partitions of given topics."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.wire.topic_partition import TopicIdPartition

CACHED_PARTITIONS_MAX: Final = 20_000
"""Maximum size of a set that is cached. A set of this size takes 3 MB."""


def all_partitions(topics: Iterable[bytes], partitions: Mapping[bytes, int]) -> frozenset[TopicIdPartition]:
    """Return the set of all partitions of these topics. `partitions`: topic id -> number of partitions.

    A group needs the same set repeatedly while its members join, and building a set of 10,000 partitions takes longer
    than the remaining assignment. Therefore the last 4 sets are cached.
    """
    counts = tuple((topic, partitions.get(topic, 0)) for topic in sorted(topics))
    is_small = sum(count for _, count in counts) <= CACHED_PARTITIONS_MAX
    return _cached_partition_set(counts) if is_small else _build_partition_set(counts)


def _build_partition_set(counts: Sequence[tuple[bytes, int]]) -> frozenset[TopicIdPartition]:
    return frozenset((topic, index) for topic, count in counts for index in range(count))


_cached_partition_set = lru_cache(maxsize=4)(_build_partition_set)
