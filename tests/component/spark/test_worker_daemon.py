"""Daemon that forks Spark's Python workers: it has imported their libraries and has one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from pyspark import daemon

pytest.importorskip("pyspark")
from mansio.spark.session import worker_daemon

LOOK = (
    "import sys; from mansio.spark.session import worker_daemon as d; d.import_worker_modules('pyspark.worker'); "
    "print(d.thread_count(), *(name in sys.modules for name in ('pyspark.worker', *d.TASK_MODULES)))"
)


class Stopped(Exception):
    """In the place of the daemon, or of what takes its place."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `main` came to."""
    came_to: list[str] = []

    def stop(name: str) -> Any:
        def call(*_: object) -> None:
            came_to.append(name)
            raise Stopped

        return call

    monkeypatch.setattr(worker_daemon, "import_worker_modules", lambda _: came_to.append("preload"))
    monkeypatch.setattr(daemon, "manager", stop("manager"))
    monkeypatch.setattr(os, "execv", stop("execv"))
    monkeypatch.setattr(
        worker_daemon, "__spec__", type("Spec", (), {"name": "mansio.spark.session.worker_daemon"})
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what it sets for its successor goes with the test
    return came_to


def run() -> None:
    with pytest.raises(Stopped):
        worker_daemon.main()


def test_what_is_imported_before_the_fork_starts_no_thread() -> None:
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", *["True"] * (1 + len(worker_daemon.TASK_MODULES))]


def test_daemon_forks_with_the_libraries_imported(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_daemon, "thread_count", lambda: 1)
    run()
    assert calls == ["preload", "manager"]


def test_daemon_with_a_second_thread_starts_over_without_the_libraries(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_daemon, "thread_count", lambda: 2)
    run()
    assert calls == ["preload", "execv"]
    calls.clear()
    run()
    assert calls == ["manager"]
