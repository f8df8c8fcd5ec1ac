"""Leases whose duration the member chooses, at receive and at extend: kept over restarts, shown, and bounded."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.errors import InvalidRequest
from support.client_fixtures import broker_in, connected, run
from support.receive_fixtures import group_of, publish, taken, values
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("leases")) as started:
        yield started


async def durations(client: mansio.Client, group: str, topic: str) -> dict[int, int]:
    """The duration of the lease of each offset."""
    partition = mansio.TopicPartition(topic, 0)
    found = (await client.admin.shares.leases(group, [partition], ranges_max=100))[partition]
    assert found is not None
    return {
        offset: one.lease_ms
        for one in found.ranges
        for offset in range(one.first_offset, one.last_offset + 1)
    }


@pytest.mark.row("D2")
def test_a_member_chooses_the_duration_at_receive_and_at_extend(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, chosen=1) as client:
            group = await group_of(client, "chosen", lock_ms=2_000, backoff_ms=50_000)
            await publish(client, "chosen", "a:1", "a:2", "a:3")
            receiver = client.receive("chosen", group=group, lease_ms=HOUR_MS, auto_extend=False)
            async with receiver:
                first, second, _third = await taken(receiver, 3)
                left = first.lease_until - datetime.now(UTC)
                assert 3_500 < left.total_seconds() <= 3_600
                assert await durations(client, group, "chosen") == {0: HOUR_MS, 1: HOUR_MS, 2: HOUR_MS}
                await second.extend(12 * HOUR_MS)
                assert (second.lease_until - datetime.now(UTC)).total_seconds() > 43_000
                await second.extend()  # for the duration that it has
                assert await durations(client, group, "chosen") == {0: HOUR_MS, 1: 12 * HOUR_MS, 2: HOUR_MS}
                await first.extend(0)
                (again,) = await receiver.poll(timeout_ms=10_000)  # long before a backoff would end
                assert (values([again]), again.delivery_count) == (["a:1"], 2)
                for wrong in (-1, 12 * HOUR_MS + 1, 1.5, True):
                    with pytest.raises(ValueError, match="lease_ms: not an integer"):
                        await second.extend(wrong)
                await second.ack()
            with pytest.raises(ValueError, match="lease_ms: not an integer"):
                client.receive("chosen", group=group, lease_ms=0)

    run(scenario)


@pytest.mark.row("D2")
def test_a_shorter_lease_ends_and_a_longer_one_does_not(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, short=1) as client:
            group = await group_of(client, "short", lock_ms=60_000, backoff_ms=1)
            await publish(client, "short", "a:1", "a:2")
            receiver = client.receive("short", group=group, lease_ms=600, auto_extend=False)
            async with receiver, client.receive("short", group=group) as other:
                first, _ = await taken(receiver, 2)
                await first.extend(HOUR_MS)
                assert values(await taken(other, 1)) == ["a:2"]
                assert await other.poll(timeout_ms=1_000) == []
                await first.ack()

    run(scenario)


def test_durations_beyond_the_limit_are_refused_by_the_broker(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, refused=1) as client:
            group = await group_of(client, "refused")
            await publish(client, "refused", "a:1")
            async with client.receive("refused", group=group) as receiver:
                (message,) = await taken(receiver, 1)
                with pytest.raises(InvalidRequest, match="a lease of 43200001 ms"):
                    await message._lease.ack_target.acknowledge(message, 4, delay_ms=12 * HOUR_MS + 1)

    run(scenario)


def test_group_describe_shows_the_durations(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, shown=1) as client:
            group = await group_of(client, "shown")
            await publish(client, "shown", "a:1")
            async with client.receive("shown", group=group, lease_ms=HOUR_MS) as receiver:
                await taken(receiver, 1)
                shell = Shell(broker.address)
                text = await asyncio.to_thread(shell, "group", "describe", group, "-o", "json")
                (row,) = json.loads(text)["partitions"]
                assert [lease["lease_ms"] for lease in row["leases"]] == [HOUR_MS]

    run(scenario)
