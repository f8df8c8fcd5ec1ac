"""An upsert leaves what a dictionary would hold: any batches, repeats, races and layouts. Real files, no JVM."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.manifest import ManifestFile
from pyspark.sql import types as spark_types

from mansio.errors import ConfigError
from mansio.iceberg.archive.table import ArchiveTable
from mansio.iceberg.errors import InvalidDataFiles, NullKey
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from mansio.iceberg.result_table.commit import FilesChanged, QueryBatch
from mansio.iceberg.result_table.partition_spec import parse_partition_by
from mansio.iceberg.result_table.table import TableTarget, open_dead_letter_table
from mansio.iceberg.result_table.upsert_plan import KeyedFile, group_fields, plan_merge
from mansio.iceberg.result_table.upsert_tasks import (
    DELETE_COLUMN,
    GROUP_COLUMN,
    ROW_COLUMN,
    MergeItem,
    MergeReport,
    StagedGroup,
    StageOptions,
    StageReport,
    group_names,
    key_array,
    last_rows,
    merge_group,
    parse_stage_report,
    read_data_file,
    stage_rows,
)
from mansio.spark.sink.upsert_sink import (
    NULL_KEY_DEAD_LETTER,
    NULL_KEY_SKIP,
    UpsertSink,
    stage_tasks,
)
from support.result_tables import append, live_rows, open_result, upsert, write
from support.tiers import examples, smoke_first

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.iceberg.result_table.table import ResultTable

COLUMNS = spark_types.StructType(
    [
        spark_types.StructField("region", spark_types.StringType()),
        spark_types.StructField("id", spark_types.LongType()),
        spark_types.StructField("value", spark_types.StringType()),
        spark_types.StructField("count", spark_types.IntegerType()),
    ]
)
Row = tuple[str, int, str | None, int | None]
REGIONS = ("a", "ab", "é")


def frame(rows: list[Any]) -> pa.Table:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[]] * 4
    types = (pa.string(), pa.int64(), pa.string(), pa.int32())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pa.table(arrays, names=["region", "id", "value", "count"])


def opened(place: object, partition_by: str, key: tuple[str, ...]) -> ResultTable:
    return open_result(place, COLUMNS, partition_by=parse_partition_by(partition_by), key=key)


def held(table: ResultTable) -> list[tuple[Any, ...]]:
    return live_rows(table, ["region", "id", "value", "count"])


def fold(model: dict[Any, Row], rows: list[Row], key: tuple[str, ...]) -> None:
    """The naive upsert."""
    for row in rows:
        place = tuple(row[("region", "id").index(name)] for name in key)
        others = [
            value
            for name, value in zip(("region", "id", "value", "count"), row, strict=True)
            if name not in key
        ]
        if all(value is None for value in others):
            model.pop(place, None)
        else:
            model[place] = row


ROWS = st.lists(
    st.tuples(
        st.sampled_from(REGIONS),
        st.integers(0, 12),
        st.none() | st.sampled_from("xyz"),
        st.none() | st.integers(0, 9),
    ),
    max_size=12,
)
LAYOUTS = [
    ("bucket(3, id)", ("id",)),
    ("bucket(2, id), region", ("id",)),
    ("region, bucket(2, id)", ("region", "id")),
    ("truncate(1, region)", ("region", "id")),
    ("truncate(5, id), value", ("id",)),
]


@pytest.mark.parametrize(("partition_by", "key"), smoke_first(*LAYOUTS))
@settings(max_examples=examples(4, 25), deadline=None)
@given(
    batches=st.lists(ROWS, min_size=1, max_size=4), repeat=st.booleans(), small=st.sampled_from([0, 1 << 20])
)
def test_table_holds_what_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory,
    partition_by: str,
    key: tuple[str, ...],
    batches: list[list[Row]],
    repeat: bool,
    small: int,
) -> None:
    table = opened(tmp_path_factory.mktemp("upsert"), partition_by, key)
    model: dict[Any, Row] = {}
    for number, rows in enumerate(batches):
        fold(model, rows, key)
        for _ in range(1 + repeat):
            if rows:
                upsert(table, QueryBatch("q", number), frame(rows), small_bytes=small)
        assert held(table) == sorted(model.values(), key=repr)


def test_file_without_a_key_of_the_batch_is_not_rewritten(tmp_path: Path) -> None:
    table = opened(tmp_path, "bucket(1, id)", ("id",))
    for number, ids in enumerate((range(10), range(20, 30), range(40, 60, 2))):
        upsert(table, QueryBatch("q", number), frame([("a", one, "x", 1) for one in ids]))
    files = {task.file.file_path for task in table.iceberg.scan().plan_files()}
    assert len(files) == 3
    merged = upsert(
        table, QueryBatch("q", 3), frame([("a", 25, "new", 2), ("a", 41, "new", 3), ("a", 99, "x", 1)])
    )
    assert len(merged.replaced) == 1, "41 is within the bounds of the last file, but not in it"
    assert set(merged.replaced) < files
    assert [row[1] for row in held(table) if row[2] == "new"] == [25, 41]


def test_row_without_a_value_outside_its_key_deletes_and_a_later_row_of_the_batch_brings_it_back(
    tmp_path: Path,
) -> None:
    table = opened(tmp_path, "bucket(1, id)", ("region", "id"))
    upsert(table, QueryBatch("q", 0), frame([("a", 1, "x", 1), ("b", 1, "x", 1)]))
    upsert(table, QueryBatch("q", 1), frame([("a", 1, None, None), ("c", 1, None, None)]))
    assert held(table) == [("b", 1, "x", 1)]
    upsert(table, QueryBatch("q", 2), frame([("b", 1, None, None), ("b", 1, None, 2)]))
    assert held(table) == [("b", 1, None, 2)]


@pytest.mark.full
def test_small_files_of_a_group_are_merged_by_the_batches_that_write_to_it(tmp_path: Path) -> None:
    table = opened(tmp_path, "bucket(1, id)", ("id",))
    for number in range(20):
        upsert(table, QueryBatch("q", number), frame([("a", number, "x", 1)]), small_bytes=1 << 20)
    assert len(held(table)) == 20
    assert len(list(table.iceberg.scan().plan_files())) <= 10


def test_concurrent_append_to_a_group_of_the_batch_is_noticed_and_one_to_another_group_is_not_disturbed(
    tmp_path: Path,
) -> None:
    table = opened(tmp_path, "id", ("id",))
    other = opened(tmp_path, "id", ("id",))
    upsert(table, QueryBatch("q", 0), frame([("a", 1, "x", 1)]))
    other.refresh()
    rows = frame([("a", 1, "theirs", 2)]).to_batches()[0]
    with pytest.raises(FilesChanged):
        upsert(
            table,
            QueryBatch("q", 1),
            frame([("a", 1, "ours", 3)]),
            between=lambda: append(other, QueryBatch("other", 0), rows),
        )
    assert [row[2] for row in held(table)] == ["theirs", "x"], "nothing of the batch is there"
    upsert(table, QueryBatch("q", 1), frame([("a", 1, "ours", 3)]))
    assert [row[2] for row in held(table)] == ["ours"]


@pytest.mark.full
def test_concurrent_maintenance_does_not_disturb_a_batch_and_removes_no_file_of_it(tmp_path: Path) -> None:
    """Snapshots expire and orphans are looked for between the rewrite and the commit."""
    table, other = (opened(tmp_path, "bucket(1, id)", ("id",)) for _ in range(2))
    for number in range(3):
        upsert(table, QueryBatch("q", number), frame([("a", number, "x", 1)]))

    def maintain() -> None:
        other.refresh()
        maintained = ArchiveTable(other.iceberg, "", other.catalog.address)
        assert remove_orphan_files(maintained, snapshots_kept=1, grace_s=3600).snapshots_expired

    upsert(table, QueryBatch("q", 3), frame([("a", 1, "new", 1)]), between=maintain)
    assert [(row[1], row[2]) for row in held(table)] == [(0, "x"), (1, "new"), (2, "x")]


def staged(table: ResultTable, batch: QueryBatch, rows: list[Row]) -> list[StagedGroup]:
    fields = [one for _, one in group_fields(table.partition_by, table.key)]
    found = frame(rows).sort_by("id")
    groups = group_names(fields, [found[one.column].combine_chunks() for one in fields])
    found = found.append_column(GROUP_COLUMN, groups).append_column(DELETE_COLUMN, [[False] * len(rows)])
    found = found.append_column(ROW_COLUMN, [[""] * len(rows)])
    options = StageOptions(table.layout(), table.key, f"{batch.query}-{batch.batch}")
    batches = found.sort_by([(GROUP_COLUMN, "ascending"), ("id", "ascending")]).to_batches()
    (report,) = stage_rows(options, iter(batches))
    return list(parse_stage_report(report["report"][0].as_py()).groups)


def test_only_the_groups_that_another_commit_changed_are_merged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = (opened(tmp_path, "id", ("id",)) for _ in range(2))
    upsert(table, QueryBatch("q", 0), frame([("a", number, "x", 1) for number in range(4)]))
    sink = UpsertSink(table, lambda _session, number: QueryBatch("q", number))
    merges: list[int] = []

    def merge(_frame: object, _batch: QueryBatch, items: list[MergeItem]) -> list[MergeReport]:
        reports = [merge_group(table.layout(), table.key, "m", item) for item in items]
        if not merges:
            other.refresh()
            append(other, QueryBatch("other", 0), frame([("a", 2, "theirs", 2)]).to_batches()[0])
        merges.append(len(items))
        return reports

    monkeypatch.setattr(sink, "_merge", merge)
    batch = QueryBatch("q", 1)
    table.refresh()
    groups = staged(table, batch, [("a", n, "ours", 3) for n in range(4)])
    sink._merge_and_commit(None, batch, groups, table.shape())  # type: ignore[arg-type]
    assert merges == [4, 1]
    assert [row[2] for row in held(table)] == ["ours"] * 4
    data = {path.name for path in (tmp_path / "ns" / "t" / "data").iterdir() if "-staged-" not in path.name}
    live = {os.path.basename(file.file_path) for file in table.files().data_files()}
    assert len(data - live) == 5, "the four replaced files and theirs; the discarded merge is deleted"


def test_copy_of_a_table_in_another_process_commits_and_the_original_sees_it(tmp_path: Path) -> None:
    table = opened(tmp_path, "id", ("id",))
    upsert(table, QueryBatch("q", 0), frame([("a", 1, "x", 1)]))
    copy: ResultTable = pickle.loads(pickle.dumps(table))
    assert (copy.name, copy.key, copy.catalog.address) == (table.name, table.key, table.catalog.address)
    assert copy.is_committed(QueryBatch("q", 0))
    upsert(copy, QueryBatch("q", 1), frame([("a", 1, "y", 2), ("a", 2, "z", 1)]))
    table.refresh()
    assert table.is_committed(QueryBatch("q", 1))
    assert sorted(row[2] for row in held(table)) == ["y", "z"]


def test_a_batch_reads_only_the_manifests_that_the_one_before_has_not_read_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path, "bucket(4, id)", ("id",))
    reads: list[str] = []
    fetch = ManifestFile.fetch_manifest_entry

    def counted(manifest: ManifestFile, *arguments: Any, **named: Any) -> list[Any]:
        reads.append(manifest.manifest_path)
        return fetch(manifest, *arguments, **named)

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", counted)
    for number in range(30):
        upsert(table, QueryBatch("q", number), frame([("a", one, f"{number}", 1) for one in range(20)]))
    assert len(reads) <= 2 * 30
    snapshot = table.iceberg.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.iceberg.io)) < 20
    assert [row[2] for row in held(table)] == ["29"] * 20


def test_rows_without_a_key_are_dead_letters_once(tmp_path: Path) -> None:
    table = opened(tmp_path, "bucket(2, id)", ("id",))
    dead = open_dead_letter_table(TableTarget("ns.t", str(tmp_path)), {})
    rows = [("a", None, "lost", 1), ("a", 1, "kept", 1), ("b", None, None, None)]
    for _ in range(2):
        upsert(table, QueryBatch("q", 0), frame(rows), dead_letters=dead)
    assert held(table) == [("a", 1, "kept", 1)]
    found = live_rows(dead, ["reason", "row"])
    assert len(found) == 2
    assert {reason for reason, _ in found} == {"the key (id) is null"}
    assert any('"lost"' in row for _, row in found)


@pytest.mark.full
def test_rows_without_a_key_end_the_batch_are_skipped_or_stored_once_by_the_option(
    tmp_path: Path,
) -> None:
    table = opened(tmp_path, "bucket(2, id)", ("id",))
    dead = open_dead_letter_table(TableTarget("ns.t", str(tmp_path)), {})
    batch = QueryBatch("q", 3)

    def identify(_spark: object, _batch: int) -> QueryBatch:
        return batch

    unkeyed = pa.RecordBatch.from_pydict({"reason": ["no key"] * 2, "row": ["{}", "[]"]})
    files = tuple(write(dead, unkeyed))
    reports = [StageReport((), 1, files), StageReport((), 0), StageReport((), 1)]
    UpsertSink(table, identify)._commit_null_keys([StageReport((), 0)], batch)
    with pytest.raises(NullKey, match=r"batch 3 contains 2 rows without a key \(id is null\)"):
        UpsertSink(table, identify)._commit_null_keys(reports, batch)
    UpsertSink(table, identify, on_null_key=NULL_KEY_SKIP)._commit_null_keys(reports, batch)
    assert live_rows(dead, ["reason", "row"]) == []
    storing = UpsertSink(table, identify, on_null_key=NULL_KEY_DEAD_LETTER, dead_letters=dead)
    for _ in range(2):
        storing._commit_null_keys(reports, batch)
    assert live_rows(dead, ["reason", "row"]) == [("no key", "[]"), ("no key", "{}")]
    assert held(table) == []


def test_rows_written_before_a_column_was_added_renamed_or_widened_survive_a_rewrite(tmp_path: Path) -> None:
    key = ("id",)
    table = opened(tmp_path, "bucket(1, id)", key)
    upsert(table, QueryBatch("q", 0), frame([("a", 1, "old", 7), ("a", 2, "old", 8)]))
    evolved = spark_types.StructType(
        [
            spark_types.StructField("id", spark_types.LongType()),
            spark_types.StructField("text", spark_types.StringType()),
            spark_types.StructField("count", spark_types.LongType()),
            spark_types.StructField("more", spark_types.ArrayType(spark_types.StringType())),
        ]
    )
    again = open_result(tmp_path, evolved, key=key, renames={"value": "text"})
    assert str(again.changes) == "value renamed to text, more added, count widened"
    rows = pa.table({"id": [2], "text": ["new"], "count": [1 << 40], "more": [["m"]]})
    merged = upsert(again, QueryBatch("q", 1), rows)
    assert len(merged.replaced) == 1
    assert live_rows(again, ["region", "id", "text", "count", "more"]) == [
        ("a", 1, "old", 7, None),
        (None, 2, "new", 1 << 40, ["m"]),
    ]


def test_table_that_is_not_partitioned_by_its_key_or_has_another_one_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "bucket(2, id)", ("id",))
    with pytest.raises(ConfigError, match="has the key id, and appended rows could have the same key"):
        open_result(tmp_path, COLUMNS)
    with pytest.raises(ConfigError, match="has the key id: give this --key"):
        open_result(tmp_path, COLUMNS, key=("id", "region"))
    with pytest.raises(ConfigError, match="has another --partition-by"):
        open_result(tmp_path, COLUMNS, key=("id",), partition_by=parse_partition_by("id"))
    with pytest.raises(ConfigError, match="has to be partitioned by its key"):
        open_result(tmp_path, COLUMNS, "ns.other", key=("id",), partition_by=parse_partition_by("region"))
    with pytest.raises(ConfigError, match="--key: the result has no column nr"):
        open_result(tmp_path, COLUMNS, "ns.third", key=("nr",))


@given(
    keys=st.lists(st.tuples(st.text("a:1\x1f", max_size=3), st.binary(max_size=2)), min_size=1, max_size=20)
)
def test_keys_of_several_columns_are_equal_only_if_all_columns_are(keys: list[tuple[str, bytes]]) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": pa.array([key[0] for key in keys]), "b": pa.array([key[1] for key in keys], pa.binary())}
    )
    encoded = key_array(batch, ["a", "b"]).to_pylist()
    assert len(set(encoded)) == len(set(keys))


@given(keys=st.lists(st.integers(0, 5), max_size=30), size=st.integers(1, 7))
def test_last_row_of_each_key_is_found_over_the_borders_of_batches(keys: list[int], size: int) -> None:
    keys.sort()
    table = pa.table({"k": pa.array(keys, pa.int64()), "n": pa.array(range(len(keys)), pa.int64())})
    found = [row for batch in last_rows(["k"], iter(table.to_batches(size))) for row in batch.to_pylist()]
    assert {row["k"]: row["n"] for row in found} == {key: n for n, key in enumerate(keys)}
    assert len(found) == len(set(keys))


@given(
    files=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=10),
    staged=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_plan_never_leaves_out_a_file_that_may_hold_a_key(
    files: list[tuple[int, int, int]], staged: list[int]
) -> None:
    known = [
        KeyedFile(str(number), 1, str(group), None if low > high else low, None if low > high else high)
        for number, (group, low, high) in enumerate(files)
    ]
    (item,) = plan_merge([StagedGroup("1", "s", 1, min(staged), max(staged))], known, small_files_max=2)
    chosen = {*item.candidates, *item.small}
    for file, (group, low, high) in zip(known, files, strict=True):
        may_hold = group == 1 and (low > high or any(low <= key <= high for key in staged))
        assert file.path in chosen or not may_hold
        assert group == 1 or file.path not in chosen
    assert not set(item.candidates) & set(item.small)


@pytest.mark.parametrize(
    ("partition_by", "tasks"),
    [("bucket(16, id)", 32), ("bucket(2, id), bucket(3, region)", 12), ("bucket(200, id)", 200), ("id", 200)],
)
def test_batch_is_staged_by_no_more_tasks_than_its_groups_need(partition_by: str, tasks: int) -> None:
    assert stage_tasks(parse_partition_by(partition_by), 200) == tasks


def test_group_that_two_tasks_have_staged_is_refused() -> None:
    with pytest.raises(InvalidDataFiles, match="two tasks"):
        plan_merge([StagedGroup("1", "s", 1, 0, 0), StagedGroup("1", "t", 1, 0, 0)], [])


def test_file_is_streamed_a_row_group_at_a_time(tmp_path: Path) -> None:
    """Row groups that were read are released: memory does not depend on the size of the file."""
    groups, size = 16, 1 << 20
    values = [os.urandom(size) for _ in range(groups)]
    schema = pa.schema([pa.field("value", pa.binary())])
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"value": values}, schema=schema), path, row_group_size=1)
    before, peak = pa.total_allocated_bytes(), 0
    for number, batch in enumerate(read_data_file(str(path), schema)):
        assert batch.column(0)[0].as_py() == values[number]
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert number == groups - 1
    assert size < peak < groups * size / 2


def test_failed_tasks_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened(tmp_path, "bucket(1, id)", ("id",))
    upsert(table, QueryBatch("q", 0), frame([("a", 1, "x", 1)]))
    data = tmp_path / "ns" / "t" / "data"
    before = {path.name for path in data.iterdir() if "staged" not in path.name}

    def fail(*_given: object) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr("mansio.iceberg.fanout_writer.fsync_file", fail)
    with pytest.raises(OSError, match="no space"):
        upsert(table, QueryBatch("q", 1), frame([("a", 1, "y", 1)]))
    with pytest.raises(OSError, match="no space"):
        write(table, frame([("a", 1, "y", 1)]).to_batches()[0])
    assert {path.name for path in data.iterdir() if "staged" not in path.name} >= before
