"""Dead-letter job: groups the dead letters of share groups by cause, and redrives chosen ones.

Spark's tasks read the dead-letter topics and decode the headers of each record; Spark counts the dead letters of each
cause. A redrive runs in tasks too: each task sends the offsets of some share partitions to the broker, which makes the
records available to their group again. The dead letters stay in their topic.

Invariants:
* Every dead letter in the topics is counted once; records that no Mansio broker has written are counted separately.
* Under one redrive id a record is redriven once, also if a task runs twice or the job is killed and repeated.
* The driver receives causes, samples and totals, never all dead letters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Window, functions

from mansio.errors import MansioError
from mansio.net.contexts import resolve_security
from mansio.net.redrive import RedriveCounts, SharePartitionId, offset_ranges, redrive_records
from mansio.pipelines.dead_letter_causes import cause_of
from mansio.spark.sync_client import sync_client
from mansio.spark.task_login import task_login, with_login
from mansio.wire.internal_records.dead_letter_headers import parse_dead_letter_headers
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, Row, SparkSession

    from mansio.net.security_settings import SecuritySettings

CAUSES_SHOWN: Final = 50
SAMPLES_PER_CAUSE: Final = 1
SAMPLE_BYTES_MAX: Final = 512
"""Number of bytes of key and value that a sample contains."""
REDRIVE_CHUNK_RECORDS: Final = 500
"""Maximum number of records of one request to the broker."""

DEAD_LETTER_ROW: Final = pa.schema(
    [
        ("cause", pa.string()),
        ("group", pa.string()),
        ("topic", pa.string()),
        ("topic_id", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("deliveries", pa.int32()),
        ("message", pa.string()),
        ("template", pa.string()),
        ("reason", pa.string()),
        ("consumer", pa.string()),
        ("dead_lettered_ms", pa.int64()),
        ("dead_letter_topic", pa.string()),
        ("dead_letter_partition", pa.int32()),
        ("dead_letter_offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
"""Columns of a decoded dead letter. `cause` is null if the record was not written by a Mansio broker."""
DEAD_LETTER_COLUMNS: Final = (
    "cause string, `group` string, topic string, topic_id binary, partition int, offset bigint, deliveries int, "
    "message string, template string, reason string, consumer string, dead_lettered_ms bigint, "
    "dead_letter_topic string, dead_letter_partition int, dead_letter_offset bigint, key binary, value binary"
)
SHARE_PARTITION_COLUMNS: Final = ("group", "topic", "topic_id", "partition")
REDRIVE_COLUMNS: Final = (
    "`group` string, topic string, partition int, records bigint, redriven bigint, repeated bigint, deleted bigint, "
    "not_dead_lettered bigint, error string"
)


@dataclass(frozen=True, slots=True)
class DeadLetterSample:
    """One dead letter of a cause: its position in the dead-letter topic, the position of the original record, and the
    first `SAMPLE_BYTES_MAX` bytes of key and value.
    """

    dead_letter_topic: str
    dead_letter_partition: int
    dead_letter_offset: int
    partition: int
    offset: int
    deliveries: int
    reason: str
    consumer: str
    dead_lettered_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class CauseReport:
    """The dead letters of one cause. `first_ms`, `last_ms`: times at which the first and the last of them was
    dead-lettered, in milliseconds since the epoch. `deliveries_max`: largest delivery count of their last deliveries.
    """

    cause: str
    group: str
    topic: str
    message: str
    template: str
    dead_letters: int
    deliveries_max: int
    first_ms: int
    last_ms: int
    samples: tuple[DeadLetterSample, ...]


@dataclass(frozen=True, slots=True)
class DeadLetterReport:
    """Result of an analysis. `causes`: those with the most dead letters; `other_causes` and `other_dead_letters` count
    the rest. `unrecognized`: records that were not written by a Mansio broker.
    """

    dead_letters: int
    unrecognized: int
    causes: tuple[CauseReport, ...]
    other_causes: int
    other_dead_letters: int


@dataclass(frozen=True, slots=True)
class SharePartitionRedrive:
    """Result of a redrive for one share partition, in records. `redriven`: available to the group now. `repeated`:
    redriven earlier under the same id. `deleted`: not in the log any more. `not_dead_lettered`: not dead-lettered any
    more, because of another redrive. `error`: why the rest failed; None if nothing failed.
    """

    group: str
    topic: str
    partition: int
    records: int
    redriven: int
    repeated: int
    deleted: int
    not_dead_lettered: int
    error: str | None


class UnknownCause(MansioError):
    """The dead-letter topics have no dead letter of this cause."""


class DeadLetterAnalysis:
    """The decoded dead letters of some topics. Use it in `with`: the rows are stored on the executors' disks until the
    end, so that report and redrive see the same dead letters.
    """

    def __init__(
        self,
        spark: SparkSession,
        topics: Sequence[str],
        bootstrap_servers: str,
        *,
        group: str | None = None,
        causes: Sequence[str] = (),
    ) -> None:
        """`group`: only dead letters of this group. `causes`: only those of these causes (ids)."""
        self._bootstrap_servers = bootstrap_servers
        self._causes = tuple(dict.fromkeys(causes))
        rows = read_dead_letters(spark, topics, bootstrap_servers)
        if group is not None:
            rows = rows.where(functions.col("group") == group)
        if causes:
            rows = rows.where(functions.col("cause").isin(list(self._causes)))
        self._rows = rows.persist(StorageLevel.DISK_ONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.unpersist()

    def report(self, *, top: int = CAUSES_SHOWN, samples: int = SAMPLES_PER_CAUSE) -> DeadLetterReport:
        """Count the dead letters by cause, and return the `top` largest causes with `samples` samples each, the oldest
        dead letters. Raises `UnknownCause` if a required cause has no dead letter.
        """
        counts = self._rows.groupBy("cause").agg(functions.count(functions.lit(1)).alias("dead_letters"))
        totals = counts.agg(
            functions.sum("dead_letters").alias("dead_letters"),
            functions.count("cause").alias("causes"),
            functions.sum(
                functions.when(functions.col("cause").isNull(), functions.col("dead_letters"))
            ).alias("unrecognized"),
        ).collect()[0]
        largest = self._largest_causes(max(top, len(self._causes)))
        found = {row["cause"] for row in largest}
        for cause in self._causes:
            if cause not in found:
                raise UnknownCause(
                    f"there are no dead letters of cause {cause}: run the command without --cause"
                )
        chosen = self._samples(sorted(found), samples)
        unrecognized = totals["unrecognized"] or 0
        recognized = (totals["dead_letters"] or 0) - unrecognized
        return DeadLetterReport(
            recognized,
            unrecognized,
            tuple(_cause_report(row, chosen.get(row["cause"], ())) for row in largest),
            totals["causes"] - len(largest),
            recognized - sum(row["dead_letters"] for row in largest),
        )

    def redrive(
        self, redrive_id: str, *, limit: int | None = None, rate: int = 0, dry_run: bool = False
    ) -> tuple[SharePartitionRedrive, ...]:
        """Make the records of the dead letters available to their share groups again, once per `redrive_id`.

        `limit`: only the records that were dead-lettered first, so many. `rate`: maximum number of records per second;
        0: no limit. Errors of the broker are in the result. Returns one entry per share partition, sorted.
        """
        records = self._rows.where("cause is not null").groupBy(*SHARE_PARTITION_COLUMNS, "offset")
        wanted = records.agg(functions.min("dead_lettered_ms").alias("dead_lettered_ms"))
        if limit is not None:
            order = ("dead_lettered_ms", "group", "topic", "partition", "offset")
            wanted = wanted.orderBy(*order).limit(limit)
        wanted = wanted.repartition(1) if rate else wanted.repartition(*SHARE_PARTITION_COLUMNS)
        ordered = wanted.sortWithinPartitions(*SHARE_PARTITION_COLUMNS, "offset")
        # The executors have neither the environment nor the contexts of the driver.
        security = resolve_security(self._bootstrap_servers)
        login = task_login(self._bootstrap_servers, security)
        brokers = Brokers(self._bootstrap_servers, with_login(security, login))
        task = partial(redrive_rows, brokers, redrive_id, rate, dry_run)
        results = (
            ordered.select(*SHARE_PARTITION_COLUMNS, "offset").mapInArrow(task, REDRIVE_COLUMNS).collect()
        )
        return tuple(
            sorted(
                (SharePartitionRedrive(**row.asDict()) for row in results),
                key=lambda one: (one.group, one.topic, one.partition),
            )
        )

    def _largest_causes(self, top: int) -> list[Row]:
        by_cause = self._rows.where("cause is not null").groupBy("cause")
        return (
            by_cause.agg(
                *(functions.first(name).alias(name) for name in ("group", "topic", "message", "template")),
                functions.count(functions.lit(1)).alias("dead_letters"),
                functions.max("deliveries").alias("deliveries_max"),
                functions.min("dead_lettered_ms").alias("first_ms"),
                functions.max("dead_lettered_ms").alias("last_ms"),
            )
            .orderBy(functions.desc("dead_letters"), "cause")
            .limit(top)
            .collect()
        )

    def _samples(self, causes: list[str], count: int) -> dict[str, tuple[DeadLetterSample, ...]]:
        """Return the oldest dead letters of each of these causes, at most `count`."""
        if not causes or not count:
            return {}
        places = ("dead_lettered_ms", "dead_letter_topic", "dead_letter_partition", "dead_letter_offset")
        number = functions.row_number().over(Window.partitionBy("cause").orderBy(*places))
        rows = self._rows.where(functions.col("cause").isin(causes)).withColumn("number", number)
        found: dict[str, list[DeadLetterSample]] = {}
        for row in rows.where(functions.col("number") <= count).orderBy("cause", "number").collect():
            found.setdefault(row["cause"], []).append(_sample(row))
        return {cause: tuple(samples) for cause, samples in found.items()}


def read_dead_letters(spark: SparkSession, topics: Sequence[str], bootstrap_servers: str) -> DataFrame:
    """Return the current records of these dead-letter topics, with the columns of `DEAD_LETTER_ROW`."""
    reader = (
        spark.read.format("mansio")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", ",".join(topics))
        .option("columns", "key,value,topic,partition,offset")
        .option("includeHeaders", "true")
    )
    return reader.load().mapInArrow(decode_rows, DEAD_LETTER_COLUMNS)


def decode_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode the records of dead-letter topics. Runs in Spark's tasks."""
    for batch in batches:
        rows = [_decoded(record) for record in batch.to_pylist()]
        yield pa.RecordBatch.from_pylist(rows, schema=DEAD_LETTER_ROW)


