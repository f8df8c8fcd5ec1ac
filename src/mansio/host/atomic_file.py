"""Atomic replacement of small files: write under a temporary name, sync, rename, sync the directory.

The functions use only the port `Disk`, so every layer may call them. Invariant: after a crash the file has its old or
its new content, never a mixture; an unfinished file keeps its temporary name and is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile

TEMPORARY_SUFFIX: Final = ".new"


def write_file_atomically(
    disk: Disk, path: str, data: bytes, *, suffix: str = TEMPORARY_SUFFIX, durable: bool = True
) -> None:
    """Replace the content of the file `path` atomically, or create the file. Blocks.

    The temporary name is `path` with `suffix` appended. With `durable`, content and name are on stable storage when the
    function returns.
    After an `OSError` the file has its old or its new content.
    """
    file = write_temporary_file(disk, path, data, suffix=suffix)
    try:
        if durable:
            file.sync()
    finally:
        file.close()
    disk.rename(path + suffix, path)
    if durable:
        disk.sync_directory(path.rpartition("/")[0])


def write_temporary_file(disk: Disk, path: str, data: bytes, *, suffix: str) -> DiskFile:
    """Write `data` to the file `path` + `suffix` and return the open file, which is neither synced nor renamed yet."""
    file = disk.open(path + suffix, create=True)
    try:
        file.truncate(0)
        file.write_at([data], 0)
    except BaseException:
        file.close()
        raise
    return file
