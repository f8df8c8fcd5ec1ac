"""Several broker processes on one machine, with real clients: nothing that was acknowledged is lost when any of them,
etcd or the supervisor is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mansio import blocking
from support.etcd import one_etcd
from support.machine import scaled
from support.present import present
from support.process import ServedBroker
from support.process import served as served_single
from support.served_processes import ServedProcesses, served_processes
from support.waiting import wait_until
from system.cluster.load import Paced
from system.crash.checker import check
from system.crash.kill_load import QUIET, Load, committed_offsets, read_log, senders
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.row("C3"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes share ports on Linux only"),
]

PARTITIONS = 6
AT_ONCE = ("--set", "group_initial_rebalance_delay_ms=0")
SHORT_SESSIONS = ("--set", "broker_session_timeout_ms=2000")


def publish(served: ServedProcesses, topic: str, value: str, partition: int) -> None:
    request = urllib.request.Request(
        f"{served.http_url}/v1/topics/{topic}/records?partition={partition}",
        value.encode(),
        {"Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request, timeout=scaled(15)) as answer:
        assert answer.status == 200


def produce_and_consume(served: ServedProcesses) -> None:
    """Records through a stock client for all partitions, others over HTTP on the shared port."""
    admin = AdminClient({"bootstrap.servers": served.bootstrap_servers, **QUIET})
    admin.create_topics([NewTopic("t", PARTITIONS, 1)])["t"].result(scaled(30))
    producer = Producer({"bootstrap.servers": served.bootstrap_servers, **QUIET})
    for partition in range(PARTITIONS):
        producer.produce("t", f"kafka-{partition}".encode(), partition=partition)
    assert producer.flush(scaled(30)) == 0
    for partition in range(PARTITIONS):
        publish(served, "t", f"http-{partition}", partition)
    node_ids = set(range(1, served.count + 1))

    def is_known() -> bool:
        metadata = admin.list_topics("t", timeout=scaled(15))
        leaders = {each.leader for each in metadata.topics["t"].partitions.values()}
        return leaders == set(metadata.brokers) == node_ids

    wait_until(is_known, 30, "all brokers are known, and each leads")
    consumer = Consumer(
        {
            "bootstrap.servers": served.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            **QUIET,
        }
    )
    consumer.subscribe(["t"])
    found: set[bytes] = set()
    deadline = time.monotonic() + scaled(30)
    while len(found) < 2 * PARTITIONS and time.monotonic() < deadline:
        found.update(present(each.value()) for each in consumer.consume(100, 0.2) if each.error() is None)
    consumer.commit(asynchronous=False)
    consumer.close()
    assert found == {
        f"{way}-{partition}".encode() for way in ("kafka", "http") for partition in range(PARTITIONS)
    }


def test_two_processes_serve_all_partitions_and_stop_with_their_supervisor(tmp_path: Path) -> None:
    with served_processes(tmp_path / "node", 2, arguments=AT_ONCE) as served:
        produce_and_consume(served)
        assert {name: each["ready"] for name, each in served.health()["processes"].items()} == {
            "1": True,
            "2": True,
        }
        assert served.metric("mansio_broker_process_up") == {'{process="1"}': 1, '{process="2"}': 1}
        admin = AdminClient({"bootstrap.servers": served.bootstrap_servers, **QUIET})
        with pytest.raises(KafkaException) as refused:
            admin.create_topics([NewTopic("twice", 1, 2)])["twice"].result(scaled(30))
        assert refused.value.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR
        children = served.children()
        assert served.stop() == 0
        assert len(children) == 3
        assert "etcd_member_stopped" in served.text()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_kill_of_each_process_in_turn_loses_nothing(tmp_path: Path) -> None:
    with served_processes(tmp_path / "node", 2, arguments=SHORT_SESSIONS) as served:
        load = PacedLoad(served.all_servers, "killed")
        load.create_topic()
        load.start(idempotent=1, plain=1)
        wait_progress(load)
        for name in ("1", "2"):
            others = {key: pid for key, pid in served.children().items() if key != name}
            before = served.kill_child(name)
            wait_until(
                lambda name=name, before=before: served.children().get(name, before) != before, 30, name
            )
            served.wait_ready(f"after the kill of {name}")
            assert {key: pid for key, pid in served.children().items() if key != name} == others
            wait_progress(load)
        restarts = served.metric("mansio_broker_process_restarts_total")
        assert set(restarts) == {'{process="1"}', '{process="2"}'}
        assert min(restarts.values()) >= 1
        brokers = {name: pid for name, pid in served.children().items() if name != "etcd"}
        for _ in range(2):
            before = served.kill_child("etcd")
            wait_until(
                lambda before=before: served.children().get("etcd", before) != before, 30, "etcd is back"
            )
        served.wait_ready("after the kills of etcd")
        wait_progress(load)
        assert {name: pid for name, pid in served.children().items() if name != "etcd"} == brokers
        served.kill_supervisor()
        served.start()
        wait_progress(load)
        judge(load)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--set", "etcd_binary=/no/etcd"), "etcd_binary: /no/etcd is not a program"),
        (("--secure",), "it makes certificates for a single broker"),
    ],
)
def test_what_cannot_start_changes_nothing(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    shell = Shell("")
    code = 2 if "--secure" in arguments else 1
    shell("serve", "--processes", "2", "--data", str(tmp_path / "node"), *arguments, code=code)
    assert reason in " ".join(shell.errors.split())
    assert not (tmp_path / "node").exists()


class PacedLoad(Load):
    """Producers that rest between few records, so that all processes fit on two processors."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        super().__init__(bootstrap_servers, topic)
        self._producing = Paced(0.02)


