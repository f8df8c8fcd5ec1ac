"""Simulated clients with rare operations: several partitions in one request, deleted records, added partitions, changed
settings. Only histories with `World(more=True)` have them.

What must be true, beside what the checker of the other clients says: a batch of a request counts only if its own
partition said so; what was deleted and confirmed does not come back; what was acknowledged to a partition is there,
whenever the partition was added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce as produce_wire
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from sim import workload_clients
from sim.clients import LOOK_AGAIN, PRODUCE_VERSION, TOPIC, Client, Producer

if TYPE_CHECKING:
    from sim.world import World

PARTITIONS_MAX: Final = 8
UNKNOWN_TOPIC: Final = 3
EARLIEST: Final = -2
TOPIC_RESOURCE: Final = 2
SETTINGS: Final = (
    ("min.insync.replicas", "2"),
    ("min.insync.replicas", "3"),
    ("segment.bytes", "16384"),
    ("segment.bytes", "32768"),
)


class PairProducer(Producer):
    """Writes to both partitions of the topic with one request, to the leader of one of them."""

    async def _send(self, values: list[bytes]) -> bool:
        checker = self.world.checker
        parts = {index: [b"%s/%d" % (value, index) for value in values] for index in (0, 1)}
        entries = []
        for index, part in parts.items():
            checker.sent(index, part, once=False)
            entries.append((index, build_batch([(self.world.wall_ms(), None, value, ()) for value in part])))
        frame = await self.ask(
            lambda number: b"".join(
                produce_wire.encode_request(
                    PRODUCE_VERSION, number, self.name, -1, 2000, [(TOPIC, None, entries)]
                )
            )
        )
        if frame is None:
            await self.find_leader(self.random.randrange(2))
            return False
        for result in produce_wire.decode_response(PRODUCE_VERSION, frame).topics[0][2]:
            if result.error_code == 0:
                self.acknowledged += 1
                checker.acknowledged(
                    result.index, result.base_offset, parts[result.index], where=self.node_id
                )
            elif result.error_code in LOOK_AGAIN and self.random.random() < 0.5:
                self.leader_epoch = -1
                await self.find_leader(result.index)
        return False


class OwnTopic(Client):
    """A client with a topic of its own, which it makes."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(20, 300))
            found = await self.call(ApiKey.METADATA, 12, {"topics": [{"name": self.name, "topic_id": None}]})
            if found is not None and found.topics[0].error_code == UNKNOWN_TOPIC:
                await self._create()
            if found is None or found.topics[0].error_code:
                self.elsewhere()
                continue
            leaders = {one.partition_index: one.leader_id for one in found.topics[0].partitions}
            index = self.random.choice(sorted(leaders))
            if leaders[index] < 0:
                self.elsewhere()
                continue
            self.node_id = leaders[index]
            await self.use(index, len(leaders))

    async def use(self, index: int, count: int) -> None:
        """Do something with one of `count` partitions; its leader is asked."""
        raise NotImplementedError

    async def write(self, index: int, value: bytes) -> int | None:
        """The offset where it was acknowledged."""
        batch = build_batch([(self.world.wall_ms(), None, value, ())])
        topics = [(self.name, None, [(index, batch)])]
        frame = await self.ask(
            lambda number: b"".join(
                produce_wire.encode_request(PRODUCE_VERSION, number, self.name, -1, 2000, topics)
            )
        )
        if frame is None:
            return None
        result = produce_wire.decode_response(PRODUCE_VERSION, frame).topics[0][2][0]
        return None if result.error_code else result.base_offset

    async def _create(self) -> None:
        topic = {
            "name": self.name,
            "num_partitions": 1,
            "replication_factor": 3,
            "assignments": [],
            "configs": [],
        }
        await self.call(
            ApiKey.CREATE_TOPICS, 7, {"topics": [topic], "timeout_ms": 2000, "validate_only": False}
        )


