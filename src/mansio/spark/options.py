"""Options of readers and writers of `format("mansio")`: names, defaults and validation.

The names are those of Spark's Kafka source, so a query written for one source works with the other. An option
`kafka.*` is used if Mansio has the same setting, rejected if ignoring it would change the query, and otherwise ignored.
Option names are not case-sensitive, because Spark passes them in any case.

Invariants:
* Exactly one of `subscribe`, `subscribePattern` and `assign` is given.
* An unknown option is rejected, unless its name begins with `kafka.`: a misspelled name would otherwise be ignored.
* Parsed options are frozen and can be pickled.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConfigError
from mansio.net.addresses import parse_addresses
from mansio.net.security_settings import SecuritySettings
from mansio.schemas.formats import FORMATS, ColumnFormat
from mansio.serde.http_registry import RegistryCredentials, checked_url
from mansio.spark.arrow.schema import select_columns
from mansio.spark.security_options import (
    CREATE_TOKEN_OPTION,
    KAFKA_OPTIONS,
    REFUSED_OPTIONS,
    SECURITY_OPTIONS,
    parse_security,
)
from mansio.state.share_partition.types import LEASE_MS_MAX
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

BOOTSTRAP_SERVERS_OPTION: Final = "kafka.bootstrap.servers"
SUBSCRIPTION_OPTIONS: Final = ("subscribe", "subscribePattern", "assign")

SOURCE_OPTION_NAMES: Final = (
    BOOTSTRAP_SERVERS_OPTION,
    *SUBSCRIPTION_OPTIONS,
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
    "stopAtLatest",
    "alignedInputs",
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
    "asTable",
    "deliveries",
    "shareGroup",
    "recordsPerTask",
    "maxRecordsPerTrigger",
    "leaseDuration",
    "onLeaseLost",
    "leasedBatch",
    "recordStates",
    "warehouse",
    "catalog",
    "schemaRegistry",
    "keyFormat",
    "keySchema",
    "keyMessage",
    "keySubject",
    "valueFormat",
    "valueSchema",
    "valueMessage",
    "valueSubject",
    *SECURITY_OPTIONS,
)
"""All options of a reader."""

SINK_OPTION_NAMES: Final = (
    BOOTSTRAP_SERVERS_OPTION,
    "topic",
    "acks",
    "compression",
    "batchBytes",
    "includeHeaders",
    "exactlyOnce",
    "transactionTimeout",
    "queryId",
    "batchId",
    "traceparent",
    *SECURITY_OPTIONS,
)
"""All options of a writer. `includeHeaders` has no effect, because a column `headers` is always written; the option is
accepted for programs that were written for Spark's Kafka sink.
"""

IGNORED_OPTION_NAMES: Final = (
    "path",
    "checkpointLocation",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
)
"""Options without effect: those that Spark itself uses, and those that tune Spark's Kafka source."""

KAFKA_OPTION_ALIASES: Final = {
    "kafka.isolation.level": "isolation.level",
    "kafka.acks": "acks",
    "kafka.compression.type": "compression",
}
"""The option of Mansio for an option of Kafka's clients."""

UNSUPPORTED_KAFKA_OPTIONS: Final = {
    "kafka.group.id": "a query's offsets live in its checkpoint; option pipeline names a group that shows them",
    "kafka.auto.offset.reset": "use startingOffsets",
    "kafka.key.deserializer": "use option keyFormat, or decode keys with mansio.spark.functions",
    "kafka.value.deserializer": "use option valueFormat, or decode values with mansio.spark.functions",
    "kafka.key.serializer": "keys are written as they are; encode them with mansio.spark.functions",
    "kafka.value.serializer": "values are written as they are; encode them with mansio.spark.functions",
    "kafka.enable.auto.commit": "a query's offsets live in its checkpoint",
    "kafka.interceptor.classes": "the data source has no interceptors",
    "kafka.transactional.id": "the sink names its transactions itself; see option exactlyOnce",
    **REFUSED_OPTIONS,
}
"""Rejected options, with the reason or the alternative."""
UNSUPPORTED_KAFKA_PREFIXES: Final = ("kafka.ssl.", "kafka.sasl.")
"""Options for TLS and log-ins, which are rejected unless they are supported: without them the connection is another."""

ON_UNREADABLE_SUSPEND: Final = "suspend"
ON_UNREADABLE_SKIP: Final = "skip"
ON_UNREADABLE_DEAD_LETTER: Final = "dead-letter"
ON_UNREADABLE_HINT: Final = (
    "Set onUnreadable to skip (--option onUnreadable=skip) to continue without them, or to dead-letter to get them as"
    " rows with an error"
)
"""The remedy in the error for unreadable records. `mansio pipeline run` has options of the reader as `--option`."""
ON_UNREADABLE_MODES: Final = (ON_UNREADABLE_SUSPEND, ON_UNREADABLE_SKIP, ON_UNREADABLE_DEAD_LETTER)
ERROR_COLUMN: Final = "error"
"""Last column of a reader with `onUnreadable=dead-letter`: null for a record, the reason for an unreadable record."""

