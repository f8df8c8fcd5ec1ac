# Names of `mansio.spark`, where each is defined, for type checkers.

from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_scan import Selection
from mansio.iceberg.archive.time_travel import SnapshotNotFound, TableVersion, find_version
from mansio.iceberg.errors import (
    ArchiveError,
    CatalogLocked,
    CatalogUnavailable,
    ConcurrentArchive,
    NotAnArchiveTable,
    TableNotFound,
)
from mansio.pipelines.archive import ArchiveFailed, ArchiveJob, ArchiveResult, archive
from mansio.pipelines.mirroring.mirror import MirrorJob, MirrorResult, mirror, translate_offsets
from mansio.pipelines.pipeline_progress import BatchProgress
from mansio.pipelines.replay import PartitionReplay, ReplayReport, replay
from mansio.serde.errors import (
    MalformedValue,
    SchemaNotFound,
    SchemaRegistryError,
    UnsupportedSchema,
)
from mansio.spark.session import session
from mansio.spark.session.java import JavaHome, JavaNotFound, find_java
from mansio.spark.share.failures import RecordFailure
from mansio.spark.share.one_off_lease import LeasedRecords, lease
from mansio.spark.spark_versions import start_available_now
from mansio.spark.topic_table import read_topic_as_table
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
