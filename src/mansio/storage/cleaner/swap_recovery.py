"""Completion of a swap on disk: a compacted file replaces the segments it was written from.

The same steps run for a new swap and when recovery finds that a crash interrupted one; any of them may already have
been done. Their order makes that safe: first the files that describe the old first segment are removed (its index, the
timestamps), then the new file is renamed, and only when that is on stable storage the other old segments are removed.

Invariants: until the rename is durable all old segments exist; after it the new one does. Nothing at or above the end
of the swap is removed.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog
from mansio.logs import fields
from mansio.ports import DISK_FULL_ERRNOS
from mansio.storage.cleaner.compaction_state import (
    CompactionState,
    cleaned_path,
    load_state,
    sync_log_directory,
    write_state,
)
from mansio.storage.segment import WALK_CHUNK_BYTES, Segment, base_offset_of, walk
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.cleaner.compaction_state import Swap

logger = logging.getLogger(__name__)


def swap_files(disk: Disk, directory: str, swap: Swap) -> None:
    """Perform the remaining steps of a swap; durable on return.

    Raises `OSError`, `DirectoryNotSynced`; `CorruptLog` when the file is missing.
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


def _check_size(disk: Disk, path: str, swap: Swap) -> None:
    size = disk.open_readonly(path).size() if disk.exists(path) else -1
    if size != swap.size_bytes:
        raise CorruptLog(
            f"{path} should be the compacted segment of offsets {swap.base_offset} to {swap.end_offset} with "
            f"{swap.size_bytes} bytes, " + (f"it has {size}" if size >= 0 else "it is missing")
        )


def recover_compaction(disk: Disk, directory: str, start_offset: int) -> CompactionState:
    """Complete an interrupted swap, before anything else of a log is read. Returns the compaction state.

    A swap in the result has been done and is still recorded on disk. `start_offset` is the checkpoint's.
    Raises `OSError`, `DirectoryNotSynced`, `CorruptLog`.
    """
    state = load_state(disk, directory)
    if state is None:
        state = _rebuild_state(disk, directory)
    elif state.swap is None:
        return state
    elif state.swap.end_offset > start_offset:  # otherwise a trim has removed the swapped segment since
        swap_files(disk, directory, state.swap)
        logger.info("compaction_swap_completed", extra=fields(directory=directory))
    clean = state._replace(swap=None)
    try:
        write_state(disk, directory, clean)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        return state  # it stays on disk until there is space; repeating it changes nothing
    return clean


def _rebuild_state(disk: Disk, directory: str) -> CompactionState:
    """The state of a log whose state file is damaged: compaction starts again from the beginning. Raises `CorruptLog`
    if a swap was interrupted.

    Records may be missing anywhere below the active segment.
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
