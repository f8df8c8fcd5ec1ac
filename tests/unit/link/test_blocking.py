"""The loop in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mansio.link.blocking import LoopThread, Twin, blocking, on_loop


class Thing:
    async def double(self, number: int, *, plus: int = 0) -> int:
        """Twice."""
        await asyncio.sleep(0)
        return 2 * number + plus

    async def fail(self) -> None:
        raise KeyError("why")

    def where(self) -> int:
        return threading.get_ident()


class ThingTwin(Twin[Thing]):
    double = blocking(Thing.double)
    fail = blocking(Thing.fail)
    where = on_loop(Thing.where)


def test_twin_calls_the_original_on_the_loops_thread() -> None:
    thread = LoopThread()
    twin = ThingTwin(thread, Thing())
    assert twin.double(4, plus=1) == 9
    assert twin.double.__doc__ == "Twice."
    assert twin.where() != threading.get_ident()
    with pytest.raises(KeyError, match="why"):
        twin.fail()
    thread.close()


def test_closed_thread_refuses_and_leaves_no_thread_behind() -> None:
    thread = LoopThread("short-lived")
    twin = ThingTwin(thread, Thing())
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        twin.double(1)
    assert "short-lived" not in {other.name for other in threading.enumerate()}


def test_call_from_the_loops_own_thread_is_refused_instead_of_hanging() -> None:
    thread = LoopThread()
    twin = ThingTwin(thread, Thing())

    async def inside() -> int:
        return twin.double(1)

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
    assert cancelled.wait(5)
    thread.close()
