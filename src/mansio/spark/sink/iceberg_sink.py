"""Spark sink of the archive: tasks fetch records and write Parquet files, the driver commits them to an Iceberg table.

A task receives offset ranges (`RangeSource`), not records: it fetches the records and writes them to files in the same
process. The commit reads the offsets of a batch from the checkpoint's offset log, where Spark stored them before it ran
the batch. The files alone do not show these offsets, because a log has offsets without a record.

Invariants:
* A task never accesses the catalog. The catalog's libraries are imported by a commit only, so tasks start three times
  as fast.
* A batch is committed with exactly the offsets that Spark stored for it, and only if the tasks have read all of them,
  each once. The table decides whether the batch is new (`iceberg.commit`), so a repeated batch is added once.
* An unreadable record is not added to the archive: the table lists its offsets as lost. With `deadLetters` the record
  is stored in a separate table.
* A file has the types of decoded columns that its task knew when it wrote it. The commit merges the types of all files
  with those of the table, in the same transaction.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from mansio.errors import DAMAGED_BATCH, ConfigError
from mansio.iceberg.archive.decoded_schema import (
    NO_DECODED_COLUMNS,
    archive_schema,
    decode_schema,
    encode_schema,
    merge_decoded,
)
from mansio.iceberg.archive.parquet_writer import SOURCE_COLUMN_NAMES, PartitionFileWriter
from mansio.iceberg.archive.table_format import (
    DEAD_LETTER_SCHEMA,
    DECODED_COLUMNS,
    LOST_RANGES_MAX,
    BatchPlan,
    LostRange,
    format_offsets,
    parse_offsets,
)
from mansio.iceberg.errors import InvalidDataFiles
from mansio.iceberg.fanout_writer import file_system
from mansio.spark.options import ERROR_COLUMN, SourceOptions, selected_columns
from mansio.spark.source.error_column import parse_error_offsets, parse_error_reason
from mansio.spark.source.readers import ranges_from_rows
from mansio.spark.source.task_reader import read_range
from mansio.spark.task_login import options_for_tasks
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql.types import StructType

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import WrittenRange
    from mansio.spark.source.read_plan import TaskRange

TABLE_OPTION: Final = "table"
WAREHOUSE_OPTION: Final = "warehouse"
CATALOG_OPTION: Final = "catalog"
DATA_LOCATION_OPTION: Final = "dataLocation"
START_OFFSETS_OPTION: Final = "tableStart"
"""Option with the start offset of the query in each partition, as JSON."""
SOURCE_OPTION: Final = "tableSource"
"""Option with the options of `format("mansio")` with which tasks read, as JSON."""
DEAD_LETTERS_OPTION: Final = "deadLetters"
"""Option with the data location of the dead-letter table; without it, dead letters are not stored."""
DECODED_OPTION: Final = "decodedColumns"
"""Option with the types that the decoded columns have at least, as an Arrow schema in base64."""
CHECKPOINT_OPTION: Final = "checkpointLocation"
REQUIRED_OPTIONS: Final = (
    TABLE_OPTION,
    WAREHOUSE_OPTION,
    DATA_LOCATION_OPTION,
    START_OFFSETS_OPTION,
    SOURCE_OPTION,
    CHECKPOINT_OPTION,
)

BATCH_ID_PROPERTY = "streaming.sql.batchId"
QUERY_ID_PROPERTY = "sql.streaming.queryId"


@dataclass(frozen=True)
class WrittenFiles(WriterCommitMessage):
    """Result of one task: the ranges it has read, the data files it has written (`parts`), the offsets of unreadable
    records, which are accepted as lost, and the files for the dead-letter table.
    """

    ranges: tuple[TaskRange, ...]
    parts: tuple[WrittenRange, ...]
    lost: tuple[LostRange, ...] = ()
    dead_letters: tuple[WrittenRange, ...] = ()
    decoded: str = ""
    """The decoded columns of the data files (`encode_schema`)."""


class IcebergSink(DataSource):
    """Spark data source for `writeStream` to a topic's archive table. Register it with `spark.dataSource.register`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the data source in `format(...)`."""
        return "mansio_table"

    def streamWriter(self, schema: StructType, overwrite: bool) -> IcebergStreamWriter:  # noqa: ARG002  # as Spark calls it
        """Return the writer. Raises `ConfigError` for a missing option and for output modes other than append."""
        if overwrite:
            raise ConfigError("an archive can only be appended to: use output mode append")
        return IcebergStreamWriter(self.options)


