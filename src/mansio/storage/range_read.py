"""Reading a stretch of offsets that somebody chose, and not all that follows it.

Always true: what is read are whole batches below the limit, from the one that holds the first offset up to the one that
holds the last, or up to fewer; nothing here changes a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.log import PLACES_MAX
from mansio.storage.log_slice import LogSlice
from mansio.storage.segment import PREFIX_BYTES, walk

if TYPE_CHECKING:
    from mansio.storage.log import Log


def read_range(
    log: Log, first_offset: int, last_offset: int, max_bytes: int, limit_offset: int
) -> LogSlice | None:
    """The batches that hold `first_offset` to `last_offset`, out of one segment; raises what `Log.read` raises.

    At most `max_bytes`, but at least one batch; so it may end early. Its `next_offset` is behind its last batch. Where
    compaction took all of the stretch it is the batch that follows.
    """
    found = log.read(first_offset, max_bytes, limit_offset)
    if found is None or found.next_offset <= last_offset + 1:
        return found
    segment = log.table.from_offset(found.next_offset - 1)[0]
    start = max(log.files.index(segment).floor_offset(last_offset - segment.base_offset), found.position)
    end = found.position + found.length
    for position, header in walk(found.file, start, end, segment.base_offset):
        if header.base_offset + header.last_offset_delta >= last_offset:
            next_offset = header.base_offset + header.last_offset_delta + 1
            stop = position + header.batch_length + PREFIX_BYTES
            if stop < end and next_offset not in log.places:
                if len(log.places) >= PLACES_MAX:
                    del log.places[next(iter(log.places))]
                log.places[next_offset] = (segment, stop)
            return LogSlice(found.file, found.position, stop - found.position, next_offset)
    return found
