"""Parallel recovery: opens many logs together, with one sync per recovery step for all of them.

Without it, two thousand logs would need about ten thousand syncs, one after the other, after a crash.

Invariants: each result equals that of `Log.open`; a log that cannot be opened does not affect the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.storage.checkpoint import CHECKPOINT_NAME
from mansio.storage.log import Log
from mansio.storage.recovery.batch_sync import run_batch
from mansio.storage.recovery.recovery import recovery_steps
from mansio.storage.segment import base_offset_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.ports import Clock, Disk
    from mansio.storage.file_cache import FileCache
    from mansio.storage.settings import LogSettings


FILES_PER_RECOVERY = 4
"""Open files of a log while it is recovered: of segments and checkpoints; more only after damage."""


class OpenRequest(NamedTuple):
    """A log to be opened, or created if there is none in `directory`."""

    directory: str
    settings: LogSettings


def contains_log(disk: Disk, directory: str) -> bool:
    """Whether `directory` contains a checkpoint or a segment. If not, `open_logs` creates a new log there."""
    if not disk.exists(directory):
        return False
    names = disk.list_directory(directory)
    return CHECKPOINT_NAME in names or any(base_offset_of(name) is not None for name in names)


def open_logs(
    disk: Disk,
    clock: Clock,
    root: str,
    requests: Sequence[OpenRequest],
    files: FileCache,
    before_newer_format: Callable[[], object] = lambda: None,
) -> list[Log | StorageError]:
    """Open the logs; returns, for each, the `Log` or the error with which it could not be opened. Blocks.

    `root` is an existing directory of their file system that no other code passes to `Disk.sync_all`.
    `before_newer_format`: see `Log`.
    """
    opened: list[Log | StorageError] = []
    count = max(
        files.active.files_max // FILES_PER_RECOVERY, 1
    )  # each log has open files until it is recovered
    for first in range(0, len(requests), count):
        opened += _open_together(
            disk, clock, root, requests[first : first + count], files, before_newer_format
        )
        if len(requests) > count:
            for log in opened[first:]:
                if isinstance(log, Log):
                    log.close_active_file()
    return opened


def _open_together(
    disk: Disk,
    clock: Clock,
    root: str,
    requests: Sequence[OpenRequest],
    files: FileCache,
    before_newer_format: Callable[[], object],
) -> list[Log | StorageError]:
    tasks = [recovery_steps(disk, request.directory, request.settings) for request in requests]
    opened: list[Log | StorageError] = []
    for request, result in zip(requests, run_batch(disk, root, tasks), strict=True):
        if isinstance(result, OSError):
            error = StorageError(f"cannot open the log {request.directory}: {result}")
            error.__cause__ = result
            opened.append(error)
        elif isinstance(result, StorageError):
            opened.append(result)
        else:
            log = Log(disk, clock, request.directory, request.settings, files, result, before_newer_format)
            opened.append(log)
    return opened
