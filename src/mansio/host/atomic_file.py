"""A file of the broker that is replaced as a whole.

Always true: after a crash at any moment there is the old file or the new one, never a mixture; what a crash left behind
is beside it under `TEMPORARY_SUFFIX`, and means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.ports import Disk

TEMPORARY_SUFFIX: Final = ".new"


def write_file_atomically(disk: Disk, path: str, data: bytes) -> None:
    """Let `path` hold `data`, on stable storage, name and all, on return. Blocks. Raises `OSError`, and then the old
    file may still be there."""
    unfinished = path + TEMPORARY_SUFFIX
    file = disk.open(unfinished, create=True)
    try:
        file.truncate(0)
        file.write_at([data], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(unfinished, path)
    disk.sync_directory(path.rpartition("/")[0])
