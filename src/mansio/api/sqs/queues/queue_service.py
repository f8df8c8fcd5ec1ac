"""Queue service: queues with the behaviour of Amazon SQS. A queue is a topic and the share group `sqs.QUEUE`.

The attributes of a queue are a setting of its topic, so that they are stored, replicated and deleted with it. A queue
is created in steps that can be repeated: the topic, then the settings of the group. Dead letters are those of the share
group; the dead-letter queue of the redrive policy is the dead-letter topic.

Invariants:
* A send is answered after its message is durable, as with acks=all.
* Every entry of a batch has its own result.
* A message that is older than the retention period of its queue is not delivered.
* A queue that the caller may not describe does not exist for it. What else an action needs is asked before its first
  step, where a later refusal would leave the rest undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from mansio.api.routing.publishing import publish_records
from mansio.api.sqs.queues.messages import (
    Message,
    MessageAttribute,
    message_id,
    message_of,
    record_headers,
)
from mansio.api.sqs.queues.queue_attributes import (
    ARN_PREFIX,
    TAGS_MAX,
    QueueAttributes,
    check_queue_name,
)
from mansio.api.sqs.queues.queue_errors import (
    InvalidParameterValue,
    MessageNotInflight,
    QueueDoesNotExist,
    QueueNameExists,
    ReceiptHandleIsInvalid,
)
from mansio.broker.routing.caller import ANONYMOUS, BROKER_CALLER
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.share_groups.leases import Acknowledgement, Receipt
from mansio.config.share_group_config import DELIVERY_COUNT_MAX
from mansio.config.topic_config import DEAD_LETTER_TOPIC_ENABLE, DEDUP_MS, QUEUE_ATTRIBUTES
from mansio.errors import (
    AuthorizationFailed,
    GroupIdNotFound,
    InvalidReceipt,
    InvalidRecordState,
    MansioError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from mansio.ports import Backoff
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.share_partition.types import ACCEPT, RELEASE, RENEW
from mansio.tracebacks import without_traceback
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.client.admin.admin import Admin
    from mansio.metadata.model import Topic

GROUP_PREFIX: Final = "sqs."
DEDUPLICATION_MS: Final = 300_000
"""Window of the deduplication of a FIFO queue: five minutes, as in SQS."""

RECORD_OVERHEAD_BYTES: Final = 128 * 1024
"""What `max.message.bytes` of a queue exceeds the largest message by: headers, and those of a dead letter."""

RECORD_LOCKS_MAX: Final = 4_000
SHORT_POLL_MS: Final = 100
"""How long a receive without waiting waits, because the state of a group may have to be loaded."""

PENDING_PAGE: Final = 1_000
COUNTED_BATCHES_MAX: Final = 10_000
"""Number of batches whose records are counted for the attributes of a queue; more are estimated."""

FIRST_RECEIVES_MAX: Final = 20_000
CREATION_WAIT_MS: Final = 10_000
CREATION_BACKOFF: Final = Backoff(first_ms=10, longest_ms=200)
"""Wait for a topic that another request is creating."""

PARSED_MAX: Final = 1_000
"""Number of queues whose decoded attributes are kept."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue: its name, attributes and topic."""

    name: str
    attributes: QueueAttributes
    topic: Topic

    @property
    def group(self) -> str:
        """The share group of the queue."""
        return GROUP_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to send. `delay_s`: None for the delay of the queue."""

    body: bytes
    attributes: Mapping[str, MessageAttribute] = field(default_factory=dict)
    delay_s: int | None = None
    group_id: str | None = None
    deduplication_id: str | None = None
    trace_header: str | None = None


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Id of a message, and its sequence number in a FIFO queue."""

    message_id: str
    sequence_number: str = ""


