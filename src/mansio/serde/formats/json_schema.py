"""Parser of JSON Schemas: drafts 4, 6, 7, 2019-09 and 2020-12 (https://json-schema.org/specification).

A schema is checked as the meta-schema of its draft does, and compiled into nodes, one for each object that is a schema.
The package `jsonschema` is not used for that: its check of a megabyte takes minutes, and has no bound.

A `$ref` leads to a place in the same document, to a schema with an `$id`, or to a reference by its name; to no file and
no network. It may lead into a schema that contains it, as long as a value is nested deeper there.

Invariants:
* Nodes refer to each other by objects. No node contains itself through keywords that apply to the same value (`$ref`,
  `allOf`, `anyOf`, `oneOf`, `not`, `if`, `dependentSchemas`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_text import (
    check_references,
    compact_text,
    read_json,
    shortened,
    sorted_text,
)
from mansio.serde.formats.patterns import check_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.serde.definition import ReferencedSchema

NODES_MAX: Final = 50_000
"""Maximum number of schemas in a schema with its references."""
PATTERNS_MAX: Final = 200
"""Maximum number of different regular expressions in a schema with its references."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, DRAFT_2020 = 4, 6, 7, 2019, 2020
_DRAFTS: Final = {
    "json-schema.org/draft-04/schema": DRAFT_4,
    "json-schema.org/draft-06/schema": DRAFT_6,
    "json-schema.org/draft-07/schema": DRAFT_7,
    "json-schema.org/draft/2019-09/schema": DRAFT_2019,
    "json-schema.org/draft/2020-12/schema": DRAFT_2020,
}
_SCHEMAS: Final = {
    "additionalProperties": DRAFT_4,
    "additionalItems": DRAFT_4,
    "not": DRAFT_4,
    "contains": DRAFT_6,
    "propertyNames": DRAFT_6,
    "if": DRAFT_7,
    "then": DRAFT_7,
    "else": DRAFT_7,
    "unevaluatedItems": DRAFT_2019,
    "unevaluatedProperties": DRAFT_2019,
    "contentSchema": DRAFT_2019,
}
"""Keywords whose value is a schema, and the draft that introduced them."""
_LISTS: Final = {"allOf": DRAFT_4, "anyOf": DRAFT_4, "oneOf": DRAFT_4, "prefixItems": DRAFT_2020}
"""Keywords whose value is an array of schemas."""
_MAPS: Final = {
    "properties": DRAFT_4,
    "patternProperties": DRAFT_4,
    "definitions": DRAFT_4,
    "$defs": DRAFT_4,
    "dependentSchemas": DRAFT_2019,
}
"""Keywords whose value is an object of schemas."""
_COUNTS: Final = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS: Final = (
    "$schema",
    "$ref",
    "$id",
    "$anchor",
    "$dynamicRef",
    "$recursiveRef",
    "$comment",
    "title",
    "description",
    "format",
    "pattern",
)
_OPAQUE: Final = {
    "contains": DRAFT_6,
    "minContains": DRAFT_2019,
    "maxContains": DRAFT_2019,
    "unevaluatedItems": DRAFT_2019,
    "unevaluatedProperties": DRAFT_2019,
}
"""Keywords that restrict values and are not compiled: two schemas are compared by the text of these."""


