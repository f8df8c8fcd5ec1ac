"""Plan of a search by key or id (`record_search`): the files of a log in which a range of offsets is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.storage.record_search import SearchedFile, SkippedOffsets

if TYPE_CHECKING:
    from mansio.ports import DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.storage.segment_list import SegmentList


class SearchPlan(NamedTuple):
    """The open files to search, and what of each; `skipped`: segments that cannot be opened."""

    opened: list[DiskFile]
    files: list[SearchedFile]
    skipped: list[SkippedOffsets]
    end_offset: int
    """The plan ends here, or at the end of the search if that is before it."""


def plan_search(
    segments: SegmentList, files: FileCache, offset: int, end_offset: int, files_max: int
) -> SearchPlan:
    """Return the files that have the offsets from `offset` to below `end_offset`, at most `files_max` of them. A file
    stays readable as long as the plan refers to it, also if its segment is deleted or compacted."""
    plan = SearchPlan([], [], [], offset)
    for segment in segments.segments_from(offset)[:files_max]:
        if segment.base_offset >= end_offset:
            break
        try:
            position = 0
            if segment.base_offset < offset:
                position, _ = segments.batch_position(segment, offset)
            file = files.file(segment)
        except StorageError as error:
            first = max(segment.base_offset, offset)
            plan.skipped.append(SkippedOffsets(first, segment.end_offset, error.message))
        else:
            plan.opened.append(file)
            plan.files.append(SearchedFile(position, segment.size, segment.base_offset, segment.end_offset))
        plan = plan._replace(end_offset=segment.end_offset)
    return plan


def bytes_between(segments: SegmentList, files: FileCache, offset: int, end_offset: int) -> int:
    """Return about how many bytes the batches of a range of offsets have: up to an interval of the index less or more
    at each end, or a whole segment whose index cannot be read."""
    total = 0
    for segment in segments.segments_from(offset):
        if segment.base_offset >= end_offset:
            break
        begin, end = 0, segment.size
        try:
            if segment.base_offset < offset:
                begin = files.index(segment).position_before_offset(offset - segment.base_offset)
            if end_offset < segment.end_offset:
                end = files.index(segment).position_before_offset(end_offset - segment.base_offset)
        except StorageError:
            pass  # the search of the segment reports it
        total += max(end - begin, 0)
    return total
