"""kio as an independent oracle: random messages of any schema, their bytes and values."""

from __future__ import annotations

import dataclasses
import datetime
import io
import uuid
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from mansio.wire.api_versions import SUPPORTED_APIS
from mansio.wire.apis.mansio_apis import is_mansio_api
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.codec.schema_compiler import Field, schema_fields

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
TEXTS = ("", "a", "topic-1", "größe", "日本語", "x" * 130, "\U0001f40e")
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "timedelta_i32": 32}
ERRORS = [code.value for code in ErrorCode]


def every_version(*, without: tuple[int, ...] = (), native: bool = False) -> Iterator[tuple[int, int, str]]:
    """(API key, version, direction) of everything offered that kio knows; with `native`, of ours too."""
    for api in SUPPORTED_APIS.values():
        if api.key not in without and (native or not is_mansio_api(api.key)):
            for version in range(api.min_version, api.max_version + 1):
                yield int(api.key), version, REQUEST
                yield int(api.key), version, RESPONSE


def random_message(random: Random, entity: Any, *, tags: bool = True) -> dict[str, Any]:
    """Plain values for every field of a schema; `tags=False` leaves tagged fields at their defaults."""
    return {
        field.name: _random_field(random, field, tags)
        for field in schema_fields(entity)
        if tags or field.tag is None
    }


def _random_field(random: Random, field: Field, tags: bool) -> Any:
    if field.is_nullable and field.kafka_type != "uuid" and field.tag is None and random.random() < 0.25:
        return -1 if field.kafka_type == "datetime_i64" else None
    if field.is_array:
        return [_random_item(random, field, tags) for _ in range(random.choice((0, 1, 1, 2, 5)))]
    return _random_item(random, field, tags)


def _random_item(random: Random, field: Field, tags: bool) -> Any:
    if field.entity is not None:
        return random_message(random, field.entity, tags=tags)
    kind = field.kafka_type
    if kind in BITS:
        edge = 1 << (BITS[kind] - 1)
        return random.choice((0, 1, -1, edge - 1, -edge, random.randrange(-edge, edge)))
    if kind == "uint16":
        return random.randrange(1 << 16)
    if kind == "error_code":
        return random.choice(ERRORS)
    if kind == "timedelta_i64":
        return random.choice((-1, 0, 604_800_000))
    if kind == "datetime_i64":
        return random.choice((0, 1_700_000_000_123))
    if kind == "bool":
        return random.random() < 0.5
    if kind == "float64":
        return random.choice((0.0, -1.5, 1e308, 0.1))
    if kind == "string":
        return random.choice(TEXTS)
    if kind in ("bytes", "records"):
        return random.randbytes(random.choice((0, 1, 126, 127, 128, 20_000)))
    if kind == "uuid":
        return random.choice((None, random.randbytes(16)))
    raise NotImplementedError(kind)


def to_kio(entity: Any, plain: dict[str, Any]) -> Any:
    """The same message as kio's own object."""
    values = {}
    for raw, field in zip(dataclasses.fields(entity), schema_fields(entity), strict=True):
        if field.name in plain:
            value = plain[field.name]
            if field.is_array and value is not None:
                values[raw.name] = tuple(_item_to_kio(field, item) for item in value)
            else:
                values[raw.name] = _item_to_kio(field, value)
    return entity(**values)


def _item_to_kio(field: Field, value: Any) -> Any:
    if value is None:
        return None
    if field.entity is not None:
        return to_kio(field.entity, value)
    kind = field.kafka_type
    if kind.startswith("timedelta"):
        return datetime.timedelta(milliseconds=value)
    if kind == "datetime_i64":
        return None if value == -1 else EPOCH + datetime.timedelta(milliseconds=value)
    if kind == "error_code":
        return ErrorCode(value)
    if kind == "uuid":
        return uuid.UUID(bytes=value)
    return value


def kio_bytes(entity: Any, plain: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    entity_writer(entity)(out, to_kio(entity, plain))
    return out.getvalue()


def kio_reads(entity: Any, data: bytes) -> Any:
    value, end = entity_reader(entity)(data, 0)
    assert end == len(data)
    return value
