"""What compaction does beside Spark: files written, and exchanged for those of the run before in one commit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitStateUnknownException

from mansio.iceberg.archive.table import ArchiveTable
from mansio.iceberg.archive.table_format import TABLE_SCHEMA
from mansio.iceberg.archive.task_files import write_files
from mansio.iceberg.data_files import WrittenFile, parse_written_file
from mansio.iceberg.errors import CommitConflict, NotAnArchiveTable
from mansio.pipelines.compact import COMPACTED_OFFSETS_PROPERTY, open_target_table, replace_rows
from support.archive_tables import Archive, row

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> ArchiveTable:
    return Archive(tmp_path / "warehouse").open()


def opened(source: ArchiveTable) -> ArchiveTable:
    """A handle of its own, as another run would have."""
    table = open_target_table(source, "latest")
    return ArchiveTable(table, source.topic, table.location())


def written(table: ArchiveTable, *counts: int) -> list[WrittenFile]:
    """The files of one run: a task for each number of rows, which come in two batches."""
    files: list[WrittenFile] = []
    for task, count in enumerate(counts):
        rows = pa.RecordBatch.from_pylist([row(task, offset) for offset in range(count)], TABLE_SCHEMA)
        batches = iter([rows.slice(0, 1), rows.slice(1), rows.slice(0, 0)])
        for result in write_files(table.data_location, "compact", TABLE_SCHEMA, batches):
            (one,) = result.to_pylist()
            files.append(parse_written_file(one["file"]))
            assert files[-1].rows == count
    return files


def rows_in(source: ArchiveTable) -> list[dict[str, Any]]:
    files = [task.file.file_path for task in opened(source).iceberg.scan().plan_files()]
    return [
        one
        for path in sorted(files)
        for one in pq.read_table(path.removeprefix("file://"), partitioning=None).to_pylist()
    ]


def test_files_of_a_run_take_the_place_of_those_before_and_an_empty_run_empties_the_table(
    source: ArchiveTable,
) -> None:
    for number, counts in enumerate(((5, 0, 3), (4,), ())):
        table = opened(source)
        files = written(table, *counts)
        assert len(files) == sum(count > 0 for count in counts)
        replace_rows(table, files, {0: number})
        assert len(rows_in(source)) == sum(counts)
        assert opened(source).iceberg.properties[COMPACTED_OFFSETS_PROPERTY] == f'{{"0":{number}}}'


def test_run_that_was_overtaken_reports_it_and_changes_nothing(source: ArchiveTable) -> None:
    slow, fast = opened(source), opened(source)
    replace_rows(fast, written(fast, 4), {0: 4})
    with pytest.raises(CommitConflict, match="run it again"):
        replace_rows(slow, written(slow, 9), {0: 9})
    assert len(rows_in(source)) == 4


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_exchange_of_unknown_outcome_is_looked_up(
    source: ArchiveTable, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    replace_rows(opened(source), written(opened(source), 4), {0: 4})
    table = opened(source)
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)  # type: ignore[arg-type]
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    with nullcontext() if landed else pytest.raises(CommitConflict, match="it is not there"):
        replace_rows(table, written(table, 6), {0: 6})
    assert len(rows_in(source)) == (6 if landed else 4)
    assert opened(source).iceberg.properties[COMPACTED_OFFSETS_PROPERTY] == (
        '{"0":6}' if landed else '{"0":4}'
    )


def test_table_that_compaction_did_not_make_is_left_alone(source: ArchiveTable) -> None:
    with pytest.raises(NotAnArchiveTable, match="was not made by"):
        open_target_table(source, source.topic)
