"""One file-system sync for the writes of many logs (syncfs).

Work that has to become durable in stages (recovering a log, creating one) is written as a generator of *steps*. A step
writes and returns what it wrote; the work continues when that is on stable storage. One such work is run alone, file by
file; many are run side by side, each to its next step, and one sync of the file system covers all of them (ADR 0003).

Invariants: no work continues before its step is durable. When the shared sync fails, which does not show whose bytes
were affected, every step is written *again* and synced by itself: what the kernel dropped is dirty once more, and only
the log whose bytes the disk does not accept fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mansio.errors import StorageError
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Disk, DiskFile

T = TypeVar("T")

SYNC_ALL_FILES_MIN = 4
"""From this number of files on one syncfs is faster than syncing each: docs/adr/0003-syncing-many-partitions.md."""

logger = logging.getLogger(__name__)


class PendingSync(NamedTuple):
    """What has to become durable: the bytes of `files`, then the names in `directories`."""

    files: tuple[DiskFile, ...] = ()
    directories: tuple[str, ...] = ()

    def sync(self, disk: Disk) -> None:
        """Sync one by one. Raises `OSError`."""
        for file in self.files:
            file.sync()
        for directory in self.directories:
            disk.sync_directory(directory)


SyncStep = Callable[[], PendingSync]
"""Writes, and returns what it wrote. Called again after a failed sync it writes the same again."""

SyncSteps = Generator[SyncStep, None, T]


def run_single(disk: Disk, steps: SyncSteps[T]) -> T:
    """Run one work to its end, syncing file by file; returns its result. Raises what it raises, and `OSError`."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration does not carry the type
        step().sync(disk)


def run_batch(disk: Disk, root: str, tasks: Sequence[SyncSteps[T]]) -> list[T | OSError | StorageError]:
    """Run many tasks to their ends; for each its result, or the disk error that ended it.

    `root` is a directory of their file system. The kernel reports an error of it once to each caller that uses the same
    path: use one that nothing else passes to `Disk.sync_all`.
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
                ended[number] = error
        ended.update(_sync_steps(disk, root, written))
        running = {number: steps for number, steps in running.items() if number not in ended}
    return [ended[number] for number in range(len(tasks))]


def _sync_steps(
    disk: Disk, root: str, written: dict[int, tuple[SyncStep, PendingSync]]
) -> dict[int, OSError | StorageError]:
    """Make the steps durable; the errors of those that are not."""
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
            failed[number] = error
    return failed
