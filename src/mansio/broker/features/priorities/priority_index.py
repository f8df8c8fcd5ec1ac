"""Index of the priorities of a partition's records: the number of an offset is the priority of its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mansio.broker.features.priorities.priority_shares import PriorityShares
from mansio.state.share_partition.offset_numbers import NumberedOffsets, OffsetNumbers
from mansio.wire.batch.priority_header import PRIORITIES, PRIORITY_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class PriorityIndex(OffsetNumbers):
    """The priorities of the offsets from `start` to below `end`: the `ShareIndex` of a topic with priorities. An offset
    without a record has normal priority."""

    __slots__ = ()

    numbers: ClassVar[Sequence[int]] = PRIORITIES
    names: ClassVar[Mapping[int, str]] = {priority: name for name, priority in PRIORITY_NAMES.items()}

    def offsets_of(self, number: int) -> NumberedOffsets:
        """Return the offsets of one priority."""
        return NumberedOffsets(self, number)

    @staticmethod
    def new_order() -> PriorityShares:
        """Return the division of deliveries among the priorities for a group."""
        return PriorityShares()
