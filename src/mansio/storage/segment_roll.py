"""The turn from one segment to the next, and the other rare parts of an append: refusals, room ahead, a full disk.

`Log` hands itself in. Always true: a segment is closed with its file ending where its last batch ends; one that could
not be begun leaves the log as it was, or ends its service.
"""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING

from mansio.errors import FencedLeaderEpoch, StorageError
from mansio.storage.flush.flush_jobs import NO_ROOM
from mansio.storage.index import SparseIndex
from mansio.storage.segment import Segment, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, read_header

if TYPE_CHECKING:
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

RELATIVE_OFFSET_MAX = (1 << 31) - 1
UNKNOWN_AGE = -math.inf
"""When the newest segment of a log that was just opened is to be closed: its first append finds out."""

_NOTHING_OPENED = NO_ROOM | {errno.EMFILE, errno.ENFILE}


def prepare_append(log: Log, position: int, size: int, leader_epoch: int, header: BatchHeader) -> Segment:
    """The rare part of `append`: refuse, begin an epoch, close the segment. The segment to write to."""
    if log.failure is not None:
        raise log.failure
    if log.closed:
        raise StorageError(f"the log {log.directory} is closed")
    if log.roll_at == UNKNOWN_AGE:
        log.roll_at = log.clock.monotonic() - age_s(log) + log.settings.segment_ms / 1000
    if leader_epoch < log.leader_epochs.last:
        raise FencedLeaderEpoch(
            f"{log.directory}: leader epoch {leader_epoch} is older than {log.leader_epochs.last}"
        )
    now = log.clock.monotonic()
    if log.end_offset - log.active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX:
        begin_segment(log, now)  # an empty one, too: there may be a gap behind its base
    elif position == 0:
        log.roll_at = now + log.settings.segment_ms / 1000
    elif position + size > log.settings.segment_bytes or now >= log.roll_at:
        begin_segment(log, now)
    if log.leader_epochs.assign(leader_epoch, log.end_offset):
        log.flush_state.epochs_dirty = True
    active = log.active
    try:
        log.room.make(log.disk, active, active.size + size, log.settings.segment_bytes)
    except OSError as error:
        raise append_failed(log, error, active.size) from error
    return active


def age_s(log: Log) -> float:
    """How long ago the newest segment was begun, by its first batch's timestamp (as in Kafka): 0 where that does not
    tell, `segment_ms` at most.
    """
    active = log.active
    if active.size < HEADER_BYTES:
        return 0.0
    try:
        header = read_header(read_exactly(log.files.file(active), HEADER_BYTES, 0))
    except StorageError:
        return 0.0  # whoever reads it is told
    if header.max_timestamp_ms < 0:
        return 0.0
    age_ms = log.clock.wall_ms() - header.max_timestamp_ms
    return min(max(age_ms, 0), log.settings.segment_ms) / 1000


def begin_segment(log: Log, now: float) -> None:
    """Close the active segment and make the next one. The old one is synced before an end in the new one counts."""
    segment = Segment(log.directory, log.end_offset)
    try:
        log.room.trim_to_size(log.active)
        segment.file = log.disk.open(segment.path, create=True)
    except OSError as error:
        if error.errno in _NOTHING_OPENED:
            raise StorageError(f"cannot begin the segment {segment.path}: {error}") from error
        raise log.fail(error, f"cannot begin the segment {segment.path}") from error
    try:
        segment.file.truncate(0)  # left over from an attempt before a restart
    except OSError as error:
        # The file is there: a batch that went beyond its base offset now would be lost.
        raise log.fail(error, f"cannot begin the segment {segment.path}") from error
    segment.index = SparseIndex(log.settings.index_interval_bytes)
    closing = log.active
    log.flush_state.segment_closed(closing)
    log.table.add(segment)
    log.active = segment
    log.room.begin(0)
    log.roll_at = now + log.settings.segment_ms / 1000
    if closing.end_offset <= log.start_offset:
        log.drop_trimmed()


def append_failed(log: Log, error: OSError, position: int) -> StorageError:
    """What a write that failed means: without space it is taken back, otherwise the log has failed."""
    message = f"cannot write to {log.active.path}"
    if error.errno in NO_ROOM:
        try:
            log.room.cut(log.active, position)
        except OSError as second:
            return log.fail(second, message)
        return StorageError(f"{message}: {error}")
    return log.fail(error, message)


def roll(log: Log) -> bool:
    """See `Log.roll`."""
    if log.failure is not None:
        raise log.failure
    if log.closed:
        raise StorageError(f"the log {log.directory} is closed")
    if log.end_offset == log.active.base_offset:
        return False
    begin_segment(log, log.clock.monotonic())
    return True
