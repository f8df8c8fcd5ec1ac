"""A web UI for Kafka, run for real: every call its pages make is made over the socket its pages use.

It is the Kafka part of the Quarkus Dev UI, which reads and changes a cluster through Apache Kafka's Java client.
Nightly: needs Java and Maven. Always true: what the UI asks of the broker passes a recording proxy, and the file that
`test_web_ui_replay.py` replays holds all of it; with MANSIO_TEST_RECORD=1 the file is written anew.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.paths import free_port
from support.process import served
from support.raw_peer import RawPeer
from support.recording_proxy import UNRECORDED, recording
from support.waiting import wait_until
from support.web_ui import GOLDEN, needs_java_and_maven, read_golden, running_ui, write_golden
from system.interop.clients import QUIET
from system.interop.conftest import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.json_rpc_socket import JsonRpcSocket
    from support.recording_proxy import RecordingProxy

MANY = 20
TOPICS = {"ui-plain": (3, {}), "ui-compacted": (1, {"cleanup.policy": "compact"}), "ui-many": (MANY, {})}
PAGED = ("ui-plain", "ui-compacted")
"""Whose records are looked at: the page opens a consumer for each partition."""
RECORDS = 25
COMMITTED = 10


class Shown(NamedTuple):
    """The UI, and what stands between it and the broker."""

    ui: JsonRpcSocket
    proxy: RecordingProxy
    broker_port: int

    def topic_ids(self) -> dict[str, bytes]:
        with RawPeer(self.broker_port) as raw:
            reported = raw.call(ApiKey.METADATA, 12, {"topics": None}).topics
        return {str(one.name): bytes(one.topic_id) for one in reported}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A UI over a broker with three topics, records in each, a group whose member is behind and one without members."""
    needs_java_and_maven()
    place = tmp_path_factory.mktemp("web_ui")
    port = free_port()
    address = f"127.0.0.1:{port}"
    arguments = [*ARGUMENTS, "--set", f"advertised_listeners={address}"]
    with (
        served(place / "data", arguments=arguments, http=False) as broker,
        recording(port, broker.kafka_port) as proxy,
    ):
        client = {"bootstrap.servers": address, "client.id": UNRECORDED, **QUIET}
        topics = [NewTopic(name, parts, 1, config=config) for name, (parts, config) in TOPICS.items()]
        admin = AdminClient(client)
        for created in admin.create_topics(topics).values():
            created.result(scaled(15))
        _write(client)
        member = _consumer(client, "ui-live")
        member.subscribe(["ui-plain"])
        wait_until(lambda: member.poll(0.1) is not None or bool(member.assignment()), 20)
        behind = [TopicPartition("ui-plain", 0, COMMITTED)]
        member.commit(offsets=behind, asynchronous=False)
        no_members = _consumer(client, "ui-empty")
        no_members.commit(offsets=behind, asynchronous=False)
        no_members.close()
        with running_ui(place / "ui", address) as ui:
            yield Shown(ui, proxy, broker.kafka_port)
        member.close()
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0


