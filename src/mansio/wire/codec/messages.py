"""Every API but Produce and Fetch: bytes <-> `Struct`, in any version, through kio's schemas.

A handler sees one shape per API, whatever version the client speaks: the fields of the newest schema kio
knows, and the few that only older versions have. Where the version at hand lacks a field, a reader gives its
default and a writer drops it. So a handler is written once, and looks at the version only where the meaning
differs.

Values are plain: times are ints in milliseconds under Kafka's own name in snake case (`session_timeout_ms`),
error codes are ints, uuids are 16 bytes (a zero uuid is None; `uuid.UUID` is accepted when writing), arrays
are lists (None where null), structures are `Struct`. A nullable field without a default of its own defaults
to None.

Schemas are imported and compiled on first use: all of them take over a second, most brokers need few.
`preload_schemas` does it beforehand, step by step.

Always true: bytes that are not the message raise `WireError` and nothing else, in time and memory bounded by
`MAX_BODY_BYTES`, `schema_readers.MAX_STRUCTS` and `MAX_REQUEST_ITEMS` (bytes after the end of a request are let pass,
after that of a response not); mistakes of the caller raise `TypeError` or `ValueError`.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import WireError
from mansio.wire.api_versions import OFFERED, ApiKey
from mansio.wire.apis import mansio_apis
from mansio.wire.codec.schema_readers import MAX_REQUEST_ITEMS, MAX_STRUCTS, Body, struct_reader
from mansio.wire.codec.schema_writers import struct_writer
from mansio.wire.codec.schemas import Shape, Struct, default_maker, fields_of
from mansio.wire.headers import framed_response, read_response_header, request_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mansio.ports import Buffer
    from mansio.wire.codec.schema_readers import Reader
    from mansio.wire.codec.schema_writers import Writer

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
"""The largest message read here. Produce and Fetch, which carry data, do not pass this way."""

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
}
"""(API, direction, path of the structure) -> the fields the newest schema has no more, with the last version
that had them. Checked against all of kio's schemas in the tests."""


def decode_request(api_key: int, version: int, body: Buffer) -> Struct:
    """The request in `body` (what follows the header). Raises `WireError`."""
    return _decode(api_key, version, REQUEST, body)


def encode_response(
    api_key: int, version: int, correlation_id: int, fields: Mapping[str, Any] | Struct
) -> bytes:
    """The whole response: frame length, header, body.

    `fields` are nested mappings (or `Struct`) of plain values; what is left out takes its default. Raises
    `TypeError` for a name that no version of this API knows.
    """
    out = bytearray()
    _writer(api_key, version, RESPONSE)(out, fields)
    return framed_response(api_key, version, correlation_id, out)


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, fields: Mapping[str, Any] | Struct
) -> bytes:
    """The whole request: frame length, header, body. `fields` as in `encode_response`."""
    out = bytearray(4)
    out += request_header(api_key, version, correlation_id, client_id)
    _writer(api_key, version, REQUEST)(out, fields)
    out[:4] = (len(out) - 4).to_bytes(4, "big")
    return bytes(out)


def decode_response(api_key: int, version: int, body: Buffer) -> Struct:
    """The response in `body` (what follows the header). Raises `WireError`."""
    return _decode(api_key, version, RESPONSE, body)


def decode_response_frame(api_key: int, version: int, frame: Buffer) -> tuple[int, Struct]:
    """(correlation id, response) of a whole response frame. Raises `WireError`."""
    correlation_id, position = read_response_header(api_key, version, frame)
    return correlation_id, _decode(api_key, version, RESPONSE, frame[position:])


def preload_schemas() -> Iterator[None]:
    """Import and compile everything offered; each step of the iterator takes some milliseconds."""
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
    body.room = MAX_REQUEST_ITEMS if body.is_request else MAX_STRUCTS
    try:
        message, end = read(body, 0)
    except (struct.error, IndexError) as error:
        raise WireError("the message ends too early") from error
    except UnicodeDecodeError as error:
        raise WireError("a text that is not UTF-8") from error
    if end != len(body) and direction == RESPONSE:
        # A request may be longer than its schema: librdkafka's Metadata for all topics is, and brokers let it pass.
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
    """kio's class of a message, or ours. Raises `ValueError` for what there is not: the caller checks versions
    first."""
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
    """The one shape of an API's request or response."""
    if mansio_apis.is_mansio_api(api_key):
        return _shape(api_key, direction, "", mansio_apis.schema(api_key, 0, direction))
    from kio.schema.index import api_key_map, schema_name_map

    newest = max(schema_name_map[api_key_map[api_key]])
    return _shape(api_key, direction, "", _schema(api_key, newest, direction))


def _shape(api_key: int, direction: str, path: str, entity: Any) -> Shape:
    fields = fields_of(entity)
    for name, version in REMOVED_FIELDS.get((api_key, direction, path), {}).items():
        older = _inside(_schema(api_key, version, direction), path)
        fields += [field for field in fields_of(older) if field.name == name]
    children = {
        field.name: _shape(api_key, direction, f"{path}.{field.name}", field.entity)
        for field in fields
        if field.entity is not None
    }
    return Shape({field.name: default_maker(field, children.get(field.name)) for field in fields}, children)


def _inside(entity: Any, path: str) -> Any:
    """The structure at `path` (".topics.partitions") inside a message."""
    for name in path.split(".")[1:]:
        entity = next(field.entity for field in fields_of(entity) if field.name == name)
    return entity
