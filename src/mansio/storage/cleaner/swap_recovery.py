"""Finishing a swap: a compacted file takes the place of the segments it was made from.

The same few steps run when a swap is due and when an opening finds that a crash interrupted one; any of them may
already have been done. The order is what makes that safe: first what describes the old first segment goes (its index,
the times), then the new file takes its name, and only when that is on stable storage the other old segments go.

Always true: until the rename is durable all old segments are there; after it the new one is. Nothing is removed that is
not below the end of the swap.
"""

from __future__ import annotations

import errno
import logging
from itertools import pairwise
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog
from mansio.logs import fields
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

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


def swap_files(disk: Disk, directory: str, swap: Swap) -> None:
    """Do what is left to do of a swap; durable on return.

    Raises `OSError`, `DirectoryNotSynced`; `CorruptLog` when the file is gone.
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
    """Before anything else of a log is looked at: finish what was begun. How far the log is compacted.

    A swap in the result has been done and is still noted on disk. `start_offset` is the checkpoint's.
    Raises `OSError`, `DirectoryNotSynced`, `CorruptLog`.
    """
    state = load_state(disk, directory)
    if state is None:
        state = _rebuild_state(disk, directory)
    elif state.swap is None:
        return state
    elif state.swap.end_offset > start_offset:  # otherwise a trim has taken the swapped segment since
        swap_files(disk, directory, state.swap)
        logger.info("compaction_swap_completed", extra=fields(directory=directory))
    clean = state._replace(swap=None)
    try:
        write_state(disk, directory, clean)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return state  # it stays on disk until there is room; doing it again changes nothing
    return clean


def _rebuild_state(disk: Disk, directory: str) -> CompactionState:
    """The file is damaged: compact from the start again, if no swap was half done; otherwise `CorruptLog`.

    Records may be missing anywhere below the newest segment.
    """
    bases = sorted(base for base in map(base_offset_of, disk.list_directory(directory)) if base is not None)
    for base, following in pairwise(bases):
        file = disk.open_readonly(Segment(directory, base).path)
        end = base
        for _, header in walk(file, 0, file.size(), base, WALK_CHUNK_BYTES):
            end = header.base_offset + header.last_offset_delta + 1
        if end > following:
            raise CorruptLog(
                f"{file.path} reaches to offset {end}, into the next segment: a compaction was interrupted and "
                "the file that says how far it had come is damaged"
            )
    logger.warning("how far the log was compacted cannot be read", extra=fields(directory=directory))
    return CompactionState(0, bases[-1] if bases else 0)
