"""Codec of the messages of all APIs without a hand-written codec, compiled from the schemas of the package kio.

A decoded message is a `Struct`. It has the same fields in every version of an API: those of the newest schema, and
those that only older versions have (the merged schema). A reader sets a field that the version lacks to its default; a
writer drops it. So a handler is written once for all versions, and checks the version only where the meaning differs.

Values are plain: times are ints in milliseconds under Kafka's name in snake case (`session_timeout_ms`), error codes
are ints, uuids are 16 bytes (None for the zero uuid; `uuid.UUID` is accepted when writing), arrays are lists (None for
null), structs are `Struct`. The default of a nullable field is None unless the schema defines another.

A schema is imported and compiled when it is first used: to compile all takes more than a second, and most brokers need
few. `preload_schemas` compiles them beforehand, step by step.

Invariants:
* Decoding malformed bytes raises `WireError` and nothing else; time and memory are bounded by `BODY_BYTES_MAX`,
  `STRUCTS_MAX` and `Api.request_items_max`. Bytes after the end of a request are ignored; after a response they are an
  error.
* Encoding an unknown field name or a value that does not fit raises `TypeError` or `ValueError`.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import WireError
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis import mansio_apis
from mansio.wire.codec.schema_compiler import (
    STRUCTS_MAX,
    MergedSchema,
    MessageBytes,
    Struct,
    default_factory,
    schema_fields,
    struct_reader,
    struct_writer,
)
from mansio.wire.headers import framed_response, read_response_header, request_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mansio.ports import Buffer
    from mansio.wire.codec.schema_compiler import Reader, Writer

__all__ = [
    "BODY_BYTES_MAX",
    "Struct",
    "decode_request",
    "decode_response",
    "decode_response_frame",
    "encode_request",
    "encode_response",
    "preload_schemas",
]

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit on the size of a message. Messages with record batches have hand-written codecs, without this limit."""

REQUEST: Final = "request"
RESPONSE: Final = "response"

FIELDS_OF_OLDER_VERSIONS: Final[dict[tuple[int, str, str], dict[str, int]]] = {
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
    (ApiKey.ADD_PARTITIONS_TO_TXN, REQUEST, ""): {
        "v3_and_below_transactional_id": 3,
        "v3_and_below_producer_id": 3,
        "v3_and_below_producer_epoch": 3,
        "v3_and_below_topics": 3,
    },
    (ApiKey.ADD_PARTITIONS_TO_TXN, RESPONSE, ""): {"results_by_topic_v3_and_below": 3},
    (ApiKey.UPDATE_FEATURES, REQUEST, ".feature_updates"): {"allow_downgrade": 0},
    (ApiKey.UPDATE_FEATURES, RESPONSE, ""): {"results": 1},
}
"""(API key, direction, path of the struct in the message) -> name of a field that the newest schema lacks -> last
version that has the field. The tests compare this table with all of kio's schemas."""


def decode_request(api_key: int, version: int, body: Buffer) -> Struct:
    """Decode a request. `body`: the frame after the header. Raises `WireError`."""
    return _decode(api_key, version, REQUEST, body)


def encode_response(
    api_key: int, version: int, correlation_id: int, fields: Mapping[str, Any] | Struct
) -> bytes:
    """Encode a response frame: length, header, body.

    `fields`: nested mappings or `Struct`s of plain values; missing fields get their default. Raises `TypeError` for
    a name unknown to all versions of the API.
    """
    out = bytearray()
    _writer(api_key, version, RESPONSE)(out, fields)
    return framed_response(api_key, version, correlation_id, out)


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, fields: Mapping[str, Any] | Struct
) -> bytes:
    """Encode a request frame: length, header, body. `fields`: see `encode_response`."""
    out = bytearray(4)
    out += request_header(api_key, version, correlation_id, client_id)
    _writer(api_key, version, REQUEST)(out, fields)
    out[:4] = (len(out) - 4).to_bytes(4, "big")
    return bytes(out)


