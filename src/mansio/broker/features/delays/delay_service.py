"""Delay service: lists, cancels and reschedules the pending records of partitions that this broker leads.

Invariants:
* A change is reported only after its control batch is committed.
* A list contains records whose acceptance is committed, in the order of due time and id.
* A list examines at most `EXAMINED_RECORDS_MAX` records per query and `LISTED_BYTES_MAX` bytes of content, and yields
  to other work after each `TURN_S`. The cursor in the result continues it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.errors import InvalidRequest, MansioError, RequestTimedOut
from mansio.host.item_turns import ItemTurns
from mansio.ports import result_within
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback
from mansio.wire.batch.delay_headers import DELAY_MS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.broker.features.delays.pending_records import PendingRecord
    from mansio.broker.features.feature_ports import Rights
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.ports import Clock, Scheduler
    from mansio.wire.batch.record_batch import NewRecord

QUERIES_MAX: Final = 10_000
"""Maximum number of queries in one request."""

LISTED_RECORDS_MAX: Final = 1_000
"""Maximum number of records in the result of one query, because a result is encoded in one slice of the event loop."""

LISTED_BYTES_MAX: Final = 1 << 20
"""Size of keys, values and headers after which the result of one request ends."""

EXAMINED_RECORDS_MAX: Final = 20_000
"""Maximum number of records that one query reads in a search for a key."""

CHANGED_RECORDS_MAX: Final = 10_000
"""Maximum number of records that one request changes."""

SLICE_CHANGES: Final = 64
"""Number of records that are changed together, in one slice of the event loop and one control batch."""

CANDIDATES_MAX: Final = 4_096
"""Number of records that are selected together, because each selection has a cost of its own. A record that is
delivered or changed while they are examined may be listed as it was."""


class Cursor(NamedTuple):
    """Position in the order of pending records: behind the record with this due time and id."""

    due_ms: int
    id: int


BEGIN: Final = Cursor(-1, -1)


@dataclass(frozen=True, slots=True)
class DelayQuery:
    """Search for pending records of one partition that are due in [due_from_ms, due_to_ms), behind `after`.

    `ids`: only these, whatever their due time; `key`: only records with this key; None for all. `records_max`: 0 for
    the counts only. `value_bytes_max`: size to which longer values are truncated, -1 for records without content."""

    topic_id: bytes
    partition: int
    due_from_ms: int
    due_to_ms: int
    after: Cursor
    ids: Sequence[int] | None
    key: bytes | None
    records_max: int
    value_bytes_max: int


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """A pending record. `value` is truncated; `value_size` is the size of the whole value, -1 for null. `error`: why
    its content cannot be read."""

    id: int
    due_ms: int
    timestamp_ms: int = -1
    key: bytes | None = None
    value: bytes | None = None
    value_size: int = -1
    headers: Sequence[tuple[str, bytes | None]] = ()
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Result of a query. `count`, `size_bytes` and `next_due_ms` (None if nothing is pending) are those of the
    partition; `next`: where the next query continues, None if it would find nothing; `now_ms`: the wall clock."""

    count: int
    size_bytes: int
    next_due_ms: int | None
    now_ms: int
    records: Sequence[ListedRecord] = ()
    next: Cursor | None = None


@dataclass(frozen=True, slots=True)
class PartitionPending:
    """Pending records of one partition, for metrics and health. `fraction`: how much of the partition's limits is used,
    0 to 1. `next_due_ms`: None if nothing is pending; `now_ms`: the wall clock."""

    count: int
    size_bytes: int
    next_due_ms: int | None
    now_ms: int
    fraction: float