class QueueService:
    """Creates queues, and sends, receives and deletes messages. All methods run on the broker's event loop."""

    def __init__(self, services: BrokerServices, clients: RoutedClients) -> None:
        self._services = services
        self._clients = clients
        self._parsed: OrderedDict[str, QueueAttributes] = OrderedDict()
        """Attributes by their JSON."""
        self._changing = asyncio.Lock()
        self._first_receives: OrderedDict[tuple[bytes, int, int], int] = OrderedDict()
        """When messages were first received, as far as this broker remembers it."""

    def _admin(self, caller: Caller) -> Admin:
        return self._clients.client(caller).admin

    # Queues

    def _allows(self, caller: Caller, operation: Operation, name: str) -> bool:
        return self._services.authorization.allows(caller, operation, ResourceType.TOPIC, name)

    def _check(self, caller: Caller, operation: Operation, name: str) -> None:
        """Raise `TopicAuthorizationFailed` unless a caller may do an operation on the topic of a queue."""
        self._services.authorization.check(caller, operation, ResourceType.TOPIC, name)

    def _check_group(self, caller: Caller, operation: Operation, name: str) -> None:
        """Raise `GroupAuthorizationFailed` unless a caller may do an operation on the group of a queue."""
        self._services.authorization.check(caller, operation, ResourceType.GROUP, GROUP_PREFIX + name)

    def find(self, name: str, *, caller: Caller) -> Queue:
        """Return a queue. Raises `QueueDoesNotExist`, also if the caller may not describe its topic."""
        if not self._allows(caller, Operation.DESCRIBE, name):
            self._services.authorization.refusal(caller, Operation.DESCRIBE, ResourceType.TOPIC, name)
            raise QueueDoesNotExist("The specified queue does not exist.")
        return self._find(name)

    def _find(self, name: str) -> Queue:
        topic = self._services.topics.state.topics.get(name)
        text = "" if topic is None else topic.configs.get(QUEUE_ATTRIBUTES, "")
        if topic is None or not text:
            raise QueueDoesNotExist("The specified queue does not exist.")
        return Queue(name, self._attributes(text), topic)

    def _attributes(self, text: str) -> QueueAttributes:
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = QueueAttributes.from_json(text)
            if len(self._parsed) > PARSED_MAX:
                self._parsed.popitem(last=False)
        return found

    def list_names(self, prefix: str = "", after: str = "", *, caller: Caller) -> list[str]:
        """Return the names of the queues that begin with `prefix`, behind `after`, and that the caller may describe,
        sorted."""
        topics = self._services.topics.state.topics
        names = sorted(
            name
            for name, topic in topics.items()
            if name.startswith(prefix) and name > after and topic.configs.get(QUEUE_ATTRIBUTES)
        )
        allowed_names = self._services.authorization.allowed_names
        return allowed_names(caller, Operation.DESCRIBE, ResourceType.TOPIC, names)

    def dead_letter_sources(self, queue: Queue, *, caller: Caller) -> list[str]:
        """Return the names of the queues whose dead-letter queue this is, and that the caller may describe."""
        names = self.list_names(caller=caller)
        return [name for name in names if _has_target(self._find(name).attributes, queue.name)]

    def check_move(self, source: Queue, destination: str, *, caller: Caller) -> None:
        """Raise an `AuthorizationFailed` unless a caller may move messages from one queue to another, "" for the
        sources of the messages. It is asked again for each message."""
        self._check_group(caller, Operation.READ, source.name)
        self._check(caller, Operation.READ, source.name)
        if destination:
            self._check(caller, Operation.WRITE, destination)

    async def create(
        self, name: str, attributes: Mapping[str, str], tags: Mapping[str, str], *, caller: Caller
    ) -> Queue:
        """Create a queue, or return the one with this name if it has the attributes of the request.

        The caller needs the rights to create the topic and to alter the settings of the group, and those of
        `_check_redrive`. Raises `AuthorizationFailed`, `QueueNameExists`, `InvalidParameterValue`,
        `InvalidAttributeName`, `InvalidAttributeValue`."""
        self._check_group(caller, Operation.ALTER_CONFIGS, name)
        is_fifo = attributes.get("FifoQueue") == "true"
        check_queue_name(name, is_fifo=is_fifo)
        now_s = self._services.clock.wall_ms() // 1000
        _check_tags(name, tags)
        empty = QueueAttributes(is_fifo=is_fifo, created_s=now_s, modified_s=now_s, tags=dict(tags))
        wanted = empty.changed(attributes)
        self._check_redrive(name, wanted, caller)
        if self._allows(caller, Operation.DESCRIBE, name):
            with contextlib.suppress(QueueDoesNotExist):
                return await self._existing(self._find(name), attributes, caller)
        config = {
            **_topic_config(wanted),
            "mansio.delay.enable": "true",
            "retention.bytes": "-1",
        }
        if is_fifo:
            config[DEDUP_MS] = str(DEDUPLICATION_MS)
        try:
            await self._admin(caller).create_topic(name, partitions=1 if is_fifo else -1, config=config)
        except TopicAlreadyExists:
            return await self._existing(await self._created(name), attributes, caller)
        await self._configure(name, wanted, caller, is_new=True)
        queue = self._find(name)
        with contextlib.suppress(AuthorizationFailed):  # the first receive does it, if another user receives
            await self._services.leases.register(queue.group, [name], caller=caller)
        if self.dead_letter_sources(queue, caller=BROKER_CALLER):  # one with this name was deleted
            await self._accept_dead_letters(name, caller)
        return self._find(name)

    async def _created(self, name: str) -> Queue:
        """Return the queue of a topic that exists, or that another request is creating: wait until it is created.

        Raises `QueueNameExists` if the topic is no queue, or is not created within `CREATION_WAIT_MS`."""
        loop = asyncio.get_running_loop()
        end, attempts = loop.time() + CREATION_WAIT_MS / 1000, 0
        while name not in self._services.topics.state.topics and loop.time() < end:
            attempts += 1
            await asyncio.sleep(CREATION_BACKOFF.delay_seconds(attempts))
        try:
            return self._find(name)
        except QueueDoesNotExist:
            raise QueueNameExists(f"A topic named {name} exists that is not a queue.") from None

    async def _existing(self, queue: Queue, attributes: Mapping[str, str], caller: Caller) -> Queue:
        described = queue.attributes.described(queue.name)
        again = queue.attributes.changed(attributes).described(queue.name)
        for name in attributes:
            if described.get(name) != again.get(name):
                raise QueueNameExists(
                    f"A queue already exists with the same name and a different value for attribute {name}"
                )
        await self._configure(queue.name, queue.attributes, caller)
        return queue

    async def _configure(
        self, name: str, attributes: QueueAttributes, caller: Caller, *, is_new: bool = False
    ) -> None:
        """Set the settings of the group, and let the dead-letter queue accept dead letters. A new standard queue is
        fair; later that is the operator's setting."""
        redrive = attributes.redrive
        await self._admin(caller).alter_group_config(
            GROUP_PREFIX + name,
            {
                "share.auto.offset.reset": "earliest",
                "share.partition.max.record.locks": str(RECORD_LOCKS_MAX),
                "share.delivery.count.limit": str(
                    DELIVERY_COUNT_MAX if redrive is None else redrive.receive_count_max
                ),
                "mansio.retry.backoff.ms": "0",
                "mansio.share.order": "key" if attributes.is_fifo else "none",
                **({"mansio.share.fair": "true"} if is_new and not attributes.is_fifo else {}),
                "mansio.deadletterqueue.enable": "false" if redrive is None else "true",
                "errors.deadletterqueue.topic.name": None if redrive is None else redrive.queue,
            },
        )
        if redrive is not None:
            topic = self._find(redrive.queue).topic
            if topic.configs.get(DEAD_LETTER_TOPIC_ENABLE) != "true":
                await self._accept_dead_letters(redrive.queue, caller)

    async def _accept_dead_letters(self, name: str, caller: Caller) -> None:
        """Make a queue a dead-letter queue. Dead letters are appended once already, and their topic cannot have a
        window of its own."""
        await self._admin(caller).alter_topic_config(name, {DEAD_LETTER_TOPIC_ENABLE: "true", DEDUP_MS: "0"})

    def _check_redrive(self, name: str, attributes: QueueAttributes, caller: Caller, known: str = "") -> None:
        """Check the dead-letter queue that the attributes name. Unless it is the `known` one, the caller needs WRITE
        for it, and ALTER_CONFIGS if it accepts no dead letters yet."""
        redrive = attributes.redrive
        if redrive is None:
            return
        try:
            target = self.find(redrive.queue, caller=BROKER_CALLER if redrive.queue == known else caller)
        except QueueDoesNotExist as error:
            raise InvalidParameterValue(
                f"Value {ARN_PREFIX}{redrive.queue} for parameter RedrivePolicy is invalid. Reason: Dead letter target "
                "does not exist."
            ) from error
        if redrive.queue != known:
            self._check(caller, Operation.WRITE, redrive.queue)
        if target.topic.configs.get(DEAD_LETTER_TOPIC_ENABLE) != "true":
            self._check(caller, Operation.ALTER_CONFIGS, redrive.queue)
        if target.attributes.is_fifo is not attributes.is_fifo:
            raise InvalidParameterValue(
                "Value for parameter RedrivePolicy is invalid. Reason: Dead-letter queue must be same type of queue as "
                "the source."
            )
        if target.attributes.redrive is not None:
            raise InvalidParameterValue(
                "Value for parameter RedrivePolicy is invalid. Reason: a dead-letter queue has no redrive policy here, "
                f"and {redrive.queue} has one."
            )
        if redrive.queue == name:
            raise InvalidParameterValue(
                "Value for parameter RedrivePolicy is invalid. Reason: Dead-letter queue must not be the source itself."
            )
        if not target.attributes.allows_source(name):
            raise InvalidParameterValue(
                "Value for parameter RedrivePolicy is invalid. Reason: The RedriveAllowPolicy of the target denies it."
            )

    async def set_attributes(self, queue: Queue, attributes: Mapping[str, str], *, caller: Caller) -> None:
        """Change attributes of a queue. The caller needs ALTER_CONFIGS for its topic and its group, and the rights of
        `_check_redrive`. Raises `AuthorizationFailed`, `InvalidParameterValue`, `InvalidAttributeName`,
        `InvalidAttributeValue`."""
        self._check(caller, Operation.ALTER_CONFIGS, queue.name)
        self._check_group(caller, Operation.ALTER_CONFIGS, queue.name)
        async with self._changing:
            queue = self._find(queue.name)
            changed = queue.attributes.changed(attributes)
            known = queue.attributes.redrive
            self._check_redrive(queue.name, changed, caller, known="" if known is None else known.queue)
            if changed.redrive is not None and queue.topic.configs.get(DEAD_LETTER_TOPIC_ENABLE) == "true":
                raise InvalidParameterValue(
                    "Value for parameter RedrivePolicy is invalid. Reason: a dead-letter queue has no redrive policy "
                    "here."
                )
            await self._store(
                queue, replace(changed, modified_s=self._services.clock.wall_ms() // 1000), caller
            )
            await self._configure(queue.name, changed, caller)

    async def change_tags(
        self, queue: Queue, added: Mapping[str, str], removed: Collection[str] = (), *, caller: Caller
    ) -> None:
        """Add and remove tags of a queue. Raises `InvalidParameterValue`."""
        async with self._changing:
            queue = self._find(queue.name)
            kept = {key: value for key, value in queue.attributes.tags.items() if key not in removed}
            tags = {**kept, **added}
            _check_tags(queue.name, tags)
            await self._store(queue, replace(queue.attributes, tags=tags), caller)

    async def _store(self, queue: Queue, attributes: QueueAttributes, caller: Caller) -> None:
        await self._admin(caller).alter_topic_config(queue.name, dict(_topic_config(attributes)))

    async def delete(self, queue: Queue, *, caller: Caller) -> None:
        """Delete a queue with its messages. The caller needs DELETE for its topic and its group."""
        self._check(caller, Operation.DELETE, queue.name)
        self._check_group(caller, Operation.DELETE, queue.name)
        with contextlib.suppress(UnknownTopicOrPartition):
            await self._admin(caller).delete_topic(queue.name)
        with contextlib.suppress(GroupIdNotFound):
            await self._admin(caller).delete_group(queue.group)

    async def purge(self, queue: Queue, *, caller: Caller) -> None:
        """Delete all messages of a queue: pending ones, and those in its log by moving the start of its group. The
        caller needs DELETE and READ for its topic, READ for its group, and WRITE for the topic if messages are pending.
        """
        self._check(caller, Operation.DELETE, queue.name)
        self._check(caller, Operation.READ, queue.name)
        self._check_group(caller, Operation.READ, queue.name)
        admin = self._admin(caller)
        while pending := (
            await admin.delays.list(queue.name, limit=PENDING_PAGE, with_content=False)
        ).records:
            changed = await admin.delays.cancel(queue.name, [each.record_id for each in pending])
            if not changed.changed:
                break
        partitions = _partitions(queue)
        ends = await admin.list_offsets(partitions, "latest")
        await admin.shares.alter_offsets(queue.group, {each: ends[each].offset for each in partitions})

    async def count_messages(self, queue: Queue, *, caller: Caller) -> dict[str, str]:
        """Return the attributes with approximate numbers of messages: to be received, in flight and delayed."""
        available, leased, withheld = await self._count(queue, caller)
        counts = await self._admin(caller).delays.counts(queue.name)
        return {
            "ApproximateNumberOfMessages": str(available),
            "ApproximateNumberOfMessagesNotVisible": str(leased + withheld),
            "ApproximateNumberOfMessagesDelayed": str(sum(each.count for each in counts.values())),
        }

    async def is_drained(self, queue: Queue, *, caller: Caller) -> bool:
        """Return whether no message can be received now, or after a lease of unknown outcome has ended."""
        available, _, withheld = await self._count(queue, caller)
        return not available and not withheld

    async def _count(self, queue: Queue, caller: Caller) -> tuple[int, int, int]:
        """Return how many messages can be received, are leased, and may be leased."""
        partitions = _partitions(queue)
        admin = self._admin(caller)
        try:
            states = await admin.shares.leases(queue.group, partitions)
        except GroupIdNotFound:
            states = dict.fromkeys(partitions)
        available = leased = withheld = 0
        for partition, state in states.items():
            if state is None:  # nothing was received yet
                starts = await admin.list_offsets([partition], "earliest")
                available += await self._count_records(partition, starts[partition].offset, caller)
                continue
            leased += state.leased
            withheld += state.withheld + state.archiving
            ends = await admin.list_offsets([partition], "latest")
            unread = max(ends[partition].offset - state.end_offset, 0)
            undone = max(state.lag - unread - state.leased - state.withheld - state.archiving, 0)
            available += undone + (
                await self._count_records(partition, state.end_offset, caller) if unread else 0
            )
        return available, leased, withheld

    async def _count_records(self, partition: TopicPartition, start_offset: int, caller: Caller) -> int:
        """Return the number of records from an offset on; the number of offsets if another broker leads the
        partition."""
        try:
            return self._services.records.count_records(
                *partition, start_offset, batches_max=COUNTED_BATCHES_MAX
            )
        except MansioError:
            ends = await self._admin(caller).list_offsets([partition], "latest")
            return max(ends[partition].offset - start_offset, 0)

    # Messages

    async def send(
        self, queue: Queue, messages: Sequence[NewMessage], *, caller: Caller = ANONYMOUS
    ) -> list[SentMessage | MansioError]:
        """Send messages, and return the result of each once it is durable."""
        results: list[SentMessage | MansioError | None] = [None] * len(messages)
        records: list[RecordToPublish] = []
        positions: list[int] = []
        has_window = self._services.topics.settings_of(queue.topic).dedup_ms > 0
        for position, message in enumerate(messages):
            try:
                records.append(_record(queue.attributes, message, has_window=has_window))
                positions.append(position)
            except MansioError as error:
                results[position] = without_traceback(error)
        if records:
            published = await publish_records(
                self._services, self._clients, queue.name, records, caller=caller
            )
            topic_id = queue.topic.topic_id.bytes
            for position, one in zip(positions, published.records, strict=True):
                if one.error is not None:
                    results[position] = one.error
                else:
                    number = f"{one.offset:020d}" if queue.attributes.is_fifo else ""
                    results[position] = SentMessage(message_id(topic_id, one.partition, one.offset), number)
        return [each for each in results if each is not None]

    async def receive(
        self,
        queue: Queue,
        *,
        messages_max: int,
        wait_s: int | None = None,
        visibility_timeout_s: int | None = None,
        caller: Caller = ANONYMOUS,
    ) -> tuple[str, list[Message]]:
        """Receive messages. Return the id of the member that has their leases, for `release`, and the messages."""
        attributes = queue.attributes
        wait_ms = (attributes.wait_s if wait_s is None else wait_s) * 1000
        timeout_s = attributes.visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        deadline = self._services.clock.monotonic() + max(wait_ms, SHORT_POLL_MS) / 1000
        while True:
            left_ms = int((deadline - self._services.clock.monotonic()) * 1000)
            result = await self._services.leases.receive(
                queue.group,
                [queue.name],
                max_records=messages_max,
                max_wait_ms=max(left_ms, 0),
                max_bytes=1 << 20,
                lease_ms=timeout_s * 1000,
                caller=caller,
            )
            if result.errors and not result.records:
                raise next(iter(result.errors.values()))
            found = await self._drop_expired(queue, result, caller)
            if found or not result.records or left_ms <= 0:
                return result.member_id, found

    async def _drop_expired(self, queue: Queue, result: ReceiveResult, caller: Caller) -> list[Message]:
        """Return the messages of a result, without those that are older than the retention period."""
        now_ms = self._services.clock.wall_ms()
        oldest_ms = now_ms - queue.attributes.retention_s * 1000
        found: list[Message] = []
        expired: list[Acknowledgement] = []
        for record in result.records:
            receipt = self._services.leases.receipt_of(result, record)
            if record.timestamp_ms < oldest_ms:
                expired.append(Acknowledgement(receipt, ACCEPT))
            else:
                found.append(message_of(record, receipt))
                self._note_receive(record, now_ms)
        if expired:
            await self._services.leases.acknowledge(queue.group, expired, caller=caller)
        return found

    def _note_receive(self, record: ReceivedRecord, now_ms: int) -> None:
        key = record.topic_id, record.partition, record.offset
        if record.delivery_count == 1 or key not in self._first_receives:
            self._first_receives[key] = now_ms
            if len(self._first_receives) > FIRST_RECEIVES_MAX:
                self._first_receives.popitem(last=False)

    def first_receive_ms(self, queue: Queue, message: Message) -> int:
        """Return when a message was first received, as far as this broker remembers it; otherwise the time of now."""
        receipt = Receipt.decode(message.receipt_handle)
        known = self._first_receives.get((queue.topic.topic_id.bytes, receipt.partition, receipt.offset))
        return self._services.clock.wall_ms() if known is None else known

    async def release(self, queue: Queue, member_id: str, *, caller: Caller) -> None:
        """Release messages that did not reach their client; the receive does not count."""
        await self._services.leases.release(queue.group, member_id, caller=caller)

    async def delete_messages(
        self, queue: Queue, handles: Sequence[str], *, caller: Caller
    ) -> list[MansioError | None]:
        """Delete received messages; return an error or None for each.

        A message of a standard queue that was deleted already, or whose visibility timeout has ended, is no error: as
        in SQS it may be received again. Of a FIFO queue it is one."""
        acknowledgements = [Acknowledgement(handle, ACCEPT) for handle in handles]
        results = await self._acknowledge(queue, acknowledgements, caller)
        for position, error in enumerate(results):
            if isinstance(error, InvalidRecordState):
                results[position] = (
                    InvalidParameterValue(
                        f"Value {handles[position]} for parameter ReceiptHandle is invalid. Reason: The receipt handle "
                        "has expired."
                    )
                    if queue.attributes.is_fifo
                    else None
                )
        return results

    async def change_visibility(
        self, queue: Queue, changes: Sequence[tuple[str, int]], *, caller: Caller
    ) -> list[MansioError | None]:
        """Change the visibility timeout of received messages: (receipt handle, seconds from now). Return an error or
        None for each. 0: the message can be received again at once."""
        acknowledgements = [
            Acknowledgement(handle, RELEASE, 0)
            if seconds == 0
            else Acknowledgement(handle, RENEW, seconds * 1000)
            for handle, seconds in changes
        ]
        results = await self._acknowledge(queue, acknowledgements, caller)
        for position, error in enumerate(results):
            if isinstance(error, InvalidRecordState):
                results[position] = MessageNotInflight(
                    f"Value {changes[position][0]} for parameter ReceiptHandle is invalid. Reason: Message does not "
                    "exist or is not available for visibility timeout change."
                )
        return results

    async def _acknowledge(
        self, queue: Queue, acknowledgements: Sequence[Acknowledgement], caller: Caller
    ) -> list[MansioError | None]:
        results: list[MansioError | None] = []
        topic_id = queue.topic.topic_id.bytes
        own: list[Acknowledgement] = []
        for each in acknowledgements:
            try:
                is_own = Receipt.decode(each.receipt).topic_id == topic_id
            except InvalidReceipt:
                is_own = False
            if is_own:
                own.append(each)
                results.append(None)
            else:
                results.append(ReceiptHandleIsInvalid("The input receipt handle is invalid."))
        found = iter(await self._services.leases.acknowledge(queue.group, own, caller=caller))
        return [next(found) if each is None else each for each in results]


def _record(attributes: QueueAttributes, message: NewMessage, *, has_window: bool) -> RecordToPublish:
    """Return the record of a message. `has_window`: whether the topic deduplicates, which a dead-letter queue does
    not."""
    deduplication_id = message.deduplication_id if attributes.is_fifo else None
    if attributes.is_fifo and deduplication_id is None:
        deduplication_id = hashlib.sha256(message.body).hexdigest()
    headers = record_headers(message.attributes, message.trace_header, deduplication_id)
    delay_s = attributes.delay_s if message.delay_s is None else message.delay_s
    key = None if message.group_id is None else message.group_id.encode()
    delay_ms = delay_s * 1000 if delay_s else None
    if deduplication_id is None:
        return RecordToPublish(message.body, key, headers, delay_ms=delay_ms)
    if attributes.deduplication_scope == "messageGroup":
        both = json.dumps([message.group_id, deduplication_id])
        deduplication_id = hashlib.sha256(both.encode()).hexdigest()
    return RecordToPublish(
        message.body,
        key,
        headers,
        partition=0,
        delay_ms=delay_ms,
        dedup_id=deduplication_id.encode() if has_window else None,
    )


def _topic_config(attributes: QueueAttributes) -> dict[str, str]:
    return {
        QUEUE_ATTRIBUTES: attributes.to_json(),
        "retention.ms": str(attributes.retention_s * 1000),
        "max.message.bytes": str(attributes.message_bytes_max + RECORD_OVERHEAD_BYTES),
    }


def _partitions(queue: Queue) -> list[TopicPartition]:
    return [TopicPartition(queue.name, index) for index in range(len(queue.topic.partitions))]


def _has_target(attributes: QueueAttributes, name: str) -> bool:
    return attributes.redrive is not None and attributes.redrive.queue == name


def _check_tags(queue: str, tags: Mapping[str, str]) -> None:
    if len(tags) > TAGS_MAX:
        raise InvalidParameterValue(f"Too many tags added for queue {queue}.")
    for key, value in tags.items():
        if not 1 <= len(key) <= 128 or len(value) > 256 or key.lower().startswith("aws:"):
            raise InvalidParameterValue(f"Tag {key[:200]!r} is invalid.")
