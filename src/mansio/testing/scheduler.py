"""Deterministic simulation of time for one or more brokers: schedulers, promises, clocks and workers on one thread.

A `Simulation` has the virtual time and the event queue. Each broker has a `SimulatedScheduler`, which a test can pause
(due events wait, as in a process after SIGSTOP) or stop (events are dropped, as in a killed process).

Invariants:
* With the same seed the same events happen in the same order (`Simulation.trace`).
* The time changes only between events.
* An exception that a callback or a coroutine does not catch ends the simulation.
"""

from __future__ import annotations

import inspect
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mansio.ports import SliceTimes, complete

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from mansio.ports import Scheduler

T = TypeVar("T")

WALL_START_MS = 1_700_000_000_000
EVENTS_MAX = 5_000_000

_unstarted: dict[Task, None] = {}
"""Tasks that have not run their first step, in order. Referenced here, so that the garbage collector does not delete
their coroutines: Python would warn that a coroutine was never awaited."""


def close_unstarted(scheduler: SimulatedScheduler | None = None) -> None:
    """Close coroutines whose first step will not run any more: those of `scheduler`, or all if it is None."""
    for task in [task for task in _unstarted if scheduler is None or task._scheduler is scheduler]:
        task.close()


class Cancelled(BaseException):
    """Exception that a cancelled task raises in its coroutine."""


class ConditionTimeout(AssertionError):
    """The condition of `Simulation.run_until` did not become true within the time limit."""


class SimulatedTimer:
    """Timer of a `SimulatedScheduler` (port `Timer`)."""

    __slots__ = ("args", "callback", "scheduler")

    def __init__(
        self, scheduler: SimulatedScheduler, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.scheduler = scheduler
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class Simulation:
    """Virtual time and event queue of a simulation. Times are in ms since its start.

    `ready` has the events that are due at once, `queue` the later ones. Events are numbered when they are added; events
    that are due at the same time happen in the order of their numbers. Schedulers append to both queues directly, for
    speed.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.now_ms = 0.0
        self.events = 0
        self.trace = 0
        """Hash of the numbers and times of all events so far, which is the same in every process."""
        self.last_event_number = 0
        self.ready: deque[tuple[int, SimulatedTimer]] = deque()
        self.queue: list[tuple[float, int, SimulatedTimer]] = []

    def scheduler(self, name: str = "") -> SimulatedScheduler:
        """Create the scheduler of one broker."""
        return SimulatedScheduler(self, name)

    def step(self, end_ms: float = inf) -> bool:
        """Run the next event that is due at `end_ms` or before. Returns False if there is none."""
        ready, queue = self.ready, self.queue
        while True:
            if ready and not (queue and queue[0][0] <= self.now_ms and queue[0][1] < ready[0][0]):
                number, timer = ready.popleft()
            elif queue and queue[0][0] <= end_ms:
                due_ms, number, timer = heappop(queue)
                if timer.callback is not None and not timer.scheduler.stopped and due_ms > self.now_ms:
                    self.now_ms = due_ms
            else:
                return False
            callback, scheduler = timer.callback, timer.scheduler
            if callback is None or scheduler.stopped:
                continue
            if scheduler.paused:
                scheduler.delayed_timers.append(timer)
                continue
            self.events += 1
            if self.events > EVENTS_MAX:
                raise ConditionTimeout(f"more than {EVENTS_MAX} events")
            self.trace = hash((self.trace, number, self.now_ms))
            timer.callback = None
            callback(*timer.args)
            return True

    def run_for(self, duration_ms: float) -> None:
        """Run all events of the next `duration_ms`, and advance the time by `duration_ms`."""
        end_ms = self.now_ms + duration_ms
        while self.step(end_ms):
            pass
        self.now_ms = max(self.now_ms, end_ms)

    def run_until(self, condition: Callable[[], object], *, within_ms: float = 60_000) -> None:
        """Run events until `condition()` is true. Raises `ConditionTimeout` after `within_ms` of virtual time."""
        end_ms = self.now_ms + within_ms
        while not condition():
            if not self.step(end_ms):
                raise ConditionTimeout(f"not within {within_ms} ms of simulated time")

    def run(self, work: Coroutine[Any, Any, T], *, within_ms: float = 60_000) -> T:
        """Run events until the coroutine `work` ends. Returns its result or raises its exception."""
        task = Task(self.scheduler("test"), work, "test", is_error_stored=True)
        self.run_until(lambda: task.done, within_ms=within_ms)
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result


class SimulatedClock:
    """Clock of one broker (port `Clock`). `wall_offset_ms`: error of its wall clock."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.wall_offset_ms = 0.0

    def wall_ms(self) -> int:
        return int(WALL_START_MS + self._simulation.now_ms + self.wall_offset_ms)

    def monotonic(self) -> float:
        return 1000.0 + self._simulation.now_ms / 1000


class SimulatedScheduler:
    """Event loop of one broker of a simulation (port `Scheduler`)."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.paused = False
        self.stopped = False
        self.delayed_timers: list[SimulatedTimer] = []
        self.slices = SliceTimes(SimulatedClock(simulation).monotonic)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        simulation = self.simulation
        simulation.last_event_number = number = simulation.last_event_number + 1
        simulation.ready.append((number, SimulatedTimer(self, callback, args)))

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> SimulatedTimer:
        simulation, timer = self.simulation, SimulatedTimer(self, callback, args)
        simulation.last_event_number = number = simulation.last_event_number + 1
        if delay_ms > 0:
            heappush(simulation.queue, (simulation.now_ms + delay_ms, number, timer))
        else:
            simulation.ready.append((number, timer))
        return timer

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_soon(callback, *args)

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_soon(callback, *args)

    def promise(self) -> SimulatedPromise[Any]:
        return SimulatedPromise(self)

    async def sleep(self, delay_ms: float) -> None:
        promise = self.promise()
        timer = self.call_later(delay_ms, complete, promise, None)
        try:
            await promise
        finally:
            timer.cancel()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        return Task(self, work, name)

    def pause(self) -> None:
        """Run no events until `resume`, as after SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """Run the events that became due since `pause`, in order."""
        self.paused = False
        delayed_timers, self.delayed_timers = self.delayed_timers, []
        for timer in delayed_timers:
            self.simulation.last_event_number += 1
            self.simulation.ready.append((self.simulation.last_event_number, timer))

    def stop(self) -> None:
        """Run no more events, as after SIGKILL."""
        self.stopped = True
        self.delayed_timers.clear()
        close_unstarted(self)


class SimulatedPromise(Generic[T]):
    """Promise of a `SimulatedScheduler` (port `Promise`). Its callbacks are separate events, as on an asyncio loop."""

    __slots__ = ("_callbacks", "_done", "_error", "_result", "_scheduler")

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self._scheduler = scheduler
        self._callbacks: list[Callable[[Any], object]] = []
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: T, /) -> None:
        self._complete(result, None)

    def set_exception(self, exception: BaseException, /) -> None:
        self._complete(None, exception)

    def _complete(self, result: Any, error: BaseException | None) -> None:
        assert not self._done, "a promise is completed once"
        self._done, self._result, self._error = True, result, error
        for callback in self._callbacks:
            self._scheduler.call_soon(callback, self)
        self._callbacks.clear()

    def result(self) -> T:
        assert self._done, "not completed yet"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]  # what was set

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        if self._done:
            self._scheduler.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            yield self
        return self.result()


