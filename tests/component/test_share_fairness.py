"""`mansio.share.fair`: records of a key with a backlog do not delay those of other keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import mansio
from support.client_fixtures import broker_in, connected, run
from support.receive_fixtures import group_of, taken, values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAIR = "mansio.share.fair"
BACKLOG = 3_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("fair")) as started:
        yield started


async def publish_all(client: mansio.Client, topic: str, texts: Sequence[str]) -> None:
    """Records with what comes before a colon as their key, in batches."""
    records = [mansio.OutgoingRecord(text.encode(), key=text.partition(":")[0].encode()) for text in texts]
    for first in range(0, len(records), 500):
        await client.publish_many(topic, records[first : first + 500])


async def set_fair(client: mansio.Client, group: str, *, is_fair: bool) -> None:
    await client.admin.alter_group_config(group, {FAIR: str(is_fair).lower()})


@pytest.mark.row("D9")
def test_records_of_others_do_not_wait_for_a_backlog_of_one_key(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, fair=1) as client:
            group = await group_of(client, "fair")
            await set_fair(client, group, is_fair=True)
            await publish_all(client, "fair", [f"noisy:{n}" for n in range(BACKLOG)])
            await publish_all(client, "fair", [f"quiet-{n}:x" for n in range(20)])
            async with client.receive("fair", group=group, max_records=10) as receiver:
                seen: list[str] = []
                while sum(each.startswith("quiet") for each in seen) < 20:
                    messages = await taken(receiver, 1)
                    seen += values(messages) if False else [str(m.key.decode()) for m in messages]
                    await receiver.ack(messages)
                print("noisy before all quiet", Counter(seen)["noisy"])
                assert Counter(seen)["noisy"] < BACKLOG // 4
                while len(seen) < BACKLOG + 20:
                    messages = await taken(receiver, 1)
                    seen += [m.key.decode() for m in messages]
                    await receiver.ack(messages)
                assert Counter(seen)["noisy"] == BACKLOG

    run(scenario)
