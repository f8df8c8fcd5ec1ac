"""Readers of streaming and batch queries: `spark.readStream` and `spark.read` with `format("mansio")`.

The stream reader lives in one process of the driver for the duration of the query, where Spark calls it to plan each
micro-batch. Tasks read the records with a pickled copy of it. Spark stores the offsets in its checkpoint, and passes
them to the reader after a restart.

Invariants:
* If there is no new data, `latestOffset` returns exactly the offsets that Spark passed, because Spark compares texts.
* An offset decreases only if `failOnDataLoss` is off and a topic was recreated (or may have been) or truncated. The
  batch that ends at the lower offset has no records of this partition. The next batch starts at the beginning of the
  new topic, or at the end of the truncated log.
* The same start and end offsets always plan the same records, so a repeated batch reads the same records. This includes
  the first batch: Spark does not store its start, so its end offsets contain the start (`FIRST_BATCH_START`).
* A partition that is added while the query runs is read from its beginning.
* A limited batch ends at the same time in all partitions of all inputs of a query with `alignedInputs`.
* Tasks get what they log in with in their inputs (`task_login`); a pickled reader contains no password.
* With Trigger.AvailableNow the query reads up to the end offsets at its start, and then terminates. With `stopAtLatest`
  it does not read further, whatever the trigger.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from mansio.errors import ConfigError, MansioError, UnknownTopicOrPartition
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import CommittedOffset, commit_offsets, fetch_offsets
from mansio.spark.options import SourceOptions
from mansio.spark.planned_source import PlannedSource
from mansio.spark.source import data_loss
from mansio.spark.source.aligned_inputs import JointPlanner
from mansio.spark.source.offsets import (
    FIRST_BATCH_START,
    Offsets,
    SubscribedPartitions,
    check_topic_ids,
    earliest_offsets,
    find_partitions,
    is_constant,
    latest_offsets,
    offsets_from_json,
    offsets_to_json,
    resolve_offsets,
    resolve_ranges,
)
from mansio.spark.source.read_plan import (
    OffsetRange,
    TaskRange,
    TaskRanges,
    group_short_ranges,
    limit_offsets,
    plan_ranges,
)
from mansio.spark.spark_versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
    adapt_stream_reader,
)
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.spark.task_login import task_login, with_login, without_login
from mansio.wire.internal_records.hold_metadata import (
    encode_hold_metadata,
    parse_hold_metadata,
    pipeline_group_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from mansio.net.security_settings import SecuritySettings
    from mansio.wire.topic_partition import TopicPartition

    ReadTask = Callable[[SourceOptions, Sequence[str], TaskRange], Iterator[pa.RecordBatch]]

OffsetsJson = dict[str, dict[str, int]]

logger = logging.getLogger(__name__)

PUBLISH_OFFSETS_TIMEOUT_MS = 10_000
LATEST_OFFSETS_ATTEMPTS_MAX = 5
LATEST_OFFSETS_RETRY_DELAY_S = 0.2
"""Delay before end offsets are requested again if one is below its previous value: a new leader may briefly report a
lower end offset.
"""


def _read_records(
    options: SourceOptions, columns: Sequence[str], task_range: TaskRange
) -> Iterator[pa.RecordBatch]:
    """Return the records of a range. The reader of records is imported here, because only tasks need it."""
    from mansio.spark.source.task_reader import read_range

    return read_range(options, columns, task_range)


def _task_login(options: SourceOptions) -> SecuritySettings | None:
    return task_login(options.bootstrap_servers, options.security, creates_token=options.creates_token)


def _without_login(options: SourceOptions) -> SourceOptions:
    """Return the options of a reader in a task, without passwords: it gets `login` with its range."""
    return replace(options, security=without_login(options.security), aligned=None)


def _with_login(options: SourceOptions, login: SecuritySettings | None) -> SourceOptions:
    if login is None:
        return options
    return replace(options, security=with_login(options.security, login))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a streaming query."""

    def __init__(
        self, options: SourceOptions, columns: Sequence[str], *, read: ReadTask | None = None
    ) -> None:
        """`read` returns the rows of one task; by default the records of its range."""
        self._options = options
        self._columns = tuple(columns)
        self._read = read or _read_records
        self._joint = None if options.aligned is None else JointPlanner(options, options.aligned)
        self._initial: OffsetsJson | None = None
        self._latest: Offsets = {}
        self._target: Offsets | None = None
        self._topic_ids: dict[str, bytes] = {}
        self._first_seen: Offsets = {}
        """Start offsets of the partitions that were added after the query started."""
        self._recreated: set[str] = set()
        self._missing: set[TopicPartition] = set()
        self._published: Offsets = {}
        self._last_batch_s = float("-inf")

    # -- planning --------

    def initialOffset(self) -> dict[str, Any]:
        """Return the start offsets of a query without a checkpoint. They are resolved once, because `latest` may change
        between calls.
        """
        if self._initial is None:
            client = sync_client(self._options.bootstrap_servers, self._options.security)
            partitions = self._find_partitions().partitions
            earliest = earliest_offsets(client, partitions)
            latest = latest_offsets(client, partitions, self._options.isolation_level)
            self._initial = offsets_to_json(
                resolve_offsets(client, self._options, "starting", earliest, latest)
            )
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch, from the options `maxOffsetsPerTrigger` and `minOffsetsPerTrigger`."""
        if self._options.offsets_per_trigger_max is not None:
            return ReadMaxRows(self._options.offsets_per_trigger_max)
        if self._options.offsets_per_trigger_min is not None:
            return ReadMinRows(self._options.offsets_per_trigger_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Store the current end offsets as the end of the query: records that are appended later are not read."""
        found = self._find_partitions(may_be_missing=True)
        self._target = latest_offsets(
            sync_client(self._options.bootstrap_servers, self._options.security),
            found.partitions,
            self._options.isolation_level,
        )
        if self._joint is not None:
            self._joint.set_target()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end offsets of the next micro-batch. If there are no new records, or fewer than
        `minOffsetsPerTrigger` while the trigger delay has not expired, this is `start` itself.

        Raises `DataLoss` for a partition that no longer exists or ends below `start`, `TopicRecreated`, and
        `ConfigError` for the checkpoint of another source.
        """
        if not isinstance(limit, (ReadAllAvailable, ReadMaxRows, ReadMinRows)):
            raise ConfigError(
                f"a topic is read by rows, so the limit {type(limit).__name__} is not supported"
            )
        if self._options.stops_at_latest and self._target is None:
            self.prepareForTriggerAvailableNow()
        done = offsets_from_json(start)
        begin, latest, restarted = self._plan_bounds(done)
        self._publish({partition: offset for partition, offset in done.items() if partition in self._latest})
        is_first = start == self._initial
        joint = None
        if self._joint is not None and isinstance(limit, ReadMaxRows):
            joint = self._joint.backlog(begin, latest, start, is_first=is_first)
        backlog = sum(latest[partition] - begin[partition] for partition in latest)
        if not restarted and self._should_wait(backlog if joint is None else joint.size, limit):
            return start
        extra: dict[str, Any] = {}
        if self._joint is not None and joint is not None and isinstance(limit, ReadMaxRows):
            end, extra = self._joint.plan(joint, limit.max_rows)
        else:
            end = limit_offsets(begin, latest, limit.max_rows) if isinstance(limit, ReadMaxRows) else latest
        if any(end[partition] > begin[partition] for partition in end):
            self._last_batch_s = time.monotonic()
        end = {**end, **restarted}
        if end == done and (joint is None or not joint.size):
            return start
        if is_first and not is_constant(self._options.starting_offsets):
            extra[FIRST_BATCH_START] = start
        return {**offsets_to_json(end), **extra}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end offsets that were last seen, from which Spark computes the lag; None before the first
        batch.
        """
        return offsets_to_json(self._latest) if self._latest else None

    # -- reading --------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the inputs of the tasks of one micro-batch. Raises the errors of `plan_ranges`."""
        if FIRST_BATCH_START in end and FIRST_BATCH_START not in start:
            start = end[FIRST_BATCH_START]
        stop = offsets_from_json(end)
        if not self._topic_ids:
            # After a restart Spark may run the last batch again before it calls any other method.
            existing = dict.fromkeys(self._find_partitions(may_be_missing=True).partitions)
            self._report_missing(set(stop) - set(existing))
            stop = {partition: last for partition, last in stop.items() if partition in existing}
        begin = self._with_new_partitions(offsets_from_json(start), stop)
        wanted = {
            partition: OffsetRange(begin[partition], last, self._topic_ids.get(partition.topic, NO_TOPIC_ID))
            for partition, last in stop.items()
        }
        planned = plan_ranges(
            wanted,
            partitions_min=self._options.partitions_min,
            records_max=self._options.records_per_partition_max,
        )
        login = _task_login(self._options) if planned and self._read is _read_records else None
        return planned if login is None else [replace(one, login=login) for one in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task, as Arrow batches."""
        if not isinstance(partition, TaskRange):
            return iter(())
        return self._read(_with_login(self._options, partition.login), self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint holds the offsets."""

    def stop(self) -> None:
        """Close the connections; Spark calls this when the query has ended."""
        close_sync_clients()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for tasks, without passwords: Spark pickles the reader once for a query."""
        return {**self.__dict__, "_options": _without_login(self._options), "_joint": None}

    # -- internals --------

    def _find_partitions(self, *, may_be_missing: bool = False) -> SubscribedPartitions:
        """Return the subscribed partitions that exist now. A topic id that has changed since the query started raises
        `TopicRecreated`, or is logged if `failOnDataLoss` is off.
        """
        found = find_partitions(
            sync_client(self._options.bootstrap_servers, self._options.security),
            self._options,
            may_be_missing=may_be_missing,
        )
        if not self._topic_ids:
            check_topic_ids(found, self._options)
        for topic, topic_id in found.topic_ids.items():
            known = self._topic_ids.get(topic, topic_id)
            if topic_id != known:
                data_loss.raise_or_log(
                    data_loss.topic_recreated_error(topic), fail=self._options.fail_on_data_loss
                )
                self._recreated.add(topic)
            self._topic_ids[topic] = topic_id
        return found

    def _plan_bounds(self, start: Offsets) -> tuple[Offsets, Offsets, Offsets]:
        """(start of the next batch, its maximum end, restart offsets), each by partition.

        Start and end have the partitions of `start` and those added since. Only the partitions whose log was replaced
        or truncated have a restart offset, and only with `failOnDataLoss` off. It becomes the end of the next batch:
        the start of the new log or, if the topic id is known to be the same, the end of the truncated log.
        """
        client = sync_client(self._options.bootstrap_servers, self._options.security)
        known = {*self._topic_ids, *self._options.topic_ids}
        for attempt in range(LATEST_OFFSETS_ATTEMPTS_MAX):
            if attempt:
                time.sleep(LATEST_OFFSETS_RETRY_DELAY_S)
            existing = dict.fromkeys(self._find_partitions(may_be_missing=True).partitions)
            begin = self._with_new_partitions(start, existing if self._target is None else self._target)
            present = [partition for partition in begin if partition in existing]
            try:
                self._latest = latest_offsets(client, present, self._options.isolation_level)
            except UnknownTopicOrPartition:  # deleted in the meantime
                if attempt + 1 == LATEST_OFFSETS_ATTEMPTS_MAX:
                    raise
                continue
            lower = [partition for partition in present if self._latest[partition] < begin[partition]]
            if not lower or self._recreated:
                break
        for partition in lower:
            if partition.topic not in self._recreated:
                loss = data_loss.log_truncated_error(partition, begin[partition], self._latest[partition])
                data_loss.raise_or_log(loss, fail=self._options.fail_on_data_loss)
        # A shorter log of a possibly recreated topic is all new; of a topic known to be the same, its end is lost.
        truncated = {p for p in lower if p.topic in known - self._recreated}
        others = [p for p in present if p not in truncated and (p in lower or p.topic in self._recreated)]
        restarted = earliest_offsets(client, others) | {p: self._latest[p] for p in truncated}
        self._recreated.clear()
        self._report_missing(set(begin) - set(present))
        latest = {partition: self._reachable(partition, first) for partition, first in begin.items()}
        return begin, latest, restarted

    def _reachable(self, partition: TopicPartition, begin: int) -> int:
        """Return the maximum end offset of a partition in the next batch; at least `begin`."""
        latest = self._latest.get(partition, begin)
        if self._target is not None:
            latest = min(latest, self._target.get(partition, begin))
        return max(begin, latest)

    def _with_new_partitions(self, start: Offsets, now: Iterable[TopicPartition]) -> Offsets:
        """`start`, extended by the start offsets of partitions in `now` that were added since."""
        new = [partition for partition in now if partition not in start]
        unseen = [partition for partition in new if partition not in self._first_seen]
        for partition, first in earliest_offsets(
            sync_client(self._options.bootstrap_servers, self._options.security), unseen
        ).items():
            if first > 0:
                data_loss.raise_or_log(
                    data_loss.first_records_deleted_error(partition, first),
                    fail=self._options.fail_on_data_loss,
                )
            self._first_seen[partition] = first
        return {**start, **{partition: self._first_seen[partition] for partition in new}}

    def _report_missing(self, missing: set[TopicPartition]) -> None:
        """Raise or log `DataLoss` for each partition that no longer exists, once."""
        for partition in sorted(missing - self._missing):
            data_loss.raise_or_log(
                data_loss.partition_missing_error(partition), fail=self._options.fail_on_data_loss
            )
        self._missing = missing

    def _publish(self, done: Offsets) -> None:
        """Commit the offsets `done` for the pipeline's group. Spark plans a batch only after the previous one is
        complete, including its output, so retention may delete the records below `done`. A failure is logged and does
        not stop the query, which resumes from its checkpoint.

        The progress that a listener has stored with the offsets is kept.
        """
        if not self._options.pipeline or done == self._published:
            return
        client = sync_client(self._options.bootstrap_servers, self._options.security)
        group = pipeline_group_id(self._options.pipeline)
        try:
            stored = client.run(fetch_offsets(client.cluster, group, done))
            commits = {
                partition: CommittedOffset(offset, _hold_metadata(stored.get(partition)))
                for partition, offset in done.items()
            }
            client.run(
                commit_offsets(client.cluster, group, commits, retry_timeout_ms=PUBLISH_OFFSETS_TIMEOUT_MS)
            )
        except MansioError as error:
            logger.warning("progress of pipeline %s was not published: %s", self._options.pipeline, error)
        else:
            self._published = done

    def _should_wait(self, backlog: int, limit: ReadLimit) -> bool:
        """Whether there are fewer new records than `minOffsetsPerTrigger`, and `maxTriggerDelay` has not expired."""
        lowest = self._options.offsets_per_trigger_min
        if lowest is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        waited_ms = (time.monotonic() - self._last_batch_s) * 1000
        return backlog < lowest and waited_ms < self._options.trigger_delay_ms_max


class BatchReader(DataSourceReader):
    """Reader of a batch query: the records between two offsets of each partition."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """Return the input of each task. Raises the errors of `resolve_ranges` and `plan_ranges`."""
        options = self._options
        planned = plan_ranges(
            resolve_ranges(sync_client(options.bootstrap_servers, options.security), options),
            partitions_min=options.partitions_min,
            records_max=options.records_per_partition_max,
        )
        login = _task_login(options) if planned else None
        if options.partitions_min is None and options.records_per_partition_max is None:
            return [replace(one, login=login) for one in group_short_ranges(planned)]
        return [TaskRanges((one,), login) for one in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, as Arrow batches."""
        if not isinstance(partition, TaskRanges):  # Spark's own type, if there is nothing to read
            return
        options = _with_login(self._options, partition.login)
        for one in partition.ranges:
            yield from _read_records(options, self._columns, one)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for tasks, without passwords."""
        return {**self.__dict__, "_options": _without_login(self._options)}


TASK_RANGE_SCHEMA: Final = "topic string, partition int, start bigint, end bigint, topic_id binary"


class RangeSource(PlannedSource):
    """Streaming source of offset ranges instead of records, for a sink whose tasks fetch the records themselves.

    Spark plans such a query as any other, stores the offsets of each batch, and passes one row per range to a task of
    the sink. This is for sinks that only copy records to files: the records are not converted to rows of the JVM and
    back to Arrow. The options are those of `format("mansio")`. Register it with `spark.dataSource.register`.

    Invariants:
    * A batch has one row for each task of `plan_ranges`, and the same rows when Spark repeats it.
    * A range that is converted to a row of Spark and back is equal to the original.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the data source in `format(...)`."""
        return "mansio_ranges"

    def schema(self) -> str:
        """Return the Spark schema of a row: the fields of `TaskRange`."""
        return TASK_RANGE_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002  # as Spark calls it
        """Return the reader of a streaming query. Raises `ConfigError` for an invalid option."""
        self._begin_plan()
        options = SourceOptions.parse(self.options, streaming=True)
        return adapt_stream_reader(StreamReader(options, (), read=_range_row))


def _range_row(
    _options: SourceOptions, _columns: Sequence[str], task_range: TaskRange
) -> Iterator[pa.RecordBatch]:
    """Yield the range of a task as a row, instead of its records."""
    yield range_to_row(task_range)


def range_to_row(one: TaskRange) -> pa.RecordBatch:
    """Convert a range to a row of Spark."""
    import pyarrow as pa  # not needed for planning

    return pa.RecordBatch.from_arrays(
        [
            pa.array([one.topic], pa.string()),
            pa.array([one.partition], pa.int32()),
            pa.array([one.start], pa.int64()),
            pa.array([one.end], pa.int64()),
            pa.array([one.topic_id], pa.binary()),
        ],
        ["topic", "partition", "start", "end", "topic_id"],
    )


def ranges_from_rows(rows: pa.RecordBatch) -> list[TaskRange]:
    """Convert rows of Spark to ranges."""
    return [TaskRange(**row) for row in rows.to_pylist()]


def _hold_metadata(stored: CommittedOffset | None) -> str:
    """Return the metadata of a commit: that of the stored one, if it is a retention hold, or a new hold."""
    if stored is not None and parse_hold_metadata(stored.metadata) is not None:
        return stored.metadata
    return encode_hold_metadata("")
