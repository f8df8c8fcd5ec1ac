"""Schema check: finds the records of a topic that violate a JSON Schema, with the reason, and quarantines them on
request.

Values are parsed as JSON and validated in Spark's tasks, which return only the invalid records. These are grouped by
violation. With a quarantine topic they are also written to this topic, with reason and origin as headers.

Invariants:
* A record without a value is valid.
* An invalid record is counted once, for the most relevant violation.
* No record content makes the check fail: a record that cannot be validated is reported as invalid.
* A run writes all invalid records to the quarantine topic or none; a repeated run writes its records again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import Draft202012Validator, validator_for
from pyspark import StorageLevel
from pyspark.sql import Observation, functions

from mansio.errors import ConfigError
from mansio.spark.sync_client import UNLIMITED_RETENTION_CONFIG, ensure_topic, find_topic, sync_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

RECORD_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
INVALID_ROW_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>, place string, rule string, reason string"
)
"""Columns of `find_invalid`: the record, the JSON path of the violation (`place`), the violated rule, the reason."""

REASON_HEADER: Final = "mansio-schema-error"
ORIGIN_HEADER: Final = "mansio-schema-origin"
REASON_LENGTH_MAX: Final = 300
VIOLATION_GROUPS_MAX: Final = 50
NOT_JSON_RULE: Final = "json"

_ARRAY_INDEX_PATTERN = re.compile(r"\[\d+\]")
_REQUIRED_MESSAGE_PATTERN = re.compile(r"'(.+)' is a required property", re.DOTALL)


@dataclass(frozen=True, slots=True)
class InvalidGroup:
    """Invalid records with the same violation: the JSON path in the value (`place`), the violated keyword of the schema
    (`rule`), and their number. `partition`, `offset` and `reason` are those of the first record.
    """

    place: str
    rule: str
    records: int
    reason: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check. `groups` are the largest, at most `VIOLATION_GROUPS_MAX`; records `without_value` are
    valid.
    """

    records: int
    without_value: int
    invalid: int
    groups: tuple[InvalidGroup, ...]
    quarantine: str | None


def check_topic(
    spark: SparkSession, topic: str, bootstrap_servers: str, schema: Any, *, quarantine: str | None = None
) -> CheckReport:
    """Validate all current values of a topic, and write invalid records to the topic `quarantine`, if given. A missing
    quarantine topic is created with as many partitions and with unlimited retention: the records keep their timestamps,
    so retention could delete them soon.

    Raises `ConfigError` for an invalid schema, `UnknownTopicOrPartition` for an unknown topic.
    """
    check_schema(schema)
    if quarantine is not None:
        client = sync_client(bootstrap_servers)
        ensure_topic(
            client, quarantine, len(find_topic(client, topic).partitions), UNLIMITED_RETENTION_CONFIG
        )
    reader = (
        spark.read.format("mansio")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
    )
    rows = reader.option("columns", ",".join(RECORD_COLUMNS)).load()
    seen = Observation("seen")
    observed = rows.observe(
        seen,
        functions.count(functions.lit(1)).alias("records"),
        functions.count_if(functions.col("value").isNull()).alias("without_value"),
    )
    invalid = find_invalid(observed, schema).persist(StorageLevel.DISK_ONLY)
    try:
        groups = _groups(invalid)
        if quarantine is not None and groups:
            to_quarantine_rows(invalid).write.format("mansio").option(
                "kafka.bootstrap.servers", bootstrap_servers
            ).option("topic", quarantine).mode("append").save()
        count = invalid.count()
    finally:
        invalid.unpersist()
    return CheckReport(seen.get["records"], seen.get["without_value"], count, groups, quarantine)


def find_invalid(rows: DataFrame, schema: Any) -> DataFrame:
    """Return the rows whose value violates the schema, with the columns of `INVALID_ROW_SCHEMA`. `rows` has
    `RECORD_COLUMNS`.
    """
    check_schema(schema)
    return rows.select(*RECORD_COLUMNS).mapInArrow(
        partial(select_invalid_rows, json.dumps(schema)), INVALID_ROW_SCHEMA
    )


def check_schema(schema: Any) -> None:
    """Check that `schema` is a JSON Schema without references to other documents. Raises `ConfigError`."""
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"this is no JSON Schema: at {error.json_path}: {error.message}") from error
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ConfigError(f"the $ref {reference!r} leads out of the schema, which cannot be followed")


