"""Commit of batches: all transactions of a batch or none, once, whatever is repeated and wherever the broker stops."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from mansio.broker.coordinator.runtime import BATCH_OUTPUT_BYTES_MAX
from mansio.broker.coordinator.transaction import batch_committer
from mansio.broker.coordinator.transaction.batch_committer import IDS_BYTES_MAX, TRANSACTIONS_MAX
from mansio.broker.coordinator.transaction.decision_store import to_record
from mansio.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    NotEnoughReplicasAfterAppend,
    ProducerFenced,
)
from mansio.state.transactions.batch_decision import (
    NO_BATCH,
    SINGLE_WRITE,
    BatchDecision,
    TaskTransaction,
)
from mansio.state.transactions.transaction import Transaction
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from mansio.wire.codec import messages
from mansio.wire.field_values import PRODUCER_EPOCH_MAX
from mansio.wire.internal_records.batch_decision_records import (
    decode_decision_key,
    decode_decision_value,
)
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler
from unit.broker.transactions_fixtures import CoordinatorRoom, MarkerLog

HOUR_MS = 3_600_000
QUERY = "q-1"
PARTITIONS = (("a", 0), ("a", 1), ("b", 0))


def write_task(room: CoordinatorRoom, task: int, *, slot: int = 0, held: bool = True) -> TaskTransaction:
    """Write a transaction as a task does, into the partition of its number."""
    name = f"{QUERY}-{task}-{slot}"
    producer = room.begin(name)
    assert room.add(producer, PARTITIONS[task], name=name) == [None]
    if held:
        room.run(room.coordinator.hold(name, *producer))
    return TaskTransaction(name, *producer)


def write_batch(room: CoordinatorRoom, *, slot: int = 0) -> list[TaskTransaction]:
    return [write_task(room, task, slot=slot) for task in range(3)]


def commit(
    room: CoordinatorRoom,
    batch_id: int,
    transactions: list[TaskTransaction],
    abandoned: list[TaskTransaction] | None = None,
) -> None:
    room.run(room.batches.commit(QUERY, batch_id, transactions, abandoned or []))


def committed(room: CoordinatorRoom) -> dict[tuple[str, int], int]:
    """The number of transactions that are committed in each partition. A repeated marker is harmless."""
    found: dict[tuple[str, int], set[tuple[int, int]]] = {each: set() for each in PARTITIONS}
    for partition, marker in room.markers.stored:
        if marker.is_commit:
            found[partition].add((marker.producer_id, marker.producer_epoch))
    return {partition: len(markers) for partition, markers in found.items()}


def check_each_committed(room: CoordinatorRoom, times: int) -> None:
    room.run_for(5_000)
    assert committed(room) == dict.fromkeys(PARTITIONS, times)
    assert not room.coordinator.store.ongoing, "a transaction stayed open"


# -- a held transaction --------


def test_a_held_transaction_outlives_its_timeout_and_ends_after_the_maximum() -> None:
    room = CoordinatorRoom(held_ms_max=HOUR_MS)
    held = write_task(room, 0)
    room.run_for(HOUR_MS - 5_000)
    assert room.state(held.transactional_id) == "Ongoing"
    room.run_for(10_000)
    assert room.state(held.transactional_id) == "CompleteAbort"
    with pytest.raises(ProducerFenced):
        room.end((held.producer_id, held.producer_epoch), name=held.transactional_id)


def test_the_time_of_a_held_transaction_goes_on_after_a_restart() -> None:
    room = CoordinatorRoom(held_ms_max=HOUR_MS)
    held = write_task(room, 0)
    room.run_for(HOUR_MS / 2)
    room = room.restarted(held_ms_max=HOUR_MS)
    assert room.coordinator.store.entries[held.transactional_id].transaction.is_held
    room.run_for(HOUR_MS / 2 - 5_000)
    assert room.state(held.transactional_id) == "Ongoing"
    room.run_for(10_000)
    assert room.state(held.transactional_id) == "CompleteAbort"


def test_a_new_producer_does_not_abort_a_held_transaction() -> None:
    room = CoordinatorRoom()
    held = write_task(room, 0)
    with pytest.raises(ConcurrentTransactions):
        room.begin(held.transactional_id)
    commit(room, 0, [held])
    room.run_for()
    assert room.state(held.transactional_id) == "CompleteCommit"
    room.begin(held.transactional_id)


def test_the_timeout_applies_again_to_the_next_transaction() -> None:
    room = CoordinatorRoom()
    held = write_task(room, 0)
    commit(room, 0, [held])
    room.run_for()
    after = room.coordinator.store.entries[held.transactional_id].transaction
    room.add(after.current_producer, name=held.transactional_id)
    room.run_for(70_000)
    assert room.state(held.transactional_id) == "CompleteAbort"


def test_a_transaction_that_is_not_ongoing_cannot_be_held() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    with pytest.raises(InvalidTxnState):
        room.run(room.coordinator.hold("orders", *producer))


# -- commit and abort of a batch --------


def test_a_batch_commits_all_its_transactions() -> None:
    room = CoordinatorRoom()
    commit(room, 0, write_batch(room))
    check_each_committed(room, 1)
    commit(room, 1, write_batch(room))
    check_each_committed(room, 2)


def test_a_batch_with_a_transaction_that_ended_commits_none() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    room.end(batch[1][1:], is_commit=False, name=batch[1].transactional_id)
    with pytest.raises(InvalidTxnState, match="batch 0 is not committed"):
        commit(room, 0, batch)
    room.run(room.batches.abort(QUERY, batch))
    check_each_committed(room, 0)
    commit(room, 0, write_batch(room))
    check_each_committed(room, 1)


def test_a_repeated_request_changes_nothing() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    for _ in range(3):
        commit(room, 0, batch)
    check_each_committed(room, 1)


def test_a_repeated_batch_aborts_the_transactions_of_its_second_attempt() -> None:
    room = CoordinatorRoom()
    commit(room, 0, write_batch(room))
    commit(room, 0, write_batch(room))
    check_each_committed(room, 1)
    commit(room, 1, write_batch(room))
    check_each_committed(room, 2)


def test_abandoned_transactions_are_aborted_with_the_commit() -> None:
    room = CoordinatorRoom()
    abandoned = [write_task(room, 0), write_task(room, 1, held=False)]
    commit(room, 0, write_batch(room, slot=1), abandoned)
    check_each_committed(room, 1)


def test_an_earlier_batch_is_refused() -> None:
    room = CoordinatorRoom()
    commit(room, 5, write_batch(room))
    late = write_batch(room)
    with pytest.raises(InvalidTxnState, match="batch 5 of the query is committed already"):
        commit(room, 4, late)
    room.run(room.batches.abort(QUERY, late))
    check_each_committed(room, 1)


def test_an_abort_changes_no_decision() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    room.markers.held = True
    request = room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    room.run_for(100)
    assert request.done()  # decided; the markers follow
    room.run(room.batches.abort(QUERY, batch))
    room.markers.held = False
    check_each_committed(room, 1)


def test_no_transaction_is_committed_before_the_decision_is_durable() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    partition = room.partitions[room.index(QUERY)]
    partition.holds = True
    request = room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    room.run_for(10_000)
    assert not request.done()
    assert not room.markers.stored
    partition.holds = False
    partition.sync()
    check_each_committed(room, 1)


def test_another_request_of_the_query_is_refused_meanwhile() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    partition = room.partitions[room.index(QUERY)]
    partition.holds = True
    request = room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    with pytest.raises(ConcurrentTransactions):
        room.run(room.batches.abort(QUERY, batch))
    partition.holds = False
    partition.sync()
    room.run_for()
    assert request.done()
    room.run(room.batches.abort(QUERY, batch))
    check_each_committed(room, 1)


@pytest.mark.parametrize("query_id", ["", "q" * 1_001])
def test_an_invalid_query_id_is_refused(query_id: str) -> None:
    room = CoordinatorRoom()
    with pytest.raises(InvalidRequest):
        room.run(room.batches.commit(query_id, 0, []))


# -- the broker stops at any point --------


def run_steps(room: CoordinatorRoom, work: Any, steps: int) -> bool:
    """Run `work` for a number of callbacks; whether it has ended."""
    scheduler = room.scheduler
    task: Any = scheduler.spawn(work, name="test")
    for _ in range(steps):
        if task.done():
            return True
        if scheduler._ready:
            callback, args = scheduler._ready.popleft()
            callback(*args)
        else:
            scheduler._fire()
    return bool(task.done())


def power_loss(room: CoordinatorRoom) -> CoordinatorRoom:
    """A new coordinator with what is durable. What the old one still does has no effect."""
    restarted = room.restarted()
    room.sender._local = MarkerLog(room.scheduler)
    room.run_for(1_000)
    return restarted


def test_a_power_loss_at_any_step_leaves_all_or_nothing_and_a_repeated_batch_commits_once() -> None:
    steps = 0
    decided = 0
    while True:
        room = CoordinatorRoom()
        commit(room, 0, write_batch(room))
        room.run_for()
        is_complete = run_steps(room, room.batches.commit(QUERY, 1, write_batch(room)), steps)
        room = power_loss(room)
        room.run_for(5_000)
        after = set(committed(room).values())
        assert after in ({1}, {2}), f"a part of the batch is committed after step {steps}"
        decided += after == {2}
        second = []
        abandoned = []
        for task in range(3):
            name = f"{QUERY}-{task}-0"
            entry = room.coordinator.store.entries[name].transaction
            if entry.is_held:
                abandoned.append(TaskTransaction(name, entry.producer_id, entry.producer_epoch))
            second.append(write_task(room, task, slot=int(entry.is_held)))
        commit(room, 1, second, abandoned)
        check_each_committed(room, 2)
        commit(room, 2, write_batch(room))
        check_each_committed(room, 3)
        if is_complete:
            break
        steps += 1
    assert steps > 20
    assert decided > 5


def test_a_loaded_decision_is_carried_out_without_a_request() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)

    async def fail(transaction: TaskTransaction, *, is_commit: bool) -> None:
        raise CoordinatorNotAvailable

    room.ender.end = fail
    room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    room.run_for(100)
    assert not room.markers.stored
    room = room.restarted()
    check_each_committed(room, 1)


def test_a_loaded_decision_is_carried_out_only_when_it_is_committed() -> None:
    """A new leader finds the decision in its log, and does not know yet whether all replicas in sync have it."""
    room = CoordinatorRoom()
    transaction = write_task(room, 1)
    assert room.index(transaction.transactional_id) != room.index(QUERY)

    async def fail(transaction: TaskTransaction, *, is_commit: bool) -> None:
        raise CoordinatorNotAvailable

    room.ender.end = fail
    room.scheduler.start(room.batches.commit(QUERY, 0, [transaction]))
    room.run_for(100)
    scheduler = VirtualScheduler()
    room.markers.scheduler = scheduler
    partitions = [each.after_power_loss(scheduler) for each in room.partitions]
    undecided = partitions[room.index(QUERY)]
    undecided.high_watermark, undecided.holds = 0, True
    room = CoordinatorRoom(scheduler=scheduler, markers=room.markers, partitions=partitions)
    room.run_for(5_000)
    assert not room.markers.stored
    undecided.holds = False
    undecided.sync()
    room.run_for(5_000)
    assert room.markers.results() == {PARTITIONS[1]: [True]}


def test_a_decided_batch_is_committed_although_the_time_of_its_transactions_ends_meanwhile() -> None:
    """The tasks ended long ago, and a coordinator cannot be reached between the decision and the end."""
    room = CoordinatorRoom(held_ms_max=HOUR_MS)
    batch = write_batch(room)
    room.run_for(HOUR_MS - 5_000)
    real_end = room.ender.end
    reachable_from_ms = room.scheduler.wall_ms() + 60_000

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if transaction == batch[1] and room.scheduler.wall_ms() < reachable_from_ms:
            raise CoordinatorNotAvailable
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end
    request = room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    room.run_for(60_000)
    assert request.done()
    check_each_committed(room, 1)


def test_a_decision_is_carried_out_after_an_unexpected_error() -> None:
    room = CoordinatorRoom()
    transaction = write_task(room, 0)
    real_end = room.ender.end
    defects = [ValueError("a defect")]

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if defects:
            raise defects.pop()
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end
    request = room.scheduler.start(room.batches.commit(QUERY, 0, [transaction]))
    room.run_for(5_000)
    assert not defects
    assert request.done()
    assert committed(room)[PARTITIONS[0]] == 1


def test_a_commit_that_waits_for_another_coordinator_can_be_repeated() -> None:
    room = CoordinatorRoom(batch_commit_wait_ms=1_000)
    batch = write_batch(room)
    errors: list[MansioError] = [CoordinatorNotAvailable()] * 100
    real_end = room.ender.end

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if errors:
            raise errors.pop()
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end
    with pytest.raises(CoordinatorNotAvailable):
        commit(room, 0, batch)
    while errors:
        room.run_for(1_000)
    room.run_for(5_000)
    commit(room, 0, batch)
    check_each_committed(room, 1)


# -- aborts and changes of the leader --------


class DelayedAborts:
    """The requests of one leader to abort transactions: they are under way until `arrive`."""

    def __init__(self, room: CoordinatorRoom) -> None:
        self.transactions: list[TaskTransaction] = []
        self._real_end = room.ender.end
        room.ender.end = self._end

    async def _end(self, transaction: TaskTransaction, *, is_commit: bool) -> None:
        if is_commit:
            await self._real_end(transaction, is_commit=True)
            return
        self.transactions.append(transaction)
        raise CoordinatorNotAvailable("the coordinator did not answer")

    async def arrive(self, room: CoordinatorRoom) -> None:
        late, self.transactions = self.transactions, []
        for each in late:
            with suppress(MansioError):
                await room.coordinator.end(*each, is_commit=False, bumps_epoch=True)


def deliver_before_commits(room: CoordinatorRoom, late: DelayedAborts) -> None:
    """Let late requests arrive between the decision of a leader to commit and its first request to do so."""
    real_end = room.ender.end

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if is_commit:
            await late.arrive(room)
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end


@pytest.mark.parametrize("origin", ["abort", "abandoned", "repeated batch"])
def test_an_abort_that_arrives_after_a_change_of_the_leader_does_not_split_a_batch(origin: str) -> None:
    room = CoordinatorRoom()
    commit(room, 0, write_batch(room))
    room.run_for()
    first, second = write_batch(room), write_batch(room, slot=1)
    requests = {
        "abort": lambda: room.batches.abort(QUERY, second[1:2]),
        "abandoned": lambda: room.batches.commit(QUERY, 1, first, second[1:2]),
        "repeated batch": lambda: room.batches.commit(QUERY, 0, second[1:2]),
    }
    late = DelayedAborts(room)
    room.scheduler.start(requests[origin]())
    room.run_for(20)
    assert late.transactions
    before = 2 if origin == "abandoned" else 1
    room = room.restarted()
    deliver_before_commits(room, late)
    with suppress(InvalidTxnState):
        commit(room, 2, second)
    room.run_for(5_000)
    room.run(late.arrive(room))
    room.run_for(5_000)
    assert committed(room) == dict.fromkeys(PARTITIONS, before)
    with pytest.raises(InvalidTxnState, match="batch 2 is not committed"):
        commit(room, 2, second)
    room.run(room.batches.abort(QUERY, [*first, *second]))
    commit(room, 2, write_batch(room))
    check_each_committed(room, before + 1)


def test_no_abort_is_sent_before_it_is_stored() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    late = DelayedAborts(room)
    partition = room.partitions[room.index(QUERY)]
    partition.holds = True
    room.scheduler.start(room.batches.abort(QUERY, batch))
    room.run_for(10_000)
    assert not late.transactions
    partition.holds = False
    partition.sync()
    room.run_for(10)
    assert late.transactions


def test_stored_aborts_are_carried_out_by_the_next_leader_without_a_request_and_then_removed() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    DelayedAborts(room)
    room.scheduler.start(room.batches.abort(QUERY, batch))
    room.run_for(100)
    stored = room.coordinator.store.decisions.entries[QUERY].decision
    assert stored.aborting == tuple(batch)
    room = room.restarted()
    check_each_committed(room, 0)
    entry = room.coordinator.store.decisions.entries[QUERY]
    assert entry.decision == BatchDecision(NO_BATCH, (), entry.decision.updated_ms)
    commit(room, 0, write_batch(room))
    check_each_committed(room, 1)


def test_an_abort_stays_stored_until_each_transaction_is_ended() -> None:
    room = CoordinatorRoom(batch_commit_wait_ms=1_000)
    batch = write_batch(room)
    real_end = room.ender.end
    is_reachable = False

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if transaction == batch[1] and not is_reachable:
            raise CoordinatorNotAvailable
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end
    with pytest.raises(CoordinatorNotAvailable):
        room.run(room.batches.abort(QUERY, batch))
    with pytest.raises(InvalidTxnState, match="is being aborted"):
        commit(room, 0, batch)
    with pytest.raises(CoordinatorNotAvailable):
        commit(room, 0, write_batch(room, slot=1))
    assert room.coordinator.store.decisions.entries[QUERY].decision.aborting == tuple(batch)
    is_reachable = True
    room.run_for(5_000)
    for _ in range(3):
        room.run(room.batches.abort(QUERY, batch))
    assert room.coordinator.store.decisions.entries[QUERY].decision.is_settled
    assert not any(committed(room).values())


def test_a_request_that_outlasts_its_leadership_decides_nothing() -> None:
    """Another leader may have decided meanwhile, although this broker leads the partition again."""
    room = CoordinatorRoom(cluster=True)
    broker: Any = type("Broker", (), {"node_id": 0})()
    room.lookup.brokers = {0: broker, 1: broker}
    shared = [MemoryPartition(room.scheduler), MemoryPartition(room.scheduler)]
    for index, partition in enumerate(shared):
        room.coordinator.topic.lead(index, partition, 4)
    room.run_for()
    transaction = write_task(room, 1)
    index = room.index(QUERY)
    assert room.index(transaction.transactional_id) != index
    real_hold = room.ender.hold

    async def hold(transaction: TaskTransaction) -> None:
        room.coordinator.topic.resign(index)
        room.coordinator.topic.lead(index, shared[index], 6)
        await room.scheduler.sleep(100)
        await real_hold(transaction)

    room.ender.hold = hold
    with pytest.raises(CoordinatorNotAvailable, match="leader"):
        commit(room, 0, [transaction])
    assert not room.coordinator.store.decisions.entries
    room.ender.hold = real_hold
    commit(room, 0, [transaction])
    room.run_for()
    assert committed(room)[PARTITIONS[1]] == 1


def test_aborts_with_a_batch_need_no_further_flush() -> None:
    room = CoordinatorRoom()
    first = write_task(room, 1)
    index = room.index(QUERY)
    slot = next(each for each in range(1, 9) if room.index(f"{QUERY}-1-{each}") != index)
    abandoned = write_task(room, 1, slot=slot)
    assert room.index(first.transactional_id) != index
    partition = room.partitions[index]
    before = partition.urgent_appends
    commit(room, 0, [first])
    room.run_for()
    assert partition.urgent_appends - before == 2, "the decision and its end"
    second = write_task(room, 1)
    before = partition.urgent_appends
    commit(room, 1, [second], [abandoned])
    room.run_for()
    assert partition.urgent_appends - before == 2
    third = write_task(room, 1)
    before = partition.urgent_appends
    room.run(room.batches.abort(QUERY, [third]))
    room.run_for()
    assert partition.urgent_appends - before == 1


# -- transactions whose time may have ended before the decision was carried out --------


def late_decision(age_ms: int, *, failures: int) -> None:
    """A decision is stored, its transactions are ended, and a leader carries it out `age_ms` later: its first attempts
    fail."""
    room = CoordinatorRoom(held_ms_max=HOUR_MS)
    transaction = write_task(room, 1)

    async def fail(transaction: TaskTransaction, *, is_commit: bool) -> None:
        raise CoordinatorNotAvailable

    room.ender.end = fail
    room.scheduler.start(room.batches.commit(QUERY, 0, [transaction]))
    room.run_for(100)
    room.batches.close()
    producer = (transaction.producer_id, transaction.producer_epoch)
    room.end(producer, is_commit=True, name=transaction.transactional_id)
    room.run_for(100)
    room.begin(transaction.transactional_id)
    room.run_for(age_ms)
    scheduler = VirtualScheduler()
    scheduler.now_ms = room.scheduler.now_ms
    room.markers.scheduler = scheduler
    partitions = [each.after_power_loss(scheduler) for each in room.partitions]
    undecided = partitions[room.index(QUERY)]
    undecided.high_watermark, undecided.holds = 0, True
    room = CoordinatorRoom(
        scheduler=scheduler, markers=room.markers, partitions=partitions, held_ms_max=HOUR_MS
    )
    real_end = room.ender.end
    errors = [CoordinatorNotAvailable() for _ in range(failures)]

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if errors:
            raise errors.pop()
        await real_end(transaction, is_commit=is_commit)

    room.ender.end = end
    undecided.holds = False
    undecided.sync()
    room.run_for(5_000)
    assert not errors
    assert room.coordinator.store.decisions.entries[QUERY].decision.is_settled


@pytest.mark.parametrize("failures", [0, 2])
def test_a_decision_that_was_carried_out_too_late_is_reported(
    caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    late_decision(HOUR_MS // 2 - 60_000, failures=failures)
    assert "batch_may_be_committed_in_part" not in caplog.messages
    late_decision(HOUR_MS // 2, failures=failures)
    assert "batch_may_be_committed_in_part" in caplog.messages


def test_a_transaction_that_this_process_has_committed_is_not_ended_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The transactional id of the first task is in use again before that of the second can be reached."""
    room = CoordinatorRoom(held_ms_max=HOUR_MS)
    batch = [write_task(room, 0), write_task(room, 1)]
    real_end = room.ender.end
    reachable_from_ms = room.scheduler.wall_ms() + HOUR_MS * 0.6
    ended = []

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        if transaction == batch[1] and room.scheduler.wall_ms() < reachable_from_ms:
            raise CoordinatorNotAvailable
        await real_end(transaction, is_commit=is_commit)
        ended.append(transaction)

    room.ender.end = end
    room.scheduler.start(room.batches.commit(QUERY, 0, batch))
    room.run_for(1_000)
    room.begin(batch[0].transactional_id)
    room.run_for(HOUR_MS * 0.7)
    assert ended == batch
    assert committed(room) == {("a", 0): 1, ("a", 1): 1, ("b", 0): 0}
    assert not room.coordinator.store.decisions.entries[QUERY].ended
    assert "batch_may_be_committed_in_part" not in caplog.messages


