"""Resolution of start and stop positions ("earliest", "latest", times, offsets) to offsets of partitions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from mansio.client.types import TopicPartition, milliseconds
from mansio.errors import InvalidRequest
from mansio.net.offsets import list_offsets
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.client.types import StartAt
    from mansio.net.cluster import Cluster

SPECIAL_OFFSETS = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP}
"""ListOffsets timestamp of each start position that has a name."""


def check_start_position(start: StartAt | Mapping[TopicPartition, int]) -> None:
    """Raise `ValueError` for a string other than "earliest" and "latest" or a datetime without time zone, and
    `InvalidRequest` for a negative offset."""
    if isinstance(start, str):
        if start not in SPECIAL_OFFSETS:
            raise ValueError(
                f"the start position must be 'earliest', 'latest', an offset or a datetime, not {start!r}"
            )
    elif isinstance(start, datetime):
        milliseconds(start)
    elif not isinstance(start, Mapping) and start < 0:
        raise InvalidRequest(f"offset {start} is negative")


async def resolve_start_offsets(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    start: StartAt | Mapping[TopicPartition, int],
    *,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, int]:
    """Offset of the position `start` in each partition.

    A time after the last record resolves to the log end offset, with `READ_COMMITTED` to the last stable offset, as
    "latest" does; a partition that is missing in a mapping resolves to
    its log start offset. Raises the errors of `check_start_position`.
    """
    check_start_position(start)
    wanted = list(partitions)
    if isinstance(start, Mapping):
        missing = await resolve_start_offsets(cluster, [p for p in wanted if p not in start], "earliest")
        return {**missing, **{p: start[p] for p in wanted if p in start}}
    if isinstance(start, str):
        if not wanted:
            return {}
        listed = await list_offsets(
            cluster, dict.fromkeys(wanted, SPECIAL_OFFSETS[start]), isolation_level=isolation_level
        )
        return {partition: entry.offset for partition, entry in listed.items()}
    if isinstance(start, datetime):
        return await _offsets_at(cluster, wanted, milliseconds(start), isolation_level)
    return dict.fromkeys(wanted, start)


async def resolve_stop_offsets(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    *,
    to_time: datetime | int | None,
    to_end: bool,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, int]:
    """Exclusive stop offset of each partition.

    With `to_time` (milliseconds since the Unix epoch, or a datetime) this is the offset of the first record at or after
    the time, with `to_end` the current log end offset. Returns {} with neither. Raises `InvalidRequest` for a time in
    the future.
    """
    wanted = list(partitions)
    if to_time is not None:
        stop_ms = milliseconds(to_time)
        if stop_ms > time.time() * 1000 + 1:
            raise InvalidRequest(
                "to_time is in the future; records before it may not have been published yet"
            )
        return await _offsets_at(cluster, wanted, stop_ms, isolation_level)
    if not to_end or not wanted:
        return {}
    listed = await list_offsets(
        cluster, dict.fromkeys(wanted, LATEST_TIMESTAMP), isolation_level=isolation_level
    )
    return {partition: entry.offset for partition, entry in listed.items()}


async def _offsets_at(
    cluster: Cluster, partitions: list[TopicPartition], timestamp_ms: int, isolation_level: int
) -> dict[TopicPartition, int]:
    if not partitions:
        return {}
    listed = await list_offsets(
        cluster, dict.fromkeys(partitions, timestamp_ms), isolation_level=isolation_level
    )
    found = {partition: entry.offset for partition, entry in listed.items() if entry.offset >= 0}
    after = [partition for partition in partitions if partition not in found]
    return {
        **found,
        **(await resolve_start_offsets(cluster, after, "latest", isolation_level=isolation_level)),
    }
