"""Kafka requests with as many items as the limit of their API allows, built from the schema of each API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.wire.api_versions import REQUEST_ITEMS_MAX, SUPPORTED_APIS, Api
from mansio.wire.codec import messages
from mansio.wire.codec.schema_compiler import schema_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.codec.schema_compiler import Field

MARGIN: Final = 10
"""The items that surround the longest array count, too."""
TOPIC_FIELDS: Final = ("name", "topic", "topic_name", "resource_name")
GROUP_FIELDS: Final = ("group_id", "group", "key")
PARTITION_FIELDS: Final = ("partition_index", "partition", "partitions", "partition_indexes")

APIS: Final = [each for each in SUPPORTED_APIS.values() if each.handler is not None]


class Existing:
    """A topic and a group that requests name. `topic_id`: 16 bytes; `partitions`: number of the topic's partitions."""

    def __init__(self, topic: str, topic_id: bytes, partitions: int, group: str) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partitions = partitions
        self.group = group


def arrays(api: Api) -> list[tuple[str, ...]]:
    """Return the paths of the arrays in the newest request of an API."""
    return list(_paths(_entity(api)))


def full_request(api: Api, path: tuple[str, ...], existing: Existing | None) -> bytes:
    """Return a frame whose array at `path` has all items that a client may send. They name what exists in the
    broker, or, if `existing` is None, things that do not exist, each another one."""
    count = (REQUEST_ITEMS_MAX if api.brokers_only else api.request_items_max) - MARGIN
    fields = _struct(_entity(api), path, 0, count, existing)
    return messages.encode_request(api.key, api.max_version, 7, "c", fields)


def _entity(api: Api) -> Any:
    return messages._schema(api.key, api.max_version, messages.REQUEST)


def _paths(entity: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in schema_fields(entity):
        path = (*prefix, field.name)
        if field.is_array:
            yield path
        if field.entity is not None:
            yield from _paths(field.entity, path)


def _struct(
    entity: Any, path: tuple[str, ...], number: int, count: int, existing: Existing | None
) -> dict[str, Any]:
    """Return the fields of a struct, the `number`-th of its array."""
    found: dict[str, Any] = {}
    for field in schema_fields(entity):
        if path and field.name == path[0]:
            found[field.name] = _on_path(field, path[1:], count, existing)
        elif field.is_array:
            found[field.name] = []
        elif field.entity is None and field.tag is None:
            found[field.name] = _value(field, number, existing)
    return found


def _on_path(field: Field, rest: tuple[str, ...], count: int, existing: Existing | None) -> Any:
    entity = field.entity
    if rest:
        inner = _struct(entity, rest, 0, count, existing)
        return [inner] if field.is_array else inner
    if entity is None:
        return [_value(field, number, existing) for number in range(count)]
    return [_struct(entity, (), number, count, existing) for number in range(count)]


def _value(field: Field, number: int, existing: Existing | None) -> Any:
    name, kind = field.name, field.kafka_type
    if kind == "string":
        if existing is not None and name in TOPIC_FIELDS:
            return existing.topic
        if existing is not None and name in GROUP_FIELDS:
            return existing.group
        return f"s{number}"
    if kind == "uuid":
        return number.to_bytes(16, "big") if existing is None else existing.topic_id
    if kind in ("bytes", "records"):
        return b"x"
    if kind == "bool":
        return False
    if kind.startswith("float"):
        return float(number)
    if name == "timeout_ms":
        return 100
    if existing is not None:
        if name in PARTITION_FIELDS:
            return number % existing.partitions
        if name == "resource_type":
            return 2
        if name in ("generation_id_or_member_epoch", "generation_id", "member_epoch"):
            return -1
    limits = {"int8": 100, "int16": 30_000, "uint16": 30_000}
    return number % limits.get(kind, 1 << 31)
