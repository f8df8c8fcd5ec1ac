"""Maintenance of an archive: few large files, one manifest, few snapshots, and nothing on disk that nobody needs.

Run it now and then, as often as is convenient (an hour, a day), beside the archive, its readers and other maintenance:
nobody has to stop. A file that is not needed any more is deleted by the first run that finds it so for the grace
time, so the run that makes files superfluous never deletes them.

Always true: rows, offsets and the archive's place are the same before and after; whatever dies half way is finished by
the next run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRequest
from mansio.spark.iceberg.dead_letters import open_dead_letters
from mansio.spark.iceberg.orphan_cleanup import CleanupReport, remove_orphan_files, retry_on_conflict
from mansio.spark.iceberg.rewrite_data_files import TARGET_BYTES, RewriteReport, rewrite_data_files

if TYPE_CHECKING:
    from mansio.spark.iceberg.catalog import ArchiveTable

SNAPSHOTS_KEPT: Final = 10
GRACE_S: Final = 3600.0
NOT_TAGS: Final = ("now",)
"""What `--from-snapshot` means by itself: a tag comes first there, so all later reads would end at it."""


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one run did, and what the table comes to now."""

    rewritten: RewriteReport
    swept: CleanupReport
    files: int
    bytes: int
    rows: int
    seconds: float


def maintain(
    table: ArchiveTable,
    *,
    target_bytes: int = TARGET_BYTES,
    keep: int = SNAPSHOTS_KEPT,
    grace_s: float = GRACE_S,
    tag: str | None = None,
) -> MaintenanceReport:
    """Rewrite small files, merge manifests, expire all but the newest `keep` snapshots, delete what nothing needs; of
    the table of dead letters too, where there is one, expire and delete.

    `tag`: first give the table as it is now this name, which keeps its snapshot for ever. `grace_s`: how long a file
    must have been unreferenced, in seconds.

    Raises:
        InvalidRequest: The tag is there already.
        CommitConflict, CatalogLocked, ArchiveError, OSError: See `rewrite_data_files` and `remove_orphan_files`.
    """
    began = time.monotonic()
    table.refresh()
    if tag is not None:
        tag_snapshot(table, tag)
    rewritten = rewrite_data_files(table, target_bytes)
    swept = remove_orphan_files(table, keep=keep, grace_s=grace_s)
    dead_letters = open_dead_letters(table, create=False)
    if dead_letters is not None:
        remove_orphan_files(dead_letters, keep=keep, grace_s=grace_s)
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
    """Name the newest snapshot, so that it is kept, and return its id. `InvalidRequest`: the name is taken."""
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
