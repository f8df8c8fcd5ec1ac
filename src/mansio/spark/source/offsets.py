"""Partitions and offsets of a query, resolved from options (`earliest` and `latest`, timestamps, JSON) by
requests to brokers.

Offsets travel through Spark as JSON in the format of Spark's Kafka source, `{"topic": {"0": 5}}`; topics and partitions
are sorted, because Spark compares the texts. The end offsets of a query's first batch may also contain where that batch
starts (`FIRST_BATCH_START`).

Invariants:
* The result contains exactly the partitions that are read.
* An explicit offset is inside the log, or it raises `DataLoss` (with `failOnDataLoss`), or it was moved to the nearest
  end of the log with a warning.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConfigError, DataLoss, UnknownTopicOrPartition
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import EARLIEST, LATEST, ListedOffset, list_offsets
from mansio.spark.source import data_loss
from mansio.spark.source.read_plan import OffsetRange
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.net.metadata import TopicView
    from mansio.spark.options import OffsetSpec, SourceOptions
    from mansio.spark.sync_client import SyncClient

Offsets = dict[TopicPartition, int]

FIRST_BATCH_START: Final = ""
"""Key used like a topic name (names are never empty): where the batch starts whose end offsets these are. Spark
persists
the end of a batch before it runs, but not the start of the first: after a failure it would ask again, and `latest`
would have moved.
"""

LIST_OFFSETS_TIMEOUT_S = 3.0
"""After this time without a response to ListOffsets, the existence of the topics is checked."""


class SubscribedPartitions(NamedTuple):
    """The partitions that a subscription resolves to now."""

    partitions: tuple[TopicPartition, ...]
    topic_ids: dict[str, bytes]
    """By topic; all zero where the brokers have no topic ids."""
    missing: frozenset[str]
    """Topics that are named but do not exist."""


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Offsets as Spark stores them. Equal offsets give equal texts."""
    offsets_json: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(offsets):
        offsets_json.setdefault(topic, {})[str(partition)] = offsets[TopicPartition(topic, partition)]
    return offsets_json


def from_json(offsets_json: Mapping[str, Any]) -> Offsets:
    """The inverse of `to_json`. Raises `ConfigError` for other content: the checkpoint of another source."""
    try:
        return {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, partitions in offsets_json.items()
            if topic != FIRST_BATCH_START
            for partition, offset in partitions.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            "the checkpoint does not hold offsets of topics, so it belongs to another source: use a new"
            " checkpointLocation"
        ) from None


def find_partitions(
    sync_client: SyncClient, options: SourceOptions, *, may_be_missing: bool = False
) -> SubscribedPartitions:
    """Resolve the subscription with fresh metadata.

    Raises `ConfigError` for a topic or partition that does not exist (unless `may_be_missing`), and for a pattern
    without a match.
    """
    views = sync_client.run(_views(sync_client, options))
    wanted = options.subscription
    named = {partition.topic for partition in wanted.partitions} | set(wanted.topics)
    missing = frozenset(named - set(views))
    if missing and not may_be_missing:
        raise ConfigError(f"there is no topic {', '.join(sorted(missing))}: create it, or correct the option")
    if wanted.partitions:
        found = tuple(one for one in wanted.partitions if one.topic in views)
        absent = [one for one in found if one.partition >= len(views[one.topic].partitions)]
        if absent and not may_be_missing:
            topic, partition = absent[0]
            count = len(views[topic].partitions)
            raise ConfigError(
                f"topic {topic} has {count} partitions: there is no {partition}, correct assign"
            )
        found = tuple(one for one in found if one not in absent)
    else:
        found = tuple(
            TopicPartition(name, partition.index)
            for name in sorted(views)
            for partition in views[name].partitions
        )
    if wanted.pattern and not found and not may_be_missing:
        raise ConfigError(
            f"no topic matches subscribePattern {wanted.pattern!r}: create one, or correct the pattern"
        )
    return SubscribedPartitions(found, {name: view.topic_id for name, view in views.items()}, missing)


