"""Worker thread for blocking calls (port `Background`)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger(__name__)


class BackgroundThread:
    """One daemon thread that runs blocking jobs in order, and passes each result to a callback on the event loop.

    A `concurrent.futures` executor would cost about 90 us per job for futures, locks and work items, more than a sync
    of a fast disk. `call_from_thread` is `Scheduler.call_from_thread` or another function that runs a callback on the
    event loop.
    """

    def __init__(self, call_from_thread: Callable[..., object], *, name: str = "mansio-disk") -> None:
        self._call_from_thread = call_from_thread
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[..., None]] | None] = (
            queue.SimpleQueue()
        )
        self._finished: deque[tuple[Callable[..., None], Any, BaseException | None]] = deque()
        """Results that the event loop has not been given yet, oldest first."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        if self._closed:
            raise RuntimeError("the background worker is closed")
        self._jobs.put((work, done))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:  # noqa: BLE001  # passed to `done` on the loop, as the port requires
                error = caught
            self._finished.append((done, result, error))
            # This thread keeps no file and no traceback alive, not even while the event loop runs `done`.
            del job, work, done, result, error
            self._deliver()

    def _deliver(self) -> None:
        try:
            self._call_from_thread(self._call_done)
        except RuntimeError as refused:  # the loop is closed
            _, _, error = self._finished.pop()
            known = fields(refused=refused, result=error or "ok")
            logger.warning("background_job_outlived_loop", extra=known)

    def _call_done(self) -> None:
        done, result, error = self._finished.popleft()
        done(result, error)
