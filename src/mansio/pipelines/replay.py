"""Replay job: writes archived records to a topic again, including records that the log has deleted.

Records go to the partition of the same number, in order, with their keys, values, headers and timestamps.

A repeated run adds nothing, and an interrupted one resumes, without stored state: before it writes, the job reads the
target and counts how many of the selected records the target contains in order, regardless of other records between
them (`count_present`). After a replay, each partition of the target *contains the selected records in order*.

Each round of records, of all partitions, is one transaction: readers with `read_committed` see all of it or nothing. A
run first aborts what a killed run of the same partitions has not committed, and fences one that still writes.

The job runs without Spark. The records of a partition must be written in order, so Spark could not parallelize them;
one process writes more than one broker accepts with acks=all; and most replays take less time than the start of a Spark
session.

Invariants:
* Only committed records count as replayed. The target is read up to its end: if a transaction of another producer is
  open there, the job waits for its end.
* At most `ROWS_PER_ROUND` records of each of `CONCURRENT_PARTITIONS_MAX` partitions are in memory.
* A topic is replayed into itself only from a fixed version of its archive: the copies are archived too, so the current
  state would select them in the next run.

Duplicates are possible if two replays with different partitions write the same records to the same topic at the same
time, and if the target has deleted replayed records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mansio.config.config_def import ResourceType
from mansio.errors import ConcurrentTransactions, InvalidRequest, PolicyViolation, UnknownTopicOrPartition
from mansio.iceberg.archive.table_format import PARTITION_COLUMN, TIMESTAMP_COLUMN
from mansio.iceberg.archive.table_scan import ALL_RECORDS, Selection, scan, selected_files
from mansio.iceberg.archive.time_travel import is_archive_of
from mansio.net.offsets import list_offsets
from mansio.net.retry import raise_for_code
from mansio.spark.arrow.readable import ReadableRows, UnreadableRows
from mansio.spark.arrow.schema import HEADERS_TYPE
from mansio.spark.arrow.schema import TIMESTAMP_TYPE as TIME
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import DirectTransaction
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.source.fetch import fetch_range
from mansio.spark.sync_client import UNLIMITED_RETENTION_CONFIG, ensure_topic, sync_client
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import LiveFile
    from mansio.iceberg.archive.time_travel import TableVersion
    from mansio.net.cluster import Cluster
    from mansio.net.metadata import TopicMetadata
    from mansio.spark.sync_client import SyncClient

    Row = tuple[int | None, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
    """(timestamp in microseconds, key, value, headers). Two records with equal rows are considered the same record."""

ROWS_PER_ROUND: Final = 16_384
"""Maximum number of rows of one partition that are written per round."""
CONCURRENT_PARTITIONS_MAX: Final = 16
TRANSACTION_TIMEOUT_MS: Final = 120_000
"""Time after which the brokers abort the round of a killed run."""
STABLE_END_WAIT_MS: Final = 180_000
"""Maximum time for which a replay waits for the transactions of other producers in the target."""
NO_TIMESTAMP_US: Final = -1_000
"""Timestamp of a record without one: -1 ms (KIP-32), in microseconds."""
COMPARED_COLUMNS: Final = ("key", "value", "timestamp", "headers")
RECORD_COLUMNS_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("partition", pa.int32()),
        ("timestamp", TIME),
        ("headers", HEADERS_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionReplay:
    """Result for one partition: number of records that the target already had, and number of records written."""

    partition: int
    already_present: int
    written: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay."""

    topic: str
    partitions: tuple[PartitionReplay, ...]
    seconds: float

    @property
    def already_present(self) -> int:
        """Number of records that the target already had."""
        return sum(one.already_present for one in self.partitions)

    @property
    def written(self) -> int:
        """Number of records written."""
        return sum(one.written for one in self.partitions)


