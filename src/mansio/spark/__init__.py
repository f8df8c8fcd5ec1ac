"""Spark integration: the data source `format("mansio")` for batch and streaming reads and writes, and Spark jobs.

>>> from mansio.spark import session
>>> spark = session()  # a local session; other masters: session("spark://host:7077")
>>> options = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "flights"}
>>> flights = spark.readStream.format("mansio").options(**options).load()

Invariants:
* Importing this module needs neither pyspark nor Java. Jobs (`mansio.pipelines`) are imported when they are first used,
  because their modules import those of this package. Type checkers find all names in `__init__.pyi`.
* A name whose extra is missing raises `MissingExtra`, an `ImportError`, for `import` as for an attribute, so `hasattr`
  raises it, too. As an `AttributeError` it would become "cannot import name", without the command that installs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mansio.host.extras import require_extra
from mansio.iceberg.errors import (
    ArchiveError,
    CatalogLocked,
    CatalogUnavailable,
    ConcurrentArchive,
    NotAnArchiveTable,
    TableNotFound,
)
from mansio.serde.errors import (
    MalformedValue,
    SchemaNotFound,
    SchemaRegistryError,
    UnsupportedSchema,
)
from mansio.spark.session import session
from mansio.spark.session.java import JavaHome, JavaNotFound, find_java

__all__ = [
    "ArchiveError",
    "ArchiveFailed",
    "ArchiveJob",
    "ArchiveResult",
    "ArchiveTable",
    "BackfillJob",
    "BackfillReport",
    "BackfilledRange",
    "BatchProgress",
    "CatalogLocked",
    "CatalogUnavailable",
    "CauseReport",
    "CleanupReport",
    "CompactReport",
    "ConcurrentArchive",
    "DeadLetterAnalysis",
    "DeadLetterReport",
    "DeadLetterSample",
    "EraseReport",
    "ErasureReport",
    "JavaHome",
    "JavaNotFound",
    "LeasedRecords",
    "MaintenanceReport",
    "MalformedValue",
    "MirrorJob",
    "MirrorResult",
    "NotAnArchiveTable",
    "PartitionField",
    "PartitionReplay",
    "PipelineFailed",
    "PipelineFileError",
    "PipelineJob",
    "PipelineResult",
    "RecordFailure",
    "ReplayReport",
    "ResultTable",
    "RewriteReport",
    "SchemaNotFound",
    "SchemaRegistryError",
    "Selection",
    "SharePartitionRedrive",
    "SnapshotNotFound",
    "SortField",
    "TableNotFound",
    "TableTarget",
    "TableVersion",
    "TimeRange",
    "UnknownCause",
    "UnsupportedSchema",
    "archive",
    "backfill",
    "compact",
    "erase",
    "find_java",
    "find_version",
    "lease",
    "maintain",
    "maintain_table",
    "mirror",
    "open_existing_table",
    "open_table",
    "parse_partition_by",
    "parse_sort_by",
    "read_topic_as_table",
    "register_topics",
    "replay",
    "run_pipeline",
    "session",
    "start_available_now",
    "table_writer",
    "translate_offsets",
]

_LAZY = {
    "ArchiveFailed": ("spark", "mansio.pipelines.archive"),
    "ArchiveJob": ("spark", "mansio.pipelines.archive"),
    "ArchiveResult": ("spark", "mansio.pipelines.archive"),
    "ArchiveTable": ("iceberg", "mansio.iceberg.archive.table"),
    "BackfillJob": ("spark", "mansio.pipelines.backfilling.backfill"),
    "BackfillReport": ("spark", "mansio.pipelines.backfilling.backfill"),
    "BackfilledRange": ("iceberg", "mansio.iceberg.result_table.backfill_ranges"),
    "BatchProgress": ("spark", "mansio.pipelines.pipeline_progress"),
    "CauseReport": ("spark", "mansio.pipelines.dlq"),
    "CleanupReport": ("iceberg", "mansio.iceberg.orphan_cleanup"),
    "CompactReport": ("spark", "mansio.pipelines.compact"),
    "DeadLetterAnalysis": ("spark", "mansio.pipelines.dlq"),
    "DeadLetterReport": ("spark", "mansio.pipelines.dlq"),
    "DeadLetterSample": ("spark", "mansio.pipelines.dlq"),
    "EraseReport": ("iceberg", "mansio.pipelines.erase"),
    "ErasureReport": ("iceberg", "mansio.iceberg.archive.erase_keys"),
    "LeasedRecords": ("spark", "mansio.spark.share.one_off_lease"),
    "MaintenanceReport": ("iceberg", "mansio.pipelines.maintain"),
    "MirrorJob": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "MirrorResult": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "PartitionField": ("iceberg", "mansio.iceberg.result_table.partition_spec"),
    "PartitionReplay": ("iceberg", "mansio.pipelines.replay"),
    "PipelineFailed": ("spark", "mansio.pipelines.run"),
    "PipelineFileError": ("spark", "mansio.pipelines.pipeline_file"),
    "PipelineJob": ("spark", "mansio.pipelines.run"),
    "PipelineResult": ("spark", "mansio.pipelines.run"),
    "RecordFailure": ("spark", "mansio.spark.share.failures"),
    "ReplayReport": ("iceberg", "mansio.pipelines.replay"),
    "ResultTable": ("iceberg", "mansio.iceberg.result_table.table"),
    "RewriteReport": ("iceberg", "mansio.iceberg.rewrite"),
    "Selection": ("iceberg", "mansio.iceberg.archive.table_scan"),
    "SharePartitionRedrive": ("spark", "mansio.pipelines.dlq"),
    "SnapshotNotFound": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "SortField": ("iceberg", "mansio.iceberg.result_table.partition_spec"),
    "TableTarget": ("iceberg", "mansio.iceberg.result_table.table"),
    "TableVersion": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "TimeRange": ("iceberg", "mansio.iceberg.result_table.backfill_ranges"),
    "UnknownCause": ("spark", "mansio.pipelines.dlq"),
    "archive": ("spark", "mansio.pipelines.archive"),
    "backfill": ("spark", "mansio.pipelines.backfilling.backfill"),
    "compact": ("spark", "mansio.pipelines.compact"),
    "erase": ("iceberg", "mansio.pipelines.erase"),
    "find_version": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "lease": ("spark", "mansio.spark.share.one_off_lease"),
    "maintain": ("iceberg", "mansio.pipelines.maintain"),
    "maintain_table": ("spark", "mansio.pipelines.table_maintenance"),
    "mirror": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "open_existing_table": ("iceberg", "mansio.iceberg.result_table.table"),
    "open_table": ("iceberg", "mansio.iceberg.archive.table"),
    "parse_partition_by": ("iceberg", "mansio.iceberg.result_table.partition_spec"),
    "parse_sort_by": ("iceberg", "mansio.iceberg.result_table.partition_spec"),
    "read_topic_as_table": ("spark", "mansio.spark.topic_table"),
    "register_topics": ("spark", "mansio.spark.topic_views"),
    "replay": ("iceberg", "mansio.pipelines.replay"),
    "run_pipeline": ("spark", "mansio.pipelines.run"),
    "start_available_now": ("spark", "mansio.spark.spark_versions"),
    "table_writer": ("spark", "mansio.pipelines.table_writer"),
    "translate_offsets": ("iceberg", "mansio.pipelines.mirroring.mirror"),
}
"""The extra that each name needs, and the module that defines it. Maintenance, erasures,
replays and mirrors work without Spark."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra, module = _LAZY[name]
    require_extra(extra)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
