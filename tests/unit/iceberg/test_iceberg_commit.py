"""A batch is in the archive exactly once: after any crash, repeat, race or expiry. Real catalogs and files, no JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table.update import update_table_metadata

from mansio.iceberg import commit
from mansio.iceberg.archive import commit as archive_commit
from mansio.iceberg.archive.commit import CommitDecision, decide_commit
from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_format import Commit, LostRange, WrittenRange
from mansio.iceberg.data_files import WrittenFile
from mansio.iceberg.errors import ArchiveGap, CommitConflict, ConcurrentArchive, InvalidDataFiles
from support.iceberg import add, expected, held, plan, write_parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def table(tmp_path: Path) -> ArchiveTable:
    return open_table(None, str(tmp_path), "t", create=True)


def other(table: ArchiveTable, tmp_path: Path) -> ArchiveTable:
    """The same table as another process has it."""
    return open_table(None, str(tmp_path), table.topic)


def test_offsets_query_and_batch_are_committed_with_the_rows(table: ArchiveTable, tmp_path: Path) -> None:
    assert table.last_commit() is None
    assert add(table, plan(0, {0: 0, 1: 0}, {0: 5, 1: 3}))
    assert other(table, tmp_path).last_commit() == Commit("q1", 0, {0: 5, 1: 3}, {0: 0, 1: 0})
    assert held(other(table, tmp_path)) == expected({0: 5, 1: 3})


def test_repeat_after_a_crash_between_commit_and_checkpoint_adds_nothing(
    table: ArchiveTable, tmp_path: Path
) -> None:
    batch = plan(0, {0: 0}, {0: 5})
    assert add(table, batch)
    again = other(table, tmp_path)
    outcome = again.commit(batch, write_parts(again, batch))
    assert not outcome.added
    assert outcome.commit.offsets == {0: 5}
    assert held(again) == expected({0: 5})


def test_crash_before_the_commit_leaves_no_row_and_the_repeat_adds_all(table: ArchiveTable) -> None:
    batch = plan(0, {0: 0}, {0: 5})
    write_parts(table, batch)
    assert held(table) == []
    assert add(table, batch)
    assert held(table) == expected({0: 5})


def test_two_archives_of_one_topic_do_not_both_add_the_same_records(
    table: ArchiveTable, tmp_path: Path
) -> None:
    second = other(table, tmp_path)
    assert add(table, plan(0, {0: 0}, {0: 5}, query="one"))
    with pytest.raises(ConcurrentArchive, match="one has moved it on"):
        add(second, plan(0, {0: 0}, {0: 5}, query="two"))
    assert held(other(table, tmp_path)) == expected({0: 5})


def test_race_of_two_archives_inside_the_commit_adds_once(
    table: ArchiveTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other commit lands after ours was judged, before ours reaches the catalog."""
    second = other(table, tmp_path)
    assert add(table, plan(0, {0: 0}, {0: 2}))
    second.refresh()
    original = commit.to_data_file

    def overtaken(*given: object, **named: object) -> object:
        monkeypatch.setattr(commit, "to_data_file", original)
        assert add(table, plan(1, {0: 2}, {0: 5}))
        return original(*given, **named)  # type: ignore[arg-type]

    batch = plan(1, {0: 2}, {0: 5})
    parts = write_parts(second, batch)
    monkeypatch.setattr(commit, "to_data_file", overtaken)
    assert not second.commit(batch, parts).added
    assert held(second) == expected({0: 5})


def test_a_batch_without_records_cannot_be_overtaken_unseen(table: ArchiveTable, tmp_path: Path) -> None:
    """It makes a snapshot too: a commit that was judged before it does not go through on top of it."""
    second = other(table, tmp_path)
    assert table.commit(plan(0, {0: 0}, {0: 4}, query="one"), []).added
    with pytest.raises(ConcurrentArchive):
        add(second, plan(0, {0: 0}, {0: 2}, query="two"))
    table.refresh()
    committed = table.last_commit()
    assert committed is not None
    assert committed.offsets == {0: 4}


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_commit_of_unknown_outcome_is_looked_up_before_it_is_repeated(
    table: ArchiveTable, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)  # type: ignore[arg-type]
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    outcome = table.commit(plan(0, {0: 0}, {0: 5}), write_parts(table, plan(0, {0: 0}, {0: 5})))
    assert outcome.added is not landed
    assert held(table) == expected({0: 5})


