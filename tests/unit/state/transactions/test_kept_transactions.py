"""Transactions that a later producer takes over (KIP-939): it can end them and nothing else, and nobody else can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidProducerIdMapping, InvalidTxnState, MansioError, ProducerFenced
from mansio.state.transactions import transaction as machine
from mansio.state.transactions.transaction import EPOCH_MAX, NO_EPOCH, NO_ID, Transaction, TransactionState
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Callable

Identity = tuple[int, int]

FENCED = (ProducerFenced, InvalidProducerIdMapping)
PARTITION = ("a", 0)
NEW_ID = 1000


class Client:
    """Applies requests to one transactional id. `given`: all producer ids and epochs that a producer has got."""

    def __init__(self, epoch: int) -> None:
        self.known = Transaction(42, epoch, 1000, updated_ms=0)
        self.given = [(42, epoch)]
        self.new_ids = iter(range(NEW_ID, NEW_ID + 100))

    def add(self, identity: Identity, version: int = 2) -> None:
        self.known = machine.add_partitions(
            self.known, *identity, [PARTITION], client_version=version, now_ms=1
        )

    def initialize(
        self, *, keeps: bool, identity: Identity = (NO_ID, NO_EPOCH), timeout_ms: int = 1000
    ) -> Transaction:
        self.known = machine.initialize(
            self.known,
            timeout_ms=timeout_ms,
            producer_id=identity[0],
            producer_epoch=identity[1],
            new_producer_id=next(self.new_ids),
            now_ms=2,
            keeps_transaction=keeps,
        )
        return self.known

    def keep(self) -> Identity:
        found = self.initialize(keeps=True).current_producer
        assert found not in self.given
        self.given.append(found)
        return found

    def end(self, identity: Identity, *, is_commit: bool = True, bumps: bool = True) -> Transaction:
        self.known = machine.end(
            self.known,
            *identity,
            is_commit=is_commit,
            bumps_epoch=bumps,
            new_producer_id=next(self.new_ids),
            now_ms=3,
        )
        return self.known

    def refused(self, call: Callable[[], object]) -> MansioError:
        before = self.known
        with pytest.raises(MansioError) as caught:
            call()
        assert self.known is before
        return caught.value


epochs = st.one_of(st.integers(0, 5), st.integers(EPOCH_MAX - 5, EPOCH_MAX - 1))


@settings(max_examples=examples(200, 2000))
@given(
    epoch=epochs,
    keeps=st.integers(1, 8),
    ended_by=st.sampled_from(["commit", "abort", "timeout", "new producer", "restarted producer"]),
    version=st.sampled_from([1, 2]),
)
def test_the_last_producer_that_kept_a_transaction_is_the_only_one_that_goes_on(
    epoch: int, keeps: int, ended_by: str, version: int
) -> None:
    client = Client(epoch)
    client.add((42, epoch), version=version)
    for _ in range(keeps):
        current = client.keep()
        assert client.known.is_kept
        assert (client.known.producer_id, client.known.producer_epoch) == (42, epoch)
        for zombie in client.given[:-1]:
            assert isinstance(client.refused(lambda zombie=zombie: client.end(zombie)), FENCED)
            assert isinstance(client.refused(lambda zombie=zombie: client.add(zombie)), FENCED)
    assert isinstance(client.refused(lambda: client.add(current)), InvalidTxnState)
    with pytest.raises(InvalidTxnState):
        machine.verify_partitions(client.known, *current, [PARTITION])
    with pytest.raises(InvalidTxnState):
        machine.hold(client.known, *current, now_ms=2, renewal_ms=1)
    assert isinstance(client.refused(lambda: client.end(current, bumps=False)), InvalidTxnState)

    if ended_by == "timeout":
        client.known = machine.time_out(client.known, now_ms=3)
    elif ended_by.endswith("producer"):
        client.initialize(keeps=False, identity=current if "restarted" in ended_by else (NO_ID, NO_EPOCH))
    else:
        client.end(current, is_commit=ended_by == "commit")
    decided = client.known
    assert decided.is_prepared
    assert decided.is_commit == (ended_by == "commit")
    assert decided.partitions == {PARTITION}
    assert decided.producer_id == 42
    epochs_of_42 = [each for producer_id, each in client.given if producer_id == 42]
    assert decided.producer_epoch >= max(epochs_of_42), "the marker would be refused"
    assert decided.producer_epoch > epoch, "a late batch of the first producer would begin a transaction"

    client.known = machine.complete(decided, now_ms=4)
    assert not client.known.is_kept
    assert client.known.next_producer_epoch == NO_EPOCH
    if ended_by in ("commit", "abort"):
        ended = client.known
        again = client.end(current, is_commit=ended_by == "commit")
        assert again is ended
        going_on = again.current_producer
    elif ended_by == "restarted producer":
        found = client.initialize(keeps=False, identity=current)
        going_on = found.current_producer
        assert client.initialize(keeps=False, identity=current).current_producer == going_on
    else:
        going_on = client.initialize(keeps=True).current_producer
    assert client.known.state is not TransactionState.ONGOING
    assert going_on not in client.given
    client.add(going_on)
    assert not client.known.is_kept
    assert client.known.state is TransactionState.ONGOING
    for zombie in client.given:
        if zombie != going_on:
            assert isinstance(client.refused(lambda zombie=zombie: client.end(zombie)), FENCED)


def test_without_an_open_transaction_there_is_nothing_to_keep() -> None:
    client = Client(5)
    found = client.initialize(keeps=True)
    assert (found.state, found.is_kept) == (TransactionState.EMPTY, False)
    assert found.current_producer == (42, 6)


@pytest.mark.parametrize(
    ("first_ms", "asked_ms"), [(machine.NO_TIMEOUT_MS, 1_000), (1_000, 2_000), (500, 1_000)]
)
@pytest.mark.parametrize("ended_by", ["commit", "timeout"])
def test_the_longer_timeout_applies_to_the_transaction_and_to_no_later_one(
    first_ms: int, asked_ms: int, ended_by: str
) -> None:
    client = Client(5)
    client.known = client.known._replace(timeout_ms=first_ms)
    client.add((42, 5))
    for _ in range(2):
        current = client.initialize(keeps=True, timeout_ms=asked_ms).current_producer
        assert client.known.open_timeout_ms == max(first_ms, asked_ms)
    if ended_by == "commit":
        client.end(current)
    else:
        client.known = machine.time_out(client.known, now_ms=3)
    client.known = machine.complete(client.known, now_ms=4)
    client.add(client.known.current_producer)
    assert client.known.open_timeout_ms == client.known.timeout_ms == asked_ms


@pytest.mark.parametrize("epoch", [5, EPOCH_MAX - 1])
def test_a_producer_may_repeat_the_request_that_keeps_its_own_transaction(epoch: int) -> None:
    client = Client(epoch)
    client.add((42, epoch))
    kept = client.initialize(keeps=True, identity=(42, epoch))
    assert kept.current_producer != (42, epoch)
    assert client.initialize(keeps=True, identity=(42, epoch)) is kept
    refused = client.refused(lambda: client.initialize(keeps=False, identity=(42, epoch)))
    assert isinstance(refused, ProducerFenced)
    client.initialize(keeps=True)
    refused = client.refused(lambda: client.initialize(keeps=True, identity=(42, epoch)))
    assert isinstance(refused, ProducerFenced)


def test_nothing_is_aborted_without_the_producer_id_that_an_exhausted_epoch_needs() -> None:
    found = machine.end(
        Transaction(42, EPOCH_MAX - 1, 1000, client_version=2),
        42,
        EPOCH_MAX - 1,
        is_commit=False,
        bumps_epoch=True,
        new_producer_id=NO_ID,
        now_ms=2,
    )
    assert found.lacks_producer_id


def test_a_transaction_is_not_kept_without_the_producer_id_that_an_exhausted_epoch_needs() -> None:
    known = Transaction(42, EPOCH_MAX - 1, 1000, state=TransactionState.ONGOING)
    found = machine.initialize(
        known,
        timeout_ms=1000,
        producer_id=NO_ID,
        producer_epoch=NO_EPOCH,
        new_producer_id=NO_ID,
        now_ms=2,
        keeps_transaction=True,
    )
    assert found.lacks_producer_id