class Task:
    """Task of a `SimulatedScheduler`. `is_error_stored`: an exception of the coroutine is stored in `error`; otherwise
    it ends the simulation."""

    def __init__(
        self,
        scheduler: SimulatedScheduler,
        work: Coroutine[Any, Any, Any],
        name: str,
        *,
        is_error_stored: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._work = work
        self.name = name
        self._caught = is_error_stored
        self._waits_for: object = self
        """What resumes the coroutine: a promise, `Cancelled`, or this task before the first step; None after the
        end."""
        self.result: Any = None
        self.error: BaseException | None = None
        _unstarted[self] = None
        scheduler.call_soon(self._resume, self)

    def __del__(self) -> None:
        """Close the coroutine, so that Python does not warn about a coroutine that never ended."""
        with suppress(ValueError):  # the garbage collector may be closing the coroutine
            self._work.close()

    def close(self) -> None:
        """Close the coroutine; it is not resumed any more."""
        if self in _unstarted:
            self._close_unstarted_arguments()
        _unstarted.pop(self, None)
        self._waits_for = None
        self._work.close()

    def _close_unstarted_arguments(self) -> None:
        """Close the coroutines that this one should run and never will, because it does not begin: Python would warn
        that they were never awaited."""
        for argument in inspect.getcoroutinelocals(self._work).values():
            if inspect.iscoroutine(argument):
                argument.close()

    @property
    def done(self) -> bool:
        return self._waits_for is None

    def cancel(self) -> None:
        """Resume the coroutine with `Cancelled`, as a separate event."""
        if not self.done:
            self._waits_for = Cancelled()
            self._scheduler.call_soon(self._resume, self._waits_for)

    def ended(self) -> None:
        """Do nothing; subclasses override this hook, which is called when the coroutine has ended."""

    def _resume(self, resumed_by: object) -> None:
        """Run the next step of the coroutine, unless the task does not wait for `resumed_by` any more."""
        if resumed_by is not self._waits_for:
            return
        if isinstance(resumed_by, Cancelled) and self in _unstarted:
            self._close_unstarted_arguments()
        _unstarted.pop(self, None)
        try:
            waits_for = (
                self._work.throw(resumed_by) if isinstance(resumed_by, Cancelled) else self._work.send(None)
            )
        except StopIteration as stop:
            self._waits_for, self.result = None, stop.value
        except Cancelled:
            self._waits_for = None
        except BaseException as failure:
            self._waits_for, self.error = None, failure
            if not self._caught:
                failure.add_note(f"in {self.name!r} of {self._scheduler.name!r}")
                raise
        else:
            if self._waits_for is resumed_by:  # it did not cancel itself
                self._waits_for = waits_for
                waits_for.add_done_callback(self._resume)
            return
        self.ended()


class SimulatedBackground:
    """Background worker that runs one job at a time (port `Background`). A job takes effect when it starts and
    completes after `latency_ms`; changes made in between are not part of it."""

    def __init__(self, scheduler: Scheduler, latency_ms: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._latency_ms = latency_ms
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()
        self._running = False

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        self._jobs.append((work, done))
        if not self._running:
            self._running = True
            self._scheduler.call_soon(self._begin)

    def _begin(self) -> None:
        work, done = self._jobs.popleft()
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - the port hands every error to `done`
            error = caught
        self._scheduler.call_later(self._latency_ms(), self._end, done, result, error)

    def _end(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        if self._jobs:
            self._scheduler.call_soon(self._begin)
        else:
            self._running = False
        done(result, error)

    def close(self) -> None:
        """Do nothing: submitted jobs stay in the simulation's queue."""


class SimulatedRandom:
    """Random numbers of the simulation's seeded generator (port `Random`)."""

    def __init__(self, simulation: Simulation) -> None:
        self._random = simulation.random

    def bytes(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