def decode_response(api_key: int, version: int, body: Buffer) -> Struct:
    """Decode a response. `body`: the frame after the header. Raises `WireError`."""
    return _decode(api_key, version, RESPONSE, body)


def decode_response_frame(api_key: int, version: int, frame: Buffer) -> tuple[int, Struct]:
    """Decode a response frame with its header: (correlation id, response). Raises `WireError`."""
    correlation_id, position = read_response_header(api_key, version, frame)
    return correlation_id, _decode(api_key, version, RESPONSE, frame[position:])


def preload_schemas() -> Iterator[None]:
    """Import and compile the schemas of all supported APIs; each step of the iterator takes some milliseconds."""
    for api in SUPPORTED_APIS.values():
        if api.handler is None or api.is_decoded_by_handler:
            continue
        for version in range(api.max_version, api.min_version - 1, -1):
            _reader(api.key, version, REQUEST)
            yield
            _writer(api.key, version, RESPONSE)
            yield


def _decode(api_key: int, version: int, direction: str, buffer: Buffer) -> Struct:
    if len(buffer) > BODY_BYTES_MAX:
        raise WireError(f"a message of {len(buffer)} bytes; at most {BODY_BYTES_MAX} are read")
    read = _reader(api_key, version, direction)
    body = MessageBytes(buffer)
    body.is_request = direction == REQUEST
    body.items_left = SUPPORTED_APIS[ApiKey(api_key)].request_items_max if body.is_request else STRUCTS_MAX
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
    return struct_reader(_schema(api_key, version, direction), merged_schema(api_key, direction))


@cache
def _writer(api_key: int, version: int, direction: str) -> Writer:
    return struct_writer(_schema(api_key, version, direction), merged_schema(api_key, direction))


def _schema(api_key: int, version: int, direction: str) -> Any:
    """kio's class of a message. Raises `ValueError` for an unknown version, which callers exclude."""
    if mansio_apis.is_mansio_api(api_key):
        return mansio_apis.schema(api_key, version, direction)
    from kio import index

    load = index.load_request_schema if direction == REQUEST else index.load_response_schema
    try:
        return load(api_key, version)
    except (index.UnknownAPIKey, index.UnknownEntity) as error:
        raise ValueError(f"there is no {direction} {api_key} in version {version}") from error


@cache
def field_names(api_key: int, version: int, direction: str) -> frozenset[str]:
    """Return the names of the fields of a message in one version, without those of its structs."""
    return frozenset(field.name for field in schema_fields(_schema(api_key, version, direction)))


@cache
def merged_schema(api_key: int, direction: str) -> MergedSchema:
    """Return the fields of an API's request or response in all versions, with their defaults."""
    if mansio_apis.is_mansio_api(api_key):
        return _merge_schemas(api_key, direction, "", mansio_apis.schema(api_key, 0, direction))
    from kio.schema.index import api_key_map, schema_name_map

    newest = max(schema_name_map[api_key_map[api_key]])
    return _merge_schemas(api_key, direction, "", _schema(api_key, newest, direction))


def _merge_schemas(api_key: int, direction: str, path: str, entity: Any) -> MergedSchema:
    fields = schema_fields(entity)
    for name, version in FIELDS_OF_OLDER_VERSIONS.get((api_key, direction, path), {}).items():
        older = _struct_at(_schema(api_key, version, direction), path)
        fields += [field for field in schema_fields(older) if field.name == name]
    children = {
        field.name: _merge_schemas(api_key, direction, f"{path}.{field.name}", field.entity)
        for field in fields
        if field.entity is not None
    }
    return MergedSchema(
        {field.name: default_factory(field, children.get(field.name)) for field in fields}, children
    )


def _struct_at(entity: Any, path: str) -> Any:
    """Return the class of the nested struct at `path`, such as ".topics.partitions"."""
    for name in path.split(".")[1:]:
        entity = next(field.entity for field in schema_fields(entity) if field.name == name)
    return entity
