"""The history of records; available as `client.admin.traces`. Requests are Mansio's own; any broker answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
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
