"""Expiry of snapshots and removal of orphan files (Iceberg's remove_orphan_files).

A file is deleted when it has been unreferenced for the whole grace time. The age of the file does not show this: a file
that was replaced a minute ago may be years old, and a running reader may still need it. Therefore the time at which a
cleanup first found the file unreferenced is stored beside the table's metadata. The first cleanup only records this
time, and a later one deletes the file.

Invariants:
* Files referenced by a retained snapshot, tag or branch, and files that a running batch wrote within the grace time,
  are never deleted.
* A cleanup that is interrupted leaves a consistent table.
"""

from __future__ import annotations

import json
import posixpath
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table.update import RemoveSnapshotsUpdate

from mansio.iceberg.commit import expirable_snapshots
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.rewrite import MAINTENANCE_SUMMARY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyarrow.fs import FileSystem
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

    from mansio.iceberg.catalog import CatalogTable

DELETABLE_FILES: Final = (("data", (".parquet",)), ("metadata", (".avro", ".metadata.json")))
"""(directory of a table, suffixes of the files that may be deleted in it)."""
UNREFERENCED_SINCE_FILE: Final = "metadata/mansio-unreferenced.json"


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """Result of a cleanup. `files_waiting` counts unreferenced files whose grace time has not expired."""

    snapshots_expired: int
    files_deleted: int
    bytes_deleted: int
    files_waiting: int
    bytes_waiting: int


def remove_orphan_files(
    table: CatalogTable,
    *,
    snapshots_kept: int,
    grace_s: float,
    now_ms: int | None = None,
    is_dry_run: bool = False,
) -> CleanupReport:
    """Expire all snapshots except the newest `snapshots_kept` and those with a tag or branch, then delete orphan files.
    `grace_s`: time for which a file must have been unreferenced, in seconds. `is_dry_run`: return what would be done
    now, and change nothing; files that only an expired snapshot refers to are not counted.

    Raises:
        CommitConflict: Concurrent commits prevented the expiry of snapshots.
        ArchiveError: The table refers to a file under another path: nothing is deleted.
        OSError: The warehouse cannot be read or written.
    """
    if is_dry_run:
        table.refresh()
        expired = len(_expirable(table.iceberg.metadata, snapshots_kept))
    else:
        expired = expire_snapshots(table, snapshots_kept)
    now = int(time.time() * 1000) if now_ms is None else now_ms
    return _delete_unreferenced(table, expired, int(grace_s * 1000), now, is_dry_run=is_dry_run)


