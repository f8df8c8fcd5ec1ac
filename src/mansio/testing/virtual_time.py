"""Virtual time of a test broker: a clock that follows real time and can be advanced, and timers that follow this clock.

A test broker serves real clients over real sockets, so its time passes by itself; `VirtualTime.advance` adds to it. The
clock is the host's plus an offset. Timers have their due times on this clock: an advance fires those that become due
one after the other, in the order of their due times, and lets the broker complete the work of each before the next.

Invariants:
* The time never goes back, and a timer never fires before its due time.
* Every method except `VirtualScheduler.call_from_thread` is called on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from mansio.errors import RequestTimedOut
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock
from mansio.ports import complete

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mansio.ports import Promise, Timer

QUIET_ITERATIONS = 12
"""Number of consecutive iterations of the event loop without any activity after which the broker is idle. A coroutine
needs an iteration for each result that it passes on, which the scheduler does not see."""

QUICK_ITERATIONS = 3
"""The same for the work of one timer, until the first activity: a completed promise is counted one iteration later."""

IDLE_WAIT_S_MAX = 60.0

EXACT_MS_MAX = 2 * 86_400_000
"""Longest advance in which every timer fires at its due time."""

STEPS_MAX = 2000
"""Number of steps of a longer advance."""


class VirtualClock:
    """Clock of a test broker (port `Clock`): the host's clock plus `offset_ms`."""

    __slots__ = ("_host", "offset_ms")

    def __init__(self) -> None:
        self._host = HostClock()
        self.offset_ms = 0.0

    def wall_ms(self) -> int:
        return self._host.wall_ms() + int(self.offset_ms)

    def monotonic(self) -> float:
        return self._host.monotonic() + self.offset_ms / 1000

    def move_to(self, monotonic_ms: float) -> None:
        """Advance the clock to this monotonic time, unless it is past it already."""
        self.offset_ms += max(0.0, monotonic_ms - self.monotonic() * 1000)


class SessionClock:
    """Clock of the group coordinator (port `Clock`): virtual wall time, and monotonic time that an advance changes only
    if it is to include sessions. So members that send heartbeats in real time keep their sessions."""

    __slots__ = ("_clock", "_excluded_ms")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._excluded_ms = 0.0

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def monotonic(self) -> float:
        return self._clock.monotonic() - self._excluded_ms / 1000

    def exclude(self, duration_ms: float) -> None:
        """Take `duration_ms`, by which the virtual clock was advanced, off the monotonic time."""
        self._excluded_ms += duration_ms


