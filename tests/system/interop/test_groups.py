"""Consumer groups as the foreign clients live them: members come, go and die; nothing is left out."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AiokafkaPartition
from confluent_kafka import Consumer, KafkaError, TopicPartition
from kafka import KafkaConsumer, OffsetAndMetadata
from kafka import TopicPartition as KafkaPythonPartition
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor as KafkaPythonRange

from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.paths import required_tool
from support.present import present
from support.raw_peer import RawPeer
from support.waiting import wait_until
from system.interop.clients import PYTHON_CLIENTS, QUIET, Item, confluent_write
from system.interop.members import (
    KAFKA_PYTHON_METADATA_MS,
    MEMBERS,
    ConfluentMember,
    KafkaPythonMember,
    Member,
    wait_for_shares,
    wait_for_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTITIONS = 4
LONG_SESSION_MS = 30_000
"""A static member is back before it ends, on a machine that is busy too."""


@pytest.fixture
def members() -> Iterator[ExitStack]:
    """Where a test registers its members, so that they leave even when it fails."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic(PARTITIONS)


def enter(members: ExitStack, member: Member) -> Member:
    members.callback(member.stopping.set)
    return member.join()


def publish(bootstrap_servers: str, topic: str, round_: str, count: int = 40) -> set[bytes]:
    """Write `count` values, spread over the partitions; return them."""
    values = [f"{round_} {n}".encode() for n in range(count)]
    for partition in range(PARTITIONS):
        items = [Item(None, value) for value in values[partition::PARTITIONS]]
        confluent_write(bootstrap_servers, topic, items, partition=partition)
    return set(values)