# -- bounds --------


@pytest.mark.parametrize("named", ["transactions", "abandoned", "aborted"])
@pytest.mark.parametrize(
    ("count", "bytes_each", "message"),
    [
        (TRANSACTIONS_MAX + 1, 1, "100001"),
        (1_000, 16_800, "bytes; the maximum is"),
        (1, 0, "empty"),
        (1, 32_768, "too long"),
    ],
)
def test_a_batch_that_no_decision_can_name_is_refused_before_anything_is_done(
    named: str, count: int, bytes_each: int, message: str
) -> None:
    room = CoordinatorRoom()
    many = [TaskTransaction("i" * bytes_each, number, 0) for number in range(count)]
    requests = {
        "transactions": lambda: room.batches.commit(QUERY, 0, many),
        "abandoned": lambda: room.batches.commit(QUERY, 0, [], many),
        "aborted": lambda: room.batches.abort(QUERY, many),
    }
    with pytest.raises(InvalidRequest, match=message):
        room.run(requests[named]())
    assert not room.partitions, "not even the topic was created"


@pytest.mark.full
def test_the_largest_decision_can_be_loaded_and_compacted_and_its_request_fits_into_a_frame() -> None:
    id_bytes = IDS_BYTES_MAX // TRANSACTIONS_MAX
    most = tuple(TaskTransaction("i" * id_bytes, 2**63 - 1, 2**15 - 1) for _ in range(TRANSACTIONS_MAX))
    key, value = to_record("q" * 1_000, BatchDecision(2**63 - 1, most, 2**63 - 1, most))
    assert len(build_batch([(2**63 - 1, key, value, ())])) <= BATCH_OUTPUT_BYTES_MAX
    named = [each._asdict() for each in most]
    request = {"query_id": "q", "batch_id": 0, "committed": True, "transactions": named, "abandoned": named}
    frame = messages.encode_request(ApiKey.COMMIT_BATCH, 0, 0, "c", request)
    assert len(frame) <= 100 << 20, "the default of socket_request_max_bytes"


