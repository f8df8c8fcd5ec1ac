"""Archive tables in an Iceberg catalog: opening, creating, committing, and listing data files.

Invariants:
* `open_table` rejects a table that Mansio did not create, that belongs to another topic, or on which pyiceberg would
  repeat a commit by itself.
* `live_files` returns every file that may hold a matching row. It excludes files by their bounds in the manifests, and
  opens no data file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    LessThan,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestamptzType,
)

from mansio.iceberg.archive import table_format
from mansio.iceberg.archive.commit import (
    added_records,
    commit_batch,
    skip_to_log_start,
)
from mansio.iceberg.archive.decoded_schema import NO_DECODED_COLUMNS, decoded_schema
from mansio.iceberg.archive.table_format import LiveFile, parse_history
from mansio.iceberg.catalog import (
    CatalogTable,
    catalog_errors,
    create_table,
    open_catalog,
    sqlite_address,
    warehouse_location,
)
from mansio.iceberg.errors import NotAnArchiveTable, TableNotFound
from mansio.iceberg.table_properties import COMMIT_RETRIES_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from mansio.iceberg.archive.table_format import (
        BatchPlan,
        Commit,
        CommitOutcome,
        HistoryEntry,
        LostRange,
        WrittenRange,
    )

NAMESPACE = "mansio"

_HEADER_TYPE = StructType(NestedField(10, "key", StringType()), NestedField(11, "value", BinaryType()))
ICEBERG_SCHEMA = Schema(
    NestedField(1, "key", BinaryType()),
    NestedField(2, "value", BinaryType()),
    NestedField(3, "headers", ListType(9, _HEADER_TYPE, element_required=False)),
    NestedField(4, table_format.PARTITION_COLUMN, IntegerType()),
    NestedField(5, table_format.OFFSET_COLUMN, LongType()),
    NestedField(6, table_format.TIMESTAMP_COLUMN, TimestamptzType()),
    NestedField(7, table_format.TIMESTAMP_TYPE_COLUMN, IntegerType()),
    NestedField(8, table_format.LANE_COLUMN, StringType()),
)
"""`table_format.TABLE_SCHEMA` as an Iceberg schema."""

# Not by day: late timestamps would split a batch into many small files; reads prune time by the files' bounds.
_PARTITION_SPEC = PartitionSpec(PartitionField(4, 1_000, IdentityTransform(), table_format.PARTITION_COLUMN))


class ArchiveTable(CatalogTable):
    """The archive table of one topic. Not thread-safe."""

    def __init__(self, table: Table, topic: str, catalog_address: str) -> None:
        super().__init__(table, catalog_address)
        self.topic: str = topic
        """The archived topic."""

    @property
    def topic_id(self) -> str:
        """The id of the archived topic; empty if it was unknown when the table was created."""
        return self.iceberg.properties.get(table_format.TOPIC_ID_PROPERTY, "")

    @property
    def data_location(self) -> str:
        """The address of the directory to which tasks write data files."""
        return f"{self.iceberg.location().rstrip('/')}/data"

    def sibling(self, table: Table) -> ArchiveTable:
        """Another table of the same topic in the same catalog."""
        return ArchiveTable(table, self.topic, self._catalog_address)

    def last_commit(self) -> Commit | None:
        """Return the last commit of the archive, as of the last `refresh` or `commit`; None before the first batch."""
        return table_format.read_commit(self.iceberg.properties)

    def added_records(self, query: str) -> dict[int, int]:
        """Return the number of records that each batch of a query has added, by batch id, as of the last `refresh` or
        `commit`. Has at least the last ten batches, unless maintenance retains fewer snapshots.
        """
        return added_records(self.iceberg.metadata, query)

    def offset_history(self) -> tuple[HistoryEntry, ...]:
        """Return the history of the table's offsets, oldest entry first, as of the last `refresh` or `commit`."""
        return parse_history(self.iceberg.properties.get(table_format.HISTORY_PROPERTY, "[]"))

    def lost_ranges(self) -> tuple[LostRange, ...]:
        """Return the ranges that are accepted as lost, oldest first: deleted before they were archived, or
        unreadable.
        """
        return table_format.read_lost_ranges(self.iceberg.properties)

    def skip_to_log_start(self, log_starts: Mapping[int, int]) -> tuple[LostRange, ...]:
        """List as lost the records that the log deleted before they were archived. See
        `commit.skip_to_log_start`.
        """
        with self.catalog_errors():
            return skip_to_log_start(self.iceberg, log_starts)

    def decoded_columns(self) -> pa.Schema:
        """Return the columns of decoded keys and values; none if the archive has only the records."""
        return decoded_schema(self.iceberg)

    def commit(
        self,
        plan: BatchPlan,
        files: Sequence[WrittenRange],
        lost: Sequence[LostRange] = (),
        decoded: pa.Schema = NO_DECODED_COLUMNS,
    ) -> CommitOutcome:
        """Add a batch exactly once; see `commit.commit_batch` for errors."""
        return self.retry_while_locked(lambda: commit_batch(self.iceberg, plan, files, lost, decoded=decoded))

    def live_files(
        self,
        partition: int | None = None,
        offsets: tuple[int, int] | None = None,
        times: tuple[int, int] | None = None,
        snapshot_id: int | None = None,
    ) -> list[LiveFile]:
        """Return the data files of the current or another snapshot that may hold matching rows. See the function
        `live_files`.
        """
        with self.catalog_errors():
            return live_files(self.iceberg, partition, offsets, times, snapshot_id)