class Trimmer(OwnTopic):
    """Deletes what it wrote. A leader that is sure to be one begins no earlier than what was deleted."""

    def __init__(self, world: World) -> None:
        self.deleted_to = 0
        self.deletions = 0
        super().__init__(world, "trimmed")

    async def use(self, index: int, count: int) -> None:
        del count
        if await self.write(index, b"x") is None:
            return
        if self.random.random() < 0.5:
            await self._delete(index)
        else:
            await self._look(index)

    async def _delete(self, index: int) -> None:
        wanted = {"name": self.name, "partitions": [{"partition_index": index, "offset": -1}]}
        answer = await self.call(ApiKey.DELETE_RECORDS, 2, {"topics": [wanted], "timeout_ms": 2000})
        if answer is not None and not answer.topics[0].partitions[0].error_code:
            self.deletions += 1
            self.deleted_to = max(self.deleted_to, answer.topics[0].partitions[0].low_watermark)

    async def _look(self, index: int) -> None:
        deleted_to, node_id = self.deleted_to, self.node_id
        wanted = {"partition_index": index, "current_leader_epoch": -1, "timestamp": EARLIEST}
        topics = [{"name": self.name, "partitions": [wanted]}]
        answer = await self.call(
            ApiKey.LIST_OFFSETS, 7, {"replica_id": -1, "isolation_level": 0, "topics": topics}
        )
        if answer is None or answer.topics[0].partitions[0].error_code:
            return
        begins = answer.topics[0].partitions[0].offset
        if begins < deleted_to and self.world.holds(node_id) and not self.world.is_misled(node_id):
            self.world.checker.broken(f"deleted up to {deleted_to}, and broker {node_id} begins at {begins}")


class Grower(OwnTopic):
    """Writes to a topic that gets more and more partitions."""

    def __init__(self, world: World) -> None:
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.number = 0
        super().__init__(world, "growing")

    async def use(self, index: int, count: int) -> None:
        if count < PARTITIONS_MAX and self.random.random() < 0.1:
            more = min(PARTITIONS_MAX, count + self.random.choice((1, 2)))
            wanted = {"name": self.name, "count": more, "assignments": None}
            answer = await self.call(
                ApiKey.CREATE_PARTITIONS, 3, {"topics": [wanted], "timeout_ms": 2000, "validate_only": False}
            )
            if answer is None or answer.results[0].error_code:
                self.elsewhere()
            return
        self.number += 1
        value = b"%d" % self.number
        offset = await self.write(index, value)
        if offset is not None and self.acknowledged.setdefault((index, offset), value) != value:
            self.world.checker.broken(f"{self.name}-{index}/{offset} was acknowledged twice")

    def check(self) -> None:
        """All of it is there in the end."""
        broker = self.world.brokers()[0]
        topic = broker.core.state.topics.get(self.name)
        found: dict[int, dict[int, bytes | None]] = {}
        for (index, offset), value in self.acknowledged.items():
            if index not in found:
                assert topic is not None, "it was written to"
                leader = next(
                    one
                    for one in workload_clients.copies(self.world, topic.topic_id, index)
                    if one.is_leader and not one.closed
                )
                found[index] = {
                    record.offset: record.value
                    for batch in leader.log.batches(0)
                    for record in read_records(batch, output_bytes_max=1 << 20)
                }
            if found[index].get(offset) != value:
                self.world.checker.broken(f"{self.name}-{index}/{offset} was acknowledged and is not there")


class Configurer(Client):
    """Changes settings of a topic that is written to."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "configurer")
        self.changes = 0
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(100, 2000))
            name, value = self.random.choice(SETTINGS)
            config = {"name": name, "config_operation": 0, "value": value}
            resource = {"resource_type": TOPIC_RESOURCE, "resource_name": TOPIC, "configs": [config]}
            answer = await self.call(
                ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False}
            )
            if answer is None or answer.responses[0].error_code:
                self.elsewhere()
            else:
                self.changes += 1


class More:
    """All of them."""

    def __init__(self, world: World) -> None:
        self.pairs = [
            PairProducer(world, f"b{index}", index, idempotent=False, pace_ms=50) for index in (0, 1)
        ]
        self.trimmer = Trimmer(world)
        self.grower = Grower(world)
        self.configurer = Configurer(world)

    def check(self) -> None:
        """At the end of a history."""
        self.grower.check()

    def numbers(self) -> dict[str, Any]:
        """How much came of it."""
        return {
            "pairs": sum(one.acknowledged for one in self.pairs),
            "deletions": self.trimmer.deletions,
            "grown": len(self.grower.acknowledged),
            "settings": self.configurer.changes,
        }
