"""Reading of the group keys of a topic partition for a fair group, and the isolation of keys with a backlog.

It belongs to the leader of the share partition `BASE`, which stores the isolations, and works in turns of the event
loop (`item_turns`): the next one follows while the log has more and fewer than `SCAN_AHEAD_RECORDS` records wait in
`BASE`. So records behind a long backlog of one key are soon known, and a backlog
of many keys takes no memory.

Invariants:
* At most one change of the isolations is being stored. Nothing is read meanwhile, because it decides about the numbers.
* A backlog queue without records and without isolated key is not in use: then a group with fairness costs what any
  other does.
* A damaged batch stops the reading, as it does with order by key: the keys behind it decide about numbers, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mansio.errors import UNREADABLE_CONTENT, DamagedRange, MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.state.share_partition.dead_letters import merge_intervals
from mansio.state.share_partition.fairness.fair_index import FairIndex
from mansio.state.share_partition.in_flight import TERMINAL
from mansio.state.share_partition.types import AVAILABLE, BASE, OPEN_END
from mansio.tracebacks import without_traceback
from mansio.wire.batch.record_batch import check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_group_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Scheduler, Timer
    from mansio.state.share_partition.machine import SharePartition
    from mansio.state.share_partition.types import (
        Isolation,
        LoadedState,
        ShareKey,
        ShareSettings,
        Update,
    )

T = TypeVar("T")

SCANNED_RECORDS_MAX: Final = 2_000
"""Number of records whose keys are read in one turn of the event loop; a batch may exceed it."""

SCAN_AHEAD_RECORDS: Final = 100_000
"""Number of records that may wait in `BASE` before no more keys are read."""

REVIEW_INTERVAL_MS: Final = 1_000
"""Interval in which isolations and numbers that are not needed any more are removed, while there are any."""


class FairLeader(Protocol):
    """The leader of a share partition of a fair group; implemented by `partition_leader.SharePartitionLeader`."""

    key: ShareKey
    partition: Partition
    end_error: MansioError | None

    @property
    def is_ready(self) -> bool: ...
    @property
    def has_writes(self) -> bool: ...
    @property
    def state_machine(self) -> SharePartition: ...
    def group_end(self) -> int: ...
    def call_machine(self, method: Callable[..., T], *args: Any) -> T: ...
    async def reset_state_of(self, number: int, start: int) -> None: ...
    def persist_in_background(self, update: Update | None) -> None: ...
    def store(self, updates: Sequence[Update], on_stored: Callable[[MansioError | None], None]) -> None: ...
    def wake(self) -> None: ...
    def end(self, error: MansioError) -> None: ...


class FairScan:
    """The keys of one topic partition for one fair group. All methods run on the broker's event loop."""

    __slots__ = (
        "_damage_end",
        "_error",
        "_is_scheduled",
        "_is_storing",
        "_leader",
        "_on_queues_changed",
        "_queues",
        "_review_timer",
        "_scheduler",
        "index",
    )

    def __init__(
        self,
        leader: FairLeader,
        index: FairIndex,
        scheduler: Scheduler,
        on_queues_changed: Callable[[], None],
    ) -> None:
        """`leader`: of the share partition `BASE`. `on_queues_changed` is called when a backlog queue is added or
        removed."""
        self.index = index
        self._leader = leader
        self._scheduler = scheduler
        self._on_queues_changed = on_queues_changed
        self._queues: dict[int, FairLeader] = {}
        self._is_scheduled = False
        self._is_storing = False
        self._error: MansioError | None = None
        self._damage_end = 0
        """End of the batch that could not be read, if it is known; otherwise its begin."""
        self._review_timer: Timer | None = None

    @property
    def error(self) -> MansioError | None:
        """Why the next batch cannot be read; None if it can, or was not tried."""
        return self._error

    # ------------------------------------------------------------------ backlog queues

    def attach(self, queue: FairLeader) -> None:
        """Add the leader of a backlog queue, or replace it."""
        self._queues[queue.key.number] = queue

    def end(self, error: MansioError) -> None:
        """End the backlog queues together with `BASE`: the next leader decides about the numbers again."""
        if self._review_timer is not None:
            self._review_timer.cancel()
            self._review_timer = None
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.end(error)

    # ------------------------------------------------------------------ reading

    async def load(self, delivered_end: int) -> None:
        """Read the keys again that decided about numbers before, up to a damaged batch. `delivered_end`: offset below
        which the backlog queues have delivered all records, so that a damaged batch there does not matter."""
        index = self.index
        turns = ItemTurns(self._scheduler, Work.KEY_SCAN, items_max=SCANNED_RECORDS_MAX, items_per_look=1)
        batches = self._batches()
        while index.end < index.decided_end:
            before = index.end
            following = min(index.next_isolated_offset(before), index.decided_end)
            if following > before:
                index.append(following)  # without an isolation, they are in `BASE`
                batches = self._batches()
                continue
            if not self._add_batch(batches, index.decided_end):
                if not index.end < self._damage_end <= delivered_end:
                    break  # nothing behind it is offered
                index.append(min(self._damage_end, index.decided_end))
                batches = self._batches()
            if turns.is_over(index.end - before):
                await turns.pause()
                batches = self._batches()
        turns.end()
        self._set_review_timer()

    def advance(self, end: int) -> None:
        """Read keys below the offset `end`, as far as one turn allows; continue in later turns."""
        index = self.index
        if index.end >= end or self._is_storing:
            return
        self._note_progress()
        self._error = None
        turn = ItemTurns(self._scheduler, Work.KEY_SCAN, items_max=SCANNED_RECORDS_MAX, items_per_look=1)
        batches = self._batches()
        while index.end < end and index.waiting_count < SCAN_AHEAD_RECORDS:
            if not index.is_active and index.next_isolated_offset(index.end) == OPEN_END:
                index.append(end)
                break
            before = index.end
            if not self._add_batch(batches, end):
                break
            if turn.is_over(index.end - before):
                self._schedule()
                break
        turn.end()

    def _batches(self) -> Iterator[bytes]:
        """Return the batches of the log from the end of the index on."""
        return self._leader.partition.log.batches(self.index.end)

    def _add_batch(self, batches: Iterator[bytes], end: int) -> bool:
        """Add the keys of the next batch below the offset `end`; return false if it cannot be read, or if a change of
        the isolations has to be stored first."""
        partition, index = self._leader.partition, self.index
        begin = index.end
        self._damage_end = begin
        try:
            batch = next(batches, None)
            if batch is None:  # the log was truncated: this broker does not lead the partition any more
                return False
            header = read_header(batch)
            self._damage_end = header.last_offset + 1
            keys = {}
            try:
                if not check_stored_batch(batch).is_control:
                    keys = {name: [*read_group_keys(batch, name)] for name in index.headers_at(begin)}
            except (
                UNREADABLE_CONTENT
            ) as error:  # its records have no key, and are rejected when they are read
                partition.report_damage(begin, error)
        except MansioError as error:
            partition.report_damage(begin, error)
            self._error = without_traceback(error)
            if isinstance(error, DamagedRange):
                self._damage_end = error.end_offset
            return False
        change = index.add(keys, min(header.last_offset + 1, end))
        self._store(change)
        return change is None

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._scheduler.call_after_pause(self._continue)

    def _continue(self) -> None:
        self._is_scheduled = False
        leader = self._leader
        if leader.end_error is None and leader.is_ready:
            before = self.index.end
            self.advance(leader.group_end())
            if self.index.end > before:
                leader.wake()

    # ------------------------------------------------------------------ isolations

    def reconfigure(self, settings: ShareSettings) -> None:
        """Apply settings of the group: keys that are isolated now are not any more, if it is not fair any more or the
        group keys are in another header."""
        index = self.index
        if self._is_storing or (settings.is_fair, settings.key_header) == (index.is_active, index.header):
            return
        if (change := index.close_all()) is not None:
            self._store(change)
            return  # and again when this is stored
        index.set_header(settings.key_header)
        if index.is_active != settings.is_fair:
            index.set_active(is_active=settings.is_fair)

    def _store(self, isolations: tuple[Isolation, ...] | None) -> None:
        if isolations is None:
            return
        self._is_storing = True
        known = {each.number for each in self.index.isolations}
        if new := [each for each in isolations if each.number not in known]:
            self._scheduler.spawn(self._reset_and_store(new, isolations), name="isolate a key")
        else:
            self._begin_store(isolations)

    async def _reset_and_store(self, new: Sequence[Isolation], isolations: tuple[Isolation, ...]) -> None:
        """Replace states that backlog queues may have from before the state of `BASE` was created, and store
        isolations. `new`: those of backlog queues that had none."""
        try:
            for each in new:
                await self._leader.reset_state_of(each.number, each.first)
        except MansioError:
            self._is_storing = False  # the keys are read again when a member asks for records
            self.reconfigure(self._leader.state_machine.settings)
        else:
            if self._leader.end_error is None:
                self._begin_store(isolations)

    def _begin_store(self, isolations: tuple[Isolation, ...]) -> None:
        leader = self._leader

        def on_stored(error: MansioError | None) -> None:
            self._is_storing = False
            if error is None:
                before = self.index.numbers
                self.index.apply(isolations)
                self._set_review_timer()
                if self.index.numbers != before:
                    self._on_queues_changed()
                self.reconfigure(leader.state_machine.settings)
                self._schedule()
                leader.wake()

        try:
            update = leader.call_machine(leader.state_machine.set_isolations, isolations)
        except MansioError:
            return  # the leader has ended
        leader.store([update], on_stored)

    def _set_review_timer(self) -> None:
        is_needed = len(self.index.numbers) > 1 or self.index.mixed_chunk_count
        if self._review_timer is None and is_needed and self._leader.end_error is None:
            self._review_timer = self._scheduler.call_later(REVIEW_INTERVAL_MS, self._review)

    def _note_progress(self) -> None:
        index = self.index
        index.note_progress(BASE, self._leader.state_machine.ranges.end)
        for number, queue in self._queues.items():
            if queue.is_ready:
                index.note_progress(number, queue.state_machine.ranges.end)

    def _review(self) -> None:
        """End isolations whose records are delivered, and remove backlog queues that are not needed any more."""
        self._review_timer = None
        leader, index = self._leader, self.index
        if not leader.is_ready:
            self._set_review_timer()
            return
        self._note_progress()
        queues = [queue for number, queue in self._queues.items() if number in index.numbers]
        if len(queues) == len(index.numbers) - 1 and all(queue.is_ready for queue in queues):
            for each in (leader, *queues):  # otherwise the start of one that has no more records would stay
                try:
                    each.persist_in_background(
                        each.call_machine(each.state_machine.pass_others, leader.group_end())
                    )
                except MansioError:
                    return  # it has ended
            index.note_undelivered(BASE, leader.state_machine.passed_end)
            for queue in queues:
                index.note_undelivered(queue.key.number, queue.state_machine.undelivered_from)
            index.forget({queue.key.number: queue.state_machine.undone_ranges() for queue in queues})
            unused = [queue for queue in queues if self._is_unused(queue)]
            for queue in unused:
                index.retire(queue.key.number)
            if unused:
                self._on_queues_changed()
        if not self._is_storing:
            self._store(index.close_drained())
        self._set_review_timer()

    def _is_unused(self, queue: FairLeader) -> bool:
        return not (
            self.index.has_open_isolation_of(queue.key.number)
            or queue.state_machine.has_records
            or queue.has_writes
        )


