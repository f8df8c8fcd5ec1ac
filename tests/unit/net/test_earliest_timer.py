"""Timer that fires at the earliest requested time, on every kind of event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from mansio.net.earliest_timer import EarliestTimer
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@loops
@pytest.mark.parametrize("away_s", [-1.0, 0.0, 0.0001, 0.0004, 0.0006, 0.002])
def test_time_less_than_half_a_millisecond_away_can_be_set_again(
    new_loop: Callable[[], asyncio.AbstractEventLoop], away_s: float
) -> None:
    """uvloop rounds to milliseconds: what is nearer than half of one comes as a handle without a moment."""

    async def ask() -> int:
        rings = 0
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            nonlocal rings
            rings += 1
            done.set()

        alarm = EarliestTimer(loop, ring)
        for more in (0.0005, 0.0, 0.0002, -0.0001, 0.01):
            alarm.set(loop.time() + away_s + more)
        async with asyncio.timeout(scaled(10)):
            await done.wait()
        await asyncio.sleep(0)
        alarm.cancel()
        return rings

    loop = new_loop()
    try:
        assert loop.run_until_complete(ask()) == 1
    finally:
        loop.close()


@loops
def test_timer_fires_once_at_the_earliest_time_and_not_after_cancel(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def ask() -> tuple[int, int]:
        rings = 0
        done = asyncio.Event()

        def ring() -> None:
            nonlocal rings
            rings += 1
            done.set()

        loop = asyncio.get_running_loop()
        alarm = EarliestTimer(loop, ring)
        alarm.set(loop.time() + 3600)
        alarm.set(loop.time() + 0.01)
        alarm.set(loop.time() + 7200)
        async with asyncio.timeout(scaled(10)):
            await done.wait()
        once = rings
        alarm.set(loop.time() + 0.01)
        alarm.cancel()
        marker = asyncio.Event()
        loop.call_later(0.03, marker.set)
        async with asyncio.timeout(scaled(10)):
            await marker.wait()
        return once, rings

    loop = new_loop()
    try:
        assert loop.run_until_complete(ask()) == (1, 1)
    finally:
        loop.close()
