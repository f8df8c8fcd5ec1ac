"""Publish service: appends single records to a topic, for protocols whose clients do not build record batches.

Chooses the partition of each record as Kafka's clients do (murmur2 of the key; records without a key go to one
partition per batch, KIP-480), encodes batches, and appends them through `ProduceService`. Every record has its own
result.

Invariants:
* Records of one partition are appended in the order in which the caller passes them.
* The number of records in a call and their bytes are bounded.
* `ValuesToPublish` have the same results as their records one by one.
* Many records are built and encoded in several turns of the event loop; all batches of a call are appended in one.
* `cancel`, a timeout and a cancelled `publish_records` end the waiting, never the append.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from mansio.broker.routing.caller import ANONYMOUS
from mansio.config.topic_config import DEDUP_MS, DELAY_ENABLE, PRIORITY_ENABLE
from mansio.errors import (
    DeduplicationNotEnabled,
    DelaysNotEnabled,
    InvalidRecord,
    InvalidRequest,
    InvalidRequiredAcks,
    InvalidTimestamp,
    InvalidTopic,
    MansioError,
    MessageTooLarge,
    PrioritiesNotEnabled,
)
from mansio.host.item_turns import ItemTurns
from mansio.ports import complete
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.tracebacks import without_traceback
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER, ID_BYTES_MAX
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from mansio.wire.batch.priority_header import PRIORITY_HEADER, PRIORITY_NAMES
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    build_batch,
    build_value_only_batch,
    encode_records,
)
from mansio.wire.field_values import ACKS_ALL, ACKS_NONE
from mansio.wire.murmur2 import partition_for_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.produce import BatchResult, PendingProduce, ProduceService
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.topics.topics import TopicService
    from mansio.config.topic_config import TopicSettings
    from mansio.metadata.model import Topic
    from mansio.ports import Clock, Promise, Random, Scheduler
    from mansio.wire.batch.record_batch import Header
    from mansio.wire.batch.record_batch import NewRecord as BatchRecord

PUBLISHED_RECORDS_MAX: Final = 10_000
"""Maximum number of records in one call."""

RECORDS_PER_STEP: Final = 50
"""Number of records of a batch that are encoded in one call."""

RECORD_OVERHEAD_BYTES_MAX: Final = 40
"""Upper bound of the bytes of an encoded record without key, value and headers: lengths, deltas and attributes."""

HEADER_OVERHEAD_BYTES_MAX: Final = 10
"""Upper bound of the bytes of the two length fields of one header."""

TIMESTAMP_MS_MAX: Final = (1 << 63) - 1
NO_PARTITION: Final = -1
"""Partition in the result of a record for which no partition was chosen."""


_FIRST: Final = itemgetter(0)


class RecordToPublish(NamedTuple):
    """A record to be appended to a topic. `timestamp_ms`: since the Unix epoch, None for the broker's clock.
    `partition`: None lets the service choose it.

    `delay_ms` or `deliver_at_ms` (since the Unix epoch): delays the record. `priority`: high, normal or low.
    `dedup_id`: the record is not stored again if one with this id was stored in the window of the topic; it chooses the
    partition. Each needs a setting of the topic."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] = ()
    timestamp_ms: int | None = None
    partition: int | None = None
    delay_ms: int | None = None
    deliver_at_ms: int | None = None
    priority: str | None = None
    dedup_id: bytes | None = None


