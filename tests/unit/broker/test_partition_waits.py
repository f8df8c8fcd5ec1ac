"""`PartitionWaits` against a model: each wait is completed exactly once, in order, with the right error, and nothing is
kept of those that are over. What a wait calls begins and ends other waits."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mansio.broker.partition.partition_waits import PartitionWaits
from mansio.errors import MansioError, NotLeaderOrFollower, RequestTimedOut
from support.tiers import examples

OFFSETS = st.integers(1, 6)
NAMES = st.integers(0, 3)
LEVELS = st.integers(0, 1)
ENDS = st.sampled_from(["fail_commits", "fail", "end", "close"])

NEXT = st.none() | st.one_of(
    st.tuples(st.just("commit"), OFFSETS, st.none()),
    st.tuples(st.just("flush"), OFFSETS, st.none()),
    st.tuples(st.just("advance"), OFFSETS, st.booleans()),
    st.tuples(st.just("flushed"), OFFSETS),
    st.tuples(st.just("over"), ENDS),
)
"""What a wait calls when it is completed."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), OFFSETS, NEXT),
        st.tuples(st.just("flush"), OFFSETS, NEXT),
        st.tuples(st.just("start"), OFFSETS),
        st.tuples(st.just("time_out"), st.integers(0, 9)),
        st.tuples(st.just("advance"), OFFSETS, st.booleans()),
        st.tuples(st.just("flushed"), OFFSETS),
        st.tuples(st.just("started"), OFFSETS),
        st.tuples(st.just("park"), NAMES, LEVELS),
        st.tuples(st.just("unpark"), NAMES),
        st.tuples(st.just("over"), ENDS),
    ),
    max_size=40,
)


class _Model:
    """The waits that must be there, and what was called."""

    def __init__(self) -> None:
        self.waits = PartitionWaits()
        self.high_watermark = self.flushed_end = self.start_offset = 0
        self.stable_end = -1
        self.count = self.depth = self.flushing = 0
        self.commits: dict[int, int] = {}
        self.flushes: dict[int, int] = {}
        self.promises: dict[Any, int] = {}
        self.timed_out: list[Any] = []
        self.parked: dict[int, int] = {}
        self.completed: list[tuple[int, int]] = []
        self.woken: list[int] = []
        self.known_errors: list[tuple[MansioError, set[int]]] = []
        """Each error with which commits ended, and the waits that there were."""

    def do(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def then(self, following: tuple[Any, ...] | None) -> None:
        if following is not None:
            self.do(*following)

    def commit(self, more: int, following: tuple[Any, ...] | None) -> None:
        number, end = self.count, self.high_watermark + more
        self.count += 1
        self.commits[number] = end

        def complete(error: MansioError | None) -> None:
            assert self.commits.pop(number) == end, "completed more than once"
            if error is None:
                assert end <= self.high_watermark, "completed too early"
                self.completed.append((end, number))
            else:
                assert any(one is error and number in were for one, were in self.known_errors)
            self.then(following)

        self.waits.add_commit(end, complete)

    def flush(self, more: int, following: tuple[Any, ...] | None) -> None:
        number, end = self.count, self.flushed_end + more
        self.count += 1
        self.flushes[number] = end

        def complete() -> None:
            assert self.flushes.pop(number) == end, "completed more than once"
            self.then(following)

        self.waits.add_flush(end, complete)

    def start(self, more: int) -> None:
        promise: Any = Future()
        self.promises[promise] = self.start_offset + more
        self.waits.add_start_offset(self.start_offset + more, promise)

    def time_out(self, position: int) -> None:
        for promise in [*self.promises][position : position + 1]:
            promise.set_exception(RequestTimedOut("late"))
            self.timed_out.append(promise)
            del self.promises[promise]

    def advance(self, more: int, is_decided: bool) -> None:
        """Advance the high watermark. `is_decided`: no transaction is open."""
        self.high_watermark += more
        if is_decided:
            self.stable_end = self.high_watermark
        self.waits.on_committed(self.high_watermark, self.stable_end)

    def flushed(self, more: int) -> None:
        self.flushed_end += more
        self.flushing += 1
        self.waits.on_flushed(self.flushed_end)
        self.flushing -= 1

    def started(self, more: int) -> None:
        self.start_offset += more
        done = [promise for promise, offset in self.promises.items() if offset <= self.start_offset]
        self.waits.on_start_offset_flushed(lambda offset: offset <= self.start_offset, self.start_offset)
        for promise in done:
            assert promise.result(0) == self.start_offset
            del self.promises[promise]
        self.timed_out.clear()  # nothing is kept of them

    def park(self, name: int, isolation_level: int) -> None:
        self.parked[name] = isolation_level
        self.waits.park(_Waker(self, name), isolation_level)

    def unpark(self, name: int) -> None:
        self.parked.pop(name, None)
        self.waits.unpark(_Waker(self, name))

    def over(self, kind: str) -> None:
        error = NotLeaderOrFollower(kind)
        self.known_errors.append((error, {*self.commits}))
        promises = [*self.promises]
        if kind in ("end", "close"):
            self.promises.clear()
            self.timed_out.clear()
        were = {*self.commits}, {*self.flushes}
        self.depth += 1
        getattr(self.waits, kind)(error)
        self.depth -= 1
        if not self.depth:  # otherwise the outer one goes on
            assert not were[0] & {*self.commits}
            assert kind == "fail_commits" or self.flushing or not were[1] & {*self.flushes}
        if kind != "fail_commits":
            assert {*self.parked} <= {*self.woken}, "a parked reader was not woken"
        if kind in ("end", "close"):
            for promise in promises:
                raised = promise.exception(0)
                assert type(raised) is NotLeaderOrFollower
                assert raised is not error, "an error that several callers raise collects their frames"
        if kind == "close":
            self.parked.clear()


class _Waker:
    """What wakes one reader; equal to any other of the same reader, as a bound method is."""

    def __init__(self, model: _Model, name: int) -> None:
        self.model, self.name = model, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Waker) and other.name == self.name

    def __hash__(self) -> int:
        return self.name

    def __call__(self) -> None:
        assert self.name in self.model.parked, "woken after it left"
        self.model.woken.append(self.name)


