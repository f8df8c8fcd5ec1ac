"""Administration of delayed records that are pending; available as `client.admin.delays`.

Requests are Mansio's own and go to the leaders of the partitions.

Invariants:
* A page contains the earliest records of all its partitions together, in the order of due time, partition and id.
* A request that was sent and got no answer may have changed records: ids that are not pending at its repetition are in
  `ChangedRecords.unknown`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.client.producer.delays import milliseconds_of, parse_delay_ms, parse_moment_ms
from mansio.errors import (
    ConnectionLost,
    InvalidRequest,
    RequestTimedOut,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.net.offsets import request_leaders
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.mansio_apis import NO_DUE_MS, DelayChange
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster

IDS_MAX: Final = 1_000
"""Number of records that one request changes or describes."""

PAGE_RECORDS_MAX: Final = 10_000
VALUE_BYTES_MAX: Final = 1024
"""Size to which values in a list are truncated."""

CHANGE_TIMEOUT_MS: Final = 10_000
"""How long the broker waits until other replicas have flushed a change."""

WHOLE_VALUE: Final = (1 << 31) - 1
"""Size to which values are truncated if all of them are wanted."""

_NO_CONTENT: Final = -1
_END_MS: Final = (1 << 63) - 1
_PARTITION_MAX: Final = (1 << 31) - 1
_BEFORE_ALL: Final = (-1, -1)


class RecordId(NamedTuple):
    """A pending record: partition, and its id, which is the offset in the response to the producer."""

    partition: int
    id: int


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A record that is not delivered yet. `due` is when it will be; `timestamp_ms`, `key`, `value` and `headers` are
    the producer's. In a list `value` may be truncated; `value_size` is the size of the whole value (None for null).
    `error`: why the stored record cannot be read, None if it can."""

    topic: str
    partition: int
    id: int
    due: datetime
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    value_size: int | None
    headers: tuple[tuple[str, bytes | None], ...]
    error: str | None = None

    @property
    def record_id(self) -> RecordId:
        """Partition and id, as `cancel` and `reschedule` take them."""
        return RecordId(self.partition, self.id)


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Pending records. `next`: argument `after` of the next page, None after the last one."""

    records: tuple[PendingRecord, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class PendingCounts:
    """Pending records of one partition: their number, their size in bytes, and when the next one is due (None if none
    is pending). `overdue_ms`: for how long that one has been due, by the leader's clock; 0 if it is not."""

    count: int
    size_bytes: int
    next_due: datetime | None
    overdue_ms: int


@dataclass(frozen=True, slots=True)
class ChangedRecords:
    """Result of a change, by record.

    `changed`: were pending, and the change is committed. `not_pending`: were delivered or cancelled before, or never
    existed. `unknown`: an answer was lost, and the record was not pending when the change was repeated."""

    changed: tuple[RecordId, ...]
    not_pending: tuple[RecordId, ...]
    unknown: tuple[RecordId, ...] = ()


