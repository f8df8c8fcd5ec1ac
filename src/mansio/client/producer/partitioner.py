"""Partitioner of records without a key: *sticky* (KIP-480), the same partition until a batch is full, then another one
at random. `mansio.wire.murmur2` partitions records with a key."""

from __future__ import annotations

from random import randrange
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def next_sticky_partition(partitions: Sequence[int], current: int | None) -> int:
    """Random partition for the next batch without keys; not `current` if there is another one."""
    if not partitions:
        raise ValueError("a topic needs at least one partition")
    chosen = partitions[randrange(len(partitions))]
    if chosen == current and len(partitions) > 1:
        chosen = partitions[(partitions.index(chosen) + 1 + randrange(len(partitions) - 1)) % len(partitions)]
    return chosen