@dataclass(slots=True, eq=False)
class JsonNode:
    """A compiled schema. Not changed after the schema is parsed.

    `kind`: `true` and `false` accept everything and nothing; `all` has the keywords below, which must all hold; `any`,
    `one`, `not` and `if` have only `parts`: the alternatives, the schema that must not hold, or the schemas of `if`,
    `then` and `else`.
    """

    kind: str
    raw: Any = None
    """What the client wrote."""
    parts: tuple[JsonNode, ...] = ()
    types: frozenset[str] | None = None
    """Names of types, where `number` does not imply `integer`; None: all types."""
    values: list[Any] | None = None
    """Values of `enum` or `const`."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """Limits, `pattern`, `format`, `multipleOf` and `uniqueItems`, in the form of draft 2020-12."""
    required: frozenset[str] = frozenset()
    properties: dict[str, JsonNode] = field(default_factory=dict)
    patterns: dict[str, JsonNode] = field(default_factory=dict)
    additional: JsonNode | None = None
    """Schema of properties that are in neither; None: all are accepted."""
    names: JsonNode | None = None
    dependencies: dict[str, frozenset[str]] = field(default_factory=dict)
    dependent: dict[str, JsonNode] = field(default_factory=dict)
    prefix: tuple[JsonNode, ...] = ()
    """Schemas of the first items of an array."""
    items: JsonNode | None = None
    """Schema of the other items; None: all are accepted."""
    conjuncts: list[tuple[str, JsonNode]] = field(default_factory=list)
    """Schemas that must hold, too, each with its path in this schema: those of `$ref`, `allOf`, `anyOf` and so on."""
    opaque: dict[str, Any] = field(default_factory=dict)
    """Keywords that are not compiled."""

    @property
    def accepts_everything(self) -> bool:
        """Whether the schema has no keyword that restricts values."""
        return self.kind == "true" or (self.kind == "all" and self._has_no_keyword)

    @property
    def _has_no_keyword(self) -> bool:
        restricting = (
            self.keywords,
            self.required,
            self.properties,
            self.patterns,
            self.conjuncts,
            self.opaque,
        )
        others = (self.dependencies, self.dependent, self.prefix)
        absent = (self.types, self.values, self.additional, self.names, self.items)
        return not any(restricting) and not any(others) and all(one is None for one in absent)


TRUE: Final = JsonNode("true", True)
FALSE: Final = JsonNode("false", False)


@dataclass(frozen=True, slots=True)
class ParsedJson:
    """A valid JSON Schema: a `ParsedSchema` with its compiled form."""

    text: str
    identity: str
    root: JsonNode
    record_names: tuple[str, ...] = ()
    """The title, if there is one."""


def parse(
    text: str,
    references: Sequence[ReferencedSchema] = (),
    *,
    normalize: bool = False,
    default_draft: int = DRAFT_7,
) -> ParsedJson:
    """Parse a JSON Schema. A `SchemaParser`.

    The text is that of the client, without white space, and its order of keys matters to the identity. `normalize`: the
    keys of each object are in alphabetical order. `default_draft`: draft of a schema without `$schema`.

    Raises `InvalidSchema`.
    """
    check_references(references)
    document = read_json(text, "JSON Schema")
    parser = _Parser(default_draft)
    for reference in dict.fromkeys(references):
        parser.add(read_json(reference.text, "JSON Schema"), reference.name)
    root = parser.add(document, "")
    parser.link()
    stored = sorted_text(document) if normalize else compact_text(document)
    title = document.get("title") if isinstance(document, dict) else None
    return ParsedJson(stored, stored, root, (title,) if isinstance(title, str) and title else ())


class _Scope(NamedTuple):
    """Where a schema is: the draft of its document, the URI to which its references are relative, and its path."""

    draft: int
    base: str
    path: str

    def at(self, *steps: str | int) -> _Scope:
        more = "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)
        return self._replace(path=self.path + more)


class _Parser:
    """Parser of a schema and those to which it refers."""

    def __init__(self, default_draft: int) -> None:
        self._default_draft = default_draft
        self._nodes: dict[int, JsonNode] = {}
        self._documents: list[Any] = []
        """Documents, whose parts are known by their ids in `_nodes`."""
        self._resources: dict[str, tuple[Any, int]] = {}
        """URI of a document or of a part with an `$id` -> this part, and its draft."""
        self._anchors: dict[str, Any] = {}
        self._links: list[tuple[JsonNode, str, _Scope]] = []
        """Nodes with a `$ref`, which are completed when all parts are known."""
        self._patterns: set[str] = set()

    def add(self, document: Any, uri: str) -> JsonNode:
        """Compile a document. `uri`: how others refer to it."""
        draft = self._default_draft
        if isinstance(document, dict) and "$schema" in document:
            draft = _draft(document["$schema"], draft)
        self._documents.append(document)
        self._resources[uri] = document, draft
        return self._node(document, _Scope(draft, uri, ""))

    def link(self) -> None:
        """Find what each `$ref` refers to. Raises `InvalidSchema` if that is nothing, or a circle."""
        while self._links:
            node, reference, scope = self._links.pop()
            node.conjuncts.append(("/$ref", self._target(reference, scope)))
        _check_circles(list(self._nodes.values()))

    def _node(self, raw: Any, scope: _Scope) -> JsonNode:
        if isinstance(raw, bool) and (scope.draft > DRAFT_4 or not scope.path):
            return TRUE if raw else FALSE
        if not isinstance(raw, dict):
            raise _invalid(scope, f"{shortened(raw)} is no schema")
        if id(raw) in self._nodes:
            return self._nodes[id(raw)]
        if len(self._nodes) == NODES_MAX:
            raise InvalidSchema(f"the JSON Schema consists of more than {NODES_MAX:,} schemas")
        node = self._nodes[id(raw)] = JsonNode("all", raw)
        scope = self._named(raw, scope)
        _check_keywords(raw, scope)
        self._compile(node, raw, scope)
        return node

    def _named(self, raw: dict[str, Any], scope: _Scope) -> _Scope:
        """Remember the names of a schema, and return the scope in which its references are."""
        if "$ref" in raw and scope.draft <= DRAFT_7:
            return scope
        identifier = raw.get("id" if scope.draft == DRAFT_4 else "$id")
        if isinstance(identifier, str):
            if identifier.startswith("#"):
                self._anchors[scope.base + identifier] = raw
            else:
                scope = scope._replace(base=_joined(scope.base, identifier, scope).removesuffix("#"))
                self._resources.setdefault(scope.base, (raw, scope.draft))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(raw.get(keyword), str):
                self._anchors[f"{scope.base}#{raw[keyword]}"] = raw
        return scope

    def _compile(self, node: JsonNode, raw: dict[str, Any], scope: _Scope) -> None:
        draft = scope.draft
        for keyword in ("definitions", "$defs"):
            self._map(raw, keyword, scope)
        # The dynamic references lead to the outermost schema of their name, which in one document is the only one.
        for keyword in ("$ref", "$recursiveRef", "$dynamicRef"):
            if keyword in raw and (keyword == "$ref" or draft > DRAFT_7):
                self._links.append((node, raw[keyword], scope))
        if "$ref" in raw and draft <= DRAFT_7:  # other keywords beside it are ignored
            return
        if "type" in raw:
            node.types = frozenset([raw["type"]] if isinstance(raw["type"], str) else raw["type"])
        if "enum" in raw:
            node.values = raw["enum"]
        if "const" in raw and draft > DRAFT_4:
            node.values = [raw["const"]]
        node.keywords = _limits(raw, draft)
        node.opaque = {key: raw[key] for key, since in _OPAQUE.items() if key in raw and draft >= since}
        for keyword in ("contains", "unevaluatedItems", "unevaluatedProperties", "contentSchema"):
            if keyword in raw and draft >= _SCHEMAS[keyword]:
                self._node(raw[keyword], scope.at(keyword))
        for pattern in (raw.get("pattern"), *raw.get("patternProperties", ())):
            self._check_pattern(pattern, scope)
        self._compile_objects(node, raw, scope)
        self._compile_arrays(node, raw, scope)
        self._compile_combinations(node, raw, scope)

    def _compile_objects(self, node: JsonNode, raw: dict[str, Any], scope: _Scope) -> None:
        node.required = frozenset(raw.get("required", ()))
        node.properties = self._map(raw, "properties", scope)
        node.patterns = self._map(raw, "patternProperties", scope)
        if isinstance(raw.get("additionalProperties"), bool):
            node.additional = TRUE if raw["additionalProperties"] else FALSE
        else:
            node.additional = self._optional(raw, "additionalProperties", scope)
        node.names = self._optional(raw, "propertyNames", scope)
        if scope.draft > DRAFT_7:
            node.dependencies = {
                key: frozenset(names) for key, names in raw.get("dependentRequired", {}).items()
            }
            node.dependent = self._map(raw, "dependentSchemas", scope)
            return
        for name, value in raw.get("dependencies", {}).items():
            if isinstance(value, list):
                node.dependencies[name] = frozenset(value)
            else:
                node.dependent[name] = self._node(value, scope.at("dependencies", name))

    def _compile_arrays(self, node: JsonNode, raw: dict[str, Any], scope: _Scope) -> None:
        items = raw.get("items")
        if isinstance(items, list):
            node.prefix = self._list(raw, "items", scope)
            if isinstance(raw.get("additionalItems"), bool):
                node.items = TRUE if raw["additionalItems"] else FALSE
            else:
                node.items = self._optional(raw, "additionalItems", scope)
            return
        if scope.draft >= DRAFT_2020:
            node.prefix = self._list(raw, "prefixItems", scope)
        node.items = self._optional(raw, "items", scope)

    def _compile_combinations(self, node: JsonNode, raw: dict[str, Any], scope: _Scope) -> None:
        for index, part in enumerate(self._list(raw, "allOf", scope)):
            node.conjuncts.append((f"/allOf/{index}", part))
        for keyword, kind in (("anyOf", "any"), ("oneOf", "one")):
            if keyword in raw:
                alternatives = self._list(raw, keyword, scope)
                node.conjuncts.append((f"/{keyword}", JsonNode(kind, raw[keyword], alternatives)))
        inverted = self._optional(raw, "not", scope)
        if inverted is not None:
            node.conjuncts.append(("/not", JsonNode("not", raw["not"], (inverted,))))
        if scope.draft < DRAFT_7:
            return
        condition, *branches = (self._optional(raw, keyword, scope) for keyword in ("if", "then", "else"))
        if condition is not None and any(branches):
            parts = (condition, *(TRUE if branch is None else branch for branch in branches))
            texts = [raw.get(keyword) for keyword in ("if", "then", "else")]
            node.conjuncts.append(("/if", JsonNode("if", texts, parts)))

    def _optional(self, raw: dict[str, Any], keyword: str, scope: _Scope) -> JsonNode | None:
        if keyword not in raw or scope.draft < _SCHEMAS.get(keyword, DRAFT_4):
            return None
        return self._node(raw[keyword], scope.at(keyword))

    def _list(self, raw: dict[str, Any], keyword: str, scope: _Scope) -> tuple[JsonNode, ...]:
        parts = raw.get(keyword, ())
        return tuple(self._node(part, scope.at(keyword, index)) for index, part in enumerate(parts))

    def _map(self, raw: dict[str, Any], keyword: str, scope: _Scope) -> dict[str, JsonNode]:
        parts = raw.get(keyword, {})
        if not isinstance(parts, dict):
            raise _invalid(scope.at(keyword), "it must be an object of schemas")
        return {name: self._node(part, scope.at(keyword, name)) for name, part in parts.items()}

    def _check_pattern(self, pattern: str | None, scope: _Scope) -> None:
        if pattern is None or pattern in self._patterns:
            return
        if len(self._patterns) == PATTERNS_MAX:
            raise InvalidSchema(f"the JSON Schema has more than {PATTERNS_MAX} regular expressions")
        self._patterns.add(pattern)
        try:
            check_pattern(pattern)
        except InvalidSchema as error:
            raise _invalid(scope, str(error)) from error

    def _target(self, reference: str, scope: _Scope) -> JsonNode:
        """Return the node to which a `$ref` refers."""
        if reference.startswith("#"):
            uri, fragment = scope.base, reference[1:]
        else:
            uri, fragment = urldefrag(_joined(scope.base, reference, scope))
            if uri not in self._resources:  # a reference by its name, which need not be a URI
                uri = reference.partition("#")[0]
        fragment = unquote(fragment)
        if uri not in self._resources:
            raise _invalid(
                scope, f"the $ref {shortened(reference)} leads out of the schema, to no reference of it"
            )
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get(f"{uri}#{fragment}")
            draft = scope.draft
        else:
            found, draft = self._resources[uri]
            for step in fragment.split("/")[1:]:
                found = _child(found, step.replace("~1", "/").replace("~0", "~"))
        if not isinstance(found, dict | bool):
            raise _invalid(scope, f"the $ref {shortened(reference)} leads nowhere")
        return self._node(found, _Scope(draft, uri, f"/{fragment.strip('/')}"))


def _draft(stated: Any, default_draft: int) -> int:
    """Return the draft of a meta-schema."""
    if isinstance(stated, str):
        name = stated.partition("://")[2].removesuffix("#")
        if name == "json-schema.org/schema":
            return default_draft
        if name in _DRAFTS:
            return _DRAFTS[name]
    raise InvalidSchema(f"$schema {shortened(stated)} is none of the drafts 4, 6, 7, 2019-09 and 2020-12")


def _joined(base: str, uri: str, scope: _Scope) -> str:
    try:
        return urljoin(base, uri) if base else uri
    except ValueError as error:
        raise _invalid(scope, f"{shortened(uri)} is no URI: {error}") from error


def _child(found: Any, step: str) -> Any:
    if isinstance(found, list):
        return (
            found[int(step)]
            if step.isascii() and step.isdigit() and len(step) < 7 and int(step) < len(found)
            else None
        )
    return found.get(step) if isinstance(found, dict) else None


def _limits(raw: dict[str, Any], draft: int) -> dict[str, Any]:
    """Return the keywords of a schema whose values are compared, in the form of draft 2020-12."""
    names = (*_COUNTS[:6], *_NUMBERS, "pattern", "format", "uniqueItems")
    found = {name: raw[name] for name in names if name in raw}
    for name, other in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if draft == DRAFT_4 and found.pop(name, False) and other in found:
            found[name] = found.pop(other)
    if not found.get("uniqueItems"):
        found.pop("uniqueItems", None)
    return {
        name: value
        for name, value in found.items()
        if value != 0 or not name.startswith(("minLength", "minItems", "minProperties"))
    }


def _check_keywords(raw: dict[str, Any], scope: _Scope) -> None:
    """Check the values of keywords that are no schemas. Raises `InvalidSchema`."""
    for keyword, value in raw.items():
        expected = _expected(keyword, value, scope.draft)
        if expected:
            raise _invalid(scope.at(keyword), f"{shortened(value)} is not {expected}")


def _expected(keyword: str, value: Any, draft: int) -> str:
    """Return what the value of a keyword should be; an empty text if it is that."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in _COUNTS:
        is_valid, expected = is_number and value >= 0 and value == int(value), "a number of at least 0"
    elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and draft == DRAFT_4:
        is_valid, expected = isinstance(value, bool), "a boolean"
    elif keyword in _NUMBERS:
        is_valid, expected = is_number and (keyword != "multipleOf" or value > 0), "a valid number"
    elif keyword in _STRINGS:
        is_valid, expected = isinstance(value, str), "a string"
    elif keyword == "uniqueItems":
        is_valid, expected = isinstance(value, bool), "a boolean"
    elif keyword == "type":
        names = value if isinstance(value, list) else [value]
        is_valid, expected = (
            _are_names(names) and bool(names) and set(names) <= set(TYPES),
            "a type or several",
        )
    elif keyword == "required":
        is_valid, expected = (
            _are_names(value) and (bool(value) or draft > DRAFT_4),
            "an array of different names",
        )
    elif keyword == "enum":
        is_valid, expected = (
            isinstance(value, list) and (bool(value) or draft > DRAFT_6),
            "an array of values",
        )
    else:
        return _expected_structure(keyword, value, draft)
    return "" if is_valid else expected


