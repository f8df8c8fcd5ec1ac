"""Atomic replacement of small files: write under a temporary name, sync, rename, sync the directory.

It works on the port `Disk`, so every layer may use it. Invariant: after a crash the file has its old or its new
content, never a mixture; an unfinished file stays under its temporary name and is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile

TEMPORARY_SUFFIX: Final = ".new"


def write_file_atomically(
    disk: Disk, path: str, data: bytes, *, suffix: str = TEMPORARY_SUFFIX, durable: bool = True
) -> None:
    """Replace the content of `path`. With `durable`, content and name are on stable storage on return.

    `suffix`: of the temporary name. Blocks. Raises `OSError`; then the file has its old or its new content.
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
    """Write the file that will replace `path`, under its temporary name; neither synced nor renamed."""
    file = disk.open(path + suffix, create=True)
    try:
        file.truncate(0)
        file.write_at([data], 0)
    except BaseException:
        file.close()
        raise
    return file
