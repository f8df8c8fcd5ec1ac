"""Batch reader of the deliveries of a topic's records: `format("mansio")` with the option `deliveries`.

The reader of a table as of each query (`archived_topic`) has the same reasons: tasks determine what they read when they
run. A task reads the whole trace log once for its partitions, because an event of a record may be in any block since
its publication; the index in each block keeps it from decoding what is not wanted.

Invariants:
* What the brokers have reported before a task begins is in its result: a request for a timeline, which needs the right
  to read the topic, lets all brokers write it first.
* A task keeps at most about `ROWS_MAX` rows of the trace. Partitions or offsets with more rows are read in several
  passes.
* Blocks that cannot be read, and those that retention deletes meanwhile, make records uncertain, and fail no query.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyspark.sql.datasource import DataSourceReader

from mansio.config.topic_names import TRACE_TOPIC
from mansio.errors import CorruptMessage, TopicAuthorizationFailed, UnknownTopicOrPartition
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.retry import raise_for_code
from mansio.spark.options import ON_UNREADABLE_SKIP
from mansio.spark.source.offsets import earliest_offsets, find_partitions, latest_offsets
from mansio.spark.source.read_plan import PartitionShare, TaskRange
from mansio.spark.sync_client import find_topic, sync_client
from mansio.spark.trace.blocks import TraceSelection, select_rows, to_columns
from mansio.spark.trace.deliveries import (
    DELIVERY_KINDS,
    OFFSET_END,
    DeliveryRange,
    PartitionDeliveries,
)
from mansio.state.trace.coverage import Coverage, Gap
from mansio.state.trace.timeline import silent_brokers
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import READ_UNCOMMITTED
from mansio.wire.internal_records.trace_index_records import is_index_record
from mansio.wire.internal_records.trace_records import TraceBlock
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pyspark.sql.datasource import InputPartition

    from mansio.spark.options import SourceOptions
    from mansio.spark.sync_client import SyncClient
    from mansio.spark.trace.blocks import BlockRows

logger = logging.getLogger(__name__)

TASKS_MAX: Final = 4
"""Number of tasks of a read without `minPartitions`: each of them reads the whole trace log."""

ROWS_MAX: Final = 1 << 20
"""Number of rows of the trace in memory from which on partitions or offsets are read in several passes."""


class _Pass(NamedTuple):
    """What one pass through the trace log has found: the selected rows (`TRACE_SCHEMA`), and what is known of the
    processes that have written it. `is_complete`: it has not ended because of too many rows."""

    rows: Sequence[pa.RecordBatch]
    coverage: Sequence[Coverage]
    is_complete: bool
    end_ms: int


class DeliveryReader(DataSourceReader):
    """Reader of a batch query with the option `deliveries`."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """Return the input of each task."""
        options = self._options
        found = find_partitions(sync_client(options.bootstrap_servers, options.security), options)
        count = min(len(found.partitions), options.partitions_min or TASKS_MAX)
        return [PartitionShare(index, count) for index in range(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, as Arrow batches.

        Raises `TopicAuthorizationFailed` without the right to read the topic or the trace, `ConfigError` if the topic
        does not exist, and the connection's errors if the cluster cannot be reached."""
        if not isinstance(partition, PartitionShare):  # Spark's own type, if there is nothing to read
            return
        options = self._options
        client = sync_client(options.bootstrap_servers, options.security)
        found = find_partitions(client, options)
        ranges = {
            one.partition: self._range(one)
            for one in found.partitions
            if one.partition % partition.count == partition.index
        }
        if not ranges:
            return
        ((topic, topic_id),) = found.topic_ids.items()
        silent = _write_rows(client, topic)
        parts = _trace_ranges(client)
        pending = [{one: bounds for one, bounds in ranges.items() if bounds.first < bounds.end}]
        while pending:
            wanted = pending.pop()
            if not wanted:
                continue
            read = self._read_blocks(parts, topic_id, wanted, client.cluster.nodes.keys() - silent)
            if not read.is_complete:
                pending += _split(wanted, read.rows)
                continue
            for batch in _deliveries(topic, wanted, read, options.rows_per_batch):
                yield batch.select(list(self._columns))

    def _range(self, partition: TopicPartition) -> DeliveryRange:
        """Return the deliveries that the options select. Offsets of deleted records are read, too: the archive may have
        them."""
        starting, ending = self._options.starting_offsets, self._options.ending_offsets
        first = starting.offsets.get(partition, 0) if isinstance(starting.offsets, dict) else 0
        end = ending.offsets.get(partition, OFFSET_END) if isinstance(ending.offsets, dict) else OFFSET_END
        return DeliveryRange(
            max(first, 0),
            end if end >= 0 else OFFSET_END,
            starting.timestamp_ms or 0,
            OFFSET_END if ending.timestamp_ms is None else ending.timestamp_ms,
        )

    def _read_blocks(
        self,
        parts: Sequence[TaskRange],
        topic_id: bytes,
        wanted: Mapping[int, DeliveryRange],
        live: Collection[int],
    ) -> _Pass:
        """Read the blocks of the trace log, up to about `ROWS_MAX` rows. `live`: brokers that have written theirs."""
        from mansio.spark.source.task_reader import read_range

        options = replace(
            self._options,
            on_unreadable=ON_UNREADABLE_SKIP,
            fail_on_data_loss=False,
            isolation_level=READ_UNCOMMITTED,
        )
        ranges = {partition: (bounds.first, bounds.end) for partition, bounds in wanted.items()}
        is_divisible = len(wanted) > 1 or any(end - first > 1 for first, end in ranges.values())
        selection = TraceSelection(topic_id, ranges, DELIVERY_KINDS)
        coverage: dict[tuple[int, int], Coverage] = {}
        found: list[pa.RecordBatch] = []
        count = 0
        for part in parts:
            for batch in read_range(options, ("value",), part):
                added = [_add_block(value.as_buffer(), selection, coverage) for value in batch.column(0)]
                found.append(to_columns([each for each in added if each is not None]))
                count += found[-1].num_rows
                if count > ROWS_MAX and is_divisible:
                    return _Pass(found, (), is_complete=False, end_ms=0)
        _mark_live(coverage, live)
        return _Pass(found, tuple(coverage.values()), is_complete=True, end_ms=int(time.time() * 1000))


