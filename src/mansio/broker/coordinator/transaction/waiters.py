"""Callers that wait until something ends, or for a limited time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.ports import complete

if TYPE_CHECKING:
    from mansio.ports import Promise, Scheduler


class Waiters:
    """The callers that wait for one event. All methods run on the broker's event loop."""

    __slots__ = ("_promises",)

    def __init__(self) -> None:
        self._promises: list[Promise[None]] = []

    def __len__(self) -> int:
        return len(self._promises)

    async def wait(self, scheduler: Scheduler, timeout_ms: float) -> None:
        """Return after `wake`, or after `timeout_ms`."""
        promise: Promise[None] = scheduler.promise()
        self._promises.append(promise)
        timer = scheduler.call_later(timeout_ms, complete, promise, None)
        try:
            await promise
        finally:
            timer.cancel()
            if promise in self._promises:
                self._promises.remove(promise)

    def wake(self) -> None:
        """Let all callers go on."""
        promises, self._promises = self._promises, []
        for promise in promises:
            complete(promise, None)
