"""Event loop in a background thread."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from mansio.net.blocking import BlockingProxy, LoopThread, PendingCall, blocking, blocking_function
from support.machine import scaled


class Thing:
    async def double(self, number: int, *, plus: int = 0) -> int:
        """Twice."""
        await asyncio.sleep(0)
        return 2 * number + plus

    async def fail(self) -> None:
        raise KeyError("why")

    def where(self) -> int:
        return threading.get_ident()


class ThingProxy(BlockingProxy[Thing]):
    double = blocking(Thing.double)
    fail = blocking(Thing.fail)
    where = blocking_function(Thing.where)


def test_proxy_calls_the_original_on_the_loop_thread() -> None:
    thread = LoopThread()
    thing_proxy = ThingProxy(thread, Thing())
    assert thing_proxy.double(4, plus=1) == 9
    assert thing_proxy.double.__doc__ == "Twice."
    assert thing_proxy.where() != threading.get_ident()
    with pytest.raises(KeyError, match="why"):
        thing_proxy.fail()
    thread.close()


def test_closed_loop_thread_refuses_calls_and_leaves_no_thread() -> None:
    thread = LoopThread("short-lived")
    thing_proxy = ThingProxy(thread, Thing())
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thing_proxy.double(1)
    assert "short-lived" not in {other.name for other in threading.enumerate()}


def test_thread_that_nothing_uses_ends_after_its_last_coroutine() -> None:
    closed = threading.Event()

    async def close() -> None:
        closed.set()

    thread = LoopThread("dropped")
    proxy = ThingProxy(thread, Thing())
    end = thread.close_when_dropped(close)
    del thread
    assert proxy.double(2) == 4
    assert not closed.is_set()
    del proxy
    assert closed.wait(scaled(10))
    end()
    assert "dropped" not in {other.name for other in threading.enumerate()}


def test_error_of_the_last_coroutine_is_raised_by_the_end() -> None:
    async def close() -> None:
        raise KeyError("why")

    thread = LoopThread()
    end = thread.close_when_dropped(close)
    with pytest.raises(KeyError, match="why"):
        end()
    end()
    assert thread.is_closed


def test_call_from_the_loop_thread_is_refused_instead_of_deadlocking() -> None:
    thread = LoopThread()
    thing_proxy = ThingProxy(thread, Thing())

    async def inside() -> int:
        return thing_proxy.double(1)

    with pytest.raises(RuntimeError, match="blocking itself"):
        thread.run(inside())
    thread.close()


def test_interrupted_call_cancels_its_coroutine() -> None:
    thread = LoopThread()
    cancelled = threading.Event()
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def interrupt_when_begun() -> None:
        while not begun.is_set():  # noqa: ASYNC110  # set on this very loop
            await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_coro().__name__ == "endless":  # type: ignore[union-attr]  # the test knows its own types
                task.cancel()

    other = threading.Thread(target=lambda: thread.run(interrupt_when_begun()))
    other.start()
    with pytest.raises(BaseException):  # noqa: B017, PT011  # CancelledError of concurrent.futures
        thread.run(endless())
    other.join()
    assert cancelled.wait(scaled(5))
    thread.close()


@pytest.mark.skipif(
    sys.platform == "win32" or threading.current_thread() is not threading.main_thread(),
    reason="signals come to the main thread, on POSIX as here",
)
def test_ctrl_c_cancels_the_call_and_its_coroutine_and_the_loop_continues() -> None:
    thread = LoopThread()
    cancelled = threading.Event()

    async def endless() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(endless())
    finally:
        signal.signal(signal.SIGINT, before)
    assert cancelled.wait(scaled(5))
    assert ThingProxy(thread, Thing()).double(2) == 4
    thread.close()


def test_close_completes_pending_calls_of_other_threads() -> None:
    thread = LoopThread()
    begun = threading.Barrier(3)
    outcomes: list[BaseException] = []

    async def endless() -> None:
        await asyncio.to_thread(begun.wait)
        await asyncio.Event().wait()

    def begin_and_never_tell(_: PendingCall[None]) -> None:
        asyncio.get_running_loop().run_in_executor(None, begun.wait)

    def waiting(how: str) -> None:
        try:
            thread.run(endless()) if how == "task" else thread.call(begin_and_never_tell)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test looks at it
            outcomes.append(error)

    others = [threading.Thread(target=waiting, args=(how,)) for how in ("task", "call")]
    for other in others:
        other.start()
    begun.wait(scaled(10))
    thread.close()
    for other in others:
        other.join(scaled(10))
    assert [type(outcome) for outcome in outcomes] == [CancelledError, CancelledError]


def test_exception_of_begin_is_raised_in_the_calling_thread() -> None:
    thread = LoopThread()

    def begin(_: PendingCall[None]) -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        thread.call(begin)
    thread.close()


def test_only_the_first_result_of_a_call_counts() -> None:
    thread = LoopThread()

    def begin(call: PendingCall[int]) -> None:
        call.set_result(1)
        call.set_result(2)
        call.set_exception(KeyError("late"))

    assert thread.call(begin) == 1
    thread.close()


def test_many_threads_share_one_loop() -> None:
    thread = LoopThread()
    thing_proxy = ThingProxy(thread, Thing())
    found: list[list[int]] = []

    def work() -> None:
        found.append([thing_proxy.double(number) for number in range(200)])

    others = [threading.Thread(target=work) for _ in range(6)]
    for other in others:
        other.start()
    for other in others:
        other.join(scaled(30))
    assert found == [[2 * number for number in range(200)]] * 6
    thread.close()
