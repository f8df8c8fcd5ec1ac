"""Broker embedded in another program: it does not change signals, logging or the event loop of that program; with and
without uvloop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

import mansio
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path


def roundtrip(broker: mansio.Broker, topic: str) -> list[bytes | None]:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(topic, partitions=1)
        for value in (b"one", b"x" * 300_000, b"three"):
            client.publish(topic, value)
        return [message.value for message in client.consume(topic, from_="earliest", max_records=3)]


def test_without_uvloop_plain_asyncio_carries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mansio.node.embedded.new_event_loop", asyncio.SelectorEventLoop)
    with mansio.Broker(tmp_path) as broker:
        assert roundtrip(broker, "plain") == [b"one", b"x" * 300_000, b"three"]


def test_a_program_with_a_loop_of_its_own_keeps_it(tmp_path: Path) -> None:
    async def program() -> list[bytes | None]:
        before = asyncio.get_running_loop()
        with mansio.Broker(tmp_path) as broker:
            values = await asyncio.to_thread(roundtrip, broker, "own")
        assert asyncio.get_running_loop() is before
        return values

    policy = event_loop_policy()
    assert asyncio.run(program()) == [b"one", b"x" * 300_000, b"three"]
    assert event_loop_policy() is policy


def event_loop_policy() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14
        return asyncio.get_event_loop_policy()


def test_two_brokers_in_one_process_do_not_meet(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "a") as one, mansio.Broker(tmp_path / "b") as other:
        assert one.address != other.address
        assert roundtrip(one, "same") == roundtrip(other, "same")


def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    program = (
        f"import mansio; broker = mansio.Broker({str(tmp_path)!r}).start(); print(broker.address); "
        "client = mansio.blocking.connect(broker.address); client.admin.create_topic('t'); client.publish('t', b'')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=scaled(30), check=True
    )
    assert done.stdout.startswith(b"127.0.0.1:")
    assert b"Traceback" not in done.stderr, done.stderr
    assert list(tmp_path.rglob("*.producers")), "it was stopped as by `close`"


def test_what_keeps_it_from_starting_is_raised_and_nothing_stays_behind(tmp_path: Path) -> None:
    with (
        mansio.Broker(tmp_path / "a") as broker,
        pytest.raises(OSError, match=r"[Aa]ddress already in use"),
        mansio.Broker(tmp_path / "b", listeners=broker.address),
    ):
        pytest.fail("two brokers on one port")
    with mansio.Broker(tmp_path / "b") as again:
        assert roundtrip(again, "after") == [b"one", b"x" * 300_000, b"three"]
    with pytest.raises(mansio.errors.Unavailable):
        _ = again.address


def test_an_address_that_no_other_machine_can_use_is_reported_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients connect to the advertised address, which is what is listened on unless something else is set."""
    for name, settings in (("told", {}), ("set", {"advertised_listeners": "localhost:9092"})):
        caplog.clear()
        with mansio.Broker(tmp_path / name, listeners="0.0.0.0:0", insecure_listen=True, **settings):
            warned = [line for line in caplog.messages if line == "advertised_listener_is_wildcard"]
        assert bool(warned) == (name == "told")


def test_topics_are_created_on_first_use_unless_that_is_turned_off(tmp_path: Path) -> None:
    """As with `mansio serve --dev`."""
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.publish("first-use", b"1")
        (found,) = client.consume("first-use", from_="earliest", max_records=1)
        assert found.value == b"1"
    with (
        mansio.Broker(tmp_path, auto_create_topics_enable=False) as broker,
        mansio.blocking.connect(broker.address) as client,
        pytest.raises(mansio.errors.UnknownTopicOrPartition),
    ):
        client.publish("misspelled", b"1")


def test_files_are_readable_by_the_user_and_the_group_only(tmp_path: Path) -> None:
    code = (
        "import mansio, os, sys; os.umask(0o022)\n"
        "with mansio.Broker(sys.argv[1]) as broker, mansio.blocking.connect(broker.address) as client:\n"
        "    client.admin.create_topic('t'); client.publish('t', b'1')\n"
        "    list(client.consume('t', group='g', to_end=True))\n"
        "    for place, _, names in os.walk(sys.argv[1]):\n"
        "        for path in [place, *(os.path.join(place, name) for name in names)]:\n"
        "            print(oct(os.stat(path).st_mode & 0o777), os.path.isdir(path), path)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a" / "data")],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    ).stdout
    assert "metadata.sqlite3-wal" in shown
    wrong = [
        line
        for line in shown.splitlines()
        if not line.startswith("0o750 True" if " True " in line else "0o640 False")
    ]
    assert wrong == []
