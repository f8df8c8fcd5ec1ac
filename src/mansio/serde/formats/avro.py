"""Parser of Avro schemas (Apache Avro 1.12, https://avro.apache.org/docs/1.12.0/specification/).

Neither of the two packages for Avro parses what a client sends. Apache's `avro` accepts a default value of any type,
never compares an alias with its namespace, and fails on records of type `error`; `fastavro` accepts names and unions
that Java refuses. Both keep no text that could be stored, and neither has a bound. The rules of the specification are
few, so this module has them, with the limits of Java's parser: what it accepts, Java accepts.

What Java accepts and this parser refuses, because the specification does: names and namespaces with other letters than
those of ASCII, a name without a namespace that is found outside the namespace of its use, and a default value that no
reader could use (a symbol that an enum lacks, a fixed of another size).

Invariants:
* Types refer to each other by objects, not by names: a recursive type is one object.
* The text that is stored differs from what the client wrote in white space and in escapes only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_text import (
    check_references,
    compact_text,
    read_json,
    shortened,
    sorted_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.serde.definition import ReferencedSchema

NAMED_TYPES_MAX: Final = 10_000
FIELDS_MAX: Final = 20_000
SYMBOLS_MAX: Final = 50_000
BRANCHES_MAX: Final = 50_000
"""Maximum numbers of named types, of fields, symbols and branches of unions in a schema with its references."""
DEFAULT_STEPS_MAX: Final = 500_000
"""Maximum number of pairs of a value and a type that are compared to check the default values of a schema."""

PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
_NAMED: Final = frozenset(("record", "error", "enum", "fixed"))
_ORDERS: Final = ("ascending", "descending", "ignore")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BARE_NAME: Final = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.]*\s*")
_INTEGERS: Final = {"int": 1 << 31, "long": 1 << 63}
_KEY_ORDER: Final = (
    "name",
    "namespace",
    "type",
    "doc",
    "default",
    "order",
    "aliases",
    "fields",
    "symbols",
    "items",
    "values",
    "size",
)
"""Order of the keys of a normalized type or field; other keys follow in alphabetical order."""


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record. `aliases`: other names under which a reader finds it."""

    name: str
    type: AvroType
    has_default: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class AvroType:
    """A type: `kind` is the name of a primitive type, `record` (an error of a protocol, too), `enum`, `fixed`, `array`,
    `map` or `union`. Named types have a full name and full names as aliases. Not changed after the schema is parsed.
    """

    kind: str
    name: str = ""
    aliases: frozenset[str] = frozenset()
    fields: tuple[AvroField, ...] = ()
    symbols: dict[str, None] = field(default_factory=dict)
    """Symbols of an enum in their order."""
    default_symbol: str | None = None
    size: int = 0
    items: AvroType | None = None
    """Type of the items of an array, or of the values of a map."""
    branches: tuple[AvroType, ...] = ()

    @property
    def short_name(self) -> str:
        """Name without the namespace."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class ParsedAvro:
    """A valid Avro schema: a `ParsedSchema` with its type."""

    text: str
    identity: str
    type: AvroType

    @property
    def record_names(self) -> tuple[str, ...]:
        """The full name of the type, if it has one."""
        return (self.type.name,) if self.type.name else ()


def parse(text: str, references: Sequence[ReferencedSchema] = (), *, normalize: bool = False) -> ParsedAvro:
    """Parse an Avro schema. A `SchemaParser`.

    The text is that of the client, without white space. The order of keys in an object does not matter to the identity,
    as it does not in the texts that Java writes. `normalize`: names are full names, and keys have one order.

    Raises `InvalidSchema`.
    """
    check_references(references)
    types = _Parser()
    for reference in dict.fromkeys(one.text for one in references):
        types.parse(_read(reference))
    document = _read(text)
    parsed = types.parse(document)
    if normalize:
        document = _normalized(document, "", False)
        stored = compact_text(document)
        return ParsedAvro(stored, stored, parsed)
    return ParsedAvro(compact_text(document), sorted_text(document), parsed)


def _read(text: str) -> Any:
    """Read the JSON of a schema. As in other registries, the name of a type needs no quotation marks."""
    if _BARE_NAME.fullmatch(text) and text.strip() not in {"true", "false"}:
        return text.strip()
    return read_json(text, "Avro schema")


class _Parser:
    """Parser of the schemas of one set of names: a schema and those to which it refers."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._primitives = {name: AvroType(name) for name in PRIMITIVES}
        self._defaults: list[tuple[AvroType, Any, str]] = []
        self._default_check = _DefaultCheck()
        self._counts = dict.fromkeys(("named types", "fields", "symbols", "branches of unions"), 0)

    def parse(self, document: Any) -> AvroType:
        """Parse one schema, whose named types later ones may use."""
        parsed = self._type(document, "", "")
        for kind, value, path in self._defaults:
            self._default_check.check(kind, value, path)
        self._defaults.clear()
        return parsed

    def _type(self, node: Any, namespace: str, path: str) -> AvroType:
        if isinstance(node, str):
            return self._referred(node, namespace, path)
        if isinstance(node, list):
            return self._union(node, namespace, path)
        if not isinstance(node, dict):
            raise _invalid(path, f"{shortened(node)} is no type")
        kind = node.get("type")
        if not isinstance(kind, str):
            raise _invalid(path, "a type without the name of its type in `type`")
        if kind in _NAMED:
            return self._definition(node, kind, namespace, path)
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            if part not in node:
                raise _invalid(path, f"the {kind} lacks `{part}`")
            return AvroType(kind, items=self._type(node[part], namespace, f"{path}/{part}"))
        return self._referred(kind, namespace, path)

    def _referred(self, name: str, namespace: str, path: str) -> AvroType:
        if name in self._primitives:
            return self._primitives[name]
        found = self._named.get(_qualified(name, namespace))
        if found is None:
            raise _invalid(path, f"the type {shortened(name)} is not defined")
        return found

    def _definition(self, node: dict[str, Any], kind: str, namespace: str, path: str) -> AvroType:
        name = _full_name(node, namespace, path)
        if name in self._named:
            raise _invalid(path, f"the type {name} is defined twice")
        own_namespace = name.rpartition(".")[0]
        defined = AvroType("record" if kind == "error" else kind, name)
        aliases = _aliases(node, path)
        for alias in aliases:
            _check_full_name(alias, path)
        defined.aliases = frozenset(_qualified(alias, own_namespace) for alias in aliases)
        self._named[name] = defined  # before its fields, which may use it
        self._count("named types", 1, NAMED_TYPES_MAX)
        if defined.kind == "record":
            defined.fields = self._fields(node, own_namespace, path)
        elif kind == "enum":
            self._define_enum(defined, node, path)
        else:
            size = node.get("size")
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 31:
                raise _invalid(path, f"the fixed {name} has no valid `size`")
            defined.size = size
        return defined

    def _fields(self, node: dict[str, Any], namespace: str, path: str) -> tuple[AvroField, ...]:
        nodes = node.get("fields")
        if not isinstance(nodes, list):
            raise _invalid(path, "the record has no array `fields`")
        self._count("fields", len(nodes), FIELDS_MAX)
        found: dict[str, AvroField] = {}
        for index, each in enumerate(nodes):
            field_path = f"{path}/fields/{index}"
            if not isinstance(each, dict) or "type" not in each:
                raise _invalid(field_path, "a field is an object with `name` and `type`")
            name = _checked_name(each.get("name"), field_path)
            if name in found:
                raise _invalid(field_path, f"the record has two fields {name}")
            if each.get("order", "ascending") not in _ORDERS:
                raise _invalid(field_path, f"{shortened(each['order'])} is no order of a field")
            kind = self._type(each["type"], namespace, f"{field_path}/type")
            if "default" in each:
                self._defaults.append((kind, each["default"], f"{field_path}/default"))
            found[name] = AvroField(name, kind, "default" in each, _aliases(each, field_path))
        return tuple(found.values())

    def _define_enum(self, defined: AvroType, node: dict[str, Any], path: str) -> None:
        symbols = node.get("symbols")
        if not isinstance(symbols, list):
            raise _invalid(path, "the enum has no array `symbols`")
        self._count("symbols", len(symbols), SYMBOLS_MAX)
        for index, symbol in enumerate(symbols):
            _checked_name(symbol, f"{path}/symbols/{index}")
            if symbol in defined.symbols:
                raise _invalid(f"{path}/symbols/{index}", f"the enum has the symbol {symbol} twice")
            defined.symbols[symbol] = None
        if "default" in node:
            default = node["default"]
            if not isinstance(default, str) or default not in defined.symbols:
                raise _invalid(f"{path}/default", f"{shortened(default)} is no symbol of the enum")
            defined.default_symbol = default

    def _union(self, nodes: list[Any], namespace: str, path: str) -> AvroType:
        self._count("branches of unions", len(nodes), BRANCHES_MAX)
        branches = []
        found: set[str] = set()
        for index, node in enumerate(nodes):
            branch = self._type(node, namespace, f"{path}/{index}")
            if branch.kind == "union":
                raise _invalid(f"{path}/{index}", "a union immediately inside a union")
            key = branch.name or branch.kind
            if key in found:
                raise _invalid(f"{path}/{index}", f"the union has {key} twice")
            found.add(key)
            branches.append(branch)
        return AvroType("union", branches=tuple(branches))

    def _count(self, what: str, more: int, limit: int) -> None:
        self._counts[what] += more
        if self._counts[what] > limit:
            raise InvalidSchema(f"the Avro schema has more than {limit:,} {what}")


