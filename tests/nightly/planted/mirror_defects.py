"""Defects of one line in mirrors between clusters. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MIRROR = "tests/component/pipelines/test_mirror.py"
MAP = "tests/unit/pipelines/test_mirror_offset_map.py"

MIRROR_DEFECTS = (
    Defect(
        "mirrored record goes back to where it came from",
        "pipelines/mirroring/mirror.py",
        "if passed.any():",
        "if False:",
        (f"{MIRROR}::test_mirrors_in_both_directions_copy_each_record_once",),
    ),
    Defect(
        "mirror reads its position before it fences others",
        "pipelines/mirroring/mirror.py",
        "copy.take_over()",
        "pass",
        (f"{MIRROR}::test_a_second_mirror_of_a_topic_fences_the_first_one",),
    ),
    Defect(
        "mirror copies records of open transactions",
        "pipelines/mirroring/mirror.py",
        "listed = self._source.run(list_offsets(self._source.cluster, wanted, isolation_level=READ_COMMITTED))",
        "listed = self._source.run(list_offsets(self._source.cluster, wanted))",
        (f"{MIRROR}::test_a_mirror_waits_for_the_end_of_a_transaction",),
    ),
    Defect(
        "group goes back on the target of a mirror",
        "pipelines/mirroring/group_offsets.py",
        "if known < offset.offset:",
        "if place is not None:",
        (f"{MIRROR}::test_offsets_of_a_group_only_go_forward_and_never_under_its_members",),
    ),
    Defect(
        "offset map ignores gaps of the source",
        "pipelines/mirroring/offset_map.py",
        "breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(targets) != 1)) + 1",
        "breaks = np.flatnonzero(np.diff(targets) != 1) + 1",
        (f"{MAP}::test_a_reader_continues_with_exactly_the_records_that_it_has_not_read",),
    ),
    Defect(
        "offset behind a run translates beyond unread records",
        "pipelines/mirroring/offset_map.py",
        "return self._targets[at] + min(offset - self._sources[at], self._counts[at])",
        "return self._targets[at] + offset - self._sources[at]",
        (f"{MAP}::test_a_reader_continues_with_exactly_the_records_that_it_has_not_read",),
    ),
)
