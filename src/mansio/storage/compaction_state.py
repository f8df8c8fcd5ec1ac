"""Compaction state of one log, kept in a small checksummed file, and the segment swap that the state describes.

Invariants:
* Below `cleaned_end_offset` no key has more than one value. Records were removed only below `sparse_end_offset`, which
  is higher than `cleaned_end_offset` during a run and after a run that ended early.
* A pending swap in the state means that a compacted file replaces some segments. It is recorded when that file is on
  stable storage and no segment has been changed yet; from then on the swap has to be completed.

`swap_files` runs the steps of a swap: the index file of the first old segment and the timestamps file are removed; the
new file is renamed over the first old segment; when the rename is durable, the other old segments are removed. Recovery
calls it again after a crash; steps that were done already are skipped. Until the rename is durable all old segments
exist; after it the new one does. No segment at or above the end of the swap is removed.
"""

from __future__ import annotations

import logging
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import CorruptLog, StorageError
from mansio.logs import fields
from mansio.ports import TRANSIENT_ERRNOS
from mansio.storage.checksummed_file import (
    TEMPORARY_SUFFIX,
    decode_checksummed,
    encode_checksummed,
    prepare_checksummed,
)
from mansio.storage.segment import OFFSET_DIGITS, WALK_CHUNK_BYTES, Segment, base_offset_of, walk
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME

if TYPE_CHECKING:
    from mansio.ports import Disk

COMPACTION_MAGIC = b"MANSIOCM"
COMPACTION_VERSION = 1
COMPACTION_NAME = "compaction"
UNSET_FIELD = -1
_FIELDS = struct.Struct(">qqqqqQ")


class DirectoryNotSynced(StorageError):
    """Raised when a directory could not be synced: its content after a crash is unknown, so its log has failed."""


class PendingSwap(NamedTuple):
    """A swap: the compacted file of `size_bytes` bytes becomes the only segment of [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    size_bytes: int


class CompactionState(NamedTuple):
    """Compaction state of one log: records below `cleaned_end_offset` are compacted.

    Below `sparse_end_offset` records may be missing. `last_delete_horizon_ms` is the latest delete horizon of a
    tombstone, -1 if there is none. `swap` is the pending swap.
    """

    cleaned_end_offset: int = 0
    sparse_end_offset: int = 0
    last_delete_horizon_ms: int = UNSET_FIELD
    swap: PendingSwap | None = None

    def encode(self) -> bytes:
        """Return the bytes of the compaction file (docs/internals/file-format.md)."""
        swap = self.swap or PendingSwap(UNSET_FIELD, UNSET_FIELD, 0)
        payload = _FIELDS.pack(
            self.cleaned_end_offset, self.sparse_end_offset, self.last_delete_horizon_ms, *swap
        )
        return encode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, payload)

    def truncated_to(self, end_offset: int) -> CompactionState:
        """Return the state after a truncation of the log to `end_offset`."""
        return self._replace(
            cleaned_end_offset=min(self.cleaned_end_offset, end_offset),
            sparse_end_offset=min(self.sparse_end_offset, end_offset),
        )


NOT_COMPACTED = CompactionState()


def cleaned_path(directory: str, base_offset: int) -> str:
    """Path of the compacted file that replaces segments from `base_offset` on. Recovery removes an unfinished file."""
    return f"{directory}/{base_offset:0{OFFSET_DIGITS}d}.compacted{TEMPORARY_SUFFIX}"


def load_state(disk: Disk, directory: str) -> CompactionState | None:
    """Read the compaction state; the state of an uncompacted log if there is no file, None if the file is damaged."""
    try:
        data = disk.read_file(f"{directory}/{COMPACTION_NAME}")
    except FileNotFoundError:
        return CompactionState()
    payload = decode_checksummed(COMPACTION_MAGIC, COMPACTION_VERSION, data)
    if payload is None or len(payload) != _FIELDS.size:
        return None
    cleaned, sparse, delete_horizon, base, end, size = _FIELDS.unpack(payload)
    swap = None if base == UNSET_FIELD else PendingSwap(base, end, size)
    return CompactionState(cleaned, sparse, delete_horizon, swap)


def write_state(disk: Disk, directory: str, state: CompactionState) -> None:
    """Replace the compaction state on disk, durably.

    Raises `OSError` if the old state is unchanged, `DirectoryNotSynced` if a crash may leave the old or the new one.
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
    """Sync a log's directory. Raises `DirectoryNotSynced`; then the caller must fail the log.

    The kernel reports such an error once: a later sync would succeed although the name of a segment may be lost.
    """
    try:
        disk.sync_directory(directory)
    except OSError as error:
        raise DirectoryNotSynced(f"cannot sync the directory {directory}: {error}") from error


