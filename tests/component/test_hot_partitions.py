"""Hot partitions of one broker over real sockets: what is hot is named with its key, keys are shown to those who may
read the topic, and a broker on which nothing is hot does nothing for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

import mansio
from mansio.broker import hot_partitions
from mansio.state import hot_partitions as hot_partitions_state
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authorization.acls import CLUSTER_NAME, Operation
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from support.authorization import CLUSTER, PEER, TOPIC, acl
from support.raw_peer import RawPeer
from support.sasl_broker import log_in, sasl_broker
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTITIONS: Final = 4
WINDOW_S: Final = 10
RECORDS: Final = 1_500
"""Of the hot partition in a window: more than 100 in a second."""
KEY: Final = b"customer 7"
PASSWORD: Final = "correct horse"
SOURCES: Final = tuple(
    str(Path(each.__file__).parent) for each in (hot_partitions, hot_partitions_state) if each.__file__
)


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


def publish_window(client: mansio.blocking.Client, topic: str, rates: dict[int, int]) -> None:
    """Publish records of one window. Of those in a partition, three of four have one key."""
    for partition, records in rates.items():
        keys = (KEY if number % 4 else b"other %d" % (number % 13) for number in range(records))
        client.publish_many(
            topic, [mansio.OutgoingRecord(b"v", key=key, partition=partition) for key in keys]
        )


def heat(broker: TestBroker, client: mansio.blocking.Client, topic: str, is_done: Callable[[], bool]) -> None:
    """Let windows pass in which partition 1 takes in most records, until `is_done`."""
    for _ in range(20):
        publish_window(client, topic, {1: RECORDS, 0: 20, 2: 20})
        broker.clock.advance(seconds=WINDOW_S)
        if is_done():
            return
    pytest.fail("20 windows did not do it")


def hot_of(client: mansio.blocking.Client) -> list[mansio.HotPartition]:
    return [*client.admin.cluster.hot_partitions().partitions]


@pytest.mark.row("T6")
def test_a_hot_partition_is_named_with_its_key_and_remedy_until_its_load_ends(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("orders", partitions=PARTITIONS)
    heat(broker, client, "orders", lambda: any(each.remedies for each in hot_of(client)))
    (found,) = hot_of(client)
    assert (found.topic, found.partition, found.leader) == ("orders", 1, 1)
    assert found.rate >= 100
    assert found.factor is not None
    assert found.factor > 20
    assert found.keys[0].key == KEY
    assert 0.6 <= found.keys[0].share_min <= 0.75 <= found.keys[0].share_max <= 0.8
    (remedy,) = found.remedies
    assert (remedy.kind, remedy.key) == (mansio.RemedyKind.ISOLATE_KEY, KEY)
    service = broker._broker.service.hot_partitions  # type: ignore[union-attr]
    assert [service.is_hot("orders", index) for index in range(PARTITIONS)] == [False, True, False, False]
    metrics = httpx.get(f"{broker.http_url}/metrics").text
    assert "mansio_hot_partitions 1.0" in metrics
    assert KEY.decode() not in metrics, "keys are no labels"

    # The topic can forbid it; what was sampled before is not shown.
    client.admin.alter_topic_config("orders", {"mansio.hot.keys.enable": "false"})
    (found,) = hot_of(client)
    assert (found.key_access, found.keys, found.remedies) == ("not sampled", (), ())

    for _ in range(6):
        broker.clock.advance(seconds=WINDOW_S)
    assert hot_of(client) == []


@pytest.mark.full
@pytest.mark.row("T6")
def test_the_command_and_http_show_hot_partitions(broker: TestBroker) -> None:
    client, shell = broker.client(), Shell(broker.bootstrap_servers)
    assert "no partition is hot" in (shell("cluster", "hot"), shell.errors)[1]
    client.admin.create_topic("orders", partitions=PARTITIONS)
    heat(broker, client, "orders", lambda: any(each.remedies for each in hot_of(client)))
    shown = shell.json("cluster", "hot")
    assert [(each["topic"], each["partition"]) for each in shown["partitions"]] == [("orders", 1)]
    assert shown["partitions"][0]["keys"][0]["key"] == KEY.decode()
    assert shown["partitions"][0]["remedies"][0]["kind"] == "isolate-key"
    assert shell.json("cluster", "hot", "--keys", "0")["partitions"][0]["key_access"] == "not requested"
    table = shell("cluster", "hot")
    assert KEY.decode() in table
    assert "isolate-key" in table
    assert "nothing to apply" in (shell("cluster", "hot", "--apply"), shell.errors)[1]
    answer = httpx.get(f"{broker.http_url}/v1/cluster/hot-partitions").json()
    assert answer["partitions"][0]["keys"][0]["key"] == KEY.decode()
    assert answer["partitions"][0]["remedies"][0]["kind"] == "isolate-key"


@pytest.mark.full
def test_even_load_flags_nothing_and_reads_no_batch(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("even", partitions=PARTITIONS)
    client.admin.create_topic("alone", partitions=1)
    for _ in range(8):
        publish_window(client, "even", dict.fromkeys(range(PARTITIONS), RECORDS))
        publish_window(client, "alone", {0: 4 * RECORDS})
        broker.clock.advance(seconds=WINDOW_S)
        assert hot_of(client) == []
    monitor = broker._broker.service.hot_partitions._monitor  # type: ignore[union-attr]
    assert monitor.load.rate >= 500
    assert monitor.sampler.batch_count == 0
    assert monitor._exchange.request_count == 0


@pytest.mark.full
def test_a_topic_grows_only_with_the_consent_and_never_if_it_is_compacted(broker: TestBroker) -> None:
    client = broker.client()
    for topic, policy in (("plain", "delete"), ("compacted", "compact")):
        client.admin.create_topic(topic, partitions=PARTITIONS, config={"cleanup.policy": policy})

    def is_sampled() -> bool:
        publish_many_keys("compacted")
        return len([each for each in hot_of(client) if each.sampled_records >= 700]) == 2

    def publish_many_keys(topic: str) -> None:
        keys = (b"%d" % number for number in range(RECORDS))
        client.publish_many(topic, [mansio.OutgoingRecord(b"v", key=key, partition=2) for key in keys])

    for _ in range(20):
        publish_many_keys("plain")
        if is_sampled():
            break
        broker.clock.advance(seconds=WINDOW_S)
    by_topic = {each.topic: each for each in hot_of(client)}
    assert [each.kind for each in by_topic["plain"].remedies] == [mansio.RemedyKind.GROW_TOPIC]
    assert by_topic["compacted"].remedies == ()
    shell = Shell(broker.bootstrap_servers)
    shell("cluster", "hot", "--accept-new-key-order", code=2)
    assert "only with --apply" in shell.errors
    assert "nothing to apply" in (shell("cluster", "hot", "--apply", "--yes"), shell.errors)[1]
    done = shell.json("cluster", "hot", "--apply", "--accept-new-key-order", "--yes")
    assert done["executed"] == [
        {"change": "grow-topic", "topic": "plain", "partitions": 2 * PARTITIONS, "error": None}
    ]
    assert len(client.admin.describe_topic("plain").partitions) == 2 * PARTITIONS
    assert len(client.admin.describe_topic("compacted").partitions) == PARTITIONS


@pytest.mark.full
def test_a_group_that_is_behind_is_the_reason_for_parallel_consumers(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("slow", partitions=PARTITIONS)
    client.publish("slow", b"first", partition=1)
    with client.consume("slow", group="readers", from_="earliest") as consumer:
        assert next(iter(consumer)).value == b"first"
        consumer.commit()
        heat(
            broker,
            client,
            "slow",
            lambda: any(
                remedy.kind == mansio.RemedyKind.PARALLEL_CONSUMERS and remedy.group == "readers"
                for each in hot_of(client)
                for remedy in each.remedies
            ),
        )


def test_a_caller_without_read_sees_no_keys_and_without_describe_nothing(tmp_path: Path) -> None:
    settings = {
        "authorizer": "acl",
        "super_users": "User:admin",
        "hot_partition_window_ms": 100,
        "hot_partition_records_per_second_min": 1,
    }
    with sasl_broker(tmp_path / "data", **settings) as broker:
        for user in ("alice", "admin"):
            broker.set_user(user, PASSWORD, (ScramMechanism.SHA_256,))
        service = broker.broker.service
        login: dict[str, Any] = {"user": "admin", "password": PASSWORD, "mechanism": "SCRAM-SHA-256"}
        with mansio.blocking.connect(broker.address, **login) as client, RawPeer(broker.port) as alice:
            client.admin.create_topic("orders", partitions=PARTITIONS)

            def is_sampled() -> bool:
                publish_window(client, "orders", {1: 200})
                return any(each.keys for each in hot_of(client))

            wait_until(is_sampled, what="the keys of the hot partition are known")
            assert log_in(alice, "SCRAM-SHA-256", "alice", PASSWORD).error_code == 0

            def ask(keys_max: int = 5) -> Any:
                return alice.call(ApiKey.DESCRIBE_HOT_PARTITIONS, 0, {"keys_max": keys_max})

            def allow(*acls: Any) -> None:
                assert set(broker.run(service.acls.create_each(acls, caller=PEER))) == {None}

            assert (ask().error_code, ask().partitions) == (31, [])
            allow(acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE), acl(TOPIC, "orders", Operation.DESCRIBE))
            wait_until(is_sampled, what="it is hot still")
            (found,) = ask().partitions
            assert (found.topic, found.partition_index) == ("orders", 1)
            assert (found.key_access, found.sampled_records, found.keys) == (2, 0, [])
            allow(acl(TOPIC, "orders", Operation.READ))
            wait_until(is_sampled, what="it is hot still")
            (found,) = ask().partitions
            assert found.key_access == 0
            assert bytes(found.keys[0].key) == KEY
            assert ask(0).partitions[0].key_access == 3


def test_an_append_makes_no_call_for_hot_partitions(broker: TestBroker) -> None:
    """Nor does a batch: all is done at the end of a window."""
    client = broker.client()
    client.admin.create_topic("orders", partitions=PARTITIONS)
    loop = broker._broker.server.loop  # type: ignore[union-attr]
    calls: list[str] = []
    all_calls = 0

    def count(frame: Any, event: str, _argument: object) -> None:
        nonlocal all_calls
        if event == "call":
            all_calls += 1
            if frame.f_code.co_filename.startswith(SOURCES):
                calls.append(frame.f_code.co_qualname)

    broker._run_on_loop(_in_loop(lambda: sys.setprofile(count)))
    try:
        for _ in range(20):
            publish_window(client, "orders", {1: 100})
    finally:
        broker._run_on_loop(_in_loop(lambda: sys.setprofile(None)))
    assert loop.is_running()
    assert all_calls > 1_000
    assert calls == []


async def _in_loop(work: Callable[[], object]) -> None:
    work()
