"""Making what many logs have written durable with one sync, where each of them alone would have to wait for its own.

Work that has to be durable in stages (opening a log, making one) is written as a generator of *steps*. A step writes
and says what it wrote; the work goes on when that is on stable storage. One such work is run alone, file by file; many
are run side by side, all of them to their next step, and one sync of the file system carries them on (ADR 0003).

Always true: no work is continued before its step is durable. When the one sync fails, which does not say whose bytes it
was about, every step is written *again* and synced by itself: what the kernel dropped is dirty once more, and the log
whose bytes the disk does not take is the only one that fails.
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
"""From so many files on one syncfs is quicker than syncing each: docs/adr/0003-syncing-many-partitions.md."""

logger = logging.getLogger(__name__)


class PendingSync(NamedTuple):
    """What has to become durable: the bytes of `files`, then the names in `directories`."""

    files: tuple[DiskFile, ...] = ()
    directories: tuple[str, ...] = ()

    def sync(self, disk: Disk) -> None:
        """One by one. Raises `OSError`."""
        for file in self.files:
            file.sync()
        for directory in self.directories:
            disk.sync_directory(directory)


SyncStep = Callable[[], PendingSync]
"""Writes, and says what. Called once more after a failed sync it writes the same again."""

SyncSteps = Generator[SyncStep, None, T]


def run_single(disk: Disk, steps: SyncSteps[T]) -> T:
    """Carry one work to its end, syncing file by file; what it returns. Raises what it raises, and `OSError`."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration does not carry the type
        step().sync(disk)


def run_batch(disk: Disk, root: str, works: Sequence[SyncSteps[T]]) -> list[T | OSError | StorageError]:
    """Carry many works to their ends; for each what it returns, or the disk's error that ended it.

    `root` is a directory of the file system they are on. Its errors are told once to everybody who asks through the
    same path: use one that nobody else hands to `Disk.sync_all`.
    """
    ended: dict[int, T | OSError | StorageError] = {}
    going = dict(enumerate(works))
    while going:
        written: dict[int, tuple[SyncStep, PendingSync]] = {}
        for number, steps in going.items():
            try:
                step = next(steps)
                written[number] = step, step()
            except StopIteration as end:
                ended[number] = end.value
            except (OSError, StorageError) as error:
                ended[number] = error
        ended.update(_synced(disk, root, written))
        going = {number: steps for number, steps in going.items() if number not in ended}
    return [ended[number] for number in range(len(works))]


def _synced(
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
