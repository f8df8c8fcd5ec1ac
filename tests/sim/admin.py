"""Simulated administrator that creates a topic, uses it, deletes it, and creates another with the same name.

What must be true: nobody that asks for a topic by its id finds a record of another topic, whatever its name was; what
was acknowledged to a topic is there as long as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch as fetch_wire
from mansio.wire.apis import produce as produce_wire
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from sim.clients import Client
from support.present import present

if TYPE_CHECKING:
    from sim.world import World

NAME: Final = "again"
PRODUCE_BY_ID: Final = 13
FETCH_BY_ID: Final = 13
TRIES_MAX: Final = 12


class Administrator(Client):
    """See the module. `made`: how many topics it has used."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "administrator")
        self.faithful = True
        self.made = 0
        self.done = False
        self.acknowledged = 0
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(100, 1500))
            topic_id = await self._topic()
            if topic_id is None:
                await self._create()
                continue
            await self._use(topic_id)
            await self._delete()
        self.done = True

    async def _create(self) -> None:
        topic = {"name": NAME, "num_partitions": 1, "replication_factor": 3, "assignments": [], "configs": []}
        answer = await self.call(
            ApiKey.CREATE_TOPICS, 7, {"topics": [topic], "timeout_ms": 2000, "validate_only": False}
        )
        if answer is None or answer.topics[0].error_code:
            self.elsewhere()

    async def _delete(self) -> None:
        answer = await self.call(
            ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": NAME, "topic_id": None}], "timeout_ms": 2000}
        )
        if answer is None or answer.responses[0].error_code:
            self.elsewhere()

    async def _topic(self) -> UUID | None:
        """Its id, as some client knows it; its leader is the one to ask next."""
        found = await self.call(ApiKey.METADATA, 12, {"topics": [{"name": NAME, "topic_id": None}]})
        if found is None or found.topics[0].error_code:
            self.elsewhere()
            return None
        topic = found.topics[0]
        if not topic.partitions or topic.partitions[0].leader_id < 0:
            return None
        self.node_id = topic.partitions[0].leader_id
        return UUID(bytes=bytes(topic.topic_id))

    async def _use(self, topic_id: UUID) -> None:
        """Write to it and read all of it, as far as a broker answers."""
        acknowledged: dict[int, bytes] = {}
        for number in range(self.random.randrange(4)):
            value = f"{topic_id}:{self.made}:{number}".encode()
            offset = await self._write(topic_id, value)
            if offset is not None:
                acknowledged[offset] = value
        self.made += 1
        for _ in range(TRIES_MAX):
            known = await self._read(topic_id)
            if known is None:
                if await self._topic() != topic_id:
                    return
                await self.sleep(self.random.uniform(10, 100))
                continue
            for offset, value in acknowledged.items():
                if known.get(offset, value) != value:
                    self.world.checker.broken(
                        f"{value!r} was acknowledged at {offset}, {known[offset]!r} is there"
                    )
            return

    async def _write(self, topic_id: UUID, value: bytes) -> int | None:
        batch = build_batch([(self.world.wall_ms(), None, value, ())])
        topics = [(None, topic_id.bytes, [(0, batch)])]
        frame = await self.ask(
            lambda number: b"".join(
                produce_wire.encode_request(PRODUCE_BY_ID, number, self.name, -1, 2000, topics)
            )
        )
        if frame is None:
            return None
        result = produce_wire.decode_response(PRODUCE_BY_ID, frame).topics[0][2][0]
        if result.error_code:
            return None
        self.acknowledged += 1
        return result.base_offset

    async def _read(self, topic_id: UUID) -> dict[int, bytes] | None:
        """What is there, by offset."""
        wanted = fetch_wire.FetchPartition(0, -1, 0, -1, -1, 1 << 20)
        frame = await self.ask(
            lambda number: fetch_wire.encode_request(
                FETCH_BY_ID,
                number,
                self.name,
                [(None, topic_id.bytes, [wanted])],
                max_wait_ms=0,
                min_bytes=1,
                max_bytes=1 << 20,
            )
        )
        if frame is None:
            return None
        answer = fetch_wire.decode_response(FETCH_BY_ID, frame).topics[0][2][0]
        if answer.error_code:
            return None
        found: dict[int, bytes] = {}
        for position, header in iterate_batches(answer.records):
            for record in read_records(
                answer.records[position : position + header.size], output_bytes_max=1 << 20
            ):
                value = present(record.value)
                if not value.startswith(str(topic_id).encode()):
                    self.world.checker.broken(f"{value!r} is in the topic {topic_id}")
                found[record.offset] = value
        return found
