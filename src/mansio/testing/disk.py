"""Simulated disk (port `Disk`) with crashes, torn writes, a bounded capacity and injected errors.

The fault model: written data is visible to reads at once. It is guaranteed to survive a crash only after the sync that
covers it: `DiskFile.sync` for bytes and length, `sync_directory` for names, `sync_all` for both. Of unsynced changes a
crash keeps *any* subset, complete or in sectors: later writes may survive earlier ones, a name may survive without its
bytes, a removal may be undone. After a failed sync its bytes can still be read, and no later sync makes them durable
(the behaviour of Linux).

Invariants: `crash` does not change the disk it is called on, so a test can take many crash images of one state; every
choice comes from the given random generator, so a seed determines an image.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import DataDirectoryLocked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from mansio.ports import Buffer

SECTOR_BYTES = 512


class Change(NamedTuple):
    """A write of `data` at `position`; or, with `data` None, a truncation to `position`."""

    position: int
    data: bytes | None


class Inode:
    """One file: its durable bytes, its visible bytes, and the changes between the two."""

    __slots__ = ("content", "doomed", "durable", "occupied", "pending")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.content = bytearray(durable)
        self.occupied = len(durable)  # bytes of the disk; holes occupy none
        self.pending: list[Change] = []
        self.doomed: list[Change] = []

    def change(self, change: Change) -> None:
        """Apply a change: visible at once, durable with the next sync."""
        _apply(self.content, change)
        position, data = change
        self.occupied = (
            min(self.occupied, position) if data is None else max(self.occupied, position + len(data))
        )
        self.pending.append(change)

    def sync(self) -> None:
        if not self.pending:
            return
        if self.doomed:
            content = bytearray(self.durable)
            for change in self.pending:
                _apply(content, change)
            self.durable = bytes(content)
            self.doomed = [old for old in self.doomed if not any(_covers(new, old) for new in self.pending)]
        else:
            self.durable = bytes(self.content)
        self.pending.clear()

    def sync_failed(self) -> None:
        """Mark the pending changes as doomed: they stay visible, and no later sync makes them durable."""
        self.doomed.extend(self.pending)
        self.pending.clear()

    def crashed(self, random: Random) -> bytes:
        """The bytes after a crash."""
        changes = self.doomed + self.pending
        mode = random.random() if changes else 0.0
        if mode < 0.2:
            return self.durable
        content = bytearray(self.durable)
        keep_first = random.randint(0, len(changes)) if mode < 0.5 else len(changes)
        for change in changes[:keep_first]:
            if mode >= 0.6 and random.random() < 0.4:
                continue
            torn = mode >= 0.5 and change.data is not None and random.random() < 0.5
            for piece in _sectors(change, random) if torn else (change,):
                _apply(content, piece)
        if changes and mode < 0.5 and keep_first < len(changes) and changes[keep_first].data is not None:
            for piece in _sectors(changes[keep_first], random):  # the write that was interrupted
                _apply(content, piece)
        return bytes(content)


def _covers(new: Change, old: Change) -> bool:
    """Whether a new change overwrites all effects of an old one.

    A file has one length: the newer one applies, and what was written beyond it is removed.
    """
    if new.data is None:
        return old.data is None or old.position >= new.position
    if old.data is None:
        return False
    return new.position <= old.position and old.position + len(old.data) <= new.position + len(new.data)


def _apply(content: bytearray, change: Change) -> None:
    position, data = change
    if data is None:
        if position <= len(content):
            del content[position:]
        else:
            content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _sectors(change: Change, random: Random) -> list[Change]:
    """A random choice of the sectors of a write."""
    position, data = change
    assert data is not None
    pieces = []
    at = 0
    while at < len(data):
        step = SECTOR_BYTES - (position + at) % SECTOR_BYTES
        if random.random() < 0.5:
            pieces.append(Change(position + at, data[at : at + step]))
        at += step
    return pieces


class Directory:
    """Durable names, visible names, and the changes between the two (each a dict name -> inode or None)."""

    __slots__ = ("durable", "entries", "pending")

    def __init__(self, durable: dict[str, Inode] | None = None) -> None:
        self.durable = durable or {}
        self.entries = dict(self.durable)
        self.pending: list[dict[str, Inode | None]] = []

    def change(self, names: dict[str, Inode | None]) -> None:
        """Add, remove or move names, atomically."""
        _rename(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def crashed(self, random: Random) -> dict[str, Inode]:
        """The names after a crash."""
        entries = dict(self.durable)
        mode = random.random()
        for names in self.pending:
            if mode < 0.2 or (mode < 0.8 and random.random() < 0.5):
                continue
            _rename(entries, names)
        return entries


def _rename(entries: dict[str, Inode], names: dict[str, Inode | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


CAPACITY_BYTES = 1 << 40


class SimulatedFile:
    """An open file of a `SimulatedDisk`. It stays usable when its name is gone."""

    __slots__ = ("_disk", "_inode", "_path", "_writable")

    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, *, writable: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._writable = writable

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        self._disk.called("size", self._path)
        return len(self._inode.content)

    def write_at(self, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        if not self._writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        self._disk.called("write", self._path)
        growth = position + len(data) - self._inode.occupied
        available = self._disk.available(growth)
        if available < growth:
            part = data[: max(0, len(data) - growth + available)]
            if part:
                self._inode.change(Change(position, part))
                self._disk.report_change()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._inode.change(Change(position, data))
        self._disk.report_change()
        return len(data)

    def read_at(self, length: int, position: int) -> bytes:
        self._disk.called("read", self._path)
        return bytes(self._inode.content[position : position + length])

    def read_uncached(self, length: int, position: int) -> bytes:
        return self.read_at(length, position)

    def map(self, length: int) -> memoryview:
        return memoryview(self.read_at(length, 0))

    def truncate(self, size: int) -> None:
        self._disk.called("truncate", self._path)
        if size != len(self._inode.content):
            self._inode.change(Change(size, None))
            self._disk.report_change()

    def sync(self) -> None:
        try:
            self._disk.called("sync", self._path)
        except OSError:
            self._inode.sync_failed()
            raise
        self._disk.syncs += 1
        self._inode.sync()
        self._disk.report_change()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Nothing to release."""


