"""Responses that fail a whole request with one error code, for any API and version.

As `AbstractRequest.getErrorResponse` of Kafka: every item of the request is in the response, with the error code. The
response is built from the schemas of the package kio, so that a test can choose the error of any API.
"""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from io import BytesIO
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin

from kio import index
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from mansio.wire.headers import framed_response

ERROR_CODES: Final = ("error_code", "partition_error_code")
"""Names of fields with an error code."""

ALIASES: Final = {
    "partition_index": ("partition", "index"),
    "partition": ("partition_index", "index"),
    "index": ("partition", "partition_index"),
    "topic": ("name",),
    "name": ("topic",),
    "group_id": ("group", "key"),
    "key": ("group_id",),
}
"""Field of a response -> fields of the request with the same meaning, where Kafka's schemas name them differently."""


ZEROS: Final[dict[type, Any]] = {
    bool: False,
    datetime.datetime: datetime.datetime.fromtimestamp(0, datetime.UTC),
    datetime.timedelta: datetime.timedelta(),
    uuid.UUID: uuid.UUID(int=0),
    str: "",
    bytes: b"",
    float: 0.0,
}


def error_code(name: str) -> int:
    """Return the code of an error, such as `NOT_LEADER_OR_FOLLOWER`. Raises `ValueError` for an unknown name."""
    try:
        return int(ErrorCode[name.lower()])
    except KeyError:
        raise ValueError(f"Kafka has no error {name!r}") from None


def encode_error_response(
    api_key: int, version: int, correlation_id: int, body: memoryview, code: int
) -> bytes:
    """Encode the response frame to a request whose items all fail. `body`: the request after its header."""
    request = entity_reader(index.load_request_schema(api_key, version))(bytes(body), 0)[0]
    response_type = index.load_response_schema(api_key, version)
    out = BytesIO()
    entity_writer(response_type)(out, _failed(response_type, request, ErrorCode(code)))
    return framed_response(api_key, version, correlation_id, out.getvalue())


def _failed(entity: Any, request: Any, code: ErrorCode) -> Any:
    """Return a struct of the response for the struct of the request that it answers."""
    lists = [value for value in _values(request) if isinstance(value, tuple)]
    values = {}
    for field in dataclasses.fields(entity):
        kind, is_nullable = _without_none(field.type)
        if field.name in ERROR_CODES:
            values[field.name] = code
        elif get_origin(kind) is tuple:
            item, _ = _without_none(get_args(kind)[0])
            items = lists.pop(0) if lists and _has_error_code(item) else ()
            values[field.name] = tuple(_failed(item, one, code) for one in items)
        elif (echoed := _echoed(request, field.name, kind)) is not None:
            values[field.name] = echoed
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        else:
            values[field.name] = None if is_nullable else _zero(kind, request)
    return entity(**values)


def _values(request: Any) -> list[Any]:
    if not dataclasses.is_dataclass(request):
        return []
    return [getattr(request, field.name) for field in dataclasses.fields(request)]


def _echoed(request: Any, name: str, kind: Any) -> Any:
    """Return the value of the request's field with this meaning; None if it has none."""
    if not dataclasses.is_dataclass(request):  # an array of names, such as that of DescribeGroups
        return request if kind is type(request) or name in {"name", "topic", "group_id", "key"} else None
    for candidate in (name, *ALIASES.get(name, ())):
        value = getattr(request, candidate, None)
        if value is not None and not isinstance(value, tuple):
            return value
    return None


def _has_error_code(kind: Any) -> bool:
    if not dataclasses.is_dataclass(kind):
        return False
    return any(
        field.name in ERROR_CODES
        or any(_has_error_code(part) for part in (field.type, *get_args(field.type)))
        for field in dataclasses.fields(kind)
    )


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) is UnionType:
        (one,) = (part for part in get_args(kind) if part is not NoneType)
        return one, True
    return kind, False


def _zero(kind: Any, request: Any) -> Any:
    """Return a value of a required field that means nothing."""
    if dataclasses.is_dataclass(kind):
        return _failed(kind, request, ErrorCode.none)
    for base, value in ZEROS.items():
        if issubclass(kind, base):
            return value
    return -1
