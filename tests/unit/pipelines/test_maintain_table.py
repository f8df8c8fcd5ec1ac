"""Maintenance of a result table changes no row: beside pipelines, after any crash, for any layout. No JVM."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.exceptions import CommitStateUnknownException
from pyspark.sql import types as spark_types

from mansio.errors import ConfigError, InvalidRequest
from mansio.iceberg.errors import CommitConflict, InvalidDataFiles, TableNotFound
from mansio.iceberg.result_table import data_file_writer, rewrite_tasks
from mansio.iceberg.result_table.backfill_ranges import (
    RANGES_PROPERTY,
    BackfilledRange,
    TimeRange,
    format_ranges,
)
from mansio.iceberg.result_table.commit import FilesChanged, QueryBatch
from mansio.iceberg.result_table.partition_spec import parse_partition_by, parse_sort_by
from mansio.iceberg.result_table.rewrite_tasks import RewriteItem, rewrite_items, sort_indices
from mansio.iceberg.result_table.table import CREATED_PROPERTY, open_existing_table
from mansio.pipelines import table_maintenance as maintenance
from mansio.pipelines.table_maintenance import maintain_table
from support.result_tables import append, live_rows, open_result, rows, upsert, write
from support.tiers import examples, repetitions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.iceberg.result_table.table import ResultTable

COLUMNS = ("id", "name", "ts")
AT_ONCE: dict[str, Any] = {"snapshots_kept": 1, "grace_s": 0}


def paths(table: ResultTable) -> list[str]:
    table.refresh()
    return [file.file_path for file in table.files().data_files()]


def fill(table: ResultTable, batches: int, query: str = "q") -> None:
    """One file per batch and partition."""
    for number in range(batches):
        assert append(table, QueryBatch(query, number), rows(range(number * 10, number * 10 + 10)))


@pytest.mark.parametrize(
    ("partition_by", "sort_by"),
    [("", "name desc, id"), ("day(ts), bucket(2, id)", "name desc, id"), ("name", "")],
)
def test_small_files_of_a_partition_become_one_and_the_rows_stay(
    tmp_path: Path, partition_by: str, sort_by: str
) -> None:
    options: dict[str, Any] = {"partition_by": parse_partition_by(partition_by)} if partition_by else {}
    options |= {"sort_by": parse_sort_by(sort_by)} if sort_by else {}
    table = open_result(tmp_path, **options)
    batch = rows(range(50), "x" if partition_by != "name" else "")
    batch = batch if partition_by != "name" else batch.set_column(1, "name", pa.array(["a", None] * 25))
    for number in range(4):
        assert append(table, QueryBatch("q", number, "d"), batch)
    before, partitions = live_rows(table, COLUMNS), len(paths(table)) // 4
    seen: list[tuple[int, int]] = []
    report = maintain_table(table, progress=lambda merged, count: seen.append((merged, count)))
    assert live_rows(table, COLUMNS) == before
    assert report.rewritten.files_replaced == 4 * partitions
    assert report.files == report.rewritten.files_written == len(paths(table)) == partitions
    assert (report.rows, report.rewritten.rows) == (200, 200)
    assert seen[-1] == (4 * partitions, 4 * partitions)
    assert table.is_committed(QueryBatch("q", 3, "d")), "the pipeline goes on where it was"
    order = table.iceberg.sort_order().order_id
    assert {file.sort_order_id for file in table.files().data_files()} == ({order} if sort_by else {None})
    operations = [one.summary.operation.value for one in table.iceberg.metadata.snapshots if one.summary]
    assert "replace" in operations, "incremental readers skip it"
    assert "overwrite" not in operations
    again = maintain_table(open_existing_table("ns.t", str(tmp_path), {}))
    assert again.rewritten.files_replaced == 0


def test_dry_run_reports_what_a_run_does_and_changes_nothing(tmp_path: Path) -> None:
    table = open_result(tmp_path, partition_by=parse_partition_by("bucket(2, id)"))
    fill(table, 5)
    write(table, rows(range(3)))  # of a killed task

    def everything() -> dict[str, int]:
        return {str(file): file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}

    before = everything()
    planned = maintain_table(table, tag="first", is_dry_run=True, **AT_ONCE)
    assert everything() == before
    done = maintain_table(table, tag="first", **AT_ONCE)
    assert planned.rewritten.files_replaced == done.rewritten.files_replaced > 0
    assert planned.rewritten.files_written == done.rewritten.files_written
    assert planned.rewritten.bytes_before == done.rewritten.bytes_before
    assert 0 < planned.swept.files_deleted <= done.swept.files_deleted
    assert planned.swept.snapshots_expired == 5
    with pytest.raises(InvalidRequest, match="has a tag or branch first"):
        maintain_table(table, tag="first")


def beside(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something else once, after the files were merged and before they are committed."""
    original = maintenance._rewrite_here

    def merge(*given: Any) -> Any:
        done = original(*given)
        monkeypatch.setattr(maintenance, "_rewrite_here", original)
        work()
        return done

    monkeypatch.setattr(maintenance, "_rewrite_here", merge)


