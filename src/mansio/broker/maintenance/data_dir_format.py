"""Format marker of a data directory: one number for all files in it.

Files have versions of their own, but several of them are rebuilt from others if their version is unknown. An older
Mansio would therefore rebuild, or even truncate, what a newer one wrote. The marker is checked before any other file
is read, and a directory with a higher number is refused unchanged.

Invariants:
* A new directory has `FIRST_DATA_FORMAT`. The number is increased, durably, before the first thing is written that an
  older Mansio could not use (docs/internals/releasing.md), so a directory without such a thing remains readable by it.
* The number is never decreased.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING, Final

from mansio.errors import StorageError
from mansio.host.atomic_file import TEMPORARY_SUFFIX, write_file_atomically
from mansio.logs import fields
from mansio.metadata.feature_level import newer_setting
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.metadata.metadata_store import Delete, Put
    from mansio.ports import Disk

logger = logging.getLogger(__name__)

FORMAT_FILE_NAME: Final = "format"
FORMAT_FILE_NAMES: Final = frozenset({FORMAT_FILE_NAME, FORMAT_FILE_NAME + TEMPORARY_SUFFIX})
FIRST_DATA_FORMAT: Final = 1
"""What 0.1.0 reads: plain batches, groups and share groups."""
CURRENT_DATA_FORMAT: Final = 2
"""And transactions, delayed records, schedules, deduplication, priorities, order by key, delivery limits outside those
of Kafka, and queues of SQS."""

_NUMBER: Final = re.compile(rb"mansio data directory, format ([1-9][0-9]{0,5})(?![0-9])")
"""The beginning of every marker. A later version may add to the line, or lines."""


def read_data_dir_format(disk: Disk, data_dir: str) -> int | None:
    """Return the number in the marker: 0 if the marker is damaged, None if there is none.

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


class DataDirFormat:
    """The marker of the data directory of a running broker. `require_current` may be called on any thread."""

    def __init__(self, disk: Disk, data_dir: str, number: int) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._number = number
        self._lock = threading.Lock()

    def require_current(self) -> None:
        """Raise the number to that of this version before something is written that an older one could not use. Waits
        for the disk once in the life of a directory. Raises `OSError`; the caller then does not write."""
        if self._number == CURRENT_DATA_FORMAT:
            return
        with self._lock:
            if self._number == CURRENT_DATA_FORMAT:
                return
            path = f"{self._data_dir}/{FORMAT_FILE_NAME}"
            write_file_atomically(self._disk, path, _marker(CURRENT_DATA_FORMAT))
            self._number = CURRENT_DATA_FORMAT
        logger.info("data_format_raised", extra=fields(directory=self._data_dir, format=CURRENT_DATA_FORMAT))

    def before_metadata_commit(self, operations: Sequence[Put | Delete]) -> None:
        """Raise the number if a transaction of the metadata store writes what an older version does not know. Raises
        `OSError`."""
        if self._number != CURRENT_DATA_FORMAT and any(map(newer_setting, operations)):
            self.require_current()


def claim_data_dir_format(disk: Disk, data_dir: str) -> DataDirFormat:
    """Check the marker, and write one into a directory without it: a new one, or one written before the first release.

    Blocks. Raises `StorageError` if the number is too high or the marker is damaged, and `OSError`.
    """
    number = read_data_dir_format(disk, data_dir)
    path = f"{data_dir}/{FORMAT_FILE_NAME}"
    if number == 0:
        raise StorageError(f"{path} is damaged: remove it if no version after {__version__} was started here")
    if number is None:
        number = FIRST_DATA_FORMAT
        write_file_atomically(disk, path, _marker(number))
    return DataDirFormat(disk, data_dir, number)


def _marker(number: int) -> bytes:
    return f"mansio data directory, format {number}\n".encode()