DECODED_COLUMNS: Final = {"decoded_key": "key", "decoded_value": "value"}
"""Columns of decoded keys and values, which exist with the options `keyFormat` and `valueFormat`: the column that each
is decoded from.
"""

LEASE_COLUMNS: Final = {"delivery_count": "int", "lease": "string"}
"""Last columns of a reader with `shareGroup`, and their Spark types: the number of the delivery of the record, and the
member that has leased it.
"""

SHARE_GROUP_OPTION: Final = "shareGroup"
ON_LEASE_LOST_FAIL: Final = "fail"
ON_LEASE_LOST_REPROCESS: Final = "reprocess"
DEFAULT_LEASE_MS: Final = 60 * 60_000
LEASE_MS_MIN: Final = 10_000
DEFAULT_LEASED_RECORDS_PER_TRIGGER: Final = 200_000

DEFAULT_FETCH_BYTES: Final = 4 << 20
DEFAULT_ROWS_PER_BATCH: Final = 65_536
DEFAULT_BATCH_BYTES: Final = 64 << 20
DEFAULT_TRIGGER_DELAY_MS_MAX: Final = 15 * 60_000
DEFAULT_SINK_BATCH_BYTES: Final = 1_000_000
DEFAULT_TRANSACTION_TIMEOUT_MS: Final = 15 * 60_000
NO_BATCH_ID: Final = -1
"""Batch id of a write that is not a streaming query."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a reader reads: named topics, topics that match a pattern, or partitions. Exactly one attribute is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class OffsetSpec:
    """Where a read starts or ends in each partition.

    `timestamp_ms` has precedence over `timestamps_ms`, and `timestamps_ms` over `offsets`.
    """

    timestamp_ms: int | None = None
    """The first record with at least this timestamp, in every partition."""
    timestamps_ms: dict[TopicPartition, int] | None = None
    """The first record with at least the timestamp of its partition."""
    offsets: int | dict[TopicPartition, int] = EARLIEST_TIMESTAMP
    """`EARLIEST_TIMESTAMP` or `LATEST_TIMESTAMP` for all partitions, or for each partition one of them or an offset."""
    uses_latest_without_match: bool = False
    """Whether a partition without a record of that timestamp resolves to its end offset; if false, this is an error."""


class AlignedInputs(NamedTuple):
    """The inputs of a query that advance together in time: the number of this one, and the options of all of them that
    determine which records they read. `maxOffsetsPerTrigger` is then the limit of all together.
    """

    own: int
    inputs: tuple[SourceOptions, ...]


class DecodedColumn(NamedTuple):
    """A column of decoded keys or values: its name, the format, and its type (None: the type of the schemas).

    `is_fixed`: the columns of the query are planned, so its type does not change; see `schemas.formats`.
    """

    name: str
    format: ColumnFormat
    type: pa.DataType | None = None
    is_fixed: bool = False


class ShareOptions(NamedTuple):
    """A share group as the source of a stream."""

    group: str
    records_per_task: int | None = None
    """Maximum number of records of a task; None: the records of a batch are divided into 32 tasks."""
    records_per_trigger: int = DEFAULT_LEASED_RECORDS_PER_TRIGGER
    lease_ms: int = DEFAULT_LEASE_MS
    """Duration of the leases of a batch, which the driver renews while the batch runs."""
    on_lease_lost: str = ON_LEASE_LOST_FAIL
    leased_batch: str = ""
    """Leased ranges that a batch read has, as the offset of a stream; empty for a stream."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of a reader. A limit that is None does not apply."""

    bootstrap_servers: str
    subscription: Subscription
    starting_offsets: OffsetSpec
    ending_offsets: OffsetSpec
    columns: tuple[str, ...]
    fail_on_data_loss: bool = True
    partitions_min: int | None = None
    records_per_partition_max: int | None = None
    offsets_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_ms_max: int = DEFAULT_TRIGGER_DELAY_MS_MAX
    stops_at_latest: bool = False
    """Whether a stream ends at the end offsets that exist when it plans its first batch."""
    aligned: AlignedInputs | None = None
    isolation_level: int = READ_COMMITTED
    fetch_bytes: int = DEFAULT_FETCH_BYTES
    rows_per_batch: int = DEFAULT_ROWS_PER_BATCH
    batch_bytes: int = DEFAULT_BATCH_BYTES
    pipeline: str = ""
    on_unreadable: str = ON_UNREADABLE_SUSPEND
    topic_ids: dict[str, str] = field(default_factory=dict)
    """Required topic id (hexadecimal) of each topic: a query that resumes must not read a recreated topic."""
    decoded: tuple[DecodedColumn, ...] = ()
    is_table: bool = False
    """Whether a batch read has the whole topic as of the time at which its tasks run."""
    share: ShareOptions | None = None
    states_of: str = ""
    """Share group whose states of records a batch read has instead of the records; empty for none."""
    is_deliveries: bool = False
    """Whether a batch read has the deliveries of the topic's records instead of the records."""
    warehouse: str = ""
    """Warehouse of the topic's archive: archived records are read from it, the others from the log."""
    catalog: str | None = None
    security: SecuritySettings = field(default_factory=SecuritySettings)
    creates_token: bool | None = None
    """Whether tasks log in with a delegation token that the driver gets; None: if it can get one."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool = False) -> SourceOptions:
        """Parse the options of a reader. Raises `ConfigError` with the invalid option and the remedy."""
        raw = _RawOptions(options, SOURCE_OPTION_NAMES)
        if streaming:
            for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
                if raw.text(name) is not None:
                    raise ConfigError(
                        f"option {name} is for batch reads; a stream has no end: leave it out, or set"
                        " stopAtLatest"
                    )
        parsed = cls(
            bootstrap_servers=raw.bootstrap_servers(),
            subscription=_subscription(raw),
            starting_offsets=_starting_offsets(raw, streaming=streaming),
            ending_offsets=_ending_offsets(raw),
            columns=_columns(raw),
            fail_on_data_loss=raw.flag("failOnDataLoss", default=True),
            partitions_min=raw.count("minPartitions"),
            records_per_partition_max=raw.count("maxRecordsPerPartition"),
            offsets_per_trigger_max=raw.count("maxOffsetsPerTrigger"),
            offsets_per_trigger_min=raw.count("minOffsetsPerTrigger"),
            trigger_delay_ms_max=raw.milliseconds("maxTriggerDelay", DEFAULT_TRIGGER_DELAY_MS_MAX),
            stops_at_latest=raw.flag("stopAtLatest"),
            aligned=parse_aligned_inputs(text) if (text := raw.text("alignedInputs")) else None,
            isolation_level=_isolation_level(raw),
            fetch_bytes=raw.bytes("fetchBytes", DEFAULT_FETCH_BYTES, 1 << 10, 256 << 20),
            rows_per_batch=raw.count("rowsPerBatch") or DEFAULT_ROWS_PER_BATCH,
            batch_bytes=raw.bytes("batchBytes", DEFAULT_BATCH_BYTES, 1 << 16, 1 << 30),
            pipeline=(raw.text("pipeline") or "").strip(),
            on_unreadable=raw.choice("onUnreadable", ON_UNREADABLE_MODES),
            topic_ids=parse_topic_texts("topicIds", text) if (text := raw.text("topicIds")) else {},
            decoded=_decoded_columns(raw),
            is_table=raw.flag("asTable"),
            share=_share_options(raw, streaming=streaming),
            states_of=(raw.text(RECORD_STATES_OPTION) or "").strip(),
            is_deliveries=raw.flag(DELIVERIES_OPTION),
            warehouse=(raw.text("warehouse") or "").strip(),
            catalog=raw.text("catalog"),
            security=raw.security(),
            creates_token=raw.optional_flag(CREATE_TOKEN_OPTION),
        )
        _check_table_options(raw, parsed, streaming=streaming)
        _check_delivery_options(raw, parsed, streaming=streaming)
        _check_states_options(raw, parsed, streaming=streaming)
        if parsed.aligned is not None and parsed.offsets_per_trigger_max is None:
            raise ConfigError(
                "option alignedInputs needs option maxOffsetsPerTrigger, the limit of all inputs"
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
    """Topic of all rows. None: each row goes to the topic in its column `topic`."""
    acks: int = -1
    compression: str = "none"
    batch_bytes: int = DEFAULT_SINK_BATCH_BYTES
    exactly_once: bool = True
    """Whether the tasks write in transactions that are committed together. Needs acks=all."""
    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS
    """Time in which a task must have written its rows; later its transaction is aborted."""
    query_id: str = ""
    """Identity of the writes of a program, in `foreachBatch`: with it, a batch id is written once."""
    batch_id: int = NO_BATCH_ID
    security: SecuritySettings = field(default_factory=SecuritySettings)
    creates_token: bool | None = None
    """Whether tasks log in with a delegation token that the driver gets; None: if it can get one."""
    traceparent: str | None = None
    """Header with the trace context of the write, for rows that have none of their own."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse the options of a writer. Raises `ConfigError` with the invalid option and the remedy."""
        raw = _RawOptions(options, SINK_OPTION_NAMES)
        topic = (raw.text("topic") or "").strip()
        acks = raw.choice("acks", ("all", "-1", "1", "0"))
        exactly_once = raw.flag("exactlyOnce", default=acks in ("all", "-1"))
        if exactly_once and acks not in ("all", "-1"):
            raise ConfigError(
                f"option acks is {acks}: exactlyOnce needs acks=all, or set exactlyOnce to false"
            )
        query_id, batch_id = (raw.text("queryId") or "").strip(), raw.text("batchId")
        if query_id and batch_id is None:
            raise ConfigError("option queryId needs option batchId: the number of the batch within the query")
        if not _QUERY_ID_PATTERN.fullmatch(query_id):
            raise ConfigError("option queryId has letters, digits and the characters ._- only, at most 200")
        traceparent = raw.text("traceparent")
        if traceparent is not None and not _TRACEPARENT_PATTERN.fullmatch(traceparent):
            raise ConfigError("option traceparent is no trace context as W3C defines it: 00-TRACE-SPAN-FLAGS")
        return cls(
            bootstrap_servers=raw.bootstrap_servers(),
            topic=topic or None,
            acks=-1 if acks == "all" else int(acks),
            compression=raw.choice("compression", ("none", "gzip", "snappy", "lz4", "zstd")),
            batch_bytes=raw.bytes("batchBytes", DEFAULT_SINK_BATCH_BYTES, 1 << 10, 64 << 20),
            exactly_once=exactly_once,
            transaction_timeout_ms=raw.milliseconds("transactionTimeout", DEFAULT_TRANSACTION_TIMEOUT_MS),
            query_id=query_id,
            batch_id=NO_BATCH_ID if batch_id is None else parse_count("batchId", batch_id, lowest=0),
            security=raw.security(),
            creates_token=raw.optional_flag(CREATE_TOKEN_OPTION),
            traceparent=traceparent,
        )


