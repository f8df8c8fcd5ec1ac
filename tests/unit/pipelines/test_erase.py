"""Erasure of keys from archives, dead-letter tables and compacted tables, without Spark and a broker."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitStateUnknownException

from mansio.errors import InvalidRequest
from mansio.iceberg import orphan_cleanup
from mansio.iceberg.archive import erase_keys
from mansio.iceberg.archive.dead_letters import append_dead_letters, open_dead_letters
from mansio.iceberg.archive.parquet_writer import PartitionFileWriter
from mansio.iceberg.archive.table import ArchiveTable
from mansio.iceberg.archive.table_format import DEAD_LETTER_SCHEMA, TABLE_SCHEMA, BatchPlan
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.archive.task_files import write_files
from mansio.iceberg.data_files import parse_written_file
from mansio.iceberg.errors import CommitConflict
from mansio.iceberg.rewrite import replace_groups
from mansio.pipelines.compact import open_target_table, replace_rows
from mansio.pipelines.erase import erase
from mansio.pipelines.maintain import maintain, tag_snapshot
from support.archive_tables import Archive, row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SECRET_KEY = b"customer 17"
SECRET = random.Random(17).randbytes(300)
"""Incompressible, so that it is found in the bytes of a compressed file."""


def batch(partition: int, first: int, count: int, secrets: Sequence[int] = ()) -> list[dict[str, Any]]:
    """So many rows; those at the offsets `secrets` have the secret key and value."""
    return [
        row(partition, offset, **({"key": SECRET_KEY, "value": SECRET} if offset in secrets else {}))
        for offset in range(first, first + count)
    ]


def files_with_secret(warehouse: Path) -> list[Path]:
    """Files that contain the value as bytes, or the key in a column."""

    def has_secret(path: Path) -> bool:
        if SECRET in path.read_bytes():
            return True
        if path.suffix != ".parquet":
            return False
        table = pq.read_table(path, partitioning=None)
        return "key" in table.column_names and SECRET_KEY in table["key"].to_pylist()

    return [path for path in warehouse.rglob("*") if path.is_file() and has_secret(path)]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Three batches of two partitions; the first and the last have the secret, in partition 0."""
    made = Archive(tmp_path / "lake")
    table = made.open()
    made.add(table, {0: batch(0, 0, 40, [3, 4, 39]), 1: batch(1, 0, 10)})
    made.add(table, {0: batch(0, 40, 10)})
    made.add(table, {0: batch(0, 50, 2, [50, 51]), 1: batch(1, 10, 10)})
    return made


def other_rows(table: ArchiveTable) -> list[dict[str, Any]]:
    return [one for one in rows_of(scan(table)) if one["key"] != SECRET_KEY]


def test_rows_of_the_key_are_in_no_file_any_more_and_the_others_are_as_they_were(archive: Archive) -> None:
    table = archive.open()
    before, offsets = other_rows(table), dict(archive.offsets)
    untouched = {file.path for file in table.live_files() if file.first_offset in (0, 40) and file.rows == 10}
    assert len(files_with_secret(archive.warehouse)) == 2, "the search finds them"
    report = erase(table, [SECRET_KEY], grace_s=0)
    assert [(one.table, one.rows, one.files) for one in report.tables] == [("mansio.flights", 5, 2)]
    assert report.files_waiting == 0
    assert files_with_secret(archive.warehouse) == []
    after = archive.open()
    assert rows_of(scan(after)) == before
    assert after.last_commit() == table.last_commit()
    assert after.last_commit() is not None
    assert untouched <= {file.path for file in after.live_files()}
    archive.offsets = offsets
    archive.add(after, {0: batch(0, 52, 5), 1: batch(1, 20, 5)})  # the archive goes on
    assert len(rows_of(scan(archive.open()))) == len(before) + 10
    maintain(archive.open(), grace_s=0)
    assert len(rows_of(scan(archive.open()))) == len(before) + 10
    again = erase(archive.open(), [SECRET_KEY], grace_s=0)
    assert [one.rows for one in again.tables] == [0]


