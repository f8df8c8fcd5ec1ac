"""Guarantees of transactions in the client, with a broker whose answers are lost, refused or late."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.client import OutgoingRecord, ProducerOptions
from mansio.client.producer.transaction_requests import GroupMemberIdentity
from mansio.client.transactions.transaction import Transaction
from mansio.client.transactions.transactional_producer import TransactionalProducer
from mansio.errors import (
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    MessageTooLarge,
    ProducerFenced,
    TransactionAborted,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
    Unavailable,
)
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import Backoff
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.present import present
from support.tiers import examples
from unit.client.model_coordinator import ModelCoordinator
from unit.net.stub_broker import StubBroker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

FAST = Backoff(first_ms=1, longest_ms=10)
VERSIONS = pytest.mark.parametrize("version", [1, 2])
MESSAGE_TOO_LARGE, COORDINATOR_NOT_AVAILABLE, CONCURRENT_TRANSACTIONS = 10, 15, 51


class Client:
    """Makes transactions of one transactional id."""

    def __init__(self, cluster: Cluster, broker: StubBroker, model: ModelCoordinator, **options: Any) -> None:
        self.broker, self.model = broker, model
        self.producer = TransactionalProducer(
            cluster, "orders-1", ProducerOptions(**{"backoff": FAST, "delivery_timeout_ms": 5_000, **options})
        )

    def transaction(self, timeout_ms: int = 60_000) -> Transaction:
        return Transaction(self.producer, timeout_ms)

    async def commit(self, *values: bytes) -> None:
        async with self.transaction() as txn:
            for index, value in enumerate(values):
                await txn.publish("t", value, partition=index % 3)

    def give_up_soon(self) -> None:
        """Ends are repeated for a second only."""
        self.producer.options = replace(self.producer.options, delivery_timeout_ms=100)

    def ends(self) -> list[bool]:
        return [request.committed for request in self.broker.asked(ApiKey.END_TXN)]


@asynccontextmanager
async def connected(model: ModelCoordinator, **options: Any) -> AsyncIterator[Client]:
    async with StubBroker({"t": 3}) as broker:
        model.serve(broker)
        cluster = Cluster(broker.address, options=ConnectionOptions(), backoff=FAST, topic_wait_ms=50)
        client = Client(cluster, broker, model, **options)
        try:
            yield client
        finally:
            await client.producer.close()
            await cluster.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), scaled(30))

    asyncio.run(bounded())


def fault_at(key: int, *numbers: int, what: Any) -> Callable[[int, int], Any]:
    return lambda asked, number: what if asked == key and number in numbers else None


@VERSIONS
def test_all_records_of_a_transaction_are_committed(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            for number in range(3):
                await client.commit(*(b"%d-%d" % (number, index) for index in range(7)))
            assert sorted(map(present, model.committed)) == sorted(
                b"%d-%d" % (n, i) for n in range(3) for i in range(7)
            )
            assert len(client.broker.asked(ApiKey.INIT_PRODUCER_ID)) == 1
            asked_to_add = len(client.broker.asked(ApiKey.ADD_PARTITIONS_TO_TXN))
            assert bool(asked_to_add) == (version == 1)
            used = {number for key, number, _ in client.broker.requests if key == ApiKey.PRODUCE}
            assert all((number >= 12) == (version == 2) for number in used)

    run(scenario)


@VERSIONS
def test_an_exception_aborts_and_the_next_transaction_commits(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    delivery = await txn.publish("t", b"lost")
                    await delivery
                    raise ZeroDivisionError
            await client.commit(b"kept", b"too")
            assert sorted(map(present, model.committed)) == [b"kept", b"too"]
            assert client.ends() == [False, True]

    run(scenario)


def test_records_that_were_not_sent_when_the_block_failed_are_not_part_of_the_next_transaction() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model, linger_ms=60_000) as client:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    delivery = await txn.publish("t", b"lost", partition=0)
                    raise ZeroDivisionError
            with pytest.raises(TransactionAborted):
                delivery.result()
            await client.commit(b"kept")
            assert model.committed == [b"kept"]

    run(scenario)


@VERSIONS
def test_an_empty_transaction_asks_nothing_of_the_coordinator(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            await client.commit()
            assert not client.ends()
            await client.commit(b"x")
            assert model.committed == [b"x"]

    run(scenario)


@VERSIONS
def test_the_first_failed_record_is_raised_and_nothing_is_committed(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version, fault_at(ApiKey.PRODUCE, 1, what=MESSAGE_TOO_LARGE))
        async with connected(model) as client:
            with pytest.raises(MessageTooLarge):
                await client.commit(b"x")
            assert not model.committed
            await client.commit(b"y")
            assert model.committed == [b"y"]

    run(scenario)


def test_after_a_failed_record_publishing_raises_its_error() -> None:
    async def scenario() -> None:
        model = ModelCoordinator(2, fault_at(ApiKey.PRODUCE, 1, what=MESSAGE_TOO_LARGE))
        async with connected(model) as client:
            with pytest.raises(MessageTooLarge):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    delivery = await txn.publish("t", b"x")
                    with pytest.raises(MessageTooLarge):
                        await delivery
                    with pytest.raises(MessageTooLarge):
                        await txn.publish_many("t", [b"y"])
            assert not model.committed

    run(scenario)


@VERSIONS
@pytest.mark.parametrize("what", ["lost before", "lost after", COORDINATOR_NOT_AVAILABLE])
def test_a_lost_answer_of_the_end_is_asked_for_again(version: int, what: object) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version, fault_at(ApiKey.END_TXN, 1, 2, what=what))
        async with connected(model) as client:
            await client.commit(b"x")
            assert model.committed == [b"x"]
            assert model.decisions == [True]
            await client.commit(b"y")
            assert model.committed == [b"x", b"y"]

    run(scenario)


@VERSIONS
@pytest.mark.parametrize("what", ["lost before", "lost after"])
def test_an_outcome_that_stays_unknown_is_reported_as_unknown(version: int, what: object) -> None:
    """The next transaction finds out: the commit happened, or is aborted now."""

    async def scenario() -> None:
        is_over = False
        model = ModelCoordinator(
            version, lambda key, number: what if key == ApiKey.END_TXN and not is_over else None
        )
        async with connected(model) as client:
            client.give_up_soon()
            with pytest.raises(TransactionOutcomeUnknown, match="orders-1"):
                await client.commit(b"x")
            is_over = True
            await client.commit(b"y")
            assert model.committed == ([b"x", b"y"] if what == "lost after" else [b"y"])

    run(scenario)


def test_a_commit_without_an_answer_and_then_fenced_is_unknown() -> None:
    async def scenario() -> None:
        def fault(key: int, number: int) -> Any:
            if key != ApiKey.END_TXN:
                return None
            if number == 2:
                model.restart_producer()
            return "lost after" if number == 1 else None

        model = ModelCoordinator(2, fault)
        async with connected(model) as client:
            with pytest.raises(TransactionOutcomeUnknown):
                await client.commit(b"x")
            assert model.committed == [b"x"]
            with pytest.raises(ProducerFenced):
                await client.commit(b"y")
            assert model.committed == [b"x"]

    run(scenario)


@VERSIONS
def test_a_commit_without_an_answer_whose_transaction_timed_out_is_aborted_and_the_next_one_commits(
    version: int,
) -> None:
    async def scenario() -> None:
        def fault(key: int, number: int) -> Any:
            if key != ApiKey.END_TXN:
                return None
            if number == 2:
                model.time_out()
            return "lost before" if number == 1 else None

        model = ModelCoordinator(version, fault)
        async with connected(model) as client:
            with pytest.raises(TransactionTimedOut):
                async with client.transaction(timeout_ms=1) as txn:
                    await (await txn.publish("t", b"x"))
            assert not model.committed
            await client.commit(b"y")
            assert model.committed == [b"y"]

    run(scenario)


def test_a_partition_that_is_being_added_at_an_abort_does_not_end_the_next_transaction() -> None:
    async def scenario() -> None:
        def fault(key: int, _number: int) -> Any:
            is_first = len(client.broker.asked(ApiKey.INIT_PRODUCER_ID)) < 2
            return CONCURRENT_TRANSACTIONS if key == ApiKey.ADD_PARTITIONS_TO_TXN and is_first else None

        model = ModelCoordinator(1, fault)
        async with connected(model) as client:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    await txn.publish("t", b"x")
                    while not client.broker.asked(ApiKey.ADD_PARTITIONS_TO_TXN):  # noqa: ASYNC110 - nothing signals it
                        await asyncio.sleep(0.001)
                    raise ZeroDivisionError
            await client.commit(b"y")
            assert model.committed == [b"y"]
            first, last = client.broker.asked(ApiKey.ADD_PARTITIONS_TO_TXN)[-2:]
            assert first.v3_and_below_producer_epoch < last.v3_and_below_producer_epoch

    run(scenario)


def test_a_commit_that_never_reached_the_coordinator_is_not_reported_as_unknown() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            await client.commit(b"x")
            client.give_up_soon()
            with pytest.raises(Unavailable):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    await (await txn.publish("t", b"y"))
                    client.broker.answers[ApiKey.FIND_COORDINATOR] = lambda request: {
                        "coordinators": [
                            {"key": request.coordinator_keys[0], "error_code": COORDINATOR_NOT_AVAILABLE}
                        ]
                    }
                    cluster = client.producer._requests._cluster
                    cluster._coordinators.clear()
            assert model.committed == [b"x"]

    run(scenario)


@VERSIONS
def test_a_producer_whose_id_was_taken_over_cannot_commit_and_learns_why(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            with pytest.raises(ProducerFenced, match="another producer with transactional id 'orders-1'"):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    await (await txn.publish("t", b"x"))
                    model.restart_producer()
            with pytest.raises(ProducerFenced):
                await client.commit(b"y")
            assert not model.committed
            assert len(client.broker.asked(ApiKey.INIT_PRODUCER_ID)) == 1, (
                "a fenced producer takes nothing back"
            )

    run(scenario)


def test_a_record_of_a_fenced_producer_is_refused_with_the_same_error() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            with pytest.raises(ProducerFenced, match="taken over"):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    await (await txn.publish("t", b"x"))
                    model.restart_producer()
                    with pytest.raises(MansioError):
                        await (await txn.publish("t", b"y"))
                    await txn.publish("t", b"z")
            assert not model.committed

    run(scenario)


def test_a_transaction_that_was_open_for_too_long_is_reported_and_the_next_one_commits() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            with pytest.raises(TransactionTimedOut, match="timeout of 1 ms"):  # noqa: PT012 - the end of the block raises
                async with client.transaction(timeout_ms=1) as txn:
                    await (await txn.publish("t", b"x"))
                    await asyncio.sleep(0.002)
                    model.time_out()
            assert not model.committed
            await client.commit(b"y")
            assert model.committed == [b"y"]

    run(scenario)


def test_a_timeout_after_which_another_producer_took_over_is_fencing() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            with pytest.raises(ProducerFenced):  # noqa: PT012 - the end of the block raises
                async with client.transaction(timeout_ms=1) as txn:
                    await (await txn.publish("t", b"x"))
                    await asyncio.sleep(0.002)
                    model.time_out()
                    model.restart_producer()
            with pytest.raises(ProducerFenced):
                await client.commit(b"y")

    run(scenario)


def test_a_second_transaction_while_one_is_open_is_refused() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            async with client.transaction() as txn:
                await txn.publish("t", b"x")
                with pytest.raises(InvalidTxnState, match="open transaction in this client"):
                    await client.commit(b"y")
            with pytest.raises(InvalidTxnState, match="not open"):
                await txn.publish("t", b"late")
            with pytest.raises(InvalidTxnState, match="used once"):
                await txn.__aenter__()
            assert model.committed == [b"x"]

    run(scenario)


@pytest.mark.parametrize(
    "record",
    [
        OutgoingRecord(b"x", delay=1),
        OutgoingRecord(b"x", dedup_id="one"),
        OutgoingRecord(b"x", headers=(("mansio-dedup-id", b"one"),)),
        OutgoingRecord(b"x", headers=(("mansio-delay-ms", b"1"),)),
    ],
)
def test_delayed_and_deduplicated_records_are_refused_before_anything_is_sent(record: OutgoingRecord) -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model) as client:
            async with client.transaction() as txn:
                with pytest.raises(InvalidRequest, match="cannot be part of a transaction"):
                    await txn.publish_many("t", [record])
                if record.headers:
                    with pytest.raises(InvalidRequest, match="cannot be part of a transaction"):
                        await txn.publish("t", b"x", headers=dict(record.headers))
            assert not client.broker.asked(ApiKey.PRODUCE)

    run(scenario)


@pytest.mark.parametrize("options", [{"acks": 1}, {"idempotent": False}])
def test_a_producer_without_idempotence_has_no_transactions(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match="acks='all'"):
            async with connected(ModelCoordinator(), **options):
                pass

    run(scenario)


@VERSIONS
def test_a_cancelled_block_aborts(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            published = asyncio.Event()

            async def work() -> None:
                async with client.transaction() as txn:
                    await (await txn.publish("t", b"x"))
                    published.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(work())
            await published.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert model.decisions == [False]
            await client.commit(b"y")
            assert model.committed == [b"y"]

    run(scenario)


def test_a_cancelled_commit_goes_on_and_the_next_transaction_waits_for_it() -> None:
    async def scenario() -> None:
        arrived, answer = asyncio.Event(), asyncio.Event()
        model = ModelCoordinator()
        async with connected(model) as client:
            end = client.broker.answers[ApiKey.END_TXN]

            async def slow_end(request: Any) -> Any:
                arrived.set()
                await answer.wait()
                return end(request)

            client.broker.answers[ApiKey.END_TXN] = slow_end
            task = asyncio.create_task(client.commit(b"x"))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            following = asyncio.create_task(client.commit(b"y"))
            await asyncio.sleep(0)
            answer.set()
            await following
            assert model.committed == [b"x", b"y"]

    run(scenario)


def test_a_record_that_another_task_is_adding_at_the_end_does_not_get_into_the_next_transaction() -> None:
    async def scenario() -> None:
        model = ModelCoordinator()
        async with connected(model, buffer_bytes_max=100, batch_bytes_max=100) as client:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                async with client.transaction() as txn:
                    calls = [asyncio.create_task(txn.publish("t", bytes(60), partition=0)) for _ in range(5)]
                    await asyncio.sleep(0)
                    raise ZeroDivisionError
            await client.commit(b"y")
            await asyncio.gather(*calls, return_exceptions=True)
            assert model.committed == [b"y"]

    run(scenario)


class OneOffset:
    """Consumer with one offset to commit."""

    def _offsets_of_transaction(
        self, _offsets: object
    ) -> tuple[dict[TopicPartition, int], GroupMemberIdentity]:
        return {TopicPartition("source", 0): 7}, GroupMemberIdentity("group")

    def _on_offsets_in_transaction(self, _offsets: object) -> None:
        pass

    def _on_transaction_end(self, _partitions: object, *, is_commit: bool) -> None:
        self.is_commit = is_commit


@VERSIONS
def test_the_commit_waits_for_offsets_that_another_task_is_sending(version: int) -> None:
    async def scenario() -> None:
        model = ModelCoordinator(version)
        async with connected(model) as client:
            end, commit_offsets = (
                client.broker.answers[key] for key in (ApiKey.END_TXN, ApiKey.TXN_OFFSET_COMMIT)
            )
            has_ended = asyncio.Event()

            def answer_end(request: Any) -> Any:
                has_ended.set()
                return end(request)

            async def answer_offsets(request: Any) -> Any:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(has_ended.wait(), 0.1)
                return commit_offsets(request)

            client.broker.answers |= {
                ApiKey.END_TXN: answer_end,
                ApiKey.TXN_OFFSET_COMMIT: answer_offsets,
            }
            consumer: Any = OneOffset()
            async with client.transaction() as txn:
                await txn.publish("t", b"x")
                call = asyncio.create_task(txn.send_offsets(consumer))
                await asyncio.sleep(0)
            await call
            assert model.committed == [b"x"]
            assert model.offsets == {("source", 0): 7}
            assert consumer.is_commit

    run(scenario)


FAULTS = st.sampled_from([None, None, None, None, "lost before", "lost after", 6, 7, 15, 16, 51])
"""Among them NOT_LEADER, REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT_TRANSACTIONS."""


@settings(max_examples=examples(15, 40), deadline=None)
@given(
    version=st.sampled_from([1, 2]),
    faults=st.lists(FAULTS, max_size=40),
    aborts=st.lists(st.booleans(), min_size=1, max_size=6),
    batch_bytes=st.sampled_from([60, 1_000]),
)
def test_each_transaction_is_committed_or_aborted_as_a_whole_and_as_reported(
    version: int, faults: list[Any], aborts: list[bool], batch_bytes: int
) -> None:
    async def scenario() -> None:
        left = iter(faults)
        model = ModelCoordinator(version, lambda key, number: next(left, None))
        outcomes: dict[int, str] = {}
        async with connected(model, batch_bytes_max=batch_bytes) as client:
            for number, aborts_it in enumerate(aborts):
                try:
                    async with client.transaction() as txn:
                        for index in range(6):
                            await txn.publish("t", b"%d-%d" % (number, index), partition=index % 2)
                        if aborts_it:
                            raise ZeroDivisionError
                    outcomes[number] = "committed"
                except ZeroDivisionError:
                    outcomes[number] = "aborted"
                except TransactionOutcomeUnknown:
                    outcomes[number] = "unknown"
                except MansioError as error:
                    assert not isinstance(error, ProducerFenced), "no other producer has the id"  # noqa: PT017 - other errors are expected
                    outcomes[number] = "aborted"
        stored: dict[int, list[int]] = {number: [] for number in outcomes}
        for value in model.committed:
            assert value is not None
            name, _, position = value.partition(b"-")
            stored[int(name)].append(int(position))
        for number, outcome in outcomes.items():
            found = sorted(stored[number])
            assert found in ([], list(range(6))), f"a part of transaction {number}"
            if outcome != "unknown":
                assert bool(found) == (outcome == "committed"), (number, outcome)

    run(scenario)
