"""Data that a release has written is all there with this source, and a newer format is refused unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.broker.maintenance.data_dir_format import CURRENT_DATA_FORMAT, FIRST_DATA_FORMAT
from support.environments import Environment
from support.machine import scaled
from support.paths import ROOT, mansio_command
from support.present import present
from support.process import ServedBroker, inherited
from support.tiers import smoke_first

if TYPE_CHECKING:
    from pathlib import Path

WHEELS = sorted((ROOT / "tests" / "fixtures" / "wheels").glob("*.whl"))
WRITER = ROOT / "tests" / "system" / "release" / "write_data.py"


def write_with(wheel: Path, place: Path, data: Path) -> dict[str, list]:
    """What a release reports as written to the data directory; its broker was killed while records were leased."""
    environment = Environment(place)
    environment.use_packages_of_this_interpreter()
    environment.pip("install", "--quiet", "--no-deps", "--no-index", wheel)
    python = str(environment.bin / "python")
    command = [python, "-m", "mansio"]
    broker = ServedBroker(data, command=command, environment=environment.variables, http=False).start()
    shutil.copy(WRITER, environment.place)
    try:
        with subprocess.Popen(
            [python, WRITER.name, broker.bootstrap_servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=environment.place,
            env={**inherited(), **environment.variables},
        ) as writer:
            assert writer.stdout is not None
            line = writer.stdout.readline()
            broker.kill()
            writer.kill()
    finally:
        broker.kill()
    assert line, "the writer ended without a result"
    return json.loads(line)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def test_data_of_a_release_is_all_there(wheel: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    written = write_with(wheel, tmp_path, data)
    broker = ServedBroker(data, http=False).start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            admin = client.admin
            assert sorted(admin.list_topics()) == written["topics"]
            assert admin.describe_config("orders")["retention.ms"].value == "86400000"
            assert admin.describe_config("prices")["cleanup.policy"].value == "compact"
            assert written["records"] == sorted(
                [each.partition, each.offset, str(each.key), present(each.value).decode(), str(each.headers)]
                for topic in ("orders", "prices")
                for each in client.consume(topic, to_end=True)
            )
            offsets = [
                [p.topic, p.partition, each.offset] for p, each in admin.group_offsets("audit").items()
            ]
            assert sorted(offsets) == written["offsets"]
            dead = list(client.consume("dlq.orders", to_end=True))
            assert [present(each.value).decode() for each in dead] == written["dead"]
            received = receive_all(client, 200 - len(written["done"]))
        assert broker.stop() == 0
    finally:
        broker.kill()
    every = {f"order {number}" for number in range(200)}
    assert set(received) == every - set(written["done"])
    assert set(written["held"]) <= {value for value, count in received.items() if count > 1}


def receive_all(client: mansio.client.blocking.Client, wanted: int) -> dict[str, int]:
    """Acknowledge this many records of the share group; returns the delivery count of each."""
    received: dict[str, int] = {}
    with client.receive("orders", group="billing") as receiver:
        while len(received) < wanted:
            messages = receiver.poll(5_000)
            received |= {message.value.decode(): message.delivery_count for message in messages}
            receiver.ack(messages)
    return received


@pytest.mark.parametrize("tail", smoke_first("\n", ", compressed\n", "\nneeds: views\n"))
@pytest.mark.parametrize(
    ("arguments", "code"), [(["serve", "--kafka", "127.0.0.1:0", "--data"], 1), (["data", "check"], 2)]
)
def test_directory_of_a_newer_format_is_refused_unchanged(
    arguments: list[str], code: int, tail: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "topics").mkdir(parents=True)
    (data / "format").write_text(f"mansio data directory, format {CURRENT_DATA_FORMAT + 1}{tail}")
    done = subprocess.run(
        [*mansio_command(), *arguments, "data"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=inherited(),
        timeout=scaled(60),
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == (
        f"mansio: data directory data has format {CURRENT_DATA_FORMAT + 1}; version {mansio.__version__} supports "
        f"formats up to {CURRENT_DATA_FORMAT}: start the version that wrote it, or a newer one\n"
    )
    assert {path.name for path in data.iterdir()} <= {"topics", "format", "lock"}


def test_damaged_format_marker_is_refused_and_a_missing_one_is_written(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0"):
        pass
    marker = tmp_path / "data" / "format"
    assert marker.read_text() == f"mansio data directory, format {FIRST_DATA_FORMAT}\n"
    for damaged in ("mansio data dir\0", f"mansio data directory, format {CURRENT_DATA_FORMAT}, with more\n"):
        marker.write_text(damaged)
        with (
            pytest.raises(mansio.MansioError, match="format is damaged"),
            mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0"),
        ):
            pass
    marker.unlink()
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0"):
        assert marker.exists()
