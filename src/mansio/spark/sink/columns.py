"""What a DataFrame must look like to be written into a topic, and how its Arrow batches become columns of records.

The names are those of Spark's Kafka sink: `value` is required; `key`, `topic`, `partition`, `headers` and `timestamp`
may be there. The columns that a broker decides (`offset`, `timestampType`, `lane`) are left out silently, so that what
was read from one topic can be written to another as it is. Any other column is an error: it would be lost unnoticed.

Pure: Arrow in, Arrow out. Always true: a row goes to one topic, and the rows of a topic keep their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from mansio.errors import ConfigError, InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

TEXT: Final = ("string", "binary")
HEADERS: Final = ("array<struct<key:string,value:binary>>",)
ACCEPTED: Final = {
    "value": TEXT,
    "key": TEXT,
    "topic": ("string",),
    "partition": ("int",),
    "headers": HEADERS,
    "timestamp": ("timestamp",),
}
"""Column -> the types it may have, in Spark's words."""
BROKER_ASSIGNED_COLUMNS: Final = frozenset({"offset", "timestampType", "lane"})
WRITTEN: Final = ("key", "value", "partition", "timestamp", "headers")


def check_columns(types: Mapping[str, str], topic: str | None) -> None:
    """`types`: column -> type as Spark writes it. Raises `ConfigError`, which says what to select instead."""
    for name, found in types.items():
        if name in BROKER_ASSIGNED_COLUMNS:
            continue
        if name not in ACCEPTED:
            raise ConfigError(
                f"column {name!r} cannot be written into a topic: select {', '.join(ACCEPTED)}, and put the rest into "
                "value, for instance with to_json(struct(*))"
            )
        if found not in ACCEPTED[name]:
            raise ConfigError(
                f"column {name} is {found}, and has to be {' or '.join(ACCEPTED[name])}: cast it"
            )
    if "value" not in types:
        raise ConfigError(f"a topic needs the column value, and there are only {', '.join(types) or 'none'}")
    if topic is None and "topic" not in types:
        raise ConfigError(
            "which topic to write into is not said: give the option topic, or a column of that name"
        )


def by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of a batch for each topic, in their order, as columns of records. `topic`, if given, is that of all.

    Raises `InvalidRecord` for a row without a topic.
    """
    if not batch.num_rows:
        return
    if topic is not None:
        yield topic, as_records(batch)
        return
    topics = batch.column(batch.schema.get_field_index("topic"))
    if topics.null_count:
        raise InvalidRecord(
            f"{topics.null_count} rows have no topic: the column is null, and the option is not given"
        )
    for one in pc.unique(topics):
        yield one.as_py(), as_records(batch.filter(pc.equal(topics, one)))


def as_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the columns that are written."""
    return batch.select([name for name in WRITTEN if name in batch.schema.names])
