"""Live data files of a snapshot, read once from its manifests, and the commit that replaces some of them.

pyiceberg reads all manifests again in every step of an overwrite (scan, search for the replaced files, rewrite of the
manifests), and never merges them, so each commit would cost more than the one before.

Invariants:
* A manifest is read once, as long as consecutive snapshots refer to it: manifests are immutable.
* A commit replaces exactly the given files, or fails.
* Manifests without live files are left out, and small ones are merged by the rules of `commit.manifest.*`.

Private names of pyiceberg (`_OverwriteFiles`, `_MergeAppendFiles`) are tested with version 0.12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyiceberg.manifest import DataFileContent, ManifestContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _MergeAppendFiles
from pyiceberg.typedef import EMPTY_DICT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyiceberg.manifest import DataFile, ManifestFile
    from pyiceberg.table import Table, Transaction

CACHED_ENTRIES_MAX: Final = 50_000
"""Number of live files above which the entries of a snapshot are not kept for the next one."""


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The live files of a snapshot: its manifests of data files with their live entries, and those of row-level
    deletes. `snapshot_id`: None if the table is empty.
    """

    snapshot_id: int | None = None
    manifests: tuple[tuple[ManifestFile, tuple[ManifestEntry, ...]], ...] = ()
    deletes: tuple[ManifestFile, ...] = ()

    def entries(self) -> Iterator[ManifestEntry]:
        """Yield the entry of each live data file."""
        for _, entries in self.manifests:
            yield from entries

    def data_files(self) -> Iterator[DataFile]:
        """Yield the live data files."""
        for entry in self.entries():
            yield entry.data_file


class SnapshotReader:
    """Reads the live files of a table's current snapshot. Keeps those of the last one that it has read."""

    def __init__(self) -> None:
        self._last = SnapshotFiles()

    def read(self, table: Table) -> SnapshotFiles:
        """Return the live files of the current snapshot, as of the table's last refresh. Raises OSError."""
        snapshot = table.current_snapshot()
        if snapshot is None:
            return SnapshotFiles()
        if snapshot.snapshot_id == self._last.snapshot_id:
            return self._last
        known = {manifest.manifest_path: entries for manifest, entries in self._last.manifests}
        manifests, deletes = [], []
        for manifest in snapshot.manifests(table.io):
            if manifest.content == ManifestContent.DELETES:
                deletes.append(manifest)
                continue
            entries = known.get(manifest.manifest_path)
            if entries is None:
                entries = tuple(manifest.fetch_manifest_entry(table.io, discard_deleted=True))
            manifests.append((manifest, entries))
        found = SnapshotFiles(snapshot.snapshot_id, tuple(manifests), tuple(deletes))
        is_small = sum(len(entries) for _, entries in manifests) <= CACHED_ENTRIES_MAX
        self._last = found if is_small else SnapshotFiles()
        return found


class ReplaceDataFiles(_MergeAppendFiles):
    """Snapshot that removes data files of the snapshot `files`, the branch's current one, and adds others:
    `with ReplaceDataFiles(...) as change: change.delete_data_file(old); change.append_data_file(new)`.
    """

    def __init__(
        self,
        transaction: Transaction,
        files: SnapshotFiles,
        summary: Mapping[str, str],
        *,
        has_same_rows: bool = False,
    ) -> None:
        """`has_same_rows`: the added files have the rows of the removed ones. Incremental readers of other engines skip
        such a snapshot (operation `replace`), and fail at one that overwrites rows.
        """
        super().__init__(
            Operation.OVERWRITE, transaction, transaction._table.io, snapshot_properties=dict(summary)
        )
        self._files = files
        self._has_same_rows = has_same_rows
        self._live = {manifest.manifest_path: entries for manifest, entries in files.manifests}

    def fetch_manifest_entry(
        self, manifest: ManifestFile, discard_deleted: bool = True
    ) -> list[ManifestEntry]:
        """Return the entries of a manifest that is merged. Earlier deletions are not copied, so live ones are
        enough.
        """
        known = self._live.get(manifest.manifest_path)
        return super().fetch_manifest_entry(manifest, discard_deleted) if known is None else list(known)

    def _summary(self, snapshot_properties: Mapping[str, str] = EMPTY_DICT) -> Summary:
        summary = super()._summary(dict(snapshot_properties))
        if not self._has_same_rows:
            return summary
        return Summary(
            Operation.REPLACE, **summary.additional_properties
        )  # pyiceberg computes no totals for it

    def _build_delete_files_partition_predicate(self) -> None:
        """Do nothing: the predicate would choose the manifests to read."""

    def _deleted_entries(self) -> list[ManifestEntry]:
        found = [
            _copy(entry, ManifestEntryStatus.DELETED, self._snapshot_id)
            for entry in self._files.entries()
            if entry.data_file.content == DataFileContent.DATA and entry.data_file in self._deleted_data_files
        ]
        if len(found) != len(self._deleted_data_files):
            raise ValueError("files to be replaced are not in the current snapshot")
        return found

    def _existing_manifests(self) -> list[ManifestFile]:
        existing = []
        for manifest, entries in self._files.manifests:
            kept = [entry for entry in entries if entry.data_file not in self._deleted_data_files]
            if len(kept) == len(entries):
                if kept:
                    existing.append(manifest)
            elif kept:
                existing.append(self._write_manifest(manifest.partition_spec_id, kept))
        return [*existing, *self._files.deletes]

    def _write_manifest(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        with self.new_manifest_writer(self.spec(spec_id)) as writer:
            for entry in entries:
                writer.add_entry(_copy(entry, ManifestEntryStatus.EXISTING, entry.snapshot_id))
        return writer.to_manifest_file()


def _copy(entry: ManifestEntry, status: ManifestEntryStatus, snapshot_id: int | None) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )
