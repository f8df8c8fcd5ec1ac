"""The topic `mansio-mirror.CLUSTER.internal` on the target: positions and offset maps of all mirrors from one cluster.

It is compacted. Its records are JSON, written in the same transactions as the copies that they describe:

* `[source topic, target topic, partition]`: `{"next", "origin", "source_id", "target_id"}`, the source offset that is
  read next, the target offset of the first copy, and the ids of the topics.
* `[source topic, target topic, partition, source offset]`: `[target offset, length]`, a run of the offset map. Null
  removes it.

Invariants:
* A state that was loaded contains all transactions that were committed before, and nothing of others.
* Unknown keys are ignored: other versions of Mansio may have written them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from mansio.errors import ConcurrentTransactions, CorruptMessage
from mansio.net.offsets import list_offsets
from mansio.pipelines.mirroring.offset_map import NO_OFFSET, OffsetMap, Run
from mansio.spark.arrow.decode import decode_batches
from mansio.spark.source.fetch import fetch_range
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.net.metadata import TopicMetadata
    from mansio.spark.sync_client import SyncClient

STATE_TOPIC_PREFIX: Final = "mansio-mirror."
STATE_TOPIC_CONFIG: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}
"""The newest segment is not compacted, and a mirror reads the whole topic when it starts."""
STATE_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
STABLE_WAIT_MS: Final = 180_000
"""Maximum time for which the transactions of other mirrors in the topic are waited for."""


class MirroredPartition(NamedTuple):
    """One partition of a topic, which has the same number in source and target."""

    source: str
    target: str
    partition: int


@dataclass(slots=True)
class PartitionState:
    """What the target knows of one mirrored partition. `next_offset`: source offset that is read next, `NO_OFFSET`
    before the first transaction. `source_id`, `target_id`: hexadecimal ids of the topics."""

    next_offset: int = NO_OFFSET
    source_id: str = ""
    target_id: str = ""
    map: OffsetMap = field(default_factory=OffsetMap)


def state_topic_name(source_cluster_id: str) -> str:
    """Return the name of the topic, on the target."""
    return f"{STATE_TOPIC_PREFIX}{source_cluster_id}.internal"


def load_states(
    client: SyncClient, view: TopicMetadata, topics: Iterable[tuple[str, str]]
) -> dict[MirroredPartition, PartitionState]:
    """Return the states of all partitions of these pairs of source and target topic. Raises `ConcurrentTransactions` if
    a transaction of another mirror stays open, and `CorruptMessage` for a record that is none of a mirror.
    """
    wanted = set(topics)
    positions: dict[MirroredPartition, dict[str, Any]] = {}
    runs: dict[MirroredPartition, dict[int, Run]] = {}
    for key_bytes, value_bytes in _records(client, view):
        try:
            key = json.loads(key_bytes)
            source, target, partition, *rest = key
            value = None if value_bytes is None else json.loads(value_bytes)
            if (source, target) not in wanted:
                continue
            place = MirroredPartition(source, target, partition)
            if not rest and value is not None:
                positions[place] = value
            elif not rest:
                positions.pop(place, None)
            elif len(rest) == 1 and value is not None:
                runs.setdefault(place, {})[rest[0]] = Run(rest[0], *value)
            elif len(rest) == 1:
                runs.get(place, {}).pop(rest[0], None)
        except (ValueError, TypeError) as error:
            raise CorruptMessage(
                f"topic {view.name} has a record that no mirror has written: {error}"
            ) from error
    return {
        place: PartitionState(
            value["next"],
            value["source_id"],
            value["target_id"],
            OffsetMap(runs.get(place, {}).values(), value["origin"]),
        )
        for place, value in positions.items()
    }


def position_record(place: MirroredPartition, state: PartitionState, origin: int) -> tuple[bytes, bytes]:
    """Key and value of the record with the position of a partition."""
    value = {
        "next": state.next_offset,
        "origin": origin,
        "source_id": state.source_id,
        "target_id": state.target_id,
    }
    return _encode(list(place)), _encode(value)


def run_record(place: MirroredPartition, run: Run) -> tuple[bytes, bytes]:
    """Key and value of the record with a run."""
    return _encode([*place, run.source]), _encode([run.target, run.length])


def removal_record(place: MirroredPartition, source: int | None = None) -> tuple[bytes, None]:
    """Key and value of the record that removes the run that began at this source offset; None: the position."""
    return _encode([*place] if source is None else [*place, source]), None


def to_rows(records: list[tuple[bytes, bytes | None]]) -> pa.RecordBatch:
    """Return the records as rows for `TaskSender.send`."""
    keys, values = zip(*records, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=STATE_SCHEMA
    )


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _records(client: SyncClient, view: TopicMetadata) -> Iterator[tuple[bytes, bytes | None]]:
    for partition in view.partitions:
        place = TopicPartition(view.name, partition.index)
        start = client.run(list_offsets(client.cluster, {place: EARLIEST_TIMESTAMP}))[place].offset
        end = _stable_end(client, place)
        if start >= end:
            continue
        for fetched in fetch_range(client, place, start, end, topic_id=view.topic_id):
            for rows in decode_batches(
                fetched.records,
                view.name,
                partition.index,
                start,
                end,
                ("key", "value"),
                aborted=fetched.aborted,
            ):
                yield from zip(rows.column("key").to_pylist(), rows.column("value").to_pylist(), strict=True)


def _stable_end(client: SyncClient, place: TopicPartition) -> int:
    """Return the end offset, when no transaction is open before it."""
    cluster = client.cluster

    async def wait() -> int:
        end = (await list_offsets(cluster, {place: LATEST_TIMESTAMP}))[place].offset

        async def check() -> int:
            stable = await list_offsets(cluster, {place: LATEST_TIMESTAMP}, isolation_level=READ_COMMITTED)
            if stable[place].offset < end:
                raise ConcurrentTransactions(
                    f"topic {place.topic}: a transaction of another mirror is open: try again when it has ended"
                )
            return end

        return await cluster.retry(check, timeout_ms=STABLE_WAIT_MS)

    return client.run(wait())