def wait_progress(load: Load) -> None:
    """Return when each producer has had further acknowledgements."""
    before = dict(load.progress)

    def moved() -> bool:
        return all(load.progress[name] > before[name] + 100 for name in before)

    wait_until(lambda: load.failures or moved(), 60, "every producer goes on")
    assert not load.failures, load.failures


def judge(load: Load) -> None:
    load.stop_producing(deadline_s=scaled(80))
    load.wait_for_readers()
    load.stop()
    assert not load.failures, load.failures
    final = read_log(load.bootstrap_servers, load.topic)
    committed = committed_offsets(load.bootstrap_servers, load.topic, "committer")
    verdict = check(load.history, final, idempotent=load.idempotent, committed=committed)
    assert senders(final) == set(load.history.sent), "every producer got something through"
    print(verdict)
    assert not verdict.violations, str(verdict)


@pytest.mark.full
def test_a_broker_that_hangs_is_restarted_under_a_watchdog(tmp_path: Path) -> None:
    served = ServedProcesses(tmp_path / "node", 1, arguments=SHORT_SESSIONS)
    served.environment["WATCHDOG_USEC"] = "4000000"
    try:
        served.start()
        hung = served.children()["1"]
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: served.children().get("1", hung) != hung, 60, "another process runs")
        served.wait_ready("again")
        assert "broker_process_hung" in served.text()
    finally:
        served.kill()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_more_processes_are_added_and_fewer_refused_until_the_last_is_drained(tmp_path: Path) -> None:
    with served_processes(tmp_path / "node", 1, arguments=SHORT_SESSIONS) as served:
        assert served.stop() == 0
        served.set_count(2)
        served.start()
        admin = AdminClient({"bootstrap.servers": served.bootstrap_servers, **QUIET})
        admin.create_topics([NewTopic("t", 4, 1)])["t"].result(scaled(30))
        assert {place.leader for place in admin.list_topics("t").topics["t"].partitions.values()} == {1, 2}
        assert served.stop() == 0
        served.set_count(1)
        with pytest.raises(
            AssertionError, match=r"broker 2 of \S+ has 2 replica\(s\): start 2 processes, and first"
        ):
            served.start()
        served.set_count(2)
        served.start()
        Shell(served.all_servers)("cluster", "drain", "2", "--yes")
        assert served.stop() == 0
        served.set_count(1)
        served.start()
        wait_led_by_first(AdminClient({"bootstrap.servers": served.bootstrap_servers, **QUIET}))


def wait_led_by_first(admin: AdminClient) -> None:
    """Return when broker 1 leads all partitions of the topic: a broker is ready before it is elected."""

    def leaders() -> set[int]:
        return {each.leader for each in admin.list_topics("t").topics["t"].partitions.values()}

    wait_until(lambda: leaders() == {1}, 30, "broker 1 leads all partitions")