def _expected_structure(keyword: str, value: Any, draft: int) -> str:
    if keyword in _LISTS and draft >= _LISTS[keyword]:
        return "" if isinstance(value, list) and value else "an array of schemas"
    if keyword in _MAPS and draft >= _MAPS[keyword]:
        return "" if isinstance(value, dict) else "an object of schemas"
    if keyword == "items" and draft >= DRAFT_2020:
        return "" if isinstance(value, dict | bool) else "a schema"
    if keyword == "dependentRequired" and draft > DRAFT_7:
        is_valid = isinstance(value, dict) and all(_are_names(names) for names in value.values())
        return "" if is_valid else "an object of arrays of names"
    if keyword == "dependencies" and draft <= DRAFT_7:
        is_valid = isinstance(value, dict) and all(
            _are_names(names) for names in value.values() if not isinstance(names, dict | bool)
        )
        return "" if is_valid else "an object of schemas and of arrays of names"
    return ""


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(one, str) for one in value)
        and len(set(value)) == len(value)
    )


def _check_circles(nodes: Sequence[JsonNode]) -> None:
    """Check that no schema applies itself to the same value. Raises `InvalidSchema`."""
    done: set[int] = set()
    for first in nodes:
        if id(first) in done:
            continue
        path: dict[int, Iterator[JsonNode]] = {id(first): _applied(first)}
        while path:
            last = next(reversed(path))
            part = next(path[last], None)
            if part is None:
                del path[last]
                done.add(last)
            elif id(part) in path:
                raise InvalidSchema("invalid JSON Schema: its $ref lead in a circle")
            elif id(part) not in done:
                path[id(part)] = _applied(part)


def _applied(node: JsonNode) -> Iterator[JsonNode]:
    """Schemas that a schema applies to the same value."""
    yield from (part for _, part in node.conjuncts)
    yield from node.parts
    yield from node.dependent.values()


def _invalid(scope: _Scope, reason: str) -> InvalidSchema:
    place = f"{scope.base}#{scope.path}" if scope.base else scope.path or "/"
    return InvalidSchema(f"invalid JSON Schema at {place[:200]}: {reason}")