def test_endless_conflicts_end_with_an_error(table: ArchiveTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise CommitFailedException("Requirement failed: branch main has changed")

    monkeypatch.setattr(commit, "COMMIT_RETRY_BACKOFF_S", 0)
    monkeypatch.setattr(table.iceberg.catalog, "commit_table", refuse)
    with pytest.raises(CommitConflict, match="16 attempts"):
        add(table, plan(0, {0: 0}, {0: 1}))


def test_batch_above_the_table_is_refused_as_a_gap(table: ArchiveTable) -> None:
    add(table, plan(0, {0: 0}, {0: 5}))
    with pytest.raises(ArchiveGap, match="missing permanently"):
        add(table, plan(1, {0: 6}, {0: 9}))
    assert held(table) == expected({0: 5})


SHORT, LONG = {0: 5}, {0: 9}


@pytest.mark.parametrize(
    ("last", "start", "end", "query", "batch", "verdict"),
    [
        (None, {0: 7}, {0: 9}, "q", 0, CommitDecision.ACCEPT),
        (SHORT, {0: 5}, {0: 9}, "q", 4, CommitDecision.ACCEPT),
        (SHORT, {0: 5}, {0: 9}, "new", 0, CommitDecision.ACCEPT),  # the checkpoint was lost: offsets decide
        (SHORT, {0: 5, 1: 8}, {0: 9, 1: 9}, "q", 4, CommitDecision.ACCEPT),  # a partition was added
        (SHORT, {0: 5}, {0: 5}, "q", 4, CommitDecision.ALREADY_COMMITTED),
        (SHORT, {0: 2}, {0: 5}, "q", 3, CommitDecision.ALREADY_COMMITTED),
        (LONG, {0: 2}, {0: 5}, "q", 2, CommitDecision.ALREADY_COMMITTED),  # an older checkpoint was put back
        (LONG, {0: 5}, {0: 12}, "q", 3, CommitDecision.CONFLICT),  # a batch that is only half in
        (LONG, {0: 5}, {0: 9}, "new", 0, CommitDecision.CONFLICT),
        (
            LONG,
            {0: 5},
            {0: 9},
            "q",
            4,
            CommitDecision.CONFLICT,
        ),  # a later batch cannot have been committed yet
        (SHORT, {0: 6}, {0: 9}, "q", 4, CommitDecision.GAP),
        (SHORT, {0: 2, 1: 0}, {0: 5, 1: 4}, "q", 3, CommitDecision.CONFLICT),  # half of it is new
    ],
)
def test_commit_decision_for_each_state_of_the_table(
    last: dict[int, int] | None,
    start: dict[int, int],
    end: dict[int, int],
    query: str,
    batch: int,
    verdict: CommitDecision,
) -> None:
    stands = None if last is None else Commit("q", 3, last)
    assert decide_commit(stands, plan(batch, start, end, query)) is verdict


def test_partitions_that_a_batch_is_not_about_keep_their_offsets(table: ArchiveTable) -> None:
    add(table, plan(0, {0: 0, 1: 0}, {0: 5, 1: 3}))
    add(table, plan(1, {1: 3}, {1: 4}))
    assert table.last_commit() == Commit("q1", 1, {0: 5, 1: 4}, {0: 0, 1: 0})


def test_repeat_from_before_the_archive_began_is_not_taken_for_archived() -> None:
    stands = Commit("q", 3, {0: 9}, {0: 4})
    assert decide_commit(stands, plan(1, {0: 0}, {0: 3}, "q")) is CommitDecision.CONFLICT


def part(first: int, last: int, rows: int | None = None, partition: int = 0) -> WrittenRange:
    file = WrittenFile("file:///p", last - first + 1 if rows is None else rows, 1, (partition,))
    return WrittenRange(file, partition, first, last)


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 9)],
        [part(4, 6), part(6, 8)],
        [part(3, 4)],
        [part(5, 6, rows=3)],
        [part(5, 6, rows=0)],
        [part(5, 6, partition=1)],
    ],
    ids=["too-wide", "overlap", "too-early", "too-many-rows", "no-rows", "other-partition"],
)
def test_files_that_do_not_fit_the_plan_are_refused(table: ArchiveTable, parts: list[WrittenRange]) -> None:
    with pytest.raises(InvalidDataFiles):
        table.commit(plan(0, {0: 4}, {0: 9}), parts)
    assert table.last_commit() is None


