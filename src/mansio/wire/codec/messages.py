"""Codec of all APIs without a hand-written one: bytes <-> `Struct`, in any version, compiled from kio's schemas.

A handler uses one shape per API for all versions: the fields of the newest schema, and those that only older versions
have. A reader sets the default of a field that the version lacks, a writer drops it. So a handler is written once, and
checks the version only where the meaning differs.

Values are plain: times are ints in milliseconds under Kafka's name in snake case (`session_timeout_ms`), error codes
are ints, uuids are 16 bytes (None for the zero uuid; `uuid.UUID` is accepted when writing), arrays are lists (None for
null), structs are `Struct`. The default of a nullable field is None unless it has one.

Schemas are imported and compiled on first use: all of them take more than a second, and most brokers need few.
`preload_schemas` does it beforehand, step by step.

Invariants:
* Bytes that are not the message raise `WireError` and nothing else, in time and memory bounded by `MAX_BODY_BYTES`,
  `MAX_STRUCTS` and `MAX_REQUEST_ITEMS`. Bytes after the end of a request are ignored, of a response refused.
* A caller's mistake raises `TypeError` or `ValueError`.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import WireError
from mansio.wire.api_versions import OFFERED, ApiKey
from mansio.wire.apis import mansio_apis
from mansio.wire.codec.schema_compiler import (
    MAX_REQUEST_ITEMS,
    MAX_STRUCTS,
    Body,
    Shape,
    Struct,
    default_maker,
    fields_of,
    struct_reader,
    struct_writer,
)
from mansio.wire.headers import framed_response, read_response_header, request_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mansio.ports import Buffer
    from mansio.wire.codec.schema_compiler import Reader, Writer

__all__ = [
    "MAX_BODY_BYTES",
    "Struct",
    "decode_request",
    "decode_response",
    "decode_response_frame",
    "encode_request",
    "encode_response",
    "preload_schemas",
]

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
"""Size limit of a message. Produce and Fetch, which carry data, have their own codecs."""

REQUEST: Final = "request"
RESPONSE: Final = "response"

REMOVED_FIELDS: Final[dict[tuple[int, str, str], dict[str, int]]] = {
    (ApiKey.METADATA, REQUEST, ""): {"include_cluster_authorized_operations": 10},
    (ApiKey.METADATA, RESPONSE, ""): {"cluster_authorized_operations": 10},
    (ApiKey.OFFSET_COMMIT, REQUEST, ""): {"retention_time_ms": 4},
    (ApiKey.OFFSET_COMMIT, REQUEST, ".topics"): {"name": 9},
    (ApiKey.OFFSET_COMMIT, RESPONSE, ".topics"): {"name": 9},
    (ApiKey.OFFSET_FETCH, REQUEST, ""): {"group_id": 7, "topics": 7},
    (ApiKey.OFFSET_FETCH, REQUEST, ".groups.topics"): {"name": 9},
    (ApiKey.OFFSET_FETCH, RESPONSE, ""): {"topics": 7, "error_code": 7},
    (ApiKey.OFFSET_FETCH, RESPONSE, ".groups.topics"): {"name": 9},
    (ApiKey.FIND_COORDINATOR, REQUEST, ""): {"key": 3},
    (ApiKey.FIND_COORDINATOR, RESPONSE, ""): {
        "error_code": 3,
        "error_message": 3,
        "node_id": 3,
        "host": 3,
        "port": 3,
    },
    (ApiKey.LEAVE_GROUP, REQUEST, ""): {"member_id": 2},
    (ApiKey.DELETE_TOPICS, REQUEST, ""): {"topic_names": 5},
    (ApiKey.UPDATE_FEATURES, REQUEST, ".feature_updates"): {"allow_downgrade": 0},
    (ApiKey.UPDATE_FEATURES, RESPONSE, ""): {"results": 1},
}
"""(API, direction, path of the struct) -> fields that the newest schema lacks, with the last version that has them.
The tests compare it with all of kio's schemas."""


def decode_request(api_key: int, version: int, body: Buffer) -> Struct:
    """The request in `body` (without the header). Raises `WireError`."""
    return _decode(api_key, version, REQUEST, body)


