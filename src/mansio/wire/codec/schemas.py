"""What kio's schema classes say, and the values Mansio makes of them.

kio knows every field of every version of every message. Its own readers refuse tagged fields they do not know
(KIP-482 says: skip them) and error codes newer than themselves, and its writers cost tens of microseconds; so
Mansio takes the schemas from kio and the bytes into its own hands. The tests hold both against each other.
`schema_readers` and `schema_writers` make functions of these descriptions.

Always true: values are plain: int, str, bytes, bool, float, list, `Struct`. Times are ints in milliseconds,
error codes ints, uuids 16 bytes (None for the zero uuid).
"""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ZERO_UUID: Final = bytes(16)


class Struct:
    """One structure of a message: its fields as attributes, in Kafka's own names in snake case."""

    __slots__ = ("__dict__",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable, like the dict it stands for

    def __repr__(self) -> str:
        return "Struct(" + ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items()) + ")"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The fields a structure may have in any version: name -> its default, and the shapes of what lies
    inside."""

    defaults: Mapping[str, Callable[[], Any]]
    children: Mapping[str, Shape]

    def empty(self) -> Struct:
        """A structure of this shape with every field at its default."""
        return Struct({name: make() for name, make in self.defaults.items()})


class Field(NamedTuple):
    """What kio says of one field of one version of a structure."""

    name: str
    kafka_type: str
    is_array: bool
    entity: Any
    """kio's class of the structure inside, or None."""
    nullable: bool
    tag: int | None
    default: Any
    """A plain value; `MISSING` stands for what Kafka's type implies."""


MISSING: Final = object()


def fields_of(entity: Any) -> list[Field]:
    """The fields of a kio schema class, in the order of the wire."""
    return [_field(raw) for raw in dataclasses.fields(entity)]


def _field(raw: Any) -> Field:
    kind = raw.type
    nullable = False
    if get_origin(kind) is UnionType:
        nullable = True
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    is_array = get_origin(kind) is tuple
    if is_array:
        kind = get_args(kind)[0]
    kafka_type = raw.metadata.get("kafka_type", "struct")
    name = raw.name
    if kafka_type.startswith("timedelta") or (
        kafka_type == "datetime_i64" and not name.endswith("timestamp")
    ):
        name += "_ms"  # kio drops the unit
    default = MISSING if raw.default is dataclasses.MISSING else _plain(raw.default, kafka_type)
    entity = kind if dataclasses.is_dataclass(kind) else None
    return Field(name, kafka_type, is_array, entity, nullable, raw.metadata.get("tag"), default)


def _plain(value: Any, kafka_type: str) -> Any:
    """A default of kio's as a plain value."""
    if value is None:
        return -1 if kafka_type == "datetime_i64" else None
    if kafka_type.startswith("timedelta"):
        return round(value.total_seconds() * 1000)
    if kafka_type == "datetime_i64":
        return round(value.timestamp() * 1000)
    if kafka_type == "error_code":
        return int(value.value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return value


_IMPLIED: Final[dict[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": None,
    "bool": False,
    "uuid": None,
    "float64": 0.0,
}


def default_maker(field: Field, child: Shape | None) -> Callable[[], Any]:
    """Makes the default of a field, a fresh one where it can be changed. Nullable without a default means
    None."""
    if field.is_array:
        if field.default is None or (field.default is MISSING and field.nullable):
            return _none
        return list
    if child is not None:
        return _none if field.nullable else child.empty
    if field.default is not MISSING:
        value = field.default
    elif field.nullable and field.kafka_type != "datetime_i64":
        value = None
    else:
        value = _IMPLIED.get(field.kafka_type, 0)
    return lambda: value


def _none() -> None:
    return None
