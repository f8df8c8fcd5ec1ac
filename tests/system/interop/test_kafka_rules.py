"""Rules of Kafka's brokers that clients and tools rely on, each shown by a client, or over a plain socket where no
client library for Python can express it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_fetch
from support.machine import scaled
from support.process import served
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until
from system.interop.clients import QUIET

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.wire.codec.messages import Struct

OFFSETS_TOPIC = "__consumer_offsets"
MEMBER_ID_REQUIRED, NON_EMPTY_GROUP, GROUP_SUBSCRIBED_TO_TOPIC = 79, 68, 86
UNKNOWN_TOPIC_OR_PARTITION, GROUP_ID_NOT_FOUND = 3, 69


@pytest.fixture
def raw(bootstrap_servers: str) -> Iterator[RawPeer]:
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as peer:
        yield peer


# Metadata


def test_metadata_by_id_carry_an_empty_name(raw: RawPeer, unique: str) -> None:
    """As Kafka's Java client requests it for the assignment of a group: the id counts, the name has its default."""
    raw.create_topic(unique)
    (named,) = raw.call(ApiKey.METADATA, 12, {"topics": [{"name": unique}]}).topics
    (found,) = raw.call(ApiKey.METADATA, 12, {"topics": [{"name": "", "topic_id": named.topic_id}]}).topics
    assert (found.error_code, found.name, found.topic_id) == (0, unique, named.topic_id)


def test_a_topic_that_would_be_created_with_kafkas_default_is_logged_once(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with RawPeer(int(broker.bootstrap_servers.rpartition(":")[2])) as peer:
            for _ in range(3):
                peer.call(ApiKey.METADATA, 12, {"topics": [{"name": "unknown"}]})
            fields = {"topics": [{"name": "other"}], "allow_auto_topic_creation": False}
            peer.call(ApiKey.METADATA, 12, fields)
            for number in range(300):
                peer.call(ApiKey.METADATA, 12, {"topics": [{"name": f"many-{number}"}]})
        lines = [line for line in broker.text().splitlines() if "auto_create_topics_enable" in line]
        assert sum("topic=unknown" in line for line in lines) == 1
        assert not any("topic=other" in line for line in lines)
        assert len(lines) < 150, "an endless list of names fills the log"


# Groups


def test_an_expression_matches_internal_topics(bootstrap_servers: str, unique: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": unique,
            "group.protocol": "consumer",
            **QUIET,
        }
    )
    try:
        consumer.subscribe(["^__consumer_off.*"])

        def owns_partitions() -> bool:
            consumer.poll(0.1)
            return {one.topic for one in consumer.assignment()} == {OFFSETS_TOPIC}

        wait_until(owns_partitions, 60)
    finally:
        consumer.close()


def test_looking_for_a_coordinator_creates_the_topic_of_the_offsets(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0") as broker:
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
            peer.call(ApiKey.FIND_COORDINATOR, 3, {"key": "g", "key_type": 0})
        admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
        assert OFFSETS_TOPIC in admin.list_topics(timeout=scaled(15)).topics


def subscription(*topics: str) -> bytes:
    """Metadata of version 1 without its owned partitions, as @platformatic/kafka sends it. Kafka reads the fields of
    version 0, which all versions begin with."""
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 1, len(topics)) + names + struct.pack(">i", -1)


def join(raw: RawPeer, group: str, metadata: bytes, *, protocol_type: str = "consumer") -> None:
    """The only member of a group that becomes stable."""
    fields: dict[str, Any] = {
        "group_id": group,
        "session_timeout_ms": 30_000,
        "rebalance_timeout_ms": 30_000,
        "member_id": "",
        "protocol_type": protocol_type,
        "protocols": [{"name": "range", "metadata": metadata}],
    }
    first = raw.call(ApiKey.JOIN_GROUP, 5, fields)
    assert first.error_code == MEMBER_ID_REQUIRED
    joined = raw.call(ApiKey.JOIN_GROUP, 5, {**fields, "member_id": first.member_id})
    assert joined.error_code == 0
    sync = {"group_id": group, "generation_id": joined.generation_id, "member_id": joined.member_id}
    assert raw.call(ApiKey.SYNC_GROUP, 3, sync | {"assignments": []}).error_code == 0


def commit(raw: RawPeer, group: str, topic: str) -> None:
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 0}]}],
    }
    assert raw.call(ApiKey.OFFSET_COMMIT, 5, fields).topics[0].partitions[0].error_code == 0


def delete_offset(raw: RawPeer, group: str, topic: str) -> Struct:
    topics = [{"name": topic, "partitions": [{"partition_index": 0}]}]
    return raw.call(ApiKey.OFFSET_DELETE, 0, {"group_id": group, "topics": topics})


def test_offsets_are_deleted_of_topics_to_which_no_member_of_a_classic_group_subscribes(
    raw: RawPeer, unique: str
) -> None:
    read, other = f"{unique}-read", f"{unique}-other"
    raw.create_topic(read)
    raw.create_topic(other)
    for topic in (read, other):
        commit(raw, unique, topic)
    join(raw, unique, subscription(read))
    (refused,) = delete_offset(raw, unique, read).topics[0].partitions
    assert refused.error_code == GROUP_SUBSCRIBED_TO_TOPIC
    (deleted,) = delete_offset(raw, unique, other).topics[0].partitions
    assert deleted.error_code == 0


