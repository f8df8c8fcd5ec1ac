"""Storage health: damaged batches, unreadable batches and disk-full errors since the broker started.

Code that reads or appends reports its errors to `StorageHealth`, from which health checks, metrics and log events are
derived. Damage is reported when it is read, a full disk when a write fails. A batch is unreadable if its checksum
matches, but not its content: a client has stored it so, the log is intact, and readers step over it.

Invariants:
* Memory is bounded: at most `PARTITIONS_MAX` partitions have an entry; damage in others is only counted.
* At most one log line per partition in `LOG_INTERVAL_S`.
* Successful appends and reads do not call `StorageHealth`.
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

LOG_INTERVAL_S: Final = 60.0
PARTITIONS_MAX: Final = 1_000
OTHER_PARTITIONS: Final = ("", -1)
"""Key of the common entry of all partitions that exceed `PARTITIONS_MAX`."""

DISK_FULL_EXPIRY_S: Final = 30.0
"""A partition whose last write failed with disk full counts as recovered after this time without a write."""

UNKNOWN_OFFSET: Final = -1

PartitionKey = tuple[str, int]


class FoundBatch(NamedTuple):
    """The last damaged, or unreadable, batch found in one partition.

    `offset`: offset of the batch, -1 if unknown; `found_count`: how often readers found one in the partition;
    `log_due_s`: monotonic time in seconds from which the next one is logged.
    """

    offset: int
    reason: str
    found_count: int
    log_due_s: float


class StorageHealth:
    """Storage errors of a broker since its start. All methods run on the broker's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.corrupt_batches = 0
        """Number of times that readers found a damaged batch; the same batch may be counted several times."""
        self.truncations = 0
        """Number of logs that were truncated when they were opened."""
        self.truncated_bytes = 0
        self.damaged: dict[PartitionKey, FoundBatch] = {}
        self.unreadable_batches = 0
        """Number of times that readers found an unreadable batch; the same batch may be counted several times."""
        self.unreadable: dict[PartitionKey, FoundBatch] = {}
        self._disk_full: dict[PartitionKey, float] = {}  # -> last disk-full error, monotonic seconds
        self._listeners: list[Callable[[], object]] = []
        self._damage_listeners: list[Callable[[str, int, int], object]] = []
        self._disk_full_log_due_s = 0.0

    # Damage

    def record_damage(self, topic: str, partition: int, offset: int, error: MansioError) -> None:
        """Record that a damaged batch was found by a read at `offset`."""
        self.corrupt_batches += 1
        self._record(self.damaged, logging.ERROR, "corrupt_batch", topic, partition, offset, error)
        for listener in self._damage_listeners:
            listener(topic, partition, offset)

    def record_unreadable(self, topic: str, partition: int, offset: int, error: MansioError) -> None:
        """Record that a reader stepped over the unreadable batch at `offset`, which a client has stored so."""
        self.unreadable_batches += 1
        self._record(self.unreadable, logging.WARNING, "unreadable_batch", topic, partition, offset, error)

    def _record(
        self,
        found: dict[PartitionKey, FoundBatch],
        level: int,
        event: str,
        topic: str,
        partition: int,
        offset: int,
        error: MansioError,
    ) -> None:
        key = (topic, partition)
        if key not in found and len(found) >= PARTITIONS_MAX:
            key = OTHER_PARTITIONS
        now = self._clock.monotonic()
        before = found.get(key)
        times, log_due_s = (0, now) if before is None else (before.found_count, before.log_due_s)
        times += 1
        if now >= log_due_s:
            log_due_s = now + LOG_INTERVAL_S
            known = fields(topic=topic, partition=partition, offset=offset, times=times, reason=error)
            logger.log(level, event, extra=known)
        found[key] = FoundBatch(offset, str(error), times, log_due_s)

    def on_damage(self, listener: Callable[[str, int, int], object]) -> None:
        """Call `listener(topic, partition, offset)` for each damaged batch that is found; offset -1 means unknown."""
        self._damage_listeners.append(listener)

    def record_repair(self, topic: str, partition: int) -> None:
        """Remove the damage of a partition whose log was repaired."""
        self.damaged.pop((topic, partition), None)

    def record_truncation(self, size_bytes: int) -> None:
        """Count a log whose incomplete end of `size_bytes`, which was not known to be flushed, was truncated."""
        self.truncations += 1
        self.truncated_bytes += size_bytes

    def remove_partition(self, topic: str, partition: int) -> None:
        """Remove the entries of a partition that is closed."""
        self.damaged.pop((topic, partition), None)
        self.unreadable.pop((topic, partition), None)
        if self._disk_full.pop((topic, partition), None) is not None and not self._disk_full:
            self._notify()

    # Disk space

    def record_disk_full(self, topic: str, partition: int, error: StorageError) -> None:
        """Record that a write failed because the disk is full."""
        now = self._clock.monotonic()
        was_full = bool(self.disk_full_partitions())
        if len(self._disk_full) < PARTITIONS_MAX or (topic, partition) in self._disk_full:
            self._disk_full[topic, partition] = now
        if not was_full:
            self._notify()
        if now >= self._disk_full_log_due_s:
            self._disk_full_log_due_s = now + LOG_INTERVAL_S
            logger.error("disk_full", extra=fields(topic=topic, partition=partition, reason=error))

    def record_disk_space_available(self, topic: str, partition: int) -> None:
        """Record that a write succeeded in a partition whose last write failed because the disk was full."""
        if self._disk_full.pop((topic, partition), None) is not None and not self._disk_full:
            self._disk_full_log_due_s = 0.0
            logger.info("disk_space_available", extra=fields(topic=topic, partition=partition))
            self._notify()

    def disk_full_partitions(self) -> tuple[PartitionKey, ...]:
        """Return the partitions whose last write failed with disk full in the last `DISK_FULL_EXPIRY_S`."""
        oldest = self._clock.monotonic() - DISK_FULL_EXPIRY_S
        for key in [key for key, when in self._disk_full.items() if when < oldest]:
            del self._disk_full[key]
        return tuple(self._disk_full)

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the first partition has a disk-full error, and when no partition has one any more."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
