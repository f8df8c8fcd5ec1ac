"""Batch reader of the states of a topic's records in a share group: `format("mansio")` with the option `recordStates`.

A row is a record that is leased, waits for a retry, or is dead-lettered; it joins with the log, the archive and the
deliveries by topic, partition and offset. Records that were never delivered, and those that are done, have no row.

Invariants:
* Tasks ask the brokers when they run, as those of deliveries do: each action has the states of its time.
* Ranges are read in pages, and rows are made in bounded batches.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader

from mansio.errors import GroupIdNotFound
from mansio.net.offsets import request_leaders
from mansio.net.retry import raise_for_code
from mansio.spark.arrow.schema import TIMESTAMP_TYPE
from mansio.spark.source.offsets import find_partitions
from mansio.spark.source.read_plan import PartitionShare
from mansio.spark.sync_client import sync_client
from mansio.spark.task_login import options_for_tasks
from mansio.state.share_partition.types import ACQUIRED, ARCHIVED, ARCHIVING, AVAILABLE
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql.datasource import InputPartition

    from mansio.net.cluster import Cluster
    from mansio.spark.options import SourceOptions
    from mansio.wire.topic_partition import TopicPartition

STATE_SPARK_TYPES: Final = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "group": "string",
    "state": "string",
    "delivery_count": "int",
    "member": "string",
    "since": "timestamp",
    "until": "timestamp",
}
"""Columns and their Spark types. `state`: `leased`, `retry`, `dead-lettering` or `dead`; `member`, `since`, `until`: of
the lease; of a retry, `until` is the time at which it is due."""

_ARROW_TYPES: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": TIMESTAMP_TYPE,
}
STATE_NAMES: Final = {
    ACQUIRED: "leased",
    AVAILABLE: "retry",
    ARCHIVING: "dead-lettering",
    ARCHIVED: "dead",
}
TASKS_MAX: Final = 8
PAGE_RANGES: Final = 5_000
ROWS_PER_BATCH: Final = 65_536


class StateRange(NamedTuple):
    """Offsets `first` to `last` with one state. The times are wall-clock times in ms, -1 for none."""

    first: int
    last: int
    state: str
    delivery_count: int
    member: str
    since_ms: int
    until_ms: int


class StateReader(DataSourceReader):
    """Reader of a batch query with the option `recordStates`."""

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
        """Yield the rows of one task, as Arrow batches. Raises the brokers' errors."""
        if not isinstance(partition, PartitionShare):  # Spark's own type, if there is nothing to read
            return
        options = self._options
        client = sync_client(options.bootstrap_servers, options.security)
        for number, place in enumerate(find_partitions(client, options).partitions):
            if number % partition.count != partition.index:
                continue
            from_offset: int | None = 0
            while from_offset is not None:
                ranges, from_offset = client.run(
                    read_states(client.cluster, options.states_of, place, from_offset)
                )
                yield from self._rows(place, ranges)

    def _rows(self, place: TopicPartition, ranges: Sequence[StateRange]) -> Iterator[pa.RecordBatch]:
        for each in ranges:
            for begin in range(each.first, each.last + 1, ROWS_PER_BATCH):
                offsets = np.arange(begin, min(each.last + 1, begin + ROWS_PER_BATCH))
                values: dict[str, Any] = {
                    "topic": place.topic,
                    "partition": place.partition,
                    "group": self._options.states_of,
                    "state": each.state,
                    "delivery_count": each.delivery_count,
                    "member": each.member or None,
                    "since": None if each.since_ms < 0 else each.since_ms * 1_000,
                    "until": None if each.until_ms < 0 else each.until_ms * 1_000,
                }
                arrays = [
                    pa.array(offsets, pa.int64())
                    if name == "offset"
                    else pa.repeat(
                        pa.scalar(values[name], _ARROW_TYPES[STATE_SPARK_TYPES[name]]), len(offsets)
                    )
                    for name in self._columns
                ]
                yield pa.RecordBatch.from_arrays(arrays, list(self._columns))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for tasks, with what they log in with instead of a password."""
        return {**self.__dict__, "_options": options_for_tasks(self._options)}


async def read_states(
    cluster: Cluster, group: str, place: TopicPartition, from_offset: int
) -> tuple[list[StateRange], int | None]:
    """Return ranges of a partition that begin at or above an offset, ascending, and the offset for the next call; None
    if there are no more. A group that has read nothing has none."""

    async def send(
        node_id: int, requests: Mapping[TopicPartition, int], results: dict[TopicPartition, Any]
    ) -> None:
        topic_id = (await cluster.topic(place.topic)).topic_id
        fields = {
            "group_id": group,
            "topics": [{"topic_id": topic_id, "partitions": [place.partition]}],
            "ranges_max": PAGE_RANGES,
            "with_states": True,
            "from_offset": requests[place],
        }
        connection = await cluster.connection(node_id)
        response = await connection.request(ApiKey.DESCRIBE_LEASES, fields)
        raise_for_code(response.error_code, response.error_message)
        (entry,) = response.topics[0].partitions
        if entry.error_code != GroupIdNotFound.kafka_code:
            raise_for_code(entry.error_code, entry.error_message)
        results[place] = entry.ranges if not entry.error_code else ()

    entries = (await request_leaders(cluster, {place: from_offset}, send))[place]
    now_ms = round(time.time() * 1_000)
    found = [_state_range(each, now_ms) for each in entries]
    return found, found[-1].first + 1 if len(found) >= PAGE_RANGES else None


def _state_range(entry: Any, now_ms: int) -> StateRange:
    since_ms = until_ms = -1
    if entry.state == ACQUIRED:
        since_ms = now_ms - entry.age_ms
        until_ms = since_ms + entry.lease_ms
    elif entry.state == AVAILABLE:
        until_ms = entry.due_ms
    return StateRange(
        entry.first_offset,
        entry.last_offset,
        STATE_NAMES[entry.state],
        entry.delivery_count,
        entry.member_id,
        since_ms,
        until_ms,
    )
