"""The tasks of one sender or fetcher, and the answers it waits for: none is lost sight of, and none fails in silence.

What can go wrong with brokers and records is a `MansioError`, and each task deals with its own. Any other exception is
a mistake in this library: whoever waits must be told of it (`ClientFailed`) rather than be left waiting.

Always true: a task that ends with an exception is reported once, and so is an answer that cannot be dealt with; after
`cancel`, nothing more is reported.
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
    """Something unforeseen went wrong inside the client. What was under way may or may not have happened."""


def client_failed(error: Exception) -> ClientFailed:
    """The typed error for an exception that nobody foresaw, which goes to the log with its traceback."""
    logger.error("the client failed: %s", error, exc_info=error)
    failed = ClientFailed(f"the client failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class Reply:
    """Waits for an answer as a `net.connection.Waiter`, without a future or a task: see `Tasks.reply`."""

    __slots__ = ("_is_over", "_on_end", "_tasks")

    def __init__(self, tasks: Tasks, on_end: OnEnd) -> None:
        self._tasks = tasks
        self._on_end = on_end
        self._is_over = False

    def done(self) -> bool:
        """Whether it is over."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """The answer."""
        self._end(frame, None)

    def set_exception(self, exception: MansioError, /) -> None:
        """There will be no answer."""
        self._end(b"", exception)

    def give_up(self) -> None:
        """Whatever comes, nobody wants to hear of it any more."""
        self._is_over = True

    def _end(self, frame: bytes, error: MansioError | None) -> None:
        self._is_over = True
        self._tasks.answered(self, self._on_end, frame, error)


class Tasks:
    """Runs coroutines beside the caller. `on_failure` gets what none of them foresaw."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: set[Reply] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def reply(self, on_end: OnEnd) -> Reply:
        """Something to wait for an answer with; `on_end` is called where it is read, with the frame, or with b"" and
        the error that came instead."""
        made = Reply(self, on_end)
        self._replies.add(made)
        return made

    def answered(self, reply: Reply, on_end: OnEnd, frame: bytes, error: MansioError | None) -> None:
        """A reply is over."""
        self._replies.discard(reply)
        try:
            on_end(frame, error)
        except Exception as unforeseen:  # noqa: BLE001  # it ends nothing else that is read, and is told
            self._on_failure(unforeseen)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all; the tasks, to be awaited if need be."""
        for reply in self._replies:
            reply.give_up()
        self._replies.clear()
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
