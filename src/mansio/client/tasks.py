"""Background tasks and pending responses of one sender or fetcher.

Errors of brokers and records are `MansioError`s and handled by each task. Any other exception is a bug of this library;
callers that wait must get it (`ClientFailed`) rather than wait forever.

Invariants:
* A task that ends with an exception is reported once, and so is a response whose handler raises.
* After `cancel` nothing is reported.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    OnEnd = Callable[[bytes, MansioError | None], None]

logger = logging.getLogger(__name__)


class ClientFailed(MansioError):
    """An unexpected exception inside the client. Requests in progress may or may not have taken effect."""


def client_failed(error: Exception) -> ClientFailed:
    """The typed error for an unexpected exception, which is logged with its traceback."""
    logger.error("the client failed: %s", error, exc_info=error)
    failed = ClientFailed(f"the client failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class Reply:
    """A `net.connection.Waiter` that calls a function, without a future or a task; created by `Tasks.reply`."""

    __slots__ = ("_is_over", "_on_end", "_tasks")

    def __init__(self, tasks: Tasks, on_end: OnEnd) -> None:
        self._tasks = tasks
        self._on_end = on_end
        self._is_over = False

    def done(self) -> bool:
        """Whether the response was handled, failed or is ignored."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """Handle the response frame."""
        self._end(frame, None)

    def set_exception(self, exception: MansioError, /) -> None:
        """Handle the end of the request without a response."""
        self._end(b"", exception)

    def give_up(self) -> None:
        """Ignore the response."""
        self._is_over = True

    def _end(self, frame: bytes, error: MansioError | None) -> None:
        self._is_over = True
        self._tasks.complete(self, self._on_end, frame, error)


class Tasks:
    """Runs coroutines in the background. `on_failure` is called with each unexpected exception."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: set[Reply] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def reply(self, on_end: OnEnd) -> Reply:
        """A waiter for one response. `on_end` is called in the connection's read callback with the frame, or with b""
        and the error that replaced the response."""
        reply = Reply(self, on_end)
        self._replies.add(reply)
        return reply

    def complete(self, reply: Reply, on_end: OnEnd, frame: bytes, error: MansioError | None) -> None:
        """Handle the end of a reply."""
        self._replies.discard(reply)
        try:
            on_end(frame, error)
        except Exception as unexpected:  # noqa: BLE001  # reported; other responses of the same read are handled
            self._on_failure(unexpected)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks and ignore all responses. Returns the tasks, which may be awaited."""
        for reply in self._replies:
            reply.give_up()
        self._replies.clear()
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def end(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if task in self._tasks and isinstance(error, Exception):
            self._tasks.discard(task)
            self._on_failure(error)
        self._tasks.discard(task)
