"""Virtual time for one broker or many: schedulers, promises, clocks and workers that one thread drives.

A `Simulation` owns the time and the one queue of what happens when. Each broker gets a `SimulatedScheduler` of its own:
it can be paused (what is due waits, as in a process that is stopped) and stopped (what is due never happens, as in one
that was killed).

Always true: the same seed gives the same history, event by event (`Simulation.trace`); time passes only between events;
an exception that a callback or a coroutine lets out ends the run, so that nothing fails unseen.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

T = TypeVar("T")

WALL_START_MS = 1_700_000_000_000
EVENTS_MAX = 5_000_000

_unstarted: dict[Task, None] = {}
"""Tasks that have not taken their first step, in the order they came. Held here, so that the collector of garbage never
meets their coroutines: Python says of one that was never begun that somebody forgot to await it."""


def close_unstarted(scheduler: SimulatedScheduler | None = None) -> None:
    """End the coroutines that will not begin any more: of a scheduler that was stopped, or, when simulations are over,
    of all."""
    for task in [task for task in _unstarted if scheduler is None or task._scheduler is scheduler]:
        task.close()


class Cancelled(BaseException):
    """Thrown into a coroutine whose work was cancelled."""


class ConditionTimeout(AssertionError):
    """What a simulation was to run for did not happen in time."""


class SimulatedTimer:
    """`mansio.ports.Timer`."""

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
    """See the module. Times are milliseconds since the simulation began.

    What is due at once waits in `ready`, what is due later in `queue`; `count` numbers both in the order they came,
    which is the order in which what is due at one moment happens. Schedulers put in directly: they do little else.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.now_ms = 0.0
        self.events = 0
        self.trace = 0
        """A hash over all events so far: of numbers, so that it is the same in every process."""
        self.count = 0
        self.ready: deque[tuple[int, SimulatedTimer]] = deque()
        self.queue: list[tuple[float, int, SimulatedTimer]] = []

    def scheduler(self, name: str = "") -> SimulatedScheduler:
        """A loop of its own for one broker."""
        return SimulatedScheduler(self, name)

    def step(self, end_ms: float = inf) -> bool:
        """Let the next thing happen that is due by then; False when there is none."""
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
                scheduler.held.append(timer)
                continue
            self.events += 1
            if self.events > EVENTS_MAX:
                raise ConditionTimeout(f"more than {EVENTS_MAX} events")
            self.trace = hash((self.trace, number, self.now_ms))
            timer.callback = None
            callback(*timer.args)
            return True

    def run_for(self, duration_ms: float) -> None:
        """Let all happen that is due in so long, and be there then."""
        end_ms = self.now_ms + duration_ms
        while self.step(end_ms):
            pass
        self.now_ms = max(self.now_ms, end_ms)

    def run_until(self, condition: Callable[[], object], *, within_ms: float = 60_000) -> None:
        """Go on until `condition` holds; `ConditionTimeout` when it does not within so long."""
        end_ms = self.now_ms + within_ms
        while not condition():
            if not self.step(end_ms):
                raise ConditionTimeout(f"not within {within_ms} ms of simulated time")

    def run(self, work: Coroutine[Any, Any, T], *, within_ms: float = 60_000) -> T:
        """Run a coroutine of the test's own to its end; what it returns or raises."""
        task = Task(self.scheduler("test"), work, "test", caught=True)
        self.run_until(lambda: task.done, within_ms=within_ms)
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result


