"""Range leases of a share group: offsets leased to a member that reads their records by Fetch. Used by Spark."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import InvalidRecordState, MansioError, UnknownTopicId
from mansio.net.offsets import STALE_METADATA_ERRORS, request_leaders
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster
    from mansio.state.share_partition.types import RangeOperation

ACKNOWLEDGED_RANGES_MAX: Final = 1_000
"""Maximum number of ranges of one partition in one request that acknowledges them."""


class RangeLease(NamedTuple):
    """Offsets `first` to `last`, both included, leased to a member, with their delivery count (from 1)."""

    first: int
    last: int
    delivery_count: int

    @property
    def size(self) -> int:
        """Number of offsets."""
        return self.last - self.first + 1


@dataclass(slots=True)
class RangeLeases:
    """Result of a request for range leases. `order`: the order of the group, none, key or partition, empty without
    leases; `is_committed_only`: the group reads only committed records; `errors`: of single partitions."""

    ranges: dict[TopicPartition, list[RangeLease]] = field(default_factory=dict)
    order: str = ""
    is_committed_only: bool = False
    errors: dict[TopicPartition, MansioError] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Number of leased offsets."""
        return sum(each.size for ranges in self.ranges.values() for each in ranges)


class AlteredLeases(NamedTuple):
    """Ranges of one partition for which an operation was done, and those of the others that are dead-lettered or
    discarded, with delivery count 0."""

    ranges: list[RangeLease]
    ended: list[RangeLease]


class RangeAcknowledgement(NamedTuple):
    """Acknowledgement of the offsets `first` to `last` of the delivery with this count. `type`: an acknowledgement type
    of `mansio.state.share_partition.types`; `delay_ms` and `reason` as in `AcknowledgementBatch`."""

    first: int
    last: int
    delivery_count: int
    type: int
    delay_ms: int = -1
    reason: str = ""