def decided_end_of(state: LoadedState, log_end: int) -> int:
    """Return an offset at or above all that were leased or passed according to a stored state."""
    end = max([state.start_offset, *[each.last + 1 for each in state.changes]])
    return end if state.is_complete else max(end, min(state.lease_bound, log_end))


def delivered_end_of(state: LoadedState) -> int:
    """Return an offset below which a share partition has delivered all records and passed all of others, according to
    its stored state. It may be too low: AVAILABLE offsets may belong to this share partition or to another one."""
    end = state.start_offset
    for each in state.changes:
        if each.first > end or each.state == AVAILABLE:
            break
        end = max(end, each.last + 1)
    return end


def load_index(
    state: LoadedState,
    queues: Mapping[int, LoadedState],
    settings: ShareSettings,
    *,
    log_start: int,
    log_end: int,
) -> FairIndex:
    """Return the index of a fair group with the stored isolations, before the log is read. `queues`: the stored states
    of the backlog queues."""
    ends = [decided_end_of(each, log_end) for each in (state, *queues.values())]
    # A backlog queue may have begun with the first isolation, so that no other one begins before it.
    ends += [each.first if each.end == OPEN_END else each.end for each in state.isolations]
    decided_end = max(min(max(ends), log_end), log_start)
    isolations = tuple(_without_delivered(each, state, queues.get(each.number)) for each in state.isolations)
    firsts = [each.first for each in isolations if each.first < each.end]
    start = max(min([decided_end, *firsts]), log_start)
    header = next((each.header for each in isolations[::-1]), settings.key_header)
    return FairIndex(start, isolations, decided_end, header)


def _without_delivered(isolation: Isolation, state: LoadedState, queue: LoadedState | None) -> Isolation:
    """Return an isolation from the last record on that its backlog queue has delivered and `BASE` has passed, so that
    the keys before are not read again."""
    if queue is None or not state.is_complete:
        return isolation
    delivered = min(delivered_end_of(queue), delivered_end_of(state))
    return isolation._replace(first=max(isolation.first, min(delivered - 1, isolation.end)))


def undone_ranges_of(state: LoadedState) -> list[tuple[int, int]]:
    """Return the ascending ranges of the offsets of a backlog queue that were delivered and are not done, or are
    dead-lettered, according to its stored state."""
    undone = [(each.first, each.last) for each in state.changes if each.state not in TERMINAL]
    return merge_intervals([*undone, *[(each.first, each.last) for each in state.dead_ranges]])