def to_quarantine_rows(invalid: DataFrame) -> DataFrame:
    """Return the rows for the quarantine topic: the invalid records, with reason and origin as additional headers."""
    place = (functions.col(name).cast("string") for name in ("partition", "offset"))
    origin = functions.concat_ws("/", functions.col("topic"), *place)
    more = functions.array(
        *(
            functions.struct(functions.lit(name).alias("key"), functions.encode(text, "UTF-8").alias("value"))
            for name, text in ((REASON_HEADER, functions.col("reason")), (ORIGIN_HEADER, origin))
        )
    )
    own = functions.coalesce(
        functions.col("headers"), functions.array().cast("array<struct<key:string,value:binary>>")
    )
    return invalid.select("key", "value", "timestamp", functions.concat(own, more).alias("headers"))


def _groups(invalid: DataFrame) -> tuple[InvalidGroup, ...]:
    first = functions.min(functions.struct("partition", "offset", "reason"))
    found = invalid.groupBy("place", "rule").agg(
        functions.count(functions.lit(1)).alias("records"), first.alias("first")
    )
    largest = found.orderBy(functions.desc("records"), "place", "rule").limit(VIOLATION_GROUPS_MAX).collect()
    return tuple(
        InvalidGroup(
            row["place"],
            row["rule"],
            row["records"],
            row["first"]["reason"],
            row["first"]["partition"],
            row["first"]["offset"],
        )
        for row in largest
    )


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def select_invalid_rows(schema_text: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Select the invalid rows of the batches and add `place`, `rule` and `reason`. Runs in Spark's tasks."""
    fault_of = ValueValidator(json.loads(schema_text))
    for batch in batches:
        faults = [fault_of(value) for value in batch.column("value").to_pylist()]
        rows = [row for row, fault in enumerate(faults) if fault is not None]
        if not rows:
            continue
        found = batch.take(pa.array(rows, pa.int64()))
        texts = zip(*(fault for fault in faults if fault is not None), strict=True)
        columns = [*found.columns, *(pa.array(text, pa.string()) for text in texts)]
        yield pa.RecordBatch.from_arrays(columns, names=[*RECORD_COLUMNS, "place", "rule", "reason"])


class ValueValidator:
    """Validator of record values. Calling it with a value returns None if the value is valid, otherwise (JSON path,
    violated keyword of the schema or `NOT_JSON_RULE`, reason) of the most relevant violation.
    """

    def __init__(self, schema: Any) -> None:
        self._validator = validator_for(schema, default=Draft202012Validator)(schema)

    def __call__(self, value: bytes | None) -> tuple[str, str, str] | None:
        if value is None:
            return None
        try:
            document = json.loads(value, parse_constant=_raise_invalid_constant)
        except RecursionError:
            return "$", NOT_JSON_RULE, "the value is nested too deep"
        except ValueError as error:  # errors of JSON, UTF-8 and numbers
            return "$", NOT_JSON_RULE, _truncated(f"the value is not JSON: {error}")
        # A record that cannot be validated must not end the job: it is reported as invalid.
        try:
            worst = best_match(self._validator.iter_errors(document))
        except RecursionError:
            return "$", NOT_JSON_RULE, "the value is nested too deep"
        except OverflowError:
            return "$", NOT_JSON_RULE, "the value has a number that is too large"
        if worst is None:
            return None
        place = _ARRAY_INDEX_PATTERN.sub("[*]", worst.json_path)
        if worst.validator == "required" and (missing := _REQUIRED_MESSAGE_PATTERN.match(worst.message)):
            place = f"{place}.{missing[1]}"
        return _truncated(place), str(worst.validator), _truncated(f"{worst.json_path}: {worst.message}")


def _raise_invalid_constant(word: str) -> None:
    """Reject `NaN`, `Infinity` and `-Infinity`, which Python's parser accepts and RFC 8259 does not allow."""
    raise ValueError(f"{word} is no number")


def _truncated(text: str) -> str:
    """Return the text on one line, of at most `REASON_LENGTH_MAX` characters, with lone surrogates of JSON strings
    escaped.
    """
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= REASON_LENGTH_MAX else line[: REASON_LENGTH_MAX - 1] + "…"