def _consumer(client: dict[str, Any], group: str) -> Consumer:
    return Consumer(
        {**client, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )


def _write(client: dict[str, Any]) -> None:
    producer = Producer(client)
    for name in TOPICS:
        for number in range(RECORDS):
            producer.produce(
                name, f"value {number}", f"key {number % 5}", partition=0, headers={"n": str(number)}
            )
    assert producer.flush(scaled(15)) == 0


@pytest.mark.row("A1")
def test_the_cluster_page(shown: Shown) -> None:
    reported = shown.ui.call("getInfo")
    (node,) = reported["clusterInfo"]["nodes"]
    assert (node["host"], node["port"], node["id"]) == ("127.0.0.1", shown.proxy.port, "1")
    assert reported["clusterInfo"]["controller"] == node
    assert reported["clusterInfo"]["id"]


@pytest.mark.row("A1")
def test_the_topics_page(shown: Shown) -> None:
    topics = {one["name"]: one for one in shown.ui.call("getTopics")}
    assert {name: one["partitionsCount"] for name, one in topics.items()} == {
        name: parts for name, (parts, _) in TOPICS.items()
    }
    assert topics["ui-plain"]["nmsg"] == RECORDS
    assert not topics["ui-plain"]["internal"]
    assert shown.ui.call("getPartitions", topicName="ui-many") == list(range(MANY))


@pytest.mark.row("A1")
def test_the_consumer_groups_page(shown: Shown) -> None:
    groups = {one["name"]: one for one in shown.ui.call("getInfo")["consumerGroups"]}
    assert set(groups) == {"ui-live", "ui-empty"}
    assert (groups["ui-empty"]["state"], groups["ui-empty"]["members"]) == ("EMPTY", [])
    live = groups["ui-live"]
    assert (live["state"], live["lag"]) == ("STABLE", RECORDS - COMMITTED)
    assert live["coordinatorHost"] == "127.0.0.1"
    (member,) = live["members"]
    lags = {(one["topic"], one["partition"]): one["lag"] for one in member["partitions"]}
    assert lags == {("ui-plain", 0): RECORDS - COMMITTED, ("ui-plain", 1): 0, ("ui-plain", 2): 0}


@pytest.mark.row("A1")
def test_the_messages_page(shown: Shown) -> None:
    for topic in PAGED:
        messages = shown.ui.call("topicMessages", topicName=topic)["messages"]
        assert {one["value"] for one in messages} == {f"value {number}" for number in range(RECORDS)[-20:]}
        (newest,) = [one for one in messages if one["offset"] == RECORDS - 1]
        assert newest["key"] == f"key {(RECORDS - 1) % 5}"
        assert newest["headers"] == {"n": str(RECORDS - 1)}


@pytest.mark.row("A1")
def test_topics_are_created_written_and_deleted(shown: Shown) -> None:
    new = {"topicName": "ui-new", "partitions": 2, "replications": 1, "configs": {"retention.ms": "3600000"}}
    assert "ui-new" in {one["name"] for one in shown.ui.call("createTopic", **new)}
    # This page does not look at what became of a creation; only the list of topics tells that one was refused.
    left = shown.ui.call("createTopic", **{**new, "topicName": "ui-three-copies", "replications": 3})
    assert {one["name"] for one in left} == {*TOPICS, "ui-new"}
    message = {"topicName": "ui-new", "partition": 1, "key": "k", "value": "v", "headers": {"a": "b"}}
    (written,) = shown.ui.call("createMessage", **message)["messages"]
    assert (written["partition"], written["offset"], written["key"], written["value"]) == (1, 0, "k", "v")
    assert written["headers"] == {"a": "b"}
    left = {one["name"] for one in shown.ui.call("deleteTopic", topicName="ui-new")}
    assert left == set(TOPICS)


@pytest.mark.row("A1")
def test_the_access_control_page(shown: Shown) -> None:
    reported = shown.ui.call("getAclInfo")
    assert (reported["aclOperations"], reported["entries"]) == ("NONE", [])


def visit_every_page(shown: Shown, topic: str) -> dict[str, bytes]:
    """Call everything once; the ids of the topics there were, the one created and deleted on the way among them."""
    ui, new = shown.ui, {"topicName": topic, "partitions": 2, "replications": 1, "configs": {}}
    for page in ("getInfo", "getTopics", "getAclInfo"):
        ui.call(page)
    ui.call("createTopic", **new)
    topic_ids = shown.topic_ids()
    ui.call("createTopic", **{**new, "topicName": f"{topic}-refused", "replications": 3})
    ui.call("createMessage", topicName=topic, partition=-1, key="k", value="v", headers={"a": "b"})
    ui.call("getPartitions", topicName=topic)
    for name in PAGED:
        ui.call("topicMessages", topicName=name)
    ui.call("getInfo")
    ui.call("deleteTopic", topicName=topic)
    return topic_ids


def test_what_the_ui_asked_is_what_is_replayed(shown: Shown) -> None:
    """To write the file again, run this test alone: other tests would add requests about topics of theirs."""
    topic_ids = visit_every_page(shown, "ui-visited")
    requests = shown.proxy.requests
    if os.environ.get("MANSIO_TEST_RECORD"):
        write_golden(GOLDEN, topic_ids, requests)
    _, golden = read_golden(GOLDEN)
    asked = {(one.api_key, one.version) for one in requests}
    assert asked == {(one.api_key, one.version) for one in golden}, "record it anew: MANSIO_TEST_RECORD=1"
