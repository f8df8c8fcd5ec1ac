"""State of share partitions in `__share_group_state`: view of that topic, and its writer.

A state is a snapshot and the updates after it. The leader of a share partition reads its state and writes its changes;
the state is served from here only. The log is kept from the oldest effective snapshot on: a state gets a new snapshot
after a number of updates, and when its snapshot has been in closed segments for long; records before all snapshots are
deleted.

While a partition of the topic is loaded, `LazyReplay` defers decoding: a snapshot supersedes all earlier records of its
state, and most records are superseded by the end of the load.

Invariants:
* A write is accepted from the last reader only: in its state epoch, in its leader epoch or a later one, and with the
  session of the last read (`WriteToken`). Late and repeated writes are refused.
* A read is answered when everything it returns is committed, together with the leader epoch of the request: from
  then on no older leader writes.
* An update that is not durable is applied when it is appended. After a loss of the end of this log, first leases may be
  missing: states of such a load are not complete (`is_complete`) until a lease duration has passed and a durable update
  was written, or until a leader that led through the loss has written its whole state.
* No record that an effective snapshot needs, and no uncommitted record, is deleted.
* Deferred records are replayed in log order before a state is used; at most `DEFERRED_BYTES_MAX` bytes are deferred,
  because they are replayed in one iteration of the event loop.

Source: KIP-932.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.coordinator.share.state_lookup import coordinator_key, index_of
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)
from mansio.logs import fields
from mansio.state.share_partition.snapshot import FoldedState, to_loaded_state
from mansio.state.share_partition.state_records import (
    SNAPSHOT,
    UNCHANGED,
    UPDATE,
    StateRecord,
    decode_key,
    decode_value,
    encode_key,
    encode_snapshot,
    encode_update,
)
from mansio.state.share_partition.types import ARCHIVING, ShareSummary, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.coordinator.runtime import CoordinatorRuntime, KeyValue
    from mansio.ports import Clock, Promise
    from mansio.state.share_partition.types import LoadedState, ShareKey


logger = logging.getLogger(__name__)

PINNED_SEGMENTS_MAX: Final = 8
"""A snapshot that retains more closed segments than this is rewritten at once."""

COLD_RANGES_MAX: Final = 100_000
"""Maximum number of ranges rewritten at a time to free disk space."""

_SESSION_BITS: Final = 32


class ShareStateSettings(NamedTuple):
    """`updates_per_snapshot`: updates after which a state gets a new snapshot; `cold_ms`: age at which a snapshot in a
    closed segment is rewritten; `shares_max`: maximum number of states here."""

    updates_per_snapshot: int = 500
    cold_ms: int = 300_000
    shares_max: int = 100_000


class ShareStateStore:
    """`topic` is set right after construction, because the two refer to each other."""

    def __init__(
        self,
        settings: ShareStateSettings,
        clock: Clock,
        *,
        lock_ms: Callable[[str], int],
        check_complete_log: Callable[[int], bool],
    ) -> None:
        """`lock_ms`: duration of a lease of a group; `check_complete_log`: whether the log of a loaded partition of the
        topic is certainly complete."""
        self._settings = settings
        self._clock = clock
        self._lock_ms = lock_ms
        self._is_log_complete = check_complete_log
        self.topic: CoordinatorRuntime
        self._shares: dict[ShareKey, PersistedShareState] = {}
        self._of: dict[int, OrderedDict[ShareKey, PersistedShareState]] = {}  # oldest snapshot first
        self._here: dict[int, None] = {}  # loaded partitions, whose records are applied at once
        self._lazy_replays: dict[int, LazyReplay] = {}  # partitions being loaded
        self._uncertain: dict[int, None] = {}
        self._deleted: dict[int, int] = {}  # sessions up to this one must not create a state again
        self._sessions = 0
        self.on_loaded: Callable[[], None] = lambda: None
        """Called when the states of a partition are loaded."""
        self._writing: PersistedShareState | None = None  # state whose records are being appended
        self._appending: StateRecord | None = None  # the decoded record that is being appended

    def __len__(self) -> int:
        return len(self._shares)

    def index_of(self, key: ShareKey) -> int:
        """The partition of the topic that contains a state."""
        return index_of(coordinator_key(key), self.topic.partition_count)

    def lock_ms_max(self) -> int:
        """The longest lease duration of the groups with state here."""
        groups = dict.fromkeys(key.group for key in self._shares)
        return max((self._lock_ms(group) for group in groups), default=0)

    def archiving(self) -> list[ShareKey]:
        """Share partitions with records that wait for their dead letter."""
        return [key for key, share in self._shares.items() if share.folded.has_range_in(ARCHIVING)]

    # ------------------------------------------------------------------ reading

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """The state, or None, and the session in which the leader of this epoch may write it.

        Raises `FencedLeaderEpoch`, and as `SharePersister` does.
        """
        self.topic.check_available()
        if not self.topic.partition_count:
            return None, 0
        index = self.index_of(key)
        self.topic.check_loaded(index)
        session = self._new_session(index)
        share = self._shares.get(key)
        if share is not None:
            if leader_epoch < share.leader_epoch:
                raise _fenced(share, leader_epoch)
            share.session, share.numbers = session, [0, 0]
            if leader_epoch > share.leader_epoch:
                raised = Update(0, False, UNCHANGED, UNCHANGED, UNCHANGED)
                self._append_update(share, leader_epoch, raised, durable=False)
        await self._committed(index)
        if share is None:
            return None, session
        if self._shares.get(key) is not share or share.session != session:
            raise NotCoordinator(f"the state of {key.group} was read by another meanwhile")
        is_complete = self._is_complete(share)
        return share.loaded(
            is_complete=is_complete, withheld_ms=0 if is_complete else self._withheld_ms(share)
        ), session

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """Start offset and number of done records, from which the lag is computed; None if there is no state."""
        self.topic.check_available()
        if not self.topic.partition_count:
            return None
        index = self.index_of(key)
        await self._committed(index)
        share = self._shares.get(key)
        if share is None:
            return None
        start_offset, done_count = share.folded.progress()
        return ShareSummary(
            share.state_epoch,
            share.leader_epoch,
            start_offset,
            done_count,
            share.folded.has_range_in(ARCHIVING),
        )

    def _new_session(self, index: int) -> int:
        self._sessions += 1
        return self.topic.leader_epoch_of(index) << _SESSION_BITS | self._sessions

    def _is_complete(self, share: PersistedShareState) -> bool:
        return share.resolved or share.index not in self._uncertain

    def _withheld_ms(self, share: PersistedShareState) -> int:
        """Remaining time to withhold possibly leased records. It starts with the first read: until then a
        surviving leader may have renewed leases, which is not stored."""
        if share.withheld_since_ms is None:
            share.withheld_since_ms = self._now_ms()
        passed_ms = self._now_ms() - share.withheld_since_ms
        return max(math.ceil(self._lock_ms(share.key.group) - passed_ms), 0)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    # ------------------------------------------------------------------ writing

    def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> Promise[None] | None:
        """Append a change. Returns a promise of its commit, or None for one that is not durable.

        Raises `FencedStateEpoch`, `FencedLeaderEpoch`, `NotCoordinator` for a writer that is not the last reader, and
        errors of the partition; then nothing is stored.
        """
        share = self._shares.get(key)
        index = self.index_of(key) if share is None else share.index
        self.topic.check_loaded(index)
        if share is None:
            return self._create(key, index, write_token, state_epoch, leader_epoch, update)
        self._check(share, write_token, state_epoch, leader_epoch, durable=update.durable)
        if update.is_snapshot:
            return self._replace(share, leader_epoch, update)
        promise = self._append_update(share, leader_epoch, update, durable=update.durable)
        if update.durable and not share.resolved and not self._is_complete(share):
            share.resolved = self._withheld_ms(share) == 0
        if share.updates >= self._settings.updates_per_snapshot:
            self._snapshot_if_possible(share)
        return promise

    def _check(
        self,
        share: PersistedShareState,
        write_token: WriteToken,
        state_epoch: int,
        leader_epoch: int,
        *,
        durable: bool,
    ) -> None:
        if state_epoch != share.state_epoch:
            raise FencedStateEpoch(
                f"share group {share.key.group}: state epoch {state_epoch} is not {share.state_epoch}"
            )
        if share.leader_epoch > leader_epoch:
            raise _fenced(share, leader_epoch)
        if write_token.session != share.session:
            raise NotCoordinator(
                f"share group {share.key.group}: the state has to be read before it is written"
            )
        if write_token.number:
            if write_token.number <= share.numbers[durable]:
                raise NotCoordinator(f"share group {share.key.group}: write {write_token.number} comes late")
            share.numbers[durable] = write_token.number

    def _create(
        self,
        key: ShareKey,
        index: int,
        write_token: WriteToken,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
    ) -> Promise[None]:
        if not update.is_snapshot:
            raise FencedStateEpoch(f"share group {key.group}: there is no such state")
        if write_token.session <= self._deleted.get(index, 0):
            raise NotCoordinator(f"share group {key.group}: the state has to be read before it is written")
        self._check_room()
        share = PersistedShareState(key, index)
        share.state_epoch, share.session, share.resolved = state_epoch, write_token.session, True
        return self._replace(share, leader_epoch, update)

    def _check_room(self) -> None:
        if len(self._shares) >= self._settings.shares_max:
            raise CoordinatorNotAvailable(f"there are {self._settings.shares_max} states of share partitions")

    def _replace(self, share: PersistedShareState, leader_epoch: int, update: Update) -> Promise[None]:
        """Write the whole state of a leader."""
        stored = share.next_snapshot(leader_epoch=leader_epoch, wall_ms=self._clock.wall_ms(), update=update)
        promise = self._append_snapshot(share, stored)
        share.resolved = True
        return promise

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Replace the state by an empty one; returns when that is committed. A repeated call with the current epoch
        changes nothing. Raises `FencedStateEpoch` and as `write`."""
        index = self.index_of(key)
        self.topic.check_loaded(index)
        known = self._shares.get(key)
        if known is not None and state_epoch < known.state_epoch:
            raise FencedStateEpoch(
                f"share group {key.group}: state epoch {state_epoch} is older than {known.state_epoch}"
            )
        if known is not None and state_epoch == known.state_epoch:
            await self._committed(
                index
            )  # a repeated, possibly late request: the state may have been written since
            return
        share = PersistedShareState(key, index)
        if known is None:
            self._check_room()
        else:
            share.snapshot_epoch, share.leader_epoch = known.snapshot_epoch, known.leader_epoch
        share.state_epoch, share.session, share.resolved = state_epoch, self._new_session(index), True
        empty = Update(0, True, start_offset, 0, 0, is_snapshot=True)
        stored = share.next_snapshot(
            leader_epoch=share.leader_epoch, wall_ms=self._clock.wall_ms(), update=empty
        )
        try:
            await self._append_snapshot(share, stored)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    async def delete(self, key: ShareKey) -> None:
        """Delete the state; returns when that is committed."""
        self.topic.check_available()
        if not self.topic.partition_count:
            return
        index = self.index_of(key)
        self.topic.check_loaded(index)
        share = self._shares.get(key)
        self._deleted[index] = self._new_session(index)
        if share is not None:
            self._append(share, [(share.snapshot_key, None)], durable=False)
        await self._committed(index)

    def _append_update(
        self, share: PersistedShareState, leader_epoch: int, update: Update, *, durable: bool
    ) -> Promise[None] | None:
        value = encode_update(share.snapshot_epoch, leader_epoch, update)
        self._appending = StateRecord(share.snapshot_epoch, leader_epoch, update)
        return self._append(share, [(share.update_key, value)], durable=durable)

    def _append(
        self, share: PersistedShareState, records: list[KeyValue], *, durable: bool
    ) -> Promise[None] | None:
        """Append all records or none. With a snapshot, `share` replaces the known state."""
        self._writing = share
        try:
            if durable:
                return self.topic.append(share.index, records, atomic=True)
            self.topic.append_without_flush(share.index, records, atomic=True)
            return None
        except MansioError as error:
            raise as_coordinator_error(error) from error
        finally:
            self._writing = self._appending = None

    def _append_snapshot(self, share: PersistedShareState, stored: StateRecord) -> Promise[None]:
        promise = self._append(share, share.records(stored), durable=True)
        assert promise is not None, "it is durable"
        return promise

    def _snapshot_if_possible(self, share: PersistedShareState) -> bool:
        """Rewrite the state to free log space; it may fail, and is tried again later."""
        stored = share.next_snapshot(leader_epoch=share.leader_epoch, wall_ms=self._clock.wall_ms())
        try:
            self._append(share, share.records(stored), durable=False)
        except MansioError as error:
            known = fields(group=share.key.group, partition=share.index, reason=error)
            logger.warning("share_state_snapshot_not_written", extra=known)
            return False
        return True

    async def _committed(self, index: int) -> None:
        try:
            await self.topic.wait_until_committed(index)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    # ------------------------------------------------------------------ keeping the log short

    async def prune(self, index: int) -> None:
        """Rewrite states that retain closed segments, then delete records that no state needs."""
        shares, bases = self._of.setdefault(index, OrderedDict()), self.topic.segment_base_offsets(index)
        ranges = 0
        while shares and ranges < COLD_RANGES_MAX:
            oldest = next(iter(shares.values()))
            pinned = len(bases) - bisect_right(bases, oldest.snapshot_offset)
            age_ms = self._now_ms() - oldest.snapshot_ms
            if not pinned or (pinned <= PINNED_SEGMENTS_MAX and age_ms < self._settings.cold_ms):
                break
            ranges += len(oldest.folded) + 1
            if not self._snapshot_if_possible(oldest):
                break
        below = next(iter(shares.values())).snapshot_offset if shares else self.topic.end_offset_of(index)
        await self._committed(index)  # so that the oldest snapshot is durable
        self.topic.prune(index, below)

    # ------------------------------------------------------------------ the view

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        share = self._writing
        if share is not None and self._appending is not None:
            share.apply_update(self._appending)
            return
        decoded = decode_key(key)
        if decoded is None:
            return
        if value is None:
            if decoded.kind == SNAPSHOT:
                self._forget(index, decoded.key)
            return
        if share is None:
            share = self._shares.get(decoded.key)
        if share is None:
            if decoded.kind == UPDATE:
                return  # its snapshot was deleted together with the state
            share = PersistedShareState(decoded.key, index)
        if index not in self._here:
            lazy_replay = self._lazy_replays.setdefault(index, LazyReplay())
            lazy_replay.add(decoded.kind, share, value, offset, self._now_ms())
        elif decoded.kind == UPDATE:
            share.apply_update(decode_value(UPDATE, value))
        else:
            share.apply_snapshot(decode_value(SNAPSHOT, value), offset, self._now_ms())
        if decoded.kind == SNAPSHOT:
            self._is_newest(index, share)

    def _is_newest(self, index: int, share: PersistedShareState) -> None:
        """Its snapshot is the newest of all states."""
        self._shares[share.key] = share
        of_index = self._of.setdefault(index, OrderedDict())
        of_index[share.key] = share
        of_index.move_to_end(share.key)

    def _forget(self, index: int, key: ShareKey) -> None:
        if index in self._lazy_replays:
            self._lazy_replays[index].drop(key)
        if self._shares.pop(key, None) is not None:
            del self._of[index][key]

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """This view has no checkpoints: its snapshots are in the log."""
        del index
        return iter(())

    def finish_load(self, index: int) -> None:
        if (lazy_replay := self._lazy_replays.pop(index, None)) is not None:
            lazy_replay.replay(self._now_ms())
        self._here[index] = None
        self.on_loaded()
        if not self._is_log_complete(index):
            self._uncertain[index] = None
        shares = len(self._of.get(index, ()))
        if shares:
            known = fields(partition=index, states=shares, is_complete=index not in self._uncertain)
            logger.info("share_states_loaded", extra=known)

    def unload(self, index: int) -> None:
        for key in self._of.pop(index, {}):
            del self._shares[key]
        self._lazy_replays.pop(index, None)
        self._here.pop(index, None)
        self._uncertain.pop(index, None)
        self._deleted.pop(index, None)