@pytest.mark.full
def test_a_batch_of_the_most_tasks_is_committed_and_one_decision_stored() -> None:
    room = CoordinatorRoom()
    commit(room, 0, [])
    most = [TaskTransaction(f"mansio-spark:{QUERY}:{task}:0", task, 0) for task in range(TRANSACTIONS_MAX)]
    ended: Counter[bool] = Counter()

    async def hold(transaction: TaskTransaction) -> None:
        return None

    async def end(transaction: TaskTransaction, *, is_commit: bool) -> None:
        ended[is_commit] += 1

    room.ender.hold, room.ender.end = hold, end
    commit(room, 1, most[1:], most[:1])
    room.run_for()
    assert ended == {True: TRANSACTIONS_MAX - 1, False: 1}
    decisions = room.restarted().coordinator.store.decisions.entries
    assert (decisions[QUERY].decision.batch_id, decisions[QUERY].decision.is_settled) == (1, True)


def test_the_id_before_all_batches_is_refused() -> None:
    room = CoordinatorRoom()
    with pytest.raises(InvalidRequest):
        commit(room, NO_BATCH, [])


def test_queries_that_are_refused_because_of_the_limit_can_abort_what_they_have_written() -> None:
    room = CoordinatorRoom(queries_max=1)
    commit(room, 0, [write_task(room, 0)])
    refused = [write_task(room, 1)]
    with pytest.raises(CoordinatorNotAvailable):
        room.run(room.batches.commit("another", 0, refused))
    room.run(room.batches.abort("another", refused))
    third = [write_task(room, 2)]
    with pytest.raises(CoordinatorNotAvailable):
        room.run(room.batches.abort("third", third))
    room.run_for(3 * HOUR_MS)
    room.run(room.batches.abort("third", third))
    assert not room.coordinator.store.ongoing


