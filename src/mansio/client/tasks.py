"""Background tasks and pending responses of one sender or fetcher.

Tasks handle `MansioError`s of brokers and records themselves. Any other exception is a defect of this library; it is
reported as `ClientFailed`, so that callers do not wait forever.

Invariants:
* The exception of a task, or of the handler of a response, is reported once.
* No exception is reported after `cancel`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from mansio.errors import ClientFailed, MansioError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    ResponseHandler = Callable[[bytes, MansioError | None], None]

logger = logging.getLogger(__name__)


def log_client_failure(error: Exception) -> ClientFailed:
    """Log an unexpected exception with its traceback, and return the `ClientFailed` to raise for it."""
    logger.error("the client failed: %s", error, exc_info=error)
    failed = ClientFailed(f"the client failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class Reply:
    """Waiter of one response that calls a function with the response, without a future or a task.

    Implements `net.connection.Waiter`; created by `BackgroundTasks.create_reply`.
    """

    __slots__ = ("_is_over", "_on_response", "_tasks")

    def __init__(self, tasks: BackgroundTasks, on_response: ResponseHandler) -> None:
        self._tasks = tasks
        self._on_response = on_response
        self._is_over = False

    def done(self) -> bool:
        """Whether the response has been handled or is ignored."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """Handle the response frame."""
        self._end(frame, None)

    def set_exception(self, exception: MansioError, /) -> None:
        """Handle the error that ended the request without a response."""
        self._end(b"", exception)

    def ignore(self) -> None:
        """Ignore the response when it arrives."""
        self._is_over = True

    def _end(self, frame: bytes, error: MansioError | None) -> None:
        self._is_over = True
        self._tasks.complete(self, self._on_response, frame, error)


class BackgroundTasks:
    """Runs coroutines as tasks and keeps the replies of pending requests. Calls `on_failure` with each unexpected
    exception."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: set[Reply] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def create_reply(self, on_response: ResponseHandler) -> Reply:
        """Create the waiter of one response. The connection's read callback calls `on_response(frame, None)`, or
        `on_response(b"", error)` if the request ended without a response."""
        reply = Reply(self, on_response)
        self._replies.add(reply)
        return reply

    def complete(
        self, reply: Reply, on_response: ResponseHandler, frame: bytes, error: MansioError | None
    ) -> None:
        """Call the handler of a reply with the response or error, and report an unexpected exception of the handler."""
        self._replies.discard(reply)
        try:
            on_response(frame, error)
        except Exception as unexpected:  # noqa: BLE001  # reported; other responses of the same read are handled
            self._on_failure(unexpected)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks and ignore all pending responses. Returns the cancelled tasks, which may be awaited."""
        for reply in self._replies:
            reply.ignore()
        self._replies.clear()
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def close(self) -> None:
        """Cancel all tasks, ignore all pending responses, and wait until the tasks have ended."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if task in self._tasks and isinstance(error, Exception):
            self._tasks.discard(task)
            self._on_failure(error)
        self._tasks.discard(task)