def test_file_that_changed_since_its_task_wrote_it_is_refused(table: ArchiveTable) -> None:
    batch = plan(0, {0: 0}, {0: 5})
    (written,) = write_parts(table, batch)
    (shorter,) = write_parts(table, plan(0, {0: 0}, {0: 4}))
    path = written.file.path.removeprefix("file://")
    with open(shorter.file.path.removeprefix("file://"), "rb") as source, open(path, "wb") as target:
        target.write(source.read())
    with pytest.raises(InvalidDataFiles, match="its task wrote 5 rows"):
        table.commit(batch, [written])
    assert held(table) == []


def test_old_snapshots_go_with_the_commit_but_tagged_ones_and_offsets_stay(table: ArchiveTable) -> None:
    add(table, plan(0, {0: 0}, {0: 1}))
    tagged = table.iceberg.current_snapshot()
    assert tagged is not None
    table.iceberg.manage_snapshots().create_tag(tagged.snapshot_id, "first").commit()
    for batch in range(1, 9):
        batch_plan = plan(batch, {0: batch}, {0: batch + 1})
        archive_commit.commit_batch(
            table.iceberg, batch_plan, write_parts(table, batch_plan), snapshots_max=5
        )
        assert len(table.iceberg.metadata.snapshots) <= 6
    assert table.iceberg.metadata.snapshot_by_id(tagged.snapshot_id) is not None
    assert held(table) == expected({0: 9})
    assert sum(file.rows for file in table.live_files(snapshot_id=tagged.snapshot_id)) == 1


def test_maintenance_that_commits_between_does_not_disturb_a_batch(
    table: ArchiveTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(table, plan(0, {0: 0}, {0: 2}))
    maintenance = other(table, tmp_path)
    original: Callable[..., object] = commit.to_data_file

    def between(*given: object, **named: object) -> object:
        monkeypatch.setattr(commit, "to_data_file", original)
        with maintenance.transaction() as change:
            change.update_snapshot().merge_append().commit()
        return original(*given, **named)

    batch = plan(1, {0: 2}, {0: 5})
    parts = write_parts(table, batch)
    monkeypatch.setattr(commit, "to_data_file", between)
    outcome = table.commit(batch, parts)
    assert (outcome.added, outcome.attempts) == (True, 2)
    assert held(table) == expected({0: 5})


def test_what_the_log_deleted_before_it_was_archived_is_skipped_once_and_listed(
    table: ArchiveTable, tmp_path: Path
) -> None:
    assert table.skip_to_log_start({0: 9}) == ()
    add(table, plan(0, {0: 0, 1: 0}, {0: 5, 1: 5}))
    for _ in range(2):
        other(table, tmp_path).skip_to_log_start({0: 8, 1: 3, 2: 4})
    add(table, plan(1, {0: 8, 1: 5, 2: 4}, {0: 9, 1: 5, 2: 6}))
    assert table.added_records("q1") == {0: 10, 1: 3}
    assert table.lost_ranges() == (LostRange(0, 5, 8), LostRange(2, 0, 4)), (
        "2 came later: all of it was wanted"
    )
    committed = table.last_commit()
    assert committed is not None
    assert committed.first_offsets == {0: 0, 1: 0, 2: 0}
    rows = [(partition, offset) for partition, offset, _ in held(table)]
    assert rows == [(0, n) for n in (0, 1, 2, 3, 4, 8)] + [(1, n) for n in range(5)] + [(2, 4), (2, 5)]


def test_a_commit_copies_the_metadata_a_few_times_and_not_at_every_look(
    table: ArchiveTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps commit 1,000 as cheap as commit 10; it leans on how the library keeps its updates."""
    computed = 0
    original = update_table_metadata

    def count(*given: object, **named: object) -> object:
        nonlocal computed
        computed += 1
        return original(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "update_table_metadata", count)
    assert add(table, plan(0, {0: 0}, {0: 5}))
    assert 1 <= computed <= 4
