"""Runs blocking work on a thread while a coroutine of the event loop awaits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from mansio.errors import StorageError
from mansio.ports import complete_from
from mansio.tracebacks import result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Background, Promise, Scheduler

T = TypeVar("T")


async def run_in_thread(scheduler: Scheduler, thread: Background, work: Callable[[], T]) -> T:
    """Run `work` on `thread` and return its result. Raises the exception of `work`; an `OSError` becomes
    `StorageError`."""
    promise: Promise[T] = scheduler.promise()

    def done(result: T | None, error: BaseException | None) -> None:
        complete_from(promise, result, StorageError(str(error)) if isinstance(error, OSError) else error)

    thread.submit(work, done)
    return await result_of(promise)
