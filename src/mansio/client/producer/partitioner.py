"""Sticky partitioner (KIP-480, KIP-794): chooses the partition of records without a key.

Records without a key go to one partition until it has got the bytes of a full batch, in one batch or in many, then to
another partition chosen at random.
`mansio.wire.murmur2` chooses the partition of records with a key.
"""

from __future__ import annotations

from random import randrange
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def next_sticky_partition(partitions: Sequence[int], current: int | None) -> int:
    """Return a random partition for the next batch of records without keys, different from `current` if the topic has
    more than one partition. Raises `ValueError` if `partitions` is empty."""
    if not partitions:
        raise ValueError("a topic needs at least one partition")
    chosen = partitions[randrange(len(partitions))]
    if chosen == current and len(partitions) > 1:
        chosen = partitions[(partitions.index(chosen) + 1 + randrange(len(partitions) - 1)) % len(partitions)]
    return chosen
