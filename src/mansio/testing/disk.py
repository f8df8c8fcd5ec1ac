"""Simulated disk (port `Disk`) with crashes, torn writes, a bounded capacity and injected errors.

Fault model: written data can be read at once, but is durable only after a later sync: `DiskFile.sync` for bytes and
length, `sync_directory` for names, `sync_all` for both. A crash keeps *any* subset of the changes that are not durable,
and whole writes or single sectors of them: a later write may survive without an earlier one, a name without the bytes
of its file, and a removed file may exist again. After a failed sync the bytes that it covered can still be read, and no
later sync makes them durable, as on Linux.

Invariants:
* `crash` returns a new disk and does not change this one, so a test can take many crash images of one state.
* Every choice comes from the random generator of the caller, so a seed determines a crash image.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import DataDirectoryLocked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from mansio.ports import Buffer, Clock

SECTOR_BYTES = 512


class FileChange(NamedTuple):
    """One change of a file: a write of `data` at `position`, or, with `data` None, a truncation to `position` bytes."""

    position: int
    data: bytes | None


class Inode:
    """One file: its durable bytes, its bytes as reads see them (`content`), and the changes that are not durable."""

    __slots__ = ("content", "durable", "is_tracked", "modified_ms", "occupied", "pending", "unsyncable")

    def __init__(self, durable: bytes = b"", *, is_tracked: bool = True) -> None:
        """`is_tracked` False: what is durable is not recorded."""
        self.is_tracked = is_tracked
        self.modified_ms = 0
        self.durable = durable
        self.content = bytearray(durable)
        self.occupied = len(durable)  # bytes of the disk; holes occupy none
        self.pending: list[FileChange] = []
        self.unsyncable: list[FileChange] = []

    def change(self, change: FileChange) -> None:
        """Apply a change; the next sync makes it durable."""
        _apply(self.content, change)
        position, data = change
        self.occupied = (
            min(self.occupied, position) if data is None else max(self.occupied, position + len(data))
        )
        if self.is_tracked:
            self.pending.append(change)

    def sync(self) -> None:
        if not self.pending:
            return
        if self.unsyncable:
            content = bytearray(self.durable)
            for change in self.pending:
                _apply(content, change)
            self.durable = bytes(content)
            self.unsyncable = [
                old for old in self.unsyncable if not any(_covers(new, old) for new in self.pending)
            ]
        else:
            self.durable = bytes(self.content)
        self.pending.clear()

    def fail_sync(self) -> None:
        """Mark the pending changes as unsyncable: reads still see them, and no later sync makes them durable."""
        self.unsyncable.extend(self.pending)
        self.pending.clear()

    def after_crash(self, random: Random) -> bytes:
        """Return the bytes of the file after a crash: a random choice of what the fault model allows."""
        changes = self.unsyncable + self.pending
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


def _covers(new: FileChange, old: FileChange) -> bool:
    """Whether the change `new` overwrites all effects of the earlier change `old`.

    A truncation overwrites earlier truncations, and writes beyond the new length.
    """
    if new.data is None:
        return old.data is None or old.position >= new.position
    if old.data is None:
        return False
    return new.position <= old.position and old.position + len(old.data) <= new.position + len(new.data)


def _apply(content: bytearray, change: FileChange) -> None:
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


def _sectors(change: FileChange, random: Random) -> list[FileChange]:
    """Return a random choice of the sectors of a write, as one write each."""
    position, data = change
    assert data is not None
    pieces = []
    at = 0
    while at < len(data):
        step = SECTOR_BYTES - (position + at) % SECTOR_BYTES
        if random.random() < 0.5:
            pieces.append(FileChange(position + at, data[at : at + step]))
        at += step
    return pieces


class Directory:
    """One directory: its durable names, its names as calls see them (`entries`), and the changes that are not durable,
    each a dict name -> inode, or None for a removed name."""

    __slots__ = ("durable", "entries", "pending")

    def __init__(self, durable: dict[str, Inode] | None = None) -> None:
        self.durable = durable or {}
        self.entries = dict(self.durable)
        self.pending: list[dict[str, Inode | None]] = []

    def change(self, names: dict[str, Inode | None]) -> None:
        """Add, remove or rename entries in one atomic change."""
        _rename(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def after_crash(self, random: Random) -> dict[str, Inode]:
        """Return the names after a crash: a random choice of what the fault model allows."""
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
    """An open file of a `SimulatedDisk`. It can still be used after the file was removed or renamed."""

    __slots__ = ("__weakref__", "_disk", "_inode", "_path", "_writable")

    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, *, writable: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._writable = writable

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        self._disk.count_call("size", self._path)
        return len(self._inode.content)

    def write_at(self, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        if not self._writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        self._disk.count_call("write", self._path)
        growth = position + len(data) - self._inode.occupied
        available = self._disk.available_bytes(growth)
        if available < growth:
            part = data[: max(0, len(data) - growth + available)]
            if part:
                self._inode.change(FileChange(position, part))
                self._disk.report_change()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._inode.change(FileChange(position, data))
        if self._disk.clock is not None:
            self._inode.modified_ms = self._disk.clock.wall_ms()
        self._disk.report_change()
        return len(data)

    def read_at(self, length: int, position: int) -> bytes:
        self._disk.count_call("read", self._path)
        return bytes(self._inode.content[position : position + length])

    def read_uncached(self, length: int, position: int) -> bytes:
        return self.read_at(length, position)

    def map(self, length: int) -> memoryview:
        return memoryview(self.read_at(length, 0))

    def truncate(self, size: int) -> None:
        self._disk.count_call("truncate", self._path)
        if size != len(self._inode.content):
            self._inode.change(FileChange(size, None))
            self._disk.report_change()

    def sync(self) -> None:
        try:
            self._disk.count_call("sync", self._path)
        except OSError:
            self._inode.fail_sync()
            raise
        self._disk.syncs += 1
        self._inode.sync()
        self._disk.report_change()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Do nothing: a simulated file has no resources."""


