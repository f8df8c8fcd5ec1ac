"""Warnings of records that retention.ms will soon delete although a share group has not processed them.

The progress of a share group is known where the group uses the partition, or where its state is stored; this broker
reports those of them of which it has a replica. The cost is a look at each of these share partitions, and at the
segments of a partition that are old enough, as in a check of retention.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.services.health import Problem
from mansio.errors import MansioError
from mansio.storage.retention import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.share_partition.types import ShareKey

AGE_FRACTION: Final = 0.8
"""Fraction of retention.ms from which a record counts as near its deletion."""

NAMED_MAX: Final = 5
"""Maximum number of share partitions that are named; the others are counted."""


class _Endangered(NamedTuple):
    """Records of a partition below `end_offset` are near their deletion; those below it in the first segments expire in
    the order of `expiries`: (end offset of a segment, milliseconds until it expires)."""

    end_offset: int
    expiries: tuple[tuple[int, int], ...]


def share_group_warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return a warning for each share partition whose first unprocessed record retention.ms will soon delete."""
    services = broker.services
    endangered: dict[tuple[bytes, int], _Endangered | None] = {}
    named = left_out = 0
    for key, start, is_stored in _progress(services):
        try:
            partition = services.partitions.find(None, key.topic_id, key.partition)
        except MansioError:
            continue  # no replica here, or the topic is deleted
        place = key.topic_id, key.partition
        if place not in endangered:
            endangered[place] = _endangered(services, partition)
        found = endangered[place]
        if found is None or start >= found.end_offset:
            continue
        if is_stored:
            start = services.share_coordinator.store.first_undone_offset(key)
        start = max(start, partition.start_offset)
        if start >= found.end_offset:
            continue
        if named == NAMED_MAX:
            left_out += 1
            continue
        named += 1
        left_ms = next(left_ms for end_offset, left_ms in found.expiries if end_offset > start)
        yield Problem(
            "share_records_near_retention",
            f"{partition.name}: group {key.group!r} has not processed the records from offset {start} on, and"
            f" retention.ms={partition.settings.retention_ms} deletes "
            + (f"the first of them in {left_ms / 1000:,.0f} s" if left_ms > 0 else "the first of them now"),
            partition.topic,
            partition.index,
        )
    if left_out:
        yield Problem("share_records_near_retention", f"and {left_out:,} others, by group and partition")


def _progress(services: BrokerServices) -> Iterator[tuple[ShareKey, int, bool]]:
    """Share partitions with an offset below which all records are done, and whether it is that of the stored state."""
    in_use = {
        each.key: each.state_machine.ranges.start
        for each in services.share_partition_manager.share_partitions()
        if each.is_ready
    }
    for key, start in in_use.items():
        yield key, start, False
    for key, start in services.share_coordinator.store.stored_offsets():
        if key not in in_use:
            yield key, start, True


def _endangered(services: BrokerServices, partition: Partition) -> _Endangered | None:
    """Return the records of a partition that retention.ms will soon delete; None if there are none."""
    settings = partition.settings
    if not settings.deletes or settings.retention_ms == UNLIMITED or partition.internal:
        return None
    floor, high_watermark = partition.retention_floor(), partition.high_watermark
    end = high_watermark if floor is None else min(floor, high_watermark)
    now_ms = services.clock.wall_ms()
    expiries: list[tuple[int, int]] = []
    log = partition.log
    for segment in chain(log.closed_segments(), (log.active_segment(),)):
        age_ms = now_ms - segment.max_timestamp_ms
        if (
            not segment.size_bytes
            or age_ms < AGE_FRACTION * settings.retention_ms
            or segment.end_offset > end
        ):
            break
        expiries.append((segment.end_offset, settings.retention_ms - age_ms))
    return _Endangered(expiries[-1][0], tuple(expiries)) if expiries else None
