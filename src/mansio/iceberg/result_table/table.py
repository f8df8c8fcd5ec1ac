"""Result table: an Iceberg table with the rows of a pipeline's function; opened, created, evolved and committed to.

Invariants:
* Partition spec, sort order and key of an existing table are not changed: options that differ from them are refused.
* Columns are changed before the query starts (`table_schema.plan_changes`), never by a batch.
* Snapshots are expired, and unreferenced files deleted, only in tables that Mansio has created. Other tables may have
  writers whose files are not committed for hours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.partitioning import PartitionField as IcebergPartitionField
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.table.sorting import SortField as IcebergSortField
from pyiceberg.transforms import IdentityTransform, parse_transform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from mansio.errors import ConfigError
from mansio.iceberg.catalog import CatalogTable, catalog_errors, create_table
from mansio.iceberg.errors import TableNotFound
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from mansio.iceberg.result_table.commit import (
    SNAPSHOTS_KEPT,
    SNAPSHOTS_KEPT_PROPERTY,
    TableShape,
    commit_batch,
    is_committed,
)
from mansio.iceberg.result_table.data_file_writer import FileLayout
from mansio.iceberg.result_table.partition_spec import (
    BUCKET,
    IDENTITY,
    TIME_TRANSFORMS,
    TRUNCATE,
    PartitionField,
    SortField,
    check_transform,
)
from mansio.iceberg.result_table.table_name import open_catalog, parse_table_name
from mansio.iceberg.result_table.table_schema import (
    SchemaChanges,
    plan_changes,
    write_schema,
)
from mansio.iceberg.result_table.upsert_plan import group_fields
from mansio.iceberg.result_table.upsert_tasks import DEAD_LETTER_COLUMNS
from mansio.iceberg.snapshot_files import SnapshotReader
from mansio.iceberg.table_properties import COMMIT_RETRIES_PROPERTY, COMMON_PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.table import Table

    from mansio.iceberg.data_files import WrittenFile
    from mansio.iceberg.result_table.commit import BatchCommit, QueryBatch
    from mansio.iceberg.result_table.table_name import OpenCatalog, TableName
    from mansio.iceberg.snapshot_files import SnapshotFiles

CREATED_PROPERTY: Final = "mansio.created-by"
KEY_PROPERTY: Final = "mansio.key"
"""Table property with the columns of the key, as a JSON list, in tables into which pipelines upsert."""
KEY_TYPES: Final = (
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    BinaryType,
    DateType,
    TimestampType,
    TimestamptzType,
)
DEAD_LETTER_SUFFIX: Final = "_dead_letters"
KEY_BUCKETS: Final = 16
"""Number of buckets of the key in a table that is created for upserts without a partition spec."""
ORPHAN_GRACE_S: Final = 3600.0
FIRST_PARTITION_FIELD_ID: Final = 1_000

TABLE_PROPERTIES: Final = {
    CREATED_PROPERTY: "mansio pipeline run",
    **COMMON_PROPERTIES,
    SNAPSHOTS_KEPT_PROPERTY: str(SNAPSHOTS_KEPT),
}
_FIELD_SUFFIXES: Final = {IDENTITY: "", TRUNCATE: "_trunc"}


@dataclass(frozen=True, slots=True)
class TableTarget:
    """Options of a result table. `name`: as given on the command line."""

    name: str
    warehouse: str | None = None
    partition_by: tuple[PartitionField, ...] = ()
    sort_by: tuple[SortField, ...] = ()
    key: tuple[str, ...] = ()
    """Columns of the key; rows are upserted. Empty: rows are appended."""
    order_by: tuple[str, ...] = ()
    """Columns that decide which row of a key is the last one in a batch."""
    on_null_key: str = "suspend"
    """What to do with rows without a key: `suspend`, `skip` or `dead-letter`."""
    renames: dict[str, str] = field(default_factory=dict)
    """Columns of the table to rename: old name to new name."""


class ResultTable(CatalogTable):
    """An open result table. Not thread-safe."""

    def __init__(self, table: Table, name: TableName, opened: OpenCatalog) -> None:
        super().__init__(table, opened.address)
        self.catalog = opened
        self.changes = SchemaChanges({})
        """What was changed when the table was opened."""
        self._table_name = name
        self.reader = SnapshotReader()
        """Reads the live files; each manifest once."""

    def __reduce__(self) -> tuple[object, ...]:
        """Open the table again in another process."""
        return _reopen_table, (self._table_name, self.catalog)

    @property
    def name(self) -> str:
        """The table's name with its catalog, such as `lab.flights.delays`."""
        return str(self._table_name)

    @property
    def partition_by(self) -> tuple[PartitionField, ...]:
        """The table's partition spec."""
        return partition_fields(self.iceberg)

    @property
    def sort_by(self) -> tuple[SortField, ...]:
        """The table's sort order; empty if it sorts by transforms, which tasks do not apply."""
        return sort_fields(self.iceberg)

    @property
    def key(self) -> tuple[str, ...]:
        """The key for upserts; empty if rows are appended."""
        return tuple(json.loads(self.iceberg.properties.get(KEY_PROPERTY, "[]")))

    def layout(self) -> FileLayout:
        """Where and how tasks write files."""
        properties = self.iceberg.properties
        location = properties.get("write.data.path") or f"{self.iceberg.location().rstrip('/')}/data"
        return FileLayout(location.rstrip("/"), write_schema(self.iceberg.schema()), self.partition_by)

    def shape(self) -> TableShape:
        """Return what the files of a batch have to fit. A writer reads it with `layout`, and commits with it."""
        return TableShape.of(self.iceberg)

    def files(self) -> SnapshotFiles:
        """Return the live files, as of the last `refresh` or `commit`. Each manifest is read once."""
        return self.reader.read(self.iceberg)

    def is_committed(self, batch: QueryBatch) -> bool:
        """Whether the table has the batch, as of the last `refresh` or `commit`."""
        return is_committed(self.iceberg.properties, batch)

    def commit(
        self,
        batch: QueryBatch,
        added: Sequence[WrittenFile],
        replaced: Sequence[str] = (),
        is_current: Callable[[], bool] = lambda: True,
        shape: TableShape | None = None,
    ) -> BatchCommit:
        """Commit a batch exactly once; see `commit.commit_batch` for errors. `shape`: the one for which the files were
        written; None: that of the last refresh.
        """
        return self.retry_while_locked(
            partial(
                commit_batch,
                self.iceberg,
                batch,
                added,
                replaced,
                is_current,
                shape=shape or self.shape(),
                reader=self.reader,
            )
        )

    def remove_orphan_files(self, grace_s: float = ORPHAN_GRACE_S) -> None:
        """Delete the files of failed attempts that have been unreferenced for the grace time (seconds). In a table that
        Mansio did not create, nothing is deleted.
        """
        if CREATED_PROPERTY in self.iceberg.properties:
            remove_orphan_files(self, snapshots_kept=SNAPSHOTS_KEPT, grace_s=grace_s)


