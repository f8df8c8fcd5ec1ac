"""Erase job: removes all records of given keys from the archive of a topic, its dead-letter table and compacted tables.

Does not use Spark. The log and the dead-letter topics are not changed: compaction and `mansio dlq purge` erase there.

Invariants:
* All tables are checked before the first one is changed.
* A record batch that was stored whole in the dead-letter table, because it is damaged, is erased if its bytes contain a
  key. The bytes of a compressed batch cannot be searched; such batches are counted, and erased on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from mansio.errors import InvalidRequest
from mansio.iceberg.archive.dead_letters import open_dead_letters
from mansio.iceberg.archive.erase_keys import (
    KEY_COLUMN,
    ErasureReport,
    check_tags,
    count_rows,
    erase_rows,
    with_key,
)
from mansio.iceberg.archive.table import NAMESPACE, ArchiveTable
from mansio.iceberg.archive.table_format import COMPACTED_FROM_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GRACE_S: Final = 3600.0
KEYS_MAX: Final = 100_000
DAMAGED_BATCH_KIND: Final = "batch"
DEAD_LETTER_COLUMNS: Final = (KEY_COLUMN, "kind", "value")


@dataclass(frozen=True, slots=True)
class EraseReport:
    """Result of an erasure, by table. `damaged_batches`: damaged record batches that are still stored."""

    tables: tuple[ErasureReport, ...]
    damaged_batches: int

    @property
    def files_waiting(self) -> int:
        """Number of unreferenced files that may contain the keys until a later run deletes them."""
        return sum(one.files_waiting for one in self.tables)


def erase(
    archive: ArchiveTable,
    keys: Sequence[bytes],
    *,
    grace_s: float = GRACE_S,
    drop_tags: bool = False,
    drop_damaged: bool = False,
    progress: Callable[[str, int, int], None] = lambda _table, _searched, _all: None,
) -> EraseReport:
    """Erase all records with these keys. Arguments and errors are those of `erase_rows`; `drop_damaged`: erase all
    damaged record batches of the dead-letter table. `progress` also gets the name of the table.
    """
    if not 0 < len(keys) <= KEYS_MAX:
        raise InvalidRequest(f"an erasure is of 1 to {KEYS_MAX:,} keys")
    dead_letters = open_dead_letters(archive, create=False)
    tables = [archive, *compacted_tables(archive)]
    for table in (*tables, *([dead_letters] if dead_letters is not None else [])):
        table.refresh()
        check_tags(table, drop_tags=drop_tags)

    def run(
        table: ArchiveTable, is_erased: Callable[[pa.Table], pa.ChunkedArray], columns: Sequence[str]
    ) -> ErasureReport:
        def report(searched: int, count: int) -> None:
            progress(table.name, searched, count)

        return erase_rows(table, is_erased, columns, grace_s=grace_s, drop_tags=drop_tags, progress=report)

    reports = [run(table, with_key(keys), (KEY_COLUMN,)) for table in tables]
    damaged = 0
    if dead_letters is not None:
        select = in_dead_letters(keys, drop_damaged=drop_damaged)
        reports.append(run(dead_letters, select, DEAD_LETTER_COLUMNS))
        damaged = count_rows(dead_letters, _is_damaged_batch, ("kind",))
    return EraseReport(tuple(reports), damaged)


def compacted_tables(archive: ArchiveTable) -> list[ArchiveTable]:
    """Return the tables of latest records that `mansio pipeline compact` has made from this archive."""
    catalog = archive.iceberg.catalog
    found = []
    with archive.catalog_errors():
        for identifier in sorted(catalog.list_tables(NAMESPACE)):
            table = catalog.load_table(identifier)
            if table.properties.get(COMPACTED_FROM_PROPERTY) == archive.topic:
                found.append(archive.sibling(table))
    return found


def in_dead_letters(keys: Sequence[bytes], *, drop_damaged: bool) -> Callable[[pa.Table], pa.ChunkedArray]:
    """Return a filter of rows of a dead-letter table: records with one of these keys, and damaged record batches that
    contain one, or all damaged ones.
    """
    of_record = with_key(keys)

    def select(rows: pa.Table) -> pa.ChunkedArray:
        damaged = _is_damaged_batch(rows)
        if not drop_damaged:
            contains = [
                value is not None and any(key in value for key in keys)
                for value in rows.column("value").to_pylist()
            ]
            damaged = pc.and_(damaged, pa.chunked_array([pa.array(contains, pa.bool_())]))
        return pc.or_(of_record(rows), damaged)

    return select


def _is_damaged_batch(rows: pa.Table) -> pa.ChunkedArray:
    return pc.equal(rows.column("kind"), DAMAGED_BATCH_KIND)
