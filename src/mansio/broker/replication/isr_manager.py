"""ISR manager: a leader's changes of the in-sync sets (ISR) of its partitions.

Changes that become due together share a transaction of the metadata store: when a broker fails or returns, those of
thousands of partitions do. A transaction is applied only if the state of each of its partitions in the store is
unchanged, this broker's session is alive, and, for each broker that is added, the session in which that broker reached
the required offset is alive. Until the outcome is known, commits wait for the replicas of both the committed and the
proposed set (`ReplicationProgress.propose`).

Invariants:
* Only the leader changes the set, and it never removes itself.
* A replica is added when it has all records below the high watermark and below the start offset of this leader epoch.
  It is removed when its broker's session ends, or when it lags for more than `lag_ms_max`.
* After a lost response the same transaction is retried until it is known to be committed, or the state of one of its
  partitions is known to have changed; in that case the transaction cannot be committed any more.
* At most one change per partition is in flight, and `CHANGES_IN_FLIGHT_MAX` in total.
* After a conflict transactions get smaller, so that a partition that changes all the time does not prevent the changes
  of many others.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.errors import ConcurrentChange, MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.metadata.metadata_store import (
    Compare,
    Put,
    decode,
    encode,
    new_writer_id,
    transact_resolving_ambiguity,
)
from mansio.metadata.model import partition_document
from mansio.metadata.transactions import BATCH_CHANGES_MAX
from mansio.ports import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.metadata.metadata_store import Keys, MetadataStore
    from mansio.metadata.model import PartitionState
    from mansio.ports import Random, Scheduler, Timer
    from mansio.state.replica import ReplicationProgress

logger = logging.getLogger(__name__)

CHANGES_IN_FLIGHT_MAX: Final = 400
"""Maximum number of changes of different partitions in flight."""

TRANSACTIONS_IN_FLIGHT_MAX: Final = 32
"""Maximum number of transactions with such changes."""

CHECK_INTERVAL_MS: Final = 500
LAG_CHECKS: Final = 10
"""Number of checks of a replica's lag in the time that it may lag, if all replicas are in sync."""
ISR_RETRY_MS: Final = 200
CHANGE_BACKOFF: Final = Backoff(ISR_RETRY_MS, 2_000, jitter=0)


class _LeaderPartition:
    """A partition led by this broker, and its state in the metadata store."""

    __slots__ = ("ended_sessions", "is_changing", "partition", "replica", "state")

    def __init__(self, partition: Partition, replica: ReplicationProgress, state: PartitionState) -> None:
        self.partition = partition
        self.replica = replica
        self.state = state
        self.is_changing = False
        self.ended_sessions: set[int] = set()
        """In-sync brokers whose sessions have ended."""

    @property
    def is_current(self) -> bool:
        """Whether this broker still leads the partition in the same leader epoch."""
        return self.partition.replica is self.replica and not self.partition.closed


class _IsrChange:
    """A change of the in-sync set of one partition."""

    __slots__ = ("after", "before", "entry")

    def __init__(self, entry: _LeaderPartition, before: PartitionState, after: PartitionState) -> None:
        self.entry = entry
        self.before = before
        self.after = after

    @property
    def is_outdated(self) -> bool:
        """Whether the partition is known to have another state in the store than before: the change cannot be committed
        any more."""
        return self.entry.state.mod_revision != self.before.mod_revision


