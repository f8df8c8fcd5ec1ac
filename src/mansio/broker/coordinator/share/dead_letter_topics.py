"""Dead-letter topics: selection and creation of the topic of a group, and appends to it, locally or on another broker.

A topic accepts dead letters if it has `errors.deadletterqueue.group.enable=true`. Records of such a topic are not
dead-lettered themselves, so that a record that always fails is not copied again and again. The partition number of a
dead letter is that of its record modulo the number of partitions of the dead-letter topic.

Invariants: an append succeeds only when the batch is committed, as with acks=all. A batch is appended only to the topic
with the topic id for which it was reserved, never to a new topic of the same name. A topic that the settings of a group
name gets dead letters only while who has named it may write to it.

Source: KIP-1191.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from mansio.broker.partition.producer_hook import ProducerHook
from mansio.broker.topics.leader_appends import LeaderAppends, LedPartition
from mansio.broker.topics.topics import NewTopic
from mansio.config.config_def import INT32_MAX
from mansio.config.share_group_config import (
    DEAD_LETTER_COPY_ENABLE,
    DEAD_LETTER_OWNER,
    DEAD_LETTER_TOPIC,
    effective_value,
)
from mansio.config.topic_config import DEAD_LETTER_TOPIC_ENABLE
from mansio.config.topic_names import dead_letter_topic_of, unified_name
from mansio.errors import (
    InvalidTopic,
    OffsetOutOfRange,
    PolicyViolation,
    RequestTimedOut,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
    UnknownTopicId,
)
from mansio.net.retry import client_error_for_code
from mansio.ports import complete
from mansio.tracebacks import result_of
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.metadata.model import Topic
    from mansio.ports import Peers, Promise, Scheduler
    from mansio.state.share_partition.dead_letters import DeadLetterBatch
    from mansio.wire.batch.record_batch import BatchHeader

RETENTION_MS: Final = 14 * 24 * 3600 * 1000
"""`retention.ms` of a dead-letter topic that the broker creates."""

ADDED_HEADERS_RESERVE_BYTES: Final = 64 * 1024
"""`max.message.bytes` of a dead-letter topic that the broker creates exceeds that of the source topic by this."""

DEAD_LETTERS_CLIENT_ID: Final = "mansio-dead-letters"

CLOCK_SKEW_MS_MAX: Final = 60 * 60 * 1000
"""Assumed upper bound of the difference between the clocks of two brokers."""

FETCH_VERSION: Final = 17
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
BATCHES_PER_ITERATION_MAX: Final = 1_000
"""Maximum number of batches searched in one iteration of the event loop."""


class DeadLetterPartition(NamedTuple):
    """One partition of a dead-letter topic. `bytes_max`: maximum size of a batch, `max.message.bytes` of the topic."""

    topic: str
    topic_id: bytes
    partition: int
    bytes_max: int


class DeadLetterTopics:
    """Dead-letter topics of all groups. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        overrides: Callable[[str], Mapping[str, str]],
        topic_name_prefix: str,
        may_write: Callable[[str, str], bool],
        peers: Peers | None = None,
    ) -> None:
        """Create the service. `overrides`: returns the settings of a group; `topic_name_prefix`: prefix of the name of
        a source topic for the default name of its dead-letter topic; `may_write`: see `owner_may_write`; `peers`: None
        on a single node."""
        self._may_write = may_write
        self._topics = topics
        self._scheduler = scheduler
        self._overrides = overrides
        self._topic_name_prefix = topic_name_prefix
        self._appends = LeaderAppends(
            node_id=node_id,
            topics=topics,
            partitions=partitions,
            scheduler=scheduler,
            client_id=DEAD_LETTERS_CLIENT_ID,
            peers=peers,
        )
        self._creating: dict[str, list[Promise[None]]] = {}  # waiters for the topic of that name

    # ------------------------------------------------------------------ selection

    def is_dead_letter_topic(self, topic: Topic) -> bool:
        """Return whether a topic accepts dead letters."""
        return self._topics.settings_of(topic).is_dead_letter_topic

    def copies_records(self, group: str) -> bool:
        """Return whether dead letters of a group contain the record, not only headers with its position."""
        return bool(effective_value(DEAD_LETTER_COPY_ENABLE, self._overrides(group)) == "true")

    def dead_letter_topic_name(self, group: str, topic: str) -> str:
        """Return the name of the dead-letter topic of a group for records of a topic."""
        return effective_value(DEAD_LETTER_TOPIC, self._overrides(group)) or dead_letter_topic_of(
            topic, self._topic_name_prefix
        )

    def check_owner(self, group: str, topic: str) -> None:
        """Raise `TopicAuthorizationFailed` if the settings of a group name this dead-letter topic, or one whose name
        differs in `.` and `_` only, and who has named it may not write to it any more."""
        overrides = self._overrides(group)
        named, owner = overrides.get(DEAD_LETTER_TOPIC), overrides.get(DEAD_LETTER_OWNER, "")
        if named and unified_name(named) == unified_name(topic) and not self._may_write(owner, topic):
            principal = owner.partition(" ")[2]
            raise TopicAuthorizationFailed(
                f"{principal}, who has set {DEAD_LETTER_TOPIC}, is not allowed to WRITE the topic {topic}"
            )

    async def find(self, group: str, source_topic: Topic, source_partition: int) -> DeadLetterPartition:
        """Return the dead-letter partition for records of a partition; create the topic if it does not exist.

        Raises `TopicAuthorizationFailed`, `PolicyViolation` for a topic that does not accept dead letters,
        `InvalidTopic` for an invalid name, and the errors of `TopicService.create`.
        """
        name = self.dead_letter_topic_name(group, source_topic.name)
        if name.startswith("__"):
            raise InvalidTopic(
                f"a dead-letter topic cannot be named {name}: names that start with __ are internal"
            )
        self.check_owner(group, name)
        while name in self._creating:
            await self._wait_until_created(name)
        topic = self._find_existing(name) or await self._create_once(name, source_topic)
        self.check_owner(group, topic.name)
        if not self.is_dead_letter_topic(topic):
            raise PolicyViolation(
                f"topic {name} does not accept dead letters: set {DEAD_LETTER_TOPIC_ENABLE}=true"
            )
        partition = source_partition % len(topic.partitions)
        return DeadLetterPartition(topic.name, topic.topic_id.bytes, partition, self._bytes_max(topic))

    def _find_existing(self, name: str) -> Topic | None:
        """Return the topic of this name, or a dead-letter topic whose name differs in `.` and `_` only: beside it none
        can be created, and topics with such names that were created by an earlier version have dead letters, too."""
        state = self._topics.state
        if (topic := state.topics.get(name)) is not None:
            return topic
        others = state.colliding_topics(name)
        return next(
            (each for each in others if each.name in state.topics and self.is_dead_letter_topic(each)), None
        )

    async def _wait_until_created(self, name: str) -> None:
        promise: Promise[None] = self._scheduler.promise()
        self._creating[name].append(promise)
        await result_of(promise)

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
                complete(promise, None)

    async def _create(self, name: str, source: Topic) -> Topic:
        settings = self._topics.settings_of(source)
        largest = min(settings.max_message_bytes + ADDED_HEADERS_RESERVE_BYTES, INT32_MAX)
        configs = (
            (DEAD_LETTER_TOPIC_ENABLE, "true"),
            ("max.message.bytes", str(largest)),
            ("message.timestamp.type", "CreateTime"),
            ("retention.ms", str(RETENTION_MS)),
        )
        return await self._topics.create(
            NewTopic(name, len(source.partitions), source.replication_factor, configs=configs)
        )

    def find_by_id(self, topic_id: bytes, partition: int) -> DeadLetterPartition:
        """Return the dead-letter partition with this topic id and number. Raises `UnknownTopicId` if it was deleted."""
        topic = self._topics.find_by_id(UUID(bytes=topic_id))
        if partition >= len(topic.partitions):
            raise UnknownTopicId(f"topic {topic.name} has no partition {partition} any more")
        return DeadLetterPartition(topic.name, topic_id, partition, self._bytes_max(topic))

    def _bytes_max(self, topic: Topic) -> int:
        return self._topics.settings_of(topic).max_message_bytes

    # ------------------------------------------------------------------ appends

    async def append(self, target: DeadLetterPartition, data: bytes) -> None:
        """Append a batch and return when it is committed, by this append or an earlier one.

        Raises the error of the append, or one of the errors of a timeout or a lost connection, after which it is
        unknown whether the batch was appended."""
        await self._appends.append(_led(target), data)

    def is_unknown_producer(self, batch: DeadLetterBatch) -> bool:
        """Return whether this broker leads the dead-letter partition and has no state of the batch's producer in it.

        The partition would then accept the batch a second time."""
        target = _led(self.find_by_id(batch.topic_id, batch.partition))
        if self._appends.leader_of(target) is not None:
            return False
        hook = self._appends.local_partition(target).find_hook(ProducerHook)
        return hook is None or hook.table.get(batch.producer_id) is None

    async def contains(self, batch: DeadLetterBatch, wall_ms: int) -> bool:
        """Return whether the dead-letter partition contains the batch.

        On this broker the search starts at the time when the batch's records became archiving. The batch is identified
        by producer id, epoch and base sequence, which are unique in a partition. `wall_ms`: the current time. Raises
        the errors of reading the partition.
        """
        target = self.find_by_id(batch.topic_id, batch.partition)
        since_ms = max(min(batch.oldest_ms, wall_ms) - CLOCK_SKEW_MS_MAX, 0)
        if self._appends.leader_of(_led(target)) is None:
            return await self._contains_locally(self._appends.local_partition(_led(target)), batch, since_ms)
        return await self._contains_remotely(target, batch)

    async def _contains_locally(self, partition: Partition, batch: DeadLetterBatch, since_ms: int) -> bool:
        partition.ensure_high_watermark_known()
        found = partition.offset_at_timestamp(since_ms, partition.end_offset)
        if found is None:
            return False
        for searched_count, header in enumerate(partition.log.batch_headers(found[0]), 1):
            if _is_same_batch(header, batch):
                await self._appends.wait_with_timeout(
                    partition.commit_promise(header.last_offset + 1), partition.name
                )
                return True
            if searched_count % BATCHES_PER_ITERATION_MAX == 0:
                await self._scheduler.sleep(0)
        return False

    async def _contains_remotely(self, target: DeadLetterPartition, batch: DeadLetterBatch) -> bool:
        """Search the whole partition on another broker with Fetch requests; this is rarely needed."""
        offset = 0
        while True:
            fetch_partition = fetch.FetchPartition(target.partition, -1, offset, -1, -1, FETCH_BYTES_MAX)
            request = fetch.encode_request(
                FETCH_VERSION,
                0,
                DEAD_LETTERS_CLIENT_ID,
                [(None, target.topic_id, [fetch_partition])],
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=FETCH_BYTES_MAX,
            )
            answer = await self._appends.send(self._appends.leader_of(_led(target)), request)
            found = _fetched_partition(fetch.decode_response(FETCH_VERSION, answer))
            if found.error_code == OffsetOutOfRange.kafka_code and offset < found.log_start_offset:
                offset = found.log_start_offset
                continue
            if found.error_code:
                raise client_error_for_code(found.error_code)
            headers = [header for _, header in iterate_batches(found.records or b"")]
            if any(_is_same_batch(header, batch) for header in headers):
                return True
            if not headers:
                return False
            offset = headers[-1].last_offset + 1


def _led(target: DeadLetterPartition) -> LedPartition:
    return LedPartition(target.topic, target.topic_id, target.partition)


def _is_same_batch(header: BatchHeader, batch: DeadLetterBatch) -> bool:
    return (header.producer_id, header.producer_epoch, header.base_sequence) == (
        batch.producer_id,
        batch.epoch,
        batch.base_sequence,
    )


def _fetched_partition(answer: fetch.FetchResponse) -> fetch.FetchedPartition:
    """Return the only partition of a Fetch response. Raises the error of the response."""
    if answer.error_code:
        raise client_error_for_code(answer.error_code)
    for _, _, partitions in answer.topics:
        for partition in partitions:
            return partition
    raise RequestTimedOut("the response lacks the dead-letter topic")