class _DefaultCheck:
    """Check of default values. The default of a union may be a value of any of its branches (Avro 1.12)."""

    def __init__(self) -> None:
        self._steps = 0

    def check(self, kind: AvroType, value: Any, path: str) -> None:
        if not self._is_valid(kind, value):
            raise _invalid(path, f"the default {shortened(value)} is no {kind.name or kind.kind}")

    def _is_valid(self, kind: AvroType, value: Any) -> bool:
        self._steps += 1
        if self._steps > DEFAULT_STEPS_MAX:
            raise InvalidSchema("the default values of the Avro schema are too large")
        match kind.kind:
            case "union":
                return any(self._is_valid(branch, value) for branch in kind.branches)
            case "array":
                return isinstance(value, list) and self._are_valid(kind, value)
            case "map":
                return isinstance(value, dict) and self._are_valid(kind, value.values())
            case "record":
                # The default of a field that the value lacks is checked where it is declared.
                return isinstance(value, dict) and all(
                    self._is_valid(each.type, value[each.name]) if each.name in value else each.has_default
                    for each in kind.fields
                )
            case _:
                return _is_valid_default(kind, value)

    def _are_valid(self, kind: AvroType, values: Iterable[Any]) -> bool:
        assert kind.items is not None
        return all(self._is_valid(kind.items, each) for each in values)


