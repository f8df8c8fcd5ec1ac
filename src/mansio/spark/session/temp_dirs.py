"""Temporary directories of Spark jobs, with cleanup after killed processes.

A killed process leaves its directory. Each directory holds a file that its process keeps locked; the kernel releases
the lock however the process ended, also across containers, where a process id would not be meaningful. The next process
that creates a directory removes those of its user whose lock is free.

Invariants:
* A directory of a living process is never removed.
* A directory that cannot be removed is not an error.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from typing import Final

OWNER_FILE: Final = ".mansio-owner"
_locks: dict[str, int] = {}
"""Directory to the descriptor of its lock, in this process."""


def make_directory(prefix: str) -> str:
    """Create a directory whose name begins with `prefix`, such as `mansio-spark-`, and remove abandoned ones of that
    prefix. `remove_directory` removes it.
    """
    remove_abandoned(prefix)
    place = tempfile.mkdtemp(prefix=f".{prefix}")
    descriptor = os.open(os.path.join(place, OWNER_FILE), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    directory = os.path.join(os.path.dirname(place), os.path.basename(place)[1:])
    os.rename(place, directory)  # renamed after it is locked, so no process considers it abandoned
    _locks[directory] = descriptor
    return directory


def remove_directory(directory: str) -> None:
    """Remove a directory of `make_directory`. Concurrent writes, as by a stopping Spark, are not an error."""
    shutil.rmtree(directory, ignore_errors=True)
    descriptor = _locks.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_abandoned(prefix: str) -> list[str]:
    """Remove this user's directories whose owner has ended; returns their paths."""
    removed = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.path)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether its lock is free. False for a directory of another user or without the file."""
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        descriptor = os.open(os.path.join(entry.path, OWNER_FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
