"""A broker joins a cluster that is used, gets its part of the partitions, and is drained again, with the commands of an
operator."""

from __future__ import annotations

import random
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest

from mansio import OutgoingRecord, blocking
from mansio.cli.support.common import INTERRUPTED_EXIT_CODE
from mansio.config.broker_config import FOLLOWER_THROTTLE
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC
from support.cluster import cluster, on_same_processors
from support.machine import scaled
from support.present import present
from support.transactional_writer import PARTITIONS as WRITTEN_PARTITIONS
from support.transactional_writer import Writer
from support.waiting import wait_until
from system.cluster.load import PROGRESS_S_MAX, ClusterLoad, create_topic, say, share_load
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = pytest.mark.full

THROTTLE = "20000000"
JOINING = 4
FILLED_PARTITIONS = 4
FILLED_RECORD_BYTES = 500_000
LEASE_MS = 2_000
MOVES_S_MAX = 240.0


@pytest.mark.row("C3")
@pytest.mark.timeout(300)
def test_a_broker_is_added_and_drained_under_load_and_no_produce_fails(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    with cluster(tmp_path, brokers=JOINING) as one:
        one.brokers[JOINING].stop()
        one.wait(lambda: one.sessions() == {1, 2, 3}, "three brokers are left")
        load = ClusterLoad(one, "grown", commits=False)
        load.create_topic(segment_bytes="1000000")
        fill(one, FILLED_PARTITIONS, 5_000_000)
        load.begin()
        shell = Shell(one.bootstrap_servers)
        try:
            assert JOINING not in {node_id for place in one.places(load.topic) for node_id in place.replicas}
            one.start(JOINING)
            one.wait(lambda: one.sessions() == {1, 2, 3, JOINING}, "the broker is there")

            begin = time.monotonic()
            planned = shell.json("cluster", "rebalance", "--dry-run")["planned"]
            assert planned
            assert not any(move["error"] for move in grow(shell)["executed"])
            grown_s = time.monotonic() - begin
            rows = {row["broker"]: row for row in shell.json("cluster", "brokers")}
            numbers = [row["replicas"] for row in rows.values()]
            assert max(numbers) <= 1.1 * min(numbers), numbers
            assert rows[JOINING]["leads"] > 0
            load.wait_resumed(time.monotonic())

            interrupt_a_drain(one, shell)
            begin = time.monotonic()
            drained = shell.json("cluster", "drain", str(JOINING), "--yes", "--throttle", THROTTLE)
            drained_s = time.monotonic() - begin
            assert drained["seconds"] >= 0
            rows = {row["broker"]: row for row in shell.json("cluster", "brokers")}
            assert (rows[JOINING]["replicas"], rows[JOINING]["leads"]) == (0, 0)
            assert throttles(one, shell) == {}
            assert one.brokers[JOINING].stop() == 0
            one.wait_in_sync(load.topic, "filled")
            load.wait_resumed(time.monotonic())
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "growth",
            moves=len(planned),
            grown_s=grown_s,
            drained_s=drained_s,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        one.check_logs()


@pytest.mark.row("C3", "C5")
@pytest.mark.timeout(420)
def test_a_cluster_grows_and_shrinks_under_all_loads_while_source_target_and_controller_are_killed(
    tmp_path: Path,
) -> None:
    with joining_cluster(tmp_path) as one:
        fill(one, 20, 1_000_000)
        with AllLoads(one) as loads:
            join(one)
            move(one, "rebalance", throttle="1000000", kills=("source", "target"))
            loads.wait_progress()
            move(one, "drain", str(JOINING), throttle="1000000", kills=("controller",))
            loads.wait_progress()
            leave_cluster(one)
            loads.judge()
        one.check_logs()


@contextmanager
def joining_cluster(directory: Path, **settings: Any) -> Iterator[Cluster]:
    """Run a cluster of three brokers, and a fourth one that has stopped."""
    with cluster(directory, brokers=JOINING, **settings) as one:
        one.brokers[JOINING].stop()
        one.wait(lambda: one.sessions() == {1, 2, 3}, "three brokers are left")
        yield one


def join(one: Cluster) -> None:
    one.start(JOINING)
    one.wait(lambda: one.sessions() == {1, 2, 3, JOINING}, "the broker is there")


def leave_cluster(one: Cluster) -> None:
    """Stop the broker that has been drained."""
    assert not any(JOINING in document["replicas"] for document in one.entries("parts/").values())
    assert one.brokers[JOINING].stop() == 0


def move(one: Cluster, *command: str, throttle: str, kills: Iterable[str] = ()) -> None:
    """Let a command move partitions, and kill these brokers while it does: `source`, `target`, `controller`. Whenever
    the command is interrupted by that, it is run again."""
    shell = Shell(one.bootstrap_servers)
    arguments = ("cluster", *command, "--yes", "--throttle", throttle)
    with shell.start(*arguments) as process:
        for killed in kills:
            one.wait(lambda: moving(one), f"partitions move, and {killed} is killed")
            moved = moving(one)[0]
            victim = {
                "source": moved["leader"],
                "target": moved["adding"][0],
                "controller": one.controller(),
            }[killed]
            one.kill(victim)
            one.start(victim)
        _, errors = process.communicate(timeout=scaled(MOVES_S_MAX))
    if process.returncode:
        print(errors.decode())
        shell(*arguments)
    one.wait(lambda: not moving(one), "no partition moves any more")
    one.wait_in_sync(*one.entries("topics/"))


def moving(one: Cluster) -> list[dict[str, Any]]:
    """The partitions, as they are in etcd, that get a replica."""
    return [document for document in one.entries("parts/").values() if document["adding"]]


class AllLoads:
    """Idempotent, plain and transactional producers, readers, and a share group, until they are judged."""

    def __init__(self, one: Cluster) -> None:
        self._producers = ClusterLoad(one, "grown", commits=False)
        self._producers.create_topic(segment_bytes="1000000")
        create_topic(one, "written", WRITTEN_PARTITIONS)
        self._group = share_load(one, "shared", "workers", lock_ms=LEASE_MS, states=SHARE_STATE_TOPIC)
        self._writer: Writer | None = None
        self._one = one

    def __enter__(self) -> Self:
        self._producers.begin()
        self._group.start(members=2)
        self._writer = Writer(self._one.bootstrap_servers, "written")
        self.wait_progress()
        return self

    def wait_progress(self) -> None:
        """Return when each load has made progress."""
        writer, group = present(self._writer), self._group
        committed, accepted = len(writer.committed), group.history.accepted
        self._producers.wait_resumed(time.monotonic())

        def is_going_on() -> bool:
            return len(writer.committed) > committed + 2 and group.history.accepted > accepted + 20

        try:
            wait_until(lambda: writer.errors or group.failures or is_going_on(), PROGRESS_S_MAX)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{len(writer.committed)} commits\n{group.described()}") from None
        assert not writer.errors, writer.errors
        assert not group.failures, group.failures

    def judge(self) -> None:
        """Stop all, and compare what was acknowledged with what is read."""
        writer = present(self._writer)
        writer.stop()
        self._group.finish()
        verdict = self._producers.judge()
        writer.check()
        say(
            "growth under all loads",
            acknowledged=verdict.acknowledged,
            transactions=len(writer.committed),
            accepted=self._group.history.accepted,
        )

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.stop()
        self._group.stop()
        self._producers.stop()


def fill(one: Cluster, partitions: int, partition_bytes: int) -> None:
    """Make the topic `filled`, with so many bytes in each partition."""
    create_topic(one, "filled", partitions)
    value = random.Random(1).randbytes(FILLED_RECORD_BYTES)
    with blocking.connect(one.bootstrap_servers) as client:
        for partition in range(partitions):
            records = [OutgoingRecord(value, partition=partition)] * (partition_bytes // FILLED_RECORD_BYTES)
            client.publish_many("filled", records)


def interrupt_a_drain(one: Cluster, shell: Shell) -> None:
    """Begin a drain that would not end, and interrupt it: its moves go on with its throttle, until a cancellation."""
    with shell.start("cluster", "drain", str(JOINING), "--yes", "--throttle", "1000") as process:
        one.wait(lambda: shell.json("cluster", "moves"), "moves run")
        assert set(throttles(one, shell).values()) == {"1000"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=scaled(30))
    assert process.returncode == INTERRUPTED_EXIT_CODE, errors
    assert b"go on at the throttle of 1.0 kB/s. Run the command again to continue" in errors
    assert set(throttles(one, shell).values()) == {"1000"}
    assert {row["throttle"] for row in shell.json("cluster", "moves")} == {1000}
    shell("cluster", "cancel-moves", "--yes")
    assert throttles(one, shell) == {}


def throttles(one: Cluster, shell: Shell) -> dict[int, str]:
    """The throttles of the brokers that have one."""
    found = {}
    for node_id in one.brokers:
        rows = shell.json("cluster", "settings", "--broker", str(node_id))
        values = {row["name"]: row["value"] for row in rows}
        if FOLLOWER_THROTTLE in values:
            found[node_id] = values[FOLLOWER_THROTTLE]
    return found


def grow(shell: Shell) -> dict[str, list[dict[str, str | None]]]:
    done: dict[str, list[dict[str, str | None]]] = shell.json(
        "cluster", "rebalance", "--yes", "--throttle", THROTTLE
    )
    return done