def expire_snapshots(table: CatalogTable, snapshots_kept: int) -> int:
    """Remove all snapshots from the metadata except the newest `snapshots_kept` and those with a tag or branch. Returns
    the number of removed snapshots. Deletes no file.

    The change also adds a snapshot without any change of rows. It moves the branch, so that a concurrent commit that
    expires the same snapshots is detected.
    """

    def attempt() -> int:
        old = _expirable(table.iceberg.metadata, snapshots_kept)
        if old:
            with table.transaction() as transaction:
                transaction.update_snapshot(snapshot_properties=MAINTENANCE_SUMMARY).merge_append().commit()
                transaction._apply((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": old}),))
        return len(old)

    return table.retry_on_conflict(attempt)


def _expirable(metadata: TableMetadata, snapshots_kept: int) -> list[int]:
    """Return the ids of the snapshots to expire. One less than `snapshots_kept` remain, because the change adds one."""
    kept = max(snapshots_kept, 1)
    return expirable_snapshots(metadata, kept=kept - 1, count_min=kept + 1, is_current_kept=False)


def _delete_unreferenced(
    table: CatalogTable, expired: int, grace_ms: int, now_ms: int, *, is_dry_run: bool
) -> CleanupReport:
    filesystem, root = _location(table.iceberg)
    found = _list_files(filesystem, root)
    # References are read after the listing: a file committed in between is listed and referenced, never the reverse.
    table.refresh()
    with table.catalog_errors():
        needed = referenced_paths(table.iceberg)
    first_seen_path = f"{root}/{UNREFERENCED_SINCE_FILE}"
    unreferenced = {path: size for path, size in found.items() if path not in needed}
    _check_locations(needed, found, unreferenced)
    seen = _read_unreferenced_since(filesystem, first_seen_path)
    waiting: dict[str, int] = {}
    deleted_bytes = waiting_bytes = 0
    for path, size in unreferenced.items():
        since_ms = seen.get(path, now_ms)
        if now_ms - since_ms >= grace_ms:
            if not is_dry_run:
                _delete(filesystem, path)
            deleted_bytes += size
        else:
            waiting[path] = since_ms
            waiting_bytes += size
    if (waiting or seen) and not is_dry_run:
        with filesystem.open_output_stream(first_seen_path) as stream:
            stream.write(json.dumps(waiting, indent=0).encode())
    return CleanupReport(
        expired, len(unreferenced) - len(waiting), deleted_bytes, len(waiting), waiting_bytes
    )


def referenced_paths(table: Table) -> set[str]:
    """Paths of all files that the table's metadata refers to, in any retained snapshot."""
    metadata = table.metadata
    locations = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    locations.update(one.statistics_path for one in (*metadata.statistics, *metadata.partition_statistics))
    manifests = {}
    for snapshot in metadata.snapshots:
        locations.add(snapshot.manifest_list)
        manifests.update({one.manifest_path: one for one in snapshot.manifests(table.io)})
    for path, manifest in manifests.items():
        locations.add(path)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            locations.add(entry.data_file.file_path)
    return {_path_of(location) for location in locations}


def _location(table: Table) -> tuple[FileSystem, str]:
    """Return the table's file system and the path of its directory."""
    io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
    scheme, host, path = PyArrowFileIO.parse_location(table.location(), io.properties)
    return io.fs_by_scheme(scheme, host), path.rstrip("/")


def _path_of(location: str) -> str:
    return PyArrowFileIO.parse_location(location)[2]


def _list_files(filesystem: FileSystem, root: str) -> dict[str, int]:
    """Sizes of the files in `DELETABLE_FILES`, by path. Other files are ignored."""
    from pyarrow.fs import FileSelector, FileType

    entries = filesystem.get_file_info(FileSelector(root, recursive=True))
    return {
        entry.path: entry.size
        for entry in entries
        if entry.type is FileType.File
        and any(
            entry.path.startswith(f"{root}/{directory}/") and entry.path.endswith(suffix)
            for directory, suffix in DELETABLE_FILES
        )
    }


def _check_locations(needed: set[str], found: Mapping[str, int], unreferenced: Mapping[str, int]) -> None:
    """Raise `ArchiveError` if the table refers to its files by another path than the listing (a link, another mount).
    Referenced files would then look like orphans. File names are unique, so this is the case if an unreferenced file
    has the name of a referenced file that the listing lacks.
    """
    by_name = {posixpath.basename(path): path for path in needed if path not in found}
    for path in unreferenced:
        name = posixpath.basename(path)
        if name in by_name:
            raise ArchiveError(
                f"the table refers to {by_name[name]}, which is found as {path}: nothing is deleted"
            )


def _read_unreferenced_since(filesystem: FileSystem, path: str) -> dict[str, int]:
    """Time (ms) at which each file was first found unreferenced. If these times cannot be read, none are returned,
    which only delays deletions.
    """
    try:
        with filesystem.open_input_stream(path) as stream:
            first_seen = json.loads(stream.read())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(first_seen, dict):
        return {}
    return {path: since_ms for path, since_ms in first_seen.items() if type(since_ms) is int}


def _delete(filesystem: FileSystem, path: str) -> None:
    try:
        filesystem.delete_file(path)
    except FileNotFoundError:
        return  # deleted by a concurrent cleanup
