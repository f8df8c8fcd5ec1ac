"""Listeners in a cluster: clients of EXTERNAL, behind proxies as in NAT, and brokers that use INTERNAL."""

from __future__ import annotations

import sys
import zipfile
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.node.broker import Broker
from mansio.wire.api_versions import ApiKey
from support.etcd import one_etcd
from support.listeners import AskedListeners
from support.paths import ROOT, free_port
from support.process import ServedBroker
from support.raw_peer import RawPeer
from support.recording_proxy import recording
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

WAIT_S = 30
WHEEL = ROOT / "tests" / "fixtures" / "wheels" / "mansio-0.1.0-py3-none-any.whl"
PROTOCOLS = "INTERNAL:PLAINTEXT,EXTERNAL:PLAINTEXT,RENAMED:PLAINTEXT"
NODES = (1, 2)


class Pair:
    """Two brokers of this process. Broker N advertises `localhost` and the port of a proxy for EXTERNAL."""

    def __init__(self, directory: Path, etcd_url: str, stack: ExitStack) -> None:
        self.asked = AskedListeners()
        self.internal = {node_id: free_port() for node_id in NODES}
        self.external = {node_id: free_port() for node_id in NODES}
        self.renamed = {node_id: free_port() for node_id in NODES}
        self.proxied = {node_id: free_port() for node_id in NODES}
        self.brokers: dict[int, mansio.Broker] = {}
        self._directory = directory
        self.etcd_url = etcd_url
        self._stack = stack
        for node_id in NODES:
            stack.enter_context(recording(self.proxied[node_id], self.external[node_id]))

    def start(
        self,
        node_id: int,
        names: Sequence[str] = ("INTERNAL", "EXTERNAL"),
        inter_broker: str = "INTERNAL",
    ) -> None:
        """Start a broker, or start it again with other listeners."""
        if node_id in self.brokers:
            self.brokers[node_id].close()
        bound = {
            "INTERNAL": f"127.0.0.1:{self.internal[node_id]}",
            "EXTERNAL": f"127.0.0.1:{self.external[node_id]}",
            "RENAMED": f"127.0.0.1:{self.renamed[node_id]}",
        }
        advertised = bound | {"EXTERNAL": f"localhost:{self.proxied[node_id]}"}
        settings: dict[str, Any] = {
            "listeners": ",".join(f"{name}://{bound[name]}" for name in names),
            "advertised_listeners": ",".join(f"{name}://{advertised[name]}" for name in names),
            "listener_security_protocol_map": PROTOCOLS,
            "inter_broker_listener_name": inter_broker,
            "default_replication_factor": 2,
            "group_initial_rebalance_delay_ms": 0,
        }
        broker = mansio.Broker(
            self._directory / str(node_id), etcd_endpoints=self.etcd_url, node_id=node_id, **settings
        )
        self.brokers[node_id] = self._stack.enter_context(broker)

    def outside(self, node_id: int) -> str:
        return f"localhost:{self.proxied[node_id]}"


@contextmanager
def pair(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with one_etcd() as etcd, ExitStack() as stack:
        found = Pair(directory, etcd.url, stack)
        monkeypatch.setattr("mansio.node.embedded.Broker", partial(Broker, intercept=found.asked.intercept))
        yield found


def in_sync(client: mansio.blocking.Client, topic: str) -> bool:
    return all(len(each.in_sync_replicas) == 2 for each in client.admin.cluster.partitions([topic]))


def led_by(client: mansio.blocking.Client, topic: str) -> set[int]:
    return {each.leader for each in client.admin.cluster.partitions([topic])}


@pytest.mark.row("C4")
def test_clients_and_brokers_each_stay_on_their_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, monkeypatch) as one:
        for node_id in NODES:
            one.start(node_id)
        with mansio.blocking.connect(one.outside(1), client_id="outside") as client:
            client.admin.create_topic("t", partitions=2)
            assert led_by(client, "t") == set(NODES)
            for partition in (0, 1):
                client.publish("t", b"%d" % partition, partition=partition)
            found = client.consume("t", group="g", max_records=2)
            assert sorted(each.value or b"" for each in found) == [b"0", b"1"]
            with client.receive("t", group="s") as receiver:
                received: set[int] = set()

                def has_received_from_both() -> bool:
                    for partition in (0, 1):  # again, because the group begins at the end of the log
                        client.publish("t", b"again", partition=partition)
                    messages = receiver.poll(200)
                    received.update(each.partition for each in messages)
                    receiver.ack(messages)
                    return received == {0, 1}

                wait_until(has_received_from_both, WAIT_S, "records of both leaders")
            wait_until(lambda: in_sync(client, "t"), WAIT_S, "both replicas are in sync")
            described = client.admin.describe_cluster().brokers
            assert [(each.host, each.port) for each in described] == [
                ("localhost", one.proxied[node_id]) for node_id in NODES
            ]
        assert one.asked.by_client["outside"] == {"EXTERNAL"}
        between_brokers = {name: used for name, used in one.asked.by_client.items() if name != "outside"}
        assert between_brokers
        assert all(used == {"INTERNAL"} for used in between_brokers.values()), between_brokers
        _check_coordinators(one)