def check_topic_ids(found: SubscribedPartitions, options: SourceOptions) -> None:
    """Raises `TopicRecreated` for a topic whose id differs from the option `topicIds`."""
    for name, expected in options.topic_ids.items():
        if name in found.topic_ids and found.topic_ids[name].hex() != expected.replace("-", "").lower():
            data_loss.report(data_loss.topic_recreated(name), fail=options.fail_on_data_loss)


async def _views(sync_client: SyncClient, options: SourceOptions) -> dict[str, TopicView]:
    """The subscribed topics that exist, by name."""
    cluster, wanted = sync_client.cluster, options.subscription
    if wanted.pattern:
        matches = re.compile(wanted.pattern).fullmatch
        found = await cluster.topics()
        return {name: view for name, view in found.items() if matches(name) and not view.is_internal}
    names = sorted({*wanted.topics, *(partition.topic for partition in wanted.partitions)})
    await cluster.retry(lambda: cluster.refresh(names))
    views = {}
    for name in names:
        view = cluster.cached_topic(name)
        try:
            views[name] = await cluster.topic(name) if view is None else view
        except UnknownTopicOrPartition:
            continue
    return views


def earliest_offsets(sync_client: SyncClient, partitions: Iterable[TopicPartition]) -> Offsets:
    """Log start offset of each partition."""
    return _listed_offsets(sync_client, dict.fromkeys(partitions, EARLIEST), isolation=0)


def latest_offsets(sync_client: SyncClient, partitions: Iterable[TopicPartition], isolation: int) -> Offsets:
    """End offset of each partition for this isolation level."""
    return _listed_offsets(sync_client, dict.fromkeys(partitions, LATEST), isolation=isolation)


def offsets_at(
    sync_client: SyncClient, timestamps_ms: Mapping[TopicPartition, int], isolation: int
) -> Offsets:
    """Offset of the first record of each partition with at least this timestamp; -1 if there is none."""
    return _listed_offsets(sync_client, timestamps_ms, isolation=isolation)


def _listed_offsets(
    sync_client: SyncClient, wanted: Mapping[TopicPartition, int], *, isolation: int
) -> Offsets:
    if not wanted:
        return {}
    listed = sync_client.run(_list_offsets(sync_client, wanted, isolation))
    return {partition: found.offset for partition, found in listed.items()}


async def _list_offsets(
    sync_client: SyncClient, wanted: Mapping[TopicPartition, int], isolation: int
) -> dict[TopicPartition, ListedOffset]:
    """`list_offsets` with a check after a timeout. `list_offsets` waits long for an unknown topic, which may be new;
    these topics existed before, so after the timeout their existence is checked: `UnknownTopicOrPartition` if they were
    deleted.
    """
    try:
        async with asyncio.timeout(LIST_OFFSETS_TIMEOUT_S):
            return await list_offsets(sync_client.cluster, wanted, isolation_level=isolation)
    except TimeoutError:
        topics = {partition.topic for partition in wanted}
        await sync_client.cluster.retry(lambda: sync_client.cluster.refresh(topics))
        for topic in sorted(topics):
            await sync_client.cluster.topic(topic)
        return await list_offsets(sync_client.cluster, wanted, isolation_level=isolation)


def resolve(sync_client: SyncClient, options: SourceOptions) -> dict[TopicPartition, OffsetRange]:
    """The range of each partition that a batch read covers. Raises as `find_partitions` and `resolve_position`."""
    subscribed = find_partitions(sync_client, options)
    check_topic_ids(subscribed, options)
    partitions = subscribed.partitions
    earliest = earliest_offsets(sync_client, partitions)
    latest = latest_offsets(sync_client, partitions, options.isolation_level)
    start = resolve_position(sync_client, options, "starting", earliest, latest)
    end = resolve_position(sync_client, options, "ending", earliest, latest)
    found = {}
    for partition in partitions:
        if (
            start[partition] > end[partition]
            and _is_explicit(options.starting_offsets)
            and _is_explicit(options.ending_offsets)
        ):
            raise ConfigError(
                f"partition {partition.partition} of topic {partition.topic} is to be read from offset"
                f" {start[partition]} to {end[partition]}: correct startingOffsets or endingOffsets"
            )
        topic_id = subscribed.topic_ids.get(partition.topic, NO_TOPIC_ID)
        found[partition] = OffsetRange(start[partition], max(start[partition], end[partition]), topic_id)
    return found


