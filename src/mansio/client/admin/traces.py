"""The history of records; available as `client.admin.traces`. Requests are Mansio's own; any broker answers."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mansio.client.admin.record_search import (
    DEFAULT_TIMEOUT_MS,
    FoundRecord,
    RecordSearch,
    search_records,
)
from mansio.client.types import milliseconds
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from mansio.client.admin.record_search import SearchProgress
    from mansio.net.cluster import Cluster


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened to a record.

    `kind`: published, accepted, due, delivered, renewed, released, expired, acknowledged, rejected, attempts-used-up,
    dead-lettered, redriven, aborted, discarded, deleted, position-committed, state-loaded, outcome-unknown, replicated
    or kept. `time`: when; of `kept` until when, None for no limit or an unknown time. `group`: None for an event of the
    record itself. `attempt`: number of the delivery, 0 for none. `who`: the member of the group, or the publisher;
    empty if unknown. `wait_ms`: time since the event before it of the same group, or since the publication; None if it
    is unknown. `is_computed`: derived from what the broker knows now, and not from what was written when it happened.
    """

    kind: str
    time: datetime | None
    group: str | None
    attempt: int
    who: str
    detail: str
    wait_ms: int | None
    is_computed: bool


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """The timeline of a record.

    `certain`: nothing can be missing; otherwise `uncertainties` states what may be. `total_ms`: from the publication to
    the last event with which a group was done with the record; None if no group is. `leader`, `replicas`, `in_sync`:
    node ids of the brokers that have its partition now. `is_stored`: the record is in the log. `timestamp`,
    `size_bytes` (key and value): None and 0 if it is not.
    """

    topic: str
    partition: int
    offset: int
    events: tuple[TraceEvent, ...]
    certain: bool
    uncertainties: tuple[str, ...]
    total_ms: int | None
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    is_stored: bool
    timestamp: datetime | None
    size_bytes: int


class TraceAdmin:
    """The history of the records of one cluster; available as `client.admin.traces`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def record(self, topic: str, partition: int, offset: int) -> RecordTrace:
        """What has happened to the record at an offset. It needs READ for the topic; groups that the user may not
        DESCRIBE are in the timeline without their names and members.

        Raises `UnknownTopicOrPartition`, `TopicAuthorizationFailed`."""
        return await self._trace(
            {"topic": topic, "partition_index": partition, "offset": offset, "group": ""}
        )

    async def last_failed(self, group: str) -> RecordTrace:
        """What has happened to the record that a share group has rejected, or used up the attempts of, last. It needs
        DESCRIBE for the group, too. Raises `ResourceNotFound` if the trace has no such record, and as `record`."""
        return await self._trace({"topic": "", "partition_index": -1, "offset": -1, "group": group})

    async def find(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        record_id: str | None = None,
        partition: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
        on_progress: Callable[[SearchProgress], object] | None = None,
    ) -> AsyncGenerator[FoundRecord, None]:
        """Find the records of a topic that have a key, or an id in the header `mansio-id`: the brokers read the log,
        with the lowest priority, and the records come as they are found. It needs READ for the topic.

        `partition`: None for all; that of the key by Kafka's partitioner is searched first. `since`, `until`: only
        records with timestamps in this range; without `since`, an id is searched from ten minutes before its own time
        on. `limit`: the number of records after which the search ends, 10 for a key and 1 for an id if it is None.
        `on_progress` is called after each step. The search reads up to the high watermark that each partition has when
        its search begins. Records that are still delayed are not found, those of open and aborted transactions are.

        Raises `ValueError`, `UnknownTopicOrPartition`, `TopicAuthorizationFailed`, `RequestTimedOut` after
        `timeout_ms`, and the error of a partition that cannot be searched, after all that was found in the others."""
        found = self.search(
            topic,
            key=key,
            record_id=record_id,
            partition=partition,
            since=since,
            until=until,
            limit=limit,
            timeout_ms=timeout_ms,
        )
        async with aclosing(found):
            async for each in found:
                if isinstance(each, FoundRecord):
                    yield each
                elif on_progress is not None:
                    on_progress(each)

    def search(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        record_id: str | None = None,
        partition: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
    ) -> AsyncGenerator[FoundRecord | SearchProgress, None]:
        """Like `find`; it also yields the progress of the search."""
        wanted = RecordSearch.of(
            topic,
            key=key,
            record_id=record_id,
            partition=partition,
            since_ms=None if since is None else milliseconds(since),
            until_ms=None if until is None else milliseconds(until),
            limit=limit,
            timeout_ms=timeout_ms,
        )
        return search_records(self._cluster, wanted)

    async def _trace(self, fields: dict[str, Any]) -> RecordTrace:
        response = await self._cluster.request(
            ApiKey.TRACE_RECORD,
            fields,
            check=lambda response: raise_for_code(response.error_code, response.error_message),
            retry_unknown_topic=False,
        )
        facts = response.facts
        return RecordTrace(
            response.topic,
            response.partition_index,
            response.offset,
            tuple(
                TraceEvent(
                    each.kind,
                    _moment(each.time_ms),
                    each.group or None,
                    each.attempt,
                    each.who,
                    each.detail,
                    None if each.wait_ms < 0 else each.wait_ms,
                    each.is_computed,
                )
                for each in response.events
            ),
            not response.uncertainties,
            tuple(response.uncertainties),
            None if response.total_ms < 0 else response.total_ms,
            facts.leader,
            tuple(facts.replicas),
            tuple(facts.in_sync),
            facts.is_stored,
            _moment(facts.timestamp_ms),
            facts.size_bytes,
        )


def _moment(unix_ms: int) -> datetime | None:
    return None if unix_ms < 0 else datetime.fromtimestamp(unix_ms / 1000, UTC)