class DelayService:
    """Lists and changes pending records. All methods run on the broker's event loop.

    To list them, a caller needs READ for the topic, for the counts only DESCRIBE, and to change what was published
    WRITE. A record that is delivered
    was authorized when it was accepted."""

    __slots__ = ("_authorization", "_clock", "_partitions", "_scheduler", "_wait_ms_max")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        clock: Clock,
        scheduler: Scheduler,
        wait_ms_max: int,
        authorization: Rights,
    ) -> None:
        """`wait_ms_max`: upper bound of the timeout of a change."""
        self._authorization = authorization
        self._partitions = partitions
        self._clock = clock
        self._scheduler = scheduler
        self._wait_ms_max = wait_ms_max

    # Queries

    async def list_pending(
        self, queries: Sequence[DelayQuery], *, caller: Caller
    ) -> list[PendingPage | MansioError]:
        """Return the result or the error of each query.

        Errors: `TopicAuthorizationFailed`, `NotLeaderOrFollower`, `CoordinatorLoadInProgress`, `UnknownTopicId`,
        `UnknownTopicOrPartition`. Raises `InvalidRequest`."""
        if len(queries) > QUERIES_MAX:
            raise InvalidRequest(f"{len(queries)} queries; at most {QUERIES_MAX} per request")
        results: list[PendingPage | MansioError] = []
        bytes_left = LISTED_BYTES_MAX
        turns = ItemTurns(self._scheduler)
        for query in queries:
            await turns.next()
            try:
                operation = Operation.READ if query.records_max > 0 else Operation.DESCRIBE
                self._check(caller, operation, query.topic_id)
                page, size = await self._list_one(query, bytes_left)
            except MansioError as error:
                results.append(without_traceback(error))
            else:
                results.append(page)
                bytes_left = max(0, bytes_left - size)
        return results

    def _check(self, caller: Caller, operation: Operation, topic_id: bytes) -> None:
        self._authorization.check_topic_id(caller, operation, topic_id, self._partitions.name_of)

    async def _list_one(self, query: DelayQuery, bytes_max: int) -> tuple[PendingPage, int]:
        """Return a result, and the size of its keys, values and headers."""
        partition = self._partitions.find(None, query.topic_id, query.partition)
        partition.ensure_leader()
        manager = partition.find_feature(DelayManager)
        if manager is None:
            return PendingPage(0, 0, None, self._clock.wall_ms()), 0
        manager.ensure_usable()
        found = _PageBuilder(query, min(query.records_max, LISTED_RECORDS_MAX), bytes_max)
        if query.records_max > 0:
            await self._fill(found, partition, manager)
        pending = manager.view.pending
        page = PendingPage(
            pending.count,
            pending.size_bytes,
            pending.next_due_ms,
            self._clock.wall_ms(),
            found.records,
            found.next,
        )
        return page, found.size_bytes

    async def _fill(self, found: _PageBuilder, partition: Partition, manager: DelayManager) -> None:
        """Add records until the result is full or nothing is left."""
        turns = ItemTurns(self._scheduler)
        while True:
            candidates = found.candidates(manager)
            for record in candidates:
                if record.id < partition.high_watermark:
                    found.examine(record, manager)
                else:
                    found.skip(record)
                if found.is_full:
                    return
                if turns.is_over():
                    await turns.pause()
                    manager.ensure_usable()
            if len(candidates) < CANDIDATES_MAX:
                found.next = None
                return
            await turns.pause()
            manager.ensure_usable()

    # Changes

    async def cancel(
        self, topic_id: bytes, partition: int, ids: Sequence[int], *, timeout_ms: int, caller: Caller
    ) -> list[int]:
        """Cancel pending records. Return the ids that were pending, once the change is committed.

        Raises `TopicAuthorizationFailed`, `InvalidRequest`, `NotLeaderOrFollower`, `CoordinatorLoadInProgress`, the
        errors of `Partition.append_unchanged`, and `RequestTimedOut` if the change was appended, but is not committed
        after `timeout_ms` or this broker ceased to be the leader: it is not known then whether it will be."""
        self._check(caller, Operation.WRITE, topic_id)
        found, manager = self._check_change(topic_id, partition, ids)
        if manager is None:
            return []
        return await self._change(found, ids, manager.cancel, timeout_ms=timeout_ms)

    async def reschedule(
        self,
        topic_id: bytes,
        partition: int,
        ids: Sequence[int],
        *,
        due_ms: int | None = None,
        delay_ms: int = 0,
        timeout_ms: int,
        caller: Caller,
    ) -> list[int]:
        """Change when pending records are due: at `due_ms` since the Unix epoch, or `delay_ms` from now. Results and
        errors as in `cancel`."""
        self._check(caller, Operation.WRITE, topic_id)
        found, manager = self._check_change(topic_id, partition, ids)
        now_ms = self._clock.wall_ms()
        if due_ms is None:
            due_ms = now_ms + delay_ms
        if delay_ms < 0 or not 0 <= due_ms <= now_ms + DELAY_MS_MAX:
            raise InvalidRequest(f"{found.name}: the new due time is not within 365 days from now")
        if manager is None:
            return []
        change = partial(manager.reschedule, due_ms=due_ms)
        return await self._change(found, ids, change, timeout_ms=timeout_ms)

    def _check_change(
        self, topic_id: bytes, index: int, ids: Sequence[int]
    ) -> tuple[Partition, DelayManager | None]:
        if not 0 < len(ids) <= CHANGED_RECORDS_MAX:
            raise InvalidRequest(f"{len(ids)} ids; 1 to {CHANGED_RECORDS_MAX} per request")
        partition = self._partitions.find(None, topic_id, index)
        partition.ensure_leader()
        return partition, partition.find_feature(DelayManager)

    async def _change(
        self,
        partition: Partition,
        ids: Sequence[int],
        change: Callable[[Sequence[int]], tuple[list[int], int]],
        *,
        timeout_ms: int,
    ) -> list[int]:
        """Apply a change in slices, wait until the log is committed, and return the ids that were pending.

        That others were not pending is certain only then, too: their delivery or cancellation may not be committed.
        Raises `RequestTimedOut`."""
        changed: list[int] = []
        turns = ItemTurns(self._scheduler, items_per_look=SLICE_CHANGES)
        for begin in range(0, len(ids), SLICE_CHANGES):
            if begin:
                await turns.pause()
            known, _ = change(ids[begin : begin + SLICE_CHANGES])
            changed += known
        promise = partition.commit_promise(partition.end_offset)
        timeout_ms = min(max(0, timeout_ms), self._wait_ms_max)
        late = f"no answer of the other replicas for {timeout_ms} ms"
        try:
            await result_within(self._scheduler, promise, timeout_ms, late)
        except MansioError as error:
            raise RequestTimedOut(
                f"{partition.name}: the change may not be committed: {error.message}"
            ) from error
        return changed

    # Statistics

    def sample(self, partition: Partition) -> PartitionPending | None:
        """Return the state of a partition; None if this broker does not lead it, or its topic never accepted delays."""
        manager = partition.find_feature(DelayManager)
        if manager is None or not partition.is_leader:
            return None
        pending, settings = manager.view.pending, partition.settings
        fraction = max(
            pending.count / settings.delayed_records_max, pending.size_bytes / settings.delayed_bytes_max
        )
        return PartitionPending(
            pending.count, pending.size_bytes, pending.next_due_ms, self._clock.wall_ms(), fraction
        )