def open_result_table(target: TableTarget, columns: Schema, spark_settings: Mapping[str, str]) -> ResultTable:
    """Open the table of a pipeline; create it, or change its columns, so that it takes rows with the columns
    of the result. `columns`: these columns.

    Raises:
        ConfigError: The name, catalog, partition spec, sort order or key does not fit the table or the result.
        IncompatibleSchema: The columns do not fit the table.
        CommitConflict: In every attempt another commit changed the table first.
        CatalogLocked, CatalogUnavailable: The catalog cannot be used now.
    """
    name = parse_table_name(target.name)
    _check_columns(target, columns)
    opened = open_catalog(name, target.warehouse, spark_settings)
    with catalog_errors(opened.address):
        try:
            table = opened.catalog.load_table(name.identifier)
        except NoSuchTableError:
            table = _create_table(name, opened, target, columns)
    found = ResultTable(table, name, opened)
    found.retry_on_conflict(lambda: _adapt(found, target, columns))
    return found


def _adapt(found: ResultTable, target: TableTarget, columns: Schema) -> None:
    """Check the options, and change columns and properties of the table, in one attempt."""
    table = found.iceberg
    check_target(found, target)
    changes = plan_changes(table.schema(), columns, target.renames)
    if changes:
        apply_changes(table, changes, columns)
        found.changes = changes
    _check_partition_types(found)
    if target.key:
        _check_key_types(found, target.key)
        group_fields(found.partition_by, target.key)
        _set_key(table, target.key)
    if CREATED_PROPERTY in table.properties and table.properties.get(COMMIT_RETRIES_PROPERTY) == "0":
        # Earlier versions set it, so that every conflict was an error for other writers.
        with table.transaction() as transaction:
            transaction.remove_properties(COMMIT_RETRIES_PROPERTY)


