"""Plain JSON of decoded Avro values (see `mansio.serde.codecs.avro`)."""

from __future__ import annotations

import base64
import math
from datetime import date, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.serde.codecs.avro_values import JSON, PYTHON
from mansio.serde.errors import MalformedValue

if TYPE_CHECKING:
    from mansio.serde.codecs.avro_types import AvroType


def to_json(kind: AvroType, value: Any) -> Any:
    """Return the plain JSON of a value of fastavro. Branches of unions that are named types are tuples, or what
    `PYTHON` takes for a branch."""
    if kind.kind == "union":
        return _union(kind, value)
    if kind.kind == "record":
        return {name: to_json(one.type, value[name]) for name, one in kind.fields.items() if name in value}
    if kind.kind == "array":
        assert kind.items is not None
        return [to_json(kind.items, one) for one in value]
    if kind.kind == "map":
        assert kind.items is not None
        return {key: to_json(kind.items, one) for key, one in value.items()}
    return _leaf(value)


def _leaf(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _union(kind: AvroType, value: Any) -> Any:
    if value is None:
        return None
    branch, inner = _branch(kind, value)
    found = to_json(branch, inner)
    others = [one for one in kind.branches if one.kind != "null" and one is not branch]
    if not others and not (isinstance(found, dict) and len(found) == 1):
        return found
    try:
        if JSON.branch(kind, found)[0] is branch:
            return found
    except MalformedValue:
        pass  # it fits several branches
    return {branch.tag: found}


def _branch(kind: AvroType, value: Any) -> tuple[AvroType, Any]:
    if isinstance(value, tuple):
        for one in kind.branches:
            if one.tag == value[0]:
                return one, value[1]
    shape = "map" if isinstance(value, dict) else "array" if isinstance(value, list) else ""
    fitting = [one for one in kind.branches if one.kind == shape]
    if not fitting and shape == "map":
        fitting = [one for one in kind.branches if one.kind == "record"]
    if len(fitting) == 1:
        return fitting[0], value
    branch, _ = PYTHON.branch(kind, value)
    return branch, value
