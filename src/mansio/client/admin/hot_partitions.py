"""Requests about hot partitions: DescribeHotPartitions of Mansio, and what decides which remedy helps.

Each broker describes the partitions that it leads, so all are asked. Whether consumers are behind is asked only if a
partition is hot, and only for groups with members.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mansio.client.admin.groups import list_groups
from mansio.errors import MansioError, RequestTimedOut
from mansio.net.offsets import fetch_offsets, list_offsets
from mansio.net.retry import raise_for_code
from mansio.state.hot_partitions.frequent_keys import KeyCount, KeySample
from mansio.state.hot_partitions.remedies import (
    BrokerLoad,
    HotPartitionFacts,
    Remedy,
    choose_remedies,
    plan_leader_moves,
)
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster

KeyAccess = Literal["shown", "not sampled", "not authorized", "not requested"]
"""Whether a hot partition has its keys: they are shown, its topic forbids it or nothing is sampled yet, the client may
not read the topic, or it has not asked for them."""

_KEY_ACCESS: Final[tuple[KeyAccess, ...]] = ("shown", "not sampled", "not authorized", "not requested")
"""By the number in DescribeHotPartitions."""

GROUPS_MAX: Final = 500
"""Number of groups whose offsets are compared with the ends of hot partitions."""
GROUPS_AT_ONCE: Final = 20
SHARE_TYPE: Final = "share"
STATES_WITHOUT_MEMBERS: Final = frozenset({"Empty", "Dead"})


@dataclass(frozen=True, slots=True)
class HotKey:
    """A frequent key of a hot partition. Between `share_min` and `share_max` of the sampled records have it (parts of
    1). Of a key of more than 256 bytes, `key` is the begin, with a hash of the whole key."""

    key: bytes = field(repr=False)
    share_min: float
    share_max: float


@dataclass(frozen=True, slots=True)
class HotPartition:
    """A partition that takes in far more than the others of its topic. Rates are records per second.

    `median_rate`: median of the rates of the topic's `partition_count` partitions, `topic_rate`: their sum. `led_s`:
    for how long `leader` has led it, as far as that broker knows. `replicas` and `in_sync_replicas` are node ids, empty
    if the client may not describe the topic. `keys`: the most frequent ones among `sampled_records`, unless
    `key_access` says why there are none. `remedies`: what helps, the first thing first.
    """

    topic: str
    partition: int
    leader: int
    rate: float
    median_rate: float
    topic_rate: float
    partition_count: int
    led_s: float
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    is_compacted: bool
    key_access: KeyAccess
    sampled_records: int = 0
    keys: tuple[HotKey, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def factor(self) -> float | None:
        """The rate as a multiple of the median; None if the median is 0."""
        return self.rate / self.median_rate if self.median_rate else None


@dataclass(frozen=True, slots=True)
class HotPartitions:
    """The hot partitions of a cluster by topic and index, and the loads of its brokers. `errors`: by node id, why
    brokers did not answer; which of their partitions are hot is not known. `disabled`: brokers that do not look for hot
    partitions."""

    partitions: tuple[HotPartition, ...]
    brokers: tuple[BrokerLoad, ...]
    errors: Mapping[int, MansioError] = field(default_factory=dict)
    disabled: tuple[int, ...] = ()


class BrokerAnswer(NamedTuple):
    """The response of one broker, or its error."""

    node_id: int
    response: Any = None
    error: MansioError | None = None


class Placement(NamedTuple):
    """What the cluster knows of a partition: see `HotPartition`."""

    leader: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    is_compacted: bool


async def ask_broker(cluster: Cluster, node_id: int, keys_max: int, timeout_ms: float) -> BrokerAnswer:
    """Ask a broker for the hot partitions that it leads."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            connection = await cluster.connection(node_id)
            response = await connection.request(ApiKey.DESCRIBE_HOT_PARTITIONS, {"keys_max": keys_max})
        raise_for_code(response.error_code, response.error_message)
    except TimeoutError:
        return BrokerAnswer(node_id, error=RequestTimedOut(f"no answer within {timeout_ms:.0f} ms"))
    except MansioError as error:
        return BrokerAnswer(node_id, error=without_traceback(error))
    return BrokerAnswer(node_id, response)