def _decoded(record: dict[str, Any]) -> dict[str, Any]:
    row = {
        "dead_letter_topic": record["topic"],
        "dead_letter_partition": record["partition"],
        "dead_letter_offset": record["offset"],
        "key": _truncated(record["key"]),
        "value": _truncated(record["value"]),
    }
    headers = parse_dead_letter_headers((one["key"], one["value"]) for one in record["headers"] or ())
    if headers is None:
        return row
    cause = cause_of(headers)
    return row | {
        "cause": cause.id,
        "group": headers.group,
        "topic": headers.topic,
        "topic_id": headers.topic_id,
        "partition": headers.partition,
        "offset": headers.offset,
        "deliveries": headers.deliveries,
        "message": headers.message,
        "template": cause.template,
        "reason": headers.reason,
        "consumer": headers.consumer,
        "dead_lettered_ms": headers.dead_lettered_ms,
    }


def _truncated(data: bytes | None) -> bytes | None:
    return None if data is None else data[:SAMPLE_BYTES_MAX]


def _cause_report(row: Row, samples: tuple[DeadLetterSample, ...]) -> CauseReport:
    return CauseReport(**row.asDict(), samples=samples)


def _sample(row: Row) -> DeadLetterSample:
    fields = row.asDict()
    values = {name: fields[name] for name in DeadLetterSample.__dataclass_fields__}
    for name in ("key", "value"):
        values[name] = None if values[name] is None else bytes(values[name])
    return DeadLetterSample(**values)


