"""Transactions of tables.

Private names of pyiceberg (`_updates`, `_apply`) are used in this package only, and tested with version 0.12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.table import Transaction
from pyiceberg.table.update import update_table_metadata

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableUpdate


class CachedMetadataTransaction(Transaction):
    """A pyiceberg transaction that is committed in one attempt, and that computes the changed metadata only once after
    each change.

    pyiceberg's own transaction computes them at every access, about twenty times per commit, and copies all snapshots
    each time. After a conflict it repeats the snapshots that are registered with it, without the check of this package.
    """

    _cached_metadata: tuple[tuple[TableUpdate, ...], TableMetadata, TableMetadata] | None = None

    def _register_snapshot_producer(self, producer: object) -> None:
        """Do nothing: a transaction without registered snapshots is not repeated."""

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata after this transaction."""
        updates, base = self._updates, self._table.metadata
        if (
            self._cached_metadata is None
            or self._cached_metadata[0] is not updates
            or self._cached_metadata[1] is not base
        ):
            self._cached_metadata = (updates, base, update_table_metadata(base, updates))
        return self._cached_metadata[2]