def _write_rows(client: SyncClient, topic: str) -> set[int]:
    """Let all brokers write what they have reported: a timeline is asked for, of whatever record. Return those that
    have not, as far as they are known."""
    response = client.run(
        client.cluster.request(
            ApiKey.TRACE_RECORD,
            {"topic": topic, "partition_index": 0, "offset": 0, "group": ""},
            check=lambda response: raise_for_code(response.error_code, response.error_message),
            retry_unknown_topic=False,
        )
    )
    uncertainties: Sequence[str] = response.uncertainties
    return silent_brokers(uncertainties)


def _trace_ranges(client: SyncClient) -> list[TaskRange]:
    """Return the offsets of the trace log now, by partition; none if there is no trace yet."""
    try:
        trace = find_topic(client, TRACE_TOPIC)
    except UnknownTopicOrPartition:
        return []
    except TopicAuthorizationFailed as error:
        raise TopicAuthorizationFailed(
            f"deliveries need READ on topic {TRACE_TOPIC}, beside READ on the topic: {error.message}"
        ) from error
    partitions = [TopicPartition(TRACE_TOPIC, each.index) for each in trace.partitions]
    first = earliest_offsets(client, partitions)
    end = latest_offsets(client, partitions, READ_UNCOMMITTED)
    return [
        TaskRange(TRACE_TOPIC, each.partition, first[each], end[each], NO_TOPIC_ID)
        for each in partitions
        if first[each] < end[each]
    ]


def _add_block(
    value: pa.Buffer, selection: TraceSelection, coverage: dict[tuple[int, int], Coverage]
) -> BlockRows | None:
    """Add a block to the coverage of its process, and return its selected rows, None for none. A block that cannot be
    decoded is a missing one."""
    data = memoryview(value)
    if is_index_record(data):
        return None
    try:
        block = TraceBlock(data)
    except CorruptMessage as error:
        logger.warning("a block of the trace cannot be read: %s", without_traceback(error))
        return None
    header = block.header
    process = (header.broker_id, header.incarnation)
    known = coverage.get(process)
    if known is None:
        known = coverage[process] = Coverage(*process)
    if not known.add(header):
        return None  # written again after an unknown outcome
    try:
        return select_rows(block, selection)
    except CorruptMessage as error:
        logger.warning("a block of the trace cannot be read: %s", without_traceback(error))
        known.add_gap(Gap(header.begin_ms, header.end_ms, -1))
        return None


def _mark_live(coverage: Mapping[tuple[int, int], Coverage], live: Collection[int]) -> None:
    """Mark the processes that run, and have written their rows: the latest ones of these brokers."""
    latest = dict(sorted(coverage))
    for (broker, incarnation), each in coverage.items():
        each.is_live = broker in live and latest[broker] == incarnation


def _split(
    wanted: Mapping[int, DeliveryRange], rows: Sequence[pa.RecordBatch]
) -> list[dict[int, DeliveryRange]]:
    """Return the selection, of more than one record, in two parts. `rows`: those of which there are too many."""
    partitions = sorted(wanted)
    if len(partitions) > 1:
        middle = len(partitions) // 2
        return [{one: wanted[one] for one in part} for part in (partitions[middle:], partitions[:middle])]
    (partition,) = partitions
    bounds = wanted[partition]
    offsets = np.concatenate([each.column("first_offset").to_numpy() for each in rows])
    middle = int(np.median(np.clip(offsets, bounds.first + 1, bounds.end - 1)))
    return [{partition: bounds._replace(first=middle)}, {partition: bounds._replace(end=middle)}]


def _deliveries(
    topic: str, wanted: Mapping[int, DeliveryRange], read: _Pass, rows_max: int
) -> Iterator[pa.RecordBatch]:
    """Yield the deliveries of the partitions."""
    for partition, bounds in sorted(wanted.items()):
        chosen = [each.filter(compute.equal(each.column("partition"), partition)) for each in read.rows]
        found = PartitionDeliveries(topic, partition, chosen, read.coverage, read.end_ms, bounds)
        yield from found.batches(rows_max)
