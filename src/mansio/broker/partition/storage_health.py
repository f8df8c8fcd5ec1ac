"""Storage health: damaged batches and disk-full errors since the broker started.

Readers and appenders report here; health checks, metrics and log events are derived from it. Damage is reported when it
is first read, a full disk at the first write that fails.

Invariants:
* Memory is bounded: `PARTITIONS_MAX` partitions are recorded, those beyond are only counted.
* At most one log line per partition and minute.
* Appends and reads that succeed do not call it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.errors import MansioError, StorageError
    from mansio.ports import Clock

logger = logging.getLogger(__name__)

LINE_INTERVAL_S: Final = 60.0
PARTITIONS_MAX: Final = 1_000
OTHERS: Final = ("", -1)
"""The entry for all partitions beyond `PARTITIONS_MAX`."""

DISK_FULL_EXPIRY_S: Final = 30.0
"""A partition whose last write failed with disk full counts as recovered after this time without a write."""

UNKNOWN_OFFSET: Final = -1

PartitionKey = tuple[str, int]


class DamagedBatch(NamedTuple):
    """The last damage found in one partition, and how often damage was found there. `offset` -1: not known."""

    offset: int
    reason: str
    times: int
    line_due: float


class StorageHealth:
    """Storage errors of a broker since its start. All methods run on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.corrupt_batches = 0
        """How often a reader found a damaged batch; one batch may be counted many times."""
        self.truncations = 0
        """Logs that were truncated when they were opened."""
        self.truncated_bytes = 0
        self.damaged: dict[PartitionKey, DamagedBatch] = {}
        self._disk_full: dict[PartitionKey, float] = {}  # -> last disk-full error, monotonic seconds
        self._listeners: list[Callable[[], object]] = []
        self._damage_listeners: list[Callable[[str, int, int], object]] = []
        self._full_line_due = 0.0

    # Damage

    def corrupt(self, topic: str, partition: int, offset: int, error: MansioError) -> None:
        """A reader at `offset` found a damaged batch."""
        self.corrupt_batches += 1
        key = (topic, partition)
        if key not in self.damaged and len(self.damaged) >= PARTITIONS_MAX:
            key = OTHERS
        now = self._clock.monotonic()
        before = self.damaged.get(key)
        times, line_due = (0, now) if before is None else (before.times, before.line_due)
        times += 1
        if now >= line_due:
            line_due = now + LINE_INTERVAL_S
            logger.error(
                "corrupt_batch",
                extra=fields(topic=topic, partition=partition, offset=offset, times=times, reason=error),
            )
        self.damaged[key] = DamagedBatch(offset, str(error), times, line_due)
        for listener in self._damage_listeners:
            listener(topic, partition, offset)

    def on_damage(self, listener: Callable[[str, int, int], object]) -> None:
        """Call `listener(topic, partition, offset)` for each damaged batch that is found; offset -1: not known."""
        self._damage_listeners.append(listener)

    def repaired(self, topic: str, partition: int) -> None:
        """All known damage of a partition was repaired."""
        self.damaged.pop((topic, partition), None)

    def log_truncated(self, size_bytes: int) -> None:
        """Opening a log truncated it by so many bytes: an incomplete end that was not known to be flushed."""
        self.truncations += 1
        self.truncated_bytes += size_bytes

    def forget(self, topic: str, partition: int) -> None:
        """Drop the entries of a partition that is closed."""
        self.damaged.pop((topic, partition), None)
        if self._disk_full.pop((topic, partition), None) is not None and not self._disk_full:
            self._notify()

    # Disk space

    def disk_full(self, topic: str, partition: int, error: StorageError) -> None:
        """A write failed because the disk is full."""
        now = self._clock.monotonic()
        was_full = bool(self.disk_full_partitions())
        if len(self._disk_full) < PARTITIONS_MAX or (topic, partition) in self._disk_full:
            self._disk_full[topic, partition] = now
        if not was_full:
            self._notify()
        if now >= self._full_line_due:
            self._full_line_due = now + LINE_INTERVAL_S
            logger.error("disk_full", extra=fields(topic=topic, partition=partition, reason=error))

    def disk_space_available(self, topic: str, partition: int) -> None:
        """A write succeeded in a partition whose last write failed with disk full."""
        if self._disk_full.pop((topic, partition), None) is not None and not self._disk_full:
            self._full_line_due = 0.0
            logger.info("disk_space_available", extra=fields(topic=topic, partition=partition))
            self._notify()

    def disk_full_partitions(self) -> tuple[PartitionKey, ...]:
        """The partitions whose last write failed with disk full, within `DISK_FULL_EXPIRY_S`."""
        oldest = self._clock.monotonic() - DISK_FULL_EXPIRY_S
        for key in [key for key, when in self._disk_full.items() if when < oldest]:
            del self._disk_full[key]
        return tuple(self._disk_full)

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the disk becomes full, and when space is available again."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