class SimulatedLock:
    """A lock file of a `SimulatedDisk` that is held until `release`."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    def release(self) -> None:
        self._disk.locks.discard(self._path)


class SimulatedDisk:
    """Simulated disk in memory; see the module for its fault model.

    `calls`: number of calls that may fail, so far. `fail_call` lets one of them fail; `fail_when` is called with
    operation and path of each and returns an error number or None. `on_change`: called after every change of what is
    stored or durable, so that a crash test can take a crash image. `clock`: of the times at which files are modified;
    without one, `modified_ms` returns what a test sets in `modified_ms_by_path`. `can_sync_all` False simulates a
    system without syncfs. `is_crash_simulated` False: writes are durable at once, so that a sync costs nothing, and
    there are no crash images.
    """

    def __init__(
        self,
        *,
        can_sync_all: bool = True,
        capacity_bytes: int = CAPACITY_BYTES,
        is_crash_simulated: bool = True,
    ) -> None:
        self._is_crash_simulated = is_crash_simulated
        self._directories: dict[str, Directory] = {"": Directory(), "/": Directory()}
        self._can_sync_all = can_sync_all
        self.capacity_bytes = capacity_bytes
        self.calls = 0
        self.syncs = 0
        self.locks: set[str] = set()
        self.clock: Clock | None = None
        self.modified_ms_by_path: dict[str, int] = {}
        self.on_change: Callable[[], object] | None = None
        self.fail_when: Callable[[str, str], int | None] | None = None
        self._failures: dict[int, int] = {}

    # Faults

    def fail_call(self, number: int, code: int = errno.EIO) -> None:
        """Let the call with this number, counted from 1 since the disk was created, fail with `code` and do nothing."""
        self._failures[number] = code

    def use_failures(self, fail_when: Callable[[str, str], int | None]) -> None:
        """Ask `fail_when(operation, path)` at each call for the number of an error, or None."""
        self.fail_when = fail_when

    def clear_failures(self) -> None:
        """Let every call succeed from now on."""
        self._failures.clear()
        self.fail_when = None

    def crash(self, random: Random) -> SimulatedDisk:
        """Return a new disk with what remains after a power failure at this time."""
        after = SimulatedDisk(can_sync_all=self._can_sync_all, capacity_bytes=self.capacity_bytes)
        for path, directory in self._directories.items():
            kept = {
                name: Inode(inode.after_crash(random))
                for name, inode in directory.after_crash(random).items()
            }
            after._directories[path] = Directory(kept)
        return after

    def flip_bit(self, path: str, bit: int) -> None:
        """Damage a file: flip one of its durable bits."""
        inode = self._inode(path)
        inode.content[bit // 8] ^= 1 << bit % 8
        inode.durable = bytes(inode.content)
        inode.pending.clear()

    def truncate_file(self, path: str, size: int) -> None:
        """Damage a file: truncate its durable bytes to `size`."""
        inode = self._inode(path)
        del inode.content[size:]
        inode.durable = bytes(inode.content)
        inode.pending.clear()

    def put_file(self, path: str, data: bytes) -> None:
        """Create or replace a file whose name and bytes are durable at once."""
        parent, _, name = path.rpartition("/")
        directory = self._directories.setdefault(parent, Directory())
        directory.entries[name] = directory.durable[name] = Inode(data)

    def files(self) -> dict[str, bytes]:
        """Path -> content, as reads see it, of every file."""
        return {
            f"{path}/{name}": bytes(inode.content)
            for path, directory in self._directories.items()
            for name, inode in directory.entries.items()
        }

    def count_call(self, operation: str, path: str) -> None:
        """Count a call, and raise the error that a test has set for it."""
        self.calls += 1
        code = self._failures.get(self.calls)
        if code is None and self.fail_when is not None:
            code = self.fail_when(operation, path)
        if code is not None:
            raise OSError(code, os.strerror(code), path)

    def report_change(self) -> None:
        """Call `on_change`."""
        if self.on_change is not None:
            self.on_change()

    def available_bytes(self, wanted_bytes: int) -> int:
        """Return the number of `wanted_bytes` additional bytes that fit on the disk."""
        if wanted_bytes <= 0 or self.capacity_bytes >= CAPACITY_BYTES:
            return wanted_bytes  # more than any memory holds
        return min(wanted_bytes, self.free_bytes("/"))

    # ports.Disk

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        self.count_call("open", path)
        directory, name = self._parent(path)
        inode = directory.entries.get(name)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = Inode(is_tracked=self._is_crash_simulated)
            directory.change({name: inode})
            self.report_change()
        return SimulatedFile(self, path, inode, writable=True)

    def open_readonly(self, path: str) -> SimulatedFile:
        self.count_call("open", path)
        return SimulatedFile(self, path, self._inode(path), writable=False)

    def read_file(self, path: str) -> bytes:
        self.count_call("read", path)
        return bytes(self._inode(path).content)

    def list_directory(self, path: str) -> list[str]:
        self.count_call("list", path)
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
                self.count_call("mkdir", current)
                self._directories[current] = Directory()
                self.report_change()

    def exists(self, path: str) -> bool:
        if path in self._directories:
            return True
        parent, _, name = path.rpartition("/")
        return parent in self._directories and name in self._directories[parent].entries

    def rename(self, source: str, target: str) -> None:
        self.count_call("rename", source)
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
        self.count_call("remove", path)
        self._inode(path)
        directory, name = self._parent(path)
        directory.change({name: None})
        self.report_change()

    def remove_tree(self, path: str) -> None:
        self.count_call("remove", path)
        self._directory(path)
        for other in [p for p in self._directories if p == path or p.startswith(path + "/")]:
            del self._directories[other]
        self.report_change()

    def sync_directory(self, path: str) -> None:
        self.count_call("sync_directory", path)
        self._directory(path).sync()
        self.report_change()

    def sync_all(self, path: str) -> bool:
        if not self._can_sync_all:
            return False
        inodes = [inode for directory in self._directories.values() for inode in directory.entries.values()]
        try:
            self.count_call("sync_all", path)
        except OSError:
            for inode in inodes:
                inode.fail_sync()
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
        self.count_call("stat", path)
        return self.modified_ms_by_path.get(path, self._inode(path).modified_ms)

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
