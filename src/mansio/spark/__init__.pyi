# Names of `mansio.spark`, where each is defined, for type checkers.

from mansio.iceberg.archive.erase_keys import ErasureReport
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
from mansio.iceberg.orphan_cleanup import CleanupReport
from mansio.iceberg.result_table.backfill_ranges import BackfilledRange, TimeRange
from mansio.iceberg.result_table.partition_spec import (
    PartitionField,
    SortField,
    parse_partition_by,
    parse_sort_by,
)
from mansio.iceberg.result_table.table import ResultTable, TableTarget, open_existing_table
from mansio.iceberg.rewrite import RewriteReport
from mansio.pipelines.archive import ArchiveFailed, ArchiveJob, ArchiveResult, archive
from mansio.pipelines.backfilling.backfill import BackfillJob, BackfillReport, backfill
from mansio.pipelines.compact import CompactReport, compact
from mansio.pipelines.dlq import (
    CauseReport,
    DeadLetterAnalysis,
    DeadLetterReport,
    DeadLetterSample,
    SharePartitionRedrive,
    UnknownCause,
)
from mansio.pipelines.erase import EraseReport, erase
from mansio.pipelines.maintain import MaintenanceReport, maintain
from mansio.pipelines.mirroring.mirror import MirrorJob, MirrorResult, mirror, translate_offsets
from mansio.pipelines.pipeline_file import PipelineFileError
from mansio.pipelines.pipeline_progress import BatchProgress
from mansio.pipelines.replay import PartitionReplay, ReplayReport, replay
from mansio.pipelines.run import PipelineFailed, PipelineJob, PipelineResult, run_pipeline
from mansio.pipelines.table_maintenance import maintain_table
from mansio.pipelines.table_writer import table_writer
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