def _check_coordinators(one: Pair) -> None:
    """Every broker names the same coordinators, each by the address of the listener that is asked."""
    groups = [f"g{number}" for number in range(10)]
    nodes: list[list[int]] = []
    for ports, host, advertised in (
        (one.external, "localhost", one.proxied),
        (one.internal, "127.0.0.1", one.internal),
    ):
        for node_id in NODES:
            with RawPeer(ports[node_id]) as peer:
                keys = {"key_type": 0, "coordinator_keys": groups}
                found = peer.call(ApiKey.FIND_COORDINATOR, 4, keys).coordinators
            assert {each.error_code for each in found} == {0}
            for each in found:
                assert (each.host, each.port) == (host, advertised[each.node_id])
            nodes.append([each.node_id for each in found])
    assert nodes == [nodes[0]] * 4
    assert set(nodes[0]) == set(NODES)


@pytest.mark.full
@pytest.mark.row("C4")
def test_partitions_of_a_leader_without_the_listener_are_reported_and_come_back_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, monkeypatch) as one:
        one.start(1)
        one.start(2, names=["INTERNAL"])
        with mansio.blocking.connect(f"127.0.0.1:{one.internal[1]}") as inside:
            inside.admin.create_topic("t", partitions=2, replication_factor=1)
            assert led_by(inside, "t") == set(NODES)
            with RawPeer(one.external[1]) as peer:
                found = peer.call(ApiKey.METADATA, 12, {"topics": [{"name": "t"}]})
                codes = {each.error_code: each.leader_id for each in found.topics[0].partitions}
                assert codes == {0: 1, 72: -1}
                assert [each.node_id for each in found.brokers] == [1]
            one.start(2)
            with mansio.blocking.connect(one.outside(1)) as outside:
                wait_until(lambda: led_by(outside, "t") == set(NODES), WAIT_S, "both leaders are named")
                for partition in (0, 1):
                    outside.publish("t", b"1", partition=partition)


@pytest.mark.parametrize(
    "steps",
    smoke_first(
        [  # without a moment in which clients of either name miss a broker, as Kafka's documentation describes
            (("INTERNAL", "RENAMED"), "INTERNAL"),
            (("INTERNAL", "RENAMED"), "RENAMED"),
            (("RENAMED",), "RENAMED"),
        ],
        [(("RENAMED",), "RENAMED")],
    ),
)
@pytest.mark.row("C6")
def test_the_listener_between_brokers_is_renamed_in_a_rolling_restart(
    steps: list[tuple[tuple[str, ...], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, monkeypatch) as one:
        for node_id in NODES:
            one.start(node_id)
        count = 0
        with mansio.blocking.connect(one.outside(1)) as client:
            client.admin.create_topic("t")
            for names, inter_broker in steps:
                for node_id in NODES:
                    wait_until(lambda: in_sync(client, "t"), WAIT_S, "both replicas are in sync")
                    one.start(node_id, (*names, "EXTERNAL"), inter_broker)
                    client.publish("t", b"%d" % count)
                    count += 1
            wait_until(lambda: in_sync(client, "t"), WAIT_S, "both replicas are in sync")
            found = [each.value for each in client.consume("t", from_="earliest", max_records=count)]
            assert found == [b"%d" % number for number in range(count)]
            one.asked.by_client.clear()
            client.publish("t", b"last")  # is acknowledged by the follower
        between_brokers = {name: used for name, used in one.asked.by_client.items() if used != {"EXTERNAL"}}
        assert between_brokers
        assert all(used == {"RENAMED"} for used in between_brokers.values()), between_brokers


@pytest.mark.full
@pytest.mark.row("A3", "C4")
@pytest.mark.timeout(240)
def test_a_broker_of_the_last_release_counts_as_one_with_the_listener_between_brokers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipfile.ZipFile(WHEEL).extractall(tmp_path / "release")
    release = f"PYTHONPATH={tmp_path / 'release'}"
    command = ["env", release, "PYTHONSAFEPATH=1", sys.executable, "-m", "mansio"]
    with pair(tmp_path, monkeypatch) as one:
        arguments = ["--node-id", "2", "--etcd", one.etcd_url, "--set", "default_replication_factor=2"]
        old = ServedBroker(tmp_path / "2", command=command, arguments=arguments, http=False)
        try:
            old.start()  # creates the cluster
            one.start(1)
            for address in (f"127.0.0.1:{one.internal[1]}", old.bootstrap_servers):
                with mansio.blocking.connect(address) as inside:
                    wait_until(
                        lambda inside=inside: len(inside.admin.describe_cluster().brokers) == 2,
                        WAIT_S,
                        "it sees both",
                    )
                    described = [(each.host, each.port) for each in inside.admin.describe_cluster().brokers]
                    assert described == [("127.0.0.1", one.internal[1]), ("127.0.0.1", old.kafka_port)]
                    inside.admin.create_topic("t", partitions=2, exist_ok=True)
                    assert led_by(inside, "t") == set(NODES)
                    for partition in (0, 1):
                        inside.publish("t", b"1", partition=partition)
                    wait_until(lambda inside=inside: in_sync(inside, "t"), WAIT_S, "both have a copy")
            with RawPeer(one.external[1]) as peer:
                found = peer.call(ApiKey.METADATA, 12, {"topics": [{"name": "t"}]})
                assert [each.node_id for each in found.brokers] == [1]
                codes = {each.error_code: each.leader_id for each in found.topics[0].partitions}
                assert codes == {0: 1, 72: -1}
            assert old.stop() == 0
        finally:
            old.kill()
