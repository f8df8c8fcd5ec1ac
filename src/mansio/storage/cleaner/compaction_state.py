"""How far compaction has come in one log, in one small sealed file.

Always true: below `cleaned_end_offset` no key has more than one value, and a record was removed only below
`sparse_end_offset` (which is above the other while a run is under way, or after one that ended early). A pending swap
says that a finished file is to take the place of some segments: it is written when that file is on stable storage and
nothing else has been touched, and from then on there is no way back.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.storage.checksummed_file import (
    TEMPORARY_SUFFIX,
    decode_checksummed,
    encode_checksummed,
    prepare_checksummed,
)
from mansio.storage.segment import OFFSET_DIGITS

if TYPE_CHECKING:
    from mansio.ports import Disk


COMPACTION_MAGIC = b"MANSIOCM"
COMPACTION_VERSION = 1
COMPACTION_NAME = "compaction"
NOTHING = -1
_FIELDS = struct.Struct(">qqqqqQ")


class DirectoryNotSynced(StorageError):
    """A directory could not be synced: what it holds after a crash is not known, so its log must stop."""


class Swap(NamedTuple):
    """The finished file, `size_bytes` long, becomes the only segment of [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    size_bytes: int


class CompactionState(NamedTuple):
    """See the module. `last_horizon_ms`: the last moment at which a tombstone may go; -1: none is waiting."""

    cleaned_end_offset: int = 0
    sparse_end_offset: int = 0
    last_horizon_ms: int = NOTHING
    swap: Swap | None = None

    def encode(self) -> bytes:
        """The bytes of the file (docs/FILE_FORMAT.md)."""
        swap = self.swap or Swap(NOTHING, NOTHING, 0)
        payload = _FIELDS.pack(self.cleaned_end_offset, self.sparse_end_offset, self.last_horizon_ms, *swap)
        return encode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, payload)

    def limited(self, end_offset: int) -> CompactionState:
        """What holds of a log that is cut back to `end_offset`."""
        return self._replace(
            cleaned_end_offset=min(self.cleaned_end_offset, end_offset),
            sparse_end_offset=min(self.sparse_end_offset, end_offset),
        )


NOT_COMPACTED = CompactionState()


def cleaned_path(directory: str, base_offset: int) -> str:
    """The file that is being written to replace segments from `base_offset` on. Recovery removes an unfinished one."""
    return f"{directory}/{base_offset:0{OFFSET_DIGITS}d}.compacted{TEMPORARY_SUFFIX}"


def load_state(disk: Disk, directory: str) -> CompactionState | None:
    """What the file says; nothing was compacted where there is none. None when it is damaged."""
    try:
        data = disk.read_file(f"{directory}/{COMPACTION_NAME}")
    except FileNotFoundError:
        return CompactionState()
    payload = decode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, data)
    if payload is None or len(payload) != _FIELDS.size:
        return None
    cleaned, sparse, horizon, base, end, size = _FIELDS.unpack(payload)
    swap = None if base == NOTHING else Swap(base, end, size)
    return CompactionState(cleaned, sparse, horizon, swap)


def write_state(disk: Disk, directory: str, state: CompactionState) -> None:
    """Make it durable. `OSError`: the file is as it was. `DirectoryNotSynced`: nobody knows which one a crash
    leaves."""
    path = f"{directory}/{COMPACTION_NAME}"
    file = prepare_checksummed(disk, path, state.encode())
    try:
        file.sync()
    finally:
        file.close()
    disk.rename(path + TEMPORARY_SUFFIX, path)
    sync_log_directory(disk, directory)


def sync_log_directory(disk: Disk, directory: str) -> None:
    """Sync a log's directory. Raises `DirectoryNotSynced`.

    It fails once only: a later sync would succeed although the name of a segment with acknowledged records was lost.
    """
    try:
        disk.sync_directory(directory)
    except OSError as error:
        raise DirectoryNotSynced(f"cannot sync the directory {directory}: {error}") from error