def test_offsets_of_a_classic_group_whose_members_subscribe_to_nothing_are_deleted(
    raw: RawPeer, unique: str
) -> None:
    raw.create_topic(unique)
    commit(raw, unique, unique)
    join(raw, unique, subscription())
    (deleted,) = delete_offset(raw, unique, unique).topics[0].partitions
    assert deleted.error_code == 0


@pytest.mark.parametrize("metadata", [b"", b"\xff\xff\x00\x00\x00\x00"])
def test_a_consumer_whose_subscription_is_unreadable_may_read_every_topic(
    raw: RawPeer, unique: str, metadata: bytes
) -> None:
    raw.create_topic(unique)
    commit(raw, unique, unique)
    join(raw, unique, metadata)
    (refused,) = delete_offset(raw, unique, unique).topics[0].partitions
    assert refused.error_code == GROUP_SUBSCRIBED_TO_TOPIC


def test_offsets_of_a_group_of_another_protocol_type_are_kept_while_it_has_members(
    raw: RawPeer, unique: str
) -> None:
    raw.create_topic(unique)
    commit(raw, unique, unique)
    join(raw, unique, subscription(), protocol_type="connect")
    assert delete_offset(raw, unique, unique).error_code == NON_EMPTY_GROUP


# Share groups


def acquired(
    raw: RawPeer, group: str, topic_id: bytes, mode: int, *, max_records: int
) -> list[tuple[int, int]]:
    """The offset ranges that the first fetch of a new member acquires."""
    member = f"{group}-{mode}"
    raw.send(
        share_fetch.encode_request(
            2,
            7,
            "raw",
            group_id=group,
            member_id=member,
            session_epoch=0,
            topics=[(topic_id, [share_fetch.AckPartition(0, [])])],
            max_wait_ms=10_000,
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=max_records,
            batch_size=max_records,
            acquire_mode=mode,
        )
    )
    frame = raw.frame()
    assert frame is not None
    response = share_fetch.decode_response(2, frame)
    assert response.error_code == 0, response.error_message
    (partition,) = response.topics[0][1]
    assert partition.error_code == 0, partition.error_message
    return [(first, last) for first, last, _ in partition.acquired]


def altered(raw: RawPeer, group: str, topic: str, start_offset: int) -> Struct:
    partitions = [{"partition_index": 0, "start_offset": start_offset}]
    fields = {"group_id": group, "topics": [{"topic_name": topic, "partitions": partitions}]}
    return raw.call(ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, fields)


def test_altering_the_offsets_of_an_unknown_share_group_creates_it(raw: RawPeer, unique: str) -> None:
    """KAFKA-19662: an administrator sets where a group will begin before its first member comes."""
    raw.create_topic(unique)
    raw.produce(unique, batch_of(*(b"v" for _ in range(10))))
    (topic,) = raw.call(ApiKey.METADATA, 12, {"topics": [{"name": unique}]}).topics
    unknown = altered(raw, f"{unique}-unused", "no-topic", 5)
    assert unknown.error_code == 0
    assert unknown.responses[0].partitions[0].error_code == UNKNOWN_TOPIC_OR_PARTITION
    answer = altered(raw, unique, unique, 6)
    assert answer.error_code == 0, answer.error_message
    assert answer.responses[0].partitions[0].error_code == 0
    listed = {each.group_id: each for each in raw.call(ApiKey.LIST_GROUPS, 5, {}).groups}
    assert (listed[unique].group_type, listed[unique].group_state) == ("share", "Empty")
    assert f"{unique}-unused" not in listed
    assert acquired(raw, unique, bytes(topic.topic_id), share_fetch.RECORD_LIMIT, max_records=100) == [(6, 9)]


def test_a_group_of_another_type_does_not_become_a_share_group(raw: RawPeer, unique: str) -> None:
    raw.create_topic(unique)
    commit(raw, unique, unique)
    assert altered(raw, unique, unique, 0).error_code == GROUP_ID_NOT_FOUND
    listed = {each.group_id: each.group_type for each in raw.call(ApiKey.LIST_GROUPS, 5, {}).groups}
    assert listed[unique] == "classic"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(share_fetch.BATCH_OPTIMIZED, [(0, 99)]), (share_fetch.RECORD_LIMIT, [(0, 9)])],
    ids=["batch-optimized", "record-limit"],
)
def test_only_a_record_limit_splits_a_batch(
    raw: RawPeer, bootstrap_servers: str, unique: str, mode: int, expected: list[tuple[int, int]]
) -> None:
    raw.create_topic(unique)
    for _ in range(2):
        raw.produce(unique, batch_of(*(b"v" for _ in range(100))))
    (topic,) = raw.call(ApiKey.METADATA, 12, {"topics": [{"name": unique}]}).topics
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    reset = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, unique, incremental_configs=[reset])
    for result in admin.incremental_alter_configs([resource]).values():
        result.result(scaled(15))
    assert acquired(raw, unique, bytes(topic.topic_id), mode, max_records=10) == expected