def open_table(
    uri: str | None,
    warehouse: str,
    topic: str,
    create: bool = False,
    topic_id: str = "",
) -> ArchiveTable:
    """Open the archive table of a topic.

    `uri`: the catalog, None for the SQLite file in the warehouse. `warehouse`: a directory or an address that pyiceberg
    can write to. `create`: create a missing table. `topic_id`: required id of the archived topic; empty: any.

    Raises:
        TableNotFound: The table does not exist, and `create` is false.
        NotAnArchiveTable: The table is not this topic's archive, or the warehouse is a copy of another one.
        ConfigError: The path of the warehouse cannot be written as an address.
        CatalogLocked, CatalogUnavailable: The catalog cannot be used now.
    """
    location = warehouse_location(warehouse)
    address = uri or sqlite_address(location)
    identifier = (NAMESPACE, topic)
    with catalog_errors(address):
        catalog = open_catalog(address, location, create=create)
        try:
            if catalog is None:
                raise NoSuchTableError
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            if catalog is None or not create:
                raise TableNotFound(
                    f"topic {topic} has no archive in {warehouse}: `mansio pipeline archive {topic}` makes one"
                ) from None
            table = _create_table(catalog, topic, topic_id)
    check_archive_table(table, topic, topic_id)
    if uri is None:
        _check_location(table, location)
    return ArchiveTable(table, topic, address)


def check_archive_table(table: Table, topic: str, topic_id: str = "") -> None:
    """Check that a table is the archive of this topic, and that pyiceberg does not repeat commits to it by itself.

    Raises:
        NotAnArchiveTable: The table fails a check; the message has the reason.
    """
    name = ".".join(table.name())
    properties = table.properties
    form = properties.get(table_format.FORMAT_PROPERTY)
    names = [one.name for one in table.schema().fields if one.name not in table_format.DECODED_COLUMNS]
    if form is None or names != table_format.TABLE_SCHEMA.names:
        raise NotAnArchiveTable(
            f"table {name} was not made by `mansio pipeline archive`: choose another warehouse or catalog"
        )
    if form != table_format.FORMAT_VERSION:
        raise NotAnArchiveTable(
            f"table {name} has format {form}, this version of Mansio knows format {table_format.FORMAT_VERSION}"
        )
    if properties.get(table_format.TOPIC_PROPERTY) != topic:
        raise NotAnArchiveTable(
            f"table {name} is the archive of topic {properties.get(table_format.TOPIC_PROPERTY)}, not {topic}"
        )
    known = properties.get(table_format.TOPIC_ID_PROPERTY, "")
    if topic_id and known and known != topic_id:
        raise NotAnArchiveTable(
            f"table {name} is the archive of an earlier topic {topic} (id {known}); the topic was deleted and made "
            f"again (id {topic_id}): choose another warehouse, or drop the table"
        )
    if properties.get(COMMIT_RETRIES_PROPERTY) != "0":
        raise NotAnArchiveTable(
            f"table {name} has lost its property {COMMIT_RETRIES_PROPERTY}=0, "
            f"without which a batch could be added "
            "twice: set it again"
        )


