"""A loop in a thread, and blocking twins of things that live on it.

For programs without a loop of their own. Owns one background thread with one loop; every call of a twin runs the
original's coroutine there and waits. Twins are made from the originals method by method, so that names, parameters,
types and docstrings are the same in both worlds and no logic is written twice.

Always true: an object on the loop is touched by the loop's thread only; a call that is interrupted (Ctrl-C) cancels
its coroutine before it raises; `close` ends the thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class LoopThread:
    """One event loop in one daemon thread."""

    def __init__(self, name: str = "mansio-client") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its outcome. `RuntimeError` on the loop's own thread."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            work.close()
            reason = "closed" if not self._thread.is_alive() else "blocking itself"
            raise RuntimeError(f"the client's loop is {reason}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect when the coroutine itself has ended
            raise

    def close(self) -> None:
        """Cancel what still runs on the loop and end the thread. Closing twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class Twin(Generic[T]):
    """The blocking face of one object that lives on a loop."""

    def __init__(self, thread: LoopThread, original: T) -> None:
        self._thread = thread
        self._original = original


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """The blocking twin of a coroutine method."""

    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._original, *args, **kwargs))

    return call


def on_loop(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The twin of a plain method, run on the loop's thread."""

    async def work(original: Any, *args: Any, **kwargs: Any) -> R:
        return method(original, *args, **kwargs)

    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(work(self._original, *args, **kwargs))

    return call
