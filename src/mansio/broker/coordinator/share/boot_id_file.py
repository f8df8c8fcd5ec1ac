"""Which start of the machine the data directory has lived through whole: was what is in the page cache lost since?

What was appended and not synced survives the end of the process, but not that of the machine. The mark is a file with
the id of the machine's start. If it is that of now, a log of this directory lacks nothing that was ever appended.

Always true: after a start of which that cannot be said, the mark is that of an older one until `write`, so that a
process which ends before then is followed by one that cannot say it either.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields

if TYPE_CHECKING:
    from mansio.ports import Background, Disk, Promise, Scheduler

logger = logging.getLogger(__name__)

NAME: Final = "boot"


class BootIdFile:
    """See the module. `boot_id`: of the machine's start now, "" where nobody knows."""

    def __init__(
        self, disk: Disk, background: Background, scheduler: Scheduler, directory: str, boot_id: str
    ) -> None:
        self._disk = disk
        self._background = background
        self._scheduler = scheduler
        self._directory = directory
        self._boot_id = boot_id

    @property
    def _path(self) -> str:
        return f"{self._directory}/{NAME}"

    def is_current_boot(self) -> bool:
        """Is the machine the same, not started since the mark was kept?"""
        if not self._boot_id or not self._disk.exists(self._path):
            return False
        return self._disk.read_file(self._path) == self._boot_id.encode()

    async def write(self) -> None:
        """From now on this start is the one. An error of the disk is told, and costs a later start some time only."""
        if not self._boot_id or self.is_current_boot():
            return
        done: Promise[BaseException | None] = self._scheduler.promise()
        self._background.submit(self._write, lambda _, error: None if done.done() else done.set_result(error))
        error = await done
        if error is not None:
            logger.warning("boot mark not written", extra=fields(path=self._path, reason=error))

    def _write(self) -> None:
        write_file_atomically(self._disk, self._path, self._boot_id.encode())
