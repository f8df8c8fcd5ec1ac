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
    "BatchProgress",
    "CatalogLocked",
    "CatalogUnavailable",
    "ConcurrentArchive",
    "JavaHome",
    "JavaNotFound",
    "LeasedRecords",
    "MalformedValue",
    "MirrorJob",
    "MirrorResult",
    "NotAnArchiveTable",
    "PartitionReplay",
    "RecordFailure",
    "ReplayReport",
    "SchemaNotFound",
    "SchemaRegistryError",
    "Selection",
    "SnapshotNotFound",
    "TableNotFound",
    "TableVersion",
    "UnsupportedSchema",
    "archive",
    "find_java",
    "find_version",
    "lease",
    "mirror",
    "open_table",
    "read_topic_as_table",
    "register_topics",
    "replay",
    "session",
    "start_available_now",
    "translate_offsets",
]

_LAZY = {
    "ArchiveFailed": ("spark", "mansio.pipelines.archive"),
    "ArchiveJob": ("spark", "mansio.pipelines.archive"),
    "ArchiveResult": ("spark", "mansio.pipelines.archive"),
    "ArchiveTable": ("iceberg", "mansio.iceberg.archive.table"),
    "BatchProgress": ("spark", "mansio.pipelines.pipeline_progress"),
    "LeasedRecords": ("spark", "mansio.spark.share.one_off_lease"),
    "MirrorJob": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "MirrorResult": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "PartitionReplay": ("iceberg", "mansio.pipelines.replay"),
    "RecordFailure": ("spark", "mansio.spark.share.failures"),
    "ReplayReport": ("iceberg", "mansio.pipelines.replay"),
    "Selection": ("iceberg", "mansio.iceberg.archive.table_scan"),
    "SnapshotNotFound": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "TableVersion": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "archive": ("spark", "mansio.pipelines.archive"),
    "find_version": ("iceberg", "mansio.iceberg.archive.time_travel"),
    "lease": ("spark", "mansio.spark.share.one_off_lease"),
    "mirror": ("iceberg", "mansio.pipelines.mirroring.mirror"),
    "open_table": ("iceberg", "mansio.iceberg.archive.table"),
    "read_topic_as_table": ("spark", "mansio.spark.topic_table"),
    "register_topics": ("spark", "mansio.spark.topic_views"),
    "replay": ("iceberg", "mansio.pipelines.replay"),
    "start_available_now": ("spark", "mansio.spark.spark_versions"),
    "translate_offsets": ("iceberg", "mansio.pipelines.mirroring.mirror"),
}
"""The extra that each name needs, and the module that defines it. Replays and mirrors work without Spark."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra, module = _LAZY[name]
    require_extra(extra)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