def _fenced(share: PersistedShareState, leader_epoch: int) -> FencedLeaderEpoch:
    return FencedLeaderEpoch(
        f"share group {share.key.group}: leader epoch {leader_epoch} is older than {share.leader_epoch}"
    )


class WriteToken(NamedTuple):
    """Fencing token of a write. `session`: of the last read, whose reader may write; `number`: of the write in it, from
    1, to detect late and repeated writes; 0 where these cannot occur."""

    session: int
    number: int = 0


class PersistedShareState:
    """State of one share partition as folded from the log, `folded`, from the snapshot at `snapshot_offset` on.

    `session`: of the last read; `numbers`: of its last write that was not durable and durable; `resolved`: no lease can
    be missing, even if the log was not complete when it was loaded.
    """

    __slots__ = (
        "created_ms",
        "folded",
        "index",
        "key",
        "leader_epoch",
        "numbers",
        "resolved",
        "session",
        "snapshot_epoch",
        "snapshot_key",
        "snapshot_ms",
        "snapshot_offset",
        "state_epoch",
        "update_key",
        "updates",
        "withheld_since_ms",
    )

    def __init__(self, key: ShareKey, index: int) -> None:
        self.key = key
        self.index = index
        self.state_epoch = 0
        self.leader_epoch = UNCHANGED
        self.snapshot_epoch = UNCHANGED
        self.folded = FoldedState()
        self.snapshot_offset = 0
        self.snapshot_ms = 0.0
        self.created_ms = UNCHANGED
        self.updates = 0
        self.session = 0
        self.numbers = [0, 0]
        self.resolved = False
        self.withheld_since_ms: float | None = None
        self.snapshot_key = encode_key(SNAPSHOT, key)
        self.update_key = encode_key(UPDATE, key)

    def apply_snapshot(self, stored: StateRecord, offset: int, now_ms: float) -> None:
        """Apply a snapshot of the log."""
        self.state_epoch, self.leader_epoch = stored.state_epoch, stored.leader_epoch
        self.snapshot_epoch, self.created_ms = stored.snapshot_epoch, stored.created_ms
        self.folded = FoldedState()
        self.folded.apply(stored.update)
        self.snapshot_offset, self.snapshot_ms = offset, now_ms
        self.updates = 0

    def apply_update(self, stored: StateRecord) -> None:
        """Apply an update of the log; one of an older snapshot is ignored."""
        if stored.snapshot_epoch == self.snapshot_epoch:
            self.leader_epoch = max(self.leader_epoch, stored.leader_epoch)
            self.folded.apply(stored.update)
            self.updates += 1

    def next_snapshot(self, *, leader_epoch: int, wall_ms: int, update: Update | None = None) -> StateRecord:
        """The next snapshot record: the current state, or that of `update`, which is a snapshot."""
        folded = self.folded
        if update is not None:
            folded = FoldedState()
            folded.lease_bound, folded.done_count = self.folded.lease_bound, self.folded.done_count
            folded.dead_ranges, folded.redrives = self.folded.dead_ranges, self.folded.redrives
            folded.producer = self.folded.producer
            folded.apply(update)
        return StateRecord(
            self.snapshot_epoch + 1,
            leader_epoch,
            whole(folded),
            self.state_epoch,
            wall_ms if self.created_ms == UNCHANGED else self.created_ms,
            wall_ms,
        )

    def loaded(self, *, is_complete: bool, withheld_ms: int) -> LoadedState:
        """The state for the leader of the share partition."""
        return to_loaded_state(
            self.folded,
            state_epoch=self.state_epoch,
            leader_epoch=self.leader_epoch,
            snapshot_epoch=self.snapshot_epoch,
            is_complete=is_complete,
            withheld_ms=withheld_ms,
        )

    def records(self, stored: StateRecord) -> list[tuple[bytes, bytes | None]]:
        """A snapshot as the records of one batch."""
        keys = {SNAPSHOT: self.snapshot_key, UPDATE: self.update_key}
        return [(keys[kind], value) for kind, value in encode_snapshot(stored)]


