"""Partitions and offsets of a query: resolves the options (`earliest`, `latest`, timestamps, JSON) by requests to
brokers.

Spark stores offsets as JSON in the format of its Kafka source, `{"topic": {"0": 5}}`. Topics and partitions are sorted,
because Spark compares the texts. The end offsets of a query's first batch may also contain the start offsets of this
batch, under the key `FIRST_BATCH_START`; those of an input that advances together with others, the end offsets of the
others (`OTHER_INPUTS`).

Invariants:
* The result contains exactly the partitions that are read.
* An explicit offset outside the log raises `DataLoss`. Without `failOnDataLoss` the nearest offset of the log is used
  instead, with a warning.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConfigError, DataLoss, UnknownTopicOrPartition
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import ListedOffset, list_offsets
from mansio.spark.source import data_loss
from mansio.spark.source.read_plan import OffsetRange
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.net.metadata import TopicMetadata
    from mansio.spark.options import OffsetSpec, SourceOptions
    from mansio.spark.sync_client import SyncClient

Offsets = dict[TopicPartition, int]

FIRST_BATCH_START: Final = ""
"""Key, in the end offsets of a query's first batch, of the start offsets of this batch. It is not a valid topic name.

Spark stores the end of a batch before it runs the batch, but not the start of the first one. After a failure Spark
would request the start again, and `latest` would resolve to other offsets.
"""

OTHER_INPUTS: Final = ","
"""Key, in the offsets of one input, of the offsets of the query's other inputs, by their number: `{"1": {"topic": {"0":
5}}}`. It is not a valid topic name.

Spark plans each input of a query without the others. With these offsets each of them plans the same batch, also after
a restart.
"""

RESERVED_KEYS: Final = frozenset({FIRST_BATCH_START, OTHER_INPUTS})
"""Keys of stored offsets that are not topics."""

LIST_OFFSETS_TIMEOUT_S = 3.0
"""After this time without a response to ListOffsets, the existence of the topics is checked."""


class SubscribedPartitions(NamedTuple):
    """The partitions that a subscription resolves to now."""

    partitions: tuple[TopicPartition, ...]
    topic_ids: dict[str, bytes]
    """Topic id by topic name; all zero if the brokers do not support topic ids."""
    missing: frozenset[str]
    """Topics that the options name and that do not exist."""


def offsets_to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Offsets in the format that Spark stores. Equal offsets give equal texts."""
    offsets_json: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(offsets):
        offsets_json.setdefault(topic, {})[str(partition)] = offsets[TopicPartition(topic, partition)]
    return offsets_json


def offsets_from_json(offsets_json: Mapping[str, Any]) -> Offsets:
    """Parse the result of `offsets_to_json`. Raises `ConfigError` for the checkpoint of another source."""
    try:
        return {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, partitions in offsets_json.items()
            if topic not in RESERVED_KEYS
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
    """Find the partitions of the subscription, with fresh metadata.

    Raises `ConfigError` for a topic or partition that does not exist and for a pattern without a match, unless
    `may_be_missing` is true.
    """
    views = sync_client.run(_subscribed_topics(sync_client, options))
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
    """Check the topic ids that the option `topicIds` requires. A differing id raises `TopicRecreated`, or is logged if
    `failOnDataLoss` is off.
    """
    for name, expected in options.topic_ids.items():
        if name in found.topic_ids and found.topic_ids[name].hex() != expected.replace("-", "").lower():
            data_loss.raise_or_log(data_loss.topic_recreated_error(name), fail=options.fail_on_data_loss)


async def _subscribed_topics(sync_client: SyncClient, options: SourceOptions) -> dict[str, TopicMetadata]:
    """Return the subscribed topics that exist, by name."""
    cluster, wanted = sync_client.cluster, options.subscription
    if wanted.pattern:
        matches = re.compile(wanted.pattern).fullmatch
        found = await cluster.topics()
        return {name: view for name, view in found.items() if matches(name) and not view.is_internal}
    names = sorted({*wanted.topics, *(partition.topic for partition in wanted.partitions)})
    await cluster.retry(lambda: cluster.refresh_metadata(names))
    views = {}
    for name in names:
        view = cluster.cached_topic(name)
        try:
            views[name] = await cluster.topic(name) if view is None else view
        except UnknownTopicOrPartition:
            continue
    return views


def earliest_offsets(sync_client: SyncClient, partitions: Iterable[TopicPartition]) -> Offsets:
    """Return the log start offset of each partition."""
    return _list_offsets(sync_client, dict.fromkeys(partitions, EARLIEST_TIMESTAMP), isolation=0)


def latest_offsets(sync_client: SyncClient, partitions: Iterable[TopicPartition], isolation: int) -> Offsets:
    """Return the end offset of each partition: the last stable offset for read_committed, else the high watermark."""
    return _list_offsets(sync_client, dict.fromkeys(partitions, LATEST_TIMESTAMP), isolation=isolation)


def offsets_for_times(
    sync_client: SyncClient, timestamps_ms: Mapping[TopicPartition, int], isolation: int
) -> Offsets:
    """Return the offset of the first record of each partition with at least its timestamp; -1 if there is none."""
    return _list_offsets(sync_client, timestamps_ms, isolation=isolation)


def _list_offsets(
    sync_client: SyncClient, wanted: Mapping[TopicPartition, int], *, isolation: int
) -> Offsets:
    if not wanted:
        return {}
    listed = sync_client.run(_list_offsets_checked(sync_client, wanted, isolation))
    return {partition: found.offset for partition, found in listed.items()}


async def _list_offsets_checked(
    sync_client: SyncClient, wanted: Mapping[TopicPartition, int], isolation: int
) -> dict[TopicPartition, ListedOffset]:
    """`list_offsets`, which raises `UnknownTopicOrPartition` soon after a topic was deleted. `list_offsets` alone waits
    long for an unknown topic, because it may be new. The topics here have existed before, so after
    `LIST_OFFSETS_TIMEOUT_S` this function checks whether they still exist.
    """
    try:
        async with asyncio.timeout(LIST_OFFSETS_TIMEOUT_S):
            return await list_offsets(sync_client.cluster, wanted, isolation_level=isolation)
    except TimeoutError:
        topics = {partition.topic for partition in wanted}
        await sync_client.cluster.retry(lambda: sync_client.cluster.refresh_metadata(topics))
        for topic in sorted(topics):
            await sync_client.cluster.topic(topic)
        return await list_offsets(sync_client.cluster, wanted, isolation_level=isolation)


def resolve_ranges(sync_client: SyncClient, options: SourceOptions) -> dict[TopicPartition, OffsetRange]:
    """Return the offset range of each partition of a batch read. Raises the errors of `find_partitions` and
    `resolve_offsets`.
    """
    subscribed = find_partitions(sync_client, options)
    check_topic_ids(subscribed, options)
    partitions = subscribed.partitions
    earliest = earliest_offsets(sync_client, partitions)
    latest = latest_offsets(sync_client, partitions, options.isolation_level)
    start = resolve_offsets(sync_client, options, "starting", earliest, latest)
    end = resolve_offsets(sync_client, options, "ending", earliest, latest)
    found = {}
    for partition in partitions:
        if (
            start[partition] > end[partition]
            and _has_explicit_offsets(options.starting_offsets)
            and _has_explicit_offsets(options.ending_offsets)
        ):
            raise ConfigError(
                f"partition {partition.partition} of topic {partition.topic} is to be read from offset"
                f" {start[partition]} to {end[partition]}: correct startingOffsets or endingOffsets"
            )
        topic_id = subscribed.topic_ids.get(partition.topic, NO_TOPIC_ID)
        found[partition] = OffsetRange(start[partition], max(start[partition], end[partition]), topic_id)
    return found


def resolve_offsets(
    sync_client: SyncClient,
    options: SourceOptions,
    side: str,
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> Offsets:
    """One offset for each partition of `latest`. `side`: `starting` or `ending`, the options to resolve.

    Raises `ConfigError` if the options omit a partition, name one that is not read, or name a timestamp without a
    record; `DataLoss` if an offset is outside its log.
    """
    position: OffsetSpec = options.starting_offsets if side == "starting" else options.ending_offsets
    if position.timestamp_ms is not None:
        timestamps_ms = dict.fromkeys(latest, position.timestamp_ms)
        return _resolve_times(sync_client, options, position, f"{side}Timestamp", timestamps_ms, latest)
    if position.timestamps_ms is not None:
        _check_partition_names(f"{side}OffsetsByTimestamp", position.timestamps_ms, latest)
        return _resolve_times(
            sync_client, options, position, f"{side}OffsetsByTimestamp", position.timestamps_ms, latest
        )
    if isinstance(position.offsets, int):
        return dict(earliest if position.offsets == EARLIEST_TIMESTAMP else latest)
    _check_partition_names(f"{side}Offsets", position.offsets, latest)
    return {
        partition: _limit_to_log(partition, position.offsets[partition], earliest, latest, options)
        for partition in latest
    }


def _resolve_times(
    sync_client: SyncClient,
    options: SourceOptions,
    position: OffsetSpec,
    name: str,
    timestamps_ms: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> Offsets:
    found = offsets_for_times(sync_client, timestamps_ms, options.isolation_level)
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


def _check_partition_names(
    name: str, given: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]
) -> None:
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


def _limit_to_log(
    partition: TopicPartition,
    wanted: int,
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
    options: SourceOptions,
) -> int:
    """Return an explicit offset, limited to the log of its partition."""
    if wanted in (EARLIEST_TIMESTAMP, LATEST_TIMESTAMP):
        return earliest[partition] if wanted == EARLIEST_TIMESTAMP else latest[partition]
    loss: DataLoss | None = None
    if wanted < earliest[partition]:
        loss = data_loss.offset_deleted_error(partition, wanted, earliest[partition])
    elif wanted > latest[partition]:
        loss = data_loss.log_truncated_error(partition, wanted, latest[partition])
    if loss is not None:
        data_loss.raise_or_log(loss, fail=options.fail_on_data_loss)
    return min(max(wanted, earliest[partition]), latest[partition])


def is_constant(position: OffsetSpec) -> bool:
    """Whether the specification always resolves to the same offsets: it consists of explicit offsets only."""
    offsets = position.offsets
    return (
        _has_explicit_offsets(position)
        and isinstance(offsets, dict)
        and all(one >= 0 for one in offsets.values())
    )


def _has_explicit_offsets(position: OffsetSpec) -> bool:
    return (
        position.timestamp_ms is None
        and position.timestamps_ms is None
        and isinstance(position.offsets, dict)
    )