class _RawOptions:
    """Texts of options by lower-case name. The constructor rejects unknown names; the methods parse a value."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        known = {name.lower(): name for name in (*names, *IGNORED_OPTION_NAMES)}
        self._texts: dict[str, str] = {}
        for name, text in options.items():
            lower = name.lower()
            if lower in KAFKA_OPTION_ALIASES:
                self._texts.setdefault(KAFKA_OPTION_ALIASES[lower].lower(), text)
            elif lower in known:
                self._texts[lower] = text
            elif lower in UNSUPPORTED_KAFKA_OPTIONS or lower.startswith(UNSUPPORTED_KAFKA_PREFIXES):
                _raise_unsupported(lower)
            elif not lower.startswith("kafka."):
                closest = difflib.get_close_matches(lower, known, n=1)
                others = ", ".join(one for one in names if one not in KAFKA_OPTIONS)
                hint = f"did you mean {known[closest[0]]}?" if closest else f"there are {others}"
                raise ConfigError(f"there is no option {name!r}: {hint}")

    def text(self, name: str) -> str | None:
        return self._texts.get(name.lower())

    def bootstrap_servers(self) -> str:
        text = self.text(BOOTSTRAP_SERVERS_OPTION)
        if text is None:
            raise ConfigError(
                "option kafka.bootstrap.servers is missing: give the address of a broker as host:port"
            )
        parse_addresses(text)
        return text

    def security(self) -> SecuritySettings:
        return parse_security(self.text, self.bootstrap_servers())

    def flag(self, name: str, *, default: bool = False) -> bool:
        text = self.text(name)
        return default if text is None else parse_flag(name, text)

    def optional_flag(self, name: str) -> bool | None:
        text = self.text(name)
        return None if text is None else parse_flag(name, text)

    def count(self, name: str) -> int | None:
        text = self.text(name)
        return None if text is None else parse_count(name, text)

    def milliseconds(self, name: str, default: int) -> int:
        text = self.text(name)
        return default if text is None else parse_duration_ms(name, text)

    def bytes(self, name: str, default: int, lowest: int, highest: int) -> int:
        text = self.text(name)
        return default if text is None else parse_byte_size(name, text, lowest, highest)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return the value of an option that must be one of `choices`; the first of them is the default."""
        text = self.text(name)
        return choices[0] if text is None else parse_choice(name, text, choices)


