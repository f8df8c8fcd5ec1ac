"""Priorities: share groups get high ones first, without starvation, and the state of each priority is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.client_fixtures import broker_in, connected, run
from support.receive_fixtures import group_of, taken, values

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mansio

SETTING = {"mansio.priority.enable": "true"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("priorities")) as started:
        yield started


async def publish(client: mansio.Client, topic: str, *records: str) -> None:
    """Publish one record per text, `priority:value`."""
    for record in records:
        priority = record.partition(":")[0]
        await client.publish(topic, record, headers={"mansio-priority": priority})


@pytest.mark.row("D7")
def test_high_priority_passes_others_and_order_is_kept_within_a_priority(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            await client.admin.create_topic("order", partitions=1, config=SETTING)
            group = await group_of(client, "order")
            await publish(client, "order", "low:1", "normal:1", "low:2", "high:1", "normal:2", "high:2")
            async with client.receive("order", group=group, max_records=1) as receiver:
                got = []
                for _ in range(6):
                    (message,) = await taken(receiver, 1)
                    got += values([message])
                    await message.ack()
            assert got == ["high:1", "high:2", "normal:1", "normal:2", "low:1", "low:2"]

    run(scenario)
