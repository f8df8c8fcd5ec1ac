"""`receive_next` without a prefetch asks brokers in turn, and waits at none while another one has records."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client.share.broker_turns import RECORDS_PER_TURN
from mansio.client.share.share_fetcher import ShareSessions
from support.machine import scaled
from support.receive_fixtures import group_of, publish
from system.cluster.load import create_topic
from system.cluster.test_cluster_groups import one

if TYPE_CHECKING:
    from support.cluster import Cluster

pytestmark = pytest.mark.full

__all__ = ["one"]  # the fixture

RECORDS = 6 * RECORDS_PER_TURN


@pytest.mark.row("D1")
def test_brokers_are_asked_in_turn_and_those_without_records_seldom(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic(one, "turns", 3)
    leaders = {index: one.leader("turns", index) for index in range(3)}
    assert len(set(leaders.values())) > 1
    fetches: list[tuple[int, int]] = []
    fetch = ShareSessions.fetch

    def counted(self: ShareSessions, node: int, *arguments: Any) -> None:
        fetches.append((node, arguments[-1]))
        fetch(self, node, *arguments)

    async def scenario() -> None:
        async with mansio.connect(one.bootstrap_servers) as client:
            for number in range(RECORDS):
                await publish(client, "turns", f"k:{number}", partition=0)
            group = await group_of(client, "in-turn")
            async with client.receive("turns", group=group, prefetch=0) as receiver:
                message = await receiver.receive_next()
                monkeypatch.setattr(ShareSessions, "fetch", counted)
                for _ in range(RECORDS - 1):
                    message = await receiver.receive_next(message)
                assert message is not None
                await message.ack()
                # Of each turn, the other brokers are asked once; and none is waited at.
                assert len(fetches) <= RECORDS + 2 * (RECORDS // RECORDS_PER_TURN + 1)
                assert not [wait_ms for node, wait_ms in fetches[:RECORDS] if node != leaders[0] and wait_ms]
                for number in range(RECORDS):
                    await publish(client, "turns", f"k:{number}", partition=number % 3)
                seen: Counter[int] = Counter()
                message = await receiver.receive_next()
                for _ in range(RECORDS - 1):
                    assert message is not None
                    seen[leaders[message.partition]] += 1
                    if seen.total() == len(set(leaders.values())) * RECORDS_PER_TURN:
                        assert len(seen) == len(set(leaders.values())), "a broker starves"
                    message = await receiver.receive_next(message)

    async def within() -> None:
        async with asyncio.timeout(scaled(60)):
            await scenario()

    asyncio.run(within())