def _raise_unsupported(name: str) -> None:
    reason = UNSUPPORTED_KAFKA_OPTIONS.get(name)
    if reason is None:
        reason = f"there are {', '.join(one for one in KAFKA_OPTIONS if one.startswith(name[:9]))}"
    raise ConfigError(f"option {name} is not supported: {reason}")


def _subscription(raw: _RawOptions) -> Subscription:
    named = [name for name in SUBSCRIPTION_OPTIONS if raw.text(name) is not None]
    if len(named) != 1:
        found = f"there are {' and '.join(named)}" if named else "there is none"
        raise ConfigError(f"give exactly one of subscribe, subscribePattern and assign: {found}")
    name = named[0]
    text = raw.text(name) or ""
    if name == "subscribe":
        return Subscription(topics=tuple(sorted(parse_names(name, text))))
    if name == "subscribePattern":
        return Subscription(pattern=parse_pattern(name, text))
    return Subscription(partitions=parse_assignment(name, text))


def _starting_offsets(raw: _RawOptions, *, streaming: bool) -> OffsetSpec:
    offsets = _offsets(raw, "startingOffsets", LATEST_TIMESTAMP if streaming else EARLIEST_TIMESTAMP)
    if not streaming and (
        offsets == LATEST_TIMESTAMP or (isinstance(offsets, dict) and LATEST_TIMESTAMP in offsets.values())
    ):
        raise ConfigError(
            "option startingOffsets is latest (or -1): a batch read that begins there has no records"
        )
    strategy = raw.choice("startingOffsetsByTimestampStrategy", ("error", "latest"))
    return _offset_spec(raw, "starting", offsets, uses_latest_without_match=strategy == "latest")