class ValuesToPublish(Sequence[RecordToPublish]):
    """Records with a value and nothing else. An object of a record is created only where one is asked for."""

    __slots__ = ("values",)

    def __init__(self, values: list[bytes]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> RecordToPublish: ...
    @overload
    def __getitem__(self, index: slice) -> ValuesToPublish: ...
    def __getitem__(self, index: int | slice) -> RecordToPublish | ValuesToPublish:
        if isinstance(index, slice):
            return ValuesToPublish(self.values[index])
        return RecordToPublish(self.values[index])


def joined_records(parts: Sequence[Sequence[RecordToPublish]]) -> Sequence[RecordToPublish]:
    """Return records that were decoded in parts as one sequence."""
    if all(isinstance(part, ValuesToPublish) for part in parts):
        return ValuesToPublish([value for part in parts for value in part.values])  # type: ignore[attr-defined]
    return [record for part in parts for record in part]


class PublishedRecord(NamedTuple):
    """Result of one record: its partition, offset and stored timestamp, or its error.

    If the error is `RequestTimedOut` or an error of replication, the record may be stored nevertheless. `is_refused`:
    it is certainly not.
    """

    partition: int = NO_PARTITION
    offset: int = -1
    timestamp_ms: int = -1
    error: MansioError | None = None
    is_refused: bool = False


class PublishedRange(NamedTuple):
    """Equal results of `length` records from position `first` of the call on: a record's offset is `offset` of the
    result plus its distance from `first`, everything else is the same. Of errors, `offset` is -1 for all."""

    first: int
    length: int
    result: PublishedRecord

    def records(self) -> list[PublishedRecord]:
        """Return the result of each record."""
        one = self.result
        if self.length == 1 or one.error is not None:
            return [one] * self.length
        offsets = range(one.offset, one.offset + self.length)
        return [PublishedRecord(one.partition, offset, one.timestamp_ms) for offset in offsets]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Results of all records, with positions ascending. `throttle_ms`: time for which the client must pause
    (KIP-219)."""

    ranges: Sequence[PublishedRange]
    throttle_ms: int = 0

    @property
    def records(self) -> list[PublishedRecord]:
        """The result of each record, in the order of the records."""
        return [record for each in self.ranges for record in each.records()]


def ranges_of(records: Iterable[PublishedRecord]) -> list[PublishedRange]:
    """Return the results of records as ranges of adjacent offsets."""
    return _joined([PublishedRange(position, 1, one) for position, one in enumerate(records)])


def _joined(ranges: Sequence[PublishedRange]) -> list[PublishedRange]:
    """Join neighbours that are one range. Errors stay as they are."""
    found: list[PublishedRange] = []
    last: PublishedRange | None = None
    for each in ranges:
        if (
            last is not None
            and each.result.error is None
            and last.result.error is None
            and each.result.partition == last.result.partition
            and each.result.offset == last.result.offset + last.length
            and each.result.timestamp_ms == last.result.timestamp_ms
        ):
            last = found[-1] = PublishedRange(last.first, last.length + each.length, last.result)
        else:
            last = each
            found.append(each)
    return found


@dataclass(slots=True)
class _Batch:
    """Records that are appended as one batch. `positions`: their positions in the list that the caller passed."""

    partition: int
    size_bytes: int
    positions: list[int]
    records: list[BatchRecord]

    async def encode(self, codec: Codec, turns: ItemTurns) -> bytes:
        records = self.records
        if len(records) <= RECORDS_PER_STEP:
            return build_batch(records, codec=codec)
        encoded = bytearray()
        for first in range(0, len(records), RECORDS_PER_STEP):
            encoded += encode_records(records[first : first + RECORDS_PER_STEP], first, records[0][0])
            await turns.next(RECORDS_PER_STEP)
        return build_batch(records, codec=codec, encoded=encoded)

    def results(self, stored: BatchResult, *, is_refused: bool) -> list[PublishedRange]:
        """Return the results of its records."""
        first, count = self.positions[0], len(self.positions)
        is_adjacent = self.positions[-1] - first == count - 1
        if stored.error is not None:
            one = PublishedRecord(self.partition, error=stored.error, is_refused=is_refused)
            if is_adjacent:
                return [PublishedRange(first, count, one)]
            return [PublishedRange(position, 1, one) for position in self.positions]
        times_ms = [record[0] for record in self.records]
        if stored.append_time_ms >= 0:
            times_ms = [stored.append_time_ms] * count
        if is_adjacent and times_ms.count(times_ms[0]) == count:
            return [
                PublishedRange(first, count, PublishedRecord(self.partition, stored.base_offset, times_ms[0]))
            ]
        offsets = range(stored.base_offset, stored.base_offset + count)
        return [
            PublishedRange(position, 1, PublishedRecord(self.partition, offset, time_ms))
            for position, offset, time_ms in zip(self.positions, offsets, times_ms, strict=True)
        ]


class _BatchOfValues(NamedTuple):
    """As `_Batch`, of records with a value and nothing else, which follow one another in the caller's list."""

    partition: int
    first: int
    values: list[bytes]
    timestamp_ms: int

    async def encode(self, codec: Codec, turns: ItemTurns) -> bytes:  # noqa: ARG002 - fast: as that of `_Batch`
        return build_value_only_batch([self.timestamp_ms] * len(self.values), self.values, codec=codec)

    def results(self, stored: BatchResult, *, is_refused: bool) -> list[PublishedRange]:
        if stored.error is not None:
            one = PublishedRecord(self.partition, error=stored.error, is_refused=is_refused)
        else:
            time_ms = self.timestamp_ms if stored.append_time_ms < 0 else stored.append_time_ms
            one = PublishedRecord(self.partition, stored.base_offset, time_ms)
        return [PublishedRange(self.first, len(self.values), one)]


class PublishService:
    """Appends single records to topics. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_bytes_max",
        "_clock",
        "_partitions",
        "_produce",
        "_quotas",
        "_random",
        "_scheduler",
        "_topics",
    )

    def __init__(
        self,
        *,
        topics: TopicService,
        partitions: PartitionSet,
        produce: ProduceService,
        quotas: QuotaService,
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
        bytes_max: int,
        authorization: Authorization,
    ) -> None:
        """`bytes_max`: maximum size of the records of one call in total."""
        self._topics = topics
        self._partitions = partitions
        self._produce = produce
        self._quotas = quotas
        self._clock = clock
        self._scheduler = scheduler
        self._random = random
        self._bytes_max = bytes_max
        self._authorization = authorization

    async def publish_records(
        self,
        topic: str,
        records: Sequence[RecordToPublish],
        *,
        timeout_ms: int,
        acks: int = ACKS_ALL,
        codec: Codec = Codec.NONE,
        caller: Caller = ANONYMOUS,
    ) -> PublishResult:
        """Append records; return their results when all are committed or failed, after `timeout_ms`, or at the deadline
        of `caller`. Raises the errors of `begin_publish`."""
        pending = await self.begin_publish(topic, records, acks=acks, codec=codec, caller=caller)
        if not pending.is_complete:
            promise: Promise[None] = self._scheduler.promise()

            def on_done(_: PendingPublish) -> None:
                complete(promise, None)

            pending.wait(int(caller.timeout_ms(timeout_ms, self._clock.monotonic())), on_done)
            try:
                await promise
            finally:
                pending.cancel()
        return pending.result()

    async def begin_publish(
        self,
        topic: str,
        records: Sequence[RecordToPublish],
        *,
        acks: int = ACKS_ALL,
        codec: Codec = Codec.NONE,
        caller: Caller = ANONYMOUS,
    ) -> PendingPublish:
        """Append records. If the result is not complete, because acks=all and a batch is not committed yet, or because
        a batch is being processed, the caller must call `PendingPublish.wait`.

        Raises errors that concern all records: `TopicAuthorizationFailed` (it needs WRITE), `UnknownTopicOrPartition`,
        `InvalidTopic` (the topic is internal), `InvalidRequest` (too many records), `MessageTooLarge` (too many bytes
        in total), `InvalidRequiredAcks`. Other errors are in the results, for example `NotLeaderOrFollower` if another
        broker leads a partition.
        """
        self._authorization.check(caller, Operation.WRITE, ResourceType.TOPIC, topic)
        if acks == ACKS_NONE or not -1 <= acks <= 1:
            raise InvalidRequiredAcks(f"acks={acks}: must be 1 or -1 (all)")
        if len(records) > PUBLISHED_RECORDS_MAX:
            raise InvalidRequest(f"{len(records)} records; at most {PUBLISHED_RECORDS_MAX} per call")
        found = self._topics.find(topic)
        if found.internal:
            raise InvalidTopic(f"{topic} is an internal topic; clients may not write to it")
        results: list[PublishedRange] = []
        batches: Sequence[_Batch | _BatchOfValues]
        turns = ItemTurns(self._scheduler)
        if isinstance(records, ValuesToPublish) and not self._topics.settings_of(found).compacts:
            batches, total_bytes = self._build_batches_of_values(found, records.values)
        else:
            batches, total_bytes = await self._build_batches(found, records, results, turns)
        entries = [(batch.partition, await batch.encode(codec, turns)) for batch in batches]
        pending = self._produce.begin_produce(
            [(topic, None, entries)], grants=None, acks=acks, publisher=caller
        )
        quotas = self._quotas.active
        throttle_ms = 0
        if quotas is not None:
            throttle_ms = quotas.record_produce(caller.session.user, caller.client_id, total_bytes)
        return PendingPublish(pending, results, batches, throttle_ms)

    async def _build_batches(
        self,
        topic: Topic,
        records: Sequence[RecordToPublish],
        results: list[PublishedRange],
        turns: ItemTurns,
    ) -> tuple[list[_Batch], int]:
        """Distribute the records to batches. Return the batches in the order in which they are to be appended, and
        their bytes in total. An invalid record is left out and gets its result in `results`, because it would fail its
        batch."""
        settings = self._topics.settings_of(topic)
        partition_count = len(topic.partitions)
        batch_bytes_max = settings.max_message_bytes
        now_ms = self._clock.wall_ms()
        batches: list[_Batch] = []
        open_batches: dict[int, _Batch] = {}
        sticky: int | None = None
        total_bytes = 0
        for position, record in enumerate(records):
            value, key, headers, timestamp_ms, partition, delay_ms, deliver_at_ms, priority, dedup_id = record
            is_checked = timestamp_ms is None and (key is not None or not settings.compacts)
            if timestamp_ms is None:
                timestamp_ms = now_ms
            size_bytes = RECORD_OVERHEAD_BYTES_MAX
            if key is not None:
                size_bytes += len(key)
            if value is not None:
                size_bytes += len(value)
            try:
                if (
                    headers
                    or delay_ms is not None
                    or deliver_at_ms is not None
                    or priority is not None
                    or dedup_id is not None
                ):
                    headers = _all_headers(topic.name, settings, record)
                    size_bytes += _headers_bytes(headers)
                if not is_checked:
                    _check_record(topic.name, settings, record, timestamp_ms, now_ms)
            except MansioError as error:
                failed = PublishedRecord(
                    NO_PARTITION if partition is None else partition, error=without_traceback(error)
                )
                results.append(PublishedRange(position, 1, failed))
                continue
            total_bytes += size_bytes
            if total_bytes > self._bytes_max:
                raise self._too_large()
            if partition is not None:
                index = partition
            elif dedup_id is not None:  # a repeat is recognized in the same partition only
                index = partition_for_key(dedup_id, partition_count)
            elif key is not None:
                index = partition_for_key(key, partition_count)
            else:
                if sticky is None:
                    sticky = self._next_partition(topic)
                index = sticky
            batch = open_batches.get(index)
            if dedup_id is not None:  # alone in its batch, because only a batch has an offset in the result
                batch = None
            if batch is not None and batch.size_bytes + size_bytes > batch_bytes_max:
                batch = None
                if index == sticky and key is None and partition is None:
                    index = sticky = self._next_partition(topic)
            if batch is None:
                batch = open_batches[index] = _Batch(index, HEADER_BYTES, [], [])
                batches.append(batch)
            batch.size_bytes += size_bytes
            batch.positions.append(position)
            batch.records.append((timestamp_ms, key, value, headers))
            if dedup_id is not None:
                del open_batches[index]
            if turns.is_over():
                await turns.pause()
        return batches, total_bytes

    def _build_batches_of_values(self, topic: Topic, values: list[bytes]) -> tuple[list[_BatchOfValues], int]:
        """As `_build_batches`, for records with a value and nothing else, all of which are valid."""
        batch_bytes_max = self._topics.settings_of(topic).max_message_bytes
        now_ms = self._clock.wall_ms()
        batches: list[_BatchOfValues] = []
        total_bytes = sum(map(len, values)) + len(values) * RECORD_OVERHEAD_BYTES_MAX
        if total_bytes > self._bytes_max:
            raise self._too_large()
        if HEADER_BYTES + total_bytes <= batch_bytes_max:
            if values:
                batches.append(_BatchOfValues(self._next_partition(topic), 0, values, now_ms))
            return batches, total_bytes
        ends = list(accumulate(len(value) + RECORD_OVERHEAD_BYTES_MAX for value in values))
        first = begin = 0
        while first < len(values):
            end = max(bisect_right(ends, begin + batch_bytes_max - HEADER_BYTES), first + 1)
            batches.append(_BatchOfValues(self._next_partition(topic), first, values[first:end], now_ms))
            first, begin = end, ends[end - 1]
        return batches, total_bytes

    def _too_large(self) -> MessageTooLarge:
        return MessageTooLarge(f"the records have more than {self._bytes_max} bytes in total")

    def _next_partition(self, topic: Topic) -> int:
        """Choose a partition for records without a key at random, among those that this broker leads, or among all if
        it leads none."""
        led = []
        for index in range(len(topic.partitions)):
            try:
                self._partitions.find(topic.name, None, index).ensure_leader()
            except MansioError:
                continue
            led.append(index)
        candidates: Sequence[int] = led or range(len(topic.partitions))
        return candidates[int(self._random.uniform(0, len(candidates))) % len(candidates)]


class PendingPublish:
    """Result of `PublishService.begin_publish`: appended records that may not be committed yet."""

    __slots__ = ("_batches", "_pending", "_refused", "_results", "throttle_ms")

    def __init__(
        self,
        pending: PendingProduce,
        results: list[PublishedRange],
        batches: Sequence[_Batch | _BatchOfValues],
        throttle_ms: int,
    ) -> None:
        self._pending = pending
        self._results = results
        self._batches = batches
        ((_, _, appended),) = pending.results
        self._refused = {number for number, stored in enumerate(appended) if stored.error is not None}
        """Numbers of the batches that were refused at once, so that they are not appended."""
        self.throttle_ms = throttle_ms
        """Time for which the client must pause, 0 for none."""

    @property
    def is_complete(self) -> bool:
        """Whether every record is committed or failed."""
        return self._pending.is_complete

    def wait(self, timeout_ms: int, on_done: Callable[[PendingPublish], None]) -> None:
        """Call `on_done` once when every record is committed or failed, or after `timeout_ms`; possibly before this
        returns."""
        self._pending.wait(timeout_ms, lambda _: on_done(self))

    def cancel(self) -> None:
        """Stop waiting without a call of `on_done`; the records stay appended."""
        self._pending.cancel()

    def result(self) -> PublishResult:
        """Return the results; they are final once `is_complete` or after the call of `on_done`."""
        found = list(self._results)
        ((_, _, appended),) = self._pending.results
        for number, (batch, stored) in enumerate(zip(self._batches, appended, strict=True)):
            found += batch.results(stored, is_refused=number in self._refused)
        if len(found) > 1:
            found.sort(key=_FIRST)
            found = _joined(found)
        return PublishResult(found, self.throttle_ms)


def _all_headers(topic: str, settings: TopicSettings, record: RecordToPublish) -> Sequence[Header]:
    """Return the headers of a record with those of its delay, priority and deduplication id, the priority last.

    Raises `DelaysNotEnabled`, `PrioritiesNotEnabled`, `DeduplicationNotEnabled`, `InvalidRecord`."""
    added: list[Header] = []
    if record.delay_ms is not None or record.deliver_at_ms is not None:
        if record.delay_ms is not None and record.deliver_at_ms is not None:
            raise InvalidRecord("a record has a delay or a time of delivery, not both")
        if not settings.accepts_delays:
            raise DelaysNotEnabled(
                f"topic '{topic}' does not accept delays: mansio topic alter {topic} -c {DELAY_ENABLE}=true"
            )
        delay_ms = record.delay_ms
        name, value = (
            (DELIVER_AT_HEADER, record.deliver_at_ms) if delay_ms is None else (DELAY_HEADER, delay_ms)
        )
        if value is None or value < 0:
            raise InvalidRecord(f"{value} ms is no delay or time of delivery")
        added.append((name, b"%d" % value))
    if record.dedup_id is not None:
        if not settings.dedup_ms:
            raise DeduplicationNotEnabled(
                f"topic '{topic}' has no deduplication window: mansio topic alter {topic} -c {DEDUP_MS}=300000"
            )
        if not 1 <= len(record.dedup_id) <= ID_BYTES_MAX:
            raise InvalidRecord(f"a deduplication id has 1 to {ID_BYTES_MAX} bytes")
        added.append((DEDUP_ID_HEADER, record.dedup_id))
    if record.priority is not None:
        if not settings.has_priorities:
            raise PrioritiesNotEnabled(
                f"topic '{topic}' has no priorities: mansio topic alter {topic} -c {PRIORITY_ENABLE}=true"
            )
        if record.priority not in PRIORITY_NAMES:
            raise InvalidRecord(f"priority: not high, normal or low: {record.priority!r}")
        added.append((PRIORITY_HEADER, record.priority.encode()))
    if not added:
        return record.headers
    reserved = {name for name, _ in added}
    if any(name in reserved for name, _ in record.headers):
        raise InvalidRecord(
            "a record has its delay, priority and deduplication id as fields or headers, not both"
        )
    return [*record.headers, *added]


def _headers_bytes(headers: Sequence[Header]) -> int:
    """Return an upper bound of the encoded size of headers. Raises `InvalidRecord` if a name is not valid Unicode."""
    size = 0
    try:
        for name, content in headers:
            size += HEADER_OVERHEAD_BYTES_MAX + len(name.encode()) + len(content or b"")
    except UnicodeEncodeError as error:
        raise InvalidRecord("a header name is not valid Unicode") from error
    return size


def _check_record(
    topic: str, settings: TopicSettings, record: RecordToPublish, timestamp_ms: int, now_ms: int
) -> None:
    """Raise the error with which a partition would reject the batch of this record: `InvalidRecord` or
    `InvalidTimestamp`."""
    if settings.compacts and record.key is None:
        raise InvalidRecord(f"{topic}: a record of a compacted topic needs a key")
    if not 0 <= timestamp_ms <= TIMESTAMP_MS_MAX:
        raise InvalidTimestamp(f"{topic}: {timestamp_ms} is not a timestamp in milliseconds")
    if settings.log_append_time:
        return
    if timestamp_ms > now_ms + settings.timestamp_after_max_ms:
        raise InvalidTimestamp(
            f"{topic}: timestamp {timestamp_ms} is more than message.timestamp.after.max.ms="
            f"{settings.timestamp_after_max_ms} ahead of the broker's clock"
        )
    if timestamp_ms < now_ms - settings.timestamp_before_max_ms:
        raise InvalidTimestamp(
            f"{topic}: timestamp {timestamp_ms} is more than message.timestamp.before.max.ms="
            f"{settings.timestamp_before_max_ms} behind the broker's clock"
        )