def committed(bootstrap_servers: str, group: str, topic: str, partitions: int = PARTITIONS) -> list[int]:
    """The group's committed offset of each partition."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group, **QUIET})
    wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
    found = [one.offset for one in consumer.committed(wanted, timeout=scaled(30))]
    consumer.close()
    return found


PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "confluent-kafka range": (
        "confluent-kafka",
        {"partition.assignment.strategy": "range"},
        "confluent-kafka",
        {"partition.assignment.strategy": "range"},
    ),
    "confluent-kafka cooperative-sticky": (
        "confluent-kafka",
        {"partition.assignment.strategy": "cooperative-sticky"},
        "confluent-kafka",
        {"partition.assignment.strategy": "cooperative-sticky"},
    ),
    "kafka-python": ("kafka-python", {}, "kafka-python", {}),
    "aiokafka": ("aiokafka", {}, "aiokafka", {}),
    "confluent-kafka and kafka-python": (
        "confluent-kafka",
        {"partition.assignment.strategy": "range"},
        "kafka-python",
        {"partition_assignment_strategy": [KafkaPythonRange]},
    ),
    "confluent-kafka and aiokafka": (
        "confluent-kafka",
        {"partition.assignment.strategy": "roundrobin"},
        "aiokafka",
        {},
    ),
    "cooperative kafka-python": (
        "kafka-python",
        {"partition_assignment_strategy": [CooperativeStickyAssignor]},
        "kafka-python",
        {"partition_assignment_strategy": [CooperativeStickyAssignor]},
    ),
}


@pytest.mark.row("G1", "G4", "A1")
@pytest.mark.parametrize("pair", PAIRS)
def test_second_member_joins_and_leaves_and_everything_is_delivered(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack, pair: str
) -> None:
    first_client, first_options, second_client, second_options = PAIRS[pair]
    expected = publish(bootstrap_servers, topic, "alone")
    first = enter(members, MEMBERS[first_client](bootstrap_servers, unique, topic, **first_options))
    wait_for_shares([first], 4)
    wait_for_values([first], expected)

    second = enter(members, MEMBERS[second_client](bootstrap_servers, unique, topic, **second_options))
    wait_for_shares([first, second], 2, 2)
    expected |= publish(bootstrap_servers, topic, "together")
    wait_for_values([first, second], expected)
    assert second.received, "the second member did its part"

    second.leave()
    wait_for_shares([first], 4)
    expected |= publish(bootstrap_servers, topic, "alone again")
    wait_for_values([first, second], expected)
    first.leave()
    assert committed(bootstrap_servers, unique, topic) == [30] * PARTITIONS, "leaving commits what was read"
    received = first.values + second.values
    assert len(received) == len(expected), "members that leave in order leave no duplicates"
    for member in (first, second):
        for partition in range(PARTITIONS):
            offsets = [offset for at, offset, _ in member.received if at == partition]
            assert offsets == sorted(offsets)


@pytest.mark.row("G1")
def test_member_that_is_killed_gives_up_its_partitions_after_its_session(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    range_only = {"partition.assignment.strategy": "range"}
    first = enter(members, ConfluentMember(bootstrap_servers, unique, topic, **range_only))
    wait_for_shares([first], 4)
    settings = ["session.timeout.ms=1500", "heartbeat.interval.ms=200", "partition.assignment.strategy=range"]
    more = [part for setting in settings for part in ("-X", setting)]
    doomed = subprocess.Popen(
        [required_tool("kcat"), "-b", bootstrap_servers, *more, "-G", unique, topic],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(first.assignment) == 2, 30, "kcat takes its share")
    finally:
        doomed.kill()
        doomed.wait()
    wait_for_shares([first], 4)
    wait_for_values([first], publish(bootstrap_servers, topic, "after the funeral"))


@pytest.mark.row("G1")
def test_static_member_that_restarts_finds_its_partitions_and_no_member_rebalances(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    options = {"partition.assignment.strategy": "range", "session.timeout.ms": LONG_SESSION_MS}
    first = enter(
        members, ConfluentMember(bootstrap_servers, unique, topic, **{"group.instance.id": "one", **options})
    )
    second = enter(
        members, ConfluentMember(bootstrap_servers, unique, topic, **{"group.instance.id": "two", **options})
    )
    wait_for_shares([first, second], 2, 2)
    share = second.assignment
    changes = len(first.assignments)
    second.leave()
    again = enter(
        members, ConfluentMember(bootstrap_servers, unique, topic, **{"group.instance.id": "two", **options})
    )
    wait_for_shares([first, again], 2, 2)
    assert again.assignment == share
    wait_for_values([first, again], publish(bootstrap_servers, topic, "static"))
    assert len(first.assignments) == changes, "the other member noticed nothing"


@pytest.mark.row("G1")
def test_static_member_across_clients_keeps_its_share_over_a_restart(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    options = {"session_timeout_ms": LONG_SESSION_MS}
    first = enter(
        members, KafkaPythonMember(bootstrap_servers, unique, topic, group_instance_id="one", **options)
    )
    second = enter(
        members, KafkaPythonMember(bootstrap_servers, unique, topic, group_instance_id="two", **options)
    )
    wait_for_shares([first, second], 2, 2)
    share = second.assignment
    second.leave()
    again = enter(
        members, KafkaPythonMember(bootstrap_servers, unique, topic, group_instance_id="two", **options)
    )
    wait_for_shares([first, again], 2, 2)
    assert again.assignment == share


@pytest.mark.row("G1")
def test_second_holder_of_an_instance_id_fences_the_first(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    first = enter(members, ConfluentMember(bootstrap_servers, unique, topic, **{"group.instance.id": "same"}))
    wait_for_shares([first], 4)
    second = enter(
        members, ConfluentMember(bootstrap_servers, unique, topic, **{"group.instance.id": "same"})
    )
    wait_until(lambda: first.failure, 30, "the first is told")
    assert "fenced" in str(first.failure).lower()
    wait_for_shares([second], 4)


@pytest.mark.row("G1")
def test_commit_of_an_expelled_member_is_refused(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    """The generation fences: a member that stopped polling cannot move the group's offset any more."""
    first = KafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=unique,
        enable_auto_commit=False,
        session_timeout_ms=6000,
        heartbeat_interval_ms=200,
        metadata_max_age_ms=KAFKA_PYTHON_METADATA_MS,
        partition_assignment_strategy=[KafkaPythonRange],
    )
    # A leader of kafka-python that joins before it has the metadata of the topic may never assign the partitions.
    wait_until(lambda: first.partitions_for_topic(topic), 30, "the metadata are there")
    wait_until(lambda: first.poll(timeout_ms=50) is not None and len(first.assignment()) == 4, 30, "joined")
    generation = first.group_metadata()
    options = {"partition.assignment.strategy": "range", "enable.auto.commit": False}
    second = enter(members, ConfluentMember(bootstrap_servers, unique, topic, **options))

    def shared() -> bool:
        """Both have joined: closed in the middle of that, kafka-python takes half a minute."""
        first.poll(timeout_ms=500)
        return len(first.assignment()) == len(second.assignment) == 2

    wait_until(shared, 30, "moved")
    illegal_generation, unknown_member = 22, 25
    partition = {"partition_index": 0, "committed_offset": 99, "committed_leader_epoch": -1}
    stale = {
        "group_id": unique,
        "generation_id_or_member_epoch": generation.generation_id,
        "member_id": generation.member_id,
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as peer:
        answer = peer.call(ApiKey.OFFSET_COMMIT, 8, stale)
        assert answer.topics[0].partitions[0].error_code == illegal_generation
        stranger = {**stale, "member_id": "somebody else"}
        answer = peer.call(ApiKey.OFFSET_COMMIT, 8, stranger)
        assert answer.topics[0].partitions[0].error_code == unknown_member
    first.close()
    second.leave()
    assert committed(bootstrap_servers, unique, topic)[0] < 0


@pytest.mark.row("G4")
@pytest.mark.parametrize("writer", PYTHON_CLIENTS)
def test_offset_committed_by_one_client_is_read_by_all(
    bootstrap_servers: str, topic: str, unique: str, writer: str
) -> None:
    if writer == "confluent-kafka":
        consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": unique, **QUIET})
        consumer.commit(offsets=[TopicPartition(topic, 1, 17, "a note")], asynchronous=False)
        consumer.close()
    elif writer == "kafka-python":
        second = KafkaConsumer(bootstrap_servers=bootstrap_servers, group_id=unique, enable_auto_commit=False)
        second.assign([KafkaPythonPartition(topic, 1)])
        second.commit({KafkaPythonPartition(topic, 1): OffsetAndMetadata(17, "a note", -1)})
        second.close()
    else:

        async def commit() -> None:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap_servers, group_id=unique, enable_auto_commit=False
            )
            await consumer.start()
            consumer.assign([AiokafkaPartition(topic, 1)])
            await consumer.commit({AiokafkaPartition(topic, 1): (17, "a note")})
            await consumer.stop()

        asyncio.run(commit())

    first = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": unique, **QUIET})
    found = first.committed([TopicPartition(topic, 1), TopicPartition(topic, 2)], timeout=scaled(30))
    assert [(one.offset, one.metadata or "") for one in found] == [(17, "a note"), (-1001, "")]
    first.close()
    second = KafkaConsumer(bootstrap_servers=bootstrap_servers, group_id=unique)
    assert second.committed(KafkaPythonPartition(topic, 1)) == 17
    assert second.committed(KafkaPythonPartition(topic, 2)) is None
    second.close()

    async def third() -> tuple[int | None, int | None]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, group_id=unique)
        await consumer.start()
        consumer.assign([AiokafkaPartition(topic, partition) for partition in (1, 2)])
        found = [await consumer.committed(AiokafkaPartition(topic, partition)) for partition in (1, 2)]
        await consumer.stop()
        return found[0], found[1]

    assert asyncio.run(third()) == (17, None)


@pytest.mark.row("G4")
@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_group_without_offsets_begins_where_it_asks_to(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack, reset: str
) -> None:
    before = publish(bootstrap_servers, topic, "before")
    member = enter(members, ConfluentMember(bootstrap_servers, unique, topic, **{"auto.offset.reset": reset}))
    wait_for_shares([member], 4)
    if reset == "latest":
        # Its positions are looked up after the assignment; only what comes later is certain to be seen.
        probes = 0
        while not member.received:
            publish(bootstrap_servers, topic, f"probe {(probes := probes + 1)}", PARTITIONS)
            assert probes < 100
    after = publish(bootstrap_servers, topic, "after")
    wait_for_values([member], after | (before if reset == "earliest" else set()))
    if reset == "latest":
        assert not before & set(member.values)


@pytest.mark.row("G4")
def test_position_out_of_range_resets_as_the_consumer_is_configured(
    bootstrap_servers: str, topic: str, unique: str
) -> None:
    publish(bootstrap_servers, topic, "few", 8)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": unique,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 50,
            **QUIET,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 1_000_000)])
    message = wait_until(lambda: consumer.poll(0.2), 30, "an answer")
    assert present(message.error()).code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
    consumer.close()
