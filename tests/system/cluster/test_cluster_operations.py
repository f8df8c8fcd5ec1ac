"""A broker is removed, and brokers are restarted one at a time, with the commands of an operator."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from support.cluster import cluster, on_same_processors
from support.machine import scaled
from system.cluster.load import ClusterLoad, create_topic, say
from system.cluster.prober import read_values
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cluster import Cluster

RESTARTED_S = 120.0


@pytest.mark.row("C3")
def test_a_broker_is_removed_when_it_is_drained_and_stopped(tmp_path: Path) -> None:
    with cluster(tmp_path, brokers=2, default_replication_factor=1) as one:
        create_topic(one, "t", copies=1)
        leaving = one.leader("t")
        staying = 3 - leaving
        shell = Shell(one.bootstrap_servers)
        with blocking.connect(one.bootstrap_servers) as client:
            client.publish("t", b"kept")
            client.admin.traces.record("t", 0, 0)  # the topic of the trace exists now, and is moved, too
            epochs = {each.node_id: each.broker_epoch for each in client.admin.cluster.health()}
        assert epochs == {node_id: one.epoch(node_id) for node_id in one.brokers}
        shell("cluster", "drain", str(leaving), "--yes")
        assert f"stop it, then mansio cluster remove {leaving}" in shell.errors
        shell("cluster", "remove", str(leaving), code=1)
        running = f"broker {leaving} is running, or its session has not ended yet: stop it first"
        assert shell.errors == f"mansio: {running}\n"
        assert one.brokers[leaving].stop() == 0
        one.wait(
            lambda: one.seen_by(staying) == {staying}, "the broker that stays knows that the other one left"
        )
        shell("cluster", "remove", str(leaving))
        assert {row["broker"] for row in shell.json("cluster", "brokers")} == {staying}
        shell("cluster", "remove", str(leaving))
        assert f"broker {leaving} is not registered" in shell.errors
        assert read_values(one, "t") == [(0, b"kept")]
        one.check_logs()


@contextmanager
def service_manager(one: Cluster, directory: Path) -> Iterator[list[int]]:
    """Restarts the broker whose number is the name of a new file; the brokers in the order of their restarts."""
    directory.mkdir()
    restarted: list[int] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(0.05):
            for path in directory.iterdir():
                node_id = int(path.name)
                path.unlink()
                restarted.append(node_id)
                one.brokers[node_id].stop()
                one.brokers[node_id].start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield restarted
    finally:
        is_over.set()
        thread.join()


@pytest.mark.full
@pytest.mark.row("C6")
@pytest.mark.timeout(300)
def test_a_rolling_restart_under_load_fails_no_produce(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    with cluster(tmp_path) as one, service_manager(one, tmp_path / "restarts") as restarted:
        load = ClusterLoad(one, "rolled", commits=False)
        load.create_topic(segment_bytes="1000000")
        load.begin()
        epochs = {node_id: one.epoch(node_id) for node_id in one.brokers}
        controller = one.controller()
        begin = time.monotonic()
        try:
            touch = f"touch {tmp_path}/restarts/{{broker}}"
            arguments = ("cluster", "rolling-restart", "--yes", "--timeout", f"{scaled(RESTARTED_S):.0f}s")
            with Shell(one.bootstrap_servers).start(*arguments, "--command", touch) as process:
                _, errors = process.communicate(timeout=scaled(2 * RESTARTED_S))
            assert process.returncode == 0, errors
            took_s = time.monotonic() - begin
            assert sorted(restarted) == [1, 2, 3]
            assert restarted[-1] == controller
            assert all(one.epoch(node_id) > epoch for node_id, epoch in epochs.items())
            assert all(place.leader == place.replicas[0] for place in one.places(load.topic))
            load.wait_resumed(time.monotonic())
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "rolling restart by command",
            took_s=took_s,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        one.check_logs()