class IcebergStreamWriter(DataSourceStreamArrowWriter):
    """Writes in tasks and commits on the driver. It holds only options, because Spark creates a new object for
    commits.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        """`options`: the sink's options; Spark passes their names in any case."""
        given = {name.lower(): value for name, value in options.items()}
        missing = [n for n in REQUIRED_OPTIONS if n.lower() not in given]
        if missing:
            raise ConfigError(f"option {missing[0]} is missing: `mansio pipeline archive` sets it")
        self._options = given
        source = json.loads(given[SOURCE_OPTION.lower()])
        text = given.get(DECODED_OPTION.lower())
        self._decoded = NO_DECODED_COLUMNS if text is None else decode_schema(text)
        parsed = SourceOptions.parse(source, streaming=True)
        types = {one.name: one.type for one in self._decoded}
        columns = tuple(one._replace(type=types.get(one.name)) for one in parsed.decoded)
        self._source, self._columns = replace(parsed, decoded=columns), selected_columns(source)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for the tasks of one batch, with what they log in with."""
        options = {name: text for name, text in self._options.items() if name != SOURCE_OPTION.lower()}
        return {**self.__dict__, "_options": options, "_source": options_for_tasks(self._source)}

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenFiles:
        """Fetch the records of the ranges in `iterator` and write them to files; called in a task.

        A task that fails deletes its files.
        """
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        query = context.getLocalProperty(QUERY_ID_PROPERTY) or "query"
        batch = context.getLocalProperty(BATCH_ID_PROPERTY) or "0"
        name = f"{query}-{batch}"
        files = _DataFiles(self._options[DATA_LOCATION_OPTION.lower()], name, self._decoded)
        dead_letter_table = self._options.get(DEAD_LETTERS_OPTION.lower())
        dead_letter_files = None
        if dead_letter_table is not None:
            dead_letter_files = PartitionFileWriter(dead_letter_table, name, schema=DEAD_LETTER_SCHEMA)
        try:
            read: list[TaskRange] = []
            lost: list[LostRange] = []
            for task_range in (one for rows in iterator for one in ranges_from_rows(rows)):
                for records in read_range(self._source, self._columns, task_range):
                    readable, dead_letters = split_dead_letters(records)
                    files.write(readable)
                    if dead_letters is not None:
                        lost = merge_lost_ranges([*lost, *dead_letter_ranges(dead_letters)])[
                            -LOST_RANGES_MAX:
                        ]
                        if dead_letter_files is not None:
                            dead_letter_files.write(dead_letters)
                read.append(task_range)
            parts = tuple(files.close())
            others = () if dead_letter_files is None else tuple(dead_letter_files.close())
            return WrittenFiles(tuple(read), parts, tuple(lost), others, encode_schema(files.decoded))
        except BaseException:
            files.abort()
            if dead_letter_files is not None:
                dead_letter_files.abort()
            raise

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Add the batch to the table unless the table already has it; called on the driver."""
        checkpoint = self._options[CHECKPOINT_OPTION.lower()]
        start = parse_offsets(self._options[START_OFFSETS_OPTION.lower()])
        plan = read_batch_plan(checkpoint, batchId, self._options[TABLE_OPTION], start)
        read: list[TaskRange] = []
        parts: list[WrittenRange] = []
        lost: list[LostRange] = []
        dead_letters: list[WrittenRange] = []
        decoded = self._decoded
        for message in messages:
            if not isinstance(message, WrittenFiles):
                raise RuntimeError(f"a task of batch {batchId} has not reported what it wrote")
            read += message.ranges
            parts += message.parts
            lost += message.lost
            dead_letters += message.dead_letters
            if message.decoded:
                decoded = merge_decoded((decoded, decode_schema(message.decoded)))
        check_read_ranges(plan, read)
        table = _open_cached_table(self._options)
        if dead_letters:
            from mansio.iceberg.archive.dead_letters import append_dead_letters, open_dead_letters

            dead_letter_table = open_dead_letters(table, create=True)
            assert dead_letter_table is not None
            append_dead_letters(dead_letter_table, plan, dead_letters)
        table.commit(plan, parts, merge_lost_ranges(lost), decoded)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Leave the files to the orphan cleanup: a commit that failed may have been applied, so they may be in use."""


class _DataFiles:
    """The data files of a task. Other files are begun when the type of a decoded column changes."""

    def __init__(self, location: str, name: str, decoded: pa.Schema) -> None:
        self.decoded = decoded
        """The decoded columns of all files so far."""
        self._location = location
        self._name = name
        self._writers = [PartitionFileWriter(location, name, schema=archive_schema(decoded))]

    def write(self, rows: pa.RecordBatch) -> None:
        found = pa.schema([rows.schema.field(one) for one in DECODED_COLUMNS if one in rows.schema.names])
        if found != self.decoded:
            self._writers[-1].close()
            self._writers.append(
                PartitionFileWriter(self._location, self._name, schema=archive_schema(found))
            )
            self.decoded = merge_decoded((self.decoded, found))
        self._writers[-1].write(rows)

    def close(self) -> list[WrittenRange]:
        """Close the files, and return all that were written."""
        return [part for writer in self._writers for part in writer.close()]

    def abort(self) -> None:
        """Close and delete all files."""
        for writer in self._writers:
            writer.abort()


def check_read_ranges(plan: BatchPlan, ranges: Iterable[TaskRange]) -> None:
    """Check that the tasks of a batch have read exactly its offsets, each once.

    Raises:
        InvalidDataFiles: An offset of the batch was not read, was read twice, or another offset was read.
    """
    read: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in ranges:
        read[one.partition].append((one.start, one.end))
    for partition in sorted(plan.end.keys() | read.keys()):
        start, end = plan.start.get(partition, 0), plan.end.get(partition, 0)
        edges = [start, *(edge for task_range in sorted(read[partition]) for edge in task_range), end]
        # Pairs of edges: each range ends where the next begins, the first at the start, the last at the end.
        if any(edges[n] != edges[n + 1] for n in range(0, len(edges), 2)):
            raise InvalidDataFiles(
                f"the tasks of batch {plan.batch} have read {sorted(read[partition])} of partition {partition}; wanted"
                f" was ({start}, {end}), each offset once"
            )


def split_dead_letters(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Split rows into (records, dead letters or None). The dead letters have the columns of `DEAD_LETTER_SCHEMA`, with
    the column names of the source.
    """
    index = rows.schema.get_field_index(ERROR_COLUMN)
    if index < 0 or rows.column(index).null_count == rows.num_rows:
        return rows, None
    errors = rows.column(index)
    return rows.filter(pc.is_null(errors)), pa.RecordBatch.from_pylist(
        [_dead_letter_row(row) for row in rows.filter(pc.is_valid(errors)).to_pylist()],
        pa.schema(
            [field.with_name(SOURCE_COLUMN_NAMES.get(field.name, field.name)) for field in DEAD_LETTER_SCHEMA]
        ),
    )


