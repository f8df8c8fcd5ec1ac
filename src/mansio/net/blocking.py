"""Event loop in a background thread, and blocking proxies of objects that belong to that loop.

Programs without an event loop use the proxies. A method of a proxy runs the method of the original object on the loop
and waits for its result. `blocking` and `blocking_function` derive a proxy's methods from those of the original class,
so that names, parameters, types and docstrings are the same in both APIs and no logic is duplicated.

Invariants:
* Only the loop's thread accesses an object that belongs to the loop.
* An interrupted call (Ctrl-C) cancels its coroutine.
* Closing the thread ends every call that still waits, with `concurrent.futures.CancelledError`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
import weakref
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

SIGNAL_CHECK_S = 1.0
"""Interval at which a waiting thread wakes up to handle a signal that arrived just before the wait began; such a signal
does not interrupt the wait."""

EXIT_WAIT_S_MAX = 5.0
"""How long the exit of the interpreter waits for the thread of a loop that was not closed."""

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class LoopUnavailable(RuntimeError):
    """The loop is closed, or the call came from the loop's own thread and would deadlock."""


class PendingCall(Generic[T]):
    """Minimal future: the loop's thread sets the result of one call, and one other thread waits for the result.

    A lock replaces the condition variable of `concurrent.futures.Future`; a lock is enough to wake one thread once.
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
        """Whether the call is completed or cancelled."""
        return self._is_over

    def set_result(self, result: T, /) -> None:
        """Complete the call with a result. Has no effect if the call is already completed."""
        if not self._is_over:
            self._is_over, self._result = True, result
            self._lock.release()

    def set_exception(self, error: BaseException, /) -> None:
        """Complete the call with an error, which `wait` raises. Has no effect if the call is already completed."""
        if not self._is_over:
            self._is_over, self._error = True, without_traceback(error)
            self._lock.release()

    def complete_with_task(self, task: asyncio.Task[T]) -> None:
        """Complete the call with the result or error of `task` when the task ends. `cancel` cancels the task."""
        self._task = task
        task.add_done_callback(self._complete_from_task)

    def cancel(self) -> None:
        """Cancel the task, if there is one, and complete the call with `CancelledError`."""
        if self._task is not None:
            self._task.cancel()
        self.set_exception(CancelledError())

    def wait(self) -> T:
        """Wait for the result and return it, or raise the error of the call. May be called once, by one thread."""
        while not self._lock.acquire(timeout=SIGNAL_CHECK_S):
            pass  # handles a signal that arrived just before the wait
        try:
            if self._error is not None:
                raise copied(self._error)
            return cast("T", self._result)
        finally:
            self._error = self._task = None  # breaks the reference cycle of an error and its frames

    def _complete_from_task(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class LoopThread:
    """One event loop in one daemon thread. The thread does not refer to this object."""

    def __init__(self, name: str = "mansio-client") -> None:
        self._loop = _new_loop()
        self._calls: set[PendingCall[Any]] = set()
        self._thread = threading.Thread(target=_run, args=(self._loop, self._calls), name=name, daemon=True)
        self._thread.start()
        # A loop that runs during interpreter shutdown may crash the process.
        self._stop_at_exit = functools.partial(_stop, self._loop, self._thread, EXIT_WAIT_S_MAX)
        atexit.register(self._stop_at_exit)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises `LoopUnavailable` if the thread is closed or is the caller's own.
        """
        has_begun = False

        def begin(call: PendingCall[T]) -> None:
            nonlocal has_begun
            has_begun = True
            call.complete_with_task(self._loop.create_task(work))

        try:
            return self.call(begin)
        except (LoopUnavailable, CancelledError):
            if not has_begun:
                work.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def call(self, begin: Callable[[PendingCall[T]], object]) -> T:
        """Call `begin(call)` on the loop's thread, wait until `call` is completed, and return its result.

        `begin` must arrange that `call` is completed; an exception of `begin` completes `call`. Costs less than `run`,
        which creates a task. Raises `LoopUnavailable` if the thread is closed or is the caller's own.
        """
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
        """Cancel the tasks of the loop and end the thread. Has no effect if the thread is already closed."""
        atexit.unregister(self._stop_at_exit)
        _stop(self._loop, self._thread, None)

    def close_when_dropped(self, close: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        """Run `close()` on the loop and end the thread when nothing refers to this object any more.

        Returns a function that does it now, if it is not done yet, waits for the end and raises the error of `close`.
        """
        return _Ending(self, close).wait

    def _wake(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise LoopUnavailable("the client's loop is closed") from None

    def _begin(self, begin: Callable[[PendingCall[T]], object], call: PendingCall[T]) -> None:
        try:
            begin(call)
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            call.set_exception(copied(error))


class _Ending:
    """End of a `LoopThread` that runs a coroutine first. It does not refer to the `LoopThread`."""

    def __init__(self, thread: LoopThread, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._close = close
        self._loop, self._thread, self._stop_at_exit = thread._loop, thread._thread, thread._stop_at_exit
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._begin_once = weakref.finalize(thread, self._begin)
        self._begin_once.atexit = False

    def wait(self) -> None:
        """End the thread, if that has not begun yet, wait until it has ended, and raise the error of the coroutine."""
        self._begin_once()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise copied(error)

    def _begin(self) -> None:
        """May be called by any thread at any time: by the garbage collector."""
        atexit.unregister(self._stop_at_exit)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._close()
        except Exception as error:  # noqa: BLE001  # `wait` raises it
            self._error = error.with_traceback(None)
        finally:
            self._loop.stop()


def _run(loop: asyncio.AbstractEventLoop, calls: set[PendingCall[Any]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
        for call in list(calls):  # calls that the loop did not start
            call.cancel()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, timeout_s: float | None) -> None:
    if thread.is_alive():
        with contextlib.suppress(RuntimeError):  # closed concurrently by another thread
            loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)


class BlockingProxy(Generic[T]):
    """Base class of the blocking proxies of objects that belong to a `LoopThread`'s loop."""

    def __init__(self, thread: LoopThread, original: T) -> None:
        self._thread = thread
        self._original = original


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return the method of a `BlockingProxy` that runs a coroutine method of the original object and waits for its
    result."""

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._original, *args, **kwargs))

    return call


def blocking_function(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of a `BlockingProxy` that calls a method without `async` on the loop's thread and waits for its
    result."""

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        def begin(outcome: PendingCall[R]) -> None:
            outcome.set_result(method(self._original, *args, **kwargs))

        return self._thread.call(begin)

    return call


def blocking_iterator(
    method: Callable[Concatenate[Any, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Return the method of a `BlockingProxy` that iterates over an asynchronous generator of the original object. Its
    arguments are checked at the first iteration. It ends early when nothing refers to it any more."""

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        async def begin() -> AsyncGenerator[R, None]:
            return method(self._original, *args, **kwargs)

        async def following() -> tuple[R, ...]:
            async for each in items:
                return (each,)
            return ()

        items = self._thread.run(begin())
        try:
            while found := self._thread.run(following()):
                yield found[0]
        finally:
            if not self._thread.is_closed:
                self._thread.run(items.aclose())

    return call


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop, or asyncio's own if uvloop is not installed. Does not change the global loop policy."""
    try:
        import uvloop
    except ImportError:  # Windows, and interpreters without a uvloop wheel
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
