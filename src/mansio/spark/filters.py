"""What a query's filters let a reader leave out. Pure.

Spark checks every filter again behind the reader, so all that matters here is to leave out nothing that could match: a
filter that is not understood leaves out nothing.

A log is in the order of offsets, not of time. The broker's answer to "the first record at or after t" still bounds a
filter from below exactly: whatever lies before it is older than t. It bounds nothing from above, unless the user says
that timestamps never fall (`timestampsAreOrdered`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import datasource as spark

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.wire.topic_partition import TopicPartition

    from .ranges import OffsetRange

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_COMPARISONS: Final = (
    spark.EqualTo,
    spark.EqualNullSafe,
    spark.GreaterThan,
    spark.GreaterThanOrEqual,
    spark.LessThan,
    spark.LessThanOrEqual,
    spark.In,
)


class Span(NamedTuple):
    """From `low` to `high`, both inclusive; None: no bound."""

    low: Any = None
    high: Any = None


def prune(
    wanted: Mapping[TopicPartition, OffsetRange], filters: Iterable[spark.Filter]
) -> dict[TopicPartition, OffsetRange]:
    """What remains of the offsets after the filters on topic, partition and offset."""
    filters = list(filters)
    offsets = _span(filters, "offset", int)
    kept = {}
    for partition, one in wanted.items():
        if not all(_may_match(each, partition) for each in filters):
            continue
        start = one.start if offsets.low is None else max(one.start, offsets.low)
        end = one.end if offsets.high is None else min(one.end, offsets.high + 1)
        if start < end:
            kept[partition] = one._replace(start=start, end=end)
    return kept


def time_span_ms(filters: Iterable[spark.Filter]) -> Span:
    """The span of timestamps that can match, in milliseconds since the epoch."""
    span = _span(filters, "timestamp", datetime)
    return Span(
        None if span.low is None else (span.low - _EPOCH) // _MILLISECOND,
        None if span.high is None else (span.high - _EPOCH) // _MILLISECOND,
    )


def _may_match(one: spark.Filter, partition: TopicPartition) -> bool:
    """Whether a record of this partition can pass a filter on `topic` or `partition`."""
    if isinstance(one, spark.Not):
        # Neither column is ever null, so "not equal" is the exact opposite.
        child = one.child
        return not isinstance(child, (spark.EqualTo, spark.In)) or _matches(child, partition) is not True
    return _matches(one, partition) is not False


def _matches(one: spark.Filter, partition: TopicPartition) -> bool | None:
    """Whether all records of this partition pass, or none; None: the filter is about something else."""
    if not isinstance(one, _COMPARISONS):
        return None
    column = _column(one)
    found: Any = partition.topic if column == "topic" else partition.partition
    kind = {"topic": str, "partition": int}.get(column)
    if kind is None or not all(type(value) is kind for value in _values(one)):
        return None
    if isinstance(one, spark.In):
        return found in one.value
    if isinstance(one, spark.GreaterThan):
        return bool(found > one.value)
    if isinstance(one, spark.GreaterThanOrEqual):
        return bool(found >= one.value)
    if isinstance(one, spark.LessThan):
        return bool(found < one.value)
    if isinstance(one, spark.LessThanOrEqual):
        return bool(found <= one.value)
    return bool(found == one.value)


def _span(filters: Iterable[spark.Filter], column: str, kind: type) -> Span:
    """The span of values of one column that pass all filters on it."""
    low: Any = None
    high: Any = None
    next_value: Any = 1 if kind is int else timedelta(0)
    for one in filters:
        if not isinstance(one, _COMPARISONS) or _column(one) != column:
            continue
        values = _values(one)
        if not values or not all(_is_comparable(value, kind) for value in values):
            continue
        if not isinstance(one, (spark.LessThan, spark.LessThanOrEqual)):
            least = min(values) + next_value if isinstance(one, spark.GreaterThan) else min(values)
            low = least if low is None else max(low, least)
        if not isinstance(one, (spark.GreaterThan, spark.GreaterThanOrEqual)):
            most = max(values) - next_value if isinstance(one, spark.LessThan) else max(values)
            high = most if high is None else min(high, most)
    return Span(low, high)


def _is_comparable(value: object, kind: type) -> bool:
    return type(value) is kind and (not isinstance(value, datetime) or value.tzinfo is not None)


def _column(one: Any) -> str:
    """The name of the column a filter is about; empty for a field inside one."""
    return one.attribute[0].lower() if len(one.attribute) == 1 else ""


def _values(one: Any) -> tuple[Any, ...]:
    return tuple(one.value) if isinstance(one, spark.In) else (one.value,)
