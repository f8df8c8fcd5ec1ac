"""One commit, one rewrite and one description of files for archives and result tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.io.pyarrow import parquet_file_to_data_file

from mansio.errors import ConfigError
from mansio.iceberg import commit
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.commit import commit_files, commit_with_retries, expirable_snapshots, to_data_file
from mansio.iceberg.data_files import WrittenFile, parse_written_file
from mansio.iceberg.errors import InvalidDataFiles
from mansio.iceberg.rewrite import LiveDataFile, RewrittenGroup, replace_groups
from mansio.iceberg.snapshot_files import SnapshotFiles, SnapshotReader
from support.archive_tables import Archive, row, rows_of
from support.iceberg import plan, write_parts

if TYPE_CHECKING:
    from mansio.iceberg.archive.table import ArchiveTable


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


def filled(archive: Archive, batches: int = 3) -> ArchiveTable:
    table = archive.open()
    for _ in range(batches):
        archive.add(table, {0: 7})
    return table


def merged_group(archive: Archive, table: ArchiveTable) -> RewrittenGroup:
    """All files of the table, and a file that replaces them."""
    sources = [LiveDataFile(file.path, file.rows, file.bytes) for file in table.live_files()]
    rows = [row(0, offset) for offset in range(sum(file.rows for file in sources))]
    return RewrittenGroup(tuple(sources), (archive.write(table, rows).file,))


def names(table: ArchiveTable) -> set[str]:
    return {file.path for file in table.live_files()}


def test_manifest_entry_of_an_archive_file_is_the_one_that_the_library_makes(tmp_path: Path) -> None:
    """The partition is taken from the report of the task and not from statistics, and is the same."""
    table = open_table(None, str(tmp_path), "t", create=True)
    for part in write_parts(table, plan(0, {0: 0, 3: 5}, {0: 4, 3: 9})):
        mine = to_data_file(table.iceberg, part.file)
        theirs = parquet_file_to_data_file(table.iceberg.io, table.iceberg.metadata, part.file.path)
        assert mine == theirs
        assert repr(mine) == repr(theirs)


def test_description_of_a_file_survives_the_way_from_the_task_to_the_driver() -> None:
    for file in (WrittenFile("s3://b/ü.parquet", 3, 99), WrittenFile("p", 1, 2, (None, 7, "x", True), True)):
        assert parse_written_file(file.to_json()) == file


def test_file_with_values_of_another_partition_spec_is_refused(archive: Archive) -> None:
    table = filled(archive, 1)
    file = archive.write(table, [row(0, 9)]).file
    with pytest.raises(InvalidDataFiles, match=r"the partition spec of mansio\.flights was changed"):
        to_data_file(table.iceberg, replace(file, partition=(0, 1)))


def test_new_files_of_a_group_that_was_replaced_already_are_deleted(archive: Archive) -> None:
    table, other = filled(archive), archive.open()
    group = merged_group(archive, table)
    rewrite_data_files(other)
    assert replace_groups(table, [group], has_same_rows=False) == []
    assert not Path(group.files[0].path.removeprefix("file://")).exists()
    assert names(table) == names(archive.open())


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_rewrite_of_unknown_outcome_counts_once(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    table = filled(archive)
    group = merged_group(archive, table)
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: Any) -> Any:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    assert replace_groups(table, [group], has_same_rows=True) == [group]
    assert names(archive.open()) == {group.files[0].path}
    snapshot = table.iceberg.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation.value == "replace"


def test_files_with_row_level_deletes_of_another_engine_are_not_rewritten(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged file would have the deleted rows again."""
    table = filled(archive)
    before = names(table)
    group = merged_group(archive, table)
    refused: list[SnapshotFiles] = []

    def refuse(_table: object, files: SnapshotFiles) -> None:
        refused.append(files)
        raise ConfigError("deleted rows")

    monkeypatch.setattr(commit, "refuse_row_level_deletes", refuse)
    with pytest.raises(ConfigError, match="deleted rows"):
        replace_groups(table, [group], has_same_rows=False)
    assert names(archive.open()) == before
    assert len(refused) == 1


def test_commit_removes_adds_and_sets_properties_in_one_snapshot(archive: Archive) -> None:
    table = filled(archive, 2)
    live = SnapshotReader().read(table.iceberg)
    group = merged_group(archive, table)
    before = len(table.iceberg.metadata.snapshots)
    snapshot_id = commit_files(
        table.iceberg,
        group.files,
        list(live.data_files()),
        live=live,
        properties={"a": "1"},
        summary={"b": "2"},
        expired=[table.iceberg.metadata.snapshots[0].snapshot_id],
    )
    again = archive.open()
    assert again.iceberg.properties["a"] == "1"
    found = again.iceberg.current_snapshot()
    assert found is not None
    assert found.snapshot_id == snapshot_id
    assert found.summary is not None
    assert found.summary["b"] == "2"
    assert len(again.iceberg.metadata.snapshots) == before
    assert names(again) == {group.files[0].path}


def test_attempts_are_numbered_and_each_but_the_first_sees_a_refreshed_table(archive: Archive) -> None:
    table, other = filled(archive, 1), archive.open()
    seen: list[tuple[int, int]] = []

    def attempt(number: int) -> str:
        seen.append((number, len(table.live_files())))
        if number < 3:
            archive.add(other, {0: 1})
            raise CommitStateUnknownException("lost")
        return "done"

    assert commit_with_retries(table.iceberg, attempt, "never", backoff_s=0) == "done"
    assert seen == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("kept", "count_min", "is_current_kept", "expired"),
    [(2, 6, True, []), (2, 5, True, [1, 2]), (0, 1, False, [1, 2, 3, 4]), (0, 1, True, [1, 2, 3])],
)
def test_snapshots_with_a_tag_stay_and_the_newest_ones(
    archive: Archive, kept: int, count_min: int, is_current_kept: bool, expired: list[int]
) -> None:
    table = filled(archive, 5)
    snapshots = table.iceberg.metadata.snapshots
    table.iceberg.manage_snapshots().create_tag(snapshots[0].snapshot_id, "first").commit()
    found = expirable_snapshots(
        table.iceberg.metadata, kept=kept, count_min=count_min, is_current_kept=is_current_kept
    )
    assert [[one.snapshot_id for one in snapshots].index(one) for one in found] == expired


def test_archive_reads_the_same_rows_after_a_replacement(archive: Archive) -> None:
    table = filled(archive)
    before = rows_of(scan(table))
    replace_groups(table, [merged_group(archive, table)], has_same_rows=False)
    assert rows_of(scan(archive.open())) == before