def encode_response(
    api_key: int, version: int, correlation_id: int, fields: Mapping[str, Any] | Struct
) -> bytes:
    """The framed response: length, header, body.

    `fields` are nested mappings (or `Struct`) of plain values; missing fields get their default. Raises `TypeError` for
    a name unknown to all versions of the API.
    """
    out = bytearray()
    _writer(api_key, version, RESPONSE)(out, fields)
    return framed_response(api_key, version, correlation_id, out)


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, fields: Mapping[str, Any] | Struct
) -> bytes:
    """The framed request: length, header, body. `fields` as in `encode_response`."""
    out = bytearray(4)
    out += request_header(api_key, version, correlation_id, client_id)
    _writer(api_key, version, REQUEST)(out, fields)
    out[:4] = (len(out) - 4).to_bytes(4, "big")
    return bytes(out)


def decode_response(api_key: int, version: int, body: Buffer) -> Struct:
    """The response in `body` (without the header). Raises `WireError`."""
    return _decode(api_key, version, RESPONSE, body)


def decode_response_frame(api_key: int, version: int, frame: Buffer) -> tuple[int, Struct]:
    """(correlation id, response) of a response frame. Raises `WireError`."""
    correlation_id, position = read_response_header(api_key, version, frame)
    return correlation_id, _decode(api_key, version, RESPONSE, frame[position:])


def preload_schemas() -> Iterator[None]:
    """Import and compile all supported APIs; each step of the iterator takes some milliseconds."""
    for api in OFFERED.values():
        if api.handler is None or api.raw:
            continue
        for version in range(api.highest, api.lowest - 1, -1):
            _reader(api.key, version, REQUEST)
            yield
            _writer(api.key, version, RESPONSE)
            yield


def _decode(api_key: int, version: int, direction: str, buffer: Buffer) -> Struct:
    if len(buffer) > MAX_BODY_BYTES:
        raise WireError(f"a message of {len(buffer)} bytes; at most {MAX_BODY_BYTES} are read")
    read = _reader(api_key, version, direction)
    body = Body(buffer)
    body.is_request = direction == REQUEST
    body.remaining = MAX_REQUEST_ITEMS if body.is_request else MAX_STRUCTS
    try:
        message, end = read(body, 0)
    except (struct.error, IndexError) as error:
        raise WireError("the message ends too early") from error
    except UnicodeDecodeError as error:
        raise WireError("a string that is not UTF-8") from error
    if end != len(body) and direction == RESPONSE:
        # A request may be longer than its schema: librdkafka's Metadata for all topics is, and brokers ignore the rest.
        raise WireError(f"{len(body) - end} bytes after the end of the message")
    result: Struct = message
    return result


@cache
def _reader(api_key: int, version: int, direction: str) -> Reader:
    return struct_reader(_schema(api_key, version, direction), shape_of(api_key, direction))


@cache
def _writer(api_key: int, version: int, direction: str) -> Writer:
    return struct_writer(_schema(api_key, version, direction), shape_of(api_key, direction))


def _schema(api_key: int, version: int, direction: str) -> Any:
    """The schema class of a message. Raises `ValueError` for an unknown version; callers check versions first."""
    if mansio_apis.is_mansio_api(api_key):
        return mansio_apis.schema(api_key, version, direction)
    from kio import index

    load = index.load_request_schema if direction == REQUEST else index.load_response_schema
    try:
        return load(api_key, version)
    except (index.UnknownAPIKey, index.UnknownEntity) as error:
        raise ValueError(f"there is no {direction} {api_key} in version {version}") from error


@cache
def shape_of(api_key: int, direction: str) -> Shape:
    """The shape of an API's request or response."""
    if mansio_apis.is_mansio_api(api_key):
        return _shape(api_key, direction, "", mansio_apis.schema(api_key, 0, direction))
    from kio.schema.index import api_key_map, schema_name_map

    newest = max(schema_name_map[api_key_map[api_key]])
    return _shape(api_key, direction, "", _schema(api_key, newest, direction))


def _shape(api_key: int, direction: str, path: str, entity: Any) -> Shape:
    fields = fields_of(entity)
    for name, version in REMOVED_FIELDS.get((api_key, direction, path), {}).items():
        older = _struct_at(_schema(api_key, version, direction), path)
        fields += [field for field in fields_of(older) if field.name == name]
    children = {
        field.name: _shape(api_key, direction, f"{path}.{field.name}", field.entity)
        for field in fields
        if field.entity is not None
    }
    return Shape({field.name: default_maker(field, children.get(field.name)) for field in fields}, children)


def _struct_at(entity: Any, path: str) -> Any:
    """The struct at `path` (".topics.partitions") of a message."""
    for name in path.split(".")[1:]:
        entity = next(field.entity for field in fields_of(entity) if field.name == name)
    return entity
