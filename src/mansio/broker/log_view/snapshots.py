"""Snapshots of a view: files in the partition's directory that shorten the next start.

The name of a file is the offset, 20 digits, below which the state contains the log, and the suffix of its kind.

Invariants:
* The two latest snapshots of a kind are kept, so that one of them can be damaged.
* A snapshot contains the state at an offset below which the log was committed when the snapshot was written, so a crash
  cannot leave one with batches that the log has lost. If the log is truncated, snapshots above its end are removed
  before new batches are appended.
* A snapshot need not be durable: without it, the state is derived from more of the log. Its checksum detects an
  incomplete one.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import CorruptLog
from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.log_view.view import SnapshotSource
    from mansio.ports import Background, Disk
    from mansio.storage.log import Log

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_BYTES: Final = 64 << 20
"""Number of applied bytes after which a snapshot is written."""

RETAINED_SNAPSHOTS: Final = 2


def snapshot_names(disk: Disk, directory: str, suffix: str) -> list[str]:
    """Return the names of the snapshots of a kind, newest first. Raises `OSError`."""
    return sorted(snapshots_among(disk.list_directory(directory), suffix), reverse=True)


def snapshots_among(names: Iterable[str], suffix: str) -> list[str]:
    """Return the names among these that snapshots of a kind have."""
    return [name for name in names if name.endswith(suffix) and name.removesuffix(suffix).isdecimal()]


def remove_snapshots_above(end_offset: int, disk: Disk, directory: str, suffix: str) -> None:
    """Remove the snapshots of a kind of offsets above `end_offset`, durably. Raises `OSError`."""
    names = snapshot_names(disk, directory, suffix)
    beyond = [name for name in names if int(name.removesuffix(suffix)) > end_offset]
    for name in beyond:
        disk.remove(f"{directory}/{name}")
    if beyond:
        disk.sync_directory(directory)


class ViewSnapshots:
    """The snapshots of one view. It owns this object, and passes itself as `source` to the methods that need its state:
    without a cycle of references, a partition that is closed keeps no file open until garbage collection.

    `save` may run on any thread, all other methods run on the broker's event loop."""

    __slots__ = (
        "_background",
        "_directory",
        "_disk",
        "_kind",
        "_log",
        "saved_end_offset",
        "unsaved_bytes",
        "waiting",
    )

    def __init__(self, disk: Disk, background: Background, log: Log, kind: type[SnapshotSource]) -> None:
        self._disk = disk
        self._background = background
        self._log = log
        self._directory = log.directory
        self._kind = kind
        self.waiting: tuple[int, Any] | None = None
        """Offset and state of a snapshot that is written when the log is committed up to the offset."""
        self.saved_end_offset = -1
        """Offset of the snapshot that was written or loaded last; -1 if there is none."""
        self.unsaved_bytes = 0
        """Size of the batches that were applied since the last snapshot."""

    @property
    def is_due(self) -> bool:
        """Whether a snapshot should be prepared."""
        return self.unsaved_bytes >= SNAPSHOT_INTERVAL_BYTES and self.waiting is None

    def prepare(self, source: SnapshotSource, end_offset: int) -> None:
        """Take a snapshot of the state, which contains the log below `end_offset`. It is written when that is
        committed."""
        self.unsaved_bytes = 0
        self.waiting = (end_offset, source.freeze(end_offset))

    def on_committed(self, source: SnapshotSource, high_watermark: int) -> None:
        """Write the snapshot that waits for the commit."""
        if self.waiting is not None and self.waiting[0] <= high_watermark:
            end_offset, state = self.waiting
            self.waiting = None
            self._background.submit(lambda: self.save(source, end_offset, state), self._log_save_error)

    def save(self, source: SnapshotSource, end_offset: int, state: Any, *, durable: bool = False) -> None:
        """Write the snapshot of an offset, and remove older ones. `durable`: it is on stable storage on return.

        Raises `OSError`."""
        data = source.encode_snapshot(end_offset, state)
        if source.needs_newer_format(data):
            self._log.before_newer_format()
        target = f"{self._directory}/{end_offset:020d}{self._kind.suffix}"
        write_file_atomically(self._disk, target, data, durable=durable)
        for path in self.paths()[RETAINED_SNAPSHOTS:]:
            self._disk.remove(path)
        self.saved_end_offset = end_offset

    def save_last(self, source: SnapshotSource, end_offset: int) -> None:
        """Write a snapshot before the log is closed, if the state contains the whole log, which is flushed, and has
        changed. Raises `OSError`."""
        log = self._log
        is_durable = end_offset == log.end_offset == log.durable_end_offset and log.failure is None
        if is_durable and end_offset != self.saved_end_offset:
            self.save(source, end_offset, source.freeze(end_offset))

    def load(self, source: SnapshotSource) -> int | None:
        """Restore the state from the latest snapshot that can be used, and return its offset; None if there is none.

        Raises `OSError`."""
        log = self._log
        self.truncate(log.end_offset)
        self.saved_end_offset = -1
        for path in self.paths():
            try:
                end_offset, state = source.decode_snapshot(self._disk.read_file(path))
            except (CorruptLog, OSError, struct.error) as error:
                known = fields(view=source.kind, path=path, reason=error)
                logger.warning("view_snapshot_not_read", extra=known)
                continue
            # What a view needs from below the start of the log was copied to a later part.
            first_offset = 0 if source.outlives_log_start else log.start_offset
            if first_offset <= end_offset <= log.end_offset:
                source.restore(state)
                self.saved_end_offset = end_offset
                return end_offset
        return None

    def truncate(self, end_offset: int) -> None:
        """Remove the snapshots of offsets above `end_offset`, durably. Raises `OSError`."""
        self.waiting = None
        remove_snapshots_above(end_offset, self._disk, self._directory, self._kind.suffix)

    def paths(self) -> list[str]:
        """Return the paths of the snapshots, newest first. Raises `OSError`."""
        names = snapshot_names(self._disk, self._directory, self._kind.suffix)
        return [f"{self._directory}/{name}" for name in names]

    def _log_save_error(self, result: None, error: BaseException | None) -> None:  # noqa: ARG002 - the port's signature
        if error is not None:  # the previous snapshot remains valid
            known = fields(view=self._kind.kind, directory=self._directory, reason=error)
            logger.warning("view_snapshot_not_written", extra=known)
