"""An asyncio loop with virtual time, which advances when all tasks wait: minutes of waiting take milliseconds, and runs
are deterministic."""

from __future__ import annotations

import asyncio
import selectors
from random import Random as Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import TypeVar

    T = TypeVar("T")


STEPS_AT_ONE_TIME_MAX = 20_000


class _Selector(selectors.DefaultSelector):
    now = 0.0
    still = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.still = 0 if timeout > 0 else self.still + 1
        if self.still > STEPS_AT_ONE_TIME_MAX:
            raise RuntimeError(f"time stands still at {self.now}: somebody does not wait for anything")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class VirtualClock:
    """`ports.Clock` of such a loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def wall_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()


class SeededRandom:
    """`ports.Random` with a fixed seed."""

    def __init__(self, seed: int) -> None:
        self._generator = Generator(seed)

    def bytes(self, length: int) -> bytes:
        return self._generator.randbytes(length)

    def uniform(self, low: float, high: float) -> float:
        return self._generator.uniform(low, high)


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own; tasks that are left are cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        close(loop)


def close(loop: VirtualLoop) -> None:
    """Cancel what is left, let it end, close."""

    async def end() -> None:
        tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run_until_complete(end())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
