"""Each offset that an archive gave up is in the table of dead letters once, however often its batch comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitStateUnknownException

from mansio.iceberg.archive.dead_letters import NAMESPACE, append_dead_letters, open_dead_letters
from mansio.iceberg.archive.parquet_writer import PartitionFileWriter
from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_format import DEAD_LETTER_SCHEMA
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.pipelines.maintain import maintain
from mansio.spark.options import ERROR_COLUMN
from mansio.spark.sink.iceberg_sink import split_dead_letters
from mansio.spark.source.error_column import unreadable_offsets_text
from mansio.wire.batch.record_batch import build_batch
from support.iceberg import plan

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.iceberg.archive.table_format import WrittenRange


@pytest.fixture
def archive(tmp_path: Path) -> ArchiveTable:
    return open_table(None, str(tmp_path), "t", create=True, topic_id="aa")


def opened(archive: ArchiveTable) -> ArchiveTable:
    """A handle of its own, as another process would have."""
    found = open_dead_letters(archive, create=True)
    assert found is not None
    return found


def written(table: ArchiveTable, *rows: tuple[int, int, int, bytes]) -> list[WrittenRange]:
    """What a task does with dead letters: (partition, first, last, value)."""
    source = pa.RecordBatch.from_pylist(
        [
            {
                "partition": partition,
                "offset": first,
                "value": value,
                ERROR_COLUMN: unreadable_offsets_text(first, last, "bad"),
            }
            for partition, first, last, value in rows
        ],
        pa.schema(
            [
                ("partition", pa.int32()),
                ("offset", pa.int64()),
                ("value", pa.binary()),
                (ERROR_COLUMN, pa.string()),
            ]
        ),
    )
    _, dead = split_dead_letters(source)
    assert dead is not None
    writer = PartitionFileWriter(table.data_location, "q-0", schema=DEAD_LETTER_SCHEMA)
    writer.write(dead)
    return writer.close()


def held(archive: ArchiveTable) -> list[tuple[Any, ...]]:
    names = ("__partition", "__offset", "__last_offset", "value")
    rows = opened(archive).iceberg.scan().to_arrow().to_pylist()
    return sorted(tuple(row[name] for name in names) for row in rows)


def test_batch_that_comes_again_adds_nothing(archive: ArchiveTable) -> None:
    for _ in range(2):
        table = opened(archive)
        parts = written(table, (0, 3, 5, b"x"), (0, 8, 8, b"y"), (1, 0, 0, b"z"))
        append_dead_letters(table, plan(0, {0: 0, 1: 0}, {0: 10, 1: 4}), parts)
    assert held(archive) == [(0, 3, 5, b"x"), (0, 8, 8, b"y"), (1, 0, 0, b"z")]


def test_batch_that_comes_again_cut_elsewhere_adds_what_lies_beyond(archive: ArchiveTable) -> None:
    """As after a crash between the two commits, with other limits: offsets 4 to 9 are of one damaged batch."""
    table = opened(archive)
    append_dead_letters(table, plan(0, {0: 0}, {0: 6}), written(table, (0, 2, 2, b"a"), (0, 4, 5, b"b")))
    again = opened(archive)
    parts = written(again, (0, 2, 2, b"a"), (0, 4, 9, b"b"), (0, 12, 12, b"c"))
    assert len(parts) == 1, "old and new are in one file"
    append_dead_letters(again, plan(0, {0: 0}, {0: 20}), parts)
    append_dead_letters(again, plan(1, {0: 20}, {0: 21}), written(again, (0, 20, 20, b"d")))
    assert held(archive) == [
        (0, 2, 2, b"a"),
        (0, 4, 5, b"b"),
        (0, 6, 9, b"b"),
        (0, 12, 12, b"c"),
        (0, 20, 20, b"d"),
    ]


def test_of_two_archives_that_write_the_same_one_adds_it(archive: ArchiveTable) -> None:
    one, two = opened(archive), opened(archive)
    for table in (one, two):
        append_dead_letters(table, plan(0, {0: 0}, {0: 6}), written(table, (0, 2, 2, b"a")))
    assert held(archive) == [(0, 2, 2, b"a")]


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_commit_of_unknown_outcome_is_looked_up(
    archive: ArchiveTable, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    table = opened(archive)
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)  # type: ignore[arg-type]
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    append_dead_letters(table, plan(0, {0: 0}, {0: 6}), written(table, (0, 2, 2, b"a")))
    assert held(archive) == [(0, 2, 2, b"a")]


def test_whole_batch_is_distinguished_from_a_record(archive: ArchiveTable) -> None:
    batch = build_batch([(0, None, b"v", ())] * 3, base_offset=3)
    table = opened(archive)
    append_dead_letters(
        table, plan(0, {0: 0}, {0: 9}), written(table, (0, 3, 5, batch), (0, 7, 7, batch), (0, 8, 8, b"v"))
    )
    rows = opened(archive).iceberg.scan().to_arrow().sort_by("__offset")
    assert rows["kind"].to_pylist() == ["batch", "record", "record"]
    assert rows["reason"].to_pylist() == ["bad"] * 3


def test_maintenance_keeps_dead_letters_and_a_table_of_another_topic_is_refused(
    archive: ArchiveTable,
) -> None:
    table = opened(archive)
    for offset in range(4):
        append_dead_letters(
            table, plan(offset, {0: offset}, {0: offset + 1}), written(table, (0, offset, offset, b"v"))
        )
    for _ in range(2):
        maintain(archive, snapshots_kept=1, grace_s=0)
    assert len(held(archive)) == 4
    with opened(archive).iceberg.transaction() as change:
        change.set_properties({"mansio.topic-id": "bb"})
    with pytest.raises(NotAnArchiveTable, match=rf"{NAMESPACE}.t holds dead letters of another topic"):
        opened(archive)
