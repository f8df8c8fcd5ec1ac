"""Responses in which a whole request fails, for every API that the broker offers and every version of it."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from io import BytesIO
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import pytest
from kio import index
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from mansio.testing.error_responses import encode_error_response, error_code
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis.mansio_apis import is_mansio_api
from mansio.wire.headers import read_response_header

CODE = ErrorCode.not_leader_or_follower
HANDSHAKES = {17, 36}


def sample(kind: Any) -> Any:
    """A value of a field's type; arrays have one item."""
    if get_origin(kind) is UnionType:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        return (sample(get_args(kind)[0]),)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**{field.name: sample(field.type) for field in dataclasses.fields(kind)})
    if issubclass(kind, bool):
        return True
    if issubclass(kind, datetime.timedelta):
        return datetime.timedelta(seconds=1)
    if issubclass(kind, datetime.datetime):
        return datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    if issubclass(kind, uuid.UUID):
        return uuid.UUID(int=7)
    if issubclass(kind, ErrorCode):
        return ErrorCode.none
    values = {str: "orders", bytes: b"x", float: 1.0}
    return next((value for base, value in values.items() if issubclass(kind, base)), 1)


def codes_in(value: Any) -> list[ErrorCode]:
    if isinstance(value, ErrorCode):
        return [value]
    if isinstance(value, tuple):
        return [code for item in value for code in codes_in(item)]
    if dataclasses.is_dataclass(value):
        return [code for field in dataclasses.fields(value) for code in codes_in(getattr(value, field.name))]
    return []


@pytest.mark.parametrize("api_key", [key for key in SUPPORTED_APIS if not is_mansio_api(key)])
def test_every_item_of_a_request_fails_with_the_code(api_key: ApiKey) -> None:
    api = SUPPORTED_APIS[api_key]
    for version in range(api.min_version, api.max_version + 1):
        check_error_response(api_key, version)


def check_error_response(api_key: int, version: int) -> None:
    request_type, response_type = (
        index.load_request_schema(api_key, version),
        index.load_response_schema(api_key, version),
    )
    body = BytesIO()
    entity_writer(request_type)(body, sample(request_type))
    response = encode_error_response(api_key, version, 11, memoryview(body.getvalue()), int(CODE))
    frame = memoryview(response)[4:]
    correlation_id, position = read_response_header(api_key, version, frame)
    assert correlation_id == 11, version
    decoded, _ = entity_reader(response_type)(bytes(frame), position)
    found = codes_in(decoded)
    assert found, version
    assert set(found) <= {CODE, ErrorCode.none}, version
    assert CODE in found, version


def test_names_are_those_of_kafka() -> None:
    assert error_code("NOT_LEADER_OR_FOLLOWER") == 6
    with pytest.raises(ValueError, match="no error"):
        error_code("NOT_A_LEADER")
