"""Rewriting small data files: the rows stay the same, archive jobs and readers continue, and the work does not grow."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from mansio.iceberg import rewrite
from mansio.iceberg.archive import rewrite_data_files as rewriting
from mansio.iceberg.archive.rewrite_data_files import choose_groups, rewrite_data_files
from mansio.iceberg.archive.table_format import LiveFile
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.commit import commit_files
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.rewrite import merge_manifests, replace_groups
from support.archive_tables import Archive, row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mansio.iceberg.archive.table import ArchiveTable

TARGET = 1 << 20


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


def filled(archive: Archive, batches: int) -> ArchiveTable:
    table = archive.open()
    for _ in range(batches):
        archive.add(table, {0: 7, 1: 3})
    return table


def manifests(table: ArchiveTable) -> int:
    snapshot = table.iceberg.current_snapshot()
    return 0 if snapshot is None else len(snapshot.manifests(table.iceberg.io))


def test_small_files_become_one_per_partition_and_the_rows_stay(archive: Archive) -> None:
    table = filled(archive, 12)
    before, committed, had = rows_of(scan(table)), table.last_commit(), manifests(table)
    report = rewrite_data_files(table, TARGET)
    reopened = archive.open()
    assert rows_of(scan(reopened)) == before
    assert reopened.last_commit() == committed
    assert [(file.partition, file.rows) for file in reopened.live_files()] == [(0, 84), (1, 36)]
    assert (report.files_replaced, report.files_written, report.rows) == (24, 2, 120)
    assert had == 12
    assert manifests(reopened) == report.manifests_after <= 2
    assert rewrite_data_files(table, TARGET).files_replaced == 0


def test_the_archive_goes_on_while_files_are_rewritten(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = filled(archive, 6), archive.open()
    commit = commit_files
    came_between: list[int] = []

    def commit_late(*given: Any, **named: Any) -> int:
        if len(came_between) < 2:
            came_between.append(1)
            archive.add(other, {0: 5})
        return commit(*given, **named)

    monkeypatch.setattr(rewrite, "commit_files", commit_late)
    report = rewrite_data_files(table, TARGET)
    assert report.files_replaced == 12
    found = rows_of(scan(archive.open()))
    assert [(one["__partition"], one["__offset"]) for one in found] == [
        *((0, offset) for offset in range(6 * 7 + 10)),
        *((1, offset) for offset in range(6 * 3)),
    ]
    archive.add(other, {0: 1, 1: 1})
    assert other.last_commit() == archive.open().last_commit()


@pytest.mark.full
def test_archive_and_rewriting_at_the_same_time_lose_and_double_nothing(archive: Archive) -> None:
    table, other = filled(archive, 3), archive.open()
    failures: list[BaseException] = []
    is_over = threading.Event()

    def keep_rewriting() -> None:
        mine = archive.open()
        try:
            while not is_over.is_set():
                rewrite_data_files(mine, TARGET)
        except BaseException as error:  # noqa: BLE001  # it belongs to the test's thread
            failures.append(error)

    thread = threading.Thread(target=keep_rewriting)
    thread.start()
    try:
        for _ in range(10):
            archive.add(other, {0: 7, 1: 3})
    finally:
        is_over.set()
        thread.join()
    assert not failures
    table.refresh()
    places = [(one["__partition"], one["__offset"]) for one in rows_of(scan(table))]
    assert places == [(0, offset) for offset in range(13 * 7)] + [(1, offset) for offset in range(13 * 3)]


def test_of_two_that_rewrite_the_same_files_one_wins(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = filled(archive, 4), archive.open()
    before = rows_of(scan(table))
    exchange = replace_groups

    def exchange_second(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(rewriting, "replace_groups", exchange)
        rewrite_data_files(other, TARGET)
        return exchange(*given, **named)

    monkeypatch.setattr(rewriting, "replace_groups", exchange_second)
    report = rewrite_data_files(table, TARGET)
    assert (report.files_replaced, report.files_conflicting) == (0, 8)
    assert rows_of(scan(archive.open())) == before


def test_a_reader_that_began_before_finishes_on_the_old_files(archive: Archive) -> None:
    table = filled(archive, 4)
    before = rows_of(scan(table))
    reading = scan(archive.open(), batch_rows=2)
    first = next(reading)
    rewrite_data_files(table, TARGET)
    assert first.to_pylist() + rows_of(reading) == before


def test_rows_that_are_not_those_the_table_lists_are_not_put_into_their_place(archive: Archive) -> None:
    table = filled(archive, 3)
    victim = table.live_files()[0]
    broken = archive.write(table, [row(0, offset) for offset in range(6)])
    with (
        open(broken.file.path.removeprefix("file://"), "rb") as source,
        open(victim.path.removeprefix("file://"), "wb") as target,
    ):
        target.write(source.read())
    with pytest.raises(ArchiveError, match="20 records were read where the table lists 21"):
        rewrite_data_files(table, TARGET)
    assert len(archive.open().live_files()) == 6


def test_manifests_are_merged_and_the_property_for_it_is_as_before(archive: Archive) -> None:
    table = filled(archive, 9)
    before, properties = rows_of(scan(table)), dict(table.iceberg.properties)
    assert manifests(table) == 9
    merge_manifests(table)
    reopened = archive.open()
    assert manifests(reopened) == 1
    assert dict(reopened.iceberg.properties) == properties
    assert rows_of(scan(reopened)) == before


def file(index: int, size: int, partition: int = 0) -> LiveFile:
    return LiveFile(f"{partition}-{index}", 1, size, partition, index, index, None, None)


def sizes(groups: Sequence[Sequence[LiveFile]]) -> list[list[int]]:
    return [[one.bytes for one in group] for group in groups]


def test_only_neighbours_are_put_together_and_large_files_are_left_alone() -> None:
    files = [file(0, 10), file(1, 10), file(2, 90), file(3, 10), file(4, 10), file(0, 10, partition=1)]
    assert sizes(choose_groups(files, 100)) == [[10, 10], [10, 10]]
    assert sizes(choose_groups([file(index, 40) for index in range(5)], 100)) == [[40, 40], [40, 40]]
    assert choose_groups([file(0, 10), file(0, 10, partition=1)], 100) == []


def test_what_was_merged_is_not_rewritten_for_every_small_file_that_comes() -> None:
    assert sizes(choose_groups([file(0, 40), file(1, 1), file(2, 1)], 1000)) == [[1, 1]]
    assert sizes(choose_groups([file(0, 40), file(1, 30), file(2, 15)], 1000)) == [[40, 30, 15]]


def test_each_record_is_rewritten_a_few_times_however_often_maintenance_runs() -> None:
    files: list[LiveFile] = []
    rewritten = 0
    for index in range(1000):
        files.append(file(index, 1))
        for group in choose_groups(files, 512):
            size = sum(one.bytes for one in group)
            rewritten += size
            files = [one for one in files if one not in group] + [file(group[0].first_offset, size)]
    assert rewritten <= 1000 * 10
    assert len(files) <= 1000 / 256 + 10