def resolve_position(
    sync_client: SyncClient,
    options: SourceOptions,
    side: str,
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> Offsets:
    """One offset for each partition of `latest`, from the options of this side (`starting`, `ending`).

    Raises `ConfigError` if they omit a partition, name one that is not read, or match no timestamp; `DataLoss` if an
    offset is outside its log.
    """
    position: OffsetSpec = options.starting_offsets if side == "starting" else options.ending_offsets
    if position.timestamp_ms is not None:
        timestamps_ms = dict.fromkeys(latest, position.timestamp_ms)
        return _by_time(sync_client, options, position, f"{side}Timestamp", timestamps_ms, latest)
    if position.timestamps_ms is not None:
        _check_names(f"{side}OffsetsByTimestamp", position.timestamps_ms, latest)
        return _by_time(
            sync_client, options, position, f"{side}OffsetsByTimestamp", position.timestamps_ms, latest
        )
    if isinstance(position.offsets, int):
        return dict(earliest if position.offsets == EARLIEST else latest)
    _check_names(f"{side}Offsets", position.offsets, latest)
    return {
        partition: _clamped(partition, position.offsets[partition], earliest, latest, options)
        for partition in latest
    }


def _by_time(
    sync_client: SyncClient,
    options: SourceOptions,
    position: OffsetSpec,
    name: str,
    timestamps_ms: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> Offsets:
    found = offsets_at(sync_client, timestamps_ms, options.isolation_level)
    for partition, offset in found.items():
        if offset < 0:
            if not position.uses_latest_without_match:
                raise ConfigError(
                    f"partition {partition.partition} of topic {partition.topic} has no record at or after"
                    f" {timestamps_ms[partition]}, which {name} names: choose an earlier time, or set"
                    " startingOffsetsByTimestampStrategy to latest"
                )
            found[partition] = latest[partition]
    return found


def _check_names(name: str, given: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
    missing = sorted(set(read) - set(given))
    if missing:
        raise ConfigError(
            f"option {name} does not say where partition {missing[0].partition} of topic {missing[0].topic} begins or"
            f" ends: name all partitions that are read ({len(missing)} are missing)"
        )
    unread = sorted(set(given) - set(read))
    if unread:
        raise ConfigError(
            f"option {name} names partition {unread[0].partition} of topic {unread[0].topic}, which is not read: leave"
            " it out, or read it"
        )


def _clamped(
    partition: TopicPartition,
    wanted: int,
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
    options: SourceOptions,
) -> int:
    """An explicit offset, limited to the log."""
    if wanted in (EARLIEST, LATEST):
        return earliest[partition] if wanted == EARLIEST else latest[partition]
    loss: DataLoss | None = None
    if wanted < earliest[partition]:
        loss = data_loss.log_start_passed(partition, wanted, earliest[partition])
    elif wanted > latest[partition]:
        loss = data_loss.log_truncated(partition, wanted, latest[partition])
    if loss is not None:
        data_loss.report(loss, fail=options.fail_on_data_loss)
    return min(max(wanted, earliest[partition]), latest[partition])


def is_fixed(position: OffsetSpec) -> bool:
    """Whether a position always resolves to the same offsets."""
    offsets = position.offsets
    return _is_explicit(position) and isinstance(offsets, dict) and all(one >= 0 for one in offsets.values())


def _is_explicit(position: OffsetSpec) -> bool:
    return (
        position.timestamp_ms is None
        and position.timestamps_ms is None
        and isinstance(position.offsets, dict)
    )
