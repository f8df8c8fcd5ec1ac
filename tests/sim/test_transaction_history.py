"""Tests of the checker of transactional histories: it accepts a sound history and detects each violation."""

from __future__ import annotations

import pytest

from sim.checker import Broken
from sim.transaction_history import Consumed, LoggedRecord, TransactionHistory

GROUP = "g"


def broken(how: str) -> None:
    raise Broken(how)


def new_history() -> TransactionHistory:
    """Transaction `a` of the id `w` writes a0 to partition 0 and a1 to partition 1."""
    history = TransactionHistory(broken)
    history.initialize("w", 1)
    begin(history, "a", "w")
    return history


def begin(history: TransactionHistory, name: str, transactional_id: str, instance: int = 1) -> None:
    history.begin(name, transactional_id, instance)
    history.send(name, 0, [f"{name}0".encode()])
    history.send(name, 1, [f"{name}1".encode()])


def commit(history: TransactionHistory, name: str) -> None:
    history.request_commit(name)
    history.acknowledge_commit(name)


def finish(
    history: TransactionHistory,
    zero: list[tuple[bytes, bool | None]],
    one: list[tuple[bytes, bool | None]],
) -> None:
    """The logs of both partitions: values with the outcome of their transaction, from offset 0 on."""
    for index, records in enumerate((zero, one)):
        history.add_log(
            index, [LoggedRecord(offset, value, outcome) for offset, (value, outcome) in enumerate(records)]
        )
    history.finish()


def test_sound_history_is_accepted() -> None:
    history = new_history()
    history.send_plain(0, [b"plain"])
    history.acknowledge_plain([b"plain"])
    history.send_offsets("a", Consumed(GROUP, 0, 5))
    commit(history, "a")
    begin(history, "b", "w")
    history.read("r", 0, 0, 2, [(0, b"a0"), (1, b"plain")])
    history.read("r", 1, 0, 1, [(0, b"a1")])
    history.read_stable_offset("r at broker 1", 0, 2, 3)
    history.read_offset(GROUP, -1, by="watcher")
    history.read_offset(GROUP, 5, by="watcher")
    history.read("r", 0, 2, 4, [])
    finish(history, [(b"a0", True), (b"plain", True), (b"b0", False)], [(b"a1", True), (b"b1", False)])
    assert history.numbers()["commits acknowledged"] == 1


def test_commit_of_unknown_outcome_may_have_happened_or_not() -> None:
    for outcome in (True, False):
        history = new_history()
        history.request_commit("a")
        finish(history, [(b"a0", outcome)], [(b"a1", outcome)])


def test_intermediate_read_is_detected() -> None:
    with pytest.raises(Broken, match="whose commit was not requested"):
        new_history().read("r", 0, 0, 1, [(0, b"a0")])


def test_aborted_read_is_detected() -> None:
    history = new_history()
    history.request_commit("a")
    history.read("r", 0, 0, 1, [(0, b"a0")])
    with pytest.raises(Broken, match="aborted read"):
        finish(history, [(b"a0", False)], [(b"a1", False)])


def test_record_that_no_client_sent_there_is_detected() -> None:
    history = new_history()
    history.request_commit("a")
    with pytest.raises(Broken, match="nobody sent"):
        history.read("r", 1, 0, 1, [(0, b"a0")])
    with pytest.raises(Broken, match="nobody sent"):
        history.read("r", 1, 0, 1, [(0, b"x")])


def test_commit_that_no_client_requested_is_detected() -> None:
    with pytest.raises(Broken, match="whose commit was not requested, is committed"):
        finish(new_history(), [(b"a0", True)], [(b"a1", True)])


def test_lost_transaction_is_detected() -> None:
    for outcome in (False, None):
        history = new_history()
        commit(history, "a")
        with pytest.raises(Broken, match=r"lost|open in the end"):
            finish(history, [(b"a0", outcome)], [(b"a1", outcome)])
    history = new_history()
    commit(history, "a")
    with pytest.raises(Broken, match="lost"):
        finish(history, [], [])


def test_doubled_record_is_detected() -> None:
    history = new_history()
    commit(history, "a")
    with pytest.raises(Broken, match="doubled"):
        finish(history, [(b"a0", True), (b"a0", True)], [(b"a1", True)])