def read(bootstrap_servers: str, group: str, count: int) -> list[bytes]:
    """Values of so many records of the topic, which the group commits."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **QUIET,
        }
    )
    consumer.subscribe(["t"])
    found: list[bytes] = []
    deadline = time.monotonic() + scaled(60)
    while len(found) < count and time.monotonic() < deadline:
        messages = consumer.consume(count - len(found), 0.2)
        found.extend(present(message.value()) for message in messages if message.error() is None)
    consumer.commit(asynchronous=False)
    consumer.close()
    return found


def receive(bootstrap_servers: str, count: int) -> set[bytes]:
    """Values of so many records that a share group processes."""
    with blocking.connect(bootstrap_servers) as client:
        changes = {"share.auto.offset.reset": "earliest", "share.record.lock.duration.ms": "1000"}
        client.admin.alter_group_config("workers", changes)  # a killed broker's leases hold records back
        with client.receive("t", group="workers", max_records=10) as receiver:
            found = set()
            for _ in range(count):
                record = next(receiver)
                record.ack()
                found.add(present(record.value))
        return found


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_data_of_a_single_node_become_those_of_the_first_process(tmp_path: Path) -> None:
    """Records, committed offsets and delivery states stay; a broker alone is refused; a kill at any time loses nothing.

    The steps of the import themselves are killed in `tests/unit/metadata/test_single_node_import.py`."""
    with served_single(tmp_path / "node") as single:
        admin = AdminClient({"bootstrap.servers": single.bootstrap_servers, **QUIET})
        admin.create_topics([NewTopic("t", 3, 1)])["t"].result(scaled(30))
        producer = Producer(
            {"bootstrap.servers": single.bootstrap_servers, "enable.idempotence": True, **QUIET}
        )
        for number in range(300):
            producer.produce("t", str(number).encode(), partition=number % 3)
        assert producer.flush(scaled(30)) == 0
        done = receive(single.bootstrap_servers, 90)
        assert len(read(single.bootstrap_servers, "g", 100)) == 100
        single.kill()

    served_again = ServedProcesses(tmp_path / "node", 2, arguments=SHORT_SESSIONS)
    served_again.output = tmp_path / "processes.log"
    try:
        served_again.start()
        assert (tmp_path / "node" / "moved.json").exists()
        ends = AdminClient({"bootstrap.servers": served_again.bootstrap_servers, **QUIET})
        wait_led_by_first(ends)
        assert not done & receive(served_again.bootstrap_servers, 210), "none that is done is delivered again"
        left = read(served_again.bootstrap_servers, "g", 200)
        assert len(left) == 200, "the group goes on where it was"
        assert len(set(read(served_again.bootstrap_servers, "other", 300))) == 300
        ends.create_topics([NewTopic("new", 2, 1)])["new"].result(scaled(30))
        places = ends.list_topics("new").topics["new"].partitions.values()
        assert {each.leader for each in places} == {1, 2}
        served_again.kill()
        served_again.start()
        assert len(read(served_again.bootstrap_servers, "third", 300)) == 300
        assert served_again.stop() == 0
    finally:
        served_again.kill()
    with pytest.raises(AssertionError, match=r"was moved to the cluster \S+ of several broker processes"):
        ServedBroker(tmp_path / "node").start()


@pytest.mark.full
def test_an_imported_directory_creates_no_cluster_in_another_etcd(tmp_path: Path) -> None:
    """Whether the import was killed before its end, before the first broker registered, or never."""
    with served_single(tmp_path / "node") as single:
        admin = AdminClient({"bootstrap.servers": single.bootstrap_servers, **QUIET})
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(scaled(30))
    with one_etcd() as own, one_etcd() as other:
        served = ServedProcesses(tmp_path / "node", 1, arguments=("--etcd", own.url))
        served.output = tmp_path / "processes.log"
        alone = ServedBroker(tmp_path / "node")
        alone.output = tmp_path / "alone.log"
        elsewhere = ServedProcesses(tmp_path / "node", 2, arguments=("--etcd", other.url))
        elsewhere.output = tmp_path / "elsewhere.log"
        try:
            served.start()
            assert served.stop() == 0
            revision = other.revision()
            for lost in ((), ("broker.json",), ("moved.json", "processes.json")):
                for name in lost:
                    (tmp_path / "node" / name).unlink()
                with pytest.raises(
                    AssertionError, match=r"not in this etcd|in another etcd: start with that"
                ):
                    elsewhere.start()
            served.start()
            assert served.stop() == 0
            (tmp_path / "node" / "broker.json").unlink()
            alone.arguments = ["--etcd", other.url]
            with pytest.raises(AssertionError, match="which is not in this etcd"):
                alone.start()
            assert other.revision() == revision, "nothing was written there"
            assert not (tmp_path / "node" / "quarantine").exists()
        finally:
            for one in (served, alone, elsewhere):
                one.kill()
