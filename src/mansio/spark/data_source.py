"""Spark data source `format("mansio")`: schema, readers and writers.

Spark imports this module in every process that looks up the format. Importing it is therefore cheap: the readers and
writers are imported when Spark requests one.

Invariants:
* Options are checked before anything is read or written.
* A schema given by the user selects and orders columns; it does not change their types, except of decoded columns,
  which are decoded to the given type.
* The types of decoded columns are determined once for a DataFrame. Its tasks use these types even if a later version of
  the schema is registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import ConfigError
from mansio.spark.planned_source import PlannedSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from mansio.spark.options import SourceOptions


class MansioSource(PlannedSource):
    """Spark data source that reads and writes topics."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the data source in `format(...)`."""
        return "mansio"

    def schema(self) -> str:
        """Return the Spark schema of the columns that the options select."""
        from mansio.schemas.column_types import spark_type
        from mansio.spark.arrow.schema import spark_schema
        from mansio.spark.options import (
            DECODED_COLUMNS,
            ERROR_COLUMN,
            LEASE_COLUMNS,
            reads_deliveries,
            reads_states,
            selected_columns,
        )

        if reads_states(self.options):
            from mansio.spark.share.record_states import STATE_SPARK_TYPES

            self._source_options()
            return ", ".join(f"`{name}` {kind}" for name, kind in STATE_SPARK_TYPES.items())

        if reads_deliveries(self.options):
            from mansio.spark.trace.deliveries import DELIVERY_SPARK_TYPES

            self._source_options()
            return ", ".join(f"`{name}` {kind}" for name, kind in DELIVERY_SPARK_TYPES.items())
        types = self._decoded_types()
        texts = []
        for name in selected_columns(self.options):
            if name in DECODED_COLUMNS:
                texts.append(f"{name} {spark_type(types[name])}")
            elif name in LEASE_COLUMNS:
                texts.append(f"{name} {LEASE_COLUMNS[name]}")
            else:
                texts.append(f"{ERROR_COLUMN} string" if name == ERROR_COLUMN else spark_schema((name,)))
        return ", ".join(texts)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query (`spark.read`)."""
        from mansio.spark.source.readers import BatchReader

        self._begin_plan()
        options = with_decoded_types(self._source_options(), schema)
        if options.states_of:
            from mansio.spark.share.record_states import STATE_SPARK_TYPES, StateReader

            columns = checked_schema(schema, STATE_SPARK_TYPES, owner="states of records have")
            return StateReader(options, columns)
        if options.is_deliveries:
            from mansio.spark.trace.deliveries import DELIVERY_SPARK_TYPES
            from mansio.spark.trace.delivery_reader import DeliveryReader

            columns = checked_schema(schema, DELIVERY_SPARK_TYPES, owner="deliveries have")
            return DeliveryReader(options, columns)
        if options.is_table:
            from mansio.spark.source.archived_topic import TopicTableReader

            return TopicTableReader(options, checked_columns(options, schema))
        if options.share is not None:
            from mansio.spark.share.leased_reader import LeasedReader

            return LeasedReader(options, options.share, checked_columns(options, schema))
        return BatchReader(options, checked_columns(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query (`spark.readStream`)."""
        from mansio.spark.source.readers import StreamReader
        from mansio.spark.spark_versions import adapt_stream_reader

        self._begin_plan()
        options = with_decoded_types(self._source_options(streaming=True), schema)
        if options.share is not None:
            from mansio.spark.share.share_reader import ShareStreamReader

            return adapt_stream_reader(
                ShareStreamReader(options, options.share, checked_columns(options, schema))
            )
        return adapt_stream_reader(StreamReader(options, checked_columns(options, schema)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch query (`DataFrame.write`)."""
        from mansio.spark.sink.writers import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query (`DataFrame.writeStream`)."""
        from mansio.spark.sink.writers import StreamWriter

        return StreamWriter(self.options, schema, overwrite)

    def _decoded_types(self) -> dict[str, pa.DataType]:
        """Return the types of the decoded columns now: those of the schemas, and of the archive if it is read, too."""
        from mansio.schemas.formats import open_decoder
        from mansio.spark.options import decoded_columns

        if not decoded_columns(self.options):
            return {}
        if "warehouse" not in {name.lower() for name in self.options}:
            return {one.name: open_decoder(one.format).type for one in decoded_columns(self.options)}
        from mansio.spark.source.archived_topic import decoded_types, open_archive

        options = self._source_options()
        return decoded_types(open_archive(options), options)

    def _source_options(self, *, streaming: bool = False) -> SourceOptions:
        from mansio.spark.options import SourceOptions

        return SourceOptions.parse(self.options, streaming=streaming)


def with_decoded_types(options: SourceOptions, schema: StructType) -> SourceOptions:
    """Return the options with the types of decoded columns fixed to those of the schema."""
    if not options.decoded:
        return options
    from dataclasses import replace

    from mansio.schemas.column_types import arrow_type

    found = []
    for one in options.decoded:
        if one.name in schema.fieldNames():
            kind = arrow_type(schema[one.name].dataType)
            found.append(one._replace(type=kind, is_fixed=True))
    return replace(options, decoded=tuple(found))


def checked_columns(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """Check the schema of a reader and return its column names.

    Spark passes the schema of the options or the user's own schema. Raises `ConfigError` for a column that a topic does
    not have, or whose type is not the topic's.
    """
    from pyspark.sql.types import StringType

    from mansio.spark.arrow.schema import RECORD_SCHEMA, spark_schema
    from mansio.spark.options import ERROR_COLUMN, LEASE_COLUMNS, ON_UNREADABLE_DEAD_LETTER

    known = (
        {ERROR_COLUMN: StringType().simpleString()}
        if options.on_unreadable == ON_UNREADABLE_DEAD_LETTER
        else {}
    )
    decoded = {one.name: one.format.format for one in options.decoded}
    known |= decoded
    if options.share is not None:
        known |= LEASE_COLUMNS
    for name in RECORD_SCHEMA.names:
        known[name] = spark_schema((name,)).removeprefix(f"{name} ").replace(": ", ":").replace(", ", ",")
    return checked_schema(schema, known, free=tuple(decoded))


def checked_schema(
    schema: StructType, known: Mapping[str, str], *, owner: str = "a topic has", free: Sequence[str] = ()
) -> tuple[str, ...]:
    """Check a schema against the known columns and their Spark types, and return its column names. The types of the
    columns `free` may be others. Raises `ConfigError`."""
    for field in schema.fields:
        expected_type = known.get(field.name)
        if expected_type is None:
            raise ConfigError(
                f"{owner} no column {field.name}: correct the schema; there are {', '.join(known)}"
            )
        if field.name not in free and field.dataType.simpleString() != expected_type:
            raise ConfigError(
                f"column {field.name} is {expected_type}, not {field.dataType.simpleString()}: correct the schema, and"
                " cast in the query"
            )
    return tuple(schema.fieldNames())
