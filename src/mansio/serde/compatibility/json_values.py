"""Validation of a single JSON value, such as one of an `enum`, against a compiled JSON Schema.

Values of a schema are few and small, so the package `jsonschema` is not needed, which would match regular expressions
without a bound.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_text import sorted_text
from mansio.serde.formats.patterns import matcher

if TYPE_CHECKING:
    from mansio.serde.formats.json_schema import JsonNode

STEPS_MAX: Final = 300_000
"""Maximum number of pairs of a value and a schema that are visited in one comparison."""
ALL_TYPES: Final = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""Types of values that have no value in common: a number is an integer or a fraction."""


class UndecidedPattern(Exception):
    """A regular expression that the engine does not have."""


def types_of(node: JsonNode) -> frozenset[str]:
    """Types of values that a schema names, as parts of `ALL_TYPES`."""
    if node.types is None:
        return ALL_TYPES
    if "number" in node.types:
        return (node.types - {"number"}) | {"integer", "fraction"}
    return node.types


def type_of(value: Any) -> str:
    """Type of a value, one of `ALL_TYPES`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def value_key(value: Any) -> tuple[str, Any]:
    """Return a key that is equal for equal JSON values: 1 is 1.0, and is not true."""
    kind = type_of(value)
    if kind in ("array", "object"):
        return kind, sorted_text(_with_integers(value))
    return kind, value


def is_multiple(value: float, divisor: float) -> bool:
    """Whether a number is a multiple of another one, as decimal numbers: 0.3 is a multiple of 0.1."""
    return (Fraction(str(value)) / Fraction(str(divisor))).denominator == 1


class ValueCheck:
    """Check of values. Counts its steps over all values."""

    def __init__(self) -> None:
        self._steps = 0
        self._keys: dict[int, frozenset[tuple[str, Any]]] = {}

    def rejection(self, node: JsonNode, value: Any) -> str:
        """Return the keyword that rejects a value; an empty text if the schema accepts it.

        Raises `UndecidedPattern`, and `InvalidSchema` after `STEPS_MAX` steps.
        """
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise InvalidSchema("the values in the schemas are too large to be compared")
        match node.kind:
            case "true":
                return ""
            case "false":
                return "false"
            case "any":
                return "" if any(not self.rejection(part, value) for part in node.parts) else "anyOf"
            case "one":
                count = sum(not self.rejection(part, value) for part in node.parts)
                return "" if count == 1 else "oneOf"
            case "not":
                return "" if self.rejection(node.parts[0], value) else "not"
            case "if":
                condition, accepted, rejected = node.parts
                return self.rejection(rejected if self.rejection(condition, value) else accepted, value)
            case _:
                return self._rejection(node, value)

    def _rejection(self, node: JsonNode, value: Any) -> str:
        kind = type_of(value)
        if kind not in types_of(node):
            return "type"
        if node.values is not None and value_key(value) not in self._keys_of(node):
            return "enum"
        if node.opaque:
            raise UndecidedPattern
        found = ""
        match kind:
            case "integer" | "fraction":
                found = _number_rejection(node.keywords, value)
            case "string":
                found = _string_rejection(node.keywords, value)
            case "array":
                found = self._array_rejection(node, value)
            case "object":
                found = self._object_rejection(node, value)
        if found:
            return found
        return next((found for _, part in node.conjuncts if (found := self.rejection(part, value))), "")

    def _array_rejection(self, node: JsonNode, value: list[Any]) -> str:
        if found := _size_rejection(node.keywords, len(value), "Items"):
            return found
        if "uniqueItems" in node.keywords and len({value_key(one) for one in value}) < len(value):
            return "uniqueItems"
        for index, one in enumerate(value):
            part = node.prefix[index] if index < len(node.prefix) else node.items
            if part is not None and self.rejection(part, one):
                return "items"
        return ""

    def _object_rejection(self, node: JsonNode, value: dict[str, Any]) -> str:
        if found := _size_rejection(node.keywords, len(value), "Properties"):
            return found
        if not node.required <= value.keys():
            return "required"
        if any(name in value and not needed <= value.keys() for name, needed in node.dependencies.items()):
            return "dependentRequired"
        if any(name in value and self.rejection(part, value) for name, part in node.dependent.items()):
            return "dependentSchemas"
        for name, one in value.items():
            if node.names is not None and self.rejection(node.names, name):
                return "propertyNames"
            if any(self.rejection(part, one) for part in property_schemas(node, name)):
                return "properties"
        return ""

    def _keys_of(self, node: JsonNode) -> frozenset[tuple[str, Any]]:
        if id(node) not in self._keys:
            self._keys[id(node)] = frozenset(map(value_key, node.values or ()))
        return self._keys[id(node)]


def property_schemas(node: JsonNode, name: str) -> list[JsonNode]:
    """Schemas that apply to a property. Raises `UndecidedPattern`."""
    found = [node.properties[name]] if name in node.properties else []
    for pattern, part in node.patterns.items():
        finds = matcher(pattern)
        if finds is None:
            raise UndecidedPattern
        if finds(name):
            found.append(part)
    if not found and node.additional is not None:
        found.append(node.additional)
    return found


def _size_rejection(keywords: dict[str, Any], size: int, suffix: str) -> str:
    for keyword in (f"min{suffix}", f"max{suffix}"):
        if (
            keyword in keywords
            and (size < keywords[keyword]) == keyword.startswith("min")
            and size != keywords[keyword]
        ):
            return keyword
    return ""


def _string_rejection(keywords: dict[str, Any], value: str) -> str:
    if found := _size_rejection(keywords, len(value), "Length"):
        return found
    if "pattern" not in keywords:
        return ""
    finds = matcher(keywords["pattern"])
    if finds is None:
        raise UndecidedPattern
    return "" if finds(value) else "pattern"


def _number_rejection(keywords: dict[str, Any], value: float) -> str:
    checks = (
        ("minimum", lambda limit: value >= limit),
        ("exclusiveMinimum", lambda limit: value > limit),
        ("maximum", lambda limit: value <= limit),
        ("exclusiveMaximum", lambda limit: value < limit),
        ("multipleOf", lambda limit: is_multiple(value, limit)),
    )
    return next((name for name, holds in checks if name in keywords and not holds(keywords[name])), "")


def _with_integers(value: Any) -> Any:
    """Return a value whose numbers without a fraction are integers."""
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_integers(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value == int(value) else value
