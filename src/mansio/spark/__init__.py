"""Spark integration: the data source `format("mansio")` for batch and streaming reads and writes, and Spark jobs.

>>> from mansio.spark import session
>>> spark = session()  # a local session; other masters: session("spark://host:7077")
>>> options = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "flights"}
>>> flights = spark.readStream.format("mansio").options(**options).load()

Invariants:
* Importing this module needs neither pyspark nor Java. The module of a job is imported when the job is first used.
* A name whose extra is missing raises `MissingExtra`, an `ImportError`, for `import` as for an attribute, so `hasattr`
  raises it, too. As an `AttributeError` it would become "cannot import name", without the command that installs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mansio.host.extras import require_extra
from mansio.spark.iceberg.errors import (
    ArchiveError,
    CatalogLocked,
    CatalogUnavailable,
    ConcurrentArchive,
    NotAnArchiveTable,
    TableNotFound,
)
from mansio.spark.schemas.errors import (
    MalformedValue,
    SchemaNotFound,
    SchemaRegistryError,
    UnsupportedSchema,
)
from mansio.spark.session import session
from mansio.spark.session.java import JavaHome, JavaNotFound, find_java

if TYPE_CHECKING:
    from mansio.spark.iceberg.archive_table import ArchiveTable, open_table
    from mansio.spark.iceberg.table_scan import Selection
    from mansio.spark.iceberg.time_travel import SnapshotNotFound, TableVersion, find_version
    from mansio.spark.jobs.archive import ArchiveFailed, ArchiveJob, ArchiveResult, archive
    from mansio.spark.jobs.pipeline_progress import BatchProgress
    from mansio.spark.jobs.replay import PartitionReplay, ReplayReport, replay
    from mansio.spark.jobs.topic_table import read_topic_as_table
    from mansio.spark.mirroring.mirror import MirrorJob, MirrorResult, mirror, translate_offsets
    from mansio.spark.spark_versions import start_available_now
    from mansio.spark.topic_views import register_topics

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
    "MalformedValue",
    "MirrorJob",
    "MirrorResult",
    "NotAnArchiveTable",
    "PartitionReplay",
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
    "ArchiveFailed": ("spark", "jobs.archive"),
    "ArchiveJob": ("spark", "jobs.archive"),
    "ArchiveResult": ("spark", "jobs.archive"),
    "ArchiveTable": ("iceberg", "iceberg.archive_table"),
    "BatchProgress": ("spark", "jobs.pipeline_progress"),
    "MirrorJob": ("iceberg", "mirroring.mirror"),
    "MirrorResult": ("iceberg", "mirroring.mirror"),
    "PartitionReplay": ("iceberg", "jobs.replay"),
    "ReplayReport": ("iceberg", "jobs.replay"),
    "Selection": ("iceberg", "iceberg.table_scan"),
    "SnapshotNotFound": ("iceberg", "iceberg.time_travel"),
    "TableVersion": ("iceberg", "iceberg.time_travel"),
    "archive": ("spark", "jobs.archive"),
    "find_version": ("iceberg", "iceberg.time_travel"),
    "mirror": ("iceberg", "mirroring.mirror"),
    "open_table": ("iceberg", "iceberg.archive_table"),
    "read_topic_as_table": ("spark", "jobs.topic_table"),
    "register_topics": ("spark", "topic_views"),
    "replay": ("iceberg", "jobs.replay"),
    "start_available_now": ("spark", "spark_versions"),
    "translate_offsets": ("iceberg", "mirroring.mirror"),
}
"""The extra that each name needs, and the module in `mansio.spark` that defines it. Replays and mirrors work without
Spark."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra, module = _LAZY[name]
    require_extra(extra)
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
