"""Search for records by key or id: the client asks the leaders of all partitions, step by step.

Each step is one SearchRecords request, which a broker answers within about a second, and remembers nothing of. The
leaders are asked in parallel, each for one partition at a time; the partition to which Kafka's partitioner sends the
key comes first, alone.

Invariants: a partition is searched from its first step on up to the end that it had then. At most `STEPS_AHEAD_MAX`
steps are done of which the caller has not taken the outcome.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import (
    ConnectionLost,
    LeaderNotAvailable,
    MansioError,
    NotLeaderOrFollower,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from mansio.net.retry import raise_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.record_id_header import record_id_time_ms
from mansio.wire.murmur2 import partition_for_key
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mansio.net.cluster import Cluster

CHANNEL: Final = "search"
"""Connections of their own: a broker answers the requests of one connection in order."""

STEP_MS: Final = 500
STEP_MATCHES_MAX: Final = 1_000
STEPS_AHEAD_MAX: Final = 8
SKIPPED_MAX: Final = 1_000
"""Skipped ranges of which the progress tells; the others are counted only."""

CLOCK_MARGIN_MS: Final = 600_000
"""Records that are by so much older than their id are found by it: a leader sets timestamps by its own clock, and a
caller may set them."""

_TIME_MIN: Final = -1
_TIME_MAX: Final = (1 << 63) - 1
_STALE: Final = (NotLeaderOrFollower, LeaderNotAvailable, ConnectionLost)


class FoundRecord(NamedTuple):
    """A record that was found by its key or id."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def timestamp(self) -> datetime:
        """The record's timestamp, in UTC."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


class SkippedRange(NamedTuple):
    """Offsets that were not searched, from `first_offset` to below `end_offset`: deleted meanwhile, or unreadable."""

    partition: int
    first_offset: int
    end_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is. `left_bytes`: about so many, of the partitions that have begun; sizes are those on disk.
    `skipped_count`: number of all skipped ranges, of which `skipped` has the first."""

    partitions: int
    finished_partitions: int
    searched_bytes: int
    left_bytes: int
    skipped: tuple[SkippedRange, ...]
    skipped_count: int


@dataclass(frozen=True, slots=True)
class RecordSearch:
    """What to search for; see `TraceAdmin.find`. Raises `ValueError`."""

    topic: str
    key: bytes | None
    record_id: str | None
    partition: int | None
    since_ms: int
    until_ms: int
    limit: int
    timeout_ms: float

    @classmethod
    def of(
        cls,
        topic: str,
        *,
        key: bytes | str | None,
        record_id: str | None,
        partition: int | None,
        since_ms: int | None,
        until_ms: int | None,
        limit: int | None,
        timeout_ms: float,
    ) -> RecordSearch:
        """Check the arguments, and choose the defaults."""
        if (key is None) == (record_id is None):
            raise ValueError("give either a key or the id of a record")
        if limit is not None and limit < 1:
            raise ValueError(f"limit: {limit} is less than 1")
        if record_id is not None and (time_ms := record_id_time_ms(record_id)) is not None:
            record_id = record_id.lower()  # a UUID, which the producer writes so
            since_ms = time_ms - CLOCK_MARGIN_MS if since_ms is None else since_ms
        return cls(
            topic,
            key.encode() if isinstance(key, str) else key,
            record_id,
            partition,
            _TIME_MIN if since_ms is None else max(since_ms, _TIME_MIN),
            _TIME_MAX if until_ms is None else until_ms,
            limit or (DEFAULT_KEY_LIMIT if record_id is None else DEFAULT_ID_LIMIT),
            timeout_ms,
        )


DEFAULT_KEY_LIMIT: Final = 10
DEFAULT_ID_LIMIT: Final = 1
DEFAULT_TIMEOUT_MS: Final = 600_000.0


async def search_records(
    cluster: Cluster, search: RecordSearch
) -> AsyncGenerator[FoundRecord | SearchProgress, None]:
    """Yield what is found, and the progress after each step, also the last one.

    Raises `UnknownTopicOrPartition`, `TopicAuthorizationFailed`, `RequestTimedOut` after the timeout, and the error of
    a partition after everything that was found in the others."""
    run = _Run(cluster, search, await _partitions(cluster, search))
    task = asyncio.create_task(run.run())
    try:
        count = 0
        while (found := await run.outcomes.get()) is not None:
            yield found
            if isinstance(found, SearchProgress):
                run.places.release()
            else:
                count += 1
                if count >= search.limit:
                    return
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _partitions(cluster: Cluster, search: RecordSearch) -> list[int]:
    """Return the partitions to search, the one of the key first."""
    view = await cluster.topic(search.topic, may_create=False)
    count = len(view.partitions)
    if search.partition is not None:
        if not 0 <= search.partition < count:
            raise UnknownTopicOrPartition(f"topic {search.topic!r} has no partition {search.partition}")
        return [search.partition]
    if search.key is None:
        return list(range(count))
    first = partition_for_key(search.key, count)
    return [first, *(each for each in range(count) if each != first)]


