"""`mansio serve --join`: the broker's own member of etcd comes before it and goes after it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.paths import ROOT, free_port, mansio_command, required_tool
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


class Serving:
    """A broker with a member of its own, in its own process."""

    def __init__(self, directory: Path, join: str, **settings: str) -> None:
        required_tool("etcd")
        command = [*mansio_command(), "serve", "--data", str(directory / "data")]
        command += ["--kafka", f"127.0.0.1:{free_port()}", "--http", "", "--join", join]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
            )

    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.output() or self.process.poll() is not None, READY_S, words)
        assert words in self.output(), self.output()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def join() -> str:
    return f"127.0.0.1:{free_port()}/{free_port()}"


@pytest.fixture
def serving(tmp_path: Path, join: str) -> Iterator[Serving]:
    started = Serving(tmp_path, join)
    yield started
    started.kill()


def listening(join: str) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(join.rpartition("/")[2]))) == 0


def test_the_member_is_there_before_the_broker_and_until_after_it(serving: Serving, join: str) -> None:
    serving.wait_for(" ready kafka=")
    assert listening(join)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(scaled(30)) == 0, serving.output()
    output = serving.output()
    order = ["etcd_member_ready", "broker_ready", "broker_stopped", "etcd_member_stopped"]
    places = [output.index(f" {words} ") for words in order]
    assert places == sorted(places), output
    assert not listening(join)


def test_a_start_that_waits_for_a_majority_can_be_stopped(tmp_path: Path, join: str) -> None:
    started = Serving(tmp_path, f"{join},192.0.2.1,192.0.2.2", etcd_member=join.partition("/")[0])
    try:
        started.wait_for("etcd_member_starting")
        wait_until(lambda: listening(join) or started.process.poll() is not None, READY_S)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(scaled(30)) == 0, started.output()
        assert "broker_ready" not in started.output()
        assert not listening(join)
    finally:
        started.kill()


def test_a_start_without_a_majority_ends_and_names_the_missing_members(tmp_path: Path, join: str) -> None:
    started = Serving(
        tmp_path,
        f"{join},192.0.2.1,192.0.2.2",
        etcd_member=join.partition("/")[0],
        etcd_start_timeout_ms="1000",
    )
    try:
        assert started.process.wait(scaled(READY_S)) == 1
        assert "mansio: the etcd member is not healthy after 1 s" in started.output()
        assert "2 of the 3 members have to run" in started.output()
        assert not listening(join)
    finally:
        started.kill()
