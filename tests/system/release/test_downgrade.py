"""The kept wheel of 0.1.0 refuses a directory with anything that it could not use, and serves one without."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest

import mansio
from support.machine import scaled
from support.paths import ROOT
from support.process import ServedBroker, inherited

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.blocking import Client

WHEEL: Final = ROOT / "tests" / "fixtures" / "wheels" / "mansio-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def first_release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which `python -m mansio` is 0.1.0."""
    place = tmp_path_factory.mktemp("release")
    zipfile.ZipFile(WHEEL).extractall(place)
    return {**inherited(), "PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"}


def transact(client: Client) -> None:
    with client.transaction("worker") as transaction:
        transaction.publish("orders", b"one")


def delay(client: Client) -> None:
    client.admin.create_topic("later", config={"mansio.delay.enable": "true"})


def delay_by_change(client: Client) -> None:
    client.admin.alter_topic_config("orders", {"mansio.delay.enable": "true"})


def delay_by_default(client: Client) -> None:
    client.admin.alter_broker_config(None, {"mansio.delay.enable": "true"})


def schedule(client: Client) -> None:
    client.admin.alter_topic_config("orders", {"mansio.delay.enable": "true"})
    client.admin.schedules.create("orders", "tick", b"tick", every=timedelta(hours=1))


def deduplicate(client: Client) -> None:
    client.admin.alter_topic_config("orders", {"mansio.dedup.ms": "60000"})


def prioritize(client: Client) -> None:
    client.admin.alter_topic_config("orders", {"mansio.priority.enable": "true"})


def order_by_key(client: Client) -> None:
    client.admin.alter_group_config("billing", {"mansio.share.order": "key"})


def deliver_once(client: Client) -> None:
    client.admin.alter_group_config("billing", {"share.delivery.count.limit": "1"})


AT_ONCE: Final = (
    transact,
    delay,
    delay_by_change,
    delay_by_default,
    schedule,
    deduplicate,
    prioritize,
    order_by_key,
    deliver_once,
)


def write_plain(data: Path) -> None:
    """A directory with records and a group, of which 0.1.0 knows everything."""
    with (
        mansio.Broker(data, listeners="127.0.0.1:0") as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        client.admin.create_topic("orders", partitions=1, config={"retention.ms": "86400000"})
        client.publish_many("orders", [b"%d" % number for number in range(20)])
        client.admin.alter_group_config("billing", {"share.delivery.count.limit": "7"})
        assert len(list(client.consume("orders", group="audit", to_end=True))) == 20


def check_refused(first_release: dict[str, str], data: Path) -> None:
    before = content_of(data)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mansio",
            "serve",
            "--kafka",
            "127.0.0.1:0",
            "--http",
            "",
            "--data",
            data.name,
        ],
        cwd=data.parent,
        env=first_release,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "mansio: data directory data has format 2; version 0.1.0 supports formats up to 1: start the version that"
        " wrote it, or a newer one\n"
    )
    assert content_of(data) == before


def content_of(data: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name != "lock"
    }


@pytest.mark.timeout(120)
def test_first_release_serves_a_directory_without_anything_newer(
    tmp_path: Path, first_release: dict[str, str]
) -> None:
    data = tmp_path / "data"
    write_plain(data)
    assert (data / "format").read_text() == "mansio data directory, format 1\n"
    broker = ServedBroker(
        data, command=[sys.executable, "-m", "mansio"], environment=first_release, http=False
    ).start()
    try:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            found = [each.value for each in client.consume("orders", to_end=True)]
        assert found == [b"%d" % number for number in range(20)]
        assert broker.stop() == 0
    finally:
        broker.kill()
    with mansio.Broker(data, listeners="127.0.0.1:0"):
        pass


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(use, marks=[] if use is transact else [pytest.mark.full], id=use.__name__)
        for use in AT_ONCE
    ],
)
def test_first_release_refuses_a_directory_from_the_first_newer_thing_on(
    use: Callable[[Client], None], tmp_path: Path, first_release: dict[str, str]
) -> None:
    data = tmp_path / "data"
    write_plain(data)
    with mansio.Broker(data, listeners="127.0.0.1:0") as broker:
        assert (data / "format").read_text() == "mansio data directory, format 1\n"
        with mansio.blocking.connect(broker.address) as client:
            use(client)
        assert (data / "format").read_text() == "mansio data directory, format 2\n"
    check_refused(first_release, data)
    with mansio.Broker(data, listeners="127.0.0.1:0"):
        pass
