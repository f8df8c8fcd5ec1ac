"""Simulated administrator that moves partitions: to other brokers, to more or fewer, to another plan, and back.

Only histories with `World(moves=True)` have it, of any kind of clients. What is promised to them stays the same. In the
end every reassignment is finished, and no broker has data of a replica that was moved away.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from mansio.metadata.reassignment import is_reassigned
from mansio.wire.api_versions import ApiKey
from sim.clients import TOPIC, Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.world import World

NODES_MIN: Final = 4
"""So that a partition with three replicas can be moved."""

REPLICAS: Final = (2, 3, 3, 3, 4)


class Mover(Client):
    """See the module. `done_requests`: what was accepted, by kind."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "mover")
        self.faithful = True
        self.done_requests: Counter[str] = Counter()
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(100, 1500))
            found = await self.call(ApiKey.METADATA, 12, {"topics": None})
            if found is None:
                self.elsewhere()
                continue
            topics = [topic for topic in found.topics if topic.partitions]
            if topics:
                topic = self.random.choice(topics)
                if self.random.random() < 0.5:
                    topic = next((each for each in topics if each.name == TOPIC), topic)
                await self._alter(topic.name, self.random.choice(topic.partitions).partition_index)

    async def _alter(self, topic: str, index: int) -> None:
        replicas: list[int] | None = None
        if self.random.random() < 0.8:
            size = min(self.random.choice(REPLICAS), len(self.world.node_ids))
            replicas = self.random.sample(self.world.node_ids, size)
        partition = {"partition_index": index, "replicas": replicas}
        answer = await self.call(
            ApiKey.ALTER_PARTITION_REASSIGNMENTS,
            0,
            {"timeout_ms": 2000, "topics": [{"name": topic, "partitions": [partition]}]},
        )
        if answer is None or answer.error_code:
            self.elsewhere()
        elif not answer.responses[0].partitions[0].error_code:
            self.done_requests["cancel" if replicas is None else "move"] += 1


def reasons(world: World) -> Iterator[str]:
    """Which reassignments are not finished yet, and which data of former replicas are left."""
    state = world.brokers()[0].core.state
    for topic in state.topics.values():
        for index, partition in enumerate(topic.partitions):
            if is_reassigned(partition):
                yield f"{topic.name}-{index} is being moved: {partition}"
    for broker in world.brokers():
        known = {
            f"{broker.core.partitions._files.directory(topic)}/{index}"
            for topic in broker.core.state.topics.values()
            for index, partition in enumerate(topic.partitions)
            if broker.node_id not in partition.replicas
        }
        left = [
            path for path in broker.disk._directories if path in known or re.search(r"^data/removed/.", path)
        ]
        if left:
            yield f"broker {broker.node_id} has data of former replicas: {left}"
