"""Snapshots of the state that a partition hook derives from the log: files in the partition's directory.

The name of a file is the offset, 20 digits, below which the state contains the log, and the suffix of its kind.

Invariants:
* The two latest snapshots of a kind are kept, so that one of them can be damaged.
* A snapshot need not be durable: without it, the state is derived from more of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.host.atomic_file import write_file_atomically

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.log import Log

SNAPSHOT_INTERVAL_BYTES: Final = 64 << 20
"""Number of appended bytes after which a hook writes a snapshot."""

RETAINED_SNAPSHOTS: Final = 2


class SnapshotFiles:
    """The snapshots of one kind in the directory of a partition."""

    __slots__ = ("_directory", "_disk", "_log", "_suffix")

    def __init__(self, disk: Disk, log: Log, suffix: str) -> None:
        """`suffix`: of the file names, with the dot."""
        self._disk = disk
        self._log = log
        self._directory = log.directory
        self._suffix = suffix

    def paths(self) -> list[str]:
        """Return the paths of the snapshots, newest first. Raises `OSError`."""
        return [f"{self._directory}/{name}" for name in self._names()]

    def remove_beyond(self, end_offset: int) -> None:
        """Remove the snapshots of offsets above `end_offset`, durably. Raises `OSError`."""
        beyond = [name for name in self._names() if int(name.removesuffix(self._suffix)) > end_offset]
        for name in beyond:
            self._disk.remove(f"{self._directory}/{name}")
        if beyond:
            self._disk.sync_directory(self._directory)

    def save(
        self, end_offset: int, data: bytes, *, durable: bool = False, needs_newer_format: bool = True
    ) -> None:
        """Write the snapshot of an offset, and remove older ones. `durable`: it is on stable storage on return.
        `needs_newer_format`: the first release cannot read it. Raises `OSError`."""
        if needs_newer_format:
            self._log.before_newer_format()
        target = f"{self._directory}/{end_offset:020d}{self._suffix}"
        write_file_atomically(self._disk, target, data, durable=durable)
        for path in self.paths()[RETAINED_SNAPSHOTS:]:
            self._disk.remove(path)

    def _names(self) -> list[str]:
        names = self._disk.list_directory(self._directory)
        suffix = self._suffix
        return sorted(
            (name for name in names if name.endswith(suffix) and name.removesuffix(suffix).isdecimal()),
            reverse=True,
        )