async def lease_ranges(
    cluster: Cluster,
    group: str,
    member: str,
    partitions: Iterable[TopicPartition],
    *,
    records_max: int,
    lease_ms: int,
    wait_ms: int = 0,
) -> RangeLeases:
    """Lease at most `records_max` records of the partitions to a member, for `lease_ms`.

    The leaders are asked in parallel, each for its part; those that gave all of it are asked once more for what is
    left. If they have none, each waits for at most `wait_ms`. Errors of single partitions are in the result. The group
    is created if it does not exist."""
    found = RangeLeases()
    by_leader = await cluster.retry(partial(cluster.group_by_leader, [*partitions]))
    count = sum(map(len, by_leader.values()))
    shares = {node: -(-records_max * len(own) // count) for node, own in by_leader.items()}
    ask = partial(_lease_of_node, cluster, group, member, lease_ms)
    taken = await asyncio.gather(
        *(ask(node, own, shares[node], wait_ms, found) for node, own in by_leader.items())
    )
    for (node, own), records in zip(by_leader.items(), taken, strict=True):
        left = records_max - found.records
        if left > 0 and records >= shares[node] and len(by_leader) > 1:
            await ask(node, own, left, 0, found)
    return found


async def _lease_of_node(
    cluster: Cluster,
    group: str,
    member: str,
    lease_ms: int,
    node_id: int,
    partitions: Sequence[TopicPartition],
    records_max: int,
    wait_ms: int,
    found: RangeLeases,
) -> int:
    """Lease records of the partitions that a broker leads, beginning with a random one; return their number."""
    begin = random.randrange(len(partitions))
    rotated = [*partitions[begin:], *partitions[:begin]]
    ids = {name: (await cluster.topic(name)).topic_id for name in {each.topic for each in rotated}}
    fields = {
        "group_id": group,
        "member_id": member,
        "records_max": records_max,
        "lease_ms": lease_ms,
        "wait_ms": wait_ms,
        "topics": [
            {"topic_id": topic_id, "partitions": [each.partition for each in rotated if each.topic == name]}
            for name, topic_id in ids.items()
        ],
    }
    try:
        connection = await cluster.connection(node_id)
        timeout_ms = connection.options.request_timeout_ms + wait_ms
        response = await connection.request(ApiKey.LEASE_RANGES, fields, timeout_ms=timeout_ms)
        raise_for_code(response.error_code, response.error_message)
    except STALE_METADATA_ERRORS:
        cluster.mark_stale(ids)
        raise
    names = {topic_id: name for name, topic_id in ids.items()}
    found.order, records = response.order or found.order, 0
    found.is_committed_only |= bool(response.isolation_level)
    for topic in response.topics:
        for part in topic.partitions:
            place = TopicPartition(names[topic.topic_id], part.partition_index)
            if part.error_code:
                error = client_error_for_code(part.error_code, part.error_message)
                found.errors[place] = error
                if isinstance(error, STALE_METADATA_ERRORS):
                    cluster.mark_stale((place.topic,))
                continue
            leases = [_range_lease(each) for each in part.ranges]
            records += sum(each.size for each in leases)
            found.ranges[place] = sorted((*found.ranges.get(place, ()), *leases))
    return records


def _range_lease(entry: Any) -> RangeLease:
    return RangeLease(entry.first_offset, entry.last_offset, entry.delivery_count)


async def alter_range_leases(
    cluster: Cluster,
    group: str,
    member: str,
    wanted: Mapping[TopicPartition, Sequence[RangeLease]],
    operation: RangeOperation,
    *,
    lease_ms: int = -1,
    releases_others: bool = False,
) -> dict[TopicPartition, AlteredLeases]:
    """Keep, claim or accept range leases of a member. For the arguments see `SharePartition.alter_range_leases`.

    The request is repeated after a retriable error. If it was done before, ACCEPT returns fewer ranges, and CLAIM
    counts one more delivery."""

    async def send(
        node_id: int,
        requests: Mapping[TopicPartition, Sequence[RangeLease]],
        results: dict[TopicPartition, AlteredLeases],
    ) -> None:
        ids = {name: (await cluster.topic(name)).topic_id for name in {each.topic for each in requests}}
        fields = {
            "group_id": group,
            "member_id": member,
            "lease_ms": lease_ms,
            "operation": int(operation),
            "releases_others": releases_others,
            "topics": [
                {
                    "topic_id": topic_id,
                    "partitions": [
                        {
                            "partition_index": place.partition,
                            "ranges": [
                                {
                                    "first_offset": first,
                                    "last_offset": last,
                                    "delivery_count": delivery_count,
                                }
                                for first, last, delivery_count in ranges
                            ],
                        }
                        for place, ranges in requests.items()
                        if place.topic == name
                    ],
                }
                for name, topic_id in ids.items()
            ],
        }
        connection = await cluster.connection(node_id)
        response = await connection.request(ApiKey.ALTER_RANGE_LEASES, fields)
        raise_for_code(response.error_code, response.error_message)
        names = {topic_id: name for name, topic_id in ids.items()}
        failure: MansioError | None = None
        for topic in response.topics:
            for part in topic.partitions:
                place = TopicPartition(names[topic.topic_id], part.partition_index)
                if part.error_code:
                    failure = client_error_for_code(part.error_code, part.error_message)
                    if part.error_code == UnknownTopicId.kafka_code:
                        cluster.mark_stale((place.topic,))
                else:
                    results[place] = AlteredLeases(
                        [_range_lease(each) for each in part.ranges],
                        [_range_lease(each) for each in part.ended_ranges],
                    )
        if failure is not None:
            raise copied(failure)

    return await request_leaders(cluster, wanted, send)


async def acknowledge_ranges(
    cluster: Cluster,
    group: str,
    member: str,
    acknowledgements: Mapping[TopicPartition, Sequence[RangeAcknowledgement]],
) -> int:
    """Acknowledge records of range leases, ascending and disjoint in each partition; return the number of
    acknowledgements that were not applied, because the member has not leased all records of that delivery any more.

    An acknowledgement that was applied before counts among these, so that the call can be repeated after a failure."""
    refused = 0
    pending = {
        (place, at): acks[at : at + ACKNOWLEDGED_RANGES_MAX]
        for place, acks in acknowledgements.items()
        for at in range(0, len(acks), ACKNOWLEDGED_RANGES_MAX)
    }
    for (place, _), acks in pending.items():
        try:
            await _acknowledge(cluster, group, member, place, acks)
        except InvalidRecordState:  # none of them was applied
            for one in acks if len(acks) > 1 else ():
                try:
                    await _acknowledge(cluster, group, member, place, [one])
                except InvalidRecordState:
                    refused += 1
            refused += len(acks) == 1
    return refused


async def _acknowledge(
    cluster: Cluster, group: str, member: str, place: TopicPartition, acks: Sequence[RangeAcknowledgement]
) -> None:
    """Acknowledge records of one partition, all or none. Raises `InvalidRecordState`."""

    async def send(
        node_id: int,
        requests: Mapping[TopicPartition, Sequence[RangeAcknowledgement]],
        results: dict[TopicPartition, None],
    ) -> None:
        topic_id = (await cluster.topic(place.topic)).topic_id
        batches = [
            {
                "first_offset": each.first,
                "last_offset": each.last,
                "types": bytes([each.type]),
                "delay_ms": each.delay_ms,
                "reason": each.reason,
                "delivery_count": each.delivery_count,
            }
            for each in requests[place]
        ]
        partition_fields = {"partition_index": place.partition, "batches": batches}
        fields = {
            "group_id": group,
            "member_id": member,
            "topics": [{"topic_id": topic_id, "partitions": [partition_fields]}],
        }
        connection = await cluster.connection(node_id)
        response = await connection.request(ApiKey.ACKNOWLEDGE_RECORDS, fields)
        raise_for_code(response.error_code, response.error_message)
        answer = response.topics[0].partitions[0]
        if answer.error_code == UnknownTopicId.kafka_code:
            cluster.mark_stale((place.topic,))
        raise_for_code(answer.error_code, answer.error_message)
        results[place] = None

    await request_leaders(cluster, {place: acks}, send)