def _ending_offsets(raw: _RawOptions) -> OffsetSpec:
    offsets = _offsets(raw, "endingOffsets", LATEST_TIMESTAMP)
    if offsets == EARLIEST_TIMESTAMP or (
        isinstance(offsets, dict) and EARLIEST_TIMESTAMP in offsets.values()
    ):
        raise ConfigError(
            "option endingOffsets is earliest (or -2): a batch read that ends there has no records"
        )
    return _offset_spec(raw, "ending", offsets, uses_latest_without_match=True)


def _offset_spec(
    raw: _RawOptions, side: str, offsets: int | dict[TopicPartition, int], *, uses_latest_without_match: bool
) -> OffsetSpec:
    timestamp = raw.text(f"{side}Timestamp")
    by_partition = raw.text(f"{side}OffsetsByTimestamp")
    return OffsetSpec(
        timestamp_ms=None if timestamp is None else parse_count(f"{side}Timestamp", timestamp, lowest=0),
        timestamps_ms=(
            None
            if by_partition is None
            else parse_partition_timestamps(f"{side}OffsetsByTimestamp", by_partition)
        ),
        offsets=offsets,
        uses_latest_without_match=uses_latest_without_match,
    )


def _offsets(raw: _RawOptions, name: str, default: int) -> int | dict[TopicPartition, int]:
    text = raw.text(name)
    return default if text is None else parse_partition_offsets(name, text)


