"""Temporary directories of Spark's jobs, and the end of those whose process was killed.

A process that is killed leaves its directory behind. Each holds a file that its process keeps locked for as long as it
lives; the kernel gives the lock back, whatever ended the process and in whatever container, where a process id would
say nothing. So the next one that needs a directory removes those of its user whose lock is free.

Always true: a directory of a living process is never removed; that one cannot be removed stops nobody.
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
"""Directory to the descriptor that locks it, of this process."""


def make_directory(prefix: str) -> str:
    """A new directory whose name begins with `prefix`, such as `mansio-spark-`. Others of that prefix that nobody owns
    any more are removed. `remove_directory` ends it."""
    remove_abandoned(prefix)
    place = tempfile.mkdtemp(prefix=f".{prefix}")
    descriptor = os.open(os.path.join(place, OWNER_FILE), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    directory = os.path.join(os.path.dirname(place), os.path.basename(place)[1:])
    os.rename(place, directory)  # it has its name when it is locked, so nobody takes it for abandoned
    _locks[directory] = descriptor
    return directory


def remove_directory(directory: str) -> None:
    """Remove one of `make_directory`. What still writes into it, as Spark does while it stops, is no error."""
    shutil.rmtree(directory, ignore_errors=True)
    descriptor = _locks.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_abandoned(prefix: str) -> list[str]:
    """Remove the directories of this user whose owner is gone; which they were."""
    removed = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.path)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether its lock is free. A directory of another user, or without the file, is not ours to judge."""
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
