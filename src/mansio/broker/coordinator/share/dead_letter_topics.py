"""Dead-letter topics: selection and creation of the topic of a group, and appends to it, locally or on another broker.

A topic accepts dead letters if it has `errors.deadletterqueue.group.enable=true`; records of such a topic that are
given up are not copied (otherwise every failure would fail again). The target partition is that of the record
modulo the number of partitions.

Invariants: an append succeeds only when the batch is committed, as with acks=all. A batch goes to the topic with the id
for which it was reserved, never to another one with that name.

Source: KIP-1191.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.broker.partition.producer_hook import ProducerHook
from mansio.broker.services.topics import NewTopic
from mansio.config.config_def import INT32_MAX
from mansio.config.share_group_config import DEAD_LETTER_COPY_ENABLE, DEAD_LETTER_TOPIC, effective_value
from mansio.config.topic_config import DEAD_LETTER_TOPIC_ENABLE
from mansio.errors import (
    InvalidTopic,
    LeaderNotAvailable,
    MansioError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    PolicyViolation,
    RequestTimedOut,
    TopicAlreadyExists,
    UnknownTopicId,
)
from mansio.net.retry import error_for
from mansio.wire.apis import fetch, produce
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.topics import TopicService
    from mansio.metadata.model import Topic
    from mansio.ports import Peers, Promise, Scheduler
    from mansio.state.share_partition.dead_letters import DeadLetterBatch
    from mansio.wire.batch.record_batch import BatchHeader

RETENTION_MS: Final = 14 * 24 * 3600 * 1000
HEADERS_ROOM_BYTES: Final = 64 * 1024
"""Added to the largest batch of the source topic for a dead-letter topic created here."""

WRITE_TIMEOUT_MS: Final = 10_000
ALL: Final = -1
PRODUCE_VERSION: Final = 13
DUPLICATE_SEQUENCE: Final = 46
CLIENT_ID: Final = "mansio-dead-letters"

CLOCKS_APART_MS: Final = 60 * 60 * 1000
"""Upper bound of the clock difference of two brokers."""

FETCH_VERSION: Final = 17
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
MEASURED_VALUES_MAX: Final = 1_000
"""Batches searched before the event loop continues with other tasks."""


class DeadLetterPartition(NamedTuple):
    """One partition of a dead-letter topic. `bytes_max`: its largest batch."""

    topic: str
    topic_id: bytes
    partition: int
    bytes_max: int


class DeadLetterTopics:
    """All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        overrides: Callable[[str], Mapping[str, str]],
        prefix: str,
        peers: Peers | None = None,
    ) -> None:
        """`overrides`: settings of a group; `peers`: None on a single node."""
        self._node_id = node_id
        self._topics = topics
        self._partitions = partitions
        self._scheduler = scheduler
        self._overrides = overrides
        self._prefix = prefix
        self._peers = peers
        self._creating: dict[str, list[Promise[None]]] = {}  # waiters for the topic of that name

    # ------------------------------------------------------------------ selection

    def is_dead_letter_topic(self, topic: Topic) -> bool:
        """Whether a topic accepts dead letters."""
        return self._topics.settings_of(topic).is_dead_letter_topic

    def copied(self, group: str) -> bool:
        """Whether dead letters of a group contain the record, or only its position."""
        return bool(effective_value(DEAD_LETTER_COPY_ENABLE, self._overrides(group)) == "true")

    def name_of(self, group: str, topic: str) -> str:
        """Name of the dead-letter topic for a topic."""
        return effective_value(DEAD_LETTER_TOPIC, self._overrides(group)) or f"{self._prefix}{topic}"

    async def find(self, group: str, source: Topic, index: int) -> DeadLetterPartition:
        """The target partition for a partition; creates the topic if it does not exist.

        Raises `PolicyViolation` for a topic that does not accept dead letters, `InvalidTopic` for an invalid name, and
        as `TopicService.create`.
        """
        name = self.name_of(group, source.name)
        if name.startswith("__"):
            raise InvalidTopic(
                f"a dead-letter topic cannot be named {name}: names that start with __ are internal"
            )
        while name in self._creating:
            await self._wait_created(name)
        topic = self._topics.state.topics.get(name) or await self._create_once(name, source)
        if not self.is_dead_letter_topic(topic):
            raise PolicyViolation(
                f"topic {name} does not accept dead letters: set {DEAD_LETTER_TOPIC_ENABLE}=true"
            )
        partition = index % len(topic.partitions)
        return DeadLetterPartition(name, topic.topic_id.bytes, partition, self._bytes_max(topic))

    async def _wait_created(self, name: str) -> None:
        promise: Promise[None] = self._scheduler.promise()
        self._creating[name].append(promise)
        await promise

    async def _create_once(self, name: str, source: Topic) -> Topic:
        """Create the topic once, even if several share partitions need it at the same time."""
        self._creating[name] = []
        try:
            return await self._create(name, source)
        except TopicAlreadyExists:  # created concurrently
            topic = self._topics.state.topics.get(name)
            if topic is None:
                raise
            return topic
        finally:
            for promise in self._creating.pop(name):
                if not promise.done():
                    promise.set_result(None)

    async def _create(self, name: str, source: Topic) -> Topic:
        settings = self._topics.settings_of(source)
        largest = min(settings.max_message_bytes + HEADERS_ROOM_BYTES, INT32_MAX)
        configs = (
            (DEAD_LETTER_TOPIC_ENABLE, "true"),
            ("max.message.bytes", str(largest)),
            ("message.timestamp.type", "CreateTime"),
            ("retention.ms", str(RETENTION_MS)),
        )
        return await self._topics.create(
            NewTopic(name, len(source.partitions), source.replication_factor, configs=configs)
        )

    def by_id(self, topic_id: bytes, partition: int) -> DeadLetterPartition:
        """The target of a reserved batch. Raises `UnknownTopicId` if it was deleted."""
        topic = self._topics.find_by_id(UUID(bytes=topic_id))
        if partition >= len(topic.partitions):
            raise UnknownTopicId(f"topic {topic.name} has no partition {partition} any more")
        return DeadLetterPartition(topic.name, topic_id, partition, self._bytes_max(topic))

    def _bytes_max(self, topic: Topic) -> int:
        return self._topics.settings_of(topic).max_message_bytes

    # ------------------------------------------------------------------ appends

    async def append(self, target: DeadLetterPartition, data: bytes) -> None:
        """Returns when the batch is committed, also by an earlier append. Raises if it is not, or if that is
        unknown."""
        leader = self._leader_of(target)
        if leader is None:
            partition = self._here(target)
            appended = await self._append_here(partition, data)
            await self._within(partition.committed(appended.end_offset), partition.name)
            return
        topics = [(None, target.topic_id, [(target.partition, data)])]
        request = b"".join(
            produce.encode_request(PRODUCE_VERSION, 0, CLIENT_ID, ALL, WRITE_TIMEOUT_MS, topics)
        )
        answer = await self._send(leader, request)
        response = produce.decode_response(PRODUCE_VERSION, answer)
        for _, _, results in response.topics:
            for result in results:
                if result.error_code not in (0, DUPLICATE_SEQUENCE):
                    raise error_for(result.error_code, result.error_message)

    async def _append_here(self, partition: Partition, data: bytes) -> AppendResult:
        """Append with the topic's compression.type, as a client's batch."""
        promise: Promise[AppendResult] = self._scheduler.promise()

        def on_appended(outcome: AppendResult | MansioError) -> None:
            if promise.done():
                return  # the caller was cancelled
            if isinstance(outcome, MansioError):
                promise.set_exception(outcome)
            else:
                promise.set_result(outcome)

        self._partitions.recompressor.append(partition, data, urgent=True, on_appended=on_appended)
        return await promise

    def is_unknown_producer(self, batch: DeadLetterBatch) -> bool:
        """Whether the target is led here and has no state of the producer; it would then accept a duplicate."""
        if self._leader_of(self.by_id(batch.topic_id, batch.partition)) is not None:
            return False
        hook = self._here(self.by_id(batch.topic_id, batch.partition)).find_hook(ProducerHook)
        return hook is None or hook.table.get(batch.producer_id) is None

    async def holds(self, batch: DeadLetterBatch, wall_ms: int) -> bool:
        """Whether the target contains this batch, searched from the time when its records were given up.

        It is identified by producer, epoch and sequence, which are unique in a partition. `wall_ms`: now. Raises errors
        of reading.
        """
        target = self.by_id(batch.topic_id, batch.partition)
        since_ms = max(min(batch.oldest_ms, wall_ms) - CLOCKS_APART_MS, 0)
        if self._leader_of(target) is None:
            return await self._contains_locally(self._here(target), batch, since_ms)
        return await self._contains_remotely(target, batch)

    async def _contains_locally(self, partition: Partition, batch: DeadLetterBatch, since_ms: int) -> bool:
        partition.ensure_high_watermark_known()
        found = partition.offset_at_timestamp(since_ms, partition.end_offset)
        if found is None:
            return False
        for looked_at, header in enumerate(partition.log.batch_headers(found[0]), 1):
            if _is_of(header, batch):
                await self._within(partition.committed(header.last_offset + 1), partition.name)
                return True
            if looked_at % MEASURED_VALUES_MAX == 0:
                await self._scheduler.sleep(0)
        return False

    async def _contains_remotely(self, target: DeadLetterPartition, batch: DeadLetterBatch) -> bool:
        """Search by reading the whole target: rare, and it needs one API only."""
        offset = 0
        while True:
            asked = fetch.FetchPartition(target.partition, -1, offset, -1, -1, FETCH_BYTES_MAX)
            request = fetch.encode_request(
                FETCH_VERSION,
                0,
                CLIENT_ID,
                [(None, target.topic_id, [asked])],
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=FETCH_BYTES_MAX,
            )
            answer = await self._send(self._leader_of(target), request)
            found = _fetched(fetch.decode_response(FETCH_VERSION, answer))
            if found.error_code == OffsetOutOfRange.kafka_code and offset < found.log_start_offset:
                offset = found.log_start_offset
                continue
            if found.error_code:
                raise error_for(found.error_code)
            headers = [header for _, header in iterate_batches(found.records or b"")]
            if any(_is_of(header, batch) for header in headers):
                return True
            if not headers:
                return False
            offset = headers[-1].last_offset + 1

    def _leader_of(self, target: DeadLetterPartition) -> int | None:
        """The leader; None if it is this broker."""
        topic = self._topics.find_by_id(UUID(bytes=target.topic_id))
        leader = topic.partitions[target.partition].leader
        if leader == self._node_id or self._peers is None:
            return None
        if leader < 0:
            raise LeaderNotAvailable(f"no leader for {target.topic}-{target.partition}")
        return leader

    def _here(self, target: DeadLetterPartition) -> Partition:
        partition = self._partitions.find(None, target.topic_id, target.partition)
        partition.ensure_leader()
        return partition

    async def _send(self, node_id: int | None, request: bytes) -> bytes:
        if node_id is None or self._peers is None:
            raise NotLeaderOrFollower("the leader of the dead-letter topic has moved")
        return await self._peers.send(node_id, request, timeout_ms=2 * WRITE_TIMEOUT_MS)

    async def _within(self, promise: Promise[Any], name: str) -> None:
        """Wait for a promise with a time limit."""
        late: Promise[Any] = self._scheduler.promise()

        def complete(outcome: Any) -> None:
            if not late.done():
                try:
                    late.set_result(outcome.result())
                except Exception as error:  # noqa: BLE001 - it is handed on
                    late.set_exception(error)

        def end() -> None:
            if not late.done():
                late.set_exception(
                    RequestTimedOut(f"{name}: not committed within {WRITE_TIMEOUT_MS // 1000} s")
                )

        promise.add_done_callback(complete)
        timer = self._scheduler.call_later(WRITE_TIMEOUT_MS, end)
        try:
            await late
        finally:
            timer.cancel()


def _is_of(header: BatchHeader, batch: DeadLetterBatch) -> bool:
    return (header.producer_id, header.producer_epoch, header.base_sequence) == (
        batch.producer_id,
        batch.epoch,
        batch.base_sequence,
    )


def _fetched(answer: fetch.FetchResponse) -> fetch.FetchedPartition:
    """The requested partition. Raises its error."""
    if answer.error_code:
        raise error_for(answer.error_code)
    for _, _, partitions in answer.topics:
        for partition in partitions:
            return partition
    raise RequestTimedOut("the response lacks the dead-letter topic")