def _check_location(table: Table, location: str) -> None:
    """Reject the table of a copied warehouse: its catalog refers to files of the original warehouse, and maintenance
    would delete files there that were archived after the copy. Another path to the same directory (a link) is allowed.
    """
    warehouse, table_path = (os.path.realpath(urlsplit(one).path) for one in (location, table.location()))
    if os.path.commonpath((warehouse, table_path)) != warehouse:
        raise NotAnArchiveTable(
            f"table {'.'.join(table.name())} has its files in {table_path}, which is not in the warehouse {warehouse}: "
            "this is a copy of another; use that one, or bring the copy to where that one was"
        )


def _create_table(catalog: Catalog, topic: str, topic_id: str) -> Table:
    properties = {
        **table_format.TABLE_PROPERTIES,
        table_format.FORMAT_PROPERTY: table_format.FORMAT_VERSION,
        table_format.TOPIC_PROPERTY: topic,
        table_format.TOPIC_ID_PROPERTY: topic_id,
        # Tasks write Parquet without Iceberg's field ids; this maps columns to fields.
        "schema.name-mapping.default": ICEBERG_SCHEMA.name_mapping.model_dump_json(),
    }
    return create_table(
        catalog, (NAMESPACE, topic), ICEBERG_SCHEMA, partition_spec=_PARTITION_SPEC, properties=properties
    )


# -- data files --------


# pyiceberg documents positional arguments for these constructors, but types only keyword arguments.
_equal: Any = EqualTo
_at_least: Any = GreaterThanOrEqual
_below: Any = LessThan


def live_files(
    table: Table,
    partition: int | None = None,
    offsets: tuple[int, int] | None = None,
    times: tuple[int, int] | None = None,
    snapshot_id: int | None = None,
) -> list[LiveFile]:
    """Return the data files that may hold rows of a partition, of offsets in [first, second), and of times
    (microseconds since the epoch, UTC) in [first, second). A filter that is None selects all. Sorted by partition and
    first offset.

    Raises:
        ValueError: The snapshot has been expired.
    """
    if table.current_snapshot() is None:
        return []
    schema = table.schema()
    scan = table.scan(row_filter=_row_filter(partition, offsets, times), snapshot_id=snapshot_id)
    found = [_to_live_file(task.file, schema) for task in scan.plan_files()]
    return sorted(found, key=lambda file: (file.partition, file.first_offset, file.path))


def _row_filter(
    partition: int | None, offsets: tuple[int, int] | None, times: tuple[int, int] | None
) -> BooleanExpression:
    wanted: BooleanExpression = AlwaysTrue()
    if partition is not None:
        wanted = And(wanted, _equal(table_format.PARTITION_COLUMN, partition))
    for name, bounds in ((table_format.OFFSET_COLUMN, offsets), (table_format.TIMESTAMP_COLUMN, times)):
        if bounds is not None:
            low, high = bounds
            wanted = And(wanted, And(_at_least(name, low), _below(name, high)))
    return wanted


def _to_live_file(file: DataFile, schema: Schema) -> LiveFile:
    first_offset, last_offset = _column_bounds(file, schema, table_format.OFFSET_COLUMN)
    first_us, last_us = _column_bounds(file, schema, table_format.TIMESTAMP_COLUMN)
    assert first_offset is not None, (
        "every data file has bounds of its offsets: the table's properties say so"
    )
    assert last_offset is not None
    return LiveFile(
        path=file.file_path,
        rows=file.record_count,
        bytes=file.file_size_in_bytes,
        partition=file.partition[0],
        first_offset=first_offset,
        last_offset=last_offset,
        first_us=first_us,
        last_us=last_us,
    )


def _column_bounds(file: DataFile, schema: Schema, name: str) -> tuple[int | None, int | None]:
    column = schema.find_field(name)
    assert isinstance(column.field_type, PrimitiveType)
    kind = column.field_type

    def bound(bounds: dict[int, bytes] | None) -> Any:
        if not bounds or column.field_id not in bounds:
            return None
        return from_bytes(kind, bounds[column.field_id])

    return bound(file.lower_bounds), bound(file.upper_bounds)
