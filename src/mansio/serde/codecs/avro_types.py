"""Types of a compiled Avro schema: a graph of nodes, in which a recursive type contains itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from mansio.serde.errors import UnsupportedSchema

SCHEMA_DEPTH_MAX: Final = 64
TYPES_MAX: Final = 20_000
"""Maximum number of types of a schema, each use of a primitive type included."""
FREE_VALUES_MAX: Final = 100_000
"""Maximum number of values in a value that take no bytes: nulls, and records without fields or with such fields."""
DECIMAL_PRECISION_MAX: Final = 1_000
NAMED_KINDS: Final = frozenset(("record", "error", "enum", "fixed"))
PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
_LOGICAL_TYPES: Final = frozenset(
    (
        ("int", "date"),
        ("int", "time-millis"),
        ("long", "time-micros"),
        ("long", "timestamp-millis"),
        ("long", "timestamp-micros"),
        ("long", "local-timestamp-millis"),
        ("long", "local-timestamp-micros"),
        ("string", "uuid"),
        ("bytes", "decimal"),
        ("fixed", "decimal"),
    )
)


@dataclass(slots=True, eq=False)
class AvroType:
    """A type. `kind`: Avro's name of it, `union` for a union; `logical`: its logical type, if fastavro converts it;
    `tag`: what names it in a union: its full name, or its kind."""

    kind: str
    tag: str
    logical: str = ""
    fields: dict[str, AvroField] = field(default_factory=dict)
    items: AvroType | None = None
    """Type of the elements of an array, and of the values of a map."""
    branches: list[AvroType] = field(default_factory=list)
    symbols: tuple[str, ...] = ()
    size: int = 0
    precision: int = 0
    scale: int = 0


@dataclass(slots=True, eq=False)
class AvroField:
    """A field of a record. `default`: as the schema has it; None with `has_default` is the default null."""

    type: AvroType
    has_default: bool
    default: Any


class TypeCompiler:
    """Visitor of a schema that fastavro has parsed. `is_recursive`: whether a type contains itself."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.is_recursive = False
        self.types: list[AvroType] = []
        self._named = named
        self._done: dict[str, AvroType] = {}
        self._open: set[str] = set()
        self._depth = 0

    def compile(self, node: Any) -> AvroType:
        """Return the type of a schema. Raises `UnsupportedSchema`."""
        self._depth += 1
        if self._depth > SCHEMA_DEPTH_MAX:
            raise UnsupportedSchema(f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
        try:
            return self._compile(node)
        finally:
            self._depth -= 1

    def _compile(self, node: Any) -> AvroType:
        if isinstance(node, list):
            found = self._new("union", "union")
            found.branches = [self.compile(one) for one in node]
            return found
        if isinstance(node, str):
            return self._new(node, node) if node in PRIMITIVES else self._named_type(node)
        kind = node["type"]
        if isinstance(kind, list | dict):
            return self.compile(kind)
        if kind in NAMED_KINDS:
            return self._named_type(node["name"], node)
        if kind in ("array", "map"):
            found = self._new(kind, kind)
            found.items = self.compile(node["items" if kind == "array" else "values"])
            return found
        if kind not in PRIMITIVES:
            return self._named_type(kind)
        found = self._new(kind, kind)
        _add_logical(found, node)
        return found

    def _new(self, kind: str, tag: str) -> AvroType:
        if len(self.types) >= TYPES_MAX:
            raise UnsupportedSchema(f"the schema has more than {TYPES_MAX} types")
        self.types.append(AvroType(kind, tag))
        return self.types[-1]

    def _named_type(self, name: str, node: dict[str, Any] | None = None) -> AvroType:
        if name in self._done:
            self.is_recursive = self.is_recursive or name in self._open
            return self._done[name]
        node = self._named[name] if node is None else node
        kind = "record" if node["type"] == "error" else node["type"]
        found = self._done[name] = self._new(kind, name)
        if kind == "enum":
            found.symbols = tuple(node["symbols"])
        elif kind == "fixed":
            found.size = node["size"]
            _add_logical(found, node)
        else:
            self._open.add(name)
            found.fields = {
                one["name"]: AvroField(self.compile(one["type"]), "default" in one, one.get("default"))
                for one in node["fields"]
            }
            self._open.discard(name)
        return found


def _add_logical(found: AvroType, node: dict[str, Any]) -> None:
    """Add the logical type of a schema. An unknown or invalid one is ignored (Avro specification)."""
    logical = node.get("logicalType")
    if (found.kind, logical) not in _LOGICAL_TYPES:
        return
    if logical == "decimal":
        precision, scale = node.get("precision"), node.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision:
            return
        if precision > DECIMAL_PRECISION_MAX:
            raise UnsupportedSchema(f"a decimal has at most {DECIMAL_PRECISION_MAX} digits, not {precision}")
        found.precision, found.scale = precision, scale
    found.logical = str(logical)


class FreeValues:
    """Number of values that take no bytes in a value of a type, outside its arrays, maps and unions."""

    def __init__(self) -> None:
        self._found: dict[AvroType, tuple[int, bool]] = {}

    def count(self, kind: AvroType) -> int:
        """Return that number; it is not larger than `FREE_VALUES_MAX + 1`."""
        return self._result(kind)[0]

    def is_empty(self, kind: AvroType) -> bool:
        """Return whether no value of the type takes a byte."""
        return self._result(kind)[1]

    def _result(self, kind: AvroType) -> tuple[int, bool]:
        found = self._found.get(kind)
        if found is None:
            self._found[kind] = (0, False)  # of a type that contains itself
            found = self._found[kind] = self._compute(kind)
        return found

    def _compute(self, kind: AvroType) -> tuple[int, bool]:
        if kind.kind == "null" or (kind.kind == "fixed" and not kind.size):
            return 1, True
        if kind.kind != "record":
            return 0, False
        inner = [self._result(one.type) for one in kind.fields.values()]
        is_empty = all(empty for _, empty in inner)
        return min(sum(count for count, _ in inner) + is_empty, FREE_VALUES_MAX + 1), is_empty
