"""Admin client with a real broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import pytest

import mansio
from mansio.client import OutgoingRecord, TopicPartition
from mansio.errors import (
    GroupIdNotFound,
    InvalidConfig,
    InvalidPartitions,
    InvalidRequest,
    InvalidTopic,
    NonEmptyGroup,
    TopicAlreadyExists,
    UnknownMember,
    UnknownTopicOrPartition,
)
from support.client_fixtures import QUICK_MEMBER, broker_in, connected, run

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("admin")) as started:
        yield started


@pytest.mark.row("L1")
def test_topic_is_created_extended_and_deleted(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            admin = client.admin
            await admin.create_topic("checked", partitions=2, validate_only=True)
            assert "checked" not in await admin.list_topics()
            await admin.create_topic("life", partitions=2, config={"retention.ms": "60000"})
            with pytest.raises(TopicAlreadyExists):
                await admin.create_topic("life")
            assert "life" in await admin.list_topics()
            assert len((await admin.describe_topic("life")).partitions) == 2
            await admin.create_partitions("life", 5)
            assert len((await admin.describe_topic("life")).partitions) == 5
            assert any(topic.name == "life" for topic in await admin.describe_topics())
            with pytest.raises(InvalidPartitions):
                await admin.create_partitions("life", 3)
            await admin.delete_topic("life")
            with pytest.raises(UnknownTopicOrPartition):
                await admin.describe_topic("life")
            for call in (admin.delete_topic("life"), admin.create_partitions("life", 9)):
                with pytest.raises(UnknownTopicOrPartition):
                    await call
            with pytest.raises(InvalidTopic):
                await admin.create_topic("no/slash")

    run(scenario)


@pytest.mark.row("L1")
def test_settings_are_described_changed_and_reset(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, tuned=1) as client:
            admin = client.admin
            before = (await admin.describe_config("tuned"))["retention.ms"]
            assert before.is_default
            await admin.alter_topic_config("tuned", {"retention.ms": "1234"})
            changed = (await admin.describe_config("tuned"))["retention.ms"]
            assert (changed.value, changed.source, changed.is_default) == ("1234", "topic", False)
            await admin.alter_topic_config("tuned", {"retention.ms": None})
            assert (await admin.describe_config("tuned"))["retention.ms"].value == before.value
            with pytest.raises(InvalidConfig):
                await admin.alter_topic_config("tuned", {"retention.ms": "soon"})
            with pytest.raises(UnknownTopicOrPartition):
                await admin.describe_config("no-such-topic")
            cluster = await admin.describe_cluster()
            assert cluster.controller_id in {node.node_id for node in cluster.brokers}

    run(scenario)


@pytest.mark.row("G4")
def test_group_offsets_are_reset_to_every_kind_of_position(broker: mansio.Broker) -> None:
    base = 1_600_000_000_000

    async def scenario() -> None:
        async with connected(broker, moved=1) as client:
            place = TopicPartition("moved", 0)
            records = [OutgoingRecord(b"x", None, (), 0, base + 1_000 * n) for n in range(10)]
            await client.publish_many("moved", records)
            admin = client.admin

            async def now() -> int:
                return (await admin.group_offsets("movers"))[place].offset

            at_six = datetime.fromtimestamp(base / 1000, UTC) + timedelta(seconds=6)
            for to, expected in (("latest", 10), ("earliest", 0), (4, 4), (99, 10), (at_six, 6)):
                assert await admin.reset_offsets("movers", ["moved"], to=to) == {place: expected}  # type: ignore[arg-type]  # the test knows its own types
                assert await now() == expected
            for shift, expected in ((-2, 4), (+3, 7), (-100, 0)):
                await admin.reset_offsets("movers", [place], shift=shift)
                assert await now() == expected
            await admin.reset_offsets("movers", ["moved"], to="latest", dry_run=True)
            assert await now() == 0
            assert (await admin.group_lag("movers"))[place] == mansio.client.PartitionLag(0, 0, 10, 10)
            with pytest.raises(InvalidRequest):
                await admin.reset_offsets("movers", ["moved"])
            await admin.delete_offsets("movers", ["moved"])
            assert await admin.group_offsets("movers") == {}
            found = await admin.list_offsets([place], at_six)
            assert (found[place].offset, found[place].timestamp_ms) == (6, base + 6_000)
            assert (await admin.list_offsets([place], "max_timestamp"))[place].offset == 9

    run(scenario)


@pytest.mark.row("G1", "G4")
@pytest.mark.parametrize(
    ("protocol", "assignor"), [("consumer", "uniform"), ("classic", "cooperative-sticky")]
)
def test_active_group_is_described_and_cannot_be_changed(
    broker: mansio.Broker, protocol: Literal["consumer", "classic"], assignor: str
) -> None:
    topic, how = f"living-{protocol}", {"group_protocol": protocol, **QUICK_MEMBER}

    async def scenario() -> None:
        async with connected(broker, **{topic: 2}) as client:
            admin = client.admin
            await client.publish(topic, b"x", partition=0)
            async with client.consume(topic, group="alive", **how) as consumer:
                await anext(consumer)
                await consumer.commit()
                described = await admin.describe_group("alive")
                assert (described.state, described.protocol) == ("Stable", assignor)
                assert described.group_type == protocol
                (member,) = described.members
                assert set(member.partitions) == {TopicPartition(topic, 0), TopicPartition(topic, 1)}
                with pytest.raises(NonEmptyGroup):
                    await admin.delete_group("alive")
                with pytest.raises(UnknownMember):
                    await admin.reset_offsets("alive", [topic], to="earliest")
            assert "alive" in {group.group_id for group in await admin.list_groups()}
            await admin.delete_group("alive")
            assert (await admin.describe_group("alive")).state == "Dead"
            with pytest.raises(GroupIdNotFound):
                await admin.delete_group("alive")

    run(scenario)