class _PageBuilder:
    """Collects the records of one result."""

    __slots__ = ("_bytes_max", "_examined", "_query", "_records_max", "next", "records", "size_bytes")

    def __init__(self, query: DelayQuery, records_max: int, bytes_max: int) -> None:
        self._query = query
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._examined = 0
        self.size_bytes = 0
        self.records: list[ListedRecord] = []
        self.next: Cursor | None = query.after
        """Behind the last record that was examined."""

    @property
    def is_full(self) -> bool:
        return (
            len(self.records) >= self._records_max
            or self._examined >= EXAMINED_RECORDS_MAX
            or self.size_bytes >= self._bytes_max
        )

    def candidates(self, manager: DelayManager) -> list[PendingRecord]:
        """Return the next records, at most `CANDIDATES_MAX`."""
        query, pending, after = self._query, manager.view.pending, self.next or BEGIN
        found: Iterable[PendingRecord]
        if query.ids is None:
            found = pending.select(query.due_from_ms, query.due_to_ms, after)
        else:
            wanted = (pending.find(record_id) for record_id in {*query.ids})
            found = sorted(record for record in wanted if record is not None and record[:2] > after)
        return [*islice(found, CANDIDATES_MAX)]

    def skip(self, record: PendingRecord) -> None:
        self.next = Cursor(record.due_ms, record.id)

    def examine(self, record: PendingRecord, manager: DelayManager) -> None:
        """Read a record, and add it if it has the wanted key."""
        self.skip(record)
        self._examined += 1
        if self._query.value_bytes_max < 0 and self._query.key is None:
            self.records.append(ListedRecord(record.id, record.due_ms))
            return
        try:
            content = manager.read(record)
        except MansioError as error:
            if self._query.key is None:
                self.records.append(ListedRecord(record.id, record.due_ms, error=without_traceback(error)))
            return
        if self._query.key is None or content[1] == self._query.key:
            listed = _listed(record, content, max(0, self._query.value_bytes_max))
            self.records.append(listed)
            self.size_bytes += _content_bytes(listed)


def _listed(record: PendingRecord, content: NewRecord, value_bytes_max: int) -> ListedRecord:
    timestamp_ms, key, value, headers = content
    return ListedRecord(
        record.id,
        record.due_ms,
        timestamp_ms,
        None if key is None else bytes(key),
        None if value is None else bytes(value[:value_bytes_max]),
        -1 if value is None else len(value),
        tuple((name, None if one is None else bytes(one)) for name, one in headers),
    )


def _content_bytes(record: ListedRecord) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers
