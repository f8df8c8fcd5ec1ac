"""The transaction coordinator: decisions are durable before markers, markers reach every partition, zombies are
fenced."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.broker.coordinator.transaction import transaction_coordinator
from mansio.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTransactionTimeout,
    InvalidTxnState,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OperationNotAttempted,
    ProducerFenced,
    RequestTimedOut,
    StorageError,
    TransactionAbortable,
    TransactionalIdNotFound,
    TransactionCoordinatorFenced,
    UnknownTopicOrPartition,
)
from mansio.state.transactions.transaction import Transaction
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.field_values import PRODUCER_EPOCH_MAX
from mansio.wire.internal_records.transaction_records import HELD_TIMEOUT_MS
from unit.broker.groups_fixtures import MemoryPartition
from unit.broker.transactions_fixtures import CoordinatorRoom


def test_a_commit_writes_one_marker_to_each_partition_and_bumps_the_epoch() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    assert room.add(producer) == [None, None]
    assert room.state() == "Ongoing"
    after = room.end(producer)
    assert after == (producer[0], producer[1] + 1)
    room.run_for()
    assert room.state() == "CompleteCommit"
    assert room.markers.results() == {("a", 0): [True], ("b", 0): [True]}
    assert {marker.producer_epoch for _, marker in room.markers.stored} == {after[1]}


def test_an_end_of_the_old_version_keeps_the_epoch_and_can_be_repeated() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer, version=0)
    assert room.end(producer, is_commit=False, bumps=False) == producer
    room.run_for()
    assert room.end(producer, is_commit=False, bumps=False) == producer
    with pytest.raises(InvalidTxnState):
        room.end(producer, is_commit=True, bumps=False)
    assert room.markers.results() == {("a", 0): [False], ("b", 0): [False]}


def test_a_transaction_takes_two_flushes_of_the_coordinators_log() -> None:
    room = CoordinatorRoom()
    producer = room.begin()

    def flushes() -> int:
        return sum(each.urgent_appends for each in room.partitions)

    before = flushes()
    room.add(producer)
    room.end(producer)
    room.run_for()
    assert room.state() == "CompleteCommit"
    assert flushes() == before + 2  # the begin and the decision, not the completion
    stored = next(each for each in room.partitions if each.stored)
    assert stored.high_watermark < stored.end_offset
    assert room.run(room.coordinator.describe("orders")).state.title == "CompleteCommit"
    assert stored.high_watermark == stored.end_offset  # a description waits for it, and requests its flush


def test_no_marker_is_sent_before_the_decision_is_durable() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    partition = room.partitions[room.index()]
    partition.holds = True
    answer = room.scheduler.start(room.coordinator.end("orders", *producer, is_commit=True, bumps_epoch=True))
    room.run_for(1000)
    assert not answer.done()
    assert room.markers.attempts == 0
    partition.holds = False
    partition.sync()
    room.run_for()
    assert answer.done()
    assert room.state() == "CompleteCommit"


def test_a_decision_that_a_power_loss_took_is_no_decision() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.partitions[room.index()].holds = True
    room.scheduler.start(room.coordinator.end("orders", *producer, is_commit=True, bumps_epoch=True))
    room = room.restarted()
    assert room.state() == "Ongoing"
    room.end(producer, is_commit=False)
    room.run_for()
    assert room.markers.results() == {("a", 0): [False], ("b", 0): [False]}


def test_markers_are_repeated_until_every_partition_has_one() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.refusals = [
        NotLeaderOrFollower(),
        RequestTimedOut(),
        StorageError(),
        TransactionCoordinatorFenced(),
    ]
    room.end(producer)
    room.run_for(5)
    assert room.state() == "PrepareCommit"
    room.run_for(5_000)
    assert room.state() == "CompleteCommit"
    assert room.markers.results() == {("a", 0): [True], ("b", 0): [True]}


def test_a_defect_in_the_completion_is_logged_and_the_completion_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    write = room.markers.write
    failures = iter([ZeroDivisionError(), ZeroDivisionError()])

    async def fail_first(*args: Any) -> Any:
        for failure in failures:
            raise failure
        return await write(*args)

    monkeypatch.setattr(room.markers, "write", fail_first)
    room.end(producer)
    room.run_for(60_000)
    assert room.state() == "CompleteCommit"


def test_partitions_that_lack_their_marker_are_counted_until_they_have_it_or_another_coordinator_takes_over() -> (
    None
):
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.held = True
    producer = room.end(producer)
    room.run_for(5)
    assert room.coordinator.markers_waiting == 2
    assert list(room.coordinator.store.prepared) == ["orders"]
    room.markers.held = False
    room.run_for(5_000)
    assert room.coordinator.markers_waiting == 0
    assert not room.coordinator.store.prepared
    room.add(producer)
    room.markers.refusals = [TransactionCoordinatorFenced()]
    room.end(producer)
    room.run_for(5_000)
    assert room.coordinator.markers_waiting == 0


def test_a_partition_without_leader_is_waited_for_and_a_deleted_one_is_not() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.leaders["a", 0] = -1
    del room.markers.leaders["b", 0]
    room.end(producer)
    room.run_for(10_000)
    assert room.state() == "PrepareCommit"
    room.markers.leaders["a", 0] = 0
    room.run_for(2_000)
    assert room.state() == "CompleteCommit"
    assert room.markers.results() == {("a", 0): [True]}


def test_a_partition_that_a_later_epoch_has_reached_does_not_stop_the_completion() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer, ("a", 0))
    room.markers.refusals = [InvalidProducerEpoch()]
    room.end(producer)
    room.run_for(1_000)
    assert room.state() == "CompleteCommit"


def test_a_restart_in_prepare_commit_sends_the_markers_again() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.held = True
    after = room.end(producer)
    room.run_for(1_000)
    room.markers.held = False
    room = room.restarted()
    room.run_for()
    assert room.state() == "CompleteCommit"
    assert room.markers.results() == {("a", 0): [True], ("b", 0): [True]}
    assert room.end(producer) == after, "the repeated end has the same answer after the restart"


def test_a_change_of_coordinator_in_prepare_commit_completes_once_with_the_new_epoch() -> None:
    room = CoordinatorRoom(cluster=True)
    shared = [MemoryPartition(room.scheduler), MemoryPartition(room.scheduler)]
    for index, partition in enumerate(shared):
        room.coordinator.topic.lead(index, partition, 4)
    room.run_for()
    producer = room.begin()
    room.add(producer)
    room.markers.held = True
    room.end(producer)
    room.run_for(50)
    room.coordinator.topic.resign(room.index())
    room.run_for(2_000)
    attempts = room.markers.attempts
    room.markers.held = False
    room.run_for(10_000)
    assert room.markers.attempts == attempts, "the former coordinator has stopped"
    with pytest.raises(NotCoordinator):
        room.end(producer)
    other = CoordinatorRoom(scheduler=room.scheduler, markers=room.markers, cluster=True)
    for index, partition in enumerate(shared):
        other.coordinator.topic.lead(index, partition, 5)
    other.run_for()
    assert other.state() == "CompleteCommit"
    assert [marker.coordinator_epoch for _, marker in other.markers.stored] == [5, 5]


def test_a_failed_append_changes_nothing() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    partition = room.partitions[room.index()]
    partition.refuses = StorageError()
    with pytest.raises(NotCoordinator):
        room.end(producer)
    assert room.state() == "Ongoing"
    partition.refuses = None
    room.run_for(10_000)
    assert room.markers.attempts == 0
    room.end(producer, is_commit=False)
    room.run_for()
    assert room.state() == "CompleteAbort"


def test_a_completion_that_cannot_be_stored_is_tried_again() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    partition = room.partitions[room.index()]
    room.end(producer)
    partition.refuses = StorageError()
    room.run_for(1_000)
    assert room.state() == "PrepareCommit"
    partition.refuses = None
    room.run_for(10_000)
    assert room.state() == "CompleteCommit"


def test_a_late_end_after_the_timeout_is_fenced() -> None:
    for bumps, version in ((True, 2), (False, 0)):
        for is_commit in (True, False):
            room = CoordinatorRoom()
            producer = room.begin(timeout_ms=5_000)
            room.add(producer, version=version)
            room.run_for(4_900)
            assert room.state() == "Ongoing"
            room.run_for(300)
            assert room.state() == "CompleteAbort"
            with pytest.raises(ProducerFenced):
                room.end(producer, is_commit=is_commit, bumps=bumps)
            assert room.markers.results() == {("a", 0): [False], ("b", 0): [False]}
            assert {marker.producer_epoch for _, marker in room.markers.stored} == {producer[1] + 1}


def test_a_timeout_survives_a_restart() -> None:
    room = CoordinatorRoom()
    producer = room.begin(timeout_ms=5_000)
    room.add(producer)
    room.run_for(3_000)
    room = room.restarted()
    room.run_for(1_900)
    assert room.state() == "Ongoing"
    room.run_for(300)
    assert room.state() == "CompleteAbort"


def test_no_producer_gets_the_timeout_that_a_held_transaction_shows() -> None:
    room = CoordinatorRoom(timeout_ms_max=2**40)
    with pytest.raises(InvalidTransactionTimeout):
        room.begin(timeout_ms=HELD_TIMEOUT_MS)


def test_a_timeout_that_cannot_be_stored_is_tried_again() -> None:
    room = CoordinatorRoom()
    room.add(room.begin(timeout_ms=1_000))
    partition = room.partitions[room.index()]
    partition.refuses = StorageError()
    room.run_for(3_000)
    assert room.state() == "Ongoing"
    partition.refuses = None
    room.run_for(1_000)
    assert room.state() == "CompleteAbort"


def test_a_new_producer_aborts_the_transaction_of_the_zombie_and_fences_it() -> None:
    room = CoordinatorRoom()
    zombie = room.begin()
    room.add(zombie)
    newer = room.begin()
    assert newer[0] == zombie[0]
    assert newer[1] > zombie[1]
    assert room.markers.results() == {("a", 0): [False], ("b", 0): [False]}
    for request in (room.end, room.add, room.bump):
        with pytest.raises(ProducerFenced):
            request(zombie)
    with pytest.raises(ProducerFenced):
        room.run(room.coordinator.verify_partitions("orders", *zombie, [("a", 0)]))
    room.add(newer)
    room.end(newer)


def test_a_producer_bumps_its_epoch_and_may_repeat_that() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    bumped = room.bump(producer)
    assert bumped == (producer[0], producer[1] + 1)
    assert room.bump(producer) == bumped
    room = room.restarted()
    assert room.bump(producer) == bumped, "also after a restart"
    assert room.bump(bumped) == (producer[0], producer[1] + 2)
    with pytest.raises(ProducerFenced):
        room.bump(producer)


def test_an_exhausted_epoch_continues_with_a_new_producer_id() -> None:
    room = CoordinatorRoom()
    producer_id, _ = room.begin()
    room.run(_store(room, Transaction(producer_id, PRODUCER_EPOCH_MAX - 1, 60_000, updated_ms=0)))
    producer = (producer_id, PRODUCER_EPOCH_MAX - 1)
    room.add(producer)
    room.markers.held = True
    after = room.end(producer)
    assert after[0] != producer_id
    assert after[1] == 0
    with pytest.raises(ConcurrentTransactions):
        room.add(after)
    room.markers.held = False
    room.run_for(2_000)
    assert room.end(producer) == after, "a repeated end has the same answer"
    assert {(each.producer_id, each.producer_epoch) for _, each in room.markers.stored} == {
        (producer_id, PRODUCER_EPOCH_MAX)
    }
    room.add(after)
    room.end(after)


def test_an_exhausted_epoch_is_replaced_at_the_initialization() -> None:
    room = CoordinatorRoom()
    producer_id, _ = room.begin()
    room.run(_store(room, Transaction(producer_id, PRODUCER_EPOCH_MAX - 1, 60_000, updated_ms=0)))
    room.add((producer_id, PRODUCER_EPOCH_MAX - 1))
    newer = room.begin()
    assert newer[0] != producer_id
    assert newer[1] == 0
    with pytest.raises((InvalidProducerIdMapping, ProducerFenced)):
        room.end((producer_id, PRODUCER_EPOCH_MAX - 1))


async def _store(room: CoordinatorRoom, transaction: Transaction) -> None:
    await room.coordinator.store.append("orders", transaction)


def test_a_request_waits_for_a_completing_transaction() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.refusals = [NotLeaderOrFollower()]
    after = room.end(producer)
    before_ms = room.scheduler.now_ms
    assert room.add(after) == [None, None]
    assert 0 < room.scheduler.now_ms - before_ms <= 100


def test_a_request_waits_at_most_100_ms() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.held = True
    after = room.end(producer)
    for work in (
        room.coordinator.add_partitions("orders", *after, [("a", 0)], client_version=2),
        room.coordinator.verify_partitions("orders", *after, [("a", 0)]),
        room.coordinator.initialize("orders", 60_000, -1, -1),
    ):
        before_ms = room.scheduler.now_ms
        with pytest.raises(ConcurrentTransactions):
            room.run(work)
        assert room.scheduler.now_ms - before_ms == pytest.approx(100, abs=2)
    assert not room.coordinator.store.entries["orders"].waiters


@pytest.mark.parametrize("restarts", [False, True])
def test_a_repeated_end_is_answered_like_the_first_one_before_the_markers_are_written(restarts: bool) -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    room.add(producer)
    room.markers.held = True
    after = room.end(producer)
    if restarts:
        room = room.restarted()
    before_ms = room.scheduler.now_ms
    assert room.end(producer) == after
    assert room.scheduler.now_ms - before_ms < 10
    with pytest.raises(InvalidTxnState):
        room.end(producer, is_commit=False)
    assert room.state() == "PrepareCommit"


def test_an_abort_without_partitions_needs_no_marker_and_bumps_the_epoch() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    after = room.end(producer, is_commit=False)
    assert after == (producer[0], producer[1] + 1)
    assert room.state() == "CompleteAbort"
    assert room.end(producer, is_commit=False) == after
    with pytest.raises(InvalidTxnState):
        room.end(after, is_commit=True)


def test_partitions_are_verified_and_never_added_half() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    outcomes = room.add(producer, ("a", 0), ("missing", 0))
    assert isinstance(outcomes[0], OperationNotAttempted)
    assert isinstance(outcomes[1], UnknownTopicOrPartition)
    assert room.state() == "Empty"
    room.add(producer, ("a", 0))
    found = room.run(room.coordinator.verify_partitions("orders", *producer, [("a", 0), ("a", 1)]))
    assert found[0] is None
    assert isinstance(found[1], TransactionAbortable)
    stored = len(room.partitions[room.index()].stored)
    room.add(producer, ("a", 0))
    assert len(room.partitions[room.index()].stored) == stored, "a repeated request stores nothing"


def test_unused_transactional_ids_expire_and_open_ones_do_not() -> None:
    room = CoordinatorRoom(expiration_ms=10_000, expiration_check_interval_ms=1_000, timeout_ms_max=1_000_000)
    room.begin("unused")
    room.add(room.begin("open", timeout_ms=1_000_000), name="open")
    room.run_for(9_000)
    assert set(room.coordinator.store.entries) == {"unused", "open"}
    room.run_for(3_000)
    assert set(room.coordinator.store.entries) == {"open"}
    assert set(room.restarted().coordinator.store.entries) == {"open"}
    with pytest.raises(TransactionalIdNotFound):
        room.run(room.coordinator.describe("unused"))


def test_any_number_of_unused_transactional_ids_expires_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_coordinator, "EXPIRED_PER_BATCH", 10)
    room = CoordinatorRoom(expiration_ms=10_000, expiration_check_interval_ms=3_600_000)
    for number in range(100):
        room.begin(f"unused-{number}")
    room.run_for(3_600_000)
    room.run_for(20_000)
    assert not room.coordinator.store.entries


def test_a_failed_deletion_of_expired_transactional_ids_waits_for_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction_coordinator, "EXPIRED_PER_BATCH", 1)
    room = CoordinatorRoom(expiration_ms=10_000, expiration_check_interval_ms=3_600_000)
    room.begin("unused")
    attempts = []

    def refuse(index: int, transactional_ids: list[str]) -> None:
        attempts.append(transactional_ids)
        raise NotEnoughReplicas("too few replicas")

    monkeypatch.setattr(type(room.coordinator.store), "delete", staticmethod(refuse))
    room.run_for(3_600_000)
    room.run_for(60_000)
    assert len(attempts) == 1


def test_invalid_ids_and_timeouts_are_refused() -> None:
    room = CoordinatorRoom(partitions_max=1)
    for timeout_ms in (0, -1, 15 * 60_000 + 1):
        with pytest.raises(InvalidTransactionTimeout):
            room.begin(timeout_ms=timeout_ms)
    with pytest.raises(InvalidRequest):
        room.begin("")
    producer = room.begin()
    with pytest.raises(InvalidRequest):
        room.add(producer, ("a", 0), ("a", 1))
    room.add(producer, ("a", 0))
    with pytest.raises(InvalidRequest):
        room.add(producer, ("a", 1))
    with pytest.raises(InvalidProducerIdMapping):
        room.end((producer[0] + 1, 0))
    with pytest.raises(InvalidProducerIdMapping):
        room.end(producer, name="unknown")


class OtherBroker:
    """Answers WriteTxnMarkers for broker 1; `failures`: how many requests get no answer first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.requests: list[Any] = []

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        assert node_id == 1
        asked = messages.decode_request(ApiKey.WRITE_TXN_MARKERS, 2, _body(request))
        self.requests.append(asked)
        if self.failures:
            self.failures -= 1
            raise RequestTimedOut
        fields = {
            "markers": [
                {
                    "producer_id": marker.producer_id,
                    "topics": [
                        {
                            "name": topic.name,
                            "partitions": [
                                {"partition_index": index, "error_code": 0}
                                for index in topic.partition_indexes
                            ],
                        }
                        for topic in marker.topics
                    ],
                }
                for marker in asked.markers
            ]
        }
        return messages.encode_response(ApiKey.WRITE_TXN_MARKERS, 2, 0, fields)[4:]


def _body(request: bytes) -> bytes:
    """The request after the length and its header: key, version, correlation id, client id, tagged fields."""
    client_id_bytes = int.from_bytes(request[12:14], "big")
    return request[14 + client_id_bytes + 1 :]


def test_markers_for_another_broker_are_requests_that_are_repeated() -> None:
    other = OtherBroker(failures=2)
    room = CoordinatorRoom(peers=other)
    room.markers.leaders["b", 0] = room.markers.leaders["a", 1] = 1
    producer = room.begin()
    room.add(producer, ("a", 0), ("a", 1), ("b", 0))
    room.end(producer)
    room.run_for(1_000)
    assert room.state() == "CompleteCommit"
    assert room.markers.results() == {("a", 0): [True]}
    assert len(other.requests) == 3
    marker = other.requests[-1].markers[0]
    assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (
        producer[0],
        producer[1] + 1,
        True,
    )
    assert [(each.name, list(each.partition_indexes)) for each in marker.topics] == [("a", [1]), ("b", [0])]
    assert marker.transaction_version == 2


def test_a_broker_without_transactions_has_no_timer() -> None:
    room = CoordinatorRoom()
    assert not room.scheduler._timers
