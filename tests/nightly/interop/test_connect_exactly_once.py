"""Kafka Connect with `exactly.once.source.support=enabled`: a source of lines that is killed again and again, also
together with the broker, writes each line once and in order.

The worker runs in distributed mode, with transactional producers for its configuration topic and for the task, whose
records and offsets are one transaction; a worker that starts fences the producers of the one before it.
Nightly: needs a JDK and Maven. Always true: a worker that does not get further in time fails the test; none is left.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from nightly.interop.java_client import QUICK_JVM, fetched
from support.machine import scaled
from support.paths import free_port
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.interop.conftest import ARGUMENTS, create_topic

if TYPE_CHECKING:
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = [pytest.mark.timeout(1800), pytest.mark.row("P4", "L5")]

MAIN = "org.apache.kafka.connect.cli.ConnectDistributed"
KILLS = 5
LINES = 40
"""Lines that a worker writes at least before it is killed; more are added to the file all the time, also then."""
DEADLINE_S = 180.0
"""Longer than the session timeout of the workers' group, for which the task of a killed worker waits."""
CONFIG = {
    "group.id": "workers",
    "exactly.once.source.support": "enabled",
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.storage.StringConverter",
    "config.storage.topic": "connect-configs",
    "offset.storage.topic": "connect-offsets",
    "status.storage.topic": "connect-status",
    "config.storage.replication.factor": 1,
    "offset.storage.replication.factor": 1,
    "offset.storage.partitions": 2,
    "status.storage.replication.factor": 1,
    "status.storage.partitions": 1,
    "session.timeout.ms": 6000,
    "heartbeat.interval.ms": 500,
    "scheduled.rebalance.max.delay.ms": 0,
    "offset.flush.interval.ms": 500,
}


class Worker:
    """Workers of Connect, one at a time, with one source connector that reads a file."""

    def __init__(self, jars: Path, broker: ServedBroker, place: Path) -> None:
        port = free_port()
        settings = {
            **CONFIG,
            "bootstrap.servers": broker.bootstrap_servers,
            "listeners": f"http://127.0.0.1:{port}",
        }
        config = place / "worker.properties"
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self.lines = place / "lines.txt"
        self.line_count = 0
        self._url = f"http://127.0.0.1:{port}/connectors/lines"
        self._command = ["java", *QUICK_JVM, "-cp", f"{jars}/*", MAIN, str(config)]
        self._log = place / "connect.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def check(self) -> None:
        """Raise `AssertionError` with its output unless it runs."""
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-8_000:]

    def configure(self) -> None:
        """Create the connector; later workers read it from the configuration topic."""
        connector = {
            "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
            "tasks.max": "1",
            "file": str(self.lines),
            "topic": "lines",
            "exactly.once.support": "required",
            "transaction.boundary": "poll",  # each poll that finds lines gives a transaction
            "producer.override.transaction.timeout.ms": "10000",
        }
        request = urllib.request.Request(
            f"{self._url}/config",
            json.dumps(connector).encode(),
            {"Content-Type": "application/json"},
            method="PUT",
        )

        def is_accepted() -> bool:
            self.check()
            try:
                with urllib.request.urlopen(request, timeout=scaled(20)) as answer:
                    return answer.status in (200, 201)
            except OSError:  # it starts, or its group rebalances
                return False

        wait_until(is_accepted, DEADLINE_S, "the connector is accepted")

    def state(self) -> str:
        try:
            with urllib.request.urlopen(f"{self._url}/status", timeout=scaled(20)) as answer:
                return str(answer.read())
        except urllib.error.URLError as error:
            return str(error)

    def add_lines(self) -> None:
        with self.lines.open("a") as lines:
            for _ in range(3):
                lines.write(f"line {self.line_count}\n")
                self.line_count += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(scaled(30))


def written(broker: ServedBroker) -> list[str]:
    """The lines that readers of committed records see."""
    with blocking.connect(broker.bootstrap_servers) as client:
        return [present(message.value).decode() for message in client.consume("lines", to_end=True)]


@pytest.mark.parametrize("restarts_broker", [False, True], ids=["killed", "killed-with-the-broker"])
def test_source_that_is_killed_and_started_again_writes_each_line_once(
    tmp_path: Path, restarts_broker: bool
) -> None:
    jars = fetched("connect_file")
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        create_topic(broker.bootstrap_servers, "lines")
        worker = Worker(jars, broker, tmp_path)

        def has_written(count: int) -> bool:
            worker.check()
            assert '"FAILED"' not in (state := worker.state()), state
            return len(written(broker)) >= count

        def goes_on(count: int) -> bool:
            worker.add_lines()
            return has_written(count)

        try:
            worker.add_lines()
            worker.start()
            worker.configure()
            for _ in range(KILLS):
                least = len(written(broker)) + LINES
                wait_until(lambda least=least: goes_on(least), DEADLINE_S, "lines are written")
                worker.add_lines()
                worker.kill()
                if restarts_broker:
                    broker.kill()
                    broker.start()
                worker.start()
            least = len(written(broker)) + LINES
            wait_until(lambda: goes_on(least), DEADLINE_S, "lines are written")
            wait_until(lambda: has_written(worker.line_count), DEADLINE_S, "all lines are written")
        finally:
            worker.kill()
        assert written(broker) == [f"line {number}" for number in range(worker.line_count)]
        assert "Traceback" not in broker.text()
        assert "log_truncated" not in broker.text()