class IsrManager:
    """Changes the in-sync sets of the partitions led by this broker. All methods run on its event loop."""

    def __init__(
        self,
        store: MetadataStore,
        keys: Keys,
        *,
        node_id: int,
        scheduler: Scheduler,
        random: Random,
        broker_epoch_of: Callable[[int], int],
        can_join_isr: Callable[[int], bool],
        is_session_valid: Callable[[], bool],
        lag_ms_max: int,
    ) -> None:
        """`broker_epoch_of` returns the epoch of a broker's current session, 0 for none; `can_join_isr` whether a
        broker is neither fenced nor shutting down; `is_session_valid` whether this broker's session has certainly
        not expired. `lag_ms_max` is replica.lag.time.max.ms."""
        self._store = store
        self._keys = keys
        self._node_id = node_id
        self._scheduler = scheduler
        self._random = random
        self._broker_epoch_of = broker_epoch_of
        self._can_join_isr = can_join_isr
        self._is_session_valid = is_session_valid
        self._lag_ms_max = lag_ms_max
        self._leader_partitions: dict[Partition, _LeaderPartition] = {}
        self._waiting: dict[_LeaderPartition, None] = {}
        self._is_scheduled = False
        self._unchecked: deque[_LeaderPartition] = deque()
        self._checks_until_lag = 0
        self._turns = ItemTurns(scheduler, Work.ISR_CHECK)
        self._in_flight_count = 0
        self._transaction_count = 0
        self._batch_size = BATCH_CHANGES_MAX
        self._timer: Timer | None = None
        self._stopped = False
        self.expansion_count = 0
        self.shrink_count = 0

    def start(self) -> None:
        """Start the periodic check, which finds replicas that lag; other changes are found when they happen."""
        self._timer = self._scheduler.call_later(CHECK_INTERVAL_MS, self._check)

    def stop(self) -> None:
        """Start no more changes of in-sync sets."""
        self._stopped = True
        self._leader_partitions.clear()
        self._waiting.clear()
        self._unchecked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def become_leader(self, partition: Partition, state: PartitionState) -> None:
        """Manage the in-sync set of a partition that this broker leads in `state`.

        `Partition.become_leader` must have been called."""
        replica = partition.leader_progress
        assert replica is not None, "Partition.become_leader comes first"
        known = self._leader_partitions.get(partition)
        if known is not None and known.replica is replica:
            self.apply_metadata(partition, state)
            return
        entry = self._leader_partitions[partition] = _LeaderPartition(partition, replica, state)
        partition.set_isr_listener(self._on_isr_candidate)
        self._start_change_if_due(entry)

    def remove(self, partition: Partition) -> None:
        """Stop managing the in-sync set of a partition that this broker does not lead any more."""
        entry = self._leader_partitions.pop(partition, None)
        partition.set_isr_listener(None)
        if entry is not None:
            self._waiting.pop(entry, None)

    def apply_metadata(self, partition: Partition, state: PartitionState) -> None:
        """Apply a partition state of the metadata image; the current state or an older one has no effect."""
        entry = self._leader_partitions.get(partition)
        if entry is None or state.leader_epoch != entry.state.leader_epoch or state.leader != self._node_id:
            return
        if state.mod_revision > entry.state.mod_revision:
            self._apply_state(entry, state)

    def handle_session_end(self, node_id: int) -> None:
        """Remove a broker whose session ended from all in-sync sets, also if it has a new session."""
        for entry in list(self._leader_partitions.values()):
            if node_id in entry.state.isr and node_id != self._node_id:
                entry.ended_sessions.add(node_id)
                self._start_change_if_due(entry)

    def _on_isr_candidate(self, partition: Partition, node_id: int) -> None:
        del node_id
        entry = self._leader_partitions.get(partition)
        if entry is not None:
            self._start_change_if_due(entry)

    def _check(self) -> None:
        self._timer = self._scheduler.call_later(CHECK_INTERVAL_MS, self._check)
        if self._unchecked:
            return  # the last check still takes its turns
        self._checks_until_lag -= 1
        if checks_lag := self._checks_until_lag <= 0:
            self._checks_until_lag = self._lag_ms_max // (LAG_CHECKS * CHECK_INTERVAL_MS)
        self._unchecked.extend(self._leader_partitions.values())
        self._check_some(checks_lag)

    def _check_some(self, checks_lag: bool) -> None:
        """Check partitions for one turn of the event loop, and go on in the next one."""
        try:
            is_over = self._check_turn(checks_lag)
        except BaseException:
            self._unchecked.clear()  # so that the next check begins
            raise
        if not is_over:
            self._scheduler.call_after_pause(self._check_some, checks_lag)

    def _check_turn(self, checks_lag: bool) -> bool:
        """Check partitions for one turn; return whether all are checked. Of most partitions all replicas
        are in sync and have all records: they need no call. Of others that have no change to wait for only the lag is
        checked, less often."""
        unchecked, turns = self._unchecked, self._turns
        is_session_valid = self._is_session_valid()
        all_alive: dict[frozenset[int], bool] = {}
        turns.begin()
        while unchecked:
            entry = unchecked.popleft()
            replica, partition = entry.replica, entry.partition
            if (
                is_session_valid
                and replica.high_watermark == replica.confirmed_end == partition.log.end_offset
                and len(replica.in_sync) == len(entry.state.replicas)
                and replica.pending_in_sync is None
                and not entry.ended_sessions
                and partition.replica is replica
                and not partition.closed
            ):
                members = replica.in_sync
                if (alive := all_alive.get(members)) is None:
                    alive = all_alive[members] = all(
                        node == self._node_id or self._broker_epoch_of(node) for node in members
                    )
                if alive:
                    continue
            if not entry.is_current:
                if self._leader_partitions.get(partition) is entry:  # not if it leads in a new epoch by now
                    self.remove(partition)
            else:
                if not is_session_valid or partition.high_watermark < partition.end_offset:
                    partition.check_session()
                if checks_lag or self._may_change(entry):
                    self._start_change_if_due(entry)
            if unchecked and turns.is_over():
                break
        turns.end()
        return not unchecked

    def _may_change(self, entry: _LeaderPartition) -> bool:
        """Whether the in-sync set may have to change for another reason than lag: cheaper than `_target_isr`."""
        in_sync, followers = entry.replica.in_sync, entry.replica.followers()
        if entry.ended_sessions:
            return True
        if len(in_sync) > len(followers):
            return False
        return any(node not in in_sync and self._broker_epoch_of(node) for node in followers)

    # Decide

    def _start_change_if_due(self, entry: _LeaderPartition) -> None:
        """Start a change if one is due and none is in flight."""
        if entry.is_changing or self._stopped or not entry.is_current or not self._is_session_valid():
            return
        if self._target_isr(entry) == entry.replica.in_sync:
            return
        self._waiting[entry] = None
        self._schedule_changes()

    def _schedule_changes(self) -> None:
        """Start the changes that wait when everything has been handled that happens now."""
        has_room = self._in_flight_count < CHANGES_IN_FLIGHT_MAX
        if self._waiting and has_room and not self._is_scheduled:
            self._is_scheduled = True
            self._scheduler.call_soon(self._start_changes)

    def _target_isr(self, entry: _LeaderPartition) -> frozenset[int]:
        """Return the in-sync set that the partition should have, as far as this broker knows."""
        replica, partition = entry.replica, entry.partition
        lagging = replica.lagging_replicas(partition.now_ms(), self._lag_ms_max, partition.end_offset)
        removed = {
            node
            for node in replica.in_sync
            if node != self._node_id
            and (node in entry.ended_sessions or node in lagging or not self._broker_epoch_of(node))
        }
        joining = {
            node
            for node, follower in replica.followers().items()
            if node not in replica.in_sync
            and follower.broker_epoch == self._broker_epoch_of(node) > 0
            and replica.can_join_isr(node)
            and node in entry.state.replicas
            and self._can_join_isr(node)
        }
        return (replica.in_sync - removed) | joining

    def _start_changes(self) -> None:
        self._is_scheduled = False
        while self._transaction_count < TRANSACTIONS_IN_FLIGHT_MAX:
            room = CHANGES_IN_FLIGHT_MAX - self._in_flight_count
            changes, sessions = self._next_changes(min(room, self._batch_size))
            if not changes:
                return
            self._transaction_count += 1
            self._in_flight_count += len(changes)
            self._scheduler.spawn(self._change_isrs(changes, sessions), name="change in-sync sets")

    def _next_changes(self, count_max: int) -> tuple[list[_IsrChange], dict[int, int]]:
        """Take changes that wait, and propose their sets, as far as one transaction can have them. Return them, and the
        brokers whose sessions they require, with the broker epochs."""
        changes: list[_IsrChange] = []
        sessions: dict[int, int] = {}
        while self._waiting and len(changes) < count_max:
            entry = next(iter(self._waiting))
            target = (
                self._target_isr(entry)
                if entry.is_current and not entry.is_changing
                else entry.replica.in_sync
            )
            if target == entry.replica.in_sync:
                del self._waiting[entry]
                continue
            state, followers = entry.state, entry.replica.followers()
            added = {node: followers[node].broker_epoch for node in sorted(target - {*state.isr})}
            required = {self._node_id: state.leader_broker_epoch, **added}
            agrees = all(sessions.get(node, epoch) == epoch for node, epoch in required.items())
            conditions = len(changes) + 1 + len(sessions.keys() | required.keys())
            if changes and (not agrees or conditions > self._store.operations_max):
                break
            del self._waiting[entry]
            sessions |= required
            isr = (*(node for node in state.isr if node in target), *added)
            after = state._replace(isr=isr, partition_epoch=state.partition_epoch + 1)
            entry.is_changing = True
            entry.replica.propose_isr(target)
            changes.append(_IsrChange(entry, state, after))
        return changes, sessions

    # Change

    async def _change_isrs(self, changes: Sequence[_IsrChange], sessions: Mapping[int, int]) -> None:
        """Change in-sync sets in one transaction, unless the state of a partition or one of the `sessions` has changed
        meanwhile."""
        waiting = deque(changes)
        try:
            try:
                is_committed = await self._commit(changes, sessions)
            finally:
                self._transaction_count -= 1
                self._schedule_changes()
            self._batch_size = BATCH_CHANGES_MAX if is_committed else max(1, self._batch_size // 2)
            while waiting:
                change = waiting.popleft()
                if is_committed:
                    self._on_change_committed(change)
                    self._end_change(change.entry)
                else:
                    self._scheduler.spawn(self._catch_up(change), name="read an in-sync set")
        finally:
            for change in waiting:
                self._end_change(change.entry)

    def _end_change(self, entry: _LeaderPartition) -> None:
        """Allow the next change of a partition, and start it if it is due."""
        entry.is_changing = False
        self._in_flight_count -= 1
        if entry.is_current:
            self._start_change_if_due(entry)
        self._schedule_changes()

    async def _commit(self, changes: Sequence[_IsrChange], sessions: Mapping[int, int]) -> bool:
        """Retry a transaction until it is known that it is committed, or that it cannot be committed any more; return
        which of them. A partition that is not led any more does not end this, as long as others are: after a lost
        response their proposals may still be committed."""
        writer = new_writer_id(self._random)
        compares, puts = [], []
        for node, epoch in sessions.items():
            compares.append(Compare(self._keys.session(node), create_revision=epoch))
        for change in changes:
            key = self._partition_key(change.entry)
            compares.append(Compare(key, mod_revision=change.before.mod_revision))
            puts.append(Put(key, encode(partition_document(change.after), writer)))
        failures = 0
        while not self._stopped and any(change.entry.is_current for change in changes):
            if any(change.is_outdated for change in changes):
                return False
            try:
                done = await transact_resolving_ambiguity(self._store, compares, puts, writer)
            except ConcurrentChange:
                return False
            except MansioError as error:
                first = changes[0].entry.partition
                known = fields(
                    partitions=len(changes), topic=first.topic, partition=first.index, reason=error.message
                )
                logger.warning("isr_change_failed", extra=known)
                failures += 1
                await self._scheduler.sleep(CHANGE_BACKOFF.delay_ms(failures))
                continue
            for change in changes if done.succeeded else ():
                change.after = change.after._replace(mod_revision=done.revision)
            return done.succeeded
        return False

    async def _catch_up(self, change: _IsrChange) -> None:
        """Learn the state of a partition after a change that cannot be committed any more."""
        try:
            if change.entry.is_current and not change.is_outdated:
                await self._read_with_retries(change.entry)
                # Whatever the reason, the metadata image has to catch up first.
                await self._scheduler.sleep(ISR_RETRY_MS)
        finally:
            self._end_change(change.entry)

    async def _read_with_retries(self, entry: _LeaderPartition) -> None:
        failures = 0
        while entry.is_current and not self._stopped:
            try:
                await self._read_state(entry)
            except MansioError:
                failures += 1
                await self._scheduler.sleep(CHANGE_BACKOFF.delay_ms(failures))
            else:
                return

    async def _read_state(self, entry: _LeaderPartition) -> None:
        """Read the current state after a change that cannot be committed any more, and apply it."""
        stored = await self._store.get(self._partition_key(entry))
        if stored is None or not entry.is_current or stored.mod_revision < entry.state.mod_revision:
            return
        document = decode(stored.key, stored.value)
        state = entry.state
        if (document["leader"], document["leader_epoch"]) != (state.leader, state.leader_epoch):
            return  # this broker does not lead any more; the metadata image will contain the leader
        found = state._replace(
            replicas=tuple(document["replicas"]),
            isr=tuple(document["isr"]),
            partition_epoch=document["part_epoch"],
            adding=tuple(document["adding"]),
            removing=tuple(document["removing"]),
            mod_revision=stored.mod_revision,
        )
        self._apply_state(entry, found)

    def _on_change_committed(self, change: _IsrChange) -> None:
        """Count and log a committed change; apply it unless the metadata image already contained it."""
        entry, old, state = change.entry, change.before, change.after
        before, after = frozenset(old.isr), frozenset(state.isr)
        self.expansion_count += bool(after - before)
        self.shrink_count += bool(before - after)
        logger.info(
            "isr_changed",
            extra=fields(
                topic=entry.partition.topic,
                partition=entry.partition.index,
                before=old.isr,
                after=state.isr,
            ),
        )
        if entry.is_current and state.mod_revision > entry.state.mod_revision:
            self._apply_state(entry, state)

    def _apply_state(self, entry: _LeaderPartition, state: PartitionState) -> None:
        """Apply a state that the metadata store contains."""
        if not entry.is_current:
            return
        entry.state = state
        entry.ended_sessions &= {*state.isr}
        entry.replica.set_replicas(state.replicas, entry.partition.now_ms())
        entry.partition.apply_committed_isr(frozenset(state.isr))
        self._start_change_if_due(entry)

    def _partition_key(self, entry: _LeaderPartition) -> str:
        return self._keys.partition(entry.partition.topic_id, entry.partition.index)
