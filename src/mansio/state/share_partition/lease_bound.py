"""How far leases of a share partition may go: an offset that is stored before anything at or above it is leased.

A first lease is handed out before it is known to survive a loss. So after a loss nobody knows which records without a
delivery on record are in somebody's hands, but all of them are below the horizon. It moves ahead in steps, the next one
being asked for while half of the last one is left, so that leases seldom wait for it.

Always true: the horizon only grows, and only with an update that is stored durably; one such update is under way at
most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mansio.state.share_partition.batch_map import BatchMap
    from mansio.state.share_partition.types import ShareSettings


class LeaseBound:
    """See the module."""

    __slots__ = ("_asked", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._asked: tuple[int, int] | None = None  # the update that moves it, and where to

    def is_due(self, ranges: BatchMap, settings: ShareSettings) -> bool:
        """Is it to be moved ahead now?"""
        return self._asked is None and 2 * (self.offset - ranges.end) < settings.lease_bound_step

    def ask(self, token: int, ranges: BatchMap, settings: ShareSettings) -> int:
        """Where to the update with this token moves it."""
        ahead = max(self.offset, ranges.end) + settings.lease_bound_step
        self._asked = (token, ahead)
        return ahead

    def persisted(self, token: int) -> None:
        """The update with this token is stored."""
        if self._asked is not None and self._asked[0] == token:
            self.offset, self._asked = self._asked[1], None

    def lease_end(self, ranges: BatchMap, settings: ShareSettings) -> int:
        """Where leases end: here; at the end of what there is, while that is in too many pieces."""
        return min(self.offset, ranges.end) if len(ranges) >= settings.ranges_max else self.offset