async def group_lags(
    cluster: Cluster, partitions: Sequence[TopicPartition], *, timeout_ms: float
) -> dict[TopicPartition, tuple[tuple[str, int], ...]]:
    """Return the groups that read hot partitions, with the number of records that each has not read. Groups that the
    client may not describe, and share groups, which read in parallel already, are left out."""
    try:
        listed = await list_groups(cluster, timeout_ms)
        ends = await list_offsets(
            cluster, dict.fromkeys(partitions, LATEST_TIMESTAMP), isolation_level=READ_COMMITTED
        )
    except MansioError:
        return {}
    wanted = [
        each.group_id
        for each in listed
        if each.group_type != SHARE_TYPE and each.state not in STATES_WITHOUT_MEMBERS
    ]

    async def read(group: str) -> list[tuple[TopicPartition, str, int]]:
        try:
            committed = await fetch_offsets(cluster, group, partitions)
        except MansioError:
            return []
        return [
            (each, group, max(0, ends[each].offset - offset.offset)) for each, offset in committed.items()
        ]

    found: dict[TopicPartition, tuple[tuple[str, int], ...]] = {}
    for begin in range(0, min(len(wanted), GROUPS_MAX), GROUPS_AT_ONCE):
        groups = wanted[begin : begin + GROUPS_AT_ONCE]
        for lags in await asyncio.gather(*map(read, groups)):
            for partition, group, lag in lags:
                found[partition] = (*found.get(partition, ()), (group, lag))
    return found


def combine(
    answers: Iterable[BrokerAnswer],
    placements: Mapping[TopicPartition, Placement],
    lags: Mapping[TopicPartition, tuple[tuple[str, int], ...]],
    *,
    full_share: float,
    cool_down_s: float,
) -> HotPartitions:
    """Combine the answers of all brokers, and choose the remedies."""
    answers = list(answers)
    answered = [each for each in answers if each.error is None]
    loads = tuple(BrokerLoad(each.node_id, each.response.rate, each.response.busy) for each in answered)
    reported: dict[TopicPartition, tuple[int, Any]] = {}
    for node_id, response, _ in answered:
        for hot in response.partitions:
            key = TopicPartition(hot.topic, hot.partition_index)
            placement = placements.get(key)
            # A broker that led the partition until a moment ago may still report it.
            if key not in reported or (placement is not None and placement.leader == node_id):
                reported[key] = node_id, hot
    facts = [
        _facts(node_id, hot, placements.get(key), lags.get(key, ()))
        for key, (node_id, hot) in sorted(reported.items())
    ]
    moves = plan_leader_moves(facts, loads, full_share=full_share, cool_down_s=cool_down_s)
    full = {each.node_id for each in loads if each.busy >= full_share}
    partitions = tuple(
        _hot_partition(hot, each, choose_remedies(each, move, is_full=each.leader in full))
        for (_, (_, hot)), each, move in zip(sorted(reported.items()), facts, moves, strict=True)
    )
    return HotPartitions(
        partitions,
        loads,
        {each.node_id: each.error for each in answers if each.error is not None},
        tuple(each.node_id for each in answered if not each.response.window_ms),
    )


def _facts(
    node_id: int, hot: Any, placement: Placement | None, lags: tuple[tuple[str, int], ...]
) -> HotPartitionFacts:
    sample = None
    if hot.key_access == _KEY_ACCESS.index("shown"):
        keys = tuple(KeyCount(bytes(each.key), each.records) for each in hot.keys)
        sample = KeySample(
            hot.sampled_records, hot.records_without_key, hot.count_error, keys, hot.sampled_batches
        )
    known = placement or Placement(node_id, (), (), is_compacted=True)
    return HotPartitionFacts(
        node_id,
        hot.rate,
        hot.led_s,
        known.replicas,
        known.in_sync_replicas,
        hot.partition_count,
        known.is_compacted,
        lags,
        sample,
    )


def _hot_partition(hot: Any, facts: HotPartitionFacts, remedies: tuple[Remedy, ...]) -> HotPartition:
    sample = facts.sample
    keys = () if sample is None else sample.keys
    access: KeyAccess = (
        _KEY_ACCESS[hot.key_access] if 0 <= hot.key_access < len(_KEY_ACCESS) else "not sampled"
    )
    return HotPartition(
        hot.topic,
        hot.partition_index,
        facts.leader,
        hot.rate,
        hot.median_rate,
        hot.topic_rate,
        hot.partition_count,
        hot.led_s,
        facts.replicas,
        facts.in_sync_replicas,
        facts.is_compacted,
        access,
        hot.sampled_records,
        tuple(HotKey(each.key, sample.share_min(each), sample.share_max(each)) for each in keys)
        if sample is not None
        else (),
        remedies,
    )
