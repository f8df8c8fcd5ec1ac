"""Decisions about batches: one for each batch, none undone, and none passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConcurrentTransactions, InvalidTxnState
from mansio.state.transactions import batch_decision
from mansio.state.transactions.batch_decision import (
    NO_BATCH,
    SINGLE_WRITE,
    SINGLE_WRITE_EXPIRATION_MS,
    BatchDecision,
    TaskTransaction,
)

ONE, TWO, THREE = (TaskTransaction(f"t{number}", number, 0) for number in range(3))
TRANSACTIONS = st.lists(st.builds(TaskTransaction, st.sampled_from("abc"), st.integers(0, 2), st.just(0)))


def test_a_batch_is_decided_once() -> None:
    decided = batch_decision.decide(None, 4, [ONE, TWO, ONE], now_ms=7)
    assert decided == BatchDecision(4, (ONE, TWO), 7)
    assert batch_decision.decide(decided, 4, [THREE], now_ms=8) is decided
    assert batch_decision.newcomers(decided, [ONE, THREE, THREE]) == [THREE]


def test_a_later_batch_waits_for_the_end_of_the_last_one() -> None:
    decided = batch_decision.decide(None, 4, [ONE], now_ms=7)
    with pytest.raises(ConcurrentTransactions):
        batch_decision.decide(decided, 5, [TWO], now_ms=8)
    finished = batch_decision.finish(decided, now_ms=8)
    assert finished.is_finished
    assert batch_decision.decide(finished, 5, [TWO], now_ms=9) == BatchDecision(5, (TWO,), 9)


def test_an_earlier_batch_is_refused() -> None:
    finished = batch_decision.finish(batch_decision.decide(None, 4, [ONE], now_ms=7), now_ms=8)
    with pytest.raises(InvalidTxnState, match="batch 3 is not committed"):
        batch_decision.decide(finished, 3, [TWO], now_ms=9)


# -- aborts --------


def test_abandoned_transactions_are_aborted_with_the_decision_except_those_that_it_commits() -> None:
    decided = batch_decision.decide(None, 4, [ONE], [TWO, ONE, TWO], now_ms=7)
    assert decided == BatchDecision(4, (ONE,), 7, (TWO,))
    finished = batch_decision.finish(decided, now_ms=8)
    assert finished == BatchDecision(4, (), 8, (TWO,))
    assert finished.is_finished
    assert not finished.is_settled
    assert batch_decision.finish_aborts(finished) == BatchDecision(4, (), 8)


@pytest.mark.parametrize("last", [None, BatchDecision(3, (), 1)])
def test_a_batch_with_a_transaction_that_is_being_aborted_is_refused(last: BatchDecision | None) -> None:
    aborting = batch_decision.start_aborts(last, [TWO, TWO], now_ms=2)
    assert aborting.aborting == (TWO,)
    with pytest.raises(InvalidTxnState, match="is being aborted"):
        batch_decision.decide(aborting, 4, [ONE, TWO], now_ms=3)
    with pytest.raises(ConcurrentTransactions):
        batch_decision.decide(aborting, 4, [ONE], now_ms=3)
    with pytest.raises(ConcurrentTransactions):
        batch_decision.start_aborts(aborting, [THREE], now_ms=3)
    assert batch_decision.newcomers(aborting, [ONE, TWO]) == [ONE]
    ended = batch_decision.finish_aborts(aborting)
    assert batch_decision.decide(ended, 4, [ONE], now_ms=4) == BatchDecision(4, (ONE,), 4)


def test_a_repeated_batch_keeps_its_decision_while_its_second_attempt_is_aborted() -> None:
    finished = batch_decision.finish(batch_decision.decide(None, 4, [ONE], now_ms=7), now_ms=8)
    aborting = batch_decision.start_aborts(finished, [TWO], now_ms=9)
    assert aborting == BatchDecision(4, (), 8, (TWO,))
    assert batch_decision.decide(aborting, 4, [TWO], now_ms=10) is aborting


def test_no_transaction_is_aborted_while_a_decision_is_carried_out() -> None:
    decided = batch_decision.decide(None, 4, [ONE], now_ms=7)
    with pytest.raises(ConcurrentTransactions):
        batch_decision.start_aborts(decided, [ONE], now_ms=8)


def test_each_batch_follows_aborts_of_a_query_without_a_decision() -> None:
    ended = batch_decision.finish_aborts(batch_decision.start_aborts(None, [ONE], now_ms=0))
    for batch_id in (SINGLE_WRITE, 0):
        assert batch_decision.decide(ended, batch_id, [TWO], now_ms=1).batch_id == batch_id


def test_a_query_does_not_expire_before_its_aborts_are_ended_and_soon_without_a_decision() -> None:
    aborting = batch_decision.start_aborts(None, [ONE], now_ms=0)
    later_ms = SINGLE_WRITE_EXPIRATION_MS
    assert aborting.batch_id == NO_BATCH
    assert not batch_decision.is_expired(aborting, expiration_ms=10 * later_ms, now_ms=later_ms)
    ended = batch_decision.finish_aborts(aborting)
    assert not batch_decision.is_expired(ended, expiration_ms=10 * later_ms, now_ms=later_ms - 1)
    assert batch_decision.is_expired(ended, expiration_ms=10 * later_ms, now_ms=later_ms)


def test_a_query_expires_only_when_its_last_batch_is_finished() -> None:
    decided = batch_decision.decide(None, 4, [ONE], now_ms=0)
    assert not batch_decision.is_expired(decided, expiration_ms=10, now_ms=100)
    finished = batch_decision.finish(decided, now_ms=95)
    assert not batch_decision.is_expired(finished, expiration_ms=10, now_ms=104)
    assert batch_decision.is_expired(finished, expiration_ms=10, now_ms=105)


@given(TRANSACTIONS, TRANSACTIONS)
def test_each_named_transaction_is_committed_or_aborted_and_none_is_both(
    first: list[TaskTransaction], repeated: list[TaskTransaction]
) -> None:
    decided = batch_decision.decide(None, 0, first, now_ms=0)
    again = batch_decision.decide(decided, 0, repeated, now_ms=1)
    aborted = batch_decision.newcomers(again, repeated)
    assert set(again.transactions) == set(first)
    assert set(aborted) == set(repeated) - set(first)