def open_existing_table(name: str, warehouse: str | None, spark_settings: Mapping[str, str]) -> ResultTable:
    """Open a table that exists, without changing it.

    Raises:
        TableNotFound: There is none.
        ConfigError: The name or the catalog is invalid.
        CatalogLocked, CatalogUnavailable: The catalog cannot be used now.
    """
    parsed = parse_table_name(name)
    opened = open_catalog(parsed, warehouse, spark_settings)
    try:
        return _reopen_table(parsed, opened)
    except NoSuchTableError as error:
        raise TableNotFound(f"there is no table {parsed} in {opened.address}") from error


def _reopen_table(name: TableName, opened: OpenCatalog) -> ResultTable:
    """Open a table that exists. Raises `CatalogLocked`, `CatalogUnavailable`."""
    with catalog_errors(opened.address):
        return ResultTable(opened.catalog.load_table(name.identifier), name, opened)


def open_dead_letter_table(target: TableTarget, spark_settings: Mapping[str, str]) -> ResultTable:
    """Open or create the table for the rows without a key of a table: `TABLE_dead_letters`, with the columns `reason`
    and `row`, the row as JSON. Raises the errors of `open_result_table`.
    """
    columns = Schema(
        *(NestedField(number, name, StringType()) for number, name in enumerate(DEAD_LETTER_COLUMNS, 1))
    )
    return open_result_table(
        TableTarget(f"{target.name}{DEAD_LETTER_SUFFIX}", target.warehouse), columns, spark_settings
    )


def _check_key_types(table: ResultTable, key: Sequence[str]) -> None:
    schema = table.iceberg.schema()
    for name in key:
        found = schema.find_field(name).field_type
        if not isinstance(found, KEY_TYPES):
            raise ConfigError(
                f"--key: column {name} is {found}; a key consists of integers, strings, binary, dates, timestamps or"
                " booleans: cast it"
            )


def _set_key(table: Table, key: Sequence[str]) -> None:
    """Store the key in a table that was created without one."""
    text = json.dumps(key)
    if table.properties.get(KEY_PROPERTY) != text:
        with table.transaction() as transaction:
            transaction.set_properties({KEY_PROPERTY: text})


def apply_changes(table: Table, changes: SchemaChanges, wanted: Schema) -> None:
    """Change the columns of the table in one commit."""
    with table.update_schema() as update:
        for old, new in changes.renamed.items():
            update.rename_column(old, new)
    if changes.added or changes.widened:
        with table.update_schema() as update:
            update.union_by_name(wanted)


def check_target(table: ResultTable, target: TableTarget) -> None:
    """Check that the options of a pipeline are those of an existing table, where both are given.

    Raises:
        ConfigError: They differ; the message has the table's.
    """
    for option, wanted, found in (
        ("--partition-by", target.partition_by, table.partition_by),
        ("--sort-by", target.sort_by, table.sort_by),
    ):
        if wanted and wanted != found:
            has = ", ".join(map(str, found)) or "none"
            raise ConfigError(
                f"table {table.name} has another {option} ({has}): leave the option out, or write to another table"
            )
    if table.key and not target.key:
        raise ConfigError(
            f"table {table.name} has the key {', '.join(table.key)}, and appended rows could have the same key: use"
            f" --mode update --key {','.join(table.key)}, or write to another table"
        )
    if table.key and target.key != table.key:
        raise ConfigError(
            f"table {table.name} has the key {', '.join(table.key)}: give this --key, or write to another table"
        )
    file_format = table.iceberg.properties.get("write.format.default", "parquet")
    if file_format != "parquet":
        raise ConfigError(f"table {table.name} is of {file_format} files: only Parquet is written")


