"""Progress of compaction in one log, in one small checksummed file.

Invariants:
* Below `cleaned_end_offset` no key has more than one value. Records were removed only below `sparse_end_offset`, which
  is the higher of the two during a run and after one that ended early.
* A pending swap means that a finished file replaces some segments: it is written when that file is on stable storage
  and nothing else has been changed; from then on the swap has to be completed.
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
UNSET = -1
_FIELDS = struct.Struct(">qqqqqQ")


class DirectoryNotSynced(StorageError):
    """A directory could not be synced: its content after a crash is unknown, so its log must stop."""


class Swap(NamedTuple):
    """The finished file, `size_bytes` long, becomes the only segment of [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    size_bytes: int


class CompactionState(NamedTuple):
    """See the module. `last_horizon_ms`: the latest delete horizon of a tombstone; -1: there is none."""

    cleaned_end_offset: int = 0
    sparse_end_offset: int = 0
    last_horizon_ms: int = UNSET
    swap: Swap | None = None

    def encode(self) -> bytes:
        """The bytes of the file (docs/FILE_FORMAT.md)."""
        swap = self.swap or Swap(UNSET, UNSET, 0)
        payload = _FIELDS.pack(self.cleaned_end_offset, self.sparse_end_offset, self.last_horizon_ms, *swap)
        return encode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, payload)

    def limited(self, end_offset: int) -> CompactionState:
        """The state of a log that is truncated to `end_offset`."""
        return self._replace(
            cleaned_end_offset=min(self.cleaned_end_offset, end_offset),
            sparse_end_offset=min(self.sparse_end_offset, end_offset),
        )


NOT_COMPACTED = CompactionState()


def cleaned_path(directory: str, base_offset: int) -> str:
    """Path of the file that is written to replace segments from `base_offset` on. Recovery removes an unfinished
    one.
    """
    return f"{directory}/{base_offset:0{OFFSET_DIGITS}d}.compacted{TEMPORARY_SUFFIX}"


def load_state(disk: Disk, directory: str) -> CompactionState | None:
    """Read the file; without a file nothing was compacted. None if it is damaged."""
    try:
        data = disk.read_file(f"{directory}/{COMPACTION_NAME}")
    except FileNotFoundError:
        return CompactionState()
    payload = decode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, data)
    if payload is None or len(payload) != _FIELDS.size:
        return None
    cleaned, sparse, horizon, base, end, size = _FIELDS.unpack(payload)
    swap = None if base == UNSET else Swap(base, end, size)
    return CompactionState(cleaned, sparse, horizon, swap)


def write_state(disk: Disk, directory: str, state: CompactionState) -> None:
    """Make the state durable. Raises `OSError`: the file is unchanged; `DirectoryNotSynced`: a crash may leave
    either.
    """
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
