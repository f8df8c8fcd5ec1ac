"""Taking back the end of a log, as a follower does whose leader changed (KIP-101).

The rule: first the checkpoint is lowered (were it ahead of the log, the next opening would report loss), then segments
go, newest first, then the last one is shortened. Always true: a crash in between leaves a log that opens with some past
that was right, and what is left when this returns is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.log.checkpoint import CHECKPOINT_NAME, Checkpoint, write_both_slots
from mansio.log.index import SparseIndex
from mansio.log.recovery import EPOCHS_NAME, remove_segment_files
from mansio.log.sealed import write_sealed
from mansio.log.segment import WALK_CHUNK_BYTES, walk
from mansio.log.times import TIMES_NAME

if TYPE_CHECKING:
    from mansio.log.epochs import EpochList
    from mansio.log.files import FileCache
    from mansio.log.ledger import Ledger
    from mansio.log.segment import Segment
    from mansio.log.table import SegmentTable
    from mansio.ports import Disk


def take_back(
    disk: Disk,
    table: SegmentTable,
    files: FileCache,
    ledger: Ledger,
    epochs: EpochList,
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
    ledger.generation += 1
    sequence, start = ledger.checkpoint.sequence + 1, min(start_offset, end_offset)
    checkpoint = Checkpoint(sequence, end_offset, segment.base_offset, position, start, ledger.epoch_due)
    if end_offset < ledger.end_offset:
        ledger.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
    index = SparseIndex(index_interval_bytes)
    for where, header in walk(files.file(segment), 0, position, segment.base_offset, WALK_CHUNK_BYTES):
        index.add(header.base_offset - segment.base_offset, where, header.max_timestamp_ms)
    for gone in reversed(table.from_offset(segment.base_offset)[1:]):
        gone.file = None
        remove_segment_files(disk, gone)
    for path in (segment.index_path, f"{directory}/{TIMES_NAME}"):
        if disk.exists(path):
            disk.remove(path)
    file = segment.file or disk.open(segment.path)
    file.truncate(position)
    ledger.sync_closed_before(segment)
    file.sync()
    disk.sync_directory(directory)
    if epochs.truncate_to(end_offset) or ledger.epochs_dirty:
        write_sealed(disk, f"{directory}/{EPOCHS_NAME}", epochs.encode(), durable=True)
    if end_offset > ledger.end_offset:
        # The log was trimmed beyond its durable end, into a batch that went: only a checkpoint explains the gap.
        ledger.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
    table.drop_after(segment)
    segment.file, segment.index, segment.max_timestamp_ms = file, index, None
    segment.size, segment.end_offset = position, end_offset
    ledger.truncated(segment, position, end_offset)