logger = logging.getLogger(__name__)


def swap_files(disk: Disk, directory: str, swap: PendingSwap) -> None:
    """Run those steps of a swap that are not done yet; the swap is durable on return.

    Raises `OSError`, `DirectoryNotSynced`; `CorruptLog` if the compacted file is missing.
    """
    target = Segment(directory, swap.base_offset)
    finished = cleaned_path(directory, swap.base_offset)
    for path in (target.index_path, f"{directory}/{TIMESTAMPS_NAME}"):
        if disk.exists(path):
            disk.remove(path)
    if disk.exists(finished):
        _check_size(disk, finished, swap)
        disk.rename(finished, target.path)
    else:
        _check_size(disk, target.path, swap)
    sync_log_directory(disk, directory)
    replaced = [
        base
        for base in map(base_offset_of, disk.list_directory(directory))
        if base is not None and swap.base_offset < base < swap.end_offset
    ]
    for base in reversed(replaced):
        gone = Segment(directory, base)
        for path in (gone.index_path, gone.path):
            if disk.exists(path):
                disk.remove(path)
    if replaced:
        sync_log_directory(disk, directory)


def _check_size(disk: Disk, path: str, swap: PendingSwap) -> None:
    size = disk.open_readonly(path).size() if disk.exists(path) else -1
    if size != swap.size_bytes:
        raise CorruptLog(
            f"{path} should be the compacted segment of offsets {swap.base_offset} to {swap.end_offset} with "
            f"{swap.size_bytes} bytes, " + (f"it has {size}" if size >= 0 else "it is missing")
        )


def recover_compaction(disk: Disk, directory: str, start_offset: int) -> CompactionState:
    """Complete an interrupted swap, before recovery reads the segments. Returns the compaction state.

    If the result still has a `swap`, that swap is complete, but the disk was too full to record its end. `start_offset`
    is the log start offset in the checkpoint. Raises `OSError`, `DirectoryNotSynced`, `CorruptLog`.
    """
    state = load_state(disk, directory)
    if state is None:
        state = _rebuild_state(disk, directory)
    elif state.swap is None:
        return state
    elif state.swap.end_offset > start_offset:  # otherwise a trim has removed the new segment since
        swap_files(disk, directory, state.swap)
        logger.info("compaction_swap_completed", extra=fields(directory=directory))
    clean = state._replace(swap=None)
    try:
        write_state(disk, directory, clean)
    except OSError as error:
        if error.errno not in TRANSIENT_ERRNOS:
            raise
        return state  # the swap stays on disk until there is space; repeating it changes nothing
    return clean


def _rebuild_state(disk: Disk, directory: str) -> CompactionState:
    """Return the state of a log whose compaction file is damaged: compaction starts again from the beginning.

    Records may be missing anywhere below the active segment. Raises `CorruptLog` if a swap was interrupted.
    """
    bases = sorted(base for base in map(base_offset_of, disk.list_directory(directory)) if base is not None)
    for base, following in pairwise(bases):
        file = disk.open_readonly(Segment(directory, base).path)
        end = base
        for _, header in walk(file, 0, file.size(), base, WALK_CHUNK_BYTES):
            end = header.base_offset + header.last_offset_delta + 1
        if end > following:
            raise CorruptLog(
                f"{file.path} extends to offset {end}, into the next segment: a compaction was interrupted and its "
                "state file is damaged"
            )
    logger.warning("compaction_state_unreadable", extra=fields(directory=directory))
    return CompactionState(0, bases[-1] if bases else 0)
