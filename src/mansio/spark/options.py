"""What a reader or writer of `format("mansio")` may be told: names, defaults, and what is refused.

Names are those of Spark's own Kafka source, so a query written for the one runs with the other; what the Kafka source
takes from `kafka.*` is read where it means something here and refused by name where ignoring it would change what a
query does. Spark hands options over as texts, in any case.

Always true: exactly one of `subscribe`, `subscribePattern` and `assign` is given; an option nobody knows is refused, as
it is a typing error that would be obeyed in silence; what was parsed is frozen, and can be pickled.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError
from mansio.link.addresses import parse_addresses
from mansio.link.offsets import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED

from . import option_values as values
from .columns.schema import chosen_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.wire.topic_partition import TopicPartition

BROKER: Final = "broker"
SUBSCRIPTIONS: Final = ("subscribe", "subscribePattern", "assign")

SOURCE_NAMES: Final = (
    BROKER,
    *SUBSCRIPTIONS,
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "includeHeaders",
    "columns",
    "isolation.level",
    "fetchBytes",
    "rowsPerBatch",
    "batchBytes",
    "pipeline",
    "pushdown",
    "onUnreadable",
    "topicIds",
)
"""Every option of a reader."""

SINK_NAMES: Final = (BROKER, "topic", "acks", "compression", "batchBytes", "includeHeaders")
"""Every option of a writer. `includeHeaders` is taken from programs that give it to Spark's Kafka sink, and changes
nothing here as there: a column `headers` is always written."""

IGNORED_NAMES: Final = (
    "path",
    "checkpointLocation",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
)
"""Spark's own, and fine tuning of the Kafka source that has nothing to tune here."""

KAFKA_ALIASES: Final = {
    "kafka.bootstrap.servers": BROKER,
    "kafka.isolation.level": "isolation.level",
    "kafka.acks": "acks",
    "kafka.compression.type": "compression",
}

KAFKA_REFUSED: Final = {
    "kafka.group.id": "a query's offsets live in its checkpoint; option pipeline names a group that shows them",
    "kafka.auto.offset.reset": "use startingOffsets",
    "kafka.key.deserializer": "keys come as binary; use DataFrame operations to decode them",
    "kafka.value.deserializer": "values come as binary; use DataFrame operations to decode them",
    "kafka.key.serializer": "keys are written as they are; use DataFrame operations to encode them",
    "kafka.value.serializer": "values are written as they are; use DataFrame operations to encode them",
    "kafka.enable.auto.commit": "a query's offsets live in its checkpoint",
    "kafka.interceptor.classes": "there are no interceptors here",
    "kafka.transactional.id": "the sink writes without transactions",
    "kafka.security.protocol": "connections are plain TCP here",
}
KAFKA_REFUSED_BEGINNINGS: Final = ("kafka.ssl.", "kafka.sasl.")

SUSPEND: Final = "suspend"
SKIP: Final = "skip"
DEAD_LETTER: Final = "dead-letter"
UNREADABLE_MODES: Final = (SUSPEND, SKIP, DEAD_LETTER)
ERROR_COLUMN: Final = "error"
"""With `onUnreadable=dead-letter` there is this column behind the others: null, or why a row is not a record."""

