"""Offset map of a mirror: a translated offset skips nothing that was not read, whatever gaps, thinning and expiry."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.pipelines.mirroring import offset_map
from mansio.pipelines.mirroring.offset_map import OffsetMap, Run, find_runs
from mansio.pipelines.mirroring.passed_clusters import CLUSTER_HEADER, add_cluster, has_passed
from mansio.pipelines.mirroring.target_topics import changed_settings
from mansio.spark.arrow.schema import HEADERS_TYPE
from support.present import present

GAPS = st.integers(0, 3)
RECORDS = st.lists(st.tuples(GAPS, GAPS), min_size=1, max_size=60)
"""For each record the unused offsets before it, in the source and in the target."""


def placed(gaps: list[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """(source offset, target offset) of each record."""
    records, source, target = [], first, first // 2
    for source_gap, target_gap in gaps:
        source, target = source + source_gap, target + target_gap
        records.append((source, target))
        source, target = source + 1, target + 1
    return records


def add(into: OffsetMap, records: list[tuple[int, int]], runs_max: int = 1_000) -> None:
    batches: list[list[int]] = []
    for _, target in records:
        if batches and target == batches[-1][0] + batches[-1][1]:
            batches[-1][1] += 1
        else:
            batches.append([target, 1])
    sources = np.array([source for source, _ in records], np.int64)
    for run in find_runs(sources, [(base, count) for base, count in batches], runs_max):
        into.append(run)


def assert_skips_nothing(found: OffsetMap, records: list[tuple[int, int]], offsets: range) -> None:
    translated = [found.translate(offset) for offset in offsets]
    assert all(before <= after for before, after in pairwise(translated))  # type: ignore[operator]
    for offset, result in zip(offsets, translated, strict=True):
        assert result is not None
        unread = [target for source, target in records if source >= offset]
        assert all(target >= result for target in unread), (offset, result)


@given(RECORDS, st.integers(0, 50))
def test_a_reader_continues_with_exactly_the_records_that_it_has_not_read(
    gaps: list[tuple[int, int]], first: int
) -> None:
    records, found = placed(gaps, first), OffsetMap()
    half = len(records) // 2
    for part in (records[:half], records[half:]):
        if part:
            add(found, part)
    offsets = range(records[-1][0] + 3)
    assert_skips_nothing(found, records, offsets)
    for offset in offsets:
        result = present(found.translate(offset))
        assert [one for one in records if one[1] >= result] == [one for one in records if one[0] >= offset]


@given(RECORDS, st.integers(2, 8), st.integers(1, 5), st.integers(0, 80))
def test_removed_runs_make_a_reader_read_again_and_never_skip(
    gaps: list[tuple[int, int]], runs_max: int, runs_per_round: int, log_start: int
) -> None:
    records, found = placed(gaps, 0), OffsetMap()
    before, offset_map.RUNS_MAX = offset_map.RUNS_MAX, runs_max  # type: ignore[misc]
    try:
        for at in range(0, len(records), 7):
            add(found, records[at : at + 7], runs_per_round)
            known = {run.source for run in found}
            removed = found.thin()
            assert known - {run.source for run in found} == set(removed)
            assert len(found) <= max(runs_max, runs_per_round + runs_max)
    finally:
        offset_map.RUNS_MAX = before  # type: ignore[misc]
    assert_skips_nothing(found, records, range(records[-1][0] + 3))
    exact = {offset: found.translate(offset) for offset in range(log_start, records[-1][0] + 3)}
    found.expire(log_start)
    assert {offset: found.translate(offset) for offset in exact} == exact, "as before, from the log start on"
    assert_skips_nothing(found, records, range(records[-1][0] + 3))


def test_a_map_that_is_full_stays_exact_for_the_newest_half() -> None:
    found = OffsetMap()
    for number in range(offset_map.RUNS_MAX * 4):
        found.append(Run(number * 3, number * 5, 2))
        found.thin()
    assert len(found) <= offset_map.RUNS_MAX
    last = offset_map.RUNS_MAX * 4 - 1
    for number in range(last - offset_map.RUNS_MAX // 4, last):
        assert found.translate(number * 3 + 1) == number * 5 + 1


def test_nothing_mirrored_translates_to_nothing() -> None:
    assert OffsetMap().translate(5) is None


def test_offsets_before_the_first_copy_and_behind_the_last_one() -> None:
    found = OffsetMap([Run(100, 7, 3)])
    assert [found.translate(offset) for offset in (0, 100, 101, 103, 5_000)] == [7, 7, 8, 10, 10]


@given(
    st.lists(
        st.none()
        | st.lists(
            st.tuples(st.sampled_from(("a", CLUSTER_HEADER)), st.sampled_from((None, b"", b"A", b"B"))),
            max_size=4,
        )
    ),
    st.data(),
)
def test_each_record_gets_its_cluster_and_keeps_its_headers(
    rows: list[list[tuple[str, bytes | None]] | None], data: st.DataObject
) -> None:
    column = pa.array(
        [None if row is None else [{"key": key, "value": value} for key, value in row] for row in rows],
        HEADERS_TYPE,
    )
    begin = data.draw(st.integers(0, len(rows)))
    rows, column = rows[begin:], column.slice(begin)
    assert has_passed(column, "B").tolist() == [(CLUSTER_HEADER, b"B") in (row or ()) for row in rows]
    added = add_cluster(column, "C").to_pylist()
    expected = [[*(row or ()), (CLUSTER_HEADER, b"C")] for row in rows]
    assert [[(one["key"], one["value"]) for one in row] for row in added] == expected


def test_settings_that_a_copy_must_not_have_are_not_copied() -> None:
    source = {
        "retention.ms": ("5", True),
        "segment.bytes": ("9", False),
        "message.timestamp.type": ("LogAppendTime", True),
        "mansio.dedup.ms": ("60000", True),
        "of.another.version": ("1", True),
        "max.message.bytes": ("2000000", False),
    }
    target = {name: ("0", False) for name in source if name != "of.another.version"}
    assert changed_settings(source, target) == {"retention.ms": "5", "max.message.bytes": "2004096"}
    target["max.message.bytes"] = ("9000000", False)
    target["retention.ms"] = ("5", True)
    assert changed_settings(source, target) == {}


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_many_batches_cover_each_record_once(seed: int) -> None:
    dice = random.Random(seed)
    records = placed([(dice.choice((0, 0, 0, 2)), dice.choice((0, 0, 1))) for _ in range(500)], 10)
    found = OffsetMap()
    add(found, records)
    covered = [(run.source + at, run.target + at) for run in found for at in range(run.length)]
    assert covered == records