def replay(
    table: ArchiveTable,
    bootstrap_servers: str,
    target: str,
    selection: Selection = ALL_RECORDS,
    *,
    version: TableVersion | None = None,
    include_deleted: bool = True,
    progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Write the selected records of an archive to the topic `target`, which is created if it does not exist.

    `version`: the version of the archive to read; None: the current state. Without `include_deleted` only records are
    written that the archived topic still has. `progress` is called with the number of records written since the last
    call.

    Raises:
        InvalidRequest: The target has too few partitions, would not keep timestamps, or is the archived topic itself
        and `version` is not fixed.
        PolicyViolation: The target would delete or compact the records.
        ArchiveError, DataLoss, or the brokers' errors.
    """
    began = time.monotonic()
    client = sync_client(bootstrap_servers)
    snapshot_id = None if version is None else version.snapshot_id
    if target == table.topic and (version is None or version.is_latest):
        raise InvalidRequest(
            f"topic {target} is replayed into itself, and its archive takes in the copies too: another run would write"
            " all of them again. Say as of when, with --from-snapshot and a snapshot's id, a tag (mansio pipeline"
            " maintain --tag NAME) or a time before the last batch; or replay into another topic"
        )
    wanted = selection if version is None else version.limit_selection(selection)
    if not include_deleted:
        wanted = exclude_deleted_records(client, table, wanted)
    files = selected_files(table, wanted, snapshot_id=snapshot_id)
    partitions = sorted({file.partition for file in files})
    done: list[PartitionReplay] = []
    if partitions:
        committed = table.last_commit()
        count = max([*partitions, *(committed.offsets if committed else ())]) + 1
        view = ensure_topic(client, target, count, UNLIMITED_RETENTION_CONFIG)
        check_target(client, view, partitions, oldest_us=_oldest_timestamp_us(files))
        for at in range(0, len(partitions), CONCURRENT_PARTITIONS_MAX):
            chunk = partitions[at : at + CONCURRENT_PARTITIONS_MAX]
            streams = [
                _PartitionStream(
                    client,
                    table,
                    view,
                    one,
                    wanted,
                    snapshot_id,
                    _first_copy_offset(table, view, one, files, wanted),
                )
                for one in chunk
            ]
            done += _write_partitions(client, bootstrap_servers, target, streams, progress)
    return ReplayReport(target, tuple(done), time.monotonic() - began)


def exclude_deleted_records(client: SyncClient, table: ArchiveTable, selection: Selection) -> Selection:
    """Return the selection without records that the topic has deleted: those below its log start offsets, or all if the
    topic was deleted or recreated.
    """
    client.cluster.mark_stale((table.topic,))
    try:
        view = client.run(client.cluster.topic(table.topic, wait_ms=0))
    except UnknownTopicOrPartition:
        return selection.starting_at({})
    if not is_archive_of(table, view.topic_id):
        return selection.starting_at({})
    every = [TopicPartition(table.topic, partition.index) for partition in view.partitions]
    listed = client.run(list_offsets(client.cluster, dict.fromkeys(every, EARLIEST_TIMESTAMP)))
    return selection.starting_at({one.partition: entry.offset for one, entry in listed.items()})


def _oldest_timestamp_us(files: Iterable[LiveFile]) -> int | None:
    """Oldest timestamp according to the bounds of the files, in microseconds; None if there is none. Bounds of -1 ms
    are ignored: they are those of records without a timestamp.
    """
    bounds = (one for file in files for one in (file.first_us, file.last_us))
    return min((one for one in bounds if one is not None and one >= 0), default=None)


def _first_copy_offset(
    table: ArchiveTable, target: TopicMetadata, partition: int, files: Iterable[LiveFile], wanted: Selection
) -> int:
    """Return the lowest offset of the target at which a copy can be. If a topic is replayed into itself, this is the
    offset after the selected records, because the original records must not be taken for copies. Otherwise it is 0,
    also for a recreated topic of the same name.
    """
    offsets = wanted.offset_range(partition)
    if target.name != table.topic or not is_archive_of(table, target.topic_id) or offsets is None:
        return 0
    return min(offsets[1], 1 + max(file.last_offset for file in files if file.partition == partition))


@dataclass(slots=True)
class _PartitionStream:
    """The replay of one partition: what is selected, and how many records are present and written."""

    client: SyncClient
    table: ArchiveTable
    view: TopicMetadata
    partition: int
    selection: Selection
    snapshot_id: int | None
    first_copy: int
    already_present: int = 0
    written: int = 0

    def wanted(self) -> Iterator[pa.RecordBatch]:
        only = replace(self.selection, partitions=frozenset((self.partition,)))
        return scan(self.table, only, snapshot_id=self.snapshot_id, batch_rows=ROWS_PER_ROUND)

    def missing(self) -> Iterator[pa.RecordBatch]:
        """Yield the selected records that the target does not have yet, with the columns of a record."""
        self.already_present = count_present(
            _comparable_rows(map(to_record_columns, self.wanted())),
            _comparable_rows(_read_target(self.client, self.view, self.partition, self.first_copy)),
        )
        rows_to_skip = self.already_present
        for batch in self.wanted():
            remaining = batch.slice(min(rows_to_skip, batch.num_rows))
            rows_to_skip -= batch.num_rows - remaining.num_rows
            if remaining.num_rows:
                yield to_record_columns(remaining)


def _write_partitions(
    client: SyncClient,
    bootstrap_servers: str,
    target: str,
    streams: list[_PartitionStream],
    progress: Callable[[int], None] | None,
) -> list[PartitionReplay]:
    """Write several partitions concurrently, one batch of each per round, so that their leaders work in parallel."""
    numbers = ",".join(str(stream.partition) for stream in streams)
    transaction = DirectTransaction(client, f"mansio-replay:{target}:{numbers}", TRANSACTION_TIMEOUT_MS)
    transaction.begin()
    sender = TaskSender(client, SinkOptions(bootstrap_servers, topic=target), transaction=transaction)
    in_progress = {stream.partition: (stream, stream.missing()) for stream in streams}
    try:
        while in_progress:
            round_batches = [(stream, next(batches, None)) for stream, batches in in_progress.values()]
            for stream, batch in round_batches:
                if batch is None:
                    del in_progress[stream.partition]
            batches = [batch for _, batch in round_batches if batch is not None]
            if batches:
                sender.send(target, pa.concat_batches(batches))
                sender.commit()
            for stream, batch in round_batches:
                stream.written += 0 if batch is None else batch.num_rows
            if progress is not None:
                progress(sum(batch.num_rows for batch in batches))
    except BaseException:
        sender.abort()
        raise
    sender.finish()
    return [PartitionReplay(stream.partition, stream.already_present, stream.written) for stream in streams]


def to_record_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows of the archive table to the columns that `TaskSender.send` expects."""
    times = batch.column(TIMESTAMP_COLUMN).fill_null(pa.scalar(NO_TIMESTAMP_US, TIME))
    columns = [batch.column("key"), batch.column("value"), batch.column(PARTITION_COLUMN), times]
    return pa.RecordBatch.from_arrays(
        [*columns, batch.column("headers").cast(HEADERS_TYPE)], schema=RECORD_COLUMNS_SCHEMA
    )


def count_present(wanted: Iterator[Row], present: Iterable[Row]) -> int:
    """Return the number of `wanted` records, counted from the first, that `present` contains in the same order. Other
    records may be between them.
    """
    already_present = 0
    expected = next(wanted, None)
    for row in present:
        if expected is None:
            break
        if row == expected:
            already_present += 1
            expected = next(wanted, None)
    return already_present


def _read_target(
    client: SyncClient, view: TopicMetadata, partition: int, first_copy: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one partition of the target topic, from the first replayed record, at `first_copy`, to the
    end of the log."""
    one = TopicPartition(view.name, partition)
    start = max(first_copy, client.run(list_offsets(client.cluster, {one: EARLIEST_TIMESTAMP}))[one].offset)
    end = client.run(_stable_end(client.cluster, one))
    if start >= end:
        return
    readable = ReadableRows(view.name, partition, end, COMPARED_COLUMNS)
    for fetched in fetch_range(client, one, start, end, topic_id=view.topic_id):
        for rows in readable.read(fetched.records, fetched.aborted, start):
            # What cannot be read was not written by a replay.
            if not isinstance(rows, UnreadableRows):
                yield rows


async def _stable_end(cluster: Cluster, partition: TopicPartition) -> int:
    """Return the end offset of a partition, when no transaction is open before it. Raises `ConcurrentTransactions`
    after `STABLE_END_WAIT_MS`.
    """
    end = (await list_offsets(cluster, {partition: LATEST_TIMESTAMP}))[partition].offset

    async def check() -> int:
        stable = await list_offsets(cluster, {partition: LATEST_TIMESTAMP}, isolation_level=READ_COMMITTED)
        if stable[partition].offset < end:
            raise ConcurrentTransactions(
                f"topic {partition.topic}, partition {partition.partition}: a transaction of another producer is open,"
                " and the replay cannot see which records the topic has behind it: try again when it has ended"
            )
        return end

    return await cluster.retry(check, timeout_ms=STABLE_END_WAIT_MS)


def _comparable_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Yield the records of the batches as values that can be compared."""
    for batch in batches:
        times = batch.column("timestamp").cast(pa.int64()).fill_null(NO_TIMESTAMP_US).to_pylist()
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        yield from zip(times, keys, values, _comparable_headers(batch.column("headers")), strict=True)


def _comparable_headers(column: Any) -> list[tuple[tuple[str, bytes | None], ...]]:
    """Return the headers of each record. Null and an empty list both become an empty tuple."""
    if not len(column.flatten()):
        return [()] * len(column)
    return [
        () if headers is None else tuple((one["key"], one["value"]) for one in headers)
        for headers in column.to_pylist()
    ]


# -- target topic --------


def check_target(
    client: SyncClient, view: TopicMetadata, partitions: Sequence[int], *, oldest_us: int | None
) -> None:
    """Check that the target topic would store records of these partitions unchanged. `oldest_us`: the oldest timestamp.

    Raises:
        InvalidRequest: The topic has too few partitions, or uses LogAppendTime.
        PolicyViolation: The topic would compact the records, or delete them by age or size.
    """
    name = view.name
    if max(partitions) >= len(view.partitions):
        raise InvalidRequest(
            f"topic {name} has {len(view.partitions)} partitions, but partition {max(partitions)} is to be replayed: "
            "grow it (mansio topic alter --partitions), or replay into a new topic"
        )
    settings = client.run(_topic_settings(client.cluster, name))
    if settings.get("message.timestamp.type") == "LogAppendTime":
        raise InvalidRequest(
            f"topic {name} stamps records with its own clock (message.timestamp.type): the replayed ones would lose "
            "their timestamps; replay into another topic"
        )
    if "compact" in (settings.get("cleanup.policy") or ""):
        raise PolicyViolation(
            f"topic {name} is compacted: replayed records would not stay; replay into another topic"
        )
    policy = settings.get("cleanup.policy")
    deletes = policy is None or "delete" in policy
    retention_bytes = int(settings.get("retention.bytes") or -1)
    if deletes and retention_bytes >= 0:
        raise PolicyViolation(
            f"topic {name} deletes what is more than {retention_bytes} bytes (retention.bytes), replayed records with"
            " it: set retention.bytes=-1 for it, or replay into a new topic"
        )
    retention_ms = int(settings.get("retention.ms") or -1)
    age_ms = 0 if oldest_us is None else int(time.time() * 1000) - oldest_us // 1000
    if deletes and 0 <= retention_ms < age_ms:
        raise PolicyViolation(
            f"topic {name} deletes records older than {retention_ms} ms (retention.ms), and the oldest to be replayed "
            f"is {age_ms} ms old: set retention.ms=-1 for it, or replay into a new topic"
        )


async def _topic_settings(cluster: Cluster, name: str) -> dict[str, str | None]:
    resource = {"resource_type": ResourceType.TOPIC, "resource_name": name, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}

    def check(answer: Any) -> None:
        for entry in answer.results:
            raise_for_code(entry.error_code, entry.error_message)

    answer = await cluster.request(ApiKey.DESCRIBE_CONFIGS, fields, check=check, retry_unknown_topic=False)
    return {entry.name: entry.value for entry in answer.results[0].configs}
