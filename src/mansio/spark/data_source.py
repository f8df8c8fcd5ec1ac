"""Spark data source `format("mansio")`: schema, readers and writers.

Spark instantiates it in many processes and imports this module wherever the format is looked up. Importing it is
therefore cheap; readers and writers are imported when they are requested.

Invariants:
* Options are checked before anything is read or written.
* A schema given by the user selects and orders columns; it does not change types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from mansio.spark.options import SourceOptions


class MansioSource(DataSource):
    """Topics as Spark's source and sink."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "mansio"

    def schema(self) -> str:
        """The columns selected by the options."""
        from mansio.spark.arrow.schema import spark_schema
        from mansio.spark.options import ERROR_COLUMN, columns_of

        names = columns_of(self.options)
        known = spark_schema([name for name in names if name != ERROR_COLUMN])
        return f"{known}, {ERROR_COLUMN} string" if ERROR_COLUMN in names else known

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        from mansio.spark.source.readers import BatchReader

        options = self._parsed()
        return BatchReader(options, checked_columns(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        from mansio.spark.source.readers import StreamReader

        options = self._parsed(streaming=True)
        return StreamReader(options, checked_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `DataFrame.write`."""
        from mansio.spark.sink.writers import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For `DataFrame.writeStream`."""
        from mansio.spark.sink.writers import StreamWriter

        return StreamWriter(self.options, schema, overwrite)

    def _parsed(self, *, streaming: bool = False) -> SourceOptions:
        from mansio.spark.options import SourceOptions

        return SourceOptions.parse(self.options, streaming=streaming)


def checked_columns(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """The column names of a schema, the default one or the user's.

    Raises `ConfigError` for an unknown column or a different type.
    """
    from pyspark.sql.types import StringType

    from mansio.spark.arrow.schema import RECORD_SCHEMA, spark_schema
    from mansio.spark.options import DEAD_LETTER, ERROR_COLUMN

    known = {ERROR_COLUMN: StringType().simpleString()} if options.on_unreadable == DEAD_LETTER else {}
    for name in RECORD_SCHEMA.names:
        known[name] = spark_schema((name,)).removeprefix(f"{name} ").replace(": ", ":").replace(", ", ",")
    for field in schema.fields:
        wanted = known.get(field.name)
        if wanted is None:
            raise ConfigError(
                f"a topic has no column {field.name}: correct the schema; there are {', '.join(known)}"
            )
        if field.dataType.simpleString() != wanted:
            raise ConfigError(
                f"column {field.name} is {wanted}, not {field.dataType.simpleString()}: correct the schema, and cast in"
                " the query"
            )
    return tuple(schema.fieldNames())
