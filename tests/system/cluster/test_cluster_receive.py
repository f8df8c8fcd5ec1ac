"""Leased delivery in a cluster: after the leader of the partitions died no acknowledged record is delivered again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio import TopicPartition
from mansio.errors import LeaseLost, MansioError
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC
from support.machine import scaled
from support.receive_fixtures import group_of, running
from system.cluster.load import create_topic
from system.cluster.test_cluster_groups import one

if TYPE_CHECKING:
    from support.cluster import Cluster

pytestmark = pytest.mark.full

__all__ = ["one"]  # the fixture

RECORDS = 600
SCENARIO_SECONDS_MAX = 150
DESCRIBED_SECONDS_MAX = 20


async def described(one: Cluster) -> str:
    """All that may tell why they do not go on."""
    places = [TopicPartition("leased", index) for index in range(4)]
    lines = [
        str(place)
        for topic in ("leased", SHARE_STATE_TOPIC, "__consumer_offsets")
        for place in one.places(topic)
    ]
    try:
        async with (
            asyncio.timeout(scaled(DESCRIBED_SECONDS_MAX)),
            mansio.connect(one.bootstrap_servers) as client,
        ):
            lines.append(str(await client.admin.shares.leases("leasing", places, ranges_max=5)))
            lines.append(str(await client.admin.shares.describe("leasing")))
    except (MansioError, TimeoutError) as error:
        lines.append(repr(error))
    return "\n".join(lines)


@pytest.mark.row("D5", "D8")
def test_a_receiver_goes_on_when_the_leader_is_killed_and_no_acknowledged_record_comes_again(
    one: Cluster,
) -> None:
    create_topic(one, "leased", 4)
    acknowledged: set[tuple[int, int]] = set()
    values: set[bytes | None] = set()
    again: list[mansio.client.Leased] = []

    async def handle(message: mansio.client.Leased) -> None:
        place = message.partition, message.offset
        if place in acknowledged:
            again.append(message)
        values.add(message.value)
        await asyncio.sleep(0.01)
        try:
            await message.ack()
        except LeaseLost:  # nobody knows whether it was stored, and if it was the record does not come again
            return
        acknowledged.add(place)

    async def scenario() -> None:
        async with (
            asyncio.timeout(scaled(SCENARIO_SECONDS_MAX)),
            mansio.connect(one.bootstrap_servers) as client,
        ):
            group = await group_of(client, "leasing", lock_ms=3_000, tries=10)
            receivers = [client.receive("leased", group=group, max_records=50) for _ in range(2)]
            async with running(receivers[0], handle), running(receivers[1], handle):
                for number in range(RECORDS):
                    await client.publish("leased", b"%d" % number, partition=number % 4)
                    if number == RECORDS // 2:
                        while len(acknowledged) < RECORDS // 4:  # noqa: ASYNC110  # it has no event
                            await asyncio.sleep(0.01)
                        one.kill(one.leader("leased"))
                while len(values) < RECORDS:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    try:
        asyncio.run(scenario())
    except TimeoutError:
        missing = [number for number in range(RECORDS) if b"%d" % number not in values]
        reported = f"{len(acknowledged)} acknowledged, {len(missing)} missing: {missing[:20]}"
        raise AssertionError(f"{reported}\n{asyncio.run(described(one))}\n{one.tails(60)}") from None
    assert values == {b"%d" % number for number in range(RECORDS)}
    assert again == []
