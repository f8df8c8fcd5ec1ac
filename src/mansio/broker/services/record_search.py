"""Record search: finds the records of a partition that have a key or an id, one bounded step at a time.

No index has the keys of records, so a search reads the log. The file worker does it in another process, which has the
lowest priority; this one only chooses the files. The client asks for step after step; the broker remembers nothing.

Invariants:
* A search reads up to the high watermark (read uncommitted): it also finds records of transactions that are open or
  aborted, which the timeline of a record tells. It skips control batches, and with them the records that are pending.
* A step searches for `STEP_MS_MAX`, and finds `MATCHES_MAX` records, at most. At most `WAITING_MAX` steps wait for the
  worker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRequest, ThrottlingQuotaExceeded
from mansio.ports import FileJob
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.storage.record_search import (
    SearchTask,
    SkippedOffsets,
    decode_result,
    encode_job,
    search_files,
)
from mansio.wire.batch.record_id_header import RECORD_ID_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.ports import Clock, DiskFile, FileWorker
    from mansio.storage.record_search import SearchedFile, SearchResult
    from mansio.storage.search_plan import SearchPlan

STEP_MS_MAX: Final = 1_000
MATCHES_MAX: Final = 1_000
WAITING_MAX: Final = 16
FILES_MAX: Final = 16
"""Segments of one step."""

KEY_BYTES_MAX: Final = 64 << 10
WORKER_MARGIN_MS: Final = 15_000
"""How much longer than its budget a step may take: the worker has no processor while others want it. Less than clients
wait for an answer."""

CLOCK_MARGIN_MS: Final = 600_000
"""A search for a time range ends at the first record that is by so much younger than the range: clocks of publishers,
and their batches, may differ by that."""

DELETED: Final = "deleted by retention or DeleteRecords"


class RecordQuery(NamedTuple):
    """One step: see `SearchRecordsRequest`. Of `key` and `record_id` one is None."""

    key: bytes | None
    record_id: str | None
    offset: int
    end_offset: int
    since_ms: int
    until_ms: int
    matches_max: int
    wait_ms_max: int


class SearchStep(NamedTuple):
    """Outcome of a step: see `SearchRecordsResponse`. `matches`: (offset, timestamp in ms)."""

    next_offset: int
    end_offset: int
    matches: Sequence[tuple[int, int]] = ()
    skipped: Sequence[SkippedOffsets] = ()
    searched_bytes: int = 0
    left_bytes: int = 0


class RecordSearchService:
    """Searches partitions that this broker leads. All methods run on its event loop."""

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        worker: FileWorker | None,
        clock: Clock,
        authorization: Authorization,
    ) -> None:
        """`worker`: None to search in this process, for a disk in memory."""
        self.worker = worker
        self._partitions = partitions
        self._clock = clock
        self._authorization = authorization
        self._waiting = 0

    async def search(self, topic: str, index: int, query: RecordQuery, *, caller: Caller) -> SearchStep:
        """Do one step. The caller needs READ for the topic, because keys are data.

        Raises `TopicAuthorizationFailed`, `InvalidRequest`, `UnknownTopicOrPartition`, `NotLeaderOrFollower`,
        `OffsetNotAvailable`, `StorageError`; `ThrottlingQuotaExceeded` if too many searches wait; `Unavailable` or
        `RequestTimedOut` if the worker fails, after which the next step starts another."""
        self._authorization.check(caller, Operation.READ, ResourceType.TOPIC, topic)
        _check(query)
        partition = self._led_partition(topic, index)
        start, end = self._bounds(partition, query)
        skipped: list[SkippedOffsets] = []
        log_start = partition.start_offset
        if start < log_start:
            skipped.append(SkippedOffsets(start, min(log_start, max(end, start)), DELETED))
            start = log_start
        if start >= end:
            return SearchStep(end, end, (), [each for each in skipped if each.first_offset < each.end_offset])
        if self._waiting >= WAITING_MAX:
            raise ThrottlingQuotaExceeded(f"{self._waiting} searches wait for this broker; try again")
        self._waiting += 1
        try:
            plan, result = await self._run(topic, index, query, start, end)
        finally:
            self._waiting -= 1
        skipped += [each for each in plan.skipped if each.first_offset < result.next_offset]
        skipped += result.skipped
        return SearchStep(
            result.next_offset,
            end,
            result.matches,
            skipped,
            result.searched_bytes,
            partition.log.bytes_between(result.next_offset, end) if result.next_offset < end else 0,
        )

    def _led_partition(self, topic: str, index: int) -> Partition:
        partition = self._partitions.find(topic, None, index)
        partition.ensure_leader()
        partition.ensure_high_watermark_known()
        return partition

    def _bounds(self, partition: Partition, query: RecordQuery) -> tuple[int, int]:
        """Return where the step begins, and where the search ends."""
        readable = partition.readable_end()
        end = readable
        if query.end_offset >= 0:
            end = min(query.end_offset, readable)
        elif (last_ms := query.until_ms + CLOCK_MARGIN_MS) < _TIME_MAX:
            found = partition.offset_at_timestamp(last_ms + 1, readable)
            if found is not None:
                end = found[0]
        if query.offset >= 0:
            return query.offset, end
        if query.since_ms <= 0:
            return partition.start_offset, end
        found = partition.offset_at_timestamp(query.since_ms, readable)
        return (end if found is None else found[0]), end

    async def _run(
        self, topic: str, index: int, query: RecordQuery, start: int, end: int
    ) -> tuple[SearchPlan, SearchResult]:
        value = b"" if query.record_id is None else query.record_id.encode()
        task = SearchTask(
            query.key,
            RECORD_ID_NAME,
            value,
            start,
            end,
            query.since_ms,
            query.until_ms,
            query.matches_max,
            query.wait_ms_max,
        )
        plans: list[SearchPlan] = []

        def prepare() -> FileJob:
            # The turn may have come late: retention may have deleted a part, or another broker leads.
            partition = self._led_partition(topic, index)
            begin = max(start, partition.start_offset)
            plan = partition.log.plan_search(begin, end, FILES_MAX)
            if begin > start:
                plan.skipped.insert(0, SkippedOffsets(start, min(begin, end), DELETED))
            plans.append(plan)
            return FileJob(encode_job(task, plan.files), plan.opened)

        if self.worker is None:
            files = prepare().files
            plan = plans[0]
            result = search_files(task, plan.files, partial(_read, files), self._clock.monotonic)
        else:
            timeout_ms = query.wait_ms_max + WORKER_MARGIN_MS
            result = decode_result(await self.worker.run(prepare, timeout_ms=timeout_ms))
            plan = plans[0]
        if _is_passed(result, plan.files):
            result = result._replace(next_offset=min(max(result.next_offset, plan.end_offset), end))
        return plan, result


def _check(query: RecordQuery) -> None:
    """Check the arguments of a step. Raises `InvalidRequest`."""
    if (query.key is None) == (query.record_id is None):
        raise InvalidRequest("a search is either for a key or for an id")
    if len(query.key or b"") > KEY_BYTES_MAX or len(query.record_id or "") > KEY_BYTES_MAX:
        raise InvalidRequest(f"a key to search for has at most {KEY_BYTES_MAX} bytes")
    if not 1 <= query.wait_ms_max <= STEP_MS_MAX or not 1 <= query.matches_max <= MATCHES_MAX:
        raise InvalidRequest(f"a step takes 1 to {STEP_MS_MAX} ms, and finds 1 to {MATCHES_MAX} records")


def _read(files: Sequence[DiskFile], number: int, size: int) -> bytes:
    return files[number].read_at(size, 0)


def _is_passed(result: SearchResult, files: Sequence[SearchedFile]) -> bool:
    """Whether the search has gone through all files."""
    return not files or result.next_offset >= files[-1].end_offset


_TIME_MAX: Final = 1 << 62
