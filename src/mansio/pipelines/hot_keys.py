"""Hot-key analysis: the keys of a topic with the most records or bytes, the load of its partitions, and advice.

Counts are exact: Spark groups all rows by key and partition once and keeps the groups on disk, so memory does not
depend on the number of keys. `assess_skew` judges the counts. It does not report differences between partitions that
random placement of keys explains.

Invariants:
* `HotKeys` has the totals of all rows, and the largest keys in descending order.
* There is advice only if there is a hot key or the partitions are skewed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, Final

from pyspark import StorageLevel
from pyspark.sql import functions

from mansio.pipelines.bar_charts import Bar, Chart, short_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

TOP_KEYS: Final = 20
HOT_SHARE_OF_PARTITION: Final = 0.5
"""A hot key has at least this share of the mean load of a partition."""
HOT_MULTIPLE_OF_MEAN_KEY: Final = 10
"""A hot key also has at least this multiple of the mean load of a key: if there are few keys, all have a large load."""
SKEW_MAX: Final = 1.25
"""Multiple of the mean load up to which the busiest partition is not reported."""
RANDOM_DEVIATIONS_MAX: Final = 5
"""Number of standard deviations above the mean load that are attributed to random placement of keys."""
RANDOM_SKEW_MAX: Final = 2.0
"""Multiple of the mean load above which the busiest partition is always reported."""
KEYS_PER_PARTITION_MIN: Final = 10


@dataclass(frozen=True, slots=True)
class KeyLoad:
    """Load of one key: number of records, bytes of their values, number of its partitions. A `key` of None stands for
    all records without a key.
    """

    key: bytes | None
    records: int
    bytes: int
    partitions: int


@dataclass(frozen=True, slots=True)
class PartitionLoad:
    """Load of one partition: number of records, bytes of their values, number of distinct keys."""

    partition: int
    records: int
    bytes: int
    keys: int


@dataclass(frozen=True, slots=True)
class HotKeys:
    """Result of a count. `partitions` has every partition of the topic, also empty ones; `top` has the keys with the
    most records or, if `measures_bytes`, the most bytes.
    """

    records: int
    bytes: int
    keys: int
    partitions: tuple[PartitionLoad, ...]
    top: tuple[KeyLoad, ...]
    measures_bytes: bool = False

    def load(self, item: KeyLoad | PartitionLoad) -> int:
        """Load of a key or a partition: bytes if `measures_bytes`, otherwise records."""
        return item.bytes if self.measures_bytes else item.records

    @property
    def total(self) -> int:
        return self.bytes if self.measures_bytes else self.records

    @property
    def mean_partition_load(self) -> float:
        return self.total / max(len(self.partitions), 1)

    @property
    def skew(self) -> float:
        """Load of the busiest partition as a multiple of the mean load; 1 if all partitions have the same load."""
        busiest = max((self.load(one) for one in self.partitions), default=0)
        return busiest / self.mean_partition_load if self.total else 1.0


@dataclass(frozen=True, slots=True)
class SkewAssessment:
    """Hot keys, whether the load of partitions differs more than random placement of keys explains, and advice."""

    hot: tuple[KeyLoad, ...]
    is_skewed: bool
    advice: tuple[str, ...]

    @property
    def is_alarm(self) -> bool:
        return bool(self.hot) or self.is_skewed


def count_topic(
    spark: SparkSession,
    topic: str,
    bootstrap_servers: str,
    partition_count: int,
    *,
    top: int = TOP_KEYS,
    measures_bytes: bool = False,
) -> HotKeys:
    """Count all current records of a topic by key and partition. See `count_keys`."""
    reader = (
        spark.read.format("mansio")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
    )
    columns = "key,value,partition" if measures_bytes else "key,partition"
    rows = reader.option("columns", columns).load()
    return count_keys(rows, partition_count, top=top, measures_bytes=measures_bytes)


def count_keys(
    rows: DataFrame, partition_count: int, *, top: int = TOP_KEYS, measures_bytes: bool = False
) -> HotKeys:
    """Count the rows by key and partition. `rows` has `key`, `partition` and, to measure bytes, `value`."""
    size = functions.length("value") if measures_bytes else functions.lit(0)
    groups = rows.groupBy("key", "partition").agg(
        functions.count(functions.lit(1)).alias("records"),
        functions.coalesce(functions.sum(size), functions.lit(0)).alias("bytes"),
    )
    groups = groups.persist(StorageLevel.DISK_ONLY)
    try:
        by_partition = groups.groupBy("partition").agg(
            functions.sum("records").alias("records"),
            functions.sum("bytes").alias("bytes"),
            functions.count("key").alias("keys"),
        )
        by_key = groups.groupBy("key").agg(
            functions.sum("records").alias("records"),
            functions.sum("bytes").alias("bytes"),
            functions.count(functions.lit(1)).alias("partitions"),
        )
        loads = {
            row["partition"]: PartitionLoad(row["partition"], row["records"], row["bytes"], row["keys"])
            for row in by_partition.collect()
        }
        order = functions.desc("bytes" if measures_bytes else "records")
        heaviest = [
            KeyLoad(
                None if row["key"] is None else bytes(row["key"]),
                row["records"],
                row["bytes"],
                row["partitions"],
            )
            for row in by_key.orderBy(order, "key").limit(top).collect()
        ]
        keys = groups.where("key is not null").select("key").distinct().count()
    finally:
        groups.unpersist()
    count = max([partition_count, *(number + 1 for number in loads)])
    partitions = tuple(loads.get(number, PartitionLoad(number, 0, 0, 0)) for number in range(count))
    return HotKeys(
        records=sum(one.records for one in partitions),
        bytes=sum(one.bytes for one in partitions),
        keys=keys,
        partitions=partitions,
        top=tuple(heaviest),
        measures_bytes=measures_bytes,
    )


def assess_skew(found: HotKeys) -> SkewAssessment:
    """Find hot keys and skewed partitions in the counts, and what to do about them."""
    mean = found.mean_partition_load
    mean_key = found.total / max(found.keys, 1)
    hot = tuple(
        one
        for one in found.top
        if one.key is not None
        and len(found.partitions) > 1
        and found.load(one) >= HOT_SHARE_OF_PARTITION * mean
        and found.load(one) >= HOT_MULTIPLE_OF_MEAN_KEY * mean_key
    )
    is_skewed = found.skew > max(SKEW_MAX, min(_random_skew(found), RANDOM_SKEW_MAX))
    advice = [_key_advice(found, one) for one in hot]
    if hot:
        advice.append(_partition_count_advice(found, hot[0]))
    if is_skewed and not hot:
        advice.append(_skew_advice(found))
    return SkewAssessment(hot, is_skewed, tuple(advice))


def _random_skew(found: HotKeys) -> float:
    """Return the skew that random placement of keys may cause, without keys of unusual load."""
    keys = found.keys / max(len(found.partitions), 1)
    return 1 + RANDOM_DEVIATIONS_MAX / sqrt(keys) if keys else 1.0


def _key_advice(found: HotKeys, one: KeyLoad) -> str:
    share = found.load(one) / found.total
    pieces = max(2, ceil(found.load(one) / (HOT_SHARE_OF_PARTITION * found.mean_partition_load)))
    return (
        f"key {key_label(one.key)} has {share:.1%} of all {_unit_name(found)}: if its records need no common order,"
        f" write it as {pieces} keys ({key_label(one.key)}-0 to -{pieces - 1})"
    )


def _partition_count_advice(found: HotKeys, heaviest: KeyLoad) -> str:
    useful = max(1, int(found.total / found.load(heaviest)))
    return (
        f"one key is always in one partition: beyond {useful} partition{'s' if useful > 1 else ''} the busiest one "
        f"stays as busy as it is, whatever is added (the topic has {len(found.partitions)})"
    )


def _skew_advice(found: HotKeys) -> str:
    count = len(found.partitions)
    if found.keys < KEYS_PER_PARTITION_MIN * count:
        useful = max(1, found.keys // KEYS_PER_PARTITION_MIN)
        return (
            f"{found.keys} different keys do not spread evenly over {count} partitions: take finer keys, "
            f"or at most {useful} partition{'s' if useful > 1 else ''}"
        )
    return (
        "no key stands out, so it is how records are placed: see whether producers name partitions themselves, use "
        "another partitioner than Kafka's, or wrote before partitions were added"
    )


def _unit_name(found: HotKeys) -> str:
    return "bytes" if found.measures_bytes else "records"


def hot_key_charts(found: HotKeys, assessment: SkewAssessment, bars: int = TOP_KEYS) -> list[Chart]:
    """Two charts: the keys with the largest load, and the load of the partitions with its mean."""
    hot = {one.key for one in assessment.hot}
    total = max(found.total, 1)

    def bar(label: str, weight: int, is_highlighted: bool) -> Bar:
        return Bar(label, weight, f"{weight:,} ({weight / total:.1%})", is_highlighted)

    keys = [bar(key_label(one.key), found.load(one), one.key in hot) for one in found.top[:bars]]
    busiest: Sequence[PartitionLoad] = sorted(found.partitions, key=found.load, reverse=True)[:bars]
    limit = found.mean_partition_load * SKEW_MAX
    partitions = [
        bar(
            f"partition {one.partition}",
            found.load(one),
            assessment.is_skewed and found.load(one) > limit,
        )
        for one in sorted(busiest, key=lambda one: one.partition)
    ]
    busy = f"Partitions, by {_unit_name(found)} (busiest {found.skew:.2f} times the mean)"
    return [
        Chart(f"Heaviest keys, by {_unit_name(found)}", keys),
        Chart(busy, partitions, found.mean_partition_load),
    ]


def key_label(data: bytes | None) -> str:
    """Return a key for display: its text if it is printable, else hexadecimal; a long one is shortened."""
    if data is None:
        return "(no key)"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        text = f"0x{data.hex()}" if data else "(empty)"
    return short_label(text)