# -- redrive, in tasks --------


@dataclass(slots=True)
class Pacer:
    """Delays a task so that it processes at most `per_second` records per second; 0: no limit."""

    per_second: int
    _began: float = field(default_factory=time.monotonic)
    _done: int = 0

    @property
    def chunk(self) -> int:
        """Maximum number of records of the next request."""
        return min(REDRIVE_CHUNK_RECORDS, self.per_second) or REDRIVE_CHUNK_RECORDS

    def wait(self, records: int) -> None:
        """Count these records, and wait until the rate permits more."""
        self._done += records
        if self.per_second:
            time.sleep(max(0.0, self._began + self._done / self.per_second - time.monotonic()))


class Brokers(NamedTuple):
    """Addresses of a cluster, and how to connect."""

    bootstrap_servers: str
    security: SecuritySettings


def redrive_rows(
    brokers: Brokers, redrive_id: str, rate: int, dry_run: bool, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Redrive the records of one task, and yield one row of `REDRIVE_COLUMNS` per share partition. `batches`: rows
    (group, topic, topic id, partition, offset), sorted.
    """
    pacer = Pacer(rate)
    send = None if dry_run else partial(redrive_chunk, brokers, redrive_id)
    totals: dict[SharePartitionId, RedriveCounts] = {}
    for share_partition, offsets in chunks(batches, pacer.chunk):
        total = totals.setdefault(share_partition, RedriveCounts())
        total.records += len(offsets)
        if send is not None and total.error is None:
            send(share_partition, offsets, total)
            pacer.wait(len(offsets))
    rows = [
        {
            "group": one.group,
            "topic": one.topic,
            "partition": one.partition,
            "records": total.records,
            "redriven": total.redriven,
            "repeated": total.repeated,
            "deleted": total.deleted,
            "not_dead_lettered": total.not_dead_lettered,
            "error": total.error,
        }
        for one, total in totals.items()
    ]
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=_REDRIVE_ROW)


def chunks(
    batches: Iterable[pa.RecordBatch], records_max: int
) -> Iterator[tuple[SharePartitionId, list[int]]]:
    """Group sorted rows to the offsets of one share partition, at most `records_max` at a time."""
    current: SharePartitionId | None = None
    offsets: list[int] = []
    for batch in batches:
        for group, topic, topic_id, partition, offset in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            one = SharePartitionId(group, topic, partition, topic_id)
            if current is not None and (one != current or len(offsets) >= records_max):
                yield current, offsets
                offsets = []
            current = one
            offsets.append(offset)
    if current is not None:
        yield current, offsets


def redrive_chunk(
    brokers: Brokers, redrive_id: str, one: SharePartitionId, offsets: list[int], total: RedriveCounts
) -> None:
    """Redrive these offsets of one share partition, and add the result to `total`."""
    try:
        client = sync_client(*brokers)
        view = client.run(client.cluster.topic(one.topic, wait_ms=0))
        if view.topic_id != one.topic_id:  # another topic of that name: its offsets mean other records
            total.deleted += len(offsets)
            return
        result = client.run(
            redrive_records(
                client.cluster,
                one.group,
                TopicPartition(one.topic, one.partition),
                redrive_id=redrive_id,
                offsets=offset_ranges(offsets),
                records_max=len(offsets),
            )
        )
    except MansioError as error:
        total.error = error.message
        return
    total.add(len(offsets), result)


_REDRIVE_ROW: Final = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        *((name, pa.int64()) for name in ("records", "redriven", "repeated", "deleted", "not_dead_lettered")),
        ("error", pa.string()),
    ]
)
