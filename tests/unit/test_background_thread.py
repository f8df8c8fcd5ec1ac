"""The worker thread, and what it keeps alive."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from mansio.host.threads import BackgroundThread
from support.machine import scaled


class File:
    """What a job holds."""


def test_the_thread_refers_to_nothing_of_a_job_while_its_result_is_handled() -> None:
    """A file that was flushed can be closed at once, so that another log can open its own."""
    file: File | None = File()
    reference = weakref.ref(file)
    finished = threading.Event()
    alive: list[object] = []

    def work(held: object = file) -> str:
        del held
        return "done"

    def call(callback: Any) -> None:  # as if the event loop ran it at once, while the thread has not gone on
        callback()
        finished.set()

    thread = BackgroundThread(call)
    thread.submit(work, lambda result, error: alive.append((result, error, reference())))
    del work
    file = None
    assert finished.wait(scaled(30))
    thread.close()
    assert alive == [("done", None, None)]
