"""`mansio serve --processes`: a supervisor with its brokers and its etcd member, as processes that can be killed.

Always true: the processes of a supervisor have ended when `kill` returns.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.machine import scaled
from support.paths import free_port
from support.process import ServedBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ENDED_S = 20.0
READY_S = 60.0
PORT_ATTEMPTS_MAX = 100
PORTS = 3
"""A later start may have so many processes."""


class ServedProcesses(ServedBroker):
    """A supervisor and what it started, over one directory."""

    def __init__(self, data: Path | str, count: int, *, arguments: Sequence[str] = ()) -> None:
        super().__init__(data)
        self.count = count
        self.kafka_port = consecutive_ports(max(count, PORTS))
        self.monitoring_port = free_port()
        self.given = list(arguments)
        self.set_count(count)

    def set_count(self, count: int) -> None:
        """The number of processes of the next start."""
        self.count = count
        self.arguments = [
            *("--processes", str(count), "--set", f"supervisor_listener=127.0.0.1:{self.monitoring_port}"),
            *self.given,
        ]

    @property
    def bootstrap_servers(self) -> str:
        """The first broker, at which the ports begin."""
        return f"127.0.0.1:{self.kafka_port}"

    @property
    def all_servers(self) -> str:
        return ",".join(f"127.0.0.1:{self.kafka_port + number}" for number in range(self.count))

    def children(self) -> dict[str, int]:
        """Process ids of the brokers by node id, and of etcd."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            pids = file.read().split()
        found = {}
        for pid in pids:
            command = command_of(int(pid))
            if "--supervised" in command:
                found[command[command.index("--node-id") + 1]] = int(pid)
            elif command and command[0].endswith("etcd"):
                found["etcd"] = int(pid)
        return found

    def kill(self) -> None:
        left = self.children() if self.running else {}
        super().kill()
        for name, pid in left.items():
            wait_until(lambda pid=pid: not command_of(pid), ENDED_S, f"{name} has ended with its supervisor")

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone: what it started ends by itself, at the time of the next start."""
        super().kill()

    def kill_child(self, name: str) -> int:
        """SIGKILL to a broker, or to etcd; its process id."""
        pid = self.children()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def monitored(self, path: str) -> tuple[int, str]:
        """Status and body of a path of the supervisor."""
        try:
            url = f"http://127.0.0.1:{self.monitoring_port}{path}"
            with urllib.request.urlopen(url, timeout=scaled(15)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.monitored("/health/ready")[1]))

    def wait_ready(self, what: str) -> None:
        """Return when all brokers are ready."""
        wait_until(lambda: self.monitored("/health/ready")[0] == 200, READY_S, f"all are ready {what}")

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric by their labels."""
        text = self.monitored("/metrics")[1]
        return {
            labels: float(value)
            for labels, value in re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        }


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty when it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def consecutive_ports(count: int) -> int:
    """The first of so many ports that are free now."""
    for _ in range(PORT_ATTEMPTS_MAX):
        ports = [free_port() for _ in range(count)]
        if ports[-1] - ports[0] == count - 1:
            return ports[0]
    raise RuntimeError(f"no {count} consecutive ports are free")


@contextmanager
def served_processes(
    data: Path | str, count: int, *, arguments: Sequence[str] = ()
) -> Iterator[ServedProcesses]:
    """Running processes for a `with` block; killed at its end if they still run."""
    served = ServedProcesses(data, count, arguments=arguments)
    try:
        served.start()
        yield served
    finally:
        served.kill()
