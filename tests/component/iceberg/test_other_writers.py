"""Other programs write to a result table while a pipeline does: real catalogs and files, and pyiceberg's commits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, StringType

from mansio.iceberg.errors import CommitConflict, TableChanged
from mansio.iceberg.result_table.commit import FilesChanged, QueryBatch
from mansio.iceberg.result_table.partition_spec import parse_partition_by
from mansio.iceberg.result_table.table import TableTarget, open_result_table
from mansio.spark.sink.result_schema import to_iceberg_schema
from support.iceberg_server import IcebergServer
from support.machine import scaled
from support.paths import ROOT
from support.process import inherited
from support.rest_catalog import RestCatalog
from support.result_tables import COLUMNS, live_rows, rows, upsert, write
from support.tiers import repetitions, smoke_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyiceberg.table import Table

    from mansio.iceberg.result_table.table import ResultTable

WRITERS = 2
ROWS_OF_WRITER = 10
WRITERS_DEADLINE_S = 120
OTHERS = 1_000
"""Where the ids of other programs begin."""

Open = Any


@pytest.fixture(scope="module")
def iceberg_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IcebergServer]:
    """Iceberg's own REST catalog, for all tests of this module: each has a namespace of its own."""
    with IcebergServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(params=smoke_first("sqlite", "rest", "iceberg"))
def open_table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ResultTable]]:
    """Opens the table, each time as another process would: over a catalog in a file, over the tests' own REST catalog,
    and over Iceberg's.
    """
    columns = to_iceberg_schema(COLUMNS)
    match request.param:
        case "sqlite":
            yield lambda **options: open_result_table(
                TableTarget("ns.t", str(tmp_path), **options), columns, {}
            )
        case "rest":
            with RestCatalog(tmp_path / "rest") as catalog:
                settings = {
                    "spark.sql.catalog.lab.type": "rest",
                    "spark.sql.catalog.lab.uri": catalog.address,
                }
                yield lambda **options: open_result_table(
                    TableTarget("lab.ns.t", **options), columns, settings
                )
        case _:
            server: IcebergServer = request.getfixturevalue("iceberg_server")
            name = f"lab.{tmp_path.name}.t"
            yield lambda **options: open_result_table(
                TableTarget(name, **options), columns, server.settings("lab")
            )


def other_rows(*ids: int) -> pa.Table:
    return pa.Table.from_batches([rows(ids, "other")])


def ids(table: ResultTable) -> list[int]:
    return sorted(row[0] for row in live_rows(table))


def before_commits(
    table: ResultTable, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object] | None
) -> None:
    """Let another program do each of these things before the next commits of `table` reach the catalog."""
    catalog = table.iceberg.catalog
    original, left = catalog.commit_table, list(steps)

    def overtaken(*given: Any) -> object:
        step = left.pop(0) if left else None
        if step is not None:
            step()
        return original(*given)

    monkeypatch.setattr(catalog, "commit_table", overtaken)


