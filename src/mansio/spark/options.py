"""Options of readers and writers of `format("mansio")`: names, defaults and validation.

Names are those of Spark's Kafka source, so a query written for one source works with the other. `kafka.*` options are
used where they apply, and rejected where ignoring them would change the query. Spark passes option names in any case.

Invariants:
* Exactly one of `subscribe`, `subscribePattern` and `assign` is given.
* An unknown option is rejected: a misspelled name would otherwise be ignored silently.
* Parsed options are frozen and can be pickled.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.net.addresses import parse_addresses
from mansio.net.offsets import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from mansio.spark.arrow.schema import select_columns
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BOOTSTRAP_SERVERS: Final = "kafka.bootstrap.servers"
SUBSCRIPTIONS: Final = ("subscribe", "subscribePattern", "assign")

SOURCE_NAMES: Final = (
    BOOTSTRAP_SERVERS,
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
"""All options of a reader."""

SINK_NAMES: Final = (BOOTSTRAP_SERVERS, "topic", "acks", "compression", "batchBytes", "includeHeaders")
"""All options of a writer. `includeHeaders` is accepted for programs that set it for Spark's Kafka sink and has no
effect:
a column `headers` is always written.
"""

IGNORED_NAMES: Final = (
    "path",
    "checkpointLocation",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
)
"""Spark's own options, and tuning of the Kafka source that does not apply here."""

KAFKA_ALIASES: Final = {
    "kafka.isolation.level": "isolation.level",
    "kafka.acks": "acks",
    "kafka.compression.type": "compression",
}

