"""A loop in a thread, and blocking twins of things that live on it.

For programs without a loop of their own. Owns one background thread with one loop; every call of a twin runs the
original's coroutine there and waits. Twins are made from the originals method by method, so that names, parameters,
types and docstrings are the same in both worlds and no logic is written twice.

Always true: an object on the loop is touched by the loop's thread only; a call that is interrupted (Ctrl-C) cancels
its coroutine; every call ends, `concurrent.futures.CancelledError` if not otherwise; `close` ends the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SIGNAL_CHECK_S = 1.0
"""A thread that waits looks up so often: between the last look at signals and the wait itself one would be missed."""

EXIT_S_MAX = 5.0
"""So long the end of a program waits for a loop that nobody closed."""

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class LoopUnavailable(RuntimeError):
    """The loop is closed, or the call came from its own thread and would wait for itself."""


class PendingCall(Generic[T]):
    """One thread waits for an outcome, the loop's thread gives it: as much of a future as that needs.

    A lock and no condition, because that is all it takes to wake one thread once.
    """

    __slots__ = ("_error", "_is_over", "_lock", "_result", "_task")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_over = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[T] | None = None

    def done(self) -> bool:
        """Whether the outcome is known, or nobody waits for it any more."""
        return self._is_over

    def set_result(self, result: T, /) -> None:
        """Give the outcome. Only the first counts."""
        if not self._is_over:
            self._is_over, self._result = True, result
            self._lock.release()

    def set_exception(self, error: BaseException, /) -> None:
        """Give the outcome: an error to be raised in the thread that waits. Only the first counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._lock.release()

    def follow(self, task: asyncio.Task[T]) -> None:
        """Take over the outcome of a task; an interrupted call cancels it."""
        self._task = task
        task.add_done_callback(self._take)

    def cancel(self) -> None:
        """End the task, if there is one, and the wait."""
        if self._task is not None:
            self._task.cancel()
        self.set_exception(CancelledError())

    def wait(self) -> T:
        """The outcome, or its error. Meant for one thread, once."""
        while not self._lock.acquire(timeout=SIGNAL_CHECK_S):
            pass  # a signal that came just before the wait began is seen now
        try:
            if self._error is not None:
                raise self._error
            return cast("T", self._result)
        finally:
            self._error = self._task = None  # an error holds its frames, and they would hold it

    def _take(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class LoopThread:
    """One event loop in one daemon thread."""

    def __init__(self, name: str = "mansio-client") -> None:
        self._loop = _new_loop()
        self._calls: set[PendingCall[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_program)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its outcome. `RuntimeError` on the loop's own thread."""
        has_begun = False

        def begin(call: PendingCall[T]) -> None:
            nonlocal has_begun
            has_begun = True
            call.follow(self._loop.create_task(work))

        try:
            return self.call(begin)
        except (LoopUnavailable, CancelledError):
            if not has_begun:
                work.close()
            raise

    def call(self, begin: Callable[[PendingCall[T]], object]) -> T:
        """Call `begin(call)` on the loop and wait until somebody there has given the call's outcome; what `begin`
        raises is one. Cheaper than `run` where no task is needed. `RuntimeError` on the loop's own thread."""
        if threading.get_ident() == self._thread.ident or not self._thread.is_alive():
            reason = "closed" if not self._thread.is_alive() else "blocking itself"
            raise LoopUnavailable(f"the client's loop is {reason}")
        call: PendingCall[T] = PendingCall()
        self._calls.add(call)
        try:
            self._wake(self._begin, begin, call)
            return call.wait()
        except BaseException:
            if not call.done():  # Ctrl-C
                with contextlib.suppress(LoopUnavailable):
                    self._wake(call.cancel)
            raise
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        """Cancel what still runs on the loop and end the thread. Closing twice is harmless."""
        self._end(None)

    def _end(self, timeout_s: float | None) -> None:
        atexit.unregister(self._end_with_the_program)
        if self._thread.is_alive():
            with contextlib.suppress(LoopUnavailable):  # another thread was faster
                self._wake(self._loop.stop)
            self._thread.join(timeout_s)

    def _end_with_the_program(self) -> None:
        """For who forgot to close: a loop that still runs while the interpreter goes may crash the process."""
        self._end(EXIT_S_MAX)

    def _wake(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise LoopUnavailable("the client's loop is closed") from None

    def _begin(self, begin: Callable[[PendingCall[T]], object], call: PendingCall[T]) -> None:
        try:
            begin(call)
        except BaseException as error:  # noqa: BLE001  # it belongs to the thread that waits
            call.set_exception(error)

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
            for call in list(self._calls):  # what came too late for the loop to begin it
                call.cancel()


class BlockingProxy(Generic[T]):
    """The blocking face of one object that lives on a loop."""

    def __init__(self, thread: LoopThread, original: T) -> None:
        self._thread = thread
        self._original = original


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """The blocking twin of a coroutine method."""

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._original, *args, **kwargs))

    return call


def on_loop(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The twin of a plain method, run on the loop's thread."""

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        def begin(outcome: PendingCall[R]) -> None:
            outcome.set_result(method(self._original, *args, **kwargs))

        return self._thread.call(begin)

    return call


def _new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop is not installed. Touches no global loop policy."""
    try:
        import uvloop
    except ImportError:  # Windows, and interpreters uvloop has no wheel for
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
