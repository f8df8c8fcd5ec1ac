"""Rolling upgrade of a cluster from the last release, and back, and the end of the upgrade, with the kept wheel."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
import zipfile
from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka import KafkaAdminClient

import mansio
from mansio.config.group_config import GROUP_CONFIG
from mansio.config.topic_config import TOPIC_CONFIG
from mansio.errors import FeatureNotFinalized, InvalidUpdateVersion, UnsupportedVersion
from mansio.metadata.feature_level import check_operations
from mansio.metadata.metadata_store import Keys, Put, encode
from support.cluster import CLUSTER_ID, cluster, on_same_processors
from support.forked_serve import IS_POSSIBLE
from support.machine import scaled
from support.paths import ROOT, mansio_command
from support.present import present
from support.process import inherited
from support.waiting import wait_until
from system.cluster.load import ClusterLoad, create_topic, say
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from mansio.blocking import Client
    from support.cluster import Cluster

WHEEL: Final = ROOT / "tests" / "fixtures" / "wheels" / "mansio-0.1.0-py3-none-any.whl"
LEVEL_KEY: Final = f"/mansio/{CLUSTER_ID}/featurelevel"
FINALIZE: Final = "run 'mansio cluster finalize'"


def first_release(directory: Path) -> list[str]:
    """The command that runs 0.1.0."""
    release = directory / "release"
    zipfile.ZipFile(WHEEL).extractall(release)
    return ["env", f"PYTHONPATH={release}", "PYTHONSAFEPATH=1", sys.executable, "-m", "mansio"]


def use(one: Cluster, node_id: int, command: list[str] | None) -> None:
    """What the next start of a broker runs; None: this version."""
    broker = one.brokers[node_id]
    broker.command, broker.is_forked = command or mansio_command(), command is None and IS_POSSIBLE


def finalize(one: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*mansio_command(), "cluster", "finalize", "--bootstrap-servers", one.bootstrap_servers]
    return subprocess.run(
        [*command, *options],
        env=inherited(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def check_first_release_is_refused(one: Cluster, node_id: int, old: list[str]) -> None:
    use(one, node_id, old)
    with pytest.raises(AssertionError, match="ended with 1"):
        one.start(node_id)
    last = one.brokers[node_id].text().splitlines()[-1]
    assert last == f"mansio: metadata {LEVEL_KEY} has schema 2; this version supports 1"


def create_user(client: Client) -> None:
    client.admin.users.create("alice", "a password of alice")


def create_topic_with_delays(client: Client) -> None:
    client.admin.create_topic("later", config={"mansio.delay.enable": "true"})


def delay_by_change(client: Client) -> None:
    client.admin.alter_topic_config("orders", {"mansio.delay.enable": "true"})


def deduplicate_by_default(client: Client) -> None:
    client.admin.alter_broker_config(None, {"mansio.dedup.ms": "1000"})


def order_by_key(client: Client) -> None:
    client.admin.alter_group_config("billing", {"mansio.share.order": "key"})


def begin_transaction(client: Client) -> None:
    with client.transaction("worker") as transaction:
        transaction.publish("orders", b"one")


NEWER: Final[tuple[Callable[[Client], Any], ...]] = (
    create_user,
    create_topic_with_delays,
    delay_by_change,
    deduplicate_by_default,
    order_by_key,
    begin_transaction,
)


class Members:
    """Two members of a group, which read what others publish; `seen` has the values."""

    def __init__(self, one: Cluster, topic: str) -> None:
        self.seen: set[bytes] = set()
        self.failures: list[str] = []
        self._reads = threading.Event()
        self._reads.set()
        self._settings = {
            "bootstrap.servers": one.bootstrap_servers,
            "group.id": "members",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 10_000,
            **QUIET,
        }
        self._threads = [threading.Thread(target=self._read, args=(topic,), daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _read(self, topic: str) -> None:
        consumer = Consumer(self._settings)
        consumer.subscribe([topic])
        while self._reads.is_set():
            for message in consumer.consume(500, 0.1):
                error = message.error()
                if error is None:
                    self.seen.add(present(message.value()))
                elif error.fatal():
                    self.failures.append(str(error))
        consumer.close()

    def stop(self) -> None:
        self._reads.clear()
        for thread in self._threads:
            thread.join(scaled(30))


class Workers:
    """A client that publishes jobs, and one that receives them in a share group; `published` and `received` have the
    values."""

    def __init__(self, one: Cluster, topic: str) -> None:
        self.published: list[bytes] = []
        self.received: set[bytes] = set()
        self.failures: list[str] = []
        self._publishes, self._receives = threading.Event(), threading.Event()
        self._publishes.set()
        self._receives.set()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, one.bootstrap_servers, topic), daemon=True)
            for work in (self._publish, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[str, str], None], bootstrap_servers: str, topic: str) -> None:
        try:
            work(bootstrap_servers, topic)
        except Exception as error:  # noqa: BLE001  # reported: a thread that dies in silence would weaken the test
            self.failures.append(repr(error))

    def _publish(self, bootstrap_servers: str, topic: str) -> None:
        pause = threading.Event()
        with mansio.blocking.connect(bootstrap_servers) as client:
            while self._publishes.is_set():
                value = b"%d" % len(self.published)
                client.publish(topic, value)
                self.published.append(value)
                pause.wait(0.05)

    def _receive(self, bootstrap_servers: str, topic: str) -> None:
        with mansio.blocking.connect(bootstrap_servers) as client:
            client.admin.alter_group_config("workers", {"share.auto.offset.reset": "earliest"})
            with client.receive(topic, group="workers") as receiver:
                while self._receives.is_set():
                    messages = receiver.poll(200)
                    self.received.update(present(each.value) for each in messages)
                    with contextlib.suppress(mansio.LeaseLost):  # another leader; it is delivered again
                        receiver.ack(messages)

    def stop_publishing(self) -> None:
        self._publishes.clear()
        self._threads[0].join(scaled(30))

    def stop(self) -> None:
        self.stop_publishing()
        self._receives.clear()
        self._threads[1].join(scaled(30))


def replace_all(one: Cluster, load: ClusterLoad, command: list[str] | None) -> list[float]:
    """Replace the version of each broker, one at a time, as operators do; return the seconds for each."""
    took_s = []
    for node_id in one.brokers:
        begin = time.monotonic()
        assert one.brokers[node_id].stop() == 0, one.tails()
        use(one, node_id, command)
        one.start(node_id)
        one.wait_in_sync(load.topic)
        load.wait_resumed(time.monotonic())
        took_s.append(time.monotonic() - begin)
    return took_s


def failure_of(future: Any) -> str:
    with pytest.raises(KafkaException) as caught:
        future.result(scaled(20))
    return str(caught.value)


def create_user_of_a_stock_client(admin: AdminClient) -> Future[None]:
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    user = UserScramCredentialUpsertion("alice", info, b"a password of alice")
    created: Future[None] = admin.alter_user_scram_credentials([user])["alice"]
    return created


def create_acl_of_a_stock_client(admin: AdminClient) -> Future[None]:
    acl = AclBinding(
        ResourceType.TOPIC,
        "rolled",
        ResourcePatternType.LITERAL,
        "User:alice",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    created: Future[None] = admin.create_acls([acl])[acl]
    return created


@pytest.mark.full
@pytest.mark.row("C6")
@pytest.mark.timeout(400)
def test_cluster_is_upgraded_back_and_again_under_load_and_loses_nothing(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    old = first_release(tmp_path)
    with cluster(tmp_path, commands=dict.fromkeys((1, 2, 3), old)) as one:
        load = ClusterLoad(one, "rolled")
        load.create_topic(segment_bytes="1000000")
        load.begin()
        members = Members(one, load.topic)
        create_topic(one, "jobs", 2)
        workers = Workers(one, "jobs")
        try:
            begin = time.monotonic()
            up_s = replace_all(one, load, None)
            assert not one.entries("featurelevel")
            back_s = replace_all(one, load, old)
            again_s = replace_all(one, load, None)
            admin = AdminClient({"bootstrap.servers": one.bootstrap_servers, **QUIET})
            assert FINALIZE in failure_of(create_user_of_a_stock_client(admin))
            assert "SECURITY_DISABLED" in failure_of(create_acl_of_a_stock_client(admin))
            for broker in one.brokers.values():
                assert (broker.data / "format").read_text() == "mansio data directory, format 1\n"
            kafka_python = KafkaAdminClient(bootstrap_servers=one.bootstrap_servers.split(","))
            kafka_python.update_features({"mansio.version": 2})
            kafka_python.close()
            with mansio.blocking.connect(one.bootstrap_servers) as client:
                wait_until(
                    lambda: {each.level for each in client.admin.cluster.features().brokers} == {2}, 20
                )
            create_user_of_a_stock_client(admin).result(scaled(20))
            own = one.brokers[3].arguments
            for broker in one.brokers.values():
                broker.arguments = [
                    *broker.arguments,
                    "--set",
                    "authorizer=acl",
                    "--set",
                    "super_users=User:ANONYMOUS",
                ]
            replace_all(one, load, None)
            create_acl_of_a_stock_client(admin).result(scaled(20))
            load.wait_resumed(time.monotonic())
            took_s = time.monotonic() - begin
            verdict = load.judge()
            wanted = {each.value for each in load.history.acknowledged}
            one.wait(lambda: members.failures or wanted <= members.seen, "the group has read everything")
            assert not members.failures, members.failures
            workers.stop_publishing()
            one.wait(
                lambda: workers.failures or set(workers.published) <= workers.received,
                "all jobs are received",
            )
            assert not workers.failures, workers.failures
        finally:
            load.stop()
            members.stop()
            workers.stop()
        say(
            "rolling upgrade",
            up_s=up_s,
            back_s=back_s,
            again_s=again_s,
            took_s=took_s,
            acknowledged=verdict.acknowledged,
            jobs=len(workers.published),
            processors=on_same_processors(),
        )
        assert one.brokers[3].stop() == 0
        one.brokers[3].arguments = own
        check_first_release_is_refused(one, 3, old)
        one.check_logs()


@pytest.mark.full
@pytest.mark.row("C6")
@pytest.mark.timeout(120)
def test_settings_of_a_later_version_and_mixed_versions_keep_a_broker_or_the_end_of_the_upgrade_away(
    tmp_path: Path,
) -> None:
    old = first_release(tmp_path)
    with cluster(tmp_path, brokers=2, commands={1: old, 2: old}) as one:
        # With users, beside a broker that serves everybody
        assert one.brokers[1].stop() == 0
        use(one, 1, None)
        own = one.brokers[1].arguments
        secured = ["--set", "listener_security_protocol_map=PLAINTEXT:SASL_PLAINTEXT"]
        one.brokers[1].arguments = [*own, *secured, "--set", "authorizer=acl"]
        with pytest.raises(AssertionError, match="ended with"):
            one.start(1)
        last = one.brokers[1].text().splitlines()[-1]
        assert last.startswith("mansio: listeners: PLAINTEXT authenticates its clients: "), last
        assert last.endswith(FINALIZE), last
        one.brokers[1].arguments = own
        one.start(1)

        # The other one runs the last release, or ran it last
        with mansio.blocking.connect(one.brokers[1].bootstrap_servers) as client:
            found = client.admin.cluster.features()
            assert (found.level, [each.highest for each in found.brokers]) == (1, [2, 1])
            cluster_admin = client.admin.cluster
            client.admin.create_topic("still", replication_factor=1)
            (place,) = one.places("still")
            with pytest.raises(UnsupportedVersion, match=FINALIZE):
                cluster_admin.alter_reassignments({("still", 0): [3 - place.leader]})
            assert one.places("still") == [place]
            with pytest.raises(InvalidUpdateVersion, match="broker 2 supports 1; upgrade it"):
                cluster_admin.raise_feature_level(2)
            assert one.brokers[2].stop() == 0
            one.wait(lambda: one.entries("brokers/2/reg")[""]["state"] == "fenced", "it counts as gone")
            with pytest.raises(InvalidUpdateVersion, match="broker 2 supports 1; upgrade it"):
                cluster_admin.raise_feature_level(2)
            use(one, 2, None)
            one.start(2)
            assert one.brokers[2].stop() == 0
            one.wait(lambda: one.entries("brokers/2/reg")[""]["state"] == "fenced", "it counts as gone")
            cluster_admin.raise_feature_level(2)
        one.check_logs()


SETTINGS: Final = """
from mansio.config import group_config, topic_config
print(*topic_config.TOPIC_CONFIG.keys, *group_config.GROUP_CONFIG.keys)
"""


@pytest.mark.full
@pytest.mark.row("C6")
def test_each_setting_that_the_last_release_does_not_have_waits_for_the_end_of_the_upgrade(
    tmp_path: Path,
) -> None:
    command = [*first_release(tmp_path)[:-2], "-c", SETTINGS]
    known = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(60), check=True
    ).stdout.split()
    assert "retention.ms" in known
    keys = Keys(CLUSTER_ID)
    for key, names in ((keys.topic("t"), TOPIC_CONFIG.keys), (keys.group_config("g"), GROUP_CONFIG.keys)):
        for name in set(names) - set(known):
            put = Put(key, encode({"configs": {name: "1"}}, "w"))
            with pytest.raises(FeatureNotFinalized, match=re.escape(name)):
                check_operations(1, [put])


@pytest.mark.full
@pytest.mark.row("C6")
@pytest.mark.timeout(120)
def test_broker_of_the_last_release_that_runs_when_the_level_is_stored_ends_its_session(
    tmp_path: Path,
) -> None:
    """One that registered with a new node id at that moment."""
    old = first_release(tmp_path)
    with cluster(tmp_path, brokers=1, commands={1: old}) as one:
        one.put_entry("featurelevel", {"schema": 2, "writer": "", "level": 2})
        one.wait(lambda: not one.sessions(), "its session has ended")
        assert f"metadata {LEVEL_KEY} has schema 2" in one.brokers[1].text()


@pytest.mark.row("C6")
@pytest.mark.timeout(120)
def test_what_the_last_release_does_not_know_is_refused_until_the_upgrade_is_finalized(
    tmp_path: Path,
) -> None:
    old = first_release(tmp_path)
    with cluster(tmp_path, brokers=1, commands={1: old}) as one:
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            client.admin.create_topic("orders", partitions=1)
        done = finalize(one, "--yes")
        assert (done.returncode, done.stderr) == (
            1,
            "mansio: upgrade all brokers first; of an older version: 1\n",
        )
        assert one.brokers[1].stop() == 0
        use(one, 1, None)
        one.start(1)
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            for change in NEWER:
                with pytest.raises(UnsupportedVersion, match=FINALIZE):
                    change(client)
            assert client.admin.cluster.features().level == 1
            done = finalize(one, "--dry-run")
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("feature level 1 (0.1)\n")
            assert done.stderr == "mansio: all brokers support level 2\n"
            assert not one.entries("featurelevel")
            done = finalize(one, "--yes")
            assert done.returncode == 0, done.stderr
            assert one.entries("featurelevel")[""]["schema"] == 2
            for change in NEWER:
                change(client)
            with pytest.raises(InvalidUpdateVersion, match="there is no way back"):
                client.admin.cluster.raise_feature_level(1)
        assert one.brokers[1].stop() == 0
        # Without the directory, which has transactions now and is refused before anything in etcd is read.
        one.forget_data(1)
        check_first_release_is_refused(one, 1, old)
        one.check_logs()
