"""Maintenance of an archive table concurrent with an archive job, readers and another maintenance."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from mansio.errors import InvalidRequest
from mansio.iceberg.archive.table_scan import scan
from mansio.pipelines.maintain import maintain
from support.archive_tables import Archive, rows_of
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.iceberg.archive.table import ArchiveTable

BATCHES = 12
DEADLINE_S = 60
GRACE_S = 2.0


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


def places(table: ArchiveTable) -> list[tuple[int, int]]:
    return [(one["__partition"], one["__offset"]) for one in rows_of(scan(table, batch_rows=8))]


def whole(ends: dict[int, int]) -> list[tuple[int, int]]:
    return [(partition, offset) for partition in sorted(ends) for offset in range(ends[partition])]


@pytest.mark.full
def test_archive_readers_and_maintenance_do_not_disturb_each_other(archive: Archive) -> None:
    table = archive.open()
    archive.add(table, {0: 9, 1: 4})
    failures: list[BaseException] = []
    reads: list[int] = []
    runs: list[int] = []
    is_over = threading.Event()
    batches = 0

    def repeat(work: Callable[[ArchiveTable], None]) -> threading.Thread:
        def run() -> None:
            mine = archive.open()
            try:
                while not is_over.is_set():
                    work(mine)
            except BaseException as error:  # noqa: BLE001  # it belongs to the test's thread
                failures.append(error)
                is_over.set()

        return threading.Thread(target=run)

    def read(mine: ArchiveTable) -> None:
        mine.refresh()
        committed = mine.last_commit()
        assert committed is not None
        began = time.monotonic()
        try:
            assert places(mine) == whole(committed.offsets)
        except OSError:
            if time.monotonic() - began < GRACE_S:  # a machine that stood still is not the sweep's fault
                raise
        reads.append(1)

    def keep_in_order(mine: ArchiveTable) -> None:
        runs.append(
            maintain(mine, target_bytes=1 << 20, snapshots_kept=2, grace_s=GRACE_S).swept.files_deleted
        )

    threads = [repeat(read), repeat(keep_in_order), repeat(keep_in_order)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + scaled(DEADLINE_S)
        # Until files are deleted: that takes a batch after a rewrite, because two snapshots are kept.
        while (batches < BATCHES or not (sum(runs) > 0 and len(reads) > 2)) and not is_over.is_set():
            assert time.monotonic() < deadline, f"{batches} batches, {len(runs)} runs, {len(reads)} reads"
            if (
                batches >= BATCHES
            ):  # one after another, or rewrites and batches refuse each other for too long
                run_count = len(runs)
                while len(runs) < run_count + 4 and not is_over.is_set():
                    time.sleep(0.01)
            archive.add(table, {0: 9, 1: 4})
            batches += 1
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    report = maintain(archive.open(), target_bytes=1 << 20, snapshots_kept=1, grace_s=0)
    last = archive.open()
    assert places(last) == whole({0: 9 * (batches + 1), 1: 4 * (batches + 1)})
    assert (report.files, report.rows) == (len(last.live_files()), 13 * (batches + 1))
    kept = {os.path.basename(file.path) for file in last.live_files()}
    data = last.data_location.removeprefix("file://")
    assert set(os.listdir(data)) == kept


def test_a_tag_keeps_the_table_as_it_was_and_is_given_once(archive: Archive) -> None:
    table = archive.open()
    with pytest.raises(InvalidRequest, match="there is nothing to tag"):
        maintain(table, tag="early")
    archive.add(table, {0: 9})
    maintain(table, tag="early", snapshots_kept=1, grace_s=0)
    for _ in range(3):
        archive.add(table, {0: 9})
    maintain(table, snapshots_kept=1, grace_s=0)
    tagged = archive.open()
    snapshot = tagged.iceberg.metadata.refs["early"].snapshot_id
    assert len(rows_of(scan(tagged, snapshot_id=snapshot))) == 9
    assert len(rows_of(scan(tagged))) == 36
    with pytest.raises(InvalidRequest, match="has a tag or branch early already"):
        maintain(table, tag="early")
    with pytest.raises(InvalidRequest, match="taken for a snapshot's id, or a time"):
        maintain(table, tag="now")  # it is what replays go by where nothing is said: they would all end here
    with pytest.raises(InvalidRequest, match="taken for a snapshot's id"):
        maintain(table, tag="123")
