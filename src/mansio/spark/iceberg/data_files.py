"""Which data files hold what: the table's manifests, read for the bounds of partition, offset and time.

Always true: a file that may hold a wanted row is in the answer; files of others are left out where the bounds tell.
Only the manifests are read, no data file is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    LessThan,
)
from pyiceberg.types import PrimitiveType

from mansio.spark.iceberg import table_format
from mansio.spark.iceberg.table_format import LiveFile

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

# Their constructors are typed for keywords only, and documented for these.
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
    """The data files that may hold rows of a partition, of offsets from the first up to, not including, the second, and
    of times (microseconds since the epoch, UTC) likewise. In the order of partition and first offset.

    Raises:
        ValueError: The snapshot is not kept any more.
    """
    if table.current_snapshot() is None:
        return []
    schema = table.schema()
    scan = table.scan(row_filter=_filter(partition, offsets, times), snapshot_id=snapshot_id)
    found = [_live_file(task.file, schema) for task in scan.plan_files()]
    return sorted(found, key=lambda file: (file.partition, file.first_offset, file.path))


def _filter(
    partition: int | None, offsets: tuple[int, int] | None, times: tuple[int, int] | None
) -> BooleanExpression:
    wanted: BooleanExpression = AlwaysTrue()
    if partition is not None:
        wanted = And(wanted, _equal(table_format.PARTITION, partition))
    for name, bounds in ((table_format.OFFSET, offsets), (table_format.TIMESTAMP, times)):
        if bounds is not None:
            low, high = bounds
            wanted = And(wanted, And(_at_least(name, low), _below(name, high)))
    return wanted


def _live_file(file: DataFile, schema: Schema) -> LiveFile:
    first_offset, last_offset = _bounds(file, schema, table_format.OFFSET)
    first_us, last_us = _bounds(file, schema, table_format.TIMESTAMP)
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


def _bounds(file: DataFile, schema: Schema, name: str) -> tuple[int | None, int | None]:
    column = schema.find_field(name)
    assert isinstance(column.field_type, PrimitiveType)
    kind = column.field_type

    def bound(bounds: dict[int, bytes] | None) -> Any:
        if not bounds or column.field_id not in bounds:
            return None
        return from_bytes(kind, bounds[column.field_id])

    return bound(file.lower_bounds), bound(file.upper_bounds)