def _dead_letter_row(row: Mapping[str, Any]) -> dict[str, Any]:
    first, last = parse_error_offsets(row[ERROR_COLUMN]) or (row["offset"], row["offset"])
    value = row.get("value")
    return {
        "partition": row["partition"],
        "offset": first,
        "last_offset": last,
        "kind": "batch" if _is_batch(value, first, last) else "record",
        "reason": parse_error_reason(row[ERROR_COLUMN]),
        "key": row.get("key"),
        "value": value,
    }


def _is_batch(value: bytes | None, first: int, last: int) -> bool:
    """Whether the value of a dead letter is a whole record batch with these offsets, not the value of a record."""
    try:
        found = [header for _, header in iterate_batches(value or b"")]
    except DAMAGED_BATCH:
        return False
    return (
        len(found) == 1
        and found[0].size == len(value or b"")
        and found[0].base_offset <= first <= last <= found[0].last_offset
    )


def dead_letter_ranges(dead_letters: pa.RecordBatch) -> list[LostRange]:
    """Return the offset ranges of dead letters."""
    columns = (dead_letters.column(name).to_pylist() for name in ("partition", "offset", "last_offset"))
    return [LostRange(partition, first, last + 1) for partition, first, last in zip(*columns, strict=True)]


def merge_lost_ranges(lost: Iterable[LostRange]) -> list[LostRange]:
    """Sort the ranges and merge those that overlap or are adjacent."""
    found: list[LostRange] = []
    for one in sorted(lost, key=lambda one: (one.partition, one.start)):
        if found and found[-1].partition == one.partition and one.start <= found[-1].end:
            found[-1] = LostRange(one.partition, found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def read_batch_plan(checkpoint: str, batch: int, topic: str, start: Mapping[int, int]) -> BatchPlan:
    """Read the offsets of a batch from Spark's checkpoint. Batch 0 begins at `start`, a later one at the end of the
    batch before it. A partition that the batch before does not have begins at offset 0.

    Raises:
        ConfigError: The checkpoint does not have the batch, or belongs to another topic.
    """
    system, directory = file_system(checkpoint)

    def read(name: str) -> str:
        try:
            with system.open_input_stream(f"{directory}/{name}") as file:
                return bytes(file.read()).decode()
        except OSError as error:
            raise ConfigError(f"the checkpoint {checkpoint} has no {name}: {error}") from error

    query = json.loads(read("metadata"))["id"]
    end = _parse_offset_log_entry(read(f"offsets/{batch}"), topic)
    begin = dict(start) if batch == 0 else _parse_offset_log_entry(read(f"offsets/{batch - 1}"), topic)
    return BatchPlan(query, batch, {partition: begin.get(partition, 0) for partition in end}, end)


def _parse_offset_log_entry(text: str, topic: str) -> dict[int, int]:
    """Return the offsets in an entry of Spark's offset log: a line with the version, one with the batch's metadata, and
    one with the offsets of the source.
    """
    lines = text.splitlines()
    if not lines or lines[0] != "v1" or len(lines) != 3:
        raise ConfigError(
            f"the checkpoint's offset log has format {lines[0] if lines else 'none'}, v1 is known"
        )
    logged = json.loads(lines[2])
    if list(logged) != [topic]:
        raise ConfigError(f"the checkpoint is of topic {', '.join(logged)}, not of {topic}")
    return parse_offsets(json.dumps(logged[topic]))


_tables: dict[str, ArchiveTable] = {}
"""The open table of the current query, by checkpoint. Spark uses this process for all commits of a query, and opening a
table takes longer than a commit.
"""


def _open_cached_table(options: Mapping[str, str]) -> ArchiveTable:
    from mansio.iceberg.archive.table import open_table

    checkpoint = options[CHECKPOINT_OPTION.lower()]
    if checkpoint not in _tables:
        _tables.clear()
        catalog, warehouse, topic = (
            options.get(CATALOG_OPTION),
            options[WAREHOUSE_OPTION],
            options[TABLE_OPTION],
        )
        _tables[checkpoint] = open_table(catalog, warehouse, topic)
    return _tables[checkpoint]


def sink_options(
    table: ArchiveTable,
    warehouse: str,
    catalog: str | None,
    start: Mapping[int, int],
    source: Mapping[str, str],
    dead_letters: ArchiveTable | None = None,
    decoded: pa.Schema = NO_DECODED_COLUMNS,
) -> dict[str, str]:
    """Return the sink's options for a query that starts at the offsets `start`; Spark adds the checkpoint. `source`:
    the options of `format("mansio")` with which tasks read. `dead_letters`: the table for unreadable records, if they
    are stored. `decoded`: the decoded columns with the types that are known now.
    """
    from mansio.iceberg.catalog import warehouse_location

    return {
        TABLE_OPTION: table.topic,
        WAREHOUSE_OPTION: warehouse_location(warehouse),  # tasks run on other machines: no relative paths
        **({CATALOG_OPTION: catalog} if catalog else {}),
        DATA_LOCATION_OPTION: table.data_location,
        START_OFFSETS_OPTION: format_offsets(start),
        SOURCE_OPTION: json.dumps(source),
        **({DECODED_OPTION: encode_schema(decoded)} if len(decoded) else {}),
        **({DEAD_LETTERS_OPTION: dead_letters.data_location} if dead_letters is not None else {}),
    }