FETCH_BYTES: Final = 4 << 20
ROWS_PER_BATCH: Final = 65_536
BATCH_BYTES: Final = 64 << 20
TRIGGER_DELAY_MS_MAX: Final = 15 * 60_000
SINK_BATCH_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which partitions are read: exactly one of the three says it."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading begins or ends. Of these the first that is set counts, in this order."""

    timestamp_ms: int | None = None
    """The first record of every partition whose timestamp is at least that."""
    timestamps_ms: dict[TopicPartition, int] | None = None
    """The same for each partition of its own."""
    offsets: int | dict[TopicPartition, int] = EARLIEST
    """`EARLIEST` or `LATEST` for all, or an offset for each partition (or one of the two)."""
    is_latest_without_match: bool = False
    """Where no record is that young: the end of the partition, instead of an error."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a reader was told. Bytes, rows and milliseconds as the names say; None: no limit."""

    bootstrap: str
    subscription: Subscription
    starting: Position
    ending: Position
    columns: tuple[str, ...]
    fail_on_data_loss: bool = True
    partitions_min: int | None = None
    records_per_partition_max: int | None = None
    offsets_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_ms_max: int = TRIGGER_DELAY_MS_MAX
    isolation_level: int = READ_COMMITTED
    fetch_bytes: int = FETCH_BYTES
    rows_per_batch: int = ROWS_PER_BATCH
    batch_bytes: int = BATCH_BYTES
    pipeline: str = ""
    on_unreadable: str = SUSPEND
    topic_ids: dict[str, str] = field(default_factory=dict)
    """By topic the id (hex) it has to have: a query that goes on where it stopped is told what it read then."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
        """Read and check the options of a reader. `ConfigError` names the option and what to do."""
        given = _Given(options, SOURCE_NAMES)
        if streaming:
            for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
                if given.text(name) is not None:
                    raise ConfigError(f"option {name} is for batch reads; a stream has no end: leave it out")
        parsed = cls(
            bootstrap=given.bootstrap(),
            subscription=_subscription(given),
            starting=_starting(given, streaming=streaming),
            ending=_ending(given),
            columns=_columns(given),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            partitions_min=given.count("minPartitions"),
            records_per_partition_max=given.count("maxRecordsPerPartition"),
            offsets_per_trigger_max=given.count("maxOffsetsPerTrigger"),
            offsets_per_trigger_min=given.count("minOffsetsPerTrigger"),
            trigger_delay_ms_max=given.milliseconds("maxTriggerDelay", TRIGGER_DELAY_MS_MAX),
            isolation_level=_isolation(given),
            fetch_bytes=given.bytes("fetchBytes", FETCH_BYTES, 1 << 10, 256 << 20),
            rows_per_batch=given.count("rowsPerBatch") or ROWS_PER_BATCH,
            batch_bytes=given.bytes("batchBytes", BATCH_BYTES, 1 << 16, 1 << 30),
            pipeline=(given.text("pipeline") or "").strip(),
            on_unreadable=given.choice("onUnreadable", UNREADABLE_MODES),
            topic_ids=values.to_texts("topicIds", text) if (text := given.text("topicIds")) else {},
        )
        if given.flag("pushdown"):
            raise ConfigError(
                "option pushdown is refused: Spark 4.3 uses what one query pushed down for the next query of the same"
                " DataFrame, and rows would be missing; leave it out, and use startingOffsets or assign"
            )
        lowest, highest = parsed.offsets_per_trigger_min, parsed.offsets_per_trigger_max
        if lowest is not None and highest is not None and lowest > highest:
            raise ConfigError(
                f"option minOffsetsPerTrigger ({lowest}) is above maxOffsetsPerTrigger ({highest}): lower it"
            )
        return parsed


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What a writer was told."""

    bootstrap: str
    topic: str | None = None
    """Where all rows go; None: each row says it in its column `topic`."""
    acks: int = -1
    compression: str = "none"
    batch_bytes: int = SINK_BATCH_BYTES

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Read and check the options of a writer. `ConfigError` names the option and what to do."""
        given = _Given(options, SINK_NAMES)
        topic = (given.text("topic") or "").strip()
        acks = given.choice("acks", ("all", "-1", "1", "0"))
        return cls(
            bootstrap=given.bootstrap(),
            topic=topic or None,
            acks=-1 if acks == "all" else int(acks),
            compression=given.choice("compression", ("none", "gzip", "snappy", "lz4", "zstd")),
            batch_bytes=given.bytes("batchBytes", SINK_BATCH_BYTES, 1 << 10, 64 << 20),
        )


class _Given:
    """The options as they were given, by lower-cased name; refuses what nobody knows."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        known = {name.lower(): name for name in (*names, *IGNORED_NAMES)}
        self._texts: dict[str, str] = {}
        for name, text in options.items():
            lower = name.lower()
            if lower in KAFKA_ALIASES:
                self._texts.setdefault(KAFKA_ALIASES[lower].lower(), text)
            elif lower in KAFKA_REFUSED or lower.startswith(KAFKA_REFUSED_BEGINNINGS):
                _refuse(lower, text)
            elif lower in known:
                self._texts[lower] = text
            elif not lower.startswith("kafka."):
                close = difflib.get_close_matches(lower, known, n=1)
                hint = f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(names)}"
                raise ConfigError(f"there is no option {name!r} here: {hint}")

    def text(self, name: str) -> str | None:
        return self._texts.get(name.lower())

    def bootstrap(self) -> str:
        text = self.text(BROKER)
        if text is None:
            raise ConfigError("option broker is missing: give the address of a broker as host:port")
        parse_addresses(text)
        return text

    def flag(self, name: str, *, default: bool = False) -> bool:
        text = self.text(name)
        return default if text is None else values.to_flag(name, text)

    def count(self, name: str) -> int | None:
        text = self.text(name)
        return None if text is None else values.to_count(name, text)

    def milliseconds(self, name: str, default: int) -> int:
        text = self.text(name)
        return default if text is None else values.to_milliseconds(name, text)

    def bytes(self, name: str, default: int, lowest: int, highest: int) -> int:
        text = self.text(name)
        return default if text is None else values.to_bytes(name, text, lowest, highest)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The first of the choices is the default."""
        text = self.text(name)
        return choices[0] if text is None else values.to_choice(name, text, choices)


def _refuse(name: str, text: str) -> None:
    if name == "kafka.security.protocol" and text.strip().upper() == "PLAINTEXT":
        return
    reason = KAFKA_REFUSED.get(name, "connections are plain TCP here")
    raise ConfigError(f"option {name} is not supported: {reason}")


def _subscription(given: _Given) -> Subscription:
    named = [name for name in SUBSCRIPTIONS if given.text(name) is not None]
    if len(named) != 1:
        found = f"there are {' and '.join(named)}" if named else "there is none"
        raise ConfigError(f"give exactly one of subscribe, subscribePattern and assign: {found}")
    name = named[0]
    text = given.text(name) or ""
    if name == "subscribe":
        return Subscription(topics=tuple(sorted(values.to_names(name, text))))
    if name == "subscribePattern":
        return Subscription(pattern=values.to_pattern(name, text))
    return Subscription(assigned=values.to_assignment(name, text))


def _starting(given: _Given, *, streaming: bool) -> Position:
    offsets = _offsets(given, "startingOffsets", LATEST if streaming else EARLIEST)
    if not streaming and (offsets == LATEST or (isinstance(offsets, dict) and LATEST in offsets.values())):
        raise ConfigError(
            "option startingOffsets is latest (or -1): a batch read that begins there has no records"
        )
    strategy = given.choice("startingOffsetsByTimestampStrategy", ("error", "latest"))
    return _position(given, "starting", offsets, is_latest_without_match=strategy == "latest")


def _ending(given: _Given) -> Position:
    offsets = _offsets(given, "endingOffsets", LATEST)
    if offsets == EARLIEST or (isinstance(offsets, dict) and EARLIEST in offsets.values()):
        raise ConfigError(
            "option endingOffsets is earliest (or -2): a batch read that ends there has no records"
        )
    return _position(given, "ending", offsets, is_latest_without_match=True)


def _position(
    given: _Given, side: str, offsets: int | dict[TopicPartition, int], *, is_latest_without_match: bool
) -> Position:
    timestamp = given.text(f"{side}Timestamp")
    by_partition = given.text(f"{side}OffsetsByTimestamp")
    return Position(
        timestamp_ms=None if timestamp is None else values.to_count(f"{side}Timestamp", timestamp, lowest=0),
        timestamps_ms=(
            None if by_partition is None else values.to_timestamps(f"{side}OffsetsByTimestamp", by_partition)
        ),
        offsets=offsets,
        is_latest_without_match=is_latest_without_match,
    )


def _offsets(given: _Given, name: str, default: int) -> int | dict[TopicPartition, int]:
    text = given.text(name)
    return default if text is None else values.to_offsets(name, text)


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that the options of a reader ask for, `error` among them; nothing else of the options is judged."""
    given = _Given(options, SOURCE_NAMES)
    is_dead_letter = given.choice("onUnreadable", UNREADABLE_MODES) == DEAD_LETTER
    return (*_columns(given), ERROR_COLUMN) if is_dead_letter else _columns(given)


def _columns(given: _Given) -> tuple[str, ...]:
    text = given.text("columns")
    names = None if text is None else values.to_names("columns", text)
    return chosen_columns(names, given.flag("includeHeaders"))


def _isolation(given: _Given) -> int:
    word = given.choice("isolation.level", ("read_committed", "read_uncommitted"))
    return READ_COMMITTED if word == "read_committed" else READ_UNCOMMITTED
