"""The state of share partitions in memory: `SharePersister` as the brokers' own, with failures and delays to order.

    persister = MemoryPersister(scheduler)
    persister.fail(2, CoordinatorNotAvailable("gone"))                 # the second write from now on; nothing is stored
    persister.fail(3, CoordinatorNotAvailable("gone"), stored=True)    # stored, but nobody is told
    release = persister.hold(1)                                        # stored and answered once `release()` is called
    persister.uncertain(withheld_ms=1000)                              # what is read from now on may lack first leases

Every write is counted, that of an update that is not durable too. `writes` remembers them in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import FencedLeaderEpoch, FencedStateEpoch, MansioError
from mansio.state.share_partition.snapshot import FoldedState, to_loaded_state
from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Promise, Scheduler


class _Entry:
    def __init__(self, state_epoch: int, start_offset: int) -> None:
        self.state_epoch = state_epoch
        self.leader_epoch = -1
        self.snapshot_epoch = 0
        self.folded = FoldedState(start_offset)


class MemoryPersister:
    """See the module."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        """`scheduler` is needed for `hold` and `begin_write` only."""
        self._scheduler = scheduler
        self._entries: dict[ShareKey, _Entry] = {}
        self._failures: dict[int, tuple[MansioError, bool]] = {}
        self._held: dict[int, Promise[Any]] = {}
        self._is_complete, self._withheld_ms = True, 0
        self.writes: list[tuple[ShareKey, Update]] = []
        self.reads = 0

    # What goes wrong

    def fail(self, nth: int, error: MansioError, *, stored: bool = False) -> None:
        """The n-th write from now on (from 1) raises; with `stored` it is stored nevertheless."""
        self._failures[len(self.writes) + nth] = (error, stored)

    def hold(self, nth: int) -> Callable[[], None]:
        """The n-th write from now on waits until what this returns is called; it is stored then."""
        assert self._scheduler is not None, "hold needs a scheduler"
        promise = self._held[len(self.writes) + nth] = self._scheduler.promise()

        def release() -> None:
            if not promise.done():
                promise.set_result(None)

        return release

    def uncertain(self, withheld_ms: int) -> None:
        """As after a loss: what is read may lack leases of the first delivery."""
        self._is_complete, self._withheld_ms = False, withheld_ms

    def forget_leases(self, key: ShareKey) -> None:
        """The state moved, and what was not durable is lost."""
        before = self._entries[key].folded
        after = self._entries[key].folded = FoldedState(before.start_offset)
        after.lease_bound = before.lease_bound

    def state(self, key: ShareKey) -> LoadedState | None:
        """What is stored now, for a test to look at."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return to_loaded_state(
            entry.folded,
            state_epoch=entry.state_epoch,
            leader_epoch=entry.leader_epoch,
            snapshot_epoch=entry.snapshot_epoch,
            is_complete=self._is_complete,
            withheld_ms=self._withheld_ms,
        )

    # `SharePersister`

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        self.reads += 1
        entry = self._entries.get(key)
        if entry is not None:
            self._check_leader(entry, leader_epoch)
        return self.state(key)

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        self.writes.append((key, update))
        number = len(self.writes)
        if (held := self._held.pop(number, None)) is not None:
            await held
        error, stored = self._failures.pop(number, (None, True))
        if stored:
            self._store(key, state_epoch, leader_epoch, update)
        if error is not None:
            raise error

    def begin_write(
        self,
        key: ShareKey,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        async def write() -> None:
            error: MansioError | None = None
            try:
                await self.write(key, state_epoch, leader_epoch, update)
            except MansioError as failure:
                error = without_traceback(failure)
            on_stored(error)

        assert self._scheduler is not None, "begin_write needs a scheduler"
        self._scheduler.spawn(write(), name="write")

    def _store(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        entry = self._entries.get(key)
        if entry is None:
            if not update.is_snapshot:
                raise FencedStateEpoch(f"there is no state of {key}")
            entry = self._entries[key] = _Entry(state_epoch, update.start_offset)
        if state_epoch != entry.state_epoch:
            raise FencedStateEpoch(f"state epoch {state_epoch} of {key} is not {entry.state_epoch}")
        self._check_leader(entry, leader_epoch)
        entry.snapshot_epoch += update.is_snapshot
        entry.folded.apply(update)

    @staticmethod
    def _check_leader(entry: _Entry, leader_epoch: int) -> None:
        if leader_epoch < entry.leader_epoch:
            raise FencedLeaderEpoch(f"leader epoch {leader_epoch} is older than {entry.leader_epoch}")
        entry.leader_epoch = leader_epoch

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        entry = self._entries.get(key)
        if entry is not None and state_epoch < entry.state_epoch:
            raise FencedStateEpoch(f"state epoch {state_epoch} of {key} is older than {entry.state_epoch}")
        if entry is None or state_epoch > entry.state_epoch:
            self._entries[key] = _Entry(state_epoch, start_offset)

    async def delete(self, key: ShareKey) -> None:
        self._entries.pop(key, None)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        state = self.state(key)
        if state is None:
            return None
        return ShareSummary(state.state_epoch, state.leader_epoch, state.start_offset, state.done_count)
