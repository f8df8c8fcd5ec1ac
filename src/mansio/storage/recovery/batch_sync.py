"""Batch sync: one file-system sync (syncfs) for the writes of many logs.

A task whose writes have to become durable in stages (recovering a log, creating one) is a generator of *steps*. A step
is a function that writes files and returns what has to be synced; the generator is resumed when that is on stable
storage. `run_single` runs one task and syncs file by file. `run_batch` runs many tasks, each up to its next step, and
syncs the file system once for all of them (docs/adr/0003-syncing-many-partitions.md).

Invariants: no task is resumed before its step is durable. A failed syncfs does not show which log lost bytes. Then
every step is run *again* and its files are synced one by one: the bytes that the kernel dropped are written again, and
only the log whose bytes the disk rejects fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Disk, DiskFile

T = TypeVar("T")

SYNC_ALL_FILES_MIN = 4
"""Number of files from which on one syncfs is faster than one sync per file (docs/adr/0003-syncing-many-partitions.md)
"""

logger = logging.getLogger(__name__)


class PendingSync(NamedTuple):
    """Writes that have to become durable: the content of `files`, then the names in `directories`."""

    files: tuple[DiskFile, ...] = ()
    directories: tuple[str, ...] = ()

    def sync(self, disk: Disk) -> None:
        """Sync the files, then the directories, one by one. Raises `OSError`."""
        for file in self.files:
            file.sync()
        for directory in self.directories:
            disk.sync_directory(directory)


SyncStep = Callable[[], PendingSync]
"""A function that writes files and returns what has to be synced. If it is called again, it writes the same again."""

SyncSteps = Generator[SyncStep, None, T]


def run_single(disk: Disk, steps: SyncSteps[T]) -> T:
    """Run one task to its end and sync file by file; returns its result. Raises the task's errors, and `OSError`."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration does not carry the type
        step().sync(disk)


def run_batch(disk: Disk, root: str, tasks: Sequence[SyncSteps[T]]) -> list[T | OSError | StorageError]:
    """Run many tasks to their ends; returns, for each, its result or the disk error that ended it.

    `root` is a directory of their file system. The kernel reports an error of the file system once per path that is
    passed to `Disk.sync_all`, so no other code may use the same path.
    """
    ended: dict[int, T | OSError | StorageError] = {}
    running = dict(enumerate(tasks))
    while running:
        written: dict[int, tuple[SyncStep, PendingSync]] = {}
        for number, steps in running.items():
            try:
                step = next(steps)
                written[number] = step, step()
            except StopIteration as end:
                ended[number] = end.value
            except (OSError, StorageError) as error:
                ended[number] = without_traceback(error)
        ended.update(_sync_steps(disk, root, written))
        running = {number: steps for number, steps in running.items() if number not in ended}
    return [ended[number] for number in range(len(tasks))]


def _sync_steps(
    disk: Disk, root: str, written: dict[int, tuple[SyncStep, PendingSync]]
) -> dict[int, OSError | StorageError]:
    """Make the steps durable; returns the errors of the steps that could not be synced."""
    again = False
    if sum(len(due.files) + len(due.directories) for _, due in written.values()) >= SYNC_ALL_FILES_MIN:
        try:
            if disk.sync_all(root):
                return {}
        except OSError as error:
            logger.warning("shared_sync_failed", extra=fields(logs=len(written), error=str(error)))
            again = True
    failed: dict[int, OSError | StorageError] = {}
    for number, (step, due) in written.items():
        try:
            (step() if again else due).sync(disk)
        except (OSError, StorageError) as error:
            failed[number] = without_traceback(error)
    return failed