class DelayAdmin:
    """Administration of pending records of one cluster; available as `client.admin.delays`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # Queries

    async def counts(self, topic: str, partitions: Iterable[int] | None = None) -> dict[int, PendingCounts]:
        """Pending records of each partition (None: of all). Raises `UnknownTopicOrPartition`."""
        chosen = await self._partitions(topic, partitions)
        queries = {one: _query(records_max=0) for one in chosen}
        found = await self._list_pending(queries)
        return {one.partition: _counts(found[one]) for one in chosen}

    async def list(
        self,
        topic: str,
        *,
        partitions: Iterable[int] | None = None,
        due_from: datetime | None = None,
        due_to: datetime | None = None,
        key: bytes | None = None,
        limit: int = 100,
        after: str | None = None,
        with_content: bool = True,
    ) -> PendingPage:
        """The next pending records, at most `limit`, in the order in which they are due.

        `due_from` (inclusive) and `due_to` (exclusive): range of due times, with time zones; `key`: only records with
        this key, for which the broker reads all records in the range; `after`: `PendingPage.next` of the page before;
        `with_content` False: only ids and due times, which the broker has in memory. Values are truncated to 1 KiB, see
        `describe`. Raises `UnknownTopicOrPartition`, and `ValueError` for an
        invalid argument.
        """
        if not 0 < limit <= PAGE_RECORDS_MAX:
            raise ValueError(f"limit: not between 1 and {PAGE_RECORDS_MAX}: {limit}")
        if key is not None and not isinstance(key, bytes):
            raise ValueError(f"key: not bytes: {key!r}")
        due_from_ms = 0 if due_from is None else milliseconds_of(due_from, "due_from")
        due_to_ms = _END_MS if due_to is None else milliseconds_of(due_to, "due_to")
        begin = None if after is None else _parse_cursor(after)
        left: dict[TopicPartition, dict[str, Any]] = {}
        for one in await self._partitions(topic, partitions):
            behind = _BEFORE_ALL if begin is None else _position_behind(begin, one.partition)
            value_bytes_max = VALUE_BYTES_MAX if with_content else _NO_CONTENT
            left[one] = _query(
                due_from_ms, due_to_ms, behind, key=key, records_max=limit, value_bytes_max=value_bytes_max
            )
        lists: dict[TopicPartition, list[PendingRecord]] = {one: [] for one in left}
        has_more = False
        while left:
            for one, result in (await self._list_pending(left)).items():
                lists[one] += [_record(one, entry) for entry in result.records]
                behind = (result.after_due_ms, result.after_id)
                if behind == _BEFORE_ALL:
                    del left[one]
                elif len(lists[one]) >= limit:
                    has_more = True
                    del left[one]
                else:
                    left[one] = {**left[one], "after_due_ms": behind[0], "after_id": behind[1]}
        merged = heapq.merge(*lists.values(), key=_sort_key)
        records = tuple(islice(merged, limit))
        if not has_more and sum(map(len, lists.values())) <= limit:
            return PendingPage(records, None)
        return PendingPage(records, "-".join(map(str, _sort_key(records[-1]))))

    async def describe(self, topic: str, ids: Iterable[tuple[int, int]]) -> dict[RecordId, PendingRecord]:
        """Pending records (partition, id) with their whole values. Records that are not pending are missing."""
        found: dict[RecordId, PendingRecord] = {}
        for partition, numbers in _by_partition(ids).items():
            one = TopicPartition(topic, partition)
            await self._partitions(topic, (partition,))
            for chunk in _chunks(numbers):
                query = _query(ids=chunk, records_max=len(chunk), value_bytes_max=WHOLE_VALUE)
                while True:
                    result = (await self._list_pending({one: query}))[one]
                    records = [_record(one, entry) for entry in result.records]
                    found.update((record.record_id, record) for record in records)
                    if (result.after_due_ms, result.after_id) == _BEFORE_ALL:
                        break
                    query = {**query, "after_due_ms": result.after_due_ms, "after_id": result.after_id}
        return found

    # Changes

    async def cancel(self, topic: str, ids: Iterable[tuple[int, int]]) -> ChangedRecords:
        """Cancel pending records (partition, id): they are not delivered. Raises `UnknownTopicOrPartition`."""
        return await self._change(topic, ids, DelayChange.CANCEL)

    async def reschedule(
        self,
        topic: str,
        ids: Iterable[tuple[int, int]],
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
    ) -> ChangedRecords:
        """Change when pending records (partition, id) are due: `delay` (a duration or seconds) from now by the broker's
        clock, or `at` a moment with time zone.

        Raises `UnknownTopicOrPartition`, and `ValueError` for an invalid time or one that is more than 365 days from
        now."""
        if (delay is None) == (at is None):
            raise ValueError("give delay or at")
        if delay is not None:
            return await self._change(topic, ids, DelayChange.DELIVER_AFTER, parse_delay_ms(delay))
        return await self._change(topic, ids, DelayChange.DELIVER_AT, parse_moment_ms(at))

    async def deliver_now(self, topic: str, ids: Iterable[tuple[int, int]]) -> ChangedRecords:
        """Deliver pending records (partition, id) now. Raises `UnknownTopicOrPartition`."""
        return await self._change(topic, ids, DelayChange.DELIVER_AFTER)

    async def _change(
        self, topic: str, ids: Iterable[tuple[int, int]], change: DelayChange, time_ms: int = 0
    ) -> ChangedRecords:
        changed: list[RecordId] = []
        not_pending: list[RecordId] = []
        unknown: list[RecordId] = []
        for partition, numbers in _by_partition(ids).items():
            await self._partitions(topic, (partition,))
            for chunk in _chunks(numbers):
                fields = {"ids": chunk, "change": change, "time_ms": time_ms, "timeout_ms": CHANGE_TIMEOUT_MS}
                known, is_certain = await self._change_chunk(TopicPartition(topic, partition), fields)
                missing = not_pending if is_certain else unknown
                for number in chunk:
                    (changed if number in known else missing).append(RecordId(partition, number))
        return ChangedRecords(tuple(changed), tuple(not_pending), tuple(unknown))

    async def _change_chunk(
        self, partition: TopicPartition, change: Mapping[str, Any]
    ) -> tuple[set[int], bool]:
        """Change records of one partition. Return the ids that were pending, and whether the others certainly were not:
        no answer was lost."""
        is_certain = True
        cluster = self._cluster

        async def send(
            node_id: int,
            requests: Mapping[TopicPartition, None],
            results: dict[TopicPartition, set[int]],
        ) -> None:
            nonlocal is_certain
            (one,) = requests
            topic_id = (await cluster.topic(one.topic)).topic_id
            fields = {"topic_id": topic_id, "partition_index": one.partition, **change}
            connection = await cluster.connection(node_id)
            try:
                response = await connection.request(ApiKey.ALTER_DELAYED_RECORDS, fields)
                _raise_for(cluster, one.topic, response)
            except (ConnectionLost, RequestTimedOut):
                is_certain = False
                raise
            results[one] = set(response.ids)

        return (await request_leaders(cluster, {partition: None}, send))[partition], is_certain

    # Requests

    async def _partitions(self, topic: str, partitions: Iterable[int] | None) -> Sequence[TopicPartition]:
        """The given partitions of a topic, or all. Raises `UnknownTopicOrPartition`."""
        view = await self._cluster.topic(topic, wait_ms=0, may_create=False)
        known = [partition.index for partition in view.partitions]
        chosen = known if partitions is None else sorted({*partitions})
        for index in chosen:
            if index not in known:
                raise UnknownTopicOrPartition(f"topic {topic} has no partition {index}")
        return [TopicPartition(topic, index) for index in chosen]

    async def _list_pending(
        self, queries: Mapping[TopicPartition, dict[str, Any]]
    ) -> dict[TopicPartition, Any]:
        """The result of each partition's query."""
        cluster = self._cluster

        async def send(
            node_id: int,
            requests: Mapping[TopicPartition, dict[str, Any]],
            results: dict[TopicPartition, Any],
        ) -> None:
            fields = []
            for one, query in requests.items():
                topic_id = (await cluster.topic(one.topic)).topic_id
                fields.append({"topic_id": topic_id, "partition_index": one.partition, **query})
            connection = await cluster.connection(node_id)
            response = await connection.request(ApiKey.LIST_DELAYED_RECORDS, {"queries": fields})
            raise_for_code(response.error_code, response.error_message)
            failure = None
            for one, result in zip(requests, response.results, strict=True):
                if result.error_code:
                    failure = client_error_for_code(result.error_code, result.error_message)
                    if isinstance(failure, UnknownTopicId):
                        cluster.mark_stale((one.topic,))
                else:
                    results[one] = result
            if failure is not None:
                raise copied(failure)

        return await request_leaders(cluster, queries, send)


