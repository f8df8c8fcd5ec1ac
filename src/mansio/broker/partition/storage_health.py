"""What a broker has met on its disk since it started: damaged batches, and writes that found no room.

Whoever reads or appends reports here; health, metrics and the log lines about it are made from this one place. An
operator learns of damage the first time that anybody reads it, and of a full disk at the first write it refuses.

Always true: memory is bounded (`PARTITIONS_MAX` partitions are remembered, those beyond are counted); there is at
most one line per partition and minute; nothing here is paid by an append or a read that goes well.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.errors import StorageError
    from mansio.ports import Clock

logger = logging.getLogger(__name__)

LINE_INTERVAL_S: Final = 60.0
PARTITIONS_MAX: Final = 1_000
OTHERS: Final = ("", -1)
"""Stands for all partitions beyond `PARTITIONS_MAX`."""

DISK_FULL_EXPIRY_S: Final = 30.0
"""A partition that found no room and was not written to since is taken to have room again after so long."""

UNKNOWN_OFFSET: Final = -1

PartitionKey = tuple[str, int]


class DamagedBatch(NamedTuple):
    """What was last met in one partition, and how often damage was met there. `offset` -1: not known."""

    offset: int
    reason: str
    times: int
    line_due: float


class StorageHealth:
    """See the module. One per broker; all methods on its loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.corrupt_batches = 0
        """How often a reader met a damaged batch; the same one may be met again and again."""
        self.truncations = 0
        """Logs whose end the start cut."""
        self.truncated_bytes = 0
        self.damaged: dict[PartitionKey, DamagedBatch] = {}
        self._without_room: dict[PartitionKey, float] = {}  # -> when it last found none, monotonic seconds
        self._listeners: list[Callable[[], object]] = []
        self._full_line_due = 0.0

    # Damage

    def corrupt(self, topic: str, partition: int, offset: int, error: StorageError) -> None:
        """Somebody who read from `offset` on met a batch that is damaged."""
        self.corrupt_batches += 1
        place = (topic, partition)
        if place not in self.damaged and len(self.damaged) >= PARTITIONS_MAX:
            place = OTHERS
        now = self._clock.monotonic()
        before = self.damaged.get(place)
        times, line_due = (0, now) if before is None else (before.times, before.line_due)
        times += 1
        if now >= line_due:
            line_due = now + LINE_INTERVAL_S
            logger.error(
                "corrupt_batch",
                extra=fields(topic=topic, partition=partition, offset=offset, times=times, reason=error),
            )
        self.damaged[place] = DamagedBatch(offset, str(error), times, line_due)

    def cut(self, size_bytes: int) -> None:
        """Opening a log cut so many bytes from its end: they were not whole, and not known to be durable."""
        self.truncations += 1
        self.truncated_bytes += size_bytes

    def forget(self, topic: str, partition: int) -> None:
        """The partition is closed: what was wrong with it is no longer here."""
        self.damaged.pop((topic, partition), None)
        if self._without_room.pop((topic, partition), None) is not None and not self._without_room:
            self._tell()

    # Room

    def disk_full(self, topic: str, partition: int, error: StorageError) -> None:
        """A write was refused because the disk is full."""
        now = self._clock.monotonic()
        was_full = bool(self.disk_full_partitions())
        if len(self._without_room) < PARTITIONS_MAX or (topic, partition) in self._without_room:
            self._without_room[topic, partition] = now
        if not was_full:
            self._tell()
        if now >= self._full_line_due:
            self._full_line_due = now + LINE_INTERVAL_S
            logger.error("disk_full", extra=fields(topic=topic, partition=partition, reason=error))

    def room(self, topic: str, partition: int) -> None:
        """A write to a partition that had found no room went well."""
        if self._without_room.pop((topic, partition), None) is not None and not self._without_room:
            self._full_line_due = 0.0
            logger.info("disk_space_available", extra=fields(topic=topic, partition=partition))
            self._tell()

    def disk_full_partitions(self) -> tuple[PartitionKey, ...]:
        """The partitions whose last write found the disk_full, a moment ago."""
        oldest = self._clock.monotonic() - DISK_FULL_EXPIRY_S
        for place in [place for place, when in self._without_room.items() if when < oldest]:
            del self._without_room[place]
        return tuple(self._without_room)

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Have `listener` called when the disk becomes full, and when it has room again."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
