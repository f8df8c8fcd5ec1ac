"""Virtual time: the order of events, paused and stopped brokers, and propagated errors."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from mansio.testing.scheduler import (
    ConditionTimeout,
    SimulatedBackground,
    SimulatedScheduler,
    Simulation,
    close_unstarted,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_events_run_in_order_and_time_passes_between_them() -> None:
    simulation = Simulation()
    loop = simulation.scheduler("a")
    seen: list[tuple[str, float]] = []
    loop.call_later(20, lambda: seen.append(("late", simulation.now_ms)))
    loop.call_soon(lambda: seen.append(("first", simulation.now_ms)))
    loop.call_soon(lambda: seen.append(("second", simulation.now_ms)))
    loop.call_later(5, lambda: seen.append(("never", 0))).cancel()
    simulation.run_for(100)
    assert seen == [("first", 0), ("second", 0), ("late", 20)]
    assert simulation.now_ms == 100


def test_paused_broker_catches_up_and_stopped_broker_runs_no_events() -> None:
    simulation = Simulation()
    paused, stopped = simulation.scheduler("paused"), simulation.scheduler("stopped")
    seen: list[str] = []
    for loop in (paused, stopped):
        loop.call_later(1, seen.append, f"{loop.name} 1")
        loop.call_later(2, seen.append, f"{loop.name} 2")
    paused.pause()
    stopped.stop()
    simulation.run_for(50)
    assert seen == []
    paused.resume()
    simulation.run_for(1)
    assert seen == ["paused 1", "paused 2"]


def test_coroutines_wait_for_promises_and_end_when_they_are_cancelled() -> None:
    simulation = Simulation()
    loop = simulation.scheduler()
    ended: list[str] = []
    never = loop.promise()

    async def wait() -> None:
        try:
            await never
        finally:
            ended.append("cancelled")

    async def work() -> int:
        promise = loop.promise()
        loop.call_later(30, promise.set_result, 7)
        return int(await promise) + await nested()

    async def nested() -> int:
        promise = loop.promise()
        promise.set_result(1)
        return int(await promise)

    task = loop.spawn(wait(), name="waits")
    assert simulation.run(work()) == 8
    assert simulation.now_ms == 30
    task.cancel()
    never.set_result(None)
    simulation.run_for(1)
    assert ended == ["cancelled"]


def test_exception_of_a_coroutine_ends_the_run() -> None:
    simulation = Simulation()

    async def fail() -> None:
        raise ValueError("a defect")

    simulation.scheduler("a").spawn(fail(), name="fails")
    with pytest.raises(ValueError, match="a defect"):
        simulation.run_for(1)
    with pytest.raises(ConditionTimeout):
        simulation.run_until(lambda: False, within_ms=10)


def test_jobs_run_one_at_a_time_and_complete_after_the_latency() -> None:
    simulation = Simulation()
    worker = SimulatedBackground(simulation.scheduler(), lambda: 10.0)
    seen: list[object] = []
    worker.submit(lambda: seen.append("first runs"), lambda _, error: seen.append((simulation.now_ms, error)))
    worker.submit(lambda: 1 // 0, lambda _, error: seen.append((simulation.now_ms, type(error))))
    simulation.run_for(100)
    assert seen == ["first runs", (10, None), (20, ZeroDivisionError)]


@pytest.mark.parametrize(
    "end", [SimulatedScheduler.stop, lambda loop: close_unstarted()], ids=["stopped", "over"]
)
def test_coroutine_that_never_starts_is_closed_without_a_warning(
    end: Callable[[SimulatedScheduler], None],
) -> None:
    """The collector finds it in a cycle with what it works on, and would tell of it in whatever test runs then."""

    class Worker:
        def __init__(self, loop: SimulatedScheduler) -> None:
            self.work = loop.spawn(self.run(), name="worker")

        async def run(self) -> None:
            raise AssertionError("it begins")

    loop = Simulation().scheduler("a")
    worker = weakref.ref(Worker(loop))
    end(loop)
    del loop
    gc.collect()
    assert worker() is None
