"""Schemas of keys and values, and their encoding: Avro, JSON Schema and Protobuf, as schema registries have them.

>>> serde = Serde("http://127.0.0.1:8081")
>>> value = await serde.encode("orders", {"id": 1}, schema=SchemaDefinition(SchemaType.AVRO, ORDER))
>>> await client.publish("orders", value)
>>> await serde.decode("orders", message.value, message.headers)

`BlockingSerde` is the same for programs without an event loop. Names are imported on first use; each format needs its
extra: `avro`, `jsonschema`, `protobuf`, or all of them with `registry`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mansio.serde.blocking import BlockingSerde
    from mansio.serde.definition import SchemaDefinition, SchemaType
    from mansio.serde.errors import (
        InvalidSchema,
        MalformedValue,
        NotFramed,
        SchemaNotFound,
        SchemaRegistryError,
        UnsupportedSchema,
    )
    from mansio.serde.http_registry import RegistryCredentials
    from mansio.serde.serde import EncodedValue, Serde
    from mansio.serde.source import ReferencedSchema, RegisteredSchema, SchemaSource, SubjectVersion
    from mansio.serde.subjects import SubjectNames
    from mansio.state.registry.schema import SchemaReference

__all__ = [
    "BlockingSerde",
    "EncodedValue",
    "InvalidSchema",
    "MalformedValue",
    "NotFramed",
    "ReferencedSchema",
    "RegisteredSchema",
    "RegistryCredentials",
    "SchemaDefinition",
    "SchemaNotFound",
    "SchemaReference",
    "SchemaRegistryError",
    "SchemaSource",
    "SchemaType",
    "Serde",
    "SubjectNames",
    "SubjectVersion",
    "UnsupportedSchema",
]

_MODULES = {
    "BlockingSerde": "mansio.serde.blocking",
    "EncodedValue": "mansio.serde.serde",
    "InvalidSchema": "mansio.serde.errors",
    "MalformedValue": "mansio.serde.errors",
    "NotFramed": "mansio.serde.errors",
    "ReferencedSchema": "mansio.serde.definition",
    "RegisteredSchema": "mansio.serde.source",
    "RegistryCredentials": "mansio.serde.http_registry",
    "SchemaDefinition": "mansio.serde.definition",
    "SchemaNotFound": "mansio.serde.errors",
    "SchemaReference": "mansio.state.registry.schema",
    "SchemaRegistryError": "mansio.serde.errors",
    "SchemaSource": "mansio.serde.source",
    "SchemaType": "mansio.serde.definition",
    "Serde": "mansio.serde.serde",
    "SubjectNames": "mansio.serde.subjects",
    "SubjectVersion": "mansio.serde.source",
    "UnsupportedSchema": "mansio.serde.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