UNSUPPORTED_KAFKA_OPTIONS: Final = {
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
UNSUPPORTED_KAFKA_PREFIXES: Final = ("kafka.ssl.", "kafka.sasl.")

SUSPEND: Final = "suspend"
SKIP: Final = "skip"
DEAD_LETTER: Final = "dead-letter"
UNREADABLE_MODES: Final = (SUSPEND, SKIP, DEAD_LETTER)
ERROR_COLUMN: Final = "error"
"""With `onUnreadable=dead-letter` this column follows the others: null, or why a row is not a record."""

FETCH_BYTES: Final = 4 << 20
ROWS_PER_BATCH: Final = 65_536
BATCH_BYTES: Final = 64 << 20
TRIGGER_DELAY_MS_MAX: Final = 15 * 60_000
SINK_BATCH_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Subscription:
    """Partitions to read: exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Start or end of reading. The first attribute that is set applies, in this order."""

    timestamp_ms: int | None = None
    """The first record of every partition with at least this timestamp."""
    timestamps_ms: dict[TopicPartition, int] | None = None
    """Timestamps by partition."""
    offsets: int | dict[TopicPartition, int] = EARLIEST
    """`EARLIEST` or `LATEST` for all, or an offset for each partition (or one of the two)."""
    is_latest_without_match: bool = False
    """Without a record of that timestamp: the end of the partition instead of an error."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of a reader. Units as in the names (bytes, rows, milliseconds); None: no limit."""

    bootstrap_servers: str
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
    """Required topic id (hex) by topic: a query that resumes must read the same topic."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
        """Parse and check the options of a reader. `ConfigError` names the option and the remedy."""
        raw = _RawOptions(options, SOURCE_NAMES)
        if streaming:
            for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
                if raw.text(name) is not None:
                    raise ConfigError(f"option {name} is for batch reads; a stream has no end: leave it out")
        parsed = cls(
            bootstrap_servers=raw.bootstrap_servers(),
            subscription=_subscription(raw),
            starting=_starting(raw, streaming=streaming),
            ending=_ending(raw),
            columns=_columns(raw),
            fail_on_data_loss=raw.flag("failOnDataLoss", default=True),
            partitions_min=raw.count("minPartitions"),
            records_per_partition_max=raw.count("maxRecordsPerPartition"),
            offsets_per_trigger_max=raw.count("maxOffsetsPerTrigger"),
            offsets_per_trigger_min=raw.count("minOffsetsPerTrigger"),
            trigger_delay_ms_max=raw.milliseconds("maxTriggerDelay", TRIGGER_DELAY_MS_MAX),
            isolation_level=_isolation(raw),
            fetch_bytes=raw.bytes("fetchBytes", FETCH_BYTES, 1 << 10, 256 << 20),
            rows_per_batch=raw.count("rowsPerBatch") or ROWS_PER_BATCH,
            batch_bytes=raw.bytes("batchBytes", BATCH_BYTES, 1 << 16, 1 << 30),
            pipeline=(raw.text("pipeline") or "").strip(),
            on_unreadable=raw.choice("onUnreadable", UNREADABLE_MODES),
            topic_ids=to_texts("topicIds", text) if (text := raw.text("topicIds")) else {},
        )
        if raw.flag("pushdown"):
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
    """Options of a writer."""

    bootstrap_servers: str
    topic: str | None = None
    """Topic of all rows; None: the column `topic` of each row."""
    acks: int = -1
    compression: str = "none"
    batch_bytes: int = SINK_BATCH_BYTES

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse and check the options of a writer. `ConfigError` names the option and the remedy."""
        raw = _RawOptions(options, SINK_NAMES)
        topic = (raw.text("topic") or "").strip()
        acks = raw.choice("acks", ("all", "-1", "1", "0"))
        return cls(
            bootstrap_servers=raw.bootstrap_servers(),
            topic=topic or None,
            acks=-1 if acks == "all" else int(acks),
            compression=raw.choice("compression", ("none", "gzip", "snappy", "lz4", "zstd")),
            batch_bytes=raw.bytes("batchBytes", SINK_BATCH_BYTES, 1 << 10, 64 << 20),
        )


class _RawOptions:
    """Options by lower-case name, as given; rejects unknown names."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        known = {name.lower(): name for name in (*names, *IGNORED_NAMES)}
        self._texts: dict[str, str] = {}
        for name, text in options.items():
            lower = name.lower()
            if lower in KAFKA_ALIASES:
                self._texts.setdefault(KAFKA_ALIASES[lower].lower(), text)
            elif lower in UNSUPPORTED_KAFKA_OPTIONS or lower.startswith(UNSUPPORTED_KAFKA_PREFIXES):
                _raise_unsupported(lower, text)
            elif lower in known:
                self._texts[lower] = text
            elif not lower.startswith("kafka."):
                closest = difflib.get_close_matches(lower, known, n=1)
                hint = f"did you mean {known[closest[0]]}?" if closest else f"there are {', '.join(names)}"
                raise ConfigError(f"there is no option {name!r} here: {hint}")

    def text(self, name: str) -> str | None:
        return self._texts.get(name.lower())

    def bootstrap_servers(self) -> str:
        text = self.text(BOOTSTRAP_SERVERS)
        if text is None:
            raise ConfigError(
                "option kafka.bootstrap.servers is missing: give the address of a broker as host:port"
            )
        parse_addresses(text)
        return text

    def flag(self, name: str, *, default: bool = False) -> bool:
        text = self.text(name)
        return default if text is None else to_flag(name, text)

    def count(self, name: str) -> int | None:
        text = self.text(name)
        return None if text is None else to_count(name, text)

    def milliseconds(self, name: str, default: int) -> int:
        text = self.text(name)
        return default if text is None else to_milliseconds(name, text)

    def bytes(self, name: str, default: int, lowest: int, highest: int) -> int:
        text = self.text(name)
        return default if text is None else to_bytes(name, text, lowest, highest)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The first of the choices is the default."""
        text = self.text(name)
        return choices[0] if text is None else to_choice(name, text, choices)


def _raise_unsupported(name: str, text: str) -> None:
    if name == "kafka.security.protocol" and text.strip().upper() == "PLAINTEXT":
        return
    reason = UNSUPPORTED_KAFKA_OPTIONS.get(name, "connections are plain TCP here")
    raise ConfigError(f"option {name} is not supported: {reason}")


def _subscription(raw: _RawOptions) -> Subscription:
    named = [name for name in SUBSCRIPTIONS if raw.text(name) is not None]
    if len(named) != 1:
        found = f"there are {' and '.join(named)}" if named else "there is none"
        raise ConfigError(f"give exactly one of subscribe, subscribePattern and assign: {found}")
    name = named[0]
    text = raw.text(name) or ""
    if name == "subscribe":
        return Subscription(topics=tuple(sorted(to_names(name, text))))
    if name == "subscribePattern":
        return Subscription(pattern=to_pattern(name, text))
    return Subscription(assigned=to_assignment(name, text))


def _starting(raw: _RawOptions, *, streaming: bool) -> Position:
    offsets = _offsets(raw, "startingOffsets", LATEST if streaming else EARLIEST)
    if not streaming and (offsets == LATEST or (isinstance(offsets, dict) and LATEST in offsets.values())):
        raise ConfigError(
            "option startingOffsets is latest (or -1): a batch read that begins there has no records"
        )
    strategy = raw.choice("startingOffsetsByTimestampStrategy", ("error", "latest"))
    return _position(raw, "starting", offsets, is_latest_without_match=strategy == "latest")


def _ending(raw: _RawOptions) -> Position:
    offsets = _offsets(raw, "endingOffsets", LATEST)
    if offsets == EARLIEST or (isinstance(offsets, dict) and EARLIEST in offsets.values()):
        raise ConfigError(
            "option endingOffsets is earliest (or -2): a batch read that ends there has no records"
        )
    return _position(raw, "ending", offsets, is_latest_without_match=True)


def _position(
    raw: _RawOptions, side: str, offsets: int | dict[TopicPartition, int], *, is_latest_without_match: bool
) -> Position:
    timestamp = raw.text(f"{side}Timestamp")
    by_partition = raw.text(f"{side}OffsetsByTimestamp")
    return Position(
        timestamp_ms=None if timestamp is None else to_count(f"{side}Timestamp", timestamp, lowest=0),
        timestamps_ms=(
            None if by_partition is None else to_timestamps(f"{side}OffsetsByTimestamp", by_partition)
        ),
        offsets=offsets,
        is_latest_without_match=is_latest_without_match,
    )


def _offsets(raw: _RawOptions, name: str, default: int) -> int | dict[TopicPartition, int]:
    text = raw.text(name)
    return default if text is None else to_offsets(name, text)


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns selected by the options of a reader, including `error`; other options are not checked."""
    raw = _RawOptions(options, SOURCE_NAMES)
    is_dead_letter = raw.choice("onUnreadable", UNREADABLE_MODES) == DEAD_LETTER
    return (*_columns(raw), ERROR_COLUMN) if is_dead_letter else _columns(raw)


def _columns(raw: _RawOptions) -> tuple[str, ...]:
    text = raw.text("columns")
    names = None if text is None else to_names("columns", text)
    return select_columns(names, raw.flag("includeHeaders"))


def _isolation(raw: _RawOptions) -> int:
    word = raw.choice("isolation.level", ("read_committed", "read_uncommitted"))
    return READ_COMMITTED if word == "read_committed" else READ_UNCOMMITTED


# -- option values --------


SHOWN_CHARACTERS_MAX: Final = 120
"""Maximum length of an invalid value in the error."""

NUMBER_MAX: Final = (1 << 63) - 1
"""Offsets and timestamps have 64 bits on the wire."""

OFFSET_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}

_SIZE: Final = re.compile(r"(\d{1,15})\s*(?:(k|m|g)i?b?|b)?", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TIME: Final = re.compile(r"(\d{1,12})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_TIME_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def invalid_option(name: str, text: str, wanted: str) -> ConfigError:
    """The error for an invalid value of an option."""
    shown = text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "..."
    return ConfigError(f"option {name} is {shown!r}: {wanted}")


def to_flag(name: str, text: str) -> bool:
    """`true` or `false`, in any case."""
    if text.strip().lower() not in ("true", "false"):
        raise invalid_option(name, text, "give true or false")
    return text.strip().lower() == "true"


def to_choice(name: str, text: str, choices: Sequence[str]) -> str:
    """One of `choices`, in any case."""
    word = text.strip().lower()
    if word not in choices:
        raise invalid_option(name, text, f"give {' or '.join(choices)}")
    return word


def to_count(name: str, text: str, lowest: int = 1) -> int:
    """An integer of at least `lowest`."""
    try:
        number = int(text.strip())
    except ValueError:
        raise invalid_option(name, text, f"give a whole number of at least {lowest}") from None
    if not lowest <= number <= NUMBER_MAX:
        raise invalid_option(name, text, f"give a whole number of at least {lowest}")
    return number


def to_bytes(name: str, text: str, lowest: int, highest: int) -> int:
    """A size in bytes: `4194304`, `4096k`, `4MB`. Units are powers of 1,024."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _SIZE_UNITS[(found[2] or "").lower()] if found else -1
    if not lowest <= size <= highest:
        raise invalid_option(name, text, f"give a size such as 4MB, from {lowest} to {highest} bytes")
    return size


def to_milliseconds(name: str, text: str) -> int:
    """A time such as `500ms`, `30s`, `15m`, `2h`; without a unit, milliseconds as in Spark."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise invalid_option(name, text, "give a time such as 500ms, 30s, 15m or 2h")
    return int(found[1]) * _TIME_UNITS_MS[(found[2] or "ms").lower()]


def to_offsets(name: str, text: str) -> int | dict[TopicPartition, int]:
    """`earliest`, `latest` (as -2 and -1), or JSON such as `{"flights": {"0": 23, "1": -2}}`."""
    word = OFFSET_WORDS.get(text.strip().lower())
    if word is not None:
        return word
    wanted = 'give earliest, latest, or JSON such as {"topic": {"0": 23, "1": -2}} (-2: earliest, -1: latest)'
    return _per_partition(name, text, EARLIEST, wanted)


def to_timestamps(name: str, text: str) -> dict[TopicPartition, int]:
    """JSON such as `{"flights": {"0": 1700000000000}}`: milliseconds since the epoch."""
    wanted = 'give JSON such as {"topic": {"0": 1700000000000}}, in milliseconds since the epoch'
    return _per_partition(name, text, 0, wanted)


def to_assignment(name: str, text: str) -> tuple[TopicPartition, ...]:
    """JSON such as `{"flights": [0, 1]}`."""
    wanted = 'give JSON such as {"topic": [0, 1]}'
    found: set[TopicPartition] = set()
    for topic, partitions in _object(name, text, wanted).items():
        if not isinstance(partitions, list) or not all(_is_index(partition) for partition in partitions):
            raise invalid_option(name, text, wanted)
        found.update(TopicPartition(topic, partition) for partition in partitions)
    if not found:
        raise invalid_option(name, text, wanted)
    return tuple(sorted(found))


def to_texts(name: str, text: str) -> dict[str, str]:
    """JSON of texts by topic, such as `{"flights": "5f0c..."}`."""
    wanted = 'give JSON such as {"topic": "text"}'
    found = _object(name, text, wanted)
    if not all(isinstance(value, str) for value in found.values()):
        raise invalid_option(name, text, wanted)
    return found


def to_names(name: str, text: str) -> tuple[str, ...]:
    """Names separated by commas; at least one, no duplicates."""
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise invalid_option(name, text, "give names with commas between them, each once")
    return tuple(names)


def to_pattern(name: str, text: str) -> str:
    """A regular expression that Python's `re` accepts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", FutureWarning
            )  # `[[`, `--` and the like are set operations in Java, but not in Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise invalid_option(name, text, f"not a regular expression: {error}") from None
    return text


def _per_partition(name: str, text: str, lowest: int, wanted: str) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, partitions in _object(name, text, wanted).items():
        if not isinstance(partitions, dict):
            raise invalid_option(name, text, wanted)
        for index, value in partitions.items():
            if (
                not index.isascii()
                or not index.isdigit()
                or type(value) is not int
                or not lowest <= value <= NUMBER_MAX
            ):
                raise invalid_option(name, text, wanted)
            found[TopicPartition(topic, int(index))] = value
    return found


def _object(name: str, text: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid_option(name, text, wanted) from None
    if not isinstance(found, dict):
        raise invalid_option(name, text, wanted)
    return found


def _is_index(value: object) -> bool:
    return type(value) is int and value >= 0
