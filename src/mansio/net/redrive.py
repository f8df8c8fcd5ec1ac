"""Redrive request: makes dead-lettered records of a share group available again. Used by the admin client and Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import UnknownTopicId
from mansio.net.offsets import request_leaders
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster
    from mansio.wire.topic_partition import TopicPartition

REDRIVE_RECORDS_MAX: Final = 10_000
"""Maximum number of records that one request redrives."""


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """Numbers of records in the result of one redrive request.

    `redriven` records were made available by this request, `repeated` records by an earlier request with the same
    redrive id; `deleted` records are no longer in the log; `dead` is the number of dead-lettered records of the
    partition that were not made available again.
    """

    redriven: int
    repeated: int
    deleted: int
    dead: int


class SharePartitionId(NamedTuple):
    """One partition of a topic as one share group reads it. `topic_id`: id of the topic of the original records."""

    group: str
    topic: str
    partition: int
    topic_id: bytes


@dataclass(slots=True)
class RedriveCounts:
    """Numbers of records of one share partition in a redrive of many requests. `not_dead_lettered`: neither redriven,
    repeated nor deleted. `error`: why it ended early."""

    records: int = 0
    redriven: int = 0
    repeated: int = 0
    deleted: int = 0
    not_dead_lettered: int = 0
    error: str | None = None

    def add(self, records: int, result: RedriveResult) -> None:
        """Add the result of a request for so many records."""
        self.redriven += result.redriven
        self.repeated += result.repeated
        self.deleted += result.deleted
        self.not_dead_lettered += records - result.redriven - result.repeated - result.deleted


async def redrive_records(
    cluster: Cluster,
    group: str,
    partition: TopicPartition,
    *,
    redrive_id: str,
    offsets: Sequence[tuple[int, int]] | None,
    records_max: int,
) -> RedriveResult:
    """Redrive at most `records_max` dead-lettered records of one partition: those in `offsets` (ranges, both ends
    inclusive), or all.

    A record is redriven once per `redrive_id`, so a call can be repeated with the same id after any failure. Raises
    `GroupIdNotFound` if the group has not read the partition yet.
    """

    async def send(
        node_id: int,
        requests: Mapping[TopicPartition, None],
        results: dict[TopicPartition, RedriveResult],
    ) -> None:
        (one,) = requests
        topic_id = (await cluster.topic(one.topic)).topic_id
        ranges = None
        if offsets is not None:
            ranges = [{"first_offset": first, "last_offset": last} for first, last in offsets]
        fields = {
            "redrive_id": redrive_id,
            "group_id": group,
            "topic_id": topic_id,
            "partition_index": one.partition,
            "offsets": ranges,
            "most": min(records_max, REDRIVE_RECORDS_MAX),
        }
        connection = await cluster.connection(node_id)
        response = await connection.request(ApiKey.REDRIVE_RECORDS, fields)
        if response.error_code == UnknownTopicId.kafka_code:
            cluster.mark_stale((one.topic,))
        raise_for_code(response.error_code, response.error_message)
        results[one] = RedriveResult(response.redriven, response.repeated, response.deleted, response.dead)

    return (await request_leaders(cluster, {partition: None}, send))[partition]


def offset_ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Convert ascending offsets to ranges (first, last), both inclusive."""
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] + 1 == offset:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges
