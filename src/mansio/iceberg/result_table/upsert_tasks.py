"""Work of Spark's tasks for an upsert: staging the last row of each key, then rewriting the files that hold these keys.

The rows of a batch are grouped by the partition fields that depend on the key only, such as a bucket of it, so the old
row of a key is in a file of the same group. In the first job a task gets whole groups, sorted by key, and stages the
last row of each key in a file per group. In the second job a task gets one group: it reads the keys of the files that
may hold them, rewrites those that do without the old rows, and adds the new rows.

Invariants:
* A file that has none of the keys is not rewritten, except to merge small files.
* Memory is bounded by the keys of a group in one batch, some Arrow batches, and the buffers of the writer. Files are
  streamed.
* Columns of files are identified by their field ids, so files that were written before a column was renamed, added or
  widened are rewritten with the table's current columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mansio.iceberg.data_files import WrittenFile, parse_written_file
from mansio.iceberg.fanout_writer import FanoutWriter, file_system
from mansio.iceberg.result_table.data_file_writer import DataFileWriter, to_schema
from mansio.iceberg.result_table.partition_spec import partition_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.iceberg.result_table.data_file_writer import FileLayout
    from mansio.iceberg.result_table.partition_spec import PartitionField

GROUP_COLUMN: Final = "__group"
DELETE_COLUMN: Final = "__delete"
POSITION_COLUMN: Final = "__position"
"""Column with the place of a row in the order of the DataFrame."""
ROW_COLUMN: Final = "__row"
"""Column with the row as JSON, if its key is null and it becomes a dead letter."""
REASON_COLUMN: Final = "reason"
DEAD_LETTER_COLUMNS: Final = (REASON_COLUMN, "row")
READ_ROWS: Final = 8_192
"""Number of rows in an Arrow batch that is read from a file."""
GROUP_SEPARATOR: Final = "\x1f"
STAGE_SCHEMA: Final = "report string"

KeyBound = int | str


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """The staged file of one group: the last row of each key, and the smallest and largest value of the key's first
    column, both inclusive (`key_bound`).
    """

    group: str
    path: str
    rows: int
    low: KeyBound
    high: KeyBound


@dataclass(frozen=True, slots=True)
class StageReport:
    """Result of a task of the first job."""

    groups: tuple[StagedGroup, ...]
    null_keys: int
    dead_letters: tuple[WrittenFile, ...] = ()

    def to_json(self) -> str:
        """Return the text with which a task reports; `parse_stage_report` reads it."""
        groups = [[one.group, one.path, one.rows, one.low, one.high] for one in self.groups]
        return json.dumps([groups, self.null_keys, [one.to_json() for one in self.dead_letters]])


def parse_stage_report(text: str) -> StageReport:
    """Parse the result of `StageReport.to_json`."""
    groups, null_keys, dead_letters = json.loads(text)
    return StageReport(
        tuple(StagedGroup(*one) for one in groups), null_keys, tuple(map(parse_written_file, dead_letters))
    )


@dataclass(frozen=True, slots=True)
class MergeItem:
    """Work of a task of the second job: one group. `candidates`: files that may hold a key; `small`: files that are
    rewritten in any case.
    """

    staged: str
    candidates: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of one `MergeItem`: paths of the replaced files, and the files with their remaining and the new rows."""

    replaced: tuple[str, ...]
    files: tuple[WrittenFile, ...]

    def to_json(self) -> str:
        """Return the text with which a task reports; `parse_merge_report` reads it."""
        return json.dumps([self.replaced, [one.to_json() for one in self.files]])


def parse_merge_report(text: str) -> MergeReport:
    """Parse the result of `MergeReport.to_json`."""
    replaced, files = json.loads(text)
    return MergeReport(tuple(replaced), tuple(map(parse_written_file, files)))


# -- keys --------


def group_names(fields: Sequence[PartitionField], columns: Sequence[pa.Array]) -> pa.Array:
    """Return the name of each row's group: the values of partition fields, each of one column. Null if a key is
    null.
    """
    texts = [
        partition_values(field, column).cast(pa.string())
        for field, column in zip(fields, columns, strict=True)
    ]
    return pc.binary_join_element_wise(*texts, GROUP_SEPARATOR)


def group_name(values: Sequence[object]) -> str:
    """Return the name of the group of a file with these values of the partition fields; `group_names` of its rows."""
    return GROUP_SEPARATOR.join(
        str(value).lower() if isinstance(value, bool) else str(value) for value in values
    )


