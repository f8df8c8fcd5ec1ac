"""The tasks of one sender or fetcher: none is lost sight of, and none fails in silence.

What can go wrong with brokers and records is a `MansioError`, and each task deals with its own. Any other exception is
a mistake in this library: whoever waits must be told of it (`ClientFailed`) rather than be left waiting.

Always true: a task that ends with an exception is reported once; after `cancel`, nothing more is reported.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)


class ClientFailed(MansioError):
    """Something unforeseen went wrong inside the client. What was under way may or may not have happened."""


def client_failed(error: Exception) -> ClientFailed:
    """The typed error for an exception that nobody foresaw, which goes to the log with its traceback."""
    logger.error("the client failed: %s", error, exc_info=error)
    failed = ClientFailed(f"the client failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class Tasks:
    """Runs coroutines beside the caller. `on_failure` gets what none of them foresaw."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all; the tasks, to be awaited if need be."""
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def end(self) -> None:
        """Cancel all, and wait until they have ended."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if task in self._tasks and isinstance(error, Exception):
            self._tasks.discard(task)
            self._on_failure(error)
        self._tasks.discard(task)
