"""The Kafka pages of the Quarkus Dev UI in a process of their own, and the file of what they ask a broker.

Owns the Maven process and its directory. Always true: a UI that was started answers when `running_ui` yields; its
whole process group is gone at the end of the block.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support.json_rpc_socket import JsonRpcSocket
from support.machine import scaled
from support.paths import ROOT, free_port
from support.recording_proxy import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

POM = ROOT / "tools" / "web_ui.pom.xml"
GOLDEN = ROOT / "tests" / "golden" / "web_ui" / "quarkus.txt"
START_DEADLINE_S = 400.0
"""The first start on a machine fetches some 150 MB of jars."""
STOP_DEADLINE_S = 20.0
SETTINGS = {
    "debug": "false",
    "quarkus.analytics.disabled": "true",
    "quarkus.console.enabled": "false",
    "quarkus.devservices.enabled": "false",
    "quarkus.http.host": "127.0.0.1",
    "quarkus.test.continuous-testing": "disabled",
}


def needs_java_and_maven() -> None:
    """Skip, and say what is missing, where the UI cannot be built."""
    missing = [program for program in ("java", "mvn") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: install openjdk-17-jdk-headless (or newer) and maven")


@contextmanager
def running_ui(place: Path, bootstrap_servers: str) -> Iterator[JsonRpcSocket]:
    """A Dev UI that shows the broker at `bootstrap`, and the socket its pages would use."""
    place.mkdir(parents=True)
    shutil.copy(POM, place / "pom.xml")
    port = free_port()
    settings = {**SETTINGS, "quarkus.http.port": str(port), "kafka.bootstrap.servers": bootstrap_servers}
    log = place / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["mvn", "-B", "-ntp", "quarkus:dev", *(f"-D{name}={value}" for name, value in settings.items())],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, log)
        with JsonRpcSocket(port, "/q/dev-ui/json-rpc-ws", "quarkus-kafka-client") as socket:
            yield socket
    finally:
        _end_group(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + scaled(START_DEADLINE_S)
    while b"Installed features" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"the UI did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Maven and the application it started are one process group, which has no other process."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + scaled(STOP_DEADLINE_S)
        while time.monotonic() < end and _group_lives(process):
            time.sleep(0.05)
    process.wait(scaled(STOP_DEADLINE_S))


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def write_golden(path: Path, topic_ids: Mapping[str, bytes], requests: list[Recorded]) -> None:
    """One line a topic (name, id in hex) and one a request (API key, version, frame in hex)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"topic {name} {topic_id.hex()}" for name, topic_id in sorted(topic_ids.items())]
    lines += [f"request {one.api_key} {one.version} {one.frame.hex()}" for one in requests]
    path.write_text("\n".join(lines) + "\n")


def read_golden(path: Path) -> tuple[dict[str, bytes], list[Recorded]]:
    """What `write_golden` wrote: ids of topics by their names, requests in the order in which they were made."""
    topic_ids: dict[str, bytes] = {}
    requests = []
    for line in path.read_text().splitlines():
        kind, first, *rest = line.split(" ")
        if kind == "topic":
            topic_ids[first] = bytes.fromhex(rest[0])
        else:
            requests.append(Recorded(int(first), int(rest[0]), bytes.fromhex(rest[1])))
    return topic_ids, requests
