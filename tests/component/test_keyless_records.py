"""Records without a key are spread over all partitions, however small the batches are that a program publishes."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

import mansio
from mansio.testing import TestBroker

PARTITIONS = 4
VALUE = bytes(1_000)


@pytest.mark.parametrize("batch", [1, 60])
def test_records_without_a_key_leave_a_partition_after_the_bytes_of_a_full_batch(batch: int) -> None:
    async def publish(servers: str) -> list[int]:
        options = mansio.ProducerOptions(batch_bytes_max=16 << 10)
        async with mansio.connect(servers, producer=options) as client:
            await client.admin.create_topic("events", partitions=PARTITIONS)
            found: list[int] = []
            while len(found) < 600:
                found += [each.partition for each in await client.publish_many("events", [VALUE] * batch)]
            return found

    with TestBroker() as broker:
        partitions = asyncio.run(publish(broker.bootstrap_servers))
    counts = Counter(partitions)
    assert set(counts) == set(range(PARTITIONS))
    assert max(counts.values()) < 400
    runs = 1 + sum(one != other for one, other in pairwise(partitions))
    assert runs <= 600 * 1_000 / (16 << 10) + 2, "a batch is full before another partition is chosen"
