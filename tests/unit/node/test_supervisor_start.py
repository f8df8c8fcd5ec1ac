"""Start of a supervisor: what is refused leaves nothing behind that the next start stumbles over; and how long a broker
may hang."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.maintenance.data_dir_mode import MovedTo, cluster_of, write_moved_to
from mansio.broker.topics.topics import NewTopic
from mansio.config.settings import Settings
from mansio.errors import ConfigError, Unavailable
from mansio.host.clock import HostRandom
from mansio.host.disk import HostDisk
from mansio.metadata import metadata_store
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.image import find_or_create_cluster
from mansio.metadata.metadata_store import KEY_ROOT
from mansio.node.cluster_bootstrap import check_cluster
from mansio.node.etcd_member.executable import EtcdProgram
from mansio.node.processes import supervisor as supervisor_module
from mansio.node.processes.broker_process import BrokerProcess
from mansio.node.processes.plan import Layout, ProcessPlan, plan_node, write_layout
from mansio.node.processes.supervisor import SupervisedBroker, Supervisor
from support.metadata import sqlite_store, topic_admin
from support.paths import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DISK = HostDisk()


def supervisor_of(directory: Path, **changes: Any) -> Supervisor:
    settings = Settings(data_dir=str(directory), http_listener="", supervisor_listener="", **changes)
    return Supervisor(plan_node(DISK, settings, 2), settings, settings, lambda _process: ["true"])


async def refused(directory: Path, match: str, **changes: Any) -> None:
    supervisor = supervisor_of(directory, **changes)
    try:
        with pytest.raises(ConfigError, match=match):
            await supervisor.start()
    finally:
        await supervisor.stop()


@pytest.fixture
def without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before etcd starts."""
    monkeypatch.setattr(supervisor_module, "find_program", lambda _setting: EtcdProgram("/no/etcd", "3.5.21"))


@pytest.mark.usefixtures("without_etcd")
def test_a_single_node_with_another_id_is_refused_and_its_own_id_still_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            sqlite_store(f"{tmp_path}/metadata.sqlite3") as store,
            topic_admin(store, settings=Settings(node_id=5)) as admin,
        ):
            await admin.topics.create(NewTopic("t", 1))
        await refused(tmp_path, "start with --node-id 5", listeners="127.0.0.1:0")
        assert not (tmp_path / "processes.json").exists()
        found = supervisor_of(tmp_path, listeners="127.0.0.1:0", node_id=5).plan
        assert [each.node_id for each in found.processes] == [5, 6]

    asyncio.run(main())


def test_a_replication_factor_that_has_no_effect_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "find_program", lambda _setting: EtcdProgram("/no/etcd", "3.5.21"))

    async def main() -> None:
        supervisor = supervisor_of(tmp_path, listeners="127.0.0.1:0", default_replication_factor=2)
        try:
            with pytest.raises(ConfigError, match="etcd member exited"):
                await supervisor.start()
        finally:
            await supervisor.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "setting_without_effect" in caplog.messages


def test_a_taken_port_of_etcd_is_waited_for_as_long_as_brokers_may_stop_and_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_etcd: None
) -> None:
    monkeypatch.setattr(supervisor_module, "EARLIER_PROCESSES_S_MIN", 0.0)
    monkeypatch.setattr(supervisor_module, "CLOSE_S_MAX", 0.0)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports = (free_port(), taken.getsockname()[1])
            write_layout(DISK, str(tmp_path), Layout(("0", "1"), 1, ports))
            begun = asyncio.get_running_loop().time()
            match = rf"127.0.0.1:{ports[1]} is in use .*, and etcd in {tmp_path} needs it: stop that process"
            await refused(tmp_path, match, listeners="127.0.0.1:0", shutdown_drain_ms=200)
            assert asyncio.get_running_loop().time() - begun >= 0.2

    asyncio.run(main())


@pytest.mark.usefixtures("without_etcd")
def test_a_taken_port_of_a_broker_is_refused_before_the_metadata_of_a_single_node_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "EARLIER_PROCESSES_S_MIN", 0.0)
    monkeypatch.setattr(supervisor_module, "CLOSE_S_MAX", 0.0)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            listeners = f"127.0.0.1:{port - 1}"
            await refused(tmp_path, r"127.0.0.1:\d+ is in use .*: use --kafka", listeners=listeners)

    asyncio.run(main())


