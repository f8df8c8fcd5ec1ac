"""Maintenance of an archive: compaction of files and manifests, expiry of snapshots, removal of orphan files.

Run it periodically (hourly, daily), concurrently with the archive, its readers and other maintenance. A file is deleted
by the first run that finds it unreferenced for the whole grace time, so the run that replaces a file never deletes it.

Invariants:
* Rows, offsets and location of the archive do not change.
* An interrupted run is completed by the next one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRequest
from mansio.spark.iceberg.dead_letters import open_dead_letters
from mansio.spark.iceberg.orphan_cleanup import CleanupReport, remove_orphan_files, retry_on_conflict
from mansio.spark.iceberg.rewrite_data_files import TARGET_FILE_BYTES, RewriteReport, rewrite_data_files

if TYPE_CHECKING:
    from mansio.spark.iceberg.catalog import ArchiveTable

SNAPSHOTS_KEPT: Final = 10
GRACE_S: Final = 3600.0
NOT_TAGS: Final = ("now",)
"""Names with a meaning in `--from-snapshot`: tags have precedence there, so such a tag would redirect all later
reads.
"""


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """Result of one run, and the table's size afterwards."""

    rewritten: RewriteReport
    swept: CleanupReport
    files: int
    bytes: int
    rows: int
    seconds: float


def maintain(
    table: ArchiveTable,
    *,
    target_bytes: int = TARGET_FILE_BYTES,
    snapshots_kept: int = SNAPSHOTS_KEPT,
    grace_s: float = GRACE_S,
    tag: str | None = None,
) -> MaintenanceReport:
    """Rewrite small files, merge manifests, expire all but the newest `keep` snapshots, and delete orphan files; for a
    table of dead letters, only expire and delete.

    `tag`: first give the current state this name, which retains its snapshot permanently. `grace_s`: time for which a
    file must have been unreferenced, in seconds.

    Raises:
        InvalidRequest: The tag exists.
        CommitConflict, CatalogLocked, ArchiveError, OSError: As in `rewrite_data_files` and `remove_orphan_files`.
    """
    began = time.monotonic()
    table.refresh()
    if tag is not None:
        tag_snapshot(table, tag)
    rewritten = rewrite_data_files(table, target_bytes)
    swept = remove_orphan_files(table, snapshots_kept=snapshots_kept, grace_s=grace_s)
    dead_letters = open_dead_letters(table, create=False)
    if dead_letters is not None:
        remove_orphan_files(dead_letters, snapshots_kept=snapshots_kept, grace_s=grace_s)
    files = table.live_files()
    return MaintenanceReport(
        rewritten,
        swept,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        rows=sum(file.rows for file in files),
        seconds=time.monotonic() - began,
    )


def tag_snapshot(table: ArchiveTable, name: str) -> int:
    """Tag the newest snapshot, so that it is retained, and return its id. Raises `InvalidRequest` if the tag exists."""
    if name.isdigit() or name in NOT_TAGS:
        raise InvalidRequest(f"{name} cannot be a tag: it would be taken for a snapshot's id, or a time")

    def attempt() -> int:
        newest = table.iceberg.current_snapshot()
        if newest is None:
            raise InvalidRequest(f"{table.name} is empty: there is nothing to tag")
        if name in table.iceberg.metadata.refs:
            raise InvalidRequest(f"{table.name} has a tag or branch {name} already")
        table.iceberg.manage_snapshots().create_tag(newest.snapshot_id, name).commit()
        return newest.snapshot_id

    return retry_on_conflict(table, attempt)
