"""Orphan cleanup: files that no snapshot refers to are removed after the grace period and not before; other files are
kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from pyiceberg.table.update import SetLocationUpdate

from mansio.iceberg.archive.commit import commit_batch
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.orphan_cleanup import UNREFERENCED_SINCE_FILE, expire_snapshots, remove_orphan_files
from support.archive_tables import Archive, row, rows_of
from support.present import present

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.iceberg.archive.table import ArchiveTable

GRACE_S = 3600
NOW_MS = 1_800_000_000_000
LATER_MS = NOW_MS + GRACE_S * 1000


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


@pytest.fixture
def table(archive: Archive) -> ArchiveTable:
    table = archive.open()
    for _ in range(6):
        archive.add(table, {0: 7, 1: 3})
    return table


def files_on_disk(table: ArchiveTable) -> set[str]:
    root = table.iceberg.location().removeprefix("file://")
    return {os.path.join(place, name) for place, _, names in os.walk(root) for name in names}


def data_files(table: ArchiveTable) -> set[str]:
    return {path for path in files_on_disk(table) if path.endswith(".parquet")}


def test_replaced_files_are_deleted_when_they_were_unreferenced_for_the_grace_time(
    archive: Archive, table: ArchiveTable
) -> None:
    before = rows_of(scan(table))
    rewrite_data_files(table, 1 << 20)
    first = remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=NOW_MS)
    assert first.snapshots_expired > 0
    assert first.files_deleted == 0
    assert first.files_waiting >= 12
    assert len(data_files(table)) == 14
    early = remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS - 1)
    assert early.files_deleted == 0
    last = remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS)
    assert last.files_deleted == first.files_waiting
    assert last.bytes_deleted == first.bytes_waiting > 0
    assert data_files(table) == {file.path.removeprefix("file://") for file in table.live_files()}
    assert rows_of(scan(archive.open())) == before
    archive.add(archive.open(), {0: 1})


@pytest.mark.full
def test_what_a_kept_snapshot_or_a_tag_refers_to_stays_readable(
    archive: Archive, table: ArchiveTable
) -> None:
    old = table.iceberg.current_snapshot()
    assert old is not None
    before = rows_of(scan(table))
    table.iceberg.manage_snapshots().create_tag(old.snapshot_id, "kept").commit()
    rewrite_data_files(table, 1 << 20)
    for now_ms in (NOW_MS, LATER_MS):
        remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=now_ms)
    assert rows_of(scan(archive.open(), snapshot_id=old.snapshot_id)) == before
    assert {one.snapshot_id for one in table.iceberg.metadata.snapshots} >= {old.snapshot_id}
    assert len(table.iceberg.metadata.snapshots) == 2


def test_files_of_a_batch_under_way_are_not_deleted(archive: Archive, table: ArchiveTable) -> None:
    written = archive.write(table, [row(0, 42)])
    remove_orphan_files(table, snapshots_kept=5, grace_s=GRACE_S, now_ms=NOW_MS)
    waited = remove_orphan_files(table, snapshots_kept=5, grace_s=GRACE_S, now_ms=LATER_MS - 1)
    assert waited.files_deleted == 0
    with table.iceberg.transaction() as change:
        change.add_files([written.file.path], check_duplicate_files=False)
    remove_orphan_files(table, snapshots_kept=5, grace_s=GRACE_S, now_ms=LATER_MS * 2)
    assert len(rows_of(scan(archive.open()))) == 61


def test_a_file_that_is_needed_again_starts_its_grace_time_again(
    archive: Archive, table: ArchiveTable
) -> None:
    written = archive.write(table, [row(0, 42)])
    path = written.file.path.removeprefix("file://")
    remove_orphan_files(table, snapshots_kept=50, grace_s=GRACE_S, now_ms=NOW_MS)
    with table.iceberg.transaction() as change:
        change.add_files([written.file.path], check_duplicate_files=False)
    remove_orphan_files(table, snapshots_kept=50, grace_s=GRACE_S, now_ms=NOW_MS + 1)
    with table.iceberg.transaction() as change:
        change.delete("__offset = 42 and __partition = 0")
    remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS)
    assert os.path.exists(path)


def test_a_sweep_that_died_half_way_is_finished_by_the_next(
    table: ArchiveTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mansio.iceberg import orphan_cleanup as sweeping

    rewrite_data_files(table, 1 << 20)
    remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=NOW_MS)
    delete = sweeping._delete
    deleted: list[str] = []

    def die(filesystem: object, path: str) -> None:
        if len(deleted) == 3:
            raise OSError("killed")
        deleted.append(path)
        delete(filesystem, path)

    monkeypatch.setattr(sweeping, "_delete", die)
    with pytest.raises(OSError, match="killed"):
        remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS)
    monkeypatch.undo()
    remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS)
    assert data_files(table) == {file.path.removeprefix("file://") for file in table.live_files()}
    assert len(rows_of(scan(table))) == 60


def test_a_table_that_names_its_files_by_another_path_loses_none(table: ArchiveTable, tmp_path: Path) -> None:
    table.refresh()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "warehouse")
    moved = table.iceberg.location().replace("/warehouse/", "/link/")
    with table.iceberg.transaction() as change:
        change._apply((SetLocationUpdate(location=moved),))
    before = files_on_disk(table)
    with pytest.raises(ArchiveError, match="nothing is deleted"):
        remove_orphan_files(table, snapshots_kept=50, grace_s=0)
    assert files_on_disk(table) >= before


def test_files_that_are_not_of_the_table_stay(table: ArchiveTable) -> None:
    root = table.iceberg.location().removeprefix("file://")
    strangers = {
        f"{root}/notes.txt",
        f"{root}/checkpoint/offsets/0",
        f"{root}/data/readme.md",
        f"{root}/x.parquet",
    }
    for path in strangers:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("mine")
    orphan = f"{root}/data/orphan.parquet"
    with open(orphan, "w") as file:
        file.write("left by a task that died")
    remove_orphan_files(table, snapshots_kept=1, grace_s=0)
    left = files_on_disk(table)
    assert strangers <= left
    assert orphan not in left


def test_damaged_marks_only_delay_the_deletion(table: ArchiveTable) -> None:
    rewrite_data_files(table, 1 << 20)
    first = remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=NOW_MS)
    marks = os.path.join(table.iceberg.location().removeprefix("file://"), UNREFERENCED_SINCE_FILE)
    with open(marks, "w") as file:
        file.write('{"half')
    assert (
        remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS).files_waiting
        == first.files_waiting
    )
    assert (
        remove_orphan_files(table, snapshots_kept=1, grace_s=GRACE_S, now_ms=LATER_MS * 2).files_deleted
        == first.files_waiting
    )


def test_expiry_keeps_the_newest_snapshots(table: ArchiveTable) -> None:
    before = [one.snapshot_id for one in table.iceberg.metadata.snapshots]
    assert expire_snapshots(table, 3) == 4
    table.refresh()
    assert [one.snapshot_id for one in table.iceberg.metadata.snapshots][:-1] == before[-2:]
    assert expire_snapshots(table, 3) == 0


@pytest.mark.parametrize("other_is_an_archive", [True, False])
def test_expiry_beside_another_that_expires_the_same_snapshots(
    archive: Archive, table: ArchiveTable, monkeypatch: pytest.MonkeyPatch, *, other_is_an_archive: bool
) -> None:
    """The second one sees it and looks again."""
    other, begin = archive.open(), table.transaction
    monkeypatch.setitem(present(commit_batch.__kwdefaults__), "snapshots_max", 4)

    def begin_late() -> object:
        monkeypatch.setattr(table, "transaction", begin)
        if other_is_an_archive:
            archive.add(other, {0: 1})
        else:
            expire_snapshots(other, 3)
        return begin()

    monkeypatch.setattr(table, "transaction", begin_late)
    expire_snapshots(table, 2)
    reopened = archive.open()
    assert len(reopened.iceberg.metadata.snapshots) == 2
    assert len(rows_of(scan(reopened))) == 60 + other_is_an_archive


@pytest.mark.full
def test_the_archive_goes_on_after_snapshots_it_knew_were_expired(
    archive: Archive, table: ArchiveTable
) -> None:
    other = archive.open()
    for _ in range(24):
        archive.add(other, {0: 1})
    assert len(other.iceberg.metadata.snapshots) == 30
    expire_snapshots(table, 5)
    archive.add(other, {0: 1})
    assert len(rows_of(scan(archive.open()))) == 60 + 25
