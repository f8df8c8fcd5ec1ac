"""Maintenance of an archive: compaction of files and manifests, expiry of snapshots, removal of orphan files.

Maintenance is run periodically (hourly, daily), concurrently with the archive, its readers and other maintenance. A
file is deleted by the first run that finds it unreferenced for the whole grace time, so a run never deletes the files
that it has replaced itself.

Invariants:
* Rows, offsets and location of the archive do not change.
* An interrupted run is completed by the next one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRequest
from mansio.iceberg.archive.dead_letters import open_dead_letters
from mansio.iceberg.archive.rewrite_data_files import planned_rewrite, rewrite_data_files
from mansio.iceberg.fanout_writer import TARGET_FILE_BYTES
from mansio.iceberg.orphan_cleanup import CleanupReport, remove_orphan_files

if TYPE_CHECKING:
    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.catalog import CatalogTable
    from mansio.iceberg.rewrite import RewriteReport

SNAPSHOTS_RETAINED: Final = 10
GRACE_S: Final = 3600.0
RESERVED_TAG_NAMES: Final = ("now",)
"""Names that `--from-snapshot` understands as a time. A tag has precedence there, so these names must not be tags."""


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """Result of one run: of the file rewrite, of the cleanup (`swept`), and the table's size afterwards."""

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
    snapshots_kept: int = SNAPSHOTS_RETAINED,
    grace_s: float = GRACE_S,
    tag: str | None = None,
    is_dry_run: bool = False,
) -> MaintenanceReport:
    """Rewrite small files, merge manifests, expire all but the newest `snapshots_kept` snapshots, and delete orphan
    files. In the dead-letter table, only expire snapshots and delete orphan files.

    `tag`: name for the current snapshot, which is then retained permanently. `grace_s`: time for which a file must have
    been unreferenced, in seconds. `is_dry_run`: change nothing; the report has what would be done
    now to the archive, not to its dead-letter table.

    Raises:
        InvalidRequest: The tag exists.
        CommitConflict, CatalogLocked, ArchiveError, ConfigError, OSError: As in
            `rewrite_data_files` and `remove_orphan_files`.
    """
    began = time.monotonic()
    table.refresh()
    if tag is not None and not is_dry_run:
        tag_snapshot(table, tag)
    rewritten = (planned_rewrite if is_dry_run else rewrite_data_files)(table, target_bytes)
    swept = remove_orphan_files(table, snapshots_kept=snapshots_kept, grace_s=grace_s, is_dry_run=is_dry_run)
    dead_letters = open_dead_letters(table, create=False)
    if dead_letters is not None and not is_dry_run:
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


def tag_snapshot(table: CatalogTable, name: str) -> int:
    """Tag the newest snapshot, so that it is retained, and return its id. Raises `InvalidRequest` for a name that
    exists or is reserved.
    """
    if name.isdigit() or name in RESERVED_TAG_NAMES:
        raise InvalidRequest(f"{name} cannot be a tag: it would be taken for a snapshot's id, or a time")

    def attempt() -> int:
        newest = table.iceberg.current_snapshot()
        if newest is None:
            raise InvalidRequest(f"{table.name} is empty: there is nothing to tag")
        if name in table.iceberg.metadata.refs:
            raise InvalidRequest(f"{table.name} has a tag or branch {name} already")
        table.iceberg.manage_snapshots().create_tag(newest.snapshot_id, name).commit()
        return newest.snapshot_id

    return table.retry_on_conflict(attempt)
