"""Temporary directories of Spark jobs, with cleanup after killed processes.

A killed process leaves its directory. Therefore each directory holds a lock file that its process keeps locked. The
kernel releases the lock however the process ends. Unlike a process id, a lock is also valid between containers. A
process that creates a directory first removes the abandoned ones: directories of the same user whose lock is free.

Invariants:
* A directory of a running process is never removed.
* A directory that cannot be removed is not an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from typing import Final

from mansio.host.platforms import require_posix

try:
    import fcntl
except ImportError:  # Windows: `make_directory` raises
    fcntl = None  # type: ignore[assignment]  # as above

LOCK_FILE: Final = ".mansio-owner"
_lock_descriptors: dict[str, int] = {}
"""Descriptor of the locked file of each directory that this process has created."""


def make_directory(prefix: str) -> str:
    """Create a directory whose name begins with `prefix`, such as `mansio-spark-`, and return its path. Abandoned
    directories with this prefix are removed first. `remove_directory` removes the new one. Raises
    `UnsupportedPlatform` on Windows.
    """
    require_posix("a local Spark job")
    remove_abandoned_directories(prefix)
    place = tempfile.mkdtemp(prefix=f".{prefix}")
    descriptor = os.open(os.path.join(place, LOCK_FILE), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    directory = os.path.join(os.path.dirname(place), os.path.basename(place)[1:])
    os.rename(place, directory)  # renamed after it is locked, so no process considers it abandoned
    _lock_descriptors[directory] = descriptor
    return directory


def remove_directory(directory: str) -> None:
    """Remove a directory that `make_directory` created. Errors are ignored: a stopping Spark may still write to it."""
    shutil.rmtree(directory, ignore_errors=True)
    descriptor = _lock_descriptors.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_abandoned_directories(prefix: str) -> list[str]:
    """Remove this user's directories with this prefix whose process has ended; returns their paths."""
    removed = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.path)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether the lock of a directory is free. False for another user's directory, or without a lock file."""
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        descriptor = os.open(os.path.join(entry.path, LOCK_FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
