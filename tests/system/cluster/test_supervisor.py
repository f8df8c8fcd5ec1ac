"""The supervisor of broker processes, with small programs as brokers: signals, restarts, failed starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from mansio.host.disk import HostDisk
from support.machine import scaled
from support.paths import ROOT, free_port
from support.served_processes import command_of
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes share ports on Linux only"),
]

BROKER = """\
import os, signal, sys, time
number = sys.argv[1]
def stop(*_): sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.path.exists("deaf") else stop)
if os.path.exists(f"refuses-{number}"):
    sys.exit(f"mansio: broker {number} refuses")
if os.path.exists(f"log-fails-{number}"):
    print("2026-01-01T00:00:00.000Z ERROR log_failed topic=flights partition=0 reason=EIO", flush=True)
print(f"mansio 0 ready kafka=127.0.0.1:{number} http=off data=x pid={os.getpid()}", flush=True)
print(("x" * 60 + "\\n") * 1500, flush=True)  # more than is kept
while True: time.sleep(1)
"""
DRIVER = """\
import asyncio, os, sys
from mansio import logs
from mansio.cli.broker.serve_processes import run_supervisor
from mansio.cli.support.common import print_error
from mansio.config.sources import load_settings
from mansio.errors import MansioError
from mansio.host.disk import HostDisk
from mansio.node.processes.plan import plan_node
from mansio.node.processes.supervisor import Supervisor
settings = load_settings(
    None,
    {
        "data_dir": os.path.abspath("node"),
        "etcd_endpoints": "http://127.0.0.1:1",
        "http_listener": "",
        "default_replication_factor": "1",
        "supervisor_listener": f"127.0.0.1:{sys.argv[1]}",
    },
)
plan = plan_node(HostDisk(), settings, 2)
supervisor = Supervisor(
    plan, settings, settings, lambda each: [sys.executable, "-S", "broker.py", str(each.node_id)]
)
try:
    sys.exit(asyncio.run(run_supervisor(supervisor, settings, logs.set_up("info", "text"))))
except MansioError as error:
    sys.exit(print_error(error.message))
"""


class Supervised:
    """A supervisor of two brokers."""

    def __init__(self, directory: Path) -> None:
        (directory / "broker.py").write_text(BROKER)
        (directory / "driver.py").write_text(DRIVER)
        self.port = free_port()
        self.output = directory / f"output-{self.port}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "driver.py", str(self.port)],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text() or self.process.poll() is not None, 30, text)
        assert text in self.text(), self.text()

    def brokers(self) -> dict[str, int]:
        """Process ids by node id."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            pids = [int(pid) for pid in file.read().split()]
        return {command_of(pid)[-1]: pid for pid in pids if "broker.py" in command_of(pid)}

    def health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/ready", timeout=15) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))


@contextmanager
def supervised(directory: Path) -> Iterator[Supervised]:
    one = Supervised(directory)
    try:
        yield one
    finally:
        left = one.brokers() if one.process.poll() is None else {}
        one.process.kill()
        one.process.wait()
        for pid in left.values():
            with suppress(ProcessLookupError):  # some ignore the signal that the end of their parent sends
                os.kill(pid, signal.SIGKILL)


def test_brokers_that_ignore_a_signal_are_killed_by_the_second(tmp_path: Path) -> None:
    (tmp_path / "deaf").touch()
    with supervised(tmp_path) as one:
        one.wait_for(" ready kafka=127.0.0.1:1,127.0.0.1:2 ")
        brokers = one.brokers()
        assert set(brokers) == {"1", "2"}
        one.process.send_signal(signal.SIGINT)
        one.wait_for("broker_processes_stopping running=2")
        assert set(one.brokers()) == {"1", "2"}
        one.process.send_signal(signal.SIGINT)
        wait_until(lambda: not any(map(command_of, brokers.values())), 30, "the brokers are gone")
        assert one.process.wait(scaled(30)) == 130


def test_a_broker_that_exits_is_restarted_and_one_whose_log_failed_is_not(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.wait_for(" ready kafka=")
        before = one.brokers()
        os.kill(before["1"], signal.SIGKILL)
        one.wait_for("broker_process_restarts node=1 in_s=0.5")
        wait_until(lambda: one.brokers().get("1", before["1"]) != before["1"], 30, "broker 1 is back")
        assert one.brokers()["2"] == before["2"]
        os.kill(one.health()["processes"]["2"]["pid"], signal.SIGTERM)
        wait_until(
            lambda: one.brokers().get("2", before["2"]) != before["2"], 30, "so is one that was stopped"
        )
        (tmp_path / "log-fails-1").touch()
        os.kill(one.brokers()["1"], signal.SIGKILL)
        wait_until(lambda: "[1] 2026-01-01T00:00:00.000Z ERROR log_failed" in one.text(), 30, "its log fails")
        wait_until(lambda: "1" in one.brokers(), 30, "it runs")
        os.kill(one.brokers()["1"], signal.SIGKILL)
        one.wait_for("broker_process_not_restarted node=1")
        health = one.health()
        assert not health["ready"]
        assert health["processes"]["1"]["reasons"][0]["reason"] == "not_running"
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(scaled(30)) == 0


def test_a_supervisor_states_for_what_it_waits(tmp_path: Path) -> None:
    """Processes of an earlier supervisor, which have not ended yet."""
    disk = HostDisk()
    directory = tmp_path / "node" / "0"
    directory.mkdir(parents=True)
    lock = disk.lock(str(directory / "lock"))
    with supervised(tmp_path) as one:
        try:
            one.wait_for("waiting_for_earlier_processes reason=")
            assert "/node/0 is in use by another broker" in one.text()
            assert one.brokers() == {}
        finally:
            lock.release()
        one.wait_for(" ready kafka=")
        assert one.text().count("waiting_for_earlier_processes") == 1


def test_a_broker_that_does_not_start_ends_all(tmp_path: Path) -> None:
    (tmp_path / "refuses-2").touch()
    with supervised(tmp_path) as one:
        assert one.process.wait(scaled(30)) == 1
        assert "[2] mansio: broker 2 refuses" in one.text()
        assert "mansio: broker 2 did not start: exit code 1" in one.text()


def test_a_second_supervisor_of_a_directory_is_refused(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.wait_for(" ready kafka=")
        with supervised(tmp_path) as other:
            assert other.process.wait(scaled(30)) == 1
            assert "is in use by another supervisor" in other.text()
        assert one.process.poll() is None
