"""A micro-batch is in a result table exactly once: after any crash, repeat or race. Real catalogs and files, no JVM."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from mansio.iceberg.archive.table import ArchiveTable
from mansio.iceberg.errors import CommitConflict, InvalidDataFiles, StaleCheckpoint
from mansio.iceberg.orphan_cleanup import expire_snapshots
from mansio.iceberg.result_table.commit import (
    QUERIES_MAX,
    QUERY_RETENTION_MS,
    FilesChanged,
    QueryBatch,
    is_committed,
    last_batches,
    with_batch,
)
from support.result_tables import append, live_rows, open_result, rows, write
from support.tiers import examples


def ids(table: object) -> list[int]:
    return sorted(row[0] for row in live_rows(table))  # type: ignore[arg-type]


def test_repeated_batch_adds_nothing_also_after_its_snapshot_was_expired(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    assert append(table, QueryBatch("q", 4), rows(range(5)))
    assert append(table, QueryBatch("q", 5), rows(range(5, 7)))
    expire_snapshots(ArchiveTable(table.iceberg, "", table.catalog.address), 1)
    again = open_result(tmp_path)
    assert again.is_committed(QueryBatch("q", 5))
    assert not append(again, QueryBatch("q", 5), rows(range(5, 7)))
    assert ids(again) == list(range(7))


@pytest.mark.parametrize(
    "batch", [QueryBatch("q", 4, "a"), QueryBatch("q", 5, "other")], ids=["earlier", "planned again"]
)
def test_batch_of_an_old_copy_of_the_checkpoint_is_refused_rather_than_taken_for_a_repeated_one(
    tmp_path: Path, batch: QueryBatch
) -> None:
    table = open_result(tmp_path)
    for number in (4, 5):
        assert append(table, QueryBatch("q", number, "a"), rows([number]))
    assert table.is_committed(QueryBatch("q", 5, "a"))
    with pytest.raises(StaleCheckpoint, match="the table has batch 5 of this pipeline"):
        append(table, batch, rows([6]))
    assert ids(table) == [4, 5]


def test_crash_before_the_commit_leaves_no_row_and_the_repeat_adds_all(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    write(table, rows(range(5)))
    assert ids(table) == []
    assert append(table, QueryBatch("q", 0), rows(range(5)))
    assert ids(table) == list(range(5))


def test_queries_of_one_table_do_not_hide_each_others_batches(tmp_path: Path) -> None:
    one, two = open_result(tmp_path), open_result(tmp_path)
    assert append(one, QueryBatch("one", 0), rows(range(3)))
    assert append(two, QueryBatch("two", 0), rows(range(3, 5)))
    assert not append(one, QueryBatch("two", 0), rows(range(3, 5)))
    assert ids(one) == list(range(5))


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_commit_of_unknown_outcome_is_looked_up_before_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    table = open_result(tmp_path)
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def unknown(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        if landed:
            original(*given)  # type: ignore[arg-type]
        raise CommitStateUnknownException("the connection was lost")

    monkeypatch.setattr(catalog, "commit_table", unknown)
    assert append(table, QueryBatch("q", 0), rows(range(5))) is not landed
    assert ids(table) == list(range(5))


@pytest.mark.parametrize("retries", ["0", "4"], ids=["own", "foreign"])
def test_zombie_that_commits_the_same_batch_first_wins_and_the_batch_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: str
) -> None:
    """Also in a table whose properties let pyiceberg repeat a commit by itself."""
    table, zombie = open_result(tmp_path), open_result(tmp_path)
    with table.iceberg.transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": retries})
    zombie.refresh()
    catalog = table.iceberg.catalog
    original = catalog.commit_table

    def overtaken(*given: object) -> object:
        monkeypatch.setattr(catalog, "commit_table", original)
        assert append(zombie, QueryBatch("q", 0), rows(range(5)))
        return original(*given)  # type: ignore[arg-type]

    files = write(table, rows(range(5)))
    monkeypatch.setattr(catalog, "commit_table", overtaken)
    assert not table.commit(QueryBatch("q", 0), files).added
    assert ids(table) == list(range(5))


def test_conflicts_are_retried_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_result(tmp_path)
    attempts = []

    def refused(*_given: object) -> object:
        attempts.append(1)
        raise CommitFailedException("another commit was first")

    files = write(table, rows(range(5)))
    with monkeypatch.context() as patched:
        patched.setattr(table.iceberg.catalog, "commit_table", refused)
        patched.setattr("mansio.iceberg.commit.COMMIT_RETRY_BACKOFF_S", 0)
        with pytest.raises(CommitConflict, match="in 16 attempts to add batch 0 to"):
            table.commit(QueryBatch("q", 0), files)
    assert len(attempts) == 16
    assert ids(table) == []


def test_files_are_replaced_in_the_transaction_that_stores_the_batch(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    first = write(table, rows(range(5)))
    assert table.commit(QueryBatch("q", 0), first).added
    second = write(table, rows(range(3, 9)))
    for expected in (True, False):
        assert table.commit(QueryBatch("q", 1), second, [file.path for file in first]).added is expected
        assert ids(table) == list(range(3, 9))
    with pytest.raises(FilesChanged):
        table.commit(QueryBatch("q", 2), write(table, rows([1])), [second[0].path], lambda: False)
    assert ids(table) == list(range(3, 9))


def test_file_that_is_not_as_its_task_reported_is_refused(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    (file,) = write(table, rows(range(5)))
    (other,) = write(table, rows(range(6)))
    content = Path(other.path.removeprefix("file://")).read_bytes()
    Path(file.path.removeprefix("file://")).write_bytes(content)
    with pytest.raises(InvalidDataFiles, match="has 6 rows"):
        table.commit(QueryBatch("q", 0), [file])
    assert ids(table) == []


def test_partition_of_each_file_is_that_of_its_rows_and_scans_prune_by_it(tmp_path: Path) -> None:
    from mansio.iceberg.result_table.partition_spec import parse_partition_by

    table = open_result(tmp_path, partition_by=parse_partition_by("day(ts), bucket(4, id)"))
    assert append(table, QueryBatch("q", 0), rows(range(100)))
    assert ids(table) == list(range(100))
    for number in (0, 17, 99):
        found = table.iceberg.scan(row_filter=f"id == {number}").to_arrow()
        assert found["name"].to_pylist() == [f"x{number}"]
        assert len(list(table.iceberg.scan(row_filter=f"id == {number}").plan_files())) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["one", "two"]), st.sampled_from(["done", "crash", "unknown", "maintain"])),
    max_size=12,
)


@settings(max_examples=examples(3, 40), deadline=None)
@given(steps=STEPS)
def test_any_history_of_crashes_and_repeats_adds_each_batch_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]
) -> None:
    """Two queries write batches. A crash after the commit, before the checkpoint, repeats the batch."""
    place = tmp_path_factory.mktemp("history")
    table = open_result(place)
    next_batch = {"one": 0, "two": 0}
    model: set[tuple[str, int]] = set()
    for query, outcome in steps:
        if outcome == "maintain":
            expire_snapshots(ArchiveTable(table.iceberg, "", table.catalog.address), 1)
            continue
        number = next_batch[query]
        batch = QueryBatch(query, number)
        values = rows([number + (1000 if query == "two" else 0)])
        if outcome == "crash":
            write(table, values)  # killed before the commit
        else:
            added = append(open_result(place), batch, values)
            assert added is ((query, number) not in model)
            model.add((query, number))
            if outcome == "done":
                next_batch[query] += 1  # the checkpoint has it
    expected = sorted(number + (1000 if query == "two" else 0) for query, number in model)
    assert ids(table) == expected


def test_entries_of_queries_are_bounded_and_a_recent_one_is_never_forgotten() -> None:
    properties: dict[str, str] = {}
    now = 10 * QUERY_RETENTION_MS
    for number in range(QUERIES_MAX):
        properties |= with_batch(properties, QueryBatch(f"old{number}", 1), now - QUERY_RETENTION_MS - 1)
    properties |= with_batch(properties, QueryBatch("recent", 7), now - 1)
    properties |= with_batch(properties, QueryBatch("new", 0), now)
    assert set(last_batches(properties)) == {"recent", "new"}
    assert is_committed(properties, QueryBatch("recent", 7))
    assert not is_committed(properties, QueryBatch("recent", 8))