@pytest.mark.parametrize(("factor", "warned"), [(2, True), (1, False)])
def test_fewer_hosts_than_default_replicas_are_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    factor: int,
    warned: bool,
) -> None:
    async def main() -> None:
        async with sqlite_store() as store:
            monkeypatch.setattr(EtcdStore, "open", opens(store))
            await find_or_create_cluster(store, "c1", HostRandom())
            named = {"etcd_endpoints": "http://127.0.0.1:1", "listeners": "127.0.0.1:0"}
            supervisor = supervisor_of(tmp_path, default_replication_factor=factor, **named)
            await supervisor.warn_about_hosts()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert ("too_few_hosts" in caplog.messages) == warned


def opens(store: Any) -> Callable[..., Any]:
    async def open_store(*_arguments: object) -> Any:
        return store

    return open_store


async def refuses_store(directory: Path, wanted: str = "") -> None:
    """The directory is refused with an etcd that has no cluster, and with one that has another."""
    async with sqlite_store() as other:
        for _ in range(2):
            with pytest.raises(ConfigError, match="belongs to the cluster c1, which is not in this etcd"):
                await check_cluster(DISK, str(directory), 1, wanted, other)
            if not metadata_store.cluster_ids(await other.list(KEY_ROOT)):
                await find_or_create_cluster(other, "c2", HostRandom())


def test_a_directory_is_not_used_with_an_etcd_without_its_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        async with sqlite_store() as own:
            await find_or_create_cluster(own, "c1", HostRandom())
            await check_cluster(DISK, str(tmp_path), 1, "", own)
            write_moved_to(DISK, str(tmp_path), MovedTo("c1", 1))
            assert cluster_of(DISK, str(tmp_path)) == "c1"
            await check_cluster(DISK, str(tmp_path), 1, "", own)
            await refuses_store(tmp_path)
            await refuses_store(tmp_path, "c1")
            with pytest.raises(ConfigError, match="is that of broker 1: start with --node-id 1"):
                await check_cluster(DISK, str(tmp_path), 2, "", own)
            (tmp_path / "broker.json").write_text('{"cluster_id": "c1", "node_id": 1}')
            await check_cluster(DISK, str(tmp_path), 1, "", own)
            await refuses_store(tmp_path)
            async with sqlite_store() as empty:
                # It may be created again if it is named.
                await check_cluster(DISK, str(tmp_path), 1, "c1", empty)

    asyncio.run(main())


def test_a_supervisor_checks_all_directories_before_a_broker_creates_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process has never registered, the second one has."""

    async def main() -> None:
        async with sqlite_store() as store:
            monkeypatch.setattr(EtcdStore, "open", opens(store))
            (tmp_path / "1").mkdir()
            (tmp_path / "1" / "broker.json").write_text('{"cluster_id": "c1", "node_id": 2}')
            named = {"etcd_endpoints": "http://127.0.0.1:1", "listeners": "127.0.0.1:0"}
            await refused(tmp_path, "belongs to the cluster c1", **named)
            assert not (tmp_path / "processes.json").exists()

    asyncio.run(main())


class HungBroker(SupervisedBroker):
    """A broker that runs, was ready, and never answers."""

    def __init__(self) -> None:
        super().__init__(ProcessPlan(1, ".", {}), ["true"], lambda _node_id, _line: None)
        self.process.addresses = {"kafka": "127.0.0.1:1"}
        self.waits: list[float] = []

    async def get(self, path: str, within_s: float) -> Any:
        assert path == "/health/live"
        self.waits.append(within_s)
        raise Unavailable("no answer")


def test_a_broker_is_killed_when_it_has_not_answered_for_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        killed = asyncio.Event()
        monkeypatch.setattr(BrokerProcess, "is_running", property(lambda _process: True))
        monkeypatch.setattr(BrokerProcess, "pid", property(lambda _process: 7))
        monkeypatch.setattr(BrokerProcess, "kill", lambda _process: killed.set())
        broker = HungBroker()
        watching = asyncio.ensure_future(broker.kill_when_hung(0.04))
        async with asyncio.timeout(30):
            await killed.wait()
        watching.cancel()
        assert broker.waits[0] == 0.04

    asyncio.run(main())