def _raise_for(cluster: Cluster, topic: str, response: Any) -> None:
    if response.error_code == UnknownTopicId.kafka_code:
        cluster.mark_stale((topic,))
    raise_for_code(response.error_code, response.error_message)


def _query(
    due_from_ms: int = 0,
    due_to_ms: int = _END_MS,
    after: tuple[int, int] = _BEFORE_ALL,
    *,
    ids: Sequence[int] | None = None,
    key: bytes | None = None,
    records_max: int,
    value_bytes_max: int = VALUE_BYTES_MAX,
) -> dict[str, Any]:
    return {
        "due_from_ms": due_from_ms,
        "due_to_ms": due_to_ms,
        "after_due_ms": after[0],
        "after_id": after[1],
        "ids": ids,
        "key": key,
        "records_max": records_max,
        "value_bytes_max": value_bytes_max,
    }


def _record(partition: TopicPartition, entry: Any) -> PendingRecord:
    return PendingRecord(
        partition.topic,
        partition.partition,
        entry.id,
        _moment(entry.due_ms),
        entry.timestamp_ms,
        entry.key,
        entry.value,
        None if entry.value_size < 0 else entry.value_size,
        tuple((header.name, header.value) for header in entry.headers),
        entry.error_message,
    )


def _counts(result: Any) -> PendingCounts:
    if result.next_due_ms == NO_DUE_MS:
        return PendingCounts(result.pending_count, result.pending_bytes, None, 0)
    overdue_ms = max(0, result.now_ms - result.next_due_ms)
    return PendingCounts(result.pending_count, result.pending_bytes, _moment(result.next_due_ms), overdue_ms)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds)


def _milliseconds(moment: datetime) -> int:
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


def _sort_key(record: PendingRecord) -> tuple[int, int, int]:
    return _milliseconds(record.due), record.partition, record.id


def _parse_cursor(text: str) -> tuple[int, int, int]:
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"after: not the value of `next` of a page: {text!r}")
    due_ms, partition, number = map(int, parts)
    return due_ms, partition, number


def _position_behind(cursor: tuple[int, int, int], partition: int) -> tuple[int, int]:
    """The position in a partition behind a record of a page, which is sorted by due time, partition and id."""
    due_ms, last_partition, last_id = cursor
    if partition == last_partition:
        return due_ms, last_id
    return (due_ms, _END_MS - 1) if partition < last_partition else (due_ms, -1)


def _by_partition(ids: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Ids without repetitions, by partition."""
    found: dict[int, dict[int, None]] = {}
    for partition, number in ids:
        if not (0 <= partition <= _PARTITION_MAX and 0 <= number <= _END_MS):
            raise InvalidRequest(f"{partition}:{number} is not the id of a record")
        found.setdefault(partition, {})[number] = None
    return {partition: [*numbers] for partition, numbers in found.items()}


def _chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (ids[begin : begin + IDS_MAX] for begin in range(0, len(ids), IDS_MAX))
