"""JSON Schema as Arrow types, and decoder of JSON values (JSON Schema drafts 4 to 2020-12, RFC 8259).

* object with `properties` -> struct; object with only `additionalProperties` (a schema) -> map of string
* array with `items` -> array; string -> string; boolean -> boolean; integer -> bigint; number -> double
* string with `format` date -> date, date-time -> timestamp (RFC 3339)
* `type: [T, "null"]`, `anyOf`/`oneOf` of T and null, `enum`, `const`, `$ref` inside the document
* everything else (several types, no type, `allOf`, tuples) -> string with the JSON text

A value is checked for types, formats above and `required`, because a column needs these; other rules of the schema
(`pattern`, `minimum`, ...) are checked by `mansio pipeline schema-check`. Properties that the schema does not name have
no column.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mansio.schemas.column_types import (
    DEPTH_MAX,
    FIELDS_MAX,
    TIMESTAMP,
    check_size,
    list_type,
    map_type,
    struct_type,
)
from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Convert = Callable[[Any, str], Any]
    """Function (value, JSON path) -> what Arrow accepts. Raises `MalformedValue`."""

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1
_UNSUPPORTED_KEYWORDS: Final = ("allOf", "if", "patternProperties", "prefixItems", "dependentSchemas", "not")


class JsonSchema:
    """A parsed JSON Schema: its column type, and decoding of values."""

    def __init__(self, text: str, references: Sequence[str] = ()) -> None:
        """Raise `UnsupportedSchema`, also for references to other documents."""
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnsupportedSchema(f"this is no JSON Schema: {reason(error)}") from error
        if references:
            raise UnsupportedSchema(
                "a JSON Schema that refers to other documents is not supported: inline them"
            )
        if not isinstance(schema, dict):
            raise UnsupportedSchema("this is no JSON Schema: it must be an object")
        kind, self._convert = _Compiler(schema).compile(schema)
        self.type: pa.DataType = check_size(kind)

    def decode(self, value: bytes) -> Any:
        """Decode a JSON value. Raises `MalformedValue`."""
        try:
            found = json.loads(value, parse_constant=_refuse_constant)
            return None if found is None else self._convert(found, "$")
        except RecursionError as error:
            raise MalformedValue("the value is nested too deep") from error
        except ValueError as error:  # of JSON, UTF-8 and numbers
            raise MalformedValue(f"the value is not JSON: {reason(error)}") from error


def _refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts and RFC 8259 does not allow."""
    raise ValueError(f"{word} is no number")