@pytest.mark.full
def test_hundreds_of_batches_leave_one_decision_and_the_slots_of_the_tasks() -> None:
    room = CoordinatorRoom()
    for batch_id in range(200):
        commit(room, batch_id, [write_task(room, 0)])
        room.run_for(5)
    store = room.coordinator.store
    assert len(store.entries) == 1
    assert len(store.decisions.entries) == 1
    assert store.decisions.entries[QUERY].decision.transactions == ()
    assert committed(room)["a", 0] == 200


def test_batches_go_on_with_a_new_producer_id_when_the_epochs_of_a_slot_are_used_up() -> None:
    room = CoordinatorRoom()
    name = f"{QUERY}-0-0"
    producer_id, _ = room.begin(name)
    last = Transaction(producer_id, PRODUCER_EPOCH_MAX - 5, 60_000, updated_ms=room.scheduler.wall_ms())

    async def store() -> None:
        await room.coordinator.store.append(name, last)

    room.run(store())
    producers = set()
    for batch_id in range(8):
        transaction = write_task(room, 0)
        producers.add(transaction.producer_id)
        for _ in range(2):
            commit(room, batch_id, [transaction])
        room.run_for()
        if batch_id % 3 == 2:
            room = room.restarted()
    assert committed(room)["a", 0] == 8
    assert len(producers) == 2