def test_replaced_files_wait_for_the_grace_time_and_a_later_run_deletes_them(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = erase(archive.open(), [SECRET_KEY], grace_s=3_600)
    assert report.files_waiting > 0
    assert len(files_with_secret(archive.warehouse)) == 2
    assert SECRET_KEY not in [one["key"] for one in rows_of(scan(archive.open()))], "no reader finds them"
    clock = orphan_cleanup.remove_orphan_files.__globals__["time"].time
    with monkeypatch.context() as later:
        later.setattr("mansio.iceberg.orphan_cleanup.time.time", lambda: clock() + 3_700)
        assert erase(archive.open(), [SECRET_KEY], grace_s=3_600).tables[0].files_deleted > 0
    assert files_with_secret(archive.warehouse) == []


def test_tags_would_keep_the_rows_and_are_dropped_on_request_only(archive: Archive) -> None:
    tag_snapshot(archive.open(), "first-day")
    with pytest.raises(InvalidRequest, match=r"has the tags first-day, .* --drop-tags"):
        erase(archive.open(), [SECRET_KEY], grace_s=0)
    assert len(files_with_secret(archive.warehouse)) == 2, "nothing was changed"
    erase(archive.open(), [SECRET_KEY], grace_s=0, drop_tags=True)
    assert files_with_secret(archive.warehouse) == []
    with pytest.raises(InvalidRequest, match="1 to 100,000 keys"):
        erase(archive.open(), [])


def test_commit_of_the_archive_in_between_does_not_bring_rows_back(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = replace_groups
    other = archive.open()

    def replace_after_a_commit(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(erase_keys, "replace_groups", replace)
        archive.add(other, {0: batch(0, 52, 4, [53])})
        return replace(*given, **named)

    monkeypatch.setattr(erase_keys, "replace_groups", replace_after_a_commit)
    report = erase(archive.open(), [SECRET_KEY], grace_s=0)
    assert report.tables[0].rows == 6, "the new file is found by the next pass"
    assert files_with_secret(archive.warehouse) == []
    assert archive.open().last_commit() == other.last_commit()


def test_erased_rows_are_counted_if_the_answer_of_the_catalog_was_lost(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = archive.open()
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: Any) -> Any:
        monkeypatch.setattr(catalog, "commit_table", original)
        original(*given)
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    report = erase(table, [SECRET_KEY], grace_s=0)
    assert (report.tables[0].rows, report.tables[0].files) == (5, 2)
    assert files_with_secret(archive.warehouse) == []


def test_erasure_gives_up_if_files_are_replaced_without_end(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erase_keys, "replace_groups", lambda *_, **__: [])
    with pytest.raises(CommitConflict, match="maintenance job running"):
        erase(archive.open(), [SECRET_KEY], grace_s=0)


def test_killed_erasure_is_completed_by_the_next_one(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = other_rows(archive.open())
    for step in ("replace_groups", "remove_orphan_files"):
        with monkeypatch.context() as patched:
            patched.setattr(erase_keys, step, killed)
            with pytest.raises(KeyboardInterrupt):
                erase(archive.open(), [SECRET_KEY], grace_s=0)
        assert other_rows(archive.open()) == before
    erase(archive.open(), [SECRET_KEY], grace_s=0)
    assert files_with_secret(archive.warehouse) == []
    assert rows_of(scan(archive.open())) == before


@pytest.mark.full
def test_compacted_and_dead_letter_tables_are_erased_too(archive: Archive) -> None:
    source = archive.open()
    latest = ArchiveTable(open_target_table(source, "flights-latest"), source.topic, source._catalog_address)
    rows = pa.RecordBatch.from_pylist(batch(0, 0, 8, [5]), TABLE_SCHEMA)
    (written,) = write_files(latest.data_location, "compact", TABLE_SCHEMA, iter([rows]))
    replace_rows(latest, [parse_written_file(written["file"][0].as_py())], {0: 8})

    dead_letters = open_dead_letters(source, create=True)
    assert dead_letters is not None
    writer = PartitionFileWriter(dead_letters.data_location, "dead", schema=DEAD_LETTER_SCHEMA)
    found = [
        {"offset": 0, "kind": "record", "key": SECRET_KEY, "value": SECRET},
        {"offset": 1, "kind": "record", "key": b"other", "value": b"kept"},
        {"offset": 2, "kind": "batch", "key": None, "value": b"whole " + SECRET_KEY + SECRET},
        {"offset": 3, "kind": "batch", "key": None, "value": b"compressed"},
    ]
    full = [{"partition": 0, "last_offset": one["offset"], "reason": "r", **one} for one in found]
    names = ["partition", "offset", "last_offset", "kind", "reason", "key", "value"]
    types = dict(zip(names, (field.type for field in DEAD_LETTER_SCHEMA), strict=True))
    writer.write(
        pa.RecordBatch.from_pydict(
            {name: pa.array([one[name] for one in full], types[name]) for name in names}
        )
    )
    append_dead_letters(dead_letters, BatchPlan("q", 0, {0: 0}, {0: 4}), writer.close())

    assert len(files_with_secret(archive.warehouse)) == 4
    report = erase(archive.open(), [SECRET_KEY], grace_s=0)
    assert [(one.table, one.rows) for one in report.tables] == [
        ("mansio.flights", 5),
        ("mansio.flights-latest", 1),
        ("mansio_dead_letters.flights", 2),
    ]
    assert report.damaged_batches == 1
    assert files_with_secret(archive.warehouse) == []
    without = erase(archive.open(), [SECRET_KEY], grace_s=0, drop_damaged=True)
    assert (without.tables[2].rows, without.damaged_batches) == (1, 0)
    shutil.rmtree(archive.warehouse)