def whole(folded: FoldedState) -> Update:
    """The folded state as an update."""
    return Update(
        0,
        durable=False,
        start_offset=folded.start_offset,
        lease_bound=folded.lease_bound,
        done_count=folded.done_count,
        changes=folded.changes,
        is_snapshot=True,
        dead_ranges=folded.dead_ranges,
        redrives=folded.redrives,
        producer=folded.producer,
    )


DEFERRED_BYTES_MAX: Final = 512 * 1024
"""About 6,000 updates, which take 0.2 s to replay."""


class _DeferredRecords:
    """The last snapshot of a share partition, its offset, and the updates after it."""

    __slots__ = ("offset", "share", "size_bytes", "values")

    def __init__(self, share: PersistedShareState, offset: int) -> None:
        self.share = share
        self.offset = offset
        self.values: list[tuple[int, bytes]] = []
        self.size_bytes = 0


class LazyReplay:
    """Deferred records of one partition of the topic while it is loaded."""

    def __init__(self) -> None:
        self._unread: dict[ShareKey, _DeferredRecords] = {}
        self._size_bytes = 0

    def add(self, kind: int, share: PersistedShareState, value: bytes, offset: int, now_ms: float) -> None:
        """Defer a record of the log. Raises `CorruptLog`."""
        if kind == SNAPSHOT:
            self.drop(share.key)
        unread = self._unread.get(share.key)
        if unread is None:
            unread = self._unread[share.key] = _DeferredRecords(share, offset)
        unread.values.append((kind, value))
        unread.size_bytes += len(value)
        self._size_bytes += len(value)
        if self._size_bytes > DEFERRED_BYTES_MAX:
            self.drop(share.key)
            _replay(unread, now_ms)

    def drop(self, key: ShareKey) -> None:
        """Drop deferred records that are superseded."""
        unread = self._unread.pop(key, None)
        if unread is not None:
            self._size_bytes -= unread.size_bytes

    def replay(self, now_ms: float) -> None:
        """Apply all deferred records. Raises `CorruptLog`."""
        unread, self._unread, self._size_bytes = self._unread, {}, 0
        for each in unread.values():
            _replay(each, now_ms)


def _replay(unread: _DeferredRecords, now_ms: float) -> None:
    share = unread.share
    for kind, value in unread.values:
        stored = decode_value(kind, value)
        if kind == SNAPSHOT:
            share.apply_snapshot(stored, unread.offset, now_ms)
        else:
            share.apply_update(stored)
