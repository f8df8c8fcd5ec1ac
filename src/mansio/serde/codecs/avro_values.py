"""Conversion of values to what fastavro writes without doubt: checked, with defaults, and with the branch of unions.

`PYTHON` converts Python values, `JSON` plain JSON (see `mansio.serde.codecs.avro`), `DEFAULTS` the defaults of fields
in a schema. Each raises `MalformedValue` with the path of the fault.
"""

from __future__ import annotations

import base64
import binascii
import math
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.serde.codecs.paths import VALUE_DEPTH_MAX, fault, shown_type
from mansio.serde.errors import MalformedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.serde.codecs.avro_types import AvroType
    from mansio.serde.codecs.paths import Path

    Leaf = Callable[[AvroType, Any, Path], Any]

ATTEMPTS_MAX: Final = 10_000
"""Maximum number of objects and arrays in unions for which more than one branch is tried."""
NUMBER_WORDS: Final = ("NaN", "Infinity", "-Infinity")
_RANKS: Final = {
    "null": 0,
    "boolean": 0,
    "int": 1,
    "long": 2,
    "double": 3,
    "float": 4,
    "string": 5,
    "enum": 6,
}
"""Preference among the branches of a union that a value fits, and that have no logical type. Others have the last."""
_LAST_RANK: Final = 9
_ARTICLES: Final = {"int": "an", "long": "a"}
_BITS: Final = {"int": 31, "long": 63}


class _TooManyAttempts(MalformedValue):
    """The branches of unions are searched for too long."""


class Conversion:
    """Conversion of values of one kind. `leaves`: for each kind of type, and each logical type, the conversion of a
    value that is no array, map or record. `has_tags`: a branch of a union may be an object with its name as only key;
    otherwise it may be a tuple of its name and the value."""

    def __init__(self, leaves: Mapping[str, Leaf], *, has_tags: bool) -> None:
        self._leaves = leaves
        self._has_tags = has_tags

    def convert(self, kind: AvroType, value: Any) -> Any:
        """Return a value as fastavro writes it. Raises `MalformedValue`."""
        try:
            return _Run(self._leaves, has_tags=self._has_tags).convert(kind, value, None, 0)
        except RecursionError:
            raise fault(None, "is nested too deep") from None

    def branch(self, union: AvroType, value: Any) -> tuple[AvroType, Any]:
        """Return the branch of a union that a value is taken for, and the converted value. Raises `MalformedValue`."""
        return _Run(self._leaves, has_tags=self._has_tags).branch(union, value, None, 0)


class _Run:
    """Conversion of one value."""

    def __init__(self, leaves: Mapping[str, Leaf], *, has_tags: bool) -> None:
        self._leaves = leaves
        self._has_tags = has_tags
        self._attempts = 0

    def convert(self, kind: AvroType, value: Any, path: Path, depth: int) -> Any:
        if depth > VALUE_DEPTH_MAX:
            raise fault(path, f"is nested more than {VALUE_DEPTH_MAX} levels deep")
        if kind.kind == "record":
            return self._record(kind, value, path, depth)
        if kind.kind == "union":
            branch, converted = self.branch(kind, value, path, depth)
            return None if branch.kind == "null" else (branch.tag, converted)
        if kind.kind == "array":
            assert kind.items is not None
            if not isinstance(value, list | tuple):
                raise fault(path, f"is {shown_type(value)}, not an array")
            items = kind.items
            return [self.convert(items, one, (path, index), depth + 1) for index, one in enumerate(value)]
        if kind.kind == "map":
            assert kind.items is not None
            if not isinstance(value, dict):
                raise fault(path, f"is {shown_type(value)}, not a map")
            return {
                _string(kind, key, path): self.convert(kind.items, one, (path, key), depth + 1)
                for key, one in value.items()
            }
        return self._leaves[kind.logical or kind.kind](kind, value, path)

    def _record(self, kind: AvroType, value: Any, path: Path, depth: int) -> Any:
        if not isinstance(value, dict):
            raise fault(path, f"is {shown_type(value)}, not a record {kind.tag}")
        found = {}
        for name, one in kind.fields.items():
            if name in value:
                found[name] = self.convert(one.type, value[name], (path, name), depth + 1)
            elif not one.has_default:
                raise fault(path, f"has no field {name!r}, which has no default")
            else:
                found[name] = DEFAULTS.convert(one.type, one.default)
        if len(found) > len(kind.fields) or any(name not in kind.fields for name in value):
            others = next(name for name in value if name not in kind.fields)
            raise fault(path, f"has a field {others!r} that {kind.tag} does not have")
        return found

    def branch(self, union: AvroType, value: Any, path: Path, depth: int) -> tuple[AvroType, Any]:
        """Return the branch of a union that a value is taken for, and the converted value."""
        if isinstance(value, tuple) and len(value) == 2 and not self._has_tags:
            for one in union.branches:
                if one.tag == value[0]:
                    return one, self.convert(one, value[1], path, depth)
            raise fault(path, f"names {value[0]!r}, which is no branch of the union")
        if self._has_tags and isinstance(value, dict) and len(value) == 1:
            ((tag, inner),) = value.items()
            for one in union.branches:
                if one.tag == tag:
                    try:
                        return one, self.convert(one, inner, path, depth)
                    except _TooManyAttempts:
                        raise
                    except MalformedValue:
                        break  # a map or record may have a key of this name
        return self._fitting(union, value, path, depth)

    def _fitting(self, union: AvroType, value: Any, path: Path, depth: int) -> tuple[AvroType, Any]:
        candidates = union.branches
        if isinstance(value, dict | list | tuple):
            shapes = ("map", "record") if isinstance(value, dict) else ("array",)
            candidates = [one for one in candidates if one.kind in shapes]
            if len(candidates) > 1:
                self._attempts += 1
                if self._attempts > ATTEMPTS_MAX:
                    text = "costs too much: name the branches of the unions"
                    raise _TooManyAttempts(fault(path, text).message)
        else:
            candidates = [one for one in candidates if one.kind not in ("map", "record", "array")]
        fitting: list[tuple[int, AvroType, Any]] = []
        errors = []
        for one in candidates:
            try:
                converted = self.convert(one, value, path, depth)
            except _TooManyAttempts:
                raise
            except MalformedValue as error:
                if one.kind != "null":
                    errors.append(error.message)
                continue
            rank = _LAST_RANK if one.logical else _RANKS.get(one.kind, _LAST_RANK)
            fitting.append((rank, one, converted))
        if not fitting:
            if len(errors) == 1:
                raise MalformedValue(errors[0])
            names = ", ".join(one.tag for one in union.branches)
            raise fault(path, f"is {shown_type(value)}, which fits no branch of the union of {names}")
        least = min(rank for rank, _, _ in fitting)
        best = [(one, converted) for rank, one, converted in fitting if rank == least]
        if len(best) > 1:
            names = ", ".join(one.tag for one, _ in best)
            raise fault(path, f"fits several branches of the union, {names}: name the branch")
        return best[0]