def _is_valid_default(kind: AvroType, value: Any) -> bool:
    """Whether a value is the default of a type without parts. Bytes are written as characters up to U+00FF."""
    match kind.kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            limit = _INTEGERS[kind.kind]
            return isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "enum":
            return isinstance(value, str) and value in kind.symbols
        case "string":
            return isinstance(value, str)
        case _:
            is_bytes = isinstance(value, str) and all(character <= "\xff" for character in value)
            return is_bytes and (kind.kind == "bytes" or len(value) == kind.size)


def _full_name(node: dict[str, Any], namespace: str, path: str) -> str:
    """Full name of a definition. Its namespace is that in the name, else its own, else that of the enclosing type."""
    name, own = node.get("name"), node.get("namespace")
    if not isinstance(name, str):
        raise _invalid(path, "a named type has no `name`")
    if own is not None and not isinstance(own, str):
        raise _invalid(path, f"{shortened(own)} is no namespace")
    full = _qualified(name, namespace if own is None else own)
    _check_full_name(full, path)
    if full in PRIMITIVES:
        raise _invalid(path, f"a type must not have the name of the primitive type {full}")
    return full


def _qualified(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _aliases(node: dict[str, Any], path: str) -> tuple[str, ...]:
    aliases = node.get("aliases")
    if aliases is None:
        return ()
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise _invalid(path, "`aliases` is no array of names")
    return tuple(aliases)


def _checked_name(name: Any, path: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(path, f"{shortened(name)} is no valid name")
    return name


def _check_full_name(name: str, path: str) -> None:
    for part in name.split("."):
        if not _NAME.fullmatch(part):
            raise _invalid(path, f"{shortened(name)} is no valid name")


def _invalid(path: str, reason: str) -> InvalidSchema:
    return InvalidSchema(f"invalid Avro schema at {path or '/'}: {reason}")


def _normalized(node: Any, namespace: str, is_field: bool) -> Any:
    """Return a valid type, or a field of a record, in the normalized form: a primitive type is its name, names are full
    names, and the keys have one order. Documentation, aliases, defaults and other properties are kept."""
    if isinstance(node, str):
        return node if node in PRIMITIVES else _qualified(node, namespace)
    if isinstance(node, list):
        return [_normalized(branch, namespace, False) for branch in node]
    if is_field:
        changed = {**node, "type": _normalized(node["type"], namespace, False)}
        return _ordered(
            {key: value for key, value in changed.items() if (key, value) != ("order", "ascending")}
        )
    kind = node["type"]
    if kind in _NAMED:
        return _normalized_definition(node, namespace)
    if kind in ("array", "map"):
        part = "items" if kind == "array" else "values"
        return _ordered({**node, part: _normalized(node[part], namespace, False)})
    name = kind if kind in PRIMITIVES else _qualified(kind, namespace)
    return name if len(node) == 1 or kind not in PRIMITIVES else _ordered({**node, "type": name})


def _normalized_definition(node: dict[str, Any], namespace: str) -> dict[str, Any]:
    name = _full_name(node, namespace, "")
    own_namespace = name.rpartition(".")[0]
    changed = {key: value for key, value in node.items() if key != "namespace"}
    changed["name"] = name
    if namespace and not own_namespace:
        changed["namespace"] = ""
    if node["type"] in ("record", "error"):
        changed["fields"] = [_normalized(each, own_namespace, True) for each in node["fields"]]
    if node.get("aliases"):
        changed["aliases"] = [_qualified(alias, own_namespace) for alias in node["aliases"]]
    return _ordered(changed)


def _ordered(node: dict[str, Any]) -> dict[str, Any]:
    first = {key: node[key] for key in _KEY_ORDER if key in node}
    return first | {key: _sorted_value(node[key]) for key in sorted(node.keys() - first.keys())}


def _sorted_value(value: Any) -> Any:
    """Return a property with the keys of its objects in alphabetical order."""
    return json.loads(sorted_text(value)) if isinstance(value, dict | list) else value