def test_pipeline_that_appends_meanwhile_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, pipeline = open_result(tmp_path), open_result(tmp_path)
    fill(table, 4)
    beside(monkeypatch, lambda: append(pipeline, QueryBatch("q", 4), rows(range(40, 50))))
    report = maintain_table(table)
    assert (report.rewritten.files_replaced, report.rewritten.files_conflicting) == (4, 0)
    assert [row[0] for row in sorted(live_rows(table))] == list(range(50))
    assert len(paths(table)) == 2
    assert table.is_committed(QueryBatch("q", 4))
    assert not append(pipeline, QueryBatch("q", 4), rows(range(40, 50)))


@pytest.mark.full
def test_files_that_an_upsert_has_replaced_meanwhile_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_result(tmp_path, key=("id",), partition_by=parse_partition_by("bucket(2, id)"))
    pipeline = open_result(tmp_path, key=("id",))
    for number in range(4):
        upsert(table, QueryBatch("q", number), pa.table(rows([number, number + 10, number + 20])))
    newer = pa.table(rows([0], "newer"))
    beside(monkeypatch, lambda: upsert(pipeline, QueryBatch("q", 4), newer))
    report = maintain_table(table)
    assert report.rewritten.files_conflicting > 0
    assert report.rewritten.files_replaced > 0, "the other bucket"
    found = dict(live_rows(table))
    assert found == {n + m: f"x{n + m}" for n in range(4) for m in (0, 10, 20)} | {0: "newer0"}
    data = {os.path.basename(path) for path in paths(table)}
    replaced = maintain_table(table, **AT_ONCE)
    assert replaced.rewritten.files_replaced > 0
    assert dict(live_rows(table)) == found
    assert data != {os.path.basename(path) for path in paths(table)}
    left = {file.name for file in (tmp_path / "ns" / "t" / "data").iterdir()}
    assert left == {os.path.basename(path) for path in paths(table)}


@pytest.mark.full
def test_upsert_whose_files_were_merged_meanwhile_merges_its_rows_again(tmp_path: Path) -> None:
    table = open_result(tmp_path, key=("id",), partition_by=parse_partition_by("bucket(1, id)"))
    other = open_result(tmp_path, key=("id",))
    for number in range(3):
        upsert(table, QueryBatch("q", number), pa.table(rows([number])))
    newer = pa.table(rows([0], "newer"))
    with pytest.raises(FilesChanged):
        upsert(table, QueryBatch("q", 3), newer, between=lambda: maintain_table(other))
    upsert(table, QueryBatch("q", 3), newer)
    assert dict(live_rows(table)) == {0: "newer0", 1: "x1", 2: "x2"}
    assert len(paths(table)) == 1


@given(seed=st.randoms(use_true_random=False), moves=st.lists(st.integers(0, 5), min_size=3, max_size=9))
@settings(max_examples=examples(2, repetitions(12, 30), 300))
def test_any_history_of_upserts_appends_and_maintenance_leaves_the_rows_of_the_batches(
    tmp_path_factory: pytest.TempPathFactory, seed: Any, moves: list[int]
) -> None:
    place = tmp_path_factory.mktemp("t")
    keyed = open_result(place, name="ns.keyed", key=("id",), partition_by=parse_partition_by("bucket(2, id)"))
    plain = open_result(place, name="ns.plain", partition_by=parse_partition_by("bucket(2, id)"))
    model: dict[int, str] = {}
    log: list[tuple[int, str]] = []
    for number, move in enumerate(moves):
        if move < 3:
            ids = seed.sample(range(12), 4)
            batch = rows(ids, f"b{number}-")
            upsert(keyed, QueryBatch("q", number), pa.table(batch))
            append(plain, QueryBatch("q", number), batch)
            model |= {one: f"b{number}-{one}" for one in ids}
            log += [(one, f"b{number}-{one}") for one in ids]
        else:
            kept: dict[str, Any] = {"snapshots_kept": move - 2, "grace_s": 0}
            for table in (keyed, plain):
                maintain_table(open_existing_table(str(table.name), str(place), {}), **kept)
                table.refresh()
    assert dict(live_rows(keyed)) == model
    assert len(live_rows(keyed)) == len(model)
    assert live_rows(plain) == sorted(log, key=repr)


