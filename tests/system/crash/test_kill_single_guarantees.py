"""kill -9 immediately after a response, once for each kind of acknowledged change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic

import mansio
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.process import served
from support.raw_peer import RawPeer, batch_of
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from pathlib import Path

    from support.process import ServedBroker

OUT_OF_ORDER_SEQUENCE_NUMBER = 45
INVALID_PRODUCER_EPOCH = 47


def restart_by_kill(broker: ServedBroker) -> None:
    broker.kill()
    broker.start()


@pytest.mark.row("P3")
def test_batch_sent_again_after_a_kill_is_known_and_not_stored_twice(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with RawPeer(broker.kafka_port) as peer:
            peer.create_topic("once")
            made = peer.call(ApiKey.INIT_PRODUCER_ID, 4, {"transaction_timeout_ms": 1000})
            identity = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
            batches = [batch_of(b"a", b"b", base_sequence=2 * number, **identity) for number in range(5)]
            first = [peer.produce("once", batch) for batch in batches]
            assert [one.base_offset for one in first] == [0, 2, 4, 6, 8]
        restart_by_kill(broker)
        with RawPeer(broker.kafka_port) as peer:
            again = [peer.produce("once", batch) for batch in batches]
            assert [(one.error_code, one.base_offset) for one in again] == [(0, n) for n in (0, 2, 4, 6, 8)]
            assert peer.end_offset("once") == 10
            skipped = peer.produce("once", batch_of(b"x", base_sequence=11, **identity))
            assert skipped.error_code == OUT_OF_ORDER_SEQUENCE_NUMBER
            following = peer.produce("once", batch_of(b"c", base_sequence=10, **identity))
            assert (following.error_code, following.base_offset) == (0, 10)


@pytest.mark.row("D2", "D5")
def test_lease_keeps_the_duration_that_its_member_has_chosen(tmp_path: Path) -> None:
    hour_ms, partition = 3_600_000, mansio.TopicPartition("jobs", 0)

    async def lease(broker: ServedBroker) -> None:
        async with mansio.connect(broker.bootstrap_servers) as client:
            await client.admin.create_topic("jobs", partitions=1)
            await client.admin.alter_group_config("workers", {"share.auto.offset.reset": "earliest"})
            await client.publish_many("jobs", [b"0", b"1"])
            receiver = client.receive("jobs", group="workers", lease_ms=hour_ms)
            await receiver.start()
            messages: list[Any] = []
            while len(messages) < 2:
                messages += await receiver.poll()
            await messages[1].extend(2 * hour_ms)
            broker.kill()
            broker.start()
            leases = (await client.admin.shares.leases("workers", [partition], ranges_max=9))[partition]
            assert leases is not None
            found = [(one.first_offset, one.last_offset, one.lease_ms) for one in leases.ranges]
            assert found == [(0, 0, hour_ms), (1, 1, 2 * hour_ms)]

    with served(tmp_path / "data", http=False) as broker:
        asyncio.run(asyncio.wait_for(lease(broker), scaled(60)))


@pytest.mark.full
@pytest.mark.row("P3")
def test_producer_ids_are_never_given_out_twice(tmp_path: Path) -> None:
    given = []
    with served(tmp_path / "data", http=False) as broker:
        for _ in range(3):
            with RawPeer(broker.kafka_port) as peer:
                given += [
                    peer.call(ApiKey.INIT_PRODUCER_ID, 4, {"transaction_timeout_ms": 1000}).producer_id
                    for _ in range(3)
                ]
            restart_by_kill(broker)
    assert len(set(given)) == len(given)


@pytest.mark.row("L1")
def test_created_grown_altered_and_deleted_topics_stay_so(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        topics = [
            NewTopic("kept", 3, 1, config={"retention.ms": "12345678"}),
            NewTopic("grown", 1, 1),
            NewTopic("gone", 2, 1),
        ]
        for done in admin.create_topics(topics).values():
            done.result(scaled(15))
        admin.create_partitions([NewPartitions("grown", 5)])["grown"].result(scaled(15))
        admin.delete_topics(["gone"])["gone"].result(scaled(15))
        restart_by_kill(broker)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        found = admin.list_topics(timeout=scaled(15)).topics
        counts = {name: len(topic.partitions) for name, topic in found.items() if not name.startswith("__")}
        assert counts == {"kept": 3, "grown": 5}
        resource = ConfigResource(ConfigResource.Type.TOPIC, "kept")
        configs = admin.describe_configs([resource])[resource].result(scaled(15))
        assert configs["retention.ms"].value == "12345678"


@pytest.mark.row("L1", "L2")
def test_topic_deleted_and_created_again_does_not_bring_old_records_back(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with RawPeer(broker.kafka_port) as peer:
            peer.create_topic("phoenix")
            assert peer.produce("phoenix", batch_of(b"old", b"older")).base_offset == 0
            deleted = peer.call(ApiKey.DELETE_TOPICS, 5, {"topic_names": ["phoenix"], "timeout_ms": 10_000})
            assert deleted.responses[0].error_code == 0
            peer.create_topic("phoenix")
        restart_by_kill(broker)
        with RawPeer(broker.kafka_port) as peer:
            assert peer.end_offset("phoenix") == 0
            assert peer.produce("phoenix", batch_of(b"new")).base_offset == 0


@pytest.mark.row("G4")
def test_committed_and_deleted_group_offsets_stay_so(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with RawPeer(broker.kafka_port) as peer:
            peer.create_topic("read", 2)
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "group", **QUIET})
        wanted = [TopicPartition("read", 0, 41, "note"), TopicPartition("read", 1, 42)]
        consumer.commit(offsets=wanted, asynchronous=False)
        consumer.close()
        restart_by_kill(broker)
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "group", **QUIET})
        found = consumer.committed([TopicPartition("read", 0), TopicPartition("read", 1)], timeout=scaled(15))
        assert [(one.offset, one.metadata or "") for one in found] == [(41, "note"), (42, "")]
        consumer.close()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        admin.delete_consumer_groups(["group"])["group"].result(scaled(15))
        restart_by_kill(broker)
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "group", **QUIET})
        found = consumer.committed([TopicPartition("read", 0)], timeout=scaled(15))
        assert found[0].offset < 0, "no offset is left"
        consumer.close()