def test_fractured_transaction_is_detected() -> None:
    for there in ([(b"a1", False)], []):
        history = new_history()
        commit(history, "a")
        with pytest.raises(Broken, match="fractured"):
            finish(history, [(b"a0", True)], list(there))


def test_open_transaction_in_the_end_is_detected() -> None:
    with pytest.raises(Broken, match="open in the end"):
        finish(new_history(), [(b"a0", None)], [])


def test_skipped_record_is_detected() -> None:
    history = new_history()
    history.request_commit("a")
    history.read("r", 0, 0, 1, [])
    with pytest.raises(Broken, match="skipped"):
        finish(history, [(b"a0", True)], [(b"a1", True)])


def test_commit_of_a_zombie_is_detected() -> None:
    history = new_history()
    history.initialize("w", 2)
    history.request_commit("a")
    with pytest.raises(Broken, match="acknowledged, which is a transaction of a zombie"):
        history.acknowledge_commit("a")
    with pytest.raises(Broken, match="of a zombie"):
        history.read("r", 0, 0, 1, [(0, b"a0")])
    with pytest.raises(Broken, match="of a zombie, is committed"):
        finish(history, [(b"a0", True)], [(b"a1", True)])


def test_commit_that_was_requested_before_the_successor_began_is_no_zombie() -> None:
    history = new_history()
    history.request_commit("a")
    history.initialize("w", 2)
    history.acknowledge_commit("a")
    finish(history, [(b"a0", True)], [(b"a1", True)])


def test_last_stable_offset_that_decreases_or_exceeds_the_high_watermark_is_detected() -> None:
    history = new_history()
    history.read_stable_offset("r at broker 1", 0, 5, 7)
    history.read_stable_offset("r at broker 2", 0, 4, 7)
    with pytest.raises(Broken, match="was 5 and is 4"):
        history.read_stable_offset("r at broker 1", 0, 4, 7)
    with pytest.raises(Broken, match="beyond 7"):
        history.read_stable_offset("r at broker 1", 0, 8, 7)


def test_offset_that_is_visible_before_its_commit_is_detected() -> None:
    history = new_history()
    history.send_offsets("a", Consumed(GROUP, 0, 5))
    with pytest.raises(Broken, match="its commit was not requested"):
        history.read_offset(GROUP, 5, by="watcher")


def test_offset_that_decreases_is_detected() -> None:
    history = new_history()
    history.send_offsets("a", Consumed(GROUP, 0, 5))
    history.request_commit("a")
    history.read_offset(GROUP, 5, by="watcher")
    with pytest.raises(Broken, match="was 5 and is -1"):
        history.read_offset(GROUP, -1, by="watcher")


@pytest.mark.parametrize(("outcome", "offset"), [(True, -1), (False, 5)])
def test_offset_without_records_or_records_without_offset_are_detected(outcome: bool, offset: int) -> None:
    history = new_history()
    history.send_offsets("a", Consumed(GROUP, 0, 5))
    history.request_commit("a")
    history.read_offset(GROUP, offset, by="watcher")
    with pytest.raises(Broken, match="its committed transactions consumed up to"):
        finish(history, [(b"a0", outcome)], [(b"a1", outcome)])


@pytest.mark.parametrize(("first", "what"), [(3, "again"), (7, "without those from 5 on")])
def test_input_that_is_consumed_twice_or_left_out_is_detected(first: int, what: str) -> None:
    history = new_history()
    begin(history, "b", "w")
    history.send_offsets("a", Consumed(GROUP, 0, 5))
    history.send_offsets("b", Consumed(GROUP, first, 9))
    commit(history, "a")
    commit(history, "b")
    history.read_offset(GROUP, 9, by="watcher")
    with pytest.raises(Broken, match=what):
        finish(history, [(b"a0", True), (b"b0", True)], [(b"a1", True), (b"b1", True)])


def test_lost_or_doubled_record_without_a_transaction_is_detected() -> None:
    for there, what in (([], "lost"), ([(b"p", True), (b"p", True)], "doubled")):
        history = TransactionHistory(broken)
        history.send_plain(0, [b"p"])
        history.acknowledge_plain([b"p"])
        with pytest.raises(Broken, match=what):
            finish(history, list(there), [])
