"""Format marker of a data directory: one number for all files in it.

Files have versions of their own, but several of them are rebuilt from others if their version is unknown. An older
Mansio would therefore rebuild, or even truncate, what a newer one wrote. The marker is checked before any other file
is read, and a directory with a higher number is refused unchanged.

Invariant: the number is increased whenever an older Mansio could not use the directory (docs/RELEASING.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mansio.errors import StorageError
from mansio.host.atomic_file import TEMPORARY_SUFFIX, write_file_atomically
from mansio.version import __version__

if TYPE_CHECKING:
    from mansio.ports import Disk

FORMAT_FILE_NAME: Final = "format"
FORMAT_FILE_NAMES: Final = frozenset({FORMAT_FILE_NAME, FORMAT_FILE_NAME + TEMPORARY_SUFFIX})
CURRENT_DATA_FORMAT: Final = 1

_NUMBER: Final = re.compile(rb"mansio data directory, format ([1-9][0-9]{0,5})(?![0-9])")
"""The beginning of every marker. A later version may add to the line, or lines."""


def read_data_dir_format(disk: Disk, data_dir: str) -> int | None:
    """The number in the marker: 0 if the marker is damaged, None if there is none.

    Raises `StorageError` if it is higher than this version supports.
    """
    try:
        content = disk.read_file(f"{data_dir}/{FORMAT_FILE_NAME}")
    except FileNotFoundError:
        return None
    found = _NUMBER.match(content)
    number = int(found[1]) if found else 0
    if number > CURRENT_DATA_FORMAT:
        raise StorageError(
            f"data directory {data_dir} has format {number}; version {__version__} supports formats up to "
            f"{CURRENT_DATA_FORMAT}: start the version that wrote it, or a newer one"
        )
    return number if content == _marker(number) else 0


def claim_data_dir_format(disk: Disk, data_dir: str) -> None:
    """Check the marker, and write one into a directory without it: a new one, or one written before the first release.

    Blocks. Raises `StorageError` if the number is too high or the marker is damaged, and `OSError`.
    """
    number = read_data_dir_format(disk, data_dir)
    path = f"{data_dir}/{FORMAT_FILE_NAME}"
    if number == 0:
        raise StorageError(f"{path} is damaged: remove it if no version after {__version__} was started here")
    if number is None:
        write_file_atomically(disk, path, _marker(CURRENT_DATA_FORMAT))


def _marker(number: int) -> bytes:
    return f"mansio data directory, format {number}\n".encode()
