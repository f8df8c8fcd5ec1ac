"""Writes the micro-batches of a query into an Iceberg table, once each: for `run --to-table`, and for a program's own
`foreachBatch`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.iceberg.result_table.commit import QueryBatch
from mansio.iceberg.result_table.table import open_dead_letter_table, open_result_table
from mansio.pipelines.checkpoint import checkpoint_directory, planned_digest, query_id
from mansio.spark.session.addresses import spark_settings
from mansio.spark.sink.append_sink import AppendSink
from mansio.spark.sink.result_schema import to_iceberg_schema
from mansio.spark.sink.upsert_sink import NULL_KEY_DEAD_LETTER, UpsertSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.result_table.table import ResultTable, TableTarget


def table_writer(frame: DataFrame, target: TableTarget, checkpoint: str) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes each batch of a query into a table once: it appends the rows,
    or, if `target` has a key, replaces those with the same key. A repeated batch is recognized.

    >>> write = table_writer(flights, TableTarget("flights.last", "lake", key=("tail",)), "checkpoints/last")
    >>> query = flights.writeStream.foreachBatch(write).option("checkpointLocation", "checkpoints/last").start()

    `frame`: a DataFrame with the columns of the rows; the table is created, or adapted to them. `checkpoint`: the
    `checkpointLocation` of the query, which identifies its batches. A function of a program can write parts of a batch
    into several tables, with a writer for each.

    Raises the errors of `mansio.spark.run_pipeline` for a table. The returned function raises `StaleCheckpoint`,
    `TableChanged`, `CommitConflict`, `CatalogLocked`, `CatalogUnavailable`.
    """
    spark = frame.sparkSession
    table = open_result_table(target, to_iceberg_schema(frame.schema), spark_settings(spark))
    table.remove_orphan_files()
    return table_sink(spark, table, target, checkpoint)


def table_sink(
    spark: SparkSession, table: ResultTable, target: TableTarget, checkpoint: str
) -> Callable[[DataFrame, int], None]:
    """Return the function that writes a batch to an open table. Raises the errors of `open_result_table`."""
    identify = partial(identify_batch, checkpoint)
    if not target.key:
        return AppendSink(table, identify)
    dead_letters = None
    if target.on_null_key == NULL_KEY_DEAD_LETTER:
        dead_letters = open_dead_letter_table(target, spark_settings(spark))
    return UpsertSink(
        table,
        identify,
        order_by=target.order_by,
        on_null_key=target.on_null_key,
        dead_letters=dead_letters,
    )


def identify_batch(checkpoint_location: str, spark: SparkSession, batch_id: int) -> QueryBatch:
    """Return the identity of a batch of a query that has started. Called where the batch runs: with Spark Connect on
    the server.
    """
    checkpoint = checkpoint_directory(spark, checkpoint_location)
    return QueryBatch(query_id(checkpoint), batch_id, planned_digest(checkpoint, batch_id))
