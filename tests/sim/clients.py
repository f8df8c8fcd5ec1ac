"""Clients of a simulated cluster: they send requests as bytes and record the responses.

Each is one coroutine on a loop of its own. None trusts anything but its last good answer; whoever does not get one in
time makes another connection, to another broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.testing.scheduler import Task
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch as fetch_wire
from mansio.wire.apis import produce as produce_wire
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from mansio.wire.codec import messages
from sim import fairness, key_order, priorities
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.network import Link
    from sim.world import World

TOPIC: Final = "t"
PRODUCE_VERSION: Final = 11
FETCH_VERSION: Final = 12
REQUEST_MS_MAX: Final = 2500
DUPLICATE_SEQUENCE: Final = 46
OUT_OF_ORDER: Final = 45
OFFSET_OUT_OF_RANGE: Final = 1
LOOK_AGAIN: Final = frozenset({3, 5, 6, 15, 16, 74, 75, 76, 100})
"""Errors that say: the leader, or the coordinator, is elsewhere."""


class Client:
    """Connections to all brokers, one at a time."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.random = world.simulation.random
        self.scheduler = world.simulation.scheduler(name)
        self._link: Link | None = None
        self._count = 0
        self.node_id = self.random.choice(world.node_ids)
        self.faithful = False
        self.leader_epoch = -1

    def run(self, work: Any) -> None:
        Task(self.scheduler, work, self.name)

    async def sleep(self, delay_ms: float) -> None:
        promise = self.scheduler.promise()
        self.scheduler.call_later(delay_ms, promise.set_result, None)
        await promise

    async def ask(
        self, encode: Callable[[int], bytes], *, answered: bool = True, timeout_ms: float = REQUEST_MS_MAX
    ) -> bytes | None:
        """The answer's frame, without its length; None when there was none in time."""
        link = self._link
        if link is None or link.closed or link.target != self.node_id:
            if link is not None:
                link.close()
            link = self._link = self.world.network.link(self.name, self.scheduler, self.node_id)
            link.faithful = self.faithful
        self._count += 1
        number = self._count
        promise = self.scheduler.promise()

        def complete(frame: bytes | None) -> None:
            if not promise.done() and (frame is None or int.from_bytes(frame[:4], "big") == number):
                promise.set_result(frame)

        link.on_frame, link.on_lost = complete, lambda: complete(None)
        link.send(encode(number))
        if not answered:
            return None
        timer = self.scheduler.call_later(timeout_ms, complete, None)
        frame: bytes | None = await promise
        timer.cancel()
        if frame is None:
            link.close()
        return frame

    async def call(
        self, api_key: int, version: int, fields: dict[str, Any], *, timeout_ms: float = REQUEST_MS_MAX
    ) -> Any:
        """A request of any kind; None when there was no answer in time."""
        frame = await self.ask(
            lambda number: messages.encode_request(api_key, version, number, self.name, fields),
            timeout_ms=timeout_ms,
        )
        return None if frame is None else messages.decode_response_frame(api_key, version, frame)[1]

    def elsewhere(self) -> None:
        """Try another broker next."""
        self.node_id = self.random.choice(self.world.node_ids)

    async def find_leader(self, index: int) -> None:
        """Ask any broker that answers who leads; news older than what is known is none (KIP-320)."""
        found = await self.call(ApiKey.METADATA, 12, {"topics": [{"name": TOPIC, "topic_id": None}]})
        if found is None:
            self.elsewhere()
            return
        for topic in found.topics:
            for partition in topic.partitions:
                known = partition.leader_epoch >= self.leader_epoch and partition.leader_id >= 0
                if partition.partition_index == index and known:
                    self.node_id, self.leader_epoch = partition.leader_id, partition.leader_epoch
                    return
        self.elsewhere()

    async def find_coordinator(self, group: str) -> None:
        """Ask anybody who coordinates a group."""
        self.elsewhere()
        found = await self.call(ApiKey.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": [group]})
        if found is not None and found.coordinators[0].error_code == 0:
            self.node_id = found.coordinators[0].node_id


class Producer(Client):
    """Writes to one partition, a batch at a time. `idempotent`: repeats what it got no answer for, under its number;
    the others write something new. `acks`: -1 for all."""

    def __init__(
        self, world: World, name: str, index: int, *, idempotent: bool, acks: int = -1, pace_ms: float = 60
    ) -> None:
        super().__init__(world, name)
        self.index = index
        self.idempotent = idempotent
        self.acks = acks
        self.pace_ms = pace_ms
        self._has_fairness = world.feature is None and fairness.has_fairness(world.seed)
        self._sizes = fairness.BATCH_SIZES if self._has_fairness else (1, 1, 3)
        self.producer = (-1, -1)
        self.sequence = 0
        self.number = 0
        self.acknowledged = 0
        self.waits_since_ms = 0.0
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(0.3, 1.7) * self.pace_ms)
            if self.idempotent and self.producer[0] < 0:
                await self._become()
                continue
            values = [
                f"{self.name}:{self.number + n}".encode() for n in range(self.random.choice(self._sizes))
            ]
            self.number += len(values)
            self.waits_since_ms = self.world.simulation.now_ms
            while await self._send(values) and not self.world.over:
                await self.sleep(self.random.uniform(20, 200))
            self.waits_since_ms = 0.0

    async def _become(self) -> None:
        fields = {
            "transactional_id": None,
            "transaction_timeout_ms": 1000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        found = await self.call(ApiKey.INIT_PRODUCER_ID, 4, fields)
        if found is None or found.error_code:
            self.elsewhere()
        else:
            assert found.producer_id not in self.world.checker.producer_ids, (
                "a producer id was given out twice"
            )
            self.world.checker.producer_ids.add(found.producer_id)
            self.producer = (found.producer_id, found.producer_epoch)

    def _key_and_headers(self, value: bytes) -> tuple[bytes | None, tuple[tuple[str, bytes], ...]]:
        if self._has_fairness:
            return fairness.key_of(value), fairness.headers_of(value)
        seed = self.world.seed
        return key_order.key_of(seed, value), priorities.headers_of(seed, value)

    async def _send(self, values: list[bytes]) -> bool:
        """Once. True: send the same again."""
        numbered = self.idempotent
        padding = b" " * self.random.choice((0, 0, 400))
        batch = build_batch(
            [
                (self.world.wall_ms(), key, value + padding, headers)
                for value in values
                for key, headers in (self._key_and_headers(value),)
            ],
            producer_id=self.producer[0] if numbered else -1,
            producer_epoch=self.producer[1] if numbered else -1,
            base_sequence=self.sequence if numbered else -1,
        )
        checker = self.world.checker
        checker.sent(self.index, values, once=numbered)
        topics = [(TOPIC, None, [(self.index, batch)])]
        frame = await self.ask(
            lambda number: b"".join(
                produce_wire.encode_request(PRODUCE_VERSION, number, self.name, self.acks, 2000, topics)
            ),
            answered=self.acks != 0,
        )
        if self.acks == 0:
            if self.random.random() < 0.1:
                await self.find_leader(self.index)
            return False
        if frame is None:
            self.last_error = "no answer"
            await self.find_leader(self.index)
            return numbered
        result = produce_wire.decode_response(PRODUCE_VERSION, frame).topics[0][2][0]
        if result.error_code == 0 or (result.error_code == DUPLICATE_SEQUENCE and numbered):
            if self.acks == -1:
                self.acknowledged += len(values)
                checker.acknowledged(self.index, result.base_offset, values, where=self.node_id)
            self.sequence += len(values)
            return False
        self.last_error = result.error_code
        if result.error_code in LOOK_AGAIN:
            await self.find_leader(self.index)
        if numbered and result.error_code == OUT_OF_ORDER:
            checker.broken(
                f"{self.name} sent sequence {self.sequence} after its last acknowledged one and was refused"
            )
        return numbered


class Reader(Client):
    """Reads one partition from its leader, over and over; now and then it begins again somewhere. `fences`: it sends
    which leader epoch it knows, as newer clients do (KIP-320); the others may meet a leader that is none any more."""

    def __init__(self, world: World, name: str, index: int, *, fences: bool) -> None:
        super().__init__(world, name)
        self.index = index
        self.fences = fences
        self.position = 0
        self.end = -1
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.over:
            if self.random.random() < 0.05:
                self.position = self.random.choice((0, self.random.randint(0, max(0, self.position))))
            if not await self._read():
                await self.find_leader(self.index)
                await self.sleep(self.random.uniform(20, 150))
            await self.sleep(self.random.uniform(5, 90))

    async def _read(self) -> bool:
        epoch = self.leader_epoch if self.fences else -1
        wanted = fetch_wire.FetchPartition(self.index, epoch, self.position, -1, -1, 8192)
        frame = await self.ask(
            lambda number: fetch_wire.encode_request(
                FETCH_VERSION,
                number,
                self.name,
                [(TOPIC, None, [wanted])],
                max_wait_ms=self.random.choice((0, 100, 400)),
                min_bytes=1,
                max_bytes=16384,
                isolation_level=self.random.choice((0, 1)),
            )
        )
        if frame is None:
            self.last_error = "no answer"
            return False
        answer = fetch_wire.decode_response(FETCH_VERSION, frame).topics[0][2][0]
        checker = self.world.checker
        if answer.error_code:
            self.last_error = answer.error_code
            if answer.error_code == OFFSET_OUT_OF_RANGE and (
                epoch >= 0 or not self.world.holds(self.node_id)
            ):
                checker.broken(
                    f"{self.name} read up to {self.position}, and broker {self.node_id} knows no such offset"
                )
            return False
        checker.high_watermark(self.index, answer.high_watermark)
        self.end = answer.high_watermark
        before = self.position
        for position, header in iterate_batches(answer.records):
            batch = answer.records[position : position + header.size]
            for record in read_records(batch, output_bytes_max=1 << 20):
                if record.offset < before:
                    continue
                if record.offset != self.position:
                    checker.broken(f"{self.name}: after {self.position - 1} came {record.offset}")
                if record.offset >= answer.high_watermark:
                    checker.broken(
                        f"{self.name} reads {record.offset}, the high watermark is {answer.high_watermark}"
                    )
                checker.read(self.index, record.offset, present(record.value).strip(), by=self.name)
                self.position = record.offset + 1
        return True


class Committer(Client):
    """Commits offsets of a group that grow, and looks what is kept."""

    def __init__(self, world: World, group: str) -> None:
        super().__init__(world, f"group {group}")
        self.group = group
        self.faithful = True
        self.kept = -1
        self.maybe: set[int] = set()
        """What may have been committed: nobody said."""
        self.next = 0
        self.acknowledged = 0
        self.good_at_ms = 0.0
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        await self.find_coordinator(self.group)
        while not self.world.over:
            await self.sleep(self.random.uniform(30, 250))
            good = await (self.commit() if self.random.random() < 0.6 else self.look())
            if not good:
                await self.find_coordinator(self.group)
                await self.sleep(self.random.uniform(20, 150))

    async def commit(self) -> bool:
        self.next += 1
        offset = self.next
        self.maybe.add(offset)
        answer = await self.call(ApiKey.OFFSET_COMMIT, 8, commit_of(self.group, 0, offset))
        if answer is None:
            self.last_error = "no answer"
            return False
        code = answer.topics[0].partitions[0].error_code
        if code:
            self.last_error = code
            return False
        self.kept = offset
        self.acknowledged += 1
        self.good_at_ms = self.world.simulation.now_ms
        return True

    async def look(self) -> bool:
        wanted = {
            "group_id": self.group,
            "member_id": None,
            "member_epoch": -1,
            "topics": [{"name": TOPIC, "partition_indexes": [0]}],
        }
        answer = await self.call(ApiKey.OFFSET_FETCH, 8, {"groups": [wanted], "require_stable": True})
        if answer is None or answer.groups[0].error_code:
            self.last_error = "no answer" if answer is None else answer.groups[0].error_code
            return False
        offset = answer.groups[0].topics[0].partitions[0].committed_offset
        if self.world.is_misled(self.node_id):
            return False
        if offset < self.kept or (offset != self.kept and offset not in self.maybe):
            self.world.checker.broken(f"{self.name}: {self.kept} was committed, then {offset} is kept")
        return True


def commit_of(
    group: str, index: int, offset: int, *, generation: int = -1, member_id: str = ""
) -> dict[str, Any]:
    """The fields of a request that commits one offset."""
    partition = {
        "partition_index": index,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    return {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "member_id": member_id,
        "group_instance_id": None,
        "topics": [{"name": TOPIC, "partitions": [partition]}],
    }