def _check_columns(target: TableTarget, wanted: Schema) -> None:
    """Check that the columns of the options are in the result, so that a misspelled one is found first."""
    names = [one.name for one in wanted.fields]
    for option, columns in (
        ("--partition-by", [one.column for one in target.partition_by]),
        ("--sort-by", [one.column for one in target.sort_by]),
        ("--key", target.key),
        ("--order-by", target.order_by),
    ):
        for column in columns:
            if column not in names:
                raise ConfigError(
                    f"{option}: the result has no column {column}; there are {', '.join(names)}"
                )


def _check_partition_types(table: ResultTable) -> None:
    schema = write_schema(table.iceberg.schema())
    for one in table.partition_by:
        if one.column not in schema.names:
            raise ConfigError(
                f"table {table.name} is partitioned by {one}, which is no column of it: that is not supported"
            )
        check_transform(one, schema.field(one.column).type)


def _create_table(name: TableName, opened: OpenCatalog, target: TableTarget, schema: Schema) -> Table:
    partition_by = target.partition_by
    if target.key and not partition_by:
        partition_by = (PartitionField(target.key[0], BUCKET, KEY_BUCKETS),)
    arrow = write_schema(schema)
    for one in partition_by:
        check_transform(one, arrow.field(one.column).type)
    properties = dict(TABLE_PROPERTIES)
    if target.key:
        properties[KEY_PROPERTY] = json.dumps(target.key)
    return create_table(
        opened.catalog,
        name.identifier,
        schema,
        partition_spec=_partition_spec(partition_by, schema),
        sort_order=_sort_order(target.sort_by, schema),
        properties=properties,
    )


def _partition_spec(fields: Sequence[PartitionField], schema: Schema) -> PartitionSpec:
    return PartitionSpec(
        *(
            IcebergPartitionField(
                schema.find_field(one.column).field_id,
                FIRST_PARTITION_FIELD_ID + index,
                parse_transform(f"{one.transform}[{one.parameter}]" if one.parameter else one.transform),
                f"{one.column}{_FIELD_SUFFIXES.get(one.transform, f'_{one.transform}')}",
            )
            for index, one in enumerate(fields)
        )
    )


def _sort_order(fields: Sequence[SortField], schema: Schema) -> SortOrder:
    if not fields:
        return SortOrder(order_id=0)
    return SortOrder(
        *(
            IcebergSortField(
                schema.find_field(one.column).field_id,
                IdentityTransform(),
                SortDirection.DESC if one.descending else SortDirection.ASC,
                NullOrder.NULLS_LAST if one.descending else NullOrder.NULLS_FIRST,
            )
            for one in fields
        )
    )


def partition_fields(table: Table) -> tuple[PartitionField, ...]:
    """Return the partition spec of a table.

    Raises:
        ConfigError: It has a transform that Mansio does not have.
    """
    found = []
    for one in table.spec().fields:
        transform, _, rest = str(one.transform).partition("[")
        column = table.schema().find_column_name(one.source_id) or ""
        if transform not in (IDENTITY, BUCKET, TRUNCATE, *TIME_TRANSFORMS):
            raise ConfigError(
                f"table {'.'.join(table.name())} is partitioned by {one.transform} of {column}, which is not supported"
            )
        found.append(PartitionField(column, transform, int(rest.rstrip("]") or 0)))
    return tuple(found)


def sort_fields(table: Table) -> tuple[SortField, ...]:
    """Return the sort order of a table; empty if it is not one of columns with Spark's order of nulls."""
    found = []
    for one in table.sort_order().fields:
        descending = one.direction == SortDirection.DESC
        column: Any = table.schema().find_column_name(one.source_id)
        usual = NullOrder.NULLS_LAST if descending else NullOrder.NULLS_FIRST
        if not isinstance(one.transform, IdentityTransform) or one.null_order != usual or "." in column:
            return ()
        found.append(SortField(column, descending))
    return tuple(found)