def selected_columns(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that the options of a reader select, including `error`. Other options are not checked."""
    raw = _RawOptions(options, SOURCE_OPTION_NAMES)
    is_dead_letter = raw.choice("onUnreadable", ON_UNREADABLE_MODES) == ON_UNREADABLE_DEAD_LETTER
    names = _columns(raw) if raw.text(SHARE_GROUP_OPTION) is None else (*_columns(raw), *LEASE_COLUMNS)
    return (*names, ERROR_COLUMN) if is_dead_letter else names


NOT_SHARED_OPTIONS: Final = (
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "alignedInputs",
    "isolation.level",
    "pipeline",
    "asTable",
    "deliveries",
    "warehouse",
    "catalog",
)
"""Options that have no meaning for a share group: it determines itself which records are delivered."""

SHARE_OPTIONS: Final = (
    "recordsPerTask",
    "maxRecordsPerTrigger",
    "leaseDuration",
    "onLeaseLost",
    "leasedBatch",
)


def _share_options(raw: _RawOptions, *, streaming: bool) -> ShareOptions | None:
    """Return the options of a share group; None without the option `shareGroup`."""
    group = raw.text(SHARE_GROUP_OPTION)
    if group is None:
        for name in SHARE_OPTIONS:
            if raw.text(name) is not None:
                raise ConfigError(f"option {name} needs option shareGroup")
        return None
    leased_batch = raw.text("leasedBatch") or ""
    if not streaming and not leased_batch:
        raise ConfigError(
            "option shareGroup is for readStream: a batch read has no commit, and Spark may read it again. For one-off"
            " work use mansio.spark.lease"
        )
    if not group.strip():
        raise ConfigError("option shareGroup is empty: name a share group")
    for name in NOT_SHARED_OPTIONS:
        if raw.text(name) is not None:
            raise ConfigError(
                f"option {name} has no meaning with shareGroup: the group determines which records are delivered; leave"
                " it out, or set it for the group with mansio group alter"
            )
    lease_ms = raw.milliseconds("leaseDuration", DEFAULT_LEASE_MS)
    if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
        raise ConfigError(
            f"option leaseDuration is {lease_ms} ms: give a duration from {LEASE_MS_MIN // 1000}s to 12h"
        )
    return ShareOptions(
        group.strip(),
        raw.count("recordsPerTask"),
        raw.count("maxRecordsPerTrigger") or DEFAULT_LEASED_RECORDS_PER_TRIGGER,
        lease_ms,
        raw.choice("onLeaseLost", (ON_LEASE_LOST_FAIL, ON_LEASE_LOST_REPROCESS)),
        leased_batch,
    )


def _columns(raw: _RawOptions) -> tuple[str, ...]:
    """Return the selected columns. Decoded columns follow the others unless `columns` names them."""
    text = raw.text("columns")
    known = [name for name, side in DECODED_COLUMNS.items() if raw.text(f"{side}Format") is not None]
    if text is None:
        return (*select_columns(None, raw.flag("includeHeaders")), *known)
    names = parse_names("columns", text)
    for name in names:
        if name in DECODED_COLUMNS and name not in known:
            raise ConfigError(f"column {name} needs option {DECODED_COLUMNS[name]}Format")
    others = [name for name in names if name not in known]
    if not others:
        return (*names, "headers") if raw.flag("includeHeaders") else names
    selected = select_columns(others, raw.flag("includeHeaders"))
    return (*names, *(name for name in selected if name not in names))


AS_TABLE_EXCLUDED: Final = (
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "minPartitions",
    "maxRecordsPerPartition",
    "topicIds",
)
"""Options that cannot be used with `asTable`."""


def _check_table_options(raw: _RawOptions, options: SourceOptions, *, streaming: bool) -> None:
    if not options.is_table:
        for name in ("warehouse", "catalog"):
            if raw.text(name):
                raise ConfigError(f"option {name} needs option asTable=true")
        return
    if streaming:
        raise ConfigError("option asTable is for batch reads; a stream reads the log: leave it out")
    if options.catalog and not options.warehouse:
        raise ConfigError("option catalog needs option warehouse")
    if len(options.subscription.topics) != 1:
        raise ConfigError("option asTable needs option subscribe with a single topic")
    if options.on_unreadable == ON_UNREADABLE_DEAD_LETTER:
        raise ConfigError(
            "option onUnreadable cannot be dead-letter with asTable: what is archived was readable; use skip"
        )
    for name in AS_TABLE_EXCLUDED:
        if raw.text(name) is not None:
            raise ConfigError(f"option {name} cannot be used with asTable, which reads the whole topic")


DELIVERIES_OPTION: Final = "deliveries"

RECORD_OPTIONS: Final = (
    "columns",
    "includeHeaders",
    "asTable",
    "warehouse",
    "catalog",
    "onUnreadable",
    "isolation.level",
    "kafka.isolation.level",
    "maxRecordsPerPartition",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "schemaRegistry",
    *(f"{side}{part}" for side in ("key", "value") for part in ("Format", "Schema", "Message", "Subject")),
)
"""Options that concern the content of records, and cannot be used with `deliveries`."""


def is_record_option(name: str) -> bool:
    """Whether an option, in any case, cannot be used with `deliveries`."""
    return name.lower() in {one.lower() for one in RECORD_OPTIONS}


def reads_deliveries(options: Mapping[str, str]) -> bool:
    """Whether the options of a reader select deliveries instead of records. Other options are not checked."""
    return _RawOptions(options, SOURCE_OPTION_NAMES).flag(DELIVERIES_OPTION)


RECORD_STATES_OPTION: Final = "recordStates"


def reads_states(options: Mapping[str, str]) -> bool:
    """Whether the options of a reader select the states of records instead of records. Other options are not
    checked."""
    return bool(_RawOptions(options, SOURCE_OPTION_NAMES).text(RECORD_STATES_OPTION))


def _check_states_options(raw: _RawOptions, options: SourceOptions, *, streaming: bool) -> None:
    if not options.states_of:
        return
    if streaming:
        raise ConfigError("option recordStates is for batch reads: leave it out")
    for name in (*RECORD_OPTIONS, SHARE_GROUP_OPTION, DELIVERIES_OPTION, "asTable"):
        if raw.text(name) is not None:
            raise ConfigError(f"option {name} cannot be used with recordStates, which has no records")


def _check_delivery_options(raw: _RawOptions, options: SourceOptions, *, streaming: bool) -> None:
    if not options.is_deliveries:
        return
    if streaming:
        raise ConfigError("option deliveries is for batch reads: leave it out")
    topics = {*options.subscription.topics, *(one.topic for one in options.subscription.partitions)}
    if len(topics) != 1:
        raise ConfigError("option deliveries needs option subscribe or assign with a single topic")
    for name in RECORD_OPTIONS:
        if raw.text(name) is not None:
            raise ConfigError(f"option {name} cannot be used with deliveries, which has no records")


def decoded_columns(options: Mapping[str, str]) -> tuple[DecodedColumn, ...]:
    """Return the decoded columns that the options of a reader define. Other options are not checked."""
    return _decoded_columns(_RawOptions(options, SOURCE_OPTION_NAMES))


def _decoded_columns(raw: _RawOptions) -> tuple[DecodedColumn, ...]:
    address = raw.text("schemaRegistry")
    registry = checked_url(address) if address else ""
    found = []
    for name, side in DECODED_COLUMNS.items():
        if raw.text(f"{side}Format") is None:
            given = [one for one in ("Schema", "Message", "Subject") if raw.text(f"{side}{one}") is not None]
            if given:
                raise ConfigError(
                    f"option {side}{given[0]} needs option {side}Format: {' or '.join(FORMATS)}"
                )
            continue
        column = ColumnFormat(
            format=raw.choice(f"{side}Format", FORMATS),
            schema=raw.text(f"{side}Schema") or "",
            message=raw.text(f"{side}Message") or "",
            registry=registry,
            subject=_subject(raw, side) if registry else "",
            credentials=RegistryCredentials.from_environment() if registry else None,
        )
        column.check()
        found.append(DecodedColumn(name, column))
    if registry and not found:
        raise ConfigError(
            f"option schemaRegistry needs option valueFormat or keyFormat: {' or '.join(FORMATS)}"
        )
    return tuple(found)


def _subject(raw: _RawOptions, side: str) -> str:
    """Return the subject of keys or values; by default that of the only topic (Confluent's TopicNameStrategy)."""
    given = raw.text(f"{side}Subject")
    if given:
        return given
    subscription = _subscription(raw)
    topics = {*subscription.topics, *(one.topic for one in subscription.partitions)}
    if len(topics) != 1:
        raise ConfigError(f"option {side}Subject is missing: it is known by default for a single topic only")
    return f"{topics.pop()}-{side}"


def _isolation_level(raw: _RawOptions) -> int:
    word = raw.choice("isolation.level", ("read_committed", "read_uncommitted"))
    return READ_COMMITTED if word == "read_committed" else READ_UNCOMMITTED


# -- option values --------


SHOWN_VALUE_CHARACTERS_MAX: Final = 120
"""Maximum number of characters of an invalid value that the error shows."""

INT64_MAX: Final = (1 << 63) - 1
"""Maximum of an offset and of a timestamp: both have 64 bits in Kafka's protocol."""

NAMED_OFFSETS: Final = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP}

_QUERY_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{0,200}")
_TRACEPARENT_PATTERN: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_BYTE_SIZE_PATTERN: Final = re.compile(r"(\d{1,15})\s*(?:(k|m|g)i?b?|b)?", re.IGNORECASE)
_BYTE_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION_PATTERN: Final = re.compile(r"(\d{1,12})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_DURATION_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def invalid_option_error(name: str, text: str, expected: str) -> ConfigError:
    """Return the error for an invalid value `text` of the option `name`; `expected` describes the valid values."""
    shown = text if len(text) <= SHOWN_VALUE_CHARACTERS_MAX else text[:SHOWN_VALUE_CHARACTERS_MAX] + "..."
    return ConfigError(f"option {name} is {shown!r}: {expected}")


def parse_flag(name: str, text: str) -> bool:
    """Parse `true` or `false`, in any case."""
    if text.strip().lower() not in ("true", "false"):
        raise invalid_option_error(name, text, "give true or false")
    return text.strip().lower() == "true"


def parse_choice(name: str, text: str, choices: Sequence[str]) -> str:
    """Parse one of `choices`, in any case."""
    word = text.strip().lower()
    if word not in choices:
        raise invalid_option_error(name, text, f"give {' or '.join(choices)}")
    return word


def parse_count(name: str, text: str, lowest: int = 1) -> int:
    """Parse an integer of at least `lowest`."""
    try:
        number = int(text.strip())
    except ValueError:
        raise invalid_option_error(name, text, f"give a whole number of at least {lowest}") from None
    if not lowest <= number <= INT64_MAX:
        raise invalid_option_error(name, text, f"give a whole number of at least {lowest}")
    return number


def parse_byte_size(name: str, text: str, lowest: int, highest: int) -> int:
    """Parse a size such as `4194304`, `4096k` or `4MB` to bytes. Units are powers of 1,024."""
    found = _BYTE_SIZE_PATTERN.fullmatch(text.strip())
    size = int(found[1]) * _BYTE_SIZE_UNITS[(found[2] or "").lower()] if found else -1
    if not lowest <= size <= highest:
        raise invalid_option_error(name, text, f"give a size such as 4MB, from {lowest} to {highest} bytes")
    return size


def parse_duration_ms(name: str, text: str) -> int:
    """Parse a duration such as `500ms`, `30s`, `15m` or `2h`; a number without a unit is milliseconds, as in Spark."""
    found = _DURATION_PATTERN.fullmatch(text.strip())
    if found is None:
        raise invalid_option_error(name, text, "give a time such as 500ms, 30s, 15m or 2h")
    return int(found[1]) * _DURATION_UNITS_MS[(found[2] or "ms").lower()]


def parse_partition_offsets(name: str, text: str) -> int | dict[TopicPartition, int]:
    """Parse `earliest` (-2), `latest` (-1), or JSON by topic and partition: `{"flights": {"0": 23, "1": -2}}`."""
    word = NAMED_OFFSETS.get(text.strip().lower())
    if word is not None:
        return word
    expected = (
        'give earliest, latest, or JSON such as {"topic": {"0": 23, "1": -2}} (-2: earliest, -1: latest)'
    )
    return _parse_per_partition(name, text, EARLIEST_TIMESTAMP, expected)


def parse_partition_timestamps(name: str, text: str) -> dict[TopicPartition, int]:
    """Parse JSON such as `{"flights": {"0": 1700000000000}}`, in milliseconds since the epoch."""
    expected = 'give JSON such as {"topic": {"0": 1700000000000}}, in milliseconds since the epoch'
    return _parse_per_partition(name, text, 0, expected)


def parse_assignment(name: str, text: str) -> tuple[TopicPartition, ...]:
    """Parse the partitions to read from JSON such as `{"flights": [0, 1]}`."""
    expected = 'give JSON such as {"topic": [0, 1]}'
    found: set[TopicPartition] = set()
    for topic, partitions in _parse_json_object(name, text, expected).items():
        if not isinstance(partitions, list) or not all(
            _is_partition_index(partition) for partition in partitions
        ):
            raise invalid_option_error(name, text, expected)
        found.update(TopicPartition(topic, partition) for partition in partitions)
    if not found:
        raise invalid_option_error(name, text, expected)
    return tuple(sorted(found))


def parse_topic_texts(name: str, text: str) -> dict[str, str]:
    """Parse JSON with one text for each topic, such as `{"flights": "5f0c..."}`."""
    expected = 'give JSON such as {"topic": "text"}'
    found = _parse_json_object(name, text, expected)
    if not all(isinstance(value, str) for value in found.values()):
        raise invalid_option_error(name, text, expected)
    return found


def format_aligned_inputs(own: int, inputs: Sequence[Mapping[str, str]]) -> str:
    """Return the option `alignedInputs` of the input with the number `own`, of a query with inputs that have these
    options.
    """
    shared = [{name: text for name, text in one.items() if _is_shared_option(name.lower())} for one in inputs]
    return json.dumps({"own": own, "inputs": shared})


def _is_shared_option(name: str) -> bool:
    """Whether an option of an input, in lower case, determines which records it reads."""
    names = (BOOTSTRAP_SERVERS_OPTION, *SUBSCRIPTION_OPTIONS, "isolation.level", "kafka.isolation.level")
    return name.startswith("starting") or name in {one.lower() for one in names}


def parse_aligned_inputs(text: str) -> AlignedInputs:
    """Decode the result of `format_aligned_inputs`."""
    expected = 'give JSON such as {"own": 0, "inputs": [{"subscribe": "topic"}, {"subscribe": "other"}]}'
    found = _parse_json_object("alignedInputs", text, expected)
    own, inputs = found.get("own"), found.get("inputs")
    if (
        not isinstance(inputs, list)
        or not all(isinstance(one, dict) for one in inputs)
        or not all(isinstance(value, str) for one in inputs for value in one.values())
        or type(own) is not int
        or not 0 <= own < len(inputs)
    ):
        raise invalid_option_error("alignedInputs", text, expected)
    return AlignedInputs(own, tuple(SourceOptions.parse(one, streaming=True) for one in inputs))


def parse_names(name: str, text: str) -> tuple[str, ...]:
    """Parse names separated by commas: at least one, without duplicates."""
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise invalid_option_error(name, text, "give names with commas between them, each once")
    return tuple(names)


def parse_pattern(name: str, text: str) -> str:
    """Check that Python's `re` accepts the regular expression, and return it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", FutureWarning
            )  # `[[`, `--` and the like are set operations in Java, but not in Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise invalid_option_error(name, text, f"not a regular expression: {error}") from None
    return text


def _parse_per_partition(name: str, text: str, lowest: int, expected: str) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, partitions in _parse_json_object(name, text, expected).items():
        if not isinstance(partitions, dict):
            raise invalid_option_error(name, text, expected)
        for index, value in partitions.items():
            if (
                not index.isascii()
                or not index.isdigit()
                or type(value) is not int
                or not lowest <= value <= INT64_MAX
            ):
                raise invalid_option_error(name, text, expected)
            found[TopicPartition(topic, int(index))] = value
    return found


def _parse_json_object(name: str, text: str, expected: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid_option_error(name, text, expected) from None
    if not isinstance(found, dict):
        raise invalid_option_error(name, text, expected)
    return found


def _is_partition_index(value: object) -> bool:
    return type(value) is int and value >= 0