def test_a_query_is_forgotten_when_it_is_not_used_for_long_and_not_before() -> None:
    settings: dict[str, Any] = {"query_expiration_ms": 10 * HOUR_MS, "expiration_check_interval_ms": HOUR_MS}
    room = CoordinatorRoom(**settings)
    commit(room, 0, write_batch(room))
    room.run_for(9 * HOUR_MS)
    assert QUERY in room.coordinator.store.decisions.entries
    room.run_for(3 * HOUR_MS)
    assert QUERY not in room.coordinator.store.decisions.entries
    assert QUERY not in room.restarted(**settings).coordinator.store.decisions.entries


def test_single_writes_are_forgotten_soon_and_do_not_use_up_the_queries() -> None:
    """Each call of `write` without a query has an id of its own."""
    room = CoordinatorRoom(queries_max=10, expiration_check_interval_ms=HOUR_MS)
    commit(room, 0, [write_task(room, 0)])
    for number in range(50):
        room.run(room.batches.commit(f"write-{number}", SINGLE_WRITE, [write_task(room, 1)]))
        for _ in range(2):
            room.run(room.batches.commit(f"write-{number}", SINGLE_WRITE, []))
        room.run_for(HOUR_MS / 3)
    room.run_for(5 * HOUR_MS)
    assert list(room.coordinator.store.decisions.entries) == [QUERY]
    assert committed(room)["a", 1] == 50