# -- leaves --------


def _null(_kind: AvroType, value: Any, path: Path) -> None:
    if value is not None:
        raise fault(path, f"is {shown_type(value)}, not null")


def _boolean(_kind: AvroType, value: Any, path: Path) -> bool:
    if not isinstance(value, bool):
        raise fault(path, f"is {shown_type(value)}, not a boolean")
    return value


def _integer(kind: AvroType, value: Any, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise fault(path, f"is {shown_type(value)}, not {_ARTICLES[kind.kind]} {kind.kind}")
    bits = _BITS[kind.kind]
    if not -(1 << bits) <= value < 1 << bits:
        raise fault(path, f"does not fit into an Avro {kind.kind} of {bits + 1} bits")
    return value


def _float(kind: AvroType, value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fault(path, f"is {shown_type(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise fault(path, "does not fit into a double") from None
    if kind.kind == "float" and math.isfinite(number) and abs(number) > _FLOAT_MAX:
        raise fault(path, "does not fit into a float")
    return number


_FLOAT_MAX: Final = (2.0 - 2.0**-23) * 2.0**127


def _json_float(kind: AvroType, value: Any, path: Path) -> float:
    return float(value) if value in NUMBER_WORDS else _float(kind, value, path)


def _string(_kind: AvroType, value: Any, path: Path) -> str:
    if not isinstance(value, str):
        raise fault(path, f"is {shown_type(value)}, not a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise fault(path, "has a surrogate, which is no text") from None
    return value


def _enum(kind: AvroType, value: Any, path: Path) -> str:
    if not isinstance(value, str) or value not in kind.symbols:
        shown = repr(value[:40]) if isinstance(value, str) else shown_type(value)
        raise fault(path, f"is {shown}, not a symbol of {kind.tag}")
    return value


def _bytes(kind: AvroType, value: Any, path: Path) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise fault(path, f"is {shown_type(value)}, not bytes")
    return _sized(kind, bytes(value), path)


def _json_bytes(kind: AvroType, value: Any, path: Path) -> bytes:
    if not isinstance(value, str):
        raise fault(path, f"is {shown_type(value)}, not bytes in base64")
    try:
        return _sized(kind, base64.b64decode(value, validate=True), path)
    except (binascii.Error, ValueError):
        raise fault(path, "is not base64, as bytes must be") from None


def _default_bytes(kind: AvroType, value: Any, path: Path) -> bytes:
    """Avro: the code points of the text, up to 255, are the bytes."""
    try:
        return _sized(kind, value.encode("latin-1"), path)
    except (AttributeError, UnicodeEncodeError):
        raise fault(path, "is a default that is no bytes") from None


def _sized(kind: AvroType, value: bytes, path: Path) -> bytes:
    if kind.kind == "fixed" and len(value) != kind.size:
        raise fault(path, f"has {len(value)} bytes, not {kind.size} as {kind.tag}")
    return value


def _decimal(kind: AvroType, value: Any, path: Path) -> Decimal:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 4 * kind.precision:
        value = Decimal(value)
    if not isinstance(value, Decimal) or not value.is_finite():
        raise fault(path, f"is {shown_type(value)}, not a decimal of {kind.precision} digits")
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    if exponent < -kind.scale and any(digits[max(0, len(digits) + exponent + kind.scale) :]):
        raise fault(path, f"has more than {kind.scale} digits after the point")
    if len(digits) + exponent > kind.precision - kind.scale and value:
        raise fault(path, f"has more than {kind.precision} digits, {kind.scale} of them after the point")
    if exponent < -kind.scale:  # zeros at the end
        return Decimal((sign, digits[: max(0, len(digits) + exponent + kind.scale)], -kind.scale))
    return Decimal(value)


def _json_decimal(kind: AvroType, value: Any, path: Path) -> Decimal:
    if isinstance(value, float):
        value = repr(value)
    if isinstance(value, str):
        try:
            value = Decimal(value) if len(value) <= 2 * kind.precision + 20 else None
        except InvalidOperation:
            value = None
        if value is None:
            raise fault(path, f"is no decimal of {kind.precision} digits")
    return _decimal(kind, value, path)


def _temporal(wanted: type, words: str, *, has_zone: bool | None = None) -> Leaf:
    """Return the leaf for a type of the module datetime; `has_zone`: whether it must have a time zone."""

    def leaf(kind: AvroType, value: Any, path: Path) -> Any:
        if isinstance(value, int):
            return _integer(kind, value, path)
        if not isinstance(value, wanted) or (wanted is date and isinstance(value, datetime)):
            raise fault(path, f"is {shown_type(value)}, not {words}")
        if has_zone is not None and isinstance(value, datetime) and (value.tzinfo is not None) != has_zone:
            raise fault(path, f"is a time {'without' if has_zone else 'with'} a zone, not {words}")
        return value

    return leaf


def _json_temporal(wanted: type, leaf: Leaf) -> Leaf:
    def json_leaf(kind: AvroType, value: Any, path: Path) -> Any:
        if isinstance(value, str):
            try:
                value = wanted.fromisoformat(value)  # type: ignore[attr-defined]  # date, time and datetime have it
            except ValueError:
                raise fault(path, f"is {value[:40]!r}, which is not ISO 8601") from None
        return leaf(kind, value, path)

    return json_leaf


def _uuid(_kind: AvroType, value: Any, path: Path) -> str:
    try:
        return str(value if isinstance(value, UUID) else UUID(_string(_kind, value, path)))
    except ValueError:
        raise fault(path, "is no UUID") from None


_DATE: Final = _temporal(date, "a date")
_TIME: Final = _temporal(time, "a time of day")
_TIMESTAMP: Final = _temporal(datetime, "a timestamp with a zone", has_zone=True)
_LOCAL: Final = _temporal(datetime, "a timestamp without a zone", has_zone=False)
_TEMPORAL: Final[dict[str, tuple[type, Leaf]]] = {
    "date": (date, _DATE),
    "time-millis": (time, _TIME),
    "time-micros": (time, _TIME),
    "timestamp-millis": (datetime, _TIMESTAMP),
    "timestamp-micros": (datetime, _TIMESTAMP),
    "local-timestamp-millis": (datetime, _LOCAL),
    "local-timestamp-micros": (datetime, _LOCAL),
}
_COMMON: Final[dict[str, Leaf]] = {
    "null": _null,
    "boolean": _boolean,
    "int": _integer,
    "long": _integer,
    "string": _string,
    "enum": _enum,
}

PYTHON: Final = Conversion(
    {
        **_COMMON,
        "float": _float,
        "double": _float,
        "bytes": _bytes,
        "fixed": _bytes,
        "decimal": _decimal,
        "uuid": _uuid,
        **{name: leaf for name, (_, leaf) in _TEMPORAL.items()},
    },
    has_tags=False,
)
JSON: Final = Conversion(
    {
        **_COMMON,
        "float": _json_float,
        "double": _json_float,
        "bytes": _json_bytes,
        "fixed": _json_bytes,
        "decimal": _json_decimal,
        "uuid": _uuid,
        **{name: _json_temporal(wanted, leaf) for name, (wanted, leaf) in _TEMPORAL.items()},
    },
    has_tags=True,
)
DEFAULTS: Final = Conversion(
    {
        **_COMMON,
        "float": _json_float,
        "double": _json_float,
        "bytes": _default_bytes,
        "fixed": _default_bytes,
        "decimal": _default_bytes,
        "uuid": _uuid,
        **dict.fromkeys(_TEMPORAL, _integer),
    },
    has_tags=False,
)
