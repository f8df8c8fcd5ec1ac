"""Brokers are asked in turn: those that may have records first, and none for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mansio.client.share.broker_turns import RECORDS_PER_TURN, BrokerTurns


def ask(turns: BrokerTurns, backlogs: dict[int, int]) -> tuple[int, bool, int]:
    """Ask for one record; returns the broker, whether the fetch may wait, and the number of records."""
    node = turns.order(backlogs)[0]
    waits = turns.may_wait(node, backlogs)
    found = min(backlogs[node], 1)
    backlogs[node] -= found
    turns.on_answer(node, found)
    return node, waits, found


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_no_fetch_waits_while_a_broker_has_records_and_few_are_in_vain(sizes: list[int]) -> None:
    turns, backlogs = BrokerTurns(), dict(enumerate(sizes))
    vain = 0
    while any(backlogs.values()):
        node, waits, found = ask(turns, backlogs)
        assert not (waits and not found and any(backlogs.values())), f"a fetch waits at {node}"
        vain += not found
    turn_count = sum(sizes) // RECORDS_PER_TURN + len(sizes)
    assert vain <= turn_count * len(sizes)


def test_each_of_two_backlogs_gets_its_turns() -> None:
    turns, backlogs = BrokerTurns(), {1: 1000, 2: 1000}
    asked = Counter(ask(turns, backlogs)[0] for _ in range(10 * RECORDS_PER_TURN))
    assert asked == {1: 5 * RECORDS_PER_TURN, 2: 5 * RECORDS_PER_TURN}


def test_brokers_without_records_are_waited_at_one_after_the_other() -> None:
    turns, backlogs = BrokerTurns(), {1: 0, 2: 0, 3: 0}
    asked = [ask(turns, backlogs) for _ in range(7)]
    assert [waits for _, waits, _ in asked] == [False, False, True, True, True, True, True]
    assert {node for node, _, _ in asked[1:4]} == {node for node, _, _ in asked[4:7]} == {1, 2, 3}
    backlogs[2] = 3
    assert any(ask(turns, backlogs)[0] == 2 for _ in range(3))
