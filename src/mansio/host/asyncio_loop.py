"""The port `Scheduler` on an asyncio event loop (uvloop where it is installed).

The scheduler keeps a reference to each spawned coroutine until it ends, and logs those that fail. Invariant: every
method except `call_from_thread` is called on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from mansio.logs import fields
from mansio.ports import SliceTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from mansio.ports import Promise, Timer

logger = logging.getLogger(__name__)

_TLS_FAILED: Final = "Fatal error on SSL protocol"
"""Message of uvloop."""
_NEVER_RETRIEVED: Final = "Future exception was never retrieved"
"""Message of asyncio."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create a uvloop event loop, or one of asyncio where uvloop is not installed, without changing the global event
    loop policy."""
    try:
        import uvloop
    except ImportError:  # Windows, and interpreters without a uvloop wheel
        return asyncio.SelectorEventLoop()
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_on_exception)
    return loop


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no one else handles, unless it is the end of a TLS connection."""
    if not _is_end_of_tls(context):
        loop.default_exception_handler(context)


def _is_end_of_tls(context: Mapping[str, Any]) -> bool:
    """Whether uvloop reports no more than the end of a TLS connection: a write after it, or a reset that no one
    waits for, because the opening of the connection was cancelled between the connect and the handshake."""
    error, message = context.get("exception"), context.get("message")
    if message == _TLS_FAILED:
        is_closing = getattr(context.get("transport"), "is_closing", lambda: False)
        return isinstance(error, RuntimeError) and is_closing()
    return message == _NEVER_RETRIEVED and isinstance(error, ConnectionResetError)


PAUSE_S: Final = 0.001
"""Pause of `AsyncioScheduler.call_after_pause`."""


class RunningLoop:
    """The event loop that runs, for the turns of work without a scheduler (`mansio.host.item_turns.Loop`)."""

    __slots__ = ("slices",)

    def __init__(self) -> None:
        self.slices = SliceTimes(time.monotonic)

    async def sleep(self, delay_ms: float) -> None:
        await asyncio.sleep(delay_ms / 1000)


class AsyncioScheduler:
    """Implementation of the port `Scheduler` on one event loop."""

    __slots__ = ("_loop", "_tasks", "slices")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.slices = SliceTimes(time.monotonic)
        self._tasks: set[asyncio.Task[Any]] = set()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(callback, *args)

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer:
        return self._loop.call_later(delay_ms / 1000, callback, *args)

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        self._loop.call_later(PAUSE_S, callback, *args)

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *args)

    def promise(self) -> Promise[Any]:
        return self._loop.create_future()

    async def sleep(self, delay_ms: float) -> None:
        await asyncio.sleep(delay_ms / 1000)

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Timer:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return _TaskTimer(task)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            known = fields(work=task.get_name(), reason=repr(error))
            logger.error("background_task_failed", exc_info=error, extra=known)

    async def close(self) -> None:
        """Cancel the running coroutines and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _TaskTimer:
    """`Timer` whose `cancel` cancels a task."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()
