"""Store of the states of share partitions: the view of the topic `__share_group_state`, and its writer.

The state of a share partition is stored as a snapshot and the updates after it. The leader of the share partition reads
the state once and then writes updates. A state gets a new snapshot after a number of updates, and when its snapshot has
been in a closed segment for a long time; records before the oldest of the latest snapshots are deleted.

While a partition of the topic is loaded, `DeferredRecords` defers decoding: a snapshot supersedes all earlier records
of its state, so that most records need not be decoded.

Invariants:
* A write is accepted from the broker that read the state last: with the state's current state epoch, with the leader
  epoch of the last read or a higher one, and with the session of the last read (`WriteToken`). Late and repeated writes
  are refused.
* A read is answered when the state that it returns and the leader epoch of the request are committed: from then on no
  leader with a lower leader epoch can write.
* An update that is not durable is applied when it is appended. If the end of the log is lost, first leases of records
  may be missing. A state loaded from such a log is not complete (`is_complete`) until a lease duration has passed and a
  durable update was written, or until a share partition leader that was not interrupted has written its whole state.
* No record of a latest snapshot or after it, and no uncommitted record, is deleted.
* Deferred records are replayed in log order before a state is used; at most `DEFERRED_BYTES_MAX` bytes are deferred,
  because they are replayed in one iteration of the event loop.

Source: KIP-932.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.routing.routes import partition_for, share_partition_key
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
"""A snapshot with more closed segments after it than this is rewritten at once."""

REWRITTEN_RANGES_MAX: Final = 100_000
"""Maximum number of offset ranges in the snapshots that one call of `prune` rewrites."""

UNFOLDED_UPDATES_MAX: Final = 64
"""Number of updates after which the state of a share partition is computed, if nobody asks for it before: together they
cost less than one by one."""

_SESSION_BITS: Final = 32


class ShareStateSettings(NamedTuple):
    """Settings of the store.

    `updates_per_snapshot`: number of updates after which a state gets a new snapshot; `snapshot_age_ms_max`: age at
    which a snapshot in a closed segment is rewritten; `share_partitions_max`: maximum number of states in the store.
    """

    updates_per_snapshot: int = 500
    snapshot_age_ms_max: int = 300_000
    share_partitions_max: int = 100_000


class ShareStateStore:
    """The states of share partitions that this broker keeps.

    `topic`: the coordinator runtime of `__share_group_state`.
    """

    def __init__(
        self,
        settings: ShareStateSettings,
        clock: Clock,
        *,
        lock_ms: Callable[[str], int],
        is_log_complete: Callable[[int], bool],
        on_loaded: Callable[[], None],
        open_runtime: Callable[[ShareStateStore], CoordinatorRuntime],
    ) -> None:
        """`lock_ms`: returns the lease duration of a group; `is_log_complete`: returns whether the log of a partition
        of the topic certainly lacks no appended record. `on_loaded` is called when the states of a partition are
        loaded. `open_runtime` returns the runtime of the topic, whose view is this object."""
        self._settings = settings
        self._clock = clock
        self._lock_ms = lock_ms
        self._is_log_complete = is_log_complete
        self._shares: dict[ShareKey, PersistedShareState] = {}
        self._by_partition: dict[
            int, OrderedDict[ShareKey, PersistedShareState]
        ] = {}  # oldest snapshot first
        self._loaded_partitions: dict[int, None] = {}  # loaded partitions, whose records are applied at once
        self._deferred_records: dict[int, DeferredRecords] = {}  # partitions being loaded
        self._incomplete_partitions: dict[int, None] = {}
        self._deleted: dict[int, int] = {}  # sessions up to this one must not create a state again
        self._sessions = 0
        self._on_loaded = on_loaded
        self._writing: PersistedShareState | None = None  # state whose records are being appended
        self._appending: StateRecord | None = None  # the decoded record that is being appended
        self.topic = open_runtime(self)

    def __len__(self) -> int:
        return len(self._shares)

    def partition_for(self, key: ShareKey) -> int:
        """Return the partition of the topic that contains the state of a share partition."""
        return partition_for(share_partition_key(key), self.topic.partition_count)

    def lock_ms_max(self) -> int:
        """Return the longest lease duration of the groups with states in this store."""
        groups = dict.fromkeys(key.group for key in self._shares)
        return max((self._lock_ms(group) for group in groups), default=0)

    def archiving_share_partitions(self) -> list[ShareKey]:
        """Return the share partitions with records that wait for their copy in the dead-letter topic."""
        return [key for key, share in self._shares.items() if share.folded.has_range_in(ARCHIVING)]

    # ------------------------------------------------------------------ reading

    def stored_offsets(self) -> Iterator[tuple[ShareKey, int]]:
        """Return the share partitions whose state is stored here, each with an offset below which all records are
        done; `first_undone_offset` may be higher."""
        return ((key, share.folded.start_offset) for key, share in tuple(self._shares.items()))

    def first_undone_offset(self, key: ShareKey) -> int:
        """Return the first offset of a share partition that is not done, according to the stored state; 0 if there is
        none. The cost grows with the number of in-flight batches."""
        share = self._shares.get(key)
        return 0 if share is None else share.folded.progress()[0]

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """Return the state, or None, and the read session in which the leader of this epoch may write it.

        Raises `FencedLeaderEpoch`, and the errors that `SharePersister` describes.
        """
        self.topic.check_available()
        if not self.topic.partition_count:
            return None, 0
        index = self.partition_for(key)
        self.topic.check_loaded(index)
        session = self._new_session(index)
        share = self._shares.get(key)
        if share is not None:
            if leader_epoch < share.leader_epoch:
                raise _fenced_leader_epoch(share, leader_epoch)
            share.session, share.last_write_numbers = session, [0, 0]
            if leader_epoch > share.leader_epoch:
                raised = Update(0, False, UNCHANGED, UNCHANGED, UNCHANGED)
                self._append_update(share, leader_epoch, raised, durable=False)
        await self._wait_until_committed(index)
        if share is None:
            return None, session
        if self._shares.get(key) is not share or share.session != session:
            raise NotCoordinator(f"the state of {key.group} was read by another broker meanwhile")
        is_complete = self._is_complete(share)
        return share.to_loaded_state(
            is_complete=is_complete, withheld_ms=0 if is_complete else self._withheld_ms(share)
        ), session

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """Return epochs and progress of a state, from which the lag is computed; None if there is no state."""
        self.topic.check_available()
        if not self.topic.partition_count:
            return None
        index = self.partition_for(key)
        await self._wait_until_committed(index)
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
            tuple(sorted({each.number for each in share.folded.isolations})),
        )

    def _new_session(self, index: int) -> int:
        self._sessions += 1
        return self.topic.leader_epoch_of(index) << _SESSION_BITS | self._sessions

    def _is_complete(self, share: PersistedShareState) -> bool:
        return share.has_all_leases or share.index not in self._incomplete_partitions

    def _withheld_ms(self, share: PersistedShareState) -> int:
        """Return for how many more milliseconds possibly leased records have to be withheld.

        The time starts with the first read: until then the previous leader of the share partition may have renewed
        leases, which is not stored."""
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
        """Append an update. Returns a promise of its commit, or None for an update that is not durable.

        Raises `FencedStateEpoch`, `FencedLeaderEpoch`, `NotCoordinator` if the write does not belong to the last read
        session, and the errors of the partition; then nothing is stored.
        """
        share = self._shares.get(key)
        index = self.partition_for(key) if share is None else share.index
        self.topic.check_loaded(index)
        if share is None:
            return self._create(key, index, write_token, state_epoch, leader_epoch, update)
        if update.is_snapshot:
            self._check_write(share, write_token, state_epoch, leader_epoch, durable=update.durable)
            return self._replace_state(share, leader_epoch, update)
        self._write_update(share, write_token, state_epoch, leader_epoch, update)
        promise = self.topic.commit_promise(index) if update.durable else None
        self._snapshot_if_due(share)
        return promise

    def begin_write(
        self,
        key: ShareKey,
        write_token: WriteToken,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        """Append an update that is not a whole state. `on_stored` is called once: with None when it is committed, or
        appended if it is not durable, or with the error of the commit. Raises the errors of `write`; then `on_stored`
        is not called."""
        share = self._shares.get(key)
        if share is None:
            self.topic.check_loaded(self.partition_for(key))
            raise FencedStateEpoch(f"share group {key.group}: there is no such state")
        self.topic.check_loaded(share.index)
        self._write_update(share, write_token, state_epoch, leader_epoch, update)
        if update.durable:
            self.topic.when_committed(share.index, partial(_report_commit, on_stored))
            self._snapshot_if_due(share)
        else:
            self._snapshot_if_due(share)
            on_stored(None)

    def _write_update(
        self,
        share: PersistedShareState,
        write_token: WriteToken,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
    ) -> None:
        self._check_write(share, write_token, state_epoch, leader_epoch, durable=update.durable)
        self._append_update(share, leader_epoch, update, durable=update.durable)
        if update.durable and not share.has_all_leases and not self._is_complete(share):
            share.has_all_leases = self._withheld_ms(share) == 0

    def _snapshot_if_due(self, share: PersistedShareState) -> None:
        """Append a snapshot after so many updates. Those who wait for the commit of an update do not wait for it."""
        if share.update_count >= self._settings.updates_per_snapshot:
            self._snapshot_if_possible(share)

    def _check_write(
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
            raise _fenced_leader_epoch(share, leader_epoch)
        if write_token.session != share.session:
            raise NotCoordinator(
                f"share group {share.key.group}: the state has to be read before it is written"
            )
        if write_token.write_number:
            if write_token.write_number <= share.last_write_numbers[durable]:
                raise NotCoordinator(
                    f"share group {share.key.group}: write {write_token.write_number} is late or repeated"
                )
            share.last_write_numbers[durable] = write_token.write_number

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
        self._check_share_partition_limit()
        share = PersistedShareState(key, index)
        share.state_epoch, share.session, share.has_all_leases = state_epoch, write_token.session, True
        share.last_write_numbers[update.durable] = write_token.write_number
        return self._replace_state(share, leader_epoch, update)

    def _check_share_partition_limit(self) -> None:
        if len(self._shares) >= self._settings.share_partitions_max:
            raise CoordinatorNotAvailable(
                f"there are {self._settings.share_partitions_max} states of share partitions"
            )

    def _replace_state(self, share: PersistedShareState, leader_epoch: int, update: Update) -> Promise[None]:
        """Write a snapshot with the whole state that a share partition leader sent."""
        stored = share.next_snapshot(leader_epoch=leader_epoch, wall_ms=self._clock.wall_ms(), update=update)
        promise = self._append_snapshot(share, stored)
        share.has_all_leases = True
        return promise

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Replace the state by an empty one; return when the empty one is committed.

        A call with the current state epoch changes nothing. Raises `FencedStateEpoch` for a lower one, and the errors
        of the partition."""
        index = self.partition_for(key)
        self.topic.check_loaded(index)
        known = self._shares.get(key)
        if known is not None and state_epoch < known.state_epoch:
            raise FencedStateEpoch(
                f"share group {key.group}: state epoch {state_epoch} is older than {known.state_epoch}"
            )
        if known is not None and state_epoch == known.state_epoch:
            await self._wait_until_committed(
                index
            )  # a repeated, possibly late request: the state may have been written since
            return
        share = PersistedShareState(key, index)
        if known is None:
            self._check_share_partition_limit()
        else:
            share.snapshot_epoch, share.leader_epoch = known.snapshot_epoch, known.leader_epoch
        share.state_epoch, share.session, share.has_all_leases = state_epoch, self._new_session(index), True
        empty = Update(0, True, start_offset, 0, 0, is_snapshot=True)
        stored = share.next_snapshot(
            leader_epoch=share.leader_epoch, wall_ms=self._clock.wall_ms(), update=empty
        )
        try:
            await self._append_snapshot(share, stored)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    async def delete(self, key: ShareKey) -> None:
        """Delete the state; return when the deletion is committed."""
        self.topic.check_available()
        if not self.topic.partition_count:
            return
        index = self.partition_for(key)
        self.topic.check_loaded(index)
        share = self._shares.get(key)
        self._deleted[index] = self._new_session(index)
        if share is not None:
            self._append(share, [(share.snapshot_key, None)], durable=False)
        await self._wait_until_committed(index)

    def _append_update(
        self, share: PersistedShareState, leader_epoch: int, update: Update, *, durable: bool
    ) -> None:
        value = encode_update(share.snapshot_epoch, leader_epoch, update)
        self._appending = StateRecord(share.snapshot_epoch, leader_epoch, update)
        self._append(share, [(share.update_key, value)], durable=durable)

    def _append(self, share: PersistedShareState, records: list[KeyValue], *, durable: bool) -> None:
        """Append all records or none. If they are a snapshot, `share` replaces the state in the store."""
        self._writing = share
        try:
            if durable:
                self.topic.begin_append(share.index, records, atomic=True)
            else:
                self.topic.append_without_flush(share.index, records, atomic=True)
        except MansioError as error:
            raise as_coordinator_error(error) from error
        finally:
            self._writing = self._appending = None

    def _append_snapshot(self, share: PersistedShareState, stored: StateRecord) -> Promise[None]:
        self._append(share, share.snapshot_records(stored), durable=True)
        return self.topic.commit_promise(share.index)

    def _snapshot_if_possible(self, share: PersistedShareState) -> bool:
        """Append a new snapshot of a state, so that older records can be deleted.

        Returns False after logging the error if that fails; it is tried again later."""
        stored = share.next_snapshot(leader_epoch=share.leader_epoch, wall_ms=self._clock.wall_ms())
        try:
            self._append(share, share.snapshot_records(stored), durable=False)
        except MansioError as error:
            known = fields(group=share.key.group, partition=share.index, reason=error)
            logger.warning("share_state_snapshot_not_written", extra=known)
            return False
        return True

    async def _wait_until_committed(self, index: int) -> None:
        try:
            await self.topic.wait_until_committed(index)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    # ------------------------------------------------------------------ deletion of old records

    async def prune(self, index: int) -> None:
        """Rewrite old snapshots in closed segments, then delete the records that no state needs any more."""
        shares, bases = (
            self._by_partition.setdefault(index, OrderedDict()),
            self.topic.segment_base_offsets(index),
        )
        ranges = 0
        while shares and ranges < REWRITTEN_RANGES_MAX:
            oldest = next(iter(shares.values()))
            pinned = len(bases) - bisect_right(bases, oldest.snapshot_offset)
            age_ms = self._now_ms() - oldest.snapshot_ms
            if not pinned or (pinned <= PINNED_SEGMENTS_MAX and age_ms < self._settings.snapshot_age_ms_max):
                break
            ranges += len(oldest.folded) + 1
            if not self._snapshot_if_possible(oldest):
                break
        below = next(iter(shares.values())).snapshot_offset if shares else self.topic.end_offset_of(index)
        await self._wait_until_committed(index)  # so that the oldest snapshot is durable
        self.topic.prune(index, below)

    # ------------------------------------------------------------------ coordinator view

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        """Apply a record of a partition of the topic. See `CoordinatorView.apply`."""
        share = self._writing
        if share is not None and self._appending is not None:
            share.apply_update(self._appending)
            return
        decoded = decode_key(key)
        if decoded is None:
            return
        if value is None:
            if decoded.kind == SNAPSHOT:
                self._remove(index, decoded.key)
            return
        if share is None:
            share = self._shares.get(decoded.key)
        if share is None:
            if decoded.kind == UPDATE:
                return  # its snapshot was deleted together with the state
            share = PersistedShareState(decoded.key, index)
        if index not in self._loaded_partitions:
            deferred = self._deferred_records.setdefault(index, DeferredRecords())
            deferred.add(decoded.kind, share, value, offset, self._now_ms())
        elif decoded.kind == UPDATE:
            share.apply_update(decode_value(UPDATE, value))
        else:
            share.apply_snapshot(decode_value(SNAPSHOT, value), offset, self._now_ms())
        if decoded.kind == SNAPSHOT:
            self._set_newest_snapshot(index, share)

    def _set_newest_snapshot(self, index: int, share: PersistedShareState) -> None:
        """Keep a state as the one with the newest snapshot of its partition."""
        self._shares[share.key] = share
        of_partition = self._by_partition.setdefault(index, OrderedDict())
        of_partition[share.key] = share
        of_partition.move_to_end(share.key)

    def _remove(self, index: int, key: ShareKey) -> None:
        if index in self._deferred_records:
            self._deferred_records[index].drop(key)
        if self._shares.pop(key, None) is not None:
            del self._by_partition[index][key]

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Return no records: a checkpoint of this view is never written, because the log contains the snapshots."""
        del index
        return iter(())

    def finish_load(self, index: int) -> None:
        """Apply the deferred records of a partition after all its records were read."""
        if (deferred := self._deferred_records.pop(index, None)) is not None:
            deferred.replay(self._now_ms())
        self._loaded_partitions[index] = None
        self._on_loaded()
        if not self._is_log_complete(index):
            self._incomplete_partitions[index] = None
        shares = len(self._by_partition.get(index, ()))
        if shares:
            known = fields(
                partition=index, states=shares, is_complete=index not in self._incomplete_partitions
            )
            logger.info("share_states_loaded", extra=known)

    def unload(self, index: int) -> None:
        """Drop all states of a partition."""
        for key in self._by_partition.pop(index, {}):
            del self._shares[key]
        self._deferred_records.pop(index, None)
        self._loaded_partitions.pop(index, None)
        self._incomplete_partitions.pop(index, None)
        self._deleted.pop(index, None)


def _report_commit(on_stored: Callable[[MansioError | None], None], error: MansioError | None) -> None:
    on_stored(None if error is None else as_coordinator_error(error))


def _fenced_leader_epoch(share: PersistedShareState, leader_epoch: int) -> FencedLeaderEpoch:
    return FencedLeaderEpoch(
        f"share group {share.key.group}: leader epoch {leader_epoch} is older than {share.leader_epoch}"
    )


class WriteToken(NamedTuple):
    """Fencing token of a write.

    `session`: the read session to which the write belongs. `write_number`: the number of the write in the session, from
    1, by which late and repeated writes are detected; 0 if they cannot occur.
    """

    session: int
    write_number: int = 0


class PersistedShareState:
    """State of one share partition in the store.

    `session`: the read session of the last read. `last_write_numbers`: the number of the last non-durable and of the
    last durable write of that session.
    `has_all_leases`: no lease can be missing, even if the log was not complete when it was loaded.
    """

    __slots__ = (
        "_folded",
        "_unfolded",
        "created_ms",
        "has_all_leases",
        "index",
        "key",
        "last_write_numbers",
        "leader_epoch",
        "session",
        "snapshot_epoch",
        "snapshot_key",
        "snapshot_ms",
        "snapshot_offset",
        "state_epoch",
        "update_count",
        "update_key",
        "withheld_since_ms",
    )

    def __init__(self, key: ShareKey, index: int) -> None:
        self.key = key
        self.index = index
        self.state_epoch = 0
        self.leader_epoch = UNCHANGED
        self.snapshot_epoch = UNCHANGED
        self._folded = FoldedState()
        self._unfolded: list[Update] = []
        """Updates in the log that are not applied to `_folded` yet."""
        self.snapshot_offset = 0
        self.snapshot_ms = 0.0
        self.created_ms = UNCHANGED
        self.update_count = 0
        self.session = 0
        self.last_write_numbers = [0, 0]
        self.has_all_leases = False
        self.withheld_since_ms: float | None = None
        self.snapshot_key = encode_key(SNAPSHOT, key)
        self.update_key = encode_key(UPDATE, key)

    def apply_snapshot(self, stored: StateRecord, offset: int, now_ms: float) -> None:
        """Replace the state by a snapshot in the log at `offset`."""
        self.state_epoch, self.leader_epoch = stored.state_epoch, stored.leader_epoch
        self.snapshot_epoch, self.created_ms = stored.snapshot_epoch, stored.created_ms
        self._folded = FoldedState()
        self._unfolded.clear()
        self._folded.apply(stored.update)
        self.snapshot_offset, self.snapshot_ms = offset, now_ms
        self.update_count = 0

    def apply_update(self, stored: StateRecord) -> None:
        """Apply an update in the log; an update of an older snapshot is ignored."""
        if stored.snapshot_epoch == self.snapshot_epoch:
            self.leader_epoch = max(self.leader_epoch, stored.leader_epoch)
            self._unfolded.append(stored.update)
            self.update_count += 1
            if len(self._unfolded) >= UNFOLDED_UPDATES_MAX:
                self._fold()

    @property
    def folded(self) -> FoldedState:
        """The result of the snapshot at `snapshot_offset` and all later updates."""
        if self._unfolded:
            self._fold()
        return self._folded

    def _fold(self) -> None:
        updates, self._unfolded = self._unfolded, []
        self._folded.apply_all(updates)

    def next_snapshot(self, *, leader_epoch: int, wall_ms: int, update: Update | None = None) -> StateRecord:
        """Return the next snapshot, with the state in `update` (which is a whole state), or else the current state."""
        folded = self.folded
        if update is not None:
            folded = FoldedState()
            folded.lease_bound, folded.done_count = self.folded.lease_bound, self.folded.done_count
            folded.dead_ranges, folded.redrives = self.folded.dead_ranges, self.folded.redrives
            folded.producer, folded.isolations = self.folded.producer, self.folded.isolations
            folded.apply(update)
        return StateRecord(
            self.snapshot_epoch + 1,
            leader_epoch,
            snapshot_update(folded),
            self.state_epoch,
            wall_ms if self.created_ms == UNCHANGED else self.created_ms,
            wall_ms,
        )

    def to_loaded_state(self, *, is_complete: bool, withheld_ms: int) -> LoadedState:
        """Return the state as the leader of the share partition reads it."""
        return to_loaded_state(
            self.folded,
            state_epoch=self.state_epoch,
            leader_epoch=self.leader_epoch,
            snapshot_epoch=self.snapshot_epoch,
            is_complete=is_complete,
            withheld_ms=withheld_ms,
        )

    def snapshot_records(self, stored: StateRecord) -> list[tuple[bytes, bytes | None]]:
        """Return the encoded records of a snapshot, which are appended as one batch."""
        keys = {SNAPSHOT: self.snapshot_key, UPDATE: self.update_key}
        return [(keys[kind], value) for kind, value in encode_snapshot(stored)]


def snapshot_update(folded: FoldedState) -> Update:
    """Return an update that contains a whole state."""
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
        isolations=folded.isolations or None,
    )


DEFERRED_BYTES_MAX: Final = 512 * 1024
"""Maximum size in bytes of the deferred records of one partition: about 6,000 updates, which take 0.2 s to replay."""


class _DeferredState:
    """The encoded last snapshot of a share partition, its offset, and the encoded updates after it."""

    __slots__ = ("offset", "share", "size_bytes", "values")

    def __init__(self, share: PersistedShareState, offset: int) -> None:
        self.share = share
        self.offset = offset
        self.values: list[tuple[int, bytes]] = []
        self.size_bytes = 0


class DeferredRecords:
    """The records of one partition of the topic that are not decoded yet while the partition is loaded."""

    def __init__(self) -> None:
        self._deferred: dict[ShareKey, _DeferredState] = {}
        self._size_bytes = 0

    def add(self, kind: int, share: PersistedShareState, value: bytes, offset: int, now_ms: float) -> None:
        """Defer a record. If more than `DEFERRED_BYTES_MAX` bytes are deferred, apply those of its state. Raises
        `CorruptLog`."""
        if kind == SNAPSHOT:
            self.drop(share.key)
        deferred = self._deferred.get(share.key)
        if deferred is None:
            deferred = self._deferred[share.key] = _DeferredState(share, offset)
        deferred.values.append((kind, value))
        deferred.size_bytes += len(value)
        self._size_bytes += len(value)
        if self._size_bytes > DEFERRED_BYTES_MAX:
            self.drop(share.key)
            _replay(deferred, now_ms)

    def drop(self, key: ShareKey) -> None:
        """Drop the deferred records of a state."""
        deferred = self._deferred.pop(key, None)
        if deferred is not None:
            self._size_bytes -= deferred.size_bytes

    def replay(self, now_ms: float) -> None:
        """Apply all deferred records. Raises `CorruptLog`."""
        deferred, self._deferred, self._size_bytes = self._deferred, {}, 0
        for each in deferred.values():
            _replay(each, now_ms)


def _replay(deferred: _DeferredState, now_ms: float) -> None:
    share = deferred.share
    for kind, value in deferred.values:
        stored = decode_value(kind, value)
        if kind == SNAPSHOT:
            share.apply_snapshot(stored, deferred.offset, now_ms)
        else:
            share.apply_update(stored)