def key_array(batch: pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """One value per row that is equal for equal keys only."""
    columns = [batch.column(name) for name in key]
    if len(columns) == 1:
        return columns[0]
    parts = []
    for column in columns:
        text = column if pa.types.is_binary(column.type) else column.cast(pa.string()).cast(pa.binary())
        length = pc.binary_length(text).cast(pa.string()).cast(pa.binary())
        parts += [length, text]  # the length separates the columns unambiguously
    return pc.binary_join_element_wise(*parts, b":")


def key_bound(value: Any) -> KeyBound:
    """Return a value of a key as it is compared with the bounds of files: bytes as hexadecimal, which has the same
    order.
    """
    if isinstance(value, bytes):
        return value.hex()
    return int(value) if isinstance(value, bool) else value


# -- first job: staging --------


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Options of the first job. `dead_letters`: layout of the table for rows without a key, if they are stored."""

    layout: FileLayout
    key: tuple[str, ...]
    name: str
    dead_letters: FileLayout | None = None


def stage_rows(options: StageOptions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage the last row of each key. `batches`: rows sorted by group and key, then from the first to the last version
    of a key. Yields one row of `STAGE_SCHEMA`. For `mapInArrow`.
    """
    writer = _StageWriter(options)
    try:
        for rows in last_rows(options.key, map(writer.take_null_keys, batches)):
            writer.write(rows)
        report = writer.close()
    except BaseException:
        writer.abort()
        raise
    yield pa.RecordBatch.from_pydict({"report": pa.array([report.to_json()], pa.string())})


def last_rows(key: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the last of the consecutive rows with the same key, over the borders of batches."""
    pending: pa.RecordBatch | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = batch if pending is None else pa.concat_batches([pending, batch])
        keys = key_array(rows, key)
        is_last = pc.not_equal(keys[:-1], keys[1:])
        yield rows[:-1].filter(is_last)
        pending = rows[-1:]
    if pending is not None:
        yield pending


class _StageWriter:
    """Files of one task of the first job: one per group, in the order of the groups."""

    def __init__(self, options: StageOptions) -> None:
        self._options = options
        self._schema = options.layout.schema.append(pa.field(DELETE_COLUMN, pa.bool_()))
        # Not flushed: after a loss of power Spark repeats the batch, and stages it again.
        self._files: FanoutWriter[str] = FanoutWriter(
            options.layout.location, self._schema, self._add_done, file_bytes=None, is_durable=False
        )
        self._bounds: list[tuple[KeyBound, KeyBound]] = []
        """Bounds of the keys in the parts of the current group."""
        self._null_keys = 0
        self._dead_letters: DataFileWriter | None = None
        self._group: str | None = None
        self._done: list[StagedGroup] = []

    def take_null_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Count the rows without a key, and store them as dead letters if that is wanted; returns the other rows."""
        is_valid = pc.is_valid(batch.column(GROUP_COLUMN))
        for name in self._options.key:
            is_valid = pc.and_(is_valid, pc.is_valid(batch.column(name)))
        valid = int(pc.sum(is_valid).as_py() or 0)
        if valid == batch.num_rows:
            return batch
        self._null_keys += batch.num_rows - valid
        if self._options.dead_letters is not None:
            if self._dead_letters is None:
                self._dead_letters = DataFileWriter(self._options.dead_letters, self._options.name)
            lost = batch.filter(pc.invert(is_valid))
            reason = f"the key ({', '.join(self._options.key)}) is null"
            columns = [pa.array([reason] * lost.num_rows), lost.column(ROW_COLUMN)]
            self._dead_letters.write(pa.RecordBatch.from_arrays(columns, names=list(DEAD_LETTER_COLUMNS)))
        return batch.filter(is_valid)

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows, which may be of several groups."""
        if not rows.num_rows:
            return
        groups = rows.column(GROUP_COLUMN)
        ends = np.append(
            np.flatnonzero(pc.not_equal(groups[:-1], groups[1:]).to_numpy(zero_copy_only=False)) + 1,
            len(rows),
        )
        start = 0
        for end in ends.tolist():
            self._write_group(groups[start].as_py(), rows[start:end])
            start = end

    def close(self) -> StageReport:
        """Close all files; returns the report of the task."""
        self._files.close()
        dead_letters = [] if self._dead_letters is None else self._dead_letters.close()
        return StageReport(tuple(self._done), self._null_keys, tuple(dead_letters))

    def abort(self) -> None:
        """Delete all files."""
        if self._dead_letters is not None:
            self._dead_letters.abort()
        self._files.abort()

    def _write_group(self, group: str, rows: pa.RecordBatch) -> None:
        key = partition_keys(rows.column(self._options.key[0]))
        low, high = key_bound(key[0].as_py()), key_bound(key[-1].as_py())
        if self._group is not None and self._group != group:
            self._files.close_file(self._group)
        self._group = group
        self._bounds.append((low, high))
        self._files.write(group, to_schema(rows, self._schema), f"{self._options.name}-staged")

    def _add_done(self, group: str, path: str, rows: int, _size: int) -> None:
        low, high = (min(one for one, _ in self._bounds), max(one for _, one in self._bounds))
        self._bounds.clear()
        self._done.append(StagedGroup(group, path, rows, low, high))


def partition_keys(column: pa.Array) -> pa.Array:
    """Return the values of a key as Iceberg compares them: dates and times as integers."""
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


# -- second job: merging --------


def merge_groups(
    layout: FileLayout,
    key: Sequence[str],
    name: str,
    items: Sequence[MergeItem],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Merge the groups of one task. `batches`: a column with the places of its items in `items`. Yields one row of
    `STAGE_SCHEMA` per item. For `mapInArrow`.
    """
    for batch in batches:
        for place in batch.column(0).to_pylist():
            report = merge_group(layout, key, name, items[place])
            yield pa.RecordBatch.from_pydict({"report": pa.array([report.to_json()], pa.string())})


def merge_group(layout: FileLayout, key: Sequence[str], name: str, item: MergeItem) -> MergeReport:
    """Write the rows of the candidate files without the staged keys, and the staged rows that are not deletions. A task
    that fails deletes its files.
    """
    staged_schema = layout.schema.append(pa.field(DELETE_COLUMN, pa.bool_()))
    key_schema = pa.schema([layout.schema.field(column) for column in key])
    batches = [key_array(one, key) for one in read_data_file(item.staged, key_schema)]
    keys = pa.chunked_array(batches).combine_chunks()
    writer = DataFileWriter(layout, name)
    replaced = []
    try:
        for path in (*item.small, *item.candidates):
            if path not in item.small and not _has_key(path, key_schema, key, keys):
                continue
            for rows in read_data_file(path, layout.schema):
                writer.write(rows.filter(pc.invert(pc.is_in(key_array(rows, key), value_set=keys))))
            replaced.append(path)
        for rows in read_data_file(item.staged, staged_schema):
            writer.write(rows.filter(pc.invert(rows.column(DELETE_COLUMN))).select(layout.schema.names))
        return MergeReport(tuple(replaced), tuple(writer.close()))
    except BaseException:
        writer.abort()
        raise


def _has_key(path: str, key_schema: pa.Schema, key: Sequence[str], keys: pa.Array) -> bool:
    """Whether a file has a row with one of the keys. Reads only the columns of the key."""
    return any(
        pc.any(pc.is_in(key_array(rows, key), value_set=keys), min_count=0).as_py()
        for rows in read_data_file(path, key_schema)
    )


FIELD_ID: Final = b"PARQUET:field_id"


def read_data_file(path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data file with the columns of `schema`, identified by their field ids; by names where the
    file or the schema has no ids. A column that the file lacks is null.
    """
    system, place = file_system_of(path)
    with system.open_input_file(place) as source:
        file = pq.ParquetFile(
            source, pre_buffer=False
        )  # which would keep all row groups until the file is closed
        found = {_field_id(field) or field.name: field.name for field in file.schema_arrow}
        wanted = [found.get(_field_id(field)) or found.get(field.name) for field in schema]
        columns = [name for name in wanted if name is not None]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(READ_ROWS, [group], columns, use_threads=False):
                arrays = [
                    pa.nulls(batch.num_rows, field.type)
                    if name is None
                    else _align(batch.column(name), batch.schema.field(name), field)
                    for name, field in zip(wanted, schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def file_system_of(path: str) -> tuple[Any, str]:
    """Return the file system of a file, and the file's path on it."""
    location, _, name = path.rpartition("/")
    system, directory = file_system(location)
    return system, f"{directory}/{name}"


def _field_id(field: pa.Field) -> bytes | None:
    found = (field.metadata or {}).get(FIELD_ID)
    return None if found is None else bytes(found)


def _align(array: pa.Array, found: pa.Field, wanted: pa.Field) -> pa.Array:
    """Return a column of a file with the type of the table's column; fields of structs are identified by their ids."""
    if pa.types.is_struct(wanted.type):
        ids = {
            _field_id(found.type.field(n)) or found.type.field(n).name: n
            for n in range(found.type.num_fields)
        }
        children = []
        for index in range(wanted.type.num_fields):
            child = wanted.type.field(index)
            place = ids.get(_field_id(child)) if _field_id(child) in ids else ids.get(child.name)
            if place is None:
                children.append(pa.nulls(len(array), child.type))
            else:
                children.append(_align(array.field(place), found.type.field(place), child))
        fields = [wanted.type.field(index) for index in range(wanted.type.num_fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if pa.types.is_list(wanted.type) and pa.types.is_list(found.type):
        values = _align(array.values, found.type.value_field, wanted.type.value_field)
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(
            pa.array(array.offsets.to_numpy()), values, type=wanted.type, mask=mask
        )
    return array if array.type == wanted.type else array.cast(wanted.type)