def test_batch_is_committed_on_top_of_the_appends_of_others_and_each_row_is_there_once(
    open_table: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mansio.iceberg.commit.COMMIT_RETRY_BACKOFF_S", 0)
    table, other = open_table(), open_table().iceberg

    def append(number: int) -> Callable[[], object]:
        return lambda: (other.refresh(), other.append(other_rows(number)))

    files = write(table, rows(range(5)))
    before_commits(table, monkeypatch, *(append(OTHERS + number) for number in range(8)))
    done = table.commit(QueryBatch("q", 0), files)
    assert (done.added, done.attempts) == (True, 9)
    assert ids(table) == [*range(5), *range(OTHERS, OTHERS + 8)]
    assert not open_table().commit(QueryBatch("q", 0), files).added


def test_append_of_another_program_that_a_batch_has_overtaken_is_repeated_by_that_program(
    open_table: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property of the table would forbid it: that of earlier versions is removed when the table is opened."""
    table = open_table()
    with table.iceberg.transaction() as change:
        change.set_properties({"commit.retry.num-retries": "0"})
    table, other = open_table(), open_table()
    before_commits(other, monkeypatch, lambda: table.commit(QueryBatch("q", 0), write(table, rows(range(5)))))
    other.iceberg.append(other_rows(OTHERS))
    assert ids(table) == [*range(5), OTHERS]


def rename(table: Table) -> None:
    with table.update_schema() as change:
        change.rename_column("name", "title")


def drop(table: Table) -> None:
    with table.update_schema() as change:
        change.delete_column("name")


def require(table: Table) -> None:
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.add_column("extra", StringType(), required=True)


def partition(table: Table) -> None:
    with table.update_spec() as change:
        change.add_field("id", BucketTransform(4), "bucket")


def repartition(table: Table) -> None:
    """As many fields as before, so that the partition values of the files would be taken for those of the new one."""
    with table.update_spec() as change:
        change.remove_field("id_bucket")
        change.add_field("id", BucketTransform(4), "bucket_4")


def replace(table: Table) -> None:
    table.catalog.drop_table(table.name())
    table.catalog.create_table(table.name(), table.schema(), partition_spec=table.spec())


@pytest.mark.parametrize(
    ("change", "reason"),
    smoke_first(
        (rename, "column name was renamed to title"),
        (drop, "column name was dropped"),
        (require, "column extra was added, which requires a value"),
        (partition, "its partition spec was changed"),
        (repartition, "its partition spec was changed"),
    ),
)
def test_change_of_another_program_that_the_files_of_a_batch_do_not_fit_is_an_error_and_nothing_is_committed(
    open_table: Open, monkeypatch: pytest.MonkeyPatch, change: Callable[[Table], None], reason: str
) -> None:
    table, other = (open_table(partition_by=parse_partition_by("bucket(2, id)")) for _ in range(2))
    before_commits(table, monkeypatch, lambda: change(other.iceberg))
    with pytest.raises(TableChanged, match=reason):
        table.commit(QueryBatch("q", 0), write(table, rows(range(5))))
    other.iceberg.refresh()
    assert other.iceberg.current_snapshot() is None


def test_batch_is_not_committed_to_a_table_that_another_program_has_created_in_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TableTarget("ns.t", str(tmp_path))
    table, other = (open_result_table(target, to_iceberg_schema(COLUMNS), {}) for _ in range(2))
    before_commits(table, monkeypatch, lambda: replace(other.iceberg))
    with pytest.raises(TableChanged, match=r"dropped table ns\.t and created it again"):
        table.commit(QueryBatch("q", 0), write(table, rows(range(5))))
    assert table.iceberg.current_snapshot() is None


def test_columns_that_another_program_adds_or_widens_do_not_stop_a_batch(
    open_table: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = open_table(), open_table().iceberg

    def widen() -> None:
        with other.update_schema() as change:
            change.add_column("extra", LongType())
        other.append(other_rows(OTHERS).append_column("extra", pa.array([7], pa.int64())))

    before_commits(table, monkeypatch, widen)
    assert table.commit(QueryBatch("q", 0), write(table, rows(range(3)))).attempts == 2
    assert sorted(live_rows(table, ["id", "extra"])) == [(0, None), (1, None), (2, None), (OTHERS, 7)]


def test_rows_that_another_program_deletes_while_a_batch_is_appended_stay_deleted(
    open_table: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = open_table(), open_table().iceberg
    assert table.commit(QueryBatch("q", 0), write(table, rows(range(4)))).added
    other.refresh()
    before_commits(table, monkeypatch, lambda: other.delete("id == 2"))
    assert table.commit(QueryBatch("q", 1), write(table, rows(range(4, 6)))).added
    assert ids(table) == [0, 1, 3, 4, 5]


def test_upsert_is_refused_when_another_program_has_changed_its_groups_and_committed_when_it_changed_others(
    open_table: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink merges a refused batch again; what the other program has deleted is not there again."""
    table, other = (open_table(partition_by=parse_partition_by("id"), key=("id",)) for _ in range(2))
    upsert(table, QueryBatch("q", 0), other_rows(1, 2, 3))
    others = other.iceberg
    others.refresh()
    before_commits(table, monkeypatch, lambda: others.delete("id == 2"), lambda: others.delete("id == 3"))
    second = pa.Table.from_batches([rows([1, 2])])
    with pytest.raises(FilesChanged, match=r"files of .* that batch 1 replaces have changed") as refused:
        upsert(table, QueryBatch("q", 1), second)
    assert isinstance(refused.value, CommitConflict)
    assert live_rows(table) == [(1, "other1"), (3, "other3")]
    upsert(table, QueryBatch("q", 1), second)
    assert live_rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("seed", range(repetitions(2, 6)))
def test_rows_of_every_writer_are_in_the_table_once_after_any_crashes_lost_answers_and_conflicts(
    open_table: Open, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two queries and two other programs take turns at random; a query that crashed opens the table again."""
    monkeypatch.setattr("mansio.iceberg.commit.COMMIT_RETRY_BACKOFF_S", 0)
    chance = random.Random(seed)
    others = [open_table().iceberg for _ in range(2)]
    wanted: list[int] = []
    batches = {"one": 0, "two": 0}

    def append_as_another() -> None:
        number = OTHERS + len(wanted)
        wanted.append(number)
        other = chance.choice(others)
        chance.choice(
            [other.refresh, list]
        )()  # the program may know an old state: pyiceberg repeats its commit
        other.append(other_rows(number))

    def lose_answer(after: Callable[..., object]) -> Callable[..., object]:
        def committed(*given: Any) -> object:
            after(*given)
            raise CommitStateUnknownException("the answer was lost")

        return committed

    for _ in range(25):
        if chance.random() < 0.3:
            append_as_another()
            continue
        query = chance.choice(["one", "two"])
        number = batches[query] = batches[query] + 1
        batch, value = QueryBatch(query, number, f"{number}"), number + (500 if query == "two" else 0)
        wanted.append(value)
        for _attempt in range(chance.choice([1, 1, 2])):  # the second is the repeat after a crash
            table = open_table()
            files = write(table, rows([value]))
            with monkeypatch.context() as patched:
                if chance.random() < 0.2:
                    patched.setattr(
                        table.iceberg.catalog, "commit_table", lose_answer(table.iceberg.catalog.commit_table)
                    )
                before_commits(table, patched, *(append_as_another for _ in range(chance.randrange(3))))
                table.commit(batch, files)
    assert ids(open_table()) == sorted(wanted)


@pytest.mark.full
def test_rows_of_programs_that_write_at_the_same_time_are_in_the_table_once(open_table: Open) -> None:
    table = open_table()
    catalog = [table.catalog.name, table.catalog.properties]
    name = ".".join(table.iceberg.name())
    writers = [
        subprocess.Popen(
            [sys.executable, "-m", "support.other_writer", name, str(begin), str(begin + ROWS_OF_WRITER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited(), "PYTHONPATH": str(ROOT / "tests")},
        )
        for begin in (OTHERS * (number + 1) for number in range(WRITERS))
    ]
    try:
        for one in writers:
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write(json.dumps(catalog) + "\n")
            one.stdin.flush()
            assert one.stdout.readline() == "ready\n"
        for one in writers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        number = 0
        while number < ROWS_OF_WRITER or any(one.poll() is None for one in writers):
            assert table.commit(QueryBatch("q", number), write(table, rows([number]))).added
            number += 1
        assert [one.wait(scaled(WRITERS_DEADLINE_S)) for one in writers] == [0] * WRITERS
    finally:
        for one in writers:
            one.kill()
            one.communicate()
    theirs = [OTHERS * (one + 1) + row for one in range(WRITERS) for row in range(ROWS_OF_WRITER)]
    assert ids(table) == sorted([*range(number), *theirs])
