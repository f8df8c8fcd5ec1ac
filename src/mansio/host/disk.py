"""File system of the host (port `Disk`); makes all system calls of the storage layer.

Invariants: a write is complete or raises `OSError`; no error of a system call is suppressed; a descriptor stays valid
while its `HostFile` is referenced, and is closed when the last reference is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import sys
from typing import TYPE_CHECKING

from mansio.errors import DataDirectoryLocked
from mansio.ports import DESCRIPTOR_ERRNOS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # code for Windows does not use it

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.ports import Buffer

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
BUFFERS_PER_WRITE_MAX = 1024  # IOV_MAX of Linux and macOS: pwritev with more buffers fails with EINVAL
SYNCFS_KERNEL_MIN = (5, 8)  # in earlier kernels, syncfs returned success although write-back had failed
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves the bytes in the drive's cache
_HAS_PWRITEV = hasattr(os, "pwritev")
_HAS_NOWAIT = hasattr(os, "RWF_NOWAIT") and hasattr(os, "posix_fadvise")
_NOT_SUPPORTED = (
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOSYS,
)  # RWF_NOWAIT, by the file system or the kernel


def sync_descriptor(descriptor: int) -> None:
    """Flush the bytes and the length of an open file to stable storage. Raises `OSError`."""
    if _FULL_SYNC is not None:
        fcntl.fcntl(descriptor, _FULL_SYNC)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def _sync_directory_descriptor(descriptor: int) -> None:
    if _FULL_SYNC is not None:
        fcntl.fcntl(descriptor, _FULL_SYNC)
    else:
        os.fsync(descriptor)


class HostFile:
    """An open file (port `DiskFile`).

    The descriptor is closed when the last reference to the object is dropped. So a response that still refers to a
    segment that was deleted or closed keeps a valid descriptor without reference counting of its own.
    """

    __slots__ = ("__weakref__", "_descriptor", "_path")

    def __init__(self, path: str, flags: int) -> None:
        self._descriptor = -1
        self._path = path
        self._descriptor = os.open(path, flags | _BINARY, FILE_MODE)

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def write_at(self, buffers: Sequence[Buffer], position: int) -> int:
        total = 0
        for buffer in buffers:
            total += len(buffer)
        if _HAS_PWRITEV and len(buffers) <= BUFFERS_PER_WRITE_MAX:
            written = os.pwritev(self._descriptor, buffers, position)
            if written == total:
                return total
        else:
            written = 0
        rest = memoryview(b"".join(buffers))[written:]
        position += written
        while rest:
            step = _pwrite(self._descriptor, rest, position)
            rest = rest[step:]
            position += step
        return total

    def read_at(self, length: int, position: int) -> bytes:
        data = _pread(self._descriptor, length, position)
        if len(data) == length or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < length:
            data = _pread(self._descriptor, length - got, position + got)
            if not data:
                break
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def read_uncached(self, length: int, position: int) -> bytes:
        if not _HAS_NOWAIT:
            return self.read_at(length, position)
        buffer = bytearray(length)
        try:
            cached = os.preadv(self._descriptor, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            cached = 0
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            return self.read_at(length, position)
        if cached == length:
            return bytes(buffer)
        # Without FADV_RANDOM the kernel would read ahead, and the next call would find these bytes in the page cache.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        rest = self.read_at(length - cached, position + cached)
        if rest:
            os.posix_fadvise(self._descriptor, position + cached, len(rest), os.POSIX_FADV_DONTNEED)
        return bytes(memoryview(buffer)[:cached]) + rest

    def map(self, length: int) -> memoryview:
        return memoryview(mmap.mmap(self._descriptor, length, access=mmap.ACCESS_READ))

    def truncate(self, size: int) -> None:
        os.truncate(self._descriptor, size)

    def sync(self) -> None:
        sync_descriptor(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # data that must be durable was synced before
                self.close()

    def __repr__(self) -> str:
        return f"HostFile({self._path!r}, fileno={self._descriptor})"


def _pwrite(descriptor: int, data: memoryview, position: int) -> int:
    """One call of `pwrite`, which may write fewer bytes. Returns their number."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.write(descriptor, data)


def _pread(descriptor: int, length: int, position: int) -> bytes:
    """One call of `pread`, which may return fewer bytes."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.read(descriptor, length)


class HostLock:
    """Exclusive lock on a file; the operating system releases it when the process ends. Raises `DataDirectoryLocked` if
    another process holds it."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, FILE_MODE)
        try:
            _lock_descriptor(self._descriptor)
        except OSError as error:
            self.release()
            raise DataDirectoryLocked(f"another process holds the lock {path}") from error

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _lock_descriptor(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class HostDisk:
    """The file system of the host (port `Disk`)."""

    def __init__(self) -> None:
        self._syncfs = _load_syncfs()
        self._sync_roots: dict[str, int] = {}

    def open(self, path: str, *, create: bool = False) -> HostFile:
        return HostFile(path, os.O_RDWR | (os.O_CREAT if create else 0))

    def open_readonly(self, path: str) -> HostFile:
        return HostFile(path, os.O_RDONLY)

    def read_file(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def list_directory(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        missing = []
        current = path
        while current and not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        for directory in reversed(missing):
            with contextlib.suppress(
                FileExistsError
            ):  # another process created it; it is synced nevertheless
                os.mkdir(directory, DIRECTORY_MODE)
            if durable:
                self.sync_directory(os.path.dirname(directory) or ".")

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: str) -> None:
        if sys.platform == "win32":
            return  # Windows cannot open a directory; NTFS journals directory entries
        descriptor = os.open(path, os.O_RDONLY | _BINARY)
        try:
            _sync_directory_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self, path: str) -> bool:
        if self._syncfs is None:
            return False
        descriptor = self._sync_roots.get(path)
        if descriptor is None:
            # Kept open: the kernel reports each write-back error once per open descriptor.
            try:
                descriptor = os.open(path, os.O_RDONLY | _BINARY)
            except OSError as error:
                if error.errno in DESCRIPTOR_ERRNOS:
                    return False  # nothing was synced: the caller syncs file by file
                raise
            self._sync_roots[path] = descriptor
        if self._syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return True

    def free_bytes(self, path: str) -> int:
        return shutil.disk_usage(path).free

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def lock(self, path: str) -> HostLock:
        return HostLock(path)

    def close(self) -> None:
        """Close the directory descriptors that `sync_all` keeps open."""
        while self._sync_roots:
            os.close(self._sync_roots.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _load_syncfs() -> Callable[[int], int] | None:
    """Return the function `syncfs` of libc; None if it does not exist, or the kernel does not report write-back errors
    with it."""
    if sys.platform != "linux" or _kernel_version() < SYNCFS_KERNEL_MIN:
        return None
    try:
        function: Callable[[int], int] = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):  # a libc without it: the caller syncs file by file
        return None
    return function


def _kernel_version() -> tuple[int, int]:
    parts = os.uname().release.split(".")
    try:
        return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()))
    except (IndexError, ValueError):
        return 0, 0
