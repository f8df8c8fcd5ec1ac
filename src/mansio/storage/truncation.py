"""Taking back the end of a log, as a follower does whose leader changed (KIP-101).

The rule: first the checkpoint is lowered (were it ahead of the log, the next opening would report loss), then segments
go, newest first, then the last one is shortened. Always true: a crash in between leaves a log that opens with some past
that was right, and what is left when this returns is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_both_slots
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.index import SparseIndex
from mansio.storage.recovery.recovery import EPOCHS_NAME, remove_segment_files
from mansio.storage.segment import WALK_CHUNK_BYTES, walk
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.file_cache import FileCache
    from mansio.storage.flush.flush_state import FlushState
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.storage.segment import Segment
    from mansio.storage.segment_list import SegmentList


def take_back(
    disk: Disk,
    table: SegmentList,
    files: FileCache,
    flush_state: FlushState,
    epochs: LeaderEpochCache,
    *,
    segment: Segment,
    position: int,
    end_offset: int,
    start_offset: int,
    index_interval_bytes: int,
) -> None:
    """Shorten a log to `position` of `segment`, where `end_offset` is. Blocks; raises `OSError`.

    On return `segment` is the active one, with its file and index. No sync or housekeeping of the log may run.
    """
    directory = segment.directory
    flush_state.generation += 1
    sequence, start = flush_state.checkpoint.sequence + 1, min(start_offset, end_offset)
    checkpoint = Checkpoint(sequence, end_offset, segment.base_offset, position, start, flush_state.epoch_due)
    if end_offset < flush_state.end_offset:
        flush_state.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
    index = SparseIndex(index_interval_bytes)
    for where, header in walk(files.file(segment), 0, position, segment.base_offset, WALK_CHUNK_BYTES):
        index.add(header.base_offset - segment.base_offset, where, header.max_timestamp_ms)
    for gone in reversed(table.from_offset(segment.base_offset)[1:]):
        gone.file = None
        remove_segment_files(disk, gone)
    for path in (segment.index_path, f"{directory}/{TIMESTAMPS_NAME}"):
        if disk.exists(path):
            disk.remove(path)
    file = segment.file or disk.open(segment.path)
    file.truncate(position)
    flush_state.sync_closed_before(segment)
    file.sync()
    disk.sync_directory(directory)
    if epochs.truncate_to(end_offset) or flush_state.epochs_dirty:
        write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", epochs.encode(), durable=True)
    if end_offset > flush_state.end_offset:
        # The log was trimmed beyond its durable end, into a batch that went: only a checkpoint explains the gap.
        flush_state.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
    table.drop_after(segment)
    segment.file, segment.index, segment.max_timestamp_ms = file, index, None
    segment.size, segment.end_offset = position, end_offset
    flush_state.truncated(segment, position, end_offset)
