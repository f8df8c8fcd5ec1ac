"""Keeping committed offsets for a limited time, and not longer than their topics.

Looks at all groups at an interval: offsets of groups that nobody has used for the retention time go, with the groups
that hold nothing then; in a cluster also those of topics that were deleted while nobody could write that down.

Always true: what cannot be forgotten now (the group's partition is being loaded, is led elsewhere, or cannot be
written) is left for the next time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.offset_manager import tombstones
from mansio.errors import CoordinatorLoadInProgress, MansioError, NotCoordinator
from mansio.logs import fields
from mansio.state.share_group.group import ShareGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from mansio.broker.coordinator.coordinator_lookup import CoordinatorLookup
    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.offset_manager import OffsetManager
    from mansio.ports import Clock, Scheduler

logger = logging.getLogger(__name__)


class OffsetExpiration:
    """See the module. `delete`: deletes a group without members, by its id."""

    def __init__(
        self,
        store: GroupStore,
        offsets: OffsetManager,
        *,
        interval_ms: int,
        clock: Clock,
        scheduler: Scheduler,
        delete: Callable[[str], Awaitable[None]],
        places: CoordinatorLookup | None,
    ) -> None:
        self._store = store
        self._offsets = offsets
        self._interval_ms = interval_ms
        self._clock = clock
        self._scheduler = scheduler
        self._delete = delete
        self._places = places
        self._timer: Any = None

    def start(self) -> None:
        """Look for the first time after one interval."""
        self._timer = self._scheduler.call_later(self._interval_ms, self._begin)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._scheduler.spawn(self.expire(), name="expiry of committed offsets")
        self.forget_topics(list(self._store.entries.values()))
        self.start()

    def forget_topics(self, entries: Iterable[GroupEntry]) -> None:
        """Forget the offsets of topics that are gone. The metadata that say that this broker leads are newer than any
        offset committed under the leaders before it: a topic that is not there is gone. On a broker of its own there
        is nothing to do: it writes down each topic's end itself."""
        if self._places is not None:
            work = self._offsets.delete_offsets_of_missing_topics(list(entries), self._places.has_topic)
            self._scheduler.spawn(work, name="forget offsets of topics that are gone")

    async def expire(self) -> int:
        """Forget what nobody has used for the retention time; says how many offsets went."""
        now_ms = self._clock.wall_ms()
        gone = 0
        for group_id in list(self._store.entries):
            try:
                gone += await self._expire(group_id, now_ms)
            except (CoordinatorLoadInProgress, NotCoordinator):
                continue
            except MansioError as error:
                logger.warning("offsets not expired", extra=fields(group=group_id, reason=error))
        return gone

    async def _expire(self, group_id: str, now_ms: int) -> int:
        entry = self._store.find(group_id)
        if entry is None:
            return 0
        expired = self._offsets.expired(entry, now_ms)
        kept = sum(len(partitions) for partitions in entry.offsets.values()) > len(expired)
        if not kept and entry.group.is_idle() and not isinstance(entry.group, ShareGroup):
            await self._delete(group_id)
        elif expired:
            await self._store.append(group_id, tombstones(entry, only=expired))
        return len(expired)
