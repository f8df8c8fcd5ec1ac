"""How long requests hold the event loop of a broker in the same process."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.node.embedded import EmbeddedBroker
    from mansio.testing.broker import TestBroker

HOLD_S_MAX: Final = 0.15
"""Three times what a request may hold the loop for on the reference machine; without the bounds it is 0.2 to 50 s."""


class LoopWatch:
    """Longest time for which the event loop of a broker ran without a turn of this watch, in processor time."""

    def __init__(self, broker: TestBroker | EmbeddedBroker) -> None:
        assert broker._loop is not None
        self._loop = broker._loop
        self.held_s_max = 0.0
        self._future = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.held_s_max = max(self.held_s_max, time.thread_time() - began)

    def stop(self) -> None:
        """Wait until what ran up to now is measured, and end."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result()
        self._future.cancel()


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Collect garbage as seldom as `mansio serve` does, and only that of the requests: the objects of the test run
    would take longer than a request may. They stay excluded, as those of the collection of tests are."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