@settings(max_examples=examples(300, 2000))
@given(STEPS)
@example([("commit", 1, ("over", "end")), ("commit", 1, None), ("advance", 1, True)])
@example([("start", 6), ("time_out", 0), ("started", 1)])
@example([("flush", 1, ("over", "fail")), ("flush", 1, None), ("flushed", 1)])
def test_each_wait_is_completed_once_and_leaves_nothing(steps: list[tuple[Any, ...]]) -> None:
    model = _Model()
    waits = model.waits
    for step in steps:
        model.completed.clear()
        model.woken.clear()
        model.do(*step)
        assert model.completed == sorted(model.completed), "not in the order of their offsets"
        assert [end for end, _ in waits.commits] == sorted(model.commits.values())
        assert all(end > model.high_watermark for end in model.commits.values())
        assert sorted(end for end, _ in waits.flushes) == sorted(model.flushes.values())
        assert all(end > model.flushed_end for end in model.flushes.values())
        assert len(waits.start_offsets) == len(model.promises) + len(model.timed_out)
        assert sorted(waits.readers.values()) == sorted(model.parked.values())
    for _ in range(2):  # of the waits that began meanwhile, too: a closed partition begins none
        model.over("close")
    assert not any((waits.commits, waits.flushes, waits.start_offsets, waits.readers, waits.followers))


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=12))
def test_readers_of_committed_records_are_woken_only_when_they_can_read_more(
    advances: list[tuple[int, bool]],
) -> None:
    model = _Model()
    model.park(0, 0)
    model.park(1, 1)
    for more, is_decided in advances:
        before = model.stable_end
        model.woken.clear()
        model.advance(more, is_decided)
        assert model.woken == ([0, 1] if model.stable_end > before else [0])


def test_followers_are_woken_by_themselves_and_with_all_others() -> None:
    waits = PartitionWaits()
    woken: list[str] = []
    reader, follower = (lambda: woken.append("reader")), (lambda: woken.append("follower"))
    waits.park(reader, 0)
    waits.park_follower(follower)
    waits.park_follower(follower)
    waits.wake_followers()
    assert woken == ["follower"], "it is parked once"
    waits.wake_all()
    waits.unpark_follower(follower)
    waits.unpark_follower(follower)
    waits.wake_all()
    assert woken == ["follower", "reader", "follower", "reader"]


def test_a_mark_is_called_once_and_may_add_itself_again() -> None:
    waits = PartitionWaits()
    called: list[str] = []

    def again() -> None:
        called.append("again")
        waits.add_mark(again)

    removed = partial(called.append, "removed")
    for mark in (again, again, once := partial(called.append, "once"), removed):
        waits.add_mark(mark)
    waits.remove_mark(removed)
    waits.remove_mark(removed)
    waits.mark_followers()
    assert called == ["again", "once"]
    waits.mark_followers()
    assert called == ["again", "once", "again"]
    waits.add_mark(once)
    waits.close(MansioError("closed"))
    waits.mark_followers()
    assert called == ["again", "once", "again"]


def test_a_deletion_on_the_disk_outlives_the_failure_of_the_log() -> None:
    """The followers may still confirm it. Only another leader makes it unknown."""
    waits = PartitionWaits()
    promise: Any = Future()
    waits.add_start_offset(5, promise)
    waits.fail(MansioError("the log failed"))
    assert not promise.done()
    waits.on_start_offset_flushed(lambda offset: offset <= 5, 7)
    assert promise.result(0) == 7
    late: Any = Future()
    waits.add_start_offset(9, late)
    waits.end(NotLeaderOrFollower("another leader"))
    with pytest.raises(NotLeaderOrFollower):
        late.result(0)