class _Run:
    """One search. `outcomes`: what was found, the progress, and None at the end."""

    def __init__(self, cluster: Cluster, search: RecordSearch, partitions: Sequence[int]) -> None:
        self._cluster = cluster
        self._search = search
        self._partitions = partitions
        self._end_s = asyncio.get_running_loop().time() + search.timeout_ms / 1000
        self._left_bytes: dict[int, int] = {}
        self._finished = 0
        self._searched_bytes = 0
        self._skipped: list[SkippedRange] = []
        self._skipped_count = 0
        self._error: MansioError | None = None
        self._is_stopped = False
        self.places = asyncio.Semaphore(STEPS_AHEAD_MAX)
        self.outcomes: asyncio.Queue[FoundRecord | SearchProgress | None] = asyncio.Queue()

    async def run(self) -> None:
        """Search all partitions."""
        try:
            async with asyncio.timeout_at(self._end_s):
                alone = 0 if self._search.key is None else 1
                await self._search_in_order(self._partitions[:alone])
                leaders = await self._by_leader(self._partitions[alone:])
                async with asyncio.TaskGroup() as group:
                    for partitions in leaders:
                        group.create_task(self._search_in_order(partitions))
        except TimeoutError:
            self._error = self._error or RequestTimedOut(
                f"the search has not ended within {self._search.timeout_ms:.0f} ms; "
                f"{self._finished} of {len(self._partitions)} partitions are searched"
            )
        except MansioError as error:
            self._error = without_traceback(error)
        finally:
            self.outcomes.put_nowait(None)
        if self._error is not None:
            raise copied(self._error)

    async def _by_leader(self, partitions: Sequence[int]) -> list[list[int]]:
        grouped: dict[int, list[int]] = {}
        for each in partitions:
            view = await self._cluster.topic(self._search.topic, may_create=False)
            leader = view.partitions[each].leader if each < len(view.partitions) else -1
            grouped.setdefault(leader, []).append(each)
        return list(grouped.values())

    async def _search_in_order(self, partitions: Sequence[int]) -> None:
        for each in partitions:
            try:
                await self._search_partition(each)
            except MansioError as error:
                self._error = self._error or without_traceback(error)
                if not error.retriable:  # the other partitions have the same
                    self._is_stopped = True

    async def _search_partition(self, partition: int) -> None:
        offset = end_offset = -1
        while (offset < 0 or offset < end_offset) and not self._is_stopped:
            await self.places.acquire()
            try:
                response = await self._step(partition, offset, end_offset)
            except BaseException:
                self.places.release()
                raise
            offset, end_offset = response.next_offset, response.end_offset
            for match in response.matches:
                found = FoundRecord(self._search.topic, partition, match.offset, match.timestamp_ms)
                self.outcomes.put_nowait(found)
            for each in response.skipped:
                self._skipped_count += 1
                if len(self._skipped) < SKIPPED_MAX:
                    skipped = SkippedRange(partition, each.first_offset, each.end_offset, each.reason)
                    self._skipped.append(skipped)
            self._searched_bytes += response.searched_bytes
            self._left_bytes[partition] = response.left_bytes
            if offset >= end_offset:
                self._finished += 1
            self.outcomes.put_nowait(self._progress())

    def _progress(self) -> SearchProgress:
        return SearchProgress(
            len(self._partitions),
            self._finished,
            self._searched_bytes,
            sum(self._left_bytes.values()),
            tuple(self._skipped),
            self._skipped_count,
        )

    async def _step(self, partition: int, offset: int, end_offset: int) -> Any:
        search, cluster = self._search, self._cluster
        fields = {
            "topic": search.topic,
            "partition_index": partition,
            "offset": offset,
            "end_offset": end_offset,
            "since_ms": search.since_ms,
            "until_ms": search.until_ms,
            "key": search.key,
            "record_id": search.record_id,
            "max_wait_ms": STEP_MS,
            "max_matches": min(search.limit, STEP_MATCHES_MAX),
        }

        async def attempt() -> Any:
            try:
                node_id = await cluster.leader(*TopicPartition(search.topic, partition))
                connection = await cluster.connection(node_id, CHANNEL)
                response = await connection.request(ApiKey.SEARCH_RECORDS, fields)
                raise_for_code(response.error_code, response.error_message)
            except _STALE:
                cluster.mark_stale((search.topic,))
                raise
            return response

        return await cluster.retry(attempt, not_retried=(UnknownTopicOrPartition,))