def test_more_queries_than_the_limit_are_refused_and_known_ones_go_on() -> None:
    room = CoordinatorRoom(queries_max=1)
    commit(room, 0, write_batch(room))
    with pytest.raises(CoordinatorNotAvailable):
        room.run(room.batches.commit("another", 0, []))
    commit(room, 1, write_batch(room))
    check_each_committed(room, 2)


# -- coordinators on other brokers --------


class Peers:
    """Other brokers: each request is recorded and answered with a code."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        assert node_id == 1
        key = int.from_bytes(request[4:6], "big")
        client_length = int.from_bytes(request[12:14], "big")
        self.asked.append((key, messages.decode_request(key, request[7], request[15 + client_length :])))
        return messages.encode_response(key, request[7], 0, {"error_code": 0})[4:]


def test_transactions_of_other_coordinators_are_held_and_ended_by_requests() -> None:
    peers = Peers()
    room = CoordinatorRoom(cluster=True, peers=peers)
    broker: Any = type("Broker", (), {"node_id": 1})()
    room.lookup.brokers = {0: broker, 1: broker}
    transaction = TaskTransaction("t", 7, 3)
    room.run(room.ender.hold(transaction))
    room.run(room.ender.end(transaction, is_commit=True))
    (held, first), (ended, second) = peers.asked
    assert (held, ended) == (ApiKey.PREPARE_TRANSACTION, ApiKey.END_TXN)
    for each in (first, second):
        assert (each.transactional_id, each.producer_id, each.producer_epoch) == transaction
    assert second.committed


# -- records --------


def test_a_snapshot_has_the_decisions() -> None:
    room = CoordinatorRoom()
    commit(room, 3, write_batch(room))
    records = dict(room.coordinator.store.snapshot(room.index(QUERY)))
    [value] = [each for key, each in records.items() if decode_decision_key(key) == QUERY]
    assert decode_decision_value(value).batch_id == 3


def test_a_decision_is_stored_under_a_key_version_that_kafka_does_not_know() -> None:
    room = CoordinatorRoom(markers=None)
    batch = write_batch(room)
    commit(room, 3, batch)
    found = []
    for stored in room.partitions[room.index(QUERY)].stored:
        for record in read_records(stored, output_bytes_max=1 << 20):
            if record.key is not None and decode_decision_key(bytes(record.key)) == QUERY:
                assert bytes(record.key[:2]) == (20_113).to_bytes(2, "big")
                assert record.value is not None
                found.append(decode_decision_value(bytes(record.value)))
    assert [each.batch_id for each in found] == [3, 3]
    assert found[0].transactions == tuple(tuple(each) for each in batch)
    assert found[1].transactions == ()


# -- what must not stop a query --------


class UncommittedLog:
    """Lets the commit of the next records of `__transaction_state` fail, although they are in the log: the in-sync
    replicas were too few for a moment."""

    def __init__(self, room: CoordinatorRoom) -> None:
        self._room = room
        self._append = room.coordinator.topic.append

    def __enter__(self) -> None:
        def append(*arguments: Any, **named: Any) -> Any:
            self._append(*arguments, **named)
            failed: Any = self._room.scheduler.promise()
            failed.set_exception(NotEnoughReplicasAfterAppend("too few replicas are in sync"))
            return failed

        self._room.coordinator.topic.append = append

    def __exit__(self, *_: object) -> None:
        self._room.coordinator.topic.append = self._append


def test_a_decision_whose_commit_was_late_is_carried_out_without_another_request() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    with UncommittedLog(room), pytest.raises(CoordinatorNotAvailable):
        commit(room, 0, batch)
    check_each_committed(room, 1)
    assert room.coordinator.store.decisions.entries[QUERY].decision.is_settled


def test_an_abort_whose_commit_was_late_is_carried_out_without_another_request() -> None:
    room = CoordinatorRoom()
    batch = write_batch(room)
    with UncommittedLog(room), pytest.raises(CoordinatorNotAvailable):
        room.run(room.batches.abort(QUERY, batch))
    check_each_committed(room, 0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("how", ["abort", "abandoned", "commit"])
def test_a_partition_without_leader_stops_no_later_batch_that_does_not_write_to_it(
    how: str, restarts: bool
) -> None:
    room = CoordinatorRoom(batch_commit_wait_ms=1_000)
    old = write_task(room, 2)
    room.markers.leaders[PARTITIONS[2]] = -1
    if how == "abort":
        room.run(room.batches.abort(QUERY, [old]))
    elif how == "abandoned":
        commit(room, 0, [write_task(room, 0, slot=5)], [old])
    else:
        commit(room, 0, [old])
    room.run_for(1_000)
    if restarts:
        entry = room.coordinator.store.decisions.entries[QUERY]
        if how == "commit":  # a leader that has carried out a decision and not stored that
            decision = BatchDecision(0, (old,), room.scheduler.wall_ms())
            room.run(store(room, entry.index, to_record(QUERY, decision)))
        room = room.restarted(batch_commit_wait_ms=1_000)
        room.run_for(60_000)
    commit(room, 1, [write_task(room, 0), write_task(room, 1)])
    room.run_for(1_000)
    assert committed(room)[PARTITIONS[1]] == 1


async def store(room: CoordinatorRoom, index: int, record: Any) -> None:
    await room.coordinator.topic.append(index, [record])


def test_a_batch_whose_coordinators_do_not_answer_does_not_keep_the_query_busy_for_each_task() -> None:
    room = CoordinatorRoom()
    asked = Counter[str]()

    async def hold(transaction: TaskTransaction) -> None:
        asked[transaction.transactional_id] += 1
        await room.scheduler.sleep(5_000)
        raise CoordinatorNotAvailable("the coordinator did not answer")

    room.ender.hold = hold
    before_ms = room.scheduler.now_ms
    with pytest.raises(CoordinatorNotAvailable):
        commit(room, 0, [TaskTransaction(f"task-{number}", 1, 1) for number in range(2_000)])
    assert room.scheduler.now_ms - before_ms < 6_000
    assert len(asked) < 2_000


def test_any_number_of_expired_queries_is_removed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_committer, "EXPIRED_PER_BATCH", 10)
    room = CoordinatorRoom(expiration_check_interval_ms=HOUR_MS)
    for number in range(100):
        room.run(room.batches.commit(f"write-{number}", SINGLE_WRITE, []))
    write_task(room, 0)
    room.run_for(2 * HOUR_MS + 60_000)
    assert not room.coordinator.store.decisions.entries