class _Compiler:
    """Visitor of a JSON Schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._open: list[str] = []
        self._fields = 0
        self._depth = 0

    def compile(self, schema: Any) -> tuple[pa.DataType, Convert]:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise UnsupportedSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        try:
            return self._compile(schema)
        finally:
            self._depth -= 1

    def _compile(self, schema: Any) -> tuple[pa.DataType, Convert]:
        if not isinstance(schema, dict):
            return pa.string(), _json_text
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference)
        if any(word in schema for word in _UNSUPPORTED_KEYWORDS):
            return pa.string(), _json_text
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(alternatives, list):
            present = [one for one in alternatives if not _is_null(one)]
            return self.compile(present[0]) if len(present) == 1 else (pa.string(), _json_text)
        kind = _type_of(schema)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return {"date": (pa.date32(), _date), "date-time": (TIMESTAMP, _timestamp)}.get(
                str(schema.get("format")), (pa.string(), _string)
            )
        return {
            "integer": (pa.int64(), _integer),
            "number": (pa.float64(), _number),
            "boolean": (pa.bool_(), _boolean),
        }.get(kind, (pa.string(), _json_text))

    def _reference(self, reference: str) -> tuple[pa.DataType, Convert]:
        if not reference.startswith("#"):
            raise UnsupportedSchema(
                f"the $ref {reference!r} leads out of the schema, which cannot be followed"
            )
        if reference in self._open:
            raise UnsupportedSchema(
                f"the schema {reference} contains itself, and a column type cannot: decode it in a function of your own"
            )
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise UnsupportedSchema(f"the $ref {reference!r} leads to nothing")
            target = target[name]
        self._open.append(reference)
        found = self.compile(target)
        self._open.pop()
        return found

    def _object(self, schema: dict[str, Any]) -> tuple[pa.DataType, Convert]:
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and properties:
            return self._struct(properties, schema.get("required"))
        if isinstance(others, dict) and others:
            kind, convert = self.compile(others)

            def to_pairs(value: Any, path: str) -> Any:
                _expect(value, dict, "an object", path)
                return [
                    (key, None if one is None else convert(one, f"{path}.{key}"))
                    for key, one in value.items()
                ]

            return map_type(pa.string(), kind), to_pairs
        return pa.string(), _json_text

    def _struct(self, properties: dict[str, Any], required: Any) -> tuple[pa.DataType, Convert]:
        fields: list[tuple[str, pa.DataType]] = []
        converters: list[tuple[str, Convert]] = []
        for name, schema in properties.items():
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise UnsupportedSchema(f"the schema has more than {FIELDS_MAX} fields")
            kind, convert = self.compile(schema)
            fields.append((name, kind))
            converters.append((name, convert))
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []

        def to_dict(value: Any, path: str) -> Any:
            _expect(value, dict, "an object", path)
            for name in needed:
                if name not in value:
                    raise MalformedValue(f"{path} has no property {name!r}, which is required")
            found: dict[str, Any] = {}
            for name, convert in converters:
                one = value.get(name)
                if one is not None:
                    found[name] = convert(one, f"{path}.{name}")
            return found

        return struct_type(fields), to_dict

    def _array(self, schema: dict[str, Any]) -> tuple[pa.DataType, Convert]:
        items = schema.get("items")
        if isinstance(items, list):
            return pa.string(), _json_text
        kind, convert = self.compile(items)

        def to_list(value: Any, path: str) -> Any:
            _expect(value, list, "an array", path)
            return [
                None if one is None else convert(one, f"{path}[{index}]") for index, one in enumerate(value)
            ]

        return list_type(kind), to_list


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (schema.get("type") == "null" or schema.get("const", "") is None)


def _type_of(schema: dict[str, Any]) -> str:
    """Return the only type of the values apart from null; empty if there are several or none."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds
    if isinstance(kinds, list):
        present = [one for one in kinds if one != "null"]
        return str(present[0]) if len(present) == 1 else ""
    if "properties" in schema:
        return "object"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        names = {_type_of_value(one) for one in values if one is not None}
        return names.pop() if len(names) == 1 else ""
    return ""


def _type_of_value(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return names.get(type(value), "")


def _expect(value: Any, kind: type, name: str, path: str) -> None:
    if not isinstance(value, kind):
        raise MalformedValue(f"{path} is {_shown(value)}, not {name}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _string(value: Any, path: str) -> Any:
    _expect(value, str, "a string", path)
    return value


def _boolean(value: Any, path: str) -> Any:
    _expect(value, bool, "a boolean", path)
    return value


def _integer(value: Any, path: str) -> Any:
    """JSON Schema: a number without a fraction is an integer, such as 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedValue(f"{path} is {_shown(value)}, not an integer")
    if not INT64_MIN <= value <= INT64_MAX:
        raise MalformedValue(f"{path} does not fit into 64 bits")
    return value


def _number(value: Any, path: str) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise MalformedValue(f"{path} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise MalformedValue(f"{path} does not fit into a double")
    return number


def _date(value: Any, path: str) -> Any:
    _expect(value, str, "a date", path)
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise MalformedValue(f"{path} is {_shown(value)}, not a date such as 2026-01-31") from None


def _timestamp(value: Any, path: str) -> Any:
    _expect(value, str, "a timestamp", path)
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise MalformedValue(
            f"{path} is {_shown(value)}, not a timestamp with a zone such as 2026-01-31T12:00:00Z"
        )
    return found.astimezone(UTC)


def _json_text(value: Any, _path: str) -> str:
    """Return the JSON text of a value; the text itself of a string."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