class VirtualTimer:
    """A timer of a `VirtualScheduler` (port `Timer`)."""

    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class VirtualScheduler:
    """Scheduler of a test broker (port `Scheduler`): an asyncio event loop whose timers follow a virtual clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: VirtualClock) -> None:
        self.clock = clock
        self.activity = 0
        """Number of callbacks, timers, promises and coroutines so far; it stays the same while the broker is idle."""
        self._loop = loop
        self._real = AsyncioScheduler(loop)
        self.slices = self._real.slices
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._timer_count = 0
        self._armed: asyncio.TimerHandle | None = None
        self._armed_for_ms = 0.0

    # Port `Scheduler`

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.activity += 1
        self._loop.call_soon(callback, *args)

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer:
        timer = VirtualTimer(callback, args)
        self._timer_count += 1
        due_ms = self.clock.monotonic() * 1000 + max(delay_ms, 0.0)
        heappush(self._timers, (due_ms, self._timer_count, timer))
        if self._armed is None or due_ms < self._armed_for_ms:
            self._arm()
        return timer

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_soon(callback, *args)

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(self.call_soon, callback, *args)

    def promise(self) -> Promise[Any]:
        self.activity += 1
        promise = self._loop.create_future()
        promise.add_done_callback(self._count_completion)
        return promise

    def _count_completion(self, _: asyncio.Future[Any]) -> None:
        self.activity += 1

    async def sleep(self, delay_ms: float) -> None:
        promise = self.promise()
        timer = self.call_later(delay_ms, complete, promise, None)
        try:
            await promise
        finally:
            timer.cancel()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Timer:
        self.activity += 1
        return self._real.spawn(work, name=name)

    async def close(self) -> None:
        """Cancel all timers and coroutines, and wait until these have ended."""
        self._timers.clear()
        self._arm()
        await self._real.close()

    # Virtual time

    def next_due_ms(self) -> float | None:
        """Monotonic time of the earliest timer, in milliseconds; None if there is none."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heappop(timers)
        return timers[0][0] if timers else None

    def fire_due(self) -> None:
        """Run all timers that are due, in the order of their due times."""
        try:
            while (due_ms := self.next_due_ms()) is not None and due_ms <= self.clock.monotonic() * 1000:
                _, _, timer = heappop(self._timers)
                callback, args = timer.callback, timer.args
                timer.cancel()
                if callback is not None:
                    self.activity += 1
                    callback(*args)
        finally:
            self._arm()

    async def wait_until_idle(self, *, quick: bool = False) -> None:
        """Wait until the broker is idle: nothing is left to do before the next timer or request.

        `quick`: return after three iterations of the event loop without activity; for a timer that only sets itself
        again, of which a long advance fires many.

        Raises:
            RequestTimedOut: The broker was not idle within `IDLE_WAIT_S_MAX` seconds of real time.
        """
        end_s = self._loop.time() + IDLE_WAIT_S_MAX
        wanted, quiet = QUICK_ITERATIONS if quick else QUIET_ITERATIONS, 0
        while quiet < wanted:
            before = self.activity
            await asyncio.sleep(0)
            if self.activity == before:
                quiet += 1
            else:
                wanted, quiet = QUIET_ITERATIONS, 0
            if self._loop.time() > end_s:
                raise RequestTimedOut(f"the test broker was not idle within {IDLE_WAIT_S_MAX:.0f} s")

    def _arm(self) -> None:
        """Set the event loop's timer for the earliest of these timers."""
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None
        due_ms = self.next_due_ms()
        if due_ms is not None:
            self._armed_for_ms = due_ms
            delay_s = max(0.0, due_ms / 1000 - self.clock.monotonic())
            self._armed = self._loop.call_later(delay_s, self._on_armed)

    def _on_armed(self) -> None:
        self._armed = None
        self.fire_due()


class VirtualTime:
    """Clocks and scheduler of one test broker, and the operation that advances them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = VirtualClock()
        self.session_clock = SessionClock(self.clock)
        self.scheduler = VirtualScheduler(loop, self.clock)

    async def advance(
        self,
        duration_ms: float,
        *,
        include_sessions: bool,
        next_wake_ms: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Advance the time by `duration_ms`, fire all timers that become due, and wait until the broker is idle.

        In an advance of more than `EXACT_MS_MAX` a timer may fire up to `duration_ms / STEPS_MAX` after its due time,
        so that periodic work does not run for each of its periods. No step passes the time that `next_wake_ms` returns,
        by the wall clock: that of the next delayed record or schedule.
        """
        scheduler = self.scheduler
        await scheduler.wait_until_idle()
        end_ms = self.clock.monotonic() * 1000 + duration_ms
        step_ms = duration_ms / STEPS_MAX if duration_ms > EXACT_MS_MAX else 0.0
        while (due_ms := scheduler.next_due_ms()) is not None and due_ms <= end_ms:
            target_ms = min(due_ms + step_ms, end_ms)
            wake_ms = next_wake_ms()
            if wake_ms is not None:
                wake_ms += round(self.clock.monotonic() * 1000) - self.clock.wall_ms()
                target_ms = max(due_ms, min(target_ms, wake_ms))
            self._move_to(target_ms, include_sessions=include_sessions)
            scheduler.fire_due()
            await scheduler.wait_until_idle(quick=True)
        self._move_to(end_ms, include_sessions=include_sessions)
        scheduler.fire_due()  # and set the event loop's timer again, for which less time is left now
        await scheduler.wait_until_idle()

    def _move_to(self, monotonic_ms: float, *, include_sessions: bool) -> None:
        before_ms = self.clock.offset_ms
        self.clock.move_to(monotonic_ms)
        if not include_sessions:
            self.session_clock.exclude(self.clock.offset_ms - before_ms)