class SimulatedClock:
    """`mansio.ports.Clock`. `wall_offset_ms`: how wrong it goes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.wall_offset_ms = 0.0

    def wall_ms(self) -> int:
        return int(WALL_START_MS + self._simulation.now_ms + self.wall_offset_ms)

    def monotonic(self) -> float:
        return 1000.0 + self._simulation.now_ms / 1000


class SimulatedScheduler:
    """`mansio.ports.Scheduler` for one broker of a simulation."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.paused = False
        self.stopped = False
        self.held: list[SimulatedTimer] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        simulation = self.simulation
        simulation.count = number = simulation.count + 1
        simulation.ready.append((number, SimulatedTimer(self, callback, args)))

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> SimulatedTimer:
        simulation, timer = self.simulation, SimulatedTimer(self, callback, args)
        simulation.count = number = simulation.count + 1
        if delay_ms > 0:
            heappush(simulation.queue, (simulation.now_ms + delay_ms, number, timer))
        else:
            simulation.ready.append((number, timer))
        return timer

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_soon(callback, *args)

    def promise(self) -> SimulatedPromise[Any]:
        return SimulatedPromise(self)

    async def sleep(self, delay_ms: float) -> None:
        promise = self.promise()
        timer = self.call_later(delay_ms, _complete, promise)
        try:
            await promise
        finally:
            timer.cancel()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        return Task(self, work, name)

    def pause(self) -> None:
        """Nothing happens any more until `resume`, as after SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """What was due meanwhile happens now, in its order."""
        self.paused = False
        held, self.held = self.held, []
        for timer in held:
            self.simulation.count += 1
            self.simulation.ready.append((self.simulation.count, timer))

    def stop(self) -> None:
        """Nothing happens any more, ever, as after SIGKILL."""
        self.stopped = True
        self.held.clear()
        close_unstarted(self)


def _complete(promise: SimulatedPromise[None]) -> None:
    if not promise.done():
        promise.set_result(None)


class SimulatedPromise(Generic[T]):
    """`mansio.ports.Promise`: callbacks come in a turn of their own, as on an asyncio loop."""

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
        self._settle(result, None)

    def set_exception(self, exception: BaseException, /) -> None:
        self._settle(None, exception)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        assert not self._done, "a promise is settled once"
        self._done, self._result, self._error = True, result, error
        for callback in self._callbacks:
            self._scheduler.call_soon(callback, self)
        self._callbacks.clear()

    def result(self) -> T:
        assert self._done, "not settled yet"
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
    """A coroutine under way. `caught`: its error is kept for who waits; otherwise it ends the run."""

    def __init__(
        self,
        scheduler: SimulatedScheduler,
        work: Coroutine[Any, Any, Any],
        name: str,
        *,
        caught: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._work = work
        self.name = name
        self._caught = caught
        self._waits_for: object = self
        """What it goes on with: a promise, or `Cancelled`, or itself to begin with; None at its end."""
        self.result: Any = None
        self.error: BaseException | None = None
        _unstarted[self] = None
        scheduler.call_soon(self._go_on, self)

    def __del__(self) -> None:
        """One that is never heard of again, its broker being dead, is no defect of who wrote the coroutine."""
        with suppress(ValueError):  # the collector may have begun to end the coroutine itself
            self._work.close()

    def close(self) -> None:
        """End its coroutine where it stands; it goes on no more."""
        _unstarted.pop(self, None)
        self._waits_for = None
        self._work.close()

    @property
    def done(self) -> bool:
        return self._waits_for is None

    def cancel(self) -> None:
        """It goes on with `Cancelled`, in a turn of its own."""
        if not self.done:
            self._waits_for = Cancelled()
            self._scheduler.call_soon(self._go_on, self._waits_for)

    def ended(self) -> None:
        """It is done: for those who have to know."""

    def _go_on(self, woken_by: object) -> None:
        """Take the next step, unless it waits for something else by now."""
        if woken_by is not self._waits_for:
            return
        _unstarted.pop(self, None)
        try:
            waits_for = (
                self._work.throw(woken_by) if isinstance(woken_by, Cancelled) else self._work.send(None)
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
            if self._waits_for is woken_by:  # it did not cancel itself
                self._waits_for = waits_for
                waits_for.add_done_callback(self._go_on)
            return
        self.ended()


class SimulatedBackground:
    """`mansio.ports.Background`: one job at a time. What it does is done when it begins; that it is done is told after
    `latency_ms`, so that nothing which comes meanwhile is covered by it."""

    def __init__(self, scheduler: SimulatedScheduler, latency_ms: Callable[[], float]) -> None:
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
        """Nothing to end: the jobs that were submitted are in the simulation's queue."""


class SimulatedRandom:
    """`mansio.ports.Random` out of the simulation's one source."""

    def __init__(self, simulation: Simulation) -> None:
        self._random = simulation.random

    def bytes(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