@pytest.mark.parametrize(
    "step",
    [
        "commit_table",
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("close", "merge_manifests", "remove_orphan_files")
        ),
    ],
)
def test_run_that_is_killed_at_any_step_leaves_the_rows_and_the_next_run_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each partition is committed by itself, so that some kills hit between two commits."""
    table = open_result(tmp_path, partition_by=parse_partition_by("bucket(3, id)"))
    fill(table, 4)
    before = live_rows(table, COLUMNS)
    place = {
        "commit_table": table.iceberg.catalog,
        "close": data_file_writer.DataFileWriter,
    }.get(step, maintenance)
    original = getattr(place, step)

    class Killed(BaseException):
        pass

    def killing(call: int) -> Callable[..., Any]:
        """The step, which is killed when it is called for this time."""
        calls = itertools.count(1)

        def run(*given: Any, **named: Any) -> Any:
            if next(calls) == call:
                raise Killed
            return original(*given, **named)

        return run

    runs = 0
    for call in range(1, 4):
        with monkeypatch.context() as patched:
            patched.setattr(place, step, killing(call))
            try:
                size = max(file.file_size_in_bytes for file in table.files().data_files())
                maintain_table(table, target_bytes=4 * size, **AT_ONCE)
            except Killed:
                runs += 1
        assert live_rows(table, COLUMNS) == before
    assert runs > 0, "this step was killed"
    table.refresh()
    maintain_table(table, **AT_ONCE)
    assert live_rows(table, COLUMNS) == before
    left = {file.name for file in (tmp_path / "ns" / "t" / "data").iterdir()}
    assert left == {os.path.basename(path) for path in paths(table)}
    assert len(left) == 3
    assert table.is_committed(QueryBatch("q", 3))


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_commit_of_unknown_outcome_is_looked_up_and_no_file_of_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    table = open_result(tmp_path)
    fill(table, 3)
    before = live_rows(table, COLUMNS)
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)  # type: ignore[arg-type]
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    report = maintain_table(table)
    assert (report.rewritten.files_replaced, report.rewritten.files_written) == (3, 1)
    assert live_rows(table, COLUMNS) == before


@pytest.mark.full
def test_bytes_of_a_deleted_key_are_gone_after_expiry(tmp_path: Path) -> None:
    table = open_result(tmp_path, key=("id",), partition_by=parse_partition_by("bucket(1, id)"))
    secret = "name-to-forget"
    for number in range(3):
        upsert(table, QueryBatch("q", number), pa.table(rows([number], "kept")))
    upsert(table, QueryBatch("q", 3), pa.table(rows([77], secret)))

    def holding() -> list[str]:
        found = []
        for file in (tmp_path / "ns").rglob("*"):
            text = "" if not file.is_file() else file.read_bytes().decode("latin-1")
            if file.suffix == ".parquet":
                text = str(pq.read_table(file, partitioning=None).to_pylist())
            if secret in text:
                found.append(file.name)
        return found

    assert holding()
    tombstone = rows([77]).set_column(1, "name", pa.nulls(1, pa.string()))
    tombstone = tombstone.set_column(2, "ts", pa.nulls(1, pa.timestamp("us", tz="UTC")))
    upsert(table, QueryBatch("q", 4), pa.table(tombstone))
    assert holding(), "earlier snapshots have the row"
    maintain_table(table, snapshots_kept=1, grace_s=3600)
    assert holding(), "a running reader may need the file"
    maintain_table(table, **AT_ONCE)
    assert holding() == []
    assert sorted(dict(live_rows(table))) == [0, 1, 2]


def test_merged_file_of_a_backfilled_table_has_rows_of_one_range_and_shows_it(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    ranges = [BackfilledRange("p", ("t",), TimeRange(begin, begin + 5)) for begin in (0, 5)]
    with table.iceberg.transaction() as transaction:
        transaction.set_properties({RANGES_PROPERTY: format_ranges(ranges)})
    for number in range(3):
        for index, one in enumerate(ranges):
            files = write(table, rows([10 * number + index]), name=one.file_prefix)
            assert table.commit(QueryBatch(one.id, number), files).added
    maintain_table(table)
    assert len(paths(table)) == 2
    for index, one in enumerate(ranges):
        (path,) = (path for path in paths(table) if one.owns_file(path))
        assert pq.read_table(path.removeprefix("file://"), partitioning=None)["id"].to_pylist() == [
            10 * number + index for number in range(3)
        ]


def test_rows_written_before_columns_changed_survive(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    fill(table, 2)
    fields = [spark_types.StructField("id", spark_types.LongType())]
    fields += [spark_types.StructField("title", spark_types.StringType())]
    fields += [spark_types.StructField("more", spark_types.IntegerType())]
    evolved = open_result(tmp_path, spark_types.StructType(fields), renames={"name": "title"})
    new = pa.RecordBatch.from_pydict(
        {"id": pa.array([100]), "title": ["new"], "more": pa.array([7], pa.int32())}
    )
    assert append(evolved, QueryBatch("q", 2), new)
    maintain_table(evolved)
    assert len(paths(evolved)) == 1
    found = {row["id"]: row for row in evolved.iceberg.scan().to_arrow().to_pylist()}
    assert len(found) == 21
    assert (found[3]["title"], found[3]["more"], found[3]["ts"].hour) == ("x3", None, 3)
    assert (found[100]["title"], found[100]["more"], found[100]["ts"]) == ("new", 7, None)


def test_rows_are_sorted_as_spark_sorts_them_and_only_within_the_bound_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"a": [2, None, 1, 2, None], "b": [True, False, None, None, True]})
    order = sort_indices(table, parse_sort_by("a desc, b"))
    assert [(row["a"], row["b"]) for row in table.take(order).to_pylist()] == [
        (2, None),
        (2, True),
        (1, None),
        (None, False),
        (None, True),
    ]
    monkeypatch.setattr(rewrite_tasks, "SORT_BYTES_MAX", 100)
    large = open_result(tmp_path, sort_by=parse_sort_by("id desc"))
    fill(large, 3)
    maintain_table(large)
    (file,) = large.files().data_files()
    assert file.sort_order_id is None
    assert [row[0] for row in sorted(live_rows(large))] == list(range(30))


def test_file_with_other_rows_than_the_table_lists_is_not_put_into_the_table(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    fill(table, 3)
    path = paths(table)[0].removeprefix("file://")
    pq.write_table(pq.read_table(path, partitioning=None).slice(1), path)
    before = set((tmp_path / "ns" / "t" / "data").iterdir())
    with pytest.raises(InvalidDataFiles, match="29 rows were read where the table lists 30"):
        maintain_table(table)
    assert set((tmp_path / "ns" / "t" / "data").iterdir()) == before


def test_table_of_another_program_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    fill(table, 2)
    with table.iceberg.transaction() as transaction:
        transaction.remove_properties(CREATED_PROPERTY)
    with pytest.raises(ConfigError, match="was not created by `mansio pipeline run`"):
        maintain_table(table)
    with pytest.raises(TableNotFound, match=r"there is no table mansio\.ns\.other"):
        open_existing_table("ns.other", str(tmp_path), {})


def test_task_of_spark_merges_the_items_that_it_gets(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    fill(table, 4)
    files = paths(table)
    items = [RewriteItem("a", tuple(files[:2]), 20), RewriteItem("b", tuple(files[2:]), 20)]
    places = [pa.RecordBatch.from_pydict({"id": [one]}) for one in (1, 0)]
    reports = [
        rewrite_tasks.parse_written_files(batch["report"][0].as_py())
        for batch in rewrite_items(table.layout(), (), items, iter(places))
    ]
    assert [files[0].path.rpartition("/")[2][0] for files in reports] == ["b", "a"]
    assert [files[0].rows for files in reports] == [20, 20]


@pytest.mark.full
def test_pipelines_and_maintenance_at_the_same_time_lose_and_double_nothing(tmp_path: Path) -> None:
    table = open_result(tmp_path, partition_by=parse_partition_by("bucket(2, id)"))
    is_over, failures = threading.Event(), []

    def maintain_again_and_again() -> None:
        mine = open_existing_table("ns.t", str(tmp_path), {})
        try:
            while not is_over.is_set():
                # Pipelines that commit all the time come first: then it is run again.
                with suppress(CommitConflict):
                    maintain_table(mine, snapshots_kept=2, grace_s=60)
        except BaseException as error:  # noqa: BLE001  # it belongs to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=maintain_again_and_again) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        fill(table, 30)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert [row[0] for row in sorted(live_rows(table))] == list(range(300))
    maintain_table(table)
    assert len(paths(table)) <= 4
    assert not append(table, QueryBatch("q", 29), rows(range(290, 300)))