class SimulatedLock:
    """A held lock."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    def release(self) -> None:
        self._disk.locks.discard(self._path)


class SimulatedDisk:
    """`modified` holds the result of `modified_ms` for a path (0 without an entry): a test sets it, writing does not.
    `calls` counts every call that may fail; `fail_call` makes one of them fail; `fail_when` decides for each call.
    `on_change` is called after every change of the medium or of what a crash may keep of it: then a crash test takes
    its images. `can_sync_all` False simulates a system without syncfs.
    """

    def __init__(self, *, can_sync_all: bool = True, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._directories: dict[str, Directory] = {"": Directory(), "/": Directory()}
        self._can_sync_all = can_sync_all
        self.capacity_bytes = capacity_bytes
        self.calls = 0
        self.syncs = 0
        self.locks: set[str] = set()
        self.modified: dict[str, int] = {}
        self.on_change: Callable[[], object] | None = None
        self.fail_when: Callable[[str, str], int | None] | None = None
        self._failures: dict[int, int] = {}

    # Faults

    def fail_call(self, number: int, code: int = errno.EIO) -> None:
        """The call with this number (counted from 1 over the disk's life) fails with `code` and does nothing."""
        self._failures[number] = code

    def clear_failures(self) -> None:
        """Every call succeeds from now on."""
        self._failures.clear()
        self.fail_when = None

    def crash(self, random: Random) -> SimulatedDisk:
        """The disk after a power failure at this time."""
        after = SimulatedDisk(can_sync_all=self._can_sync_all, capacity_bytes=self.capacity_bytes)
        for path, directory in self._directories.items():
            kept = {name: Inode(inode.crashed(random)) for name, inode in directory.crashed(random).items()}
            after._directories[path] = Directory(kept)
        return after

    def flip_bit(self, path: str, bit: int) -> None:
        """Damage one bit of a file on the medium."""
        inode = self._inode(path)
        inode.content[bit // 8] ^= 1 << bit % 8
        inode.durable = bytes(inode.content)
        inode.pending.clear()

    def truncate_file(self, path: str, size: int) -> None:
        """Damage: truncate the file on the medium to `size`."""
        inode = self._inode(path)
        del inode.content[size:]
        inode.durable = bytes(inode.content)
        inode.pending.clear()

    def put_file(self, path: str, data: bytes) -> None:
        """Set the durable content of a file, including its name."""
        parent, _, name = path.rpartition("/")
        directory = self._directories.setdefault(parent, Directory())
        directory.entries[name] = directory.durable[name] = Inode(data)

    def files(self) -> dict[str, bytes]:
        """The visible content of every file."""
        return {
            f"{path}/{name}": bytes(inode.content)
            for path, directory in self._directories.items()
            for name, inode in directory.entries.items()
        }

    def called(self, operation: str, path: str) -> None:
        """Count a call and raise the error injected for it, if any."""
        self.calls += 1
        code = self._failures.get(self.calls)
        if code is None and self.fail_when is not None:
            code = self.fail_when(operation, path)
        if code is not None:
            raise OSError(code, os.strerror(code), path)

    def report_change(self) -> None:
        """Report a change of the medium, or of what a crash may keep of it."""
        if self.on_change is not None:
            self.on_change()

    def available(self, wanted: int) -> int:
        """How many of `wanted` additional bytes fit on the disk."""
        if wanted <= 0 or self.capacity_bytes >= CAPACITY_BYTES:
            return wanted  # more than any memory holds
        return min(wanted, self.free_bytes("/"))

    # ports.Disk

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        self.called("open", path)
        directory, name = self._parent(path)
        inode = directory.entries.get(name)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = Inode()
            directory.change({name: inode})
            self.report_change()
        return SimulatedFile(self, path, inode, writable=True)

    def open_readonly(self, path: str) -> SimulatedFile:
        self.called("open", path)
        return SimulatedFile(self, path, self._inode(path), writable=False)

    def read_file(self, path: str) -> bytes:
        self.called("read", path)
        return bytes(self._inode(path).content)

    def list_directory(self, path: str) -> list[str]:
        self.called("list", path)
        directory = self._directory(path)
        prefix = path.rstrip("/") + "/"
        below = {
            other[len(prefix) :].partition("/")[0] for other in self._directories if other.startswith(prefix)
        }
        return sorted((below - {""}) | set(directory.entries))

    def make_directory(self, path: str, *, durable: bool = True) -> None:  # noqa: ARG002  # names of directories always survive a crash
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            current = "/".join(parts[:depth])
            if current not in self._directories:
                self.called("mkdir", current)
                self._directories[current] = Directory()
                self.report_change()

    def exists(self, path: str) -> bool:
        if path in self._directories:
            return True
        parent, _, name = path.rpartition("/")
        return parent in self._directories and name in self._directories[parent].entries

    def rename(self, source: str, target: str) -> None:
        self.called("rename", source)
        if source in self._directories:
            self._rename_directory(source, target)
            return
        inode = self._inode(source)
        directory, name = self._parent(source)
        target_directory, target_name = self._parent(target)
        if directory is target_directory:
            directory.change({name: None, target_name: inode})
        else:
            target_directory.change({target_name: inode})
            directory.change({name: None})
        self.report_change()

    def _rename_directory(self, source: str, target: str) -> None:
        """Rename a directory with its content; names of directories always survive a crash."""
        for path in [p for p in self._directories if p == source or p.startswith(source + "/")]:
            self._directories[target + path[len(source) :]] = self._directories.pop(path)
        self.report_change()

    def remove(self, path: str) -> None:
        self.called("remove", path)
        self._inode(path)
        directory, name = self._parent(path)
        directory.change({name: None})
        self.report_change()

    def remove_tree(self, path: str) -> None:
        self.called("remove", path)
        self._directory(path)
        for other in [p for p in self._directories if p == path or p.startswith(path + "/")]:
            del self._directories[other]
        self.report_change()

    def sync_directory(self, path: str) -> None:
        self.called("sync_directory", path)
        self._directory(path).sync()
        self.report_change()

    def sync_all(self, path: str) -> bool:
        if not self._can_sync_all:
            return False
        inodes = [inode for directory in self._directories.values() for inode in directory.entries.values()]
        try:
            self.called("sync_all", path)
        except OSError:
            for inode in inodes:
                inode.sync_failed()
            raise
        for inode in inodes:
            inode.sync()
        for directory in self._directories.values():
            directory.sync()
        self.report_change()
        return True

    def free_bytes(self, path: str) -> int:  # noqa: ARG002  # there is one device
        used = sum(
            inode.occupied for directory in self._directories.values() for inode in directory.entries.values()
        )
        return max(0, self.capacity_bytes - used)

    def modified_ms(self, path: str) -> int:
        self.called("stat", path)
        self._inode(path)
        return self.modified.get(path, 0)

    def lock(self, path: str) -> SimulatedLock:
        if path in self.locks:
            raise DataDirectoryLocked(f"another process holds the lock {path}")
        self.locks.add(path)
        return SimulatedLock(self, path)

    def _directory(self, path: str) -> Directory:
        directory = self._directories.get(path.rstrip("/"))
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return directory

    def _parent(self, path: str) -> tuple[Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _inode(self, path: str) -> Inode:
        directory, name = self._parent(path)
        inode = directory.entries.get(name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode
