"""Decisions about batches: one for each batch, none undone, and none passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConcurrentTransactions, InvalidTxnState
from mansio.state.transactions import batch_decision
from mansio.state.transactions.batch_decision import BatchDecision, TaskTransaction

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
