"""Branches for macOS and Windows, on Linux: the calls that those systems lack are removed (`support.other_platform`).

The kernels, file systems and event loops of those systems are not tested here (docs/reference/platforms.md)."""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.errors import UnsupportedPlatform
from support.machine import scaled
from support.other_platform import OPEN_MAX
from support.paths import ROOT, required_tool
from support.process import ServedBroker, inherited, served
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

IMITATION = str(ROOT / "tests/support/other_platform.py")
VALUES = [random.Random(number).randbytes(400_000) for number in range(12)]

EMBEDDED = """
import mansio
with mansio.Broker("data") as broker, mansio.blocking.connect(broker.address) as client:
    client.admin.create_topic("t", partitions=1)
    client.publish("t", b"x" * 700_000)
    found = next(iter(client.consume("t", from_="earliest", max_records=1)))
    print(len(found.value))
"""

CLIENT = """
import asyncio, sys
import mansio

async def by_asyncio(address):
    async with mansio.connect(address) as client:
        await client.admin.create_topic("w", partitions=1)
        await client.admin.create_topic("dead", partitions=1)
        await client.publish("w", b"x" * 900_000, key=b"k")
        await client.publish_many("w", [b"a", b"b"])
        return [len(message.value) async for message in client.consume("w", from_="earliest", max_records=3)]

def blocking(address):
    with mansio.blocking.connect(address) as client:
        client.publish("w", b"last")
        client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        seen = []
        with client.receive("w", group="g") as receiver:
            for message in receiver:
                if message.delivery_count == 1 and message.value == b"a":
                    message.retry(after=0.01)
                    continue
                seen.append(message.delivery_count)
                message.ack()
                if len(seen) == 4:
                    return sorted(seen)

assert sys.platform == "win32"
print(asyncio.run(by_asyncio(sys.argv[1])), blocking(sys.argv[1]))
"""


def on(platform: str, *arguments: str, place: Path, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, IMITATION, platform, *arguments],
        input=given,
        capture_output=True,
        cwd=place,
        env=inherited(),
        timeout=scaled(60),
        check=False,
    )


def on_macos(data: Path) -> ServedBroker:
    return ServedBroker(data, command=[sys.executable, IMITATION, "darwin"])


def received(broker: ServedBroker, count: int) -> list[int]:
    """Offsets of `count` records that a share group receives and acknowledges."""
    found: list[int] = []
    with (
        mansio.blocking.connect(broker.bootstrap_servers) as client,
        client.receive("t", group="workers") as receiver,
    ):
        for message in receiver:
            found.append(message.offset)
            message.ack()
            if len(found) == count:
                break
    return found


@pytest.mark.full
def test_broker_without_the_calls_of_linux_keeps_acknowledged_records_across_kill(tmp_path: Path) -> None:
    broker = on_macos(tmp_path / "data").start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t", partitions=1)
            client.admin.alter_group_config("workers", {"share.auto.offset.reset": "earliest"})
            for value in VALUES:
                client.publish("t", value)
        assert received(broker, 5) == list(range(5))
        broker.kill()
        broker.start()
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            found = client.consume("t", from_="earliest", max_records=len(VALUES))
            assert [message.value for message in found] == VALUES
        assert received(broker, 7) == list(range(5, 12))
        assert broker.stop() == 0
    finally:
        broker.kill()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = hard if 0 <= hard < OPEN_MAX else OPEN_MAX
    assert f"open_files={raised}" in broker.text(), (
        "the limit of open files is raised to what the system accepts"
    )
    syncs = re.search(r"full syncs: (\d+)", broker.text())
    assert syncs is not None
    assert int(syncs[1]) > 0, "files and directories are flushed with F_FULLFSYNC"


def test_embedded_broker_on_windows_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mansio.host.platforms.sys.platform", "win32")
    with pytest.raises(UnsupportedPlatform, match="WSL"):
        mansio.Broker(tmp_path / "data").start()
    assert not os.listdir(tmp_path)


@pytest.mark.full
def test_embedded_broker_runs_without_the_calls_of_linux(tmp_path: Path) -> None:
    done = on("darwin", "-c", EMBEDDED, place=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split() == [b"700000"]


@pytest.mark.full
def test_dev_cluster_runs_without_the_calls_of_linux(tmp_path: Path) -> None:
    """The command and its etcd; its brokers are processes of this system."""
    environment = {**inherited(), "PATH": f"{os.path.dirname(required_tool('etcd'))}:{os.environ['PATH']}"}
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, IMITATION, "darwin", "dev-cluster", "--brokers", "1"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            cwd=tmp_path,
        )
    try:
        wait_until(
            lambda: b"dev-cluster ready" in output.read_bytes() or process.poll() is not None,
            scaled(60),
            "the cluster is ready",
        )
        address = re.search(rb"dev-cluster ready kafka=(\S+)", output.read_bytes())
        assert address is not None, output.read_text()
        with mansio.blocking.connect(address[1].decode()) as client:
            client.publish("created-on-first-use", b"1")
    finally:
        process.terminate()
        assert process.wait(scaled(60)) == 0, output.read_text()


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve", "dev-cluster"])
def test_commands_that_run_brokers_are_refused_on_windows_in_one_line(command: str, tmp_path: Path) -> None:
    done = on("win32", command, place=tmp_path)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (1, b"")
    assert line.startswith(f"mansio: mansio {command} does not run on Windows: run it in WSL")
    assert not os.listdir(tmp_path)


@pytest.mark.full
def test_client_and_client_commands_run_on_windows(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        done = on("win32", "-c", CLIENT, broker.bootstrap_servers, place=tmp_path)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode().strip() == "[900000, 1, 1] [1, 1, 1, 2]"
        to = ["--bootstrap-servers", broker.bootstrap_servers]
        for arguments, given, expected in (
            (["topic", "create", "c", *to], b"", b""),
            (["produce", "c", *to], b"one\ntwo\n", b""),
            (["consume", "c", "--from-beginning", "--exit-at-end", *to], b"", b"one\ntwo\n"),
            (["doctor", *to], b"", b"cluster"),
        ):
            done = on("win32", *arguments, place=tmp_path, given=given)
            assert done.returncode == 0, done.stderr.decode()
            assert expected in done.stdout
            assert b"Traceback" not in done.stderr
