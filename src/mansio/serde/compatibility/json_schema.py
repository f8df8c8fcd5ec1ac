"""Compatibility of JSON Schemas: whether a schema accepts all values that another one accepts.

Rules have the names of Confluent's schema registry and of Karapace, for example REQUIRED_ATTRIBUTE_ADDED; paths are
JSON pointers into the reader's schema. `docs/reference/schema-compatibility.md` describes them, with content models.

A writer's schema is the conjunction of some nodes: those of `allOf` and `$ref`, and one alternative of each `anyOf`
and `oneOf`. A pair of a reader's node and a conjunction is assumed to be compatible until a requirement fails, and each
pair that relied on it is then evaluated again, as in `mansio.serde.compatibility.avro`. So recursive schemas are
compared once per pair. Alternatives of the writer are looked at one by one only where the reader does not accept them
all.

The comparison is exact for values of `enum`, and otherwise stays on the safe side: what cannot be compared counts as
incompatible. The exception is `oneOf` of the reader, whose alternatives are assumed to have no value in common.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.serde.compatibility.json_values import (
    ALL_TYPES,
    UndecidedPattern,
    ValueCheck,
    is_multiple,
    types_of,
)
from mansio.serde.compatibility.pairs import Pair, Pairs
from mansio.serde.definition import Incompatibility
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_schema import FALSE, JsonNode
from mansio.serde.formats.json_text import shortened, sorted_text
from mansio.serde.formats.patterns import matcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.serde.formats.json_schema import ParsedJson

PAIRS_MAX: Final = 100_000
"""Maximum number of pairs of a reader's node and a writer's conjunction that are compared."""
CONJUNCTION_MAX: Final = 1_000
"""Maximum number of nodes in a conjunction."""
REPORTED_MAX: Final = 100
"""Maximum number of incompatibilities that are returned."""

_NUMERIC: Final = frozenset(("integer", "fraction"))
_LIMITS: Final = {
    "minLength": ("string", "MIN_LENGTH"),
    "maxLength": ("string", "MAX_LENGTH"),
    "minItems": ("array", "MIN_ITEMS"),
    "maxItems": ("array", "MAX_ITEMS"),
    "minProperties": ("object", "MIN_PROPERTIES"),
    "maxProperties": ("object", "MAX_PROPERTIES"),
}
"""Keyword -> type of the values to which it applies, and prefix of its rules."""
_REJECTIONS: Final = {
    "type": "TYPE_NARROWED",
    "enum": "ENUM_ARRAY_NARROWED",
    "minimum": "MINIMUM_ADDED",
    "maximum": "MAXIMUM_ADDED",
    "exclusiveMinimum": "MINIMUM_EXCLUSIVE_ADDED",
    "exclusiveMaximum": "MAXIMUM_EXCLUSIVE_ADDED",
    "multipleOf": "MULTIPLE_ADDED",
    "pattern": "PATTERN_ADDED",
    **{keyword: f"{prefix}_ADDED" for keyword, (_, prefix) in _LIMITS.items()},
}
"""Keyword that rejects a value of an `enum` -> rule."""
_OPAQUE_TYPES: Final = {"unevaluatedProperties": "object"}
"""Types to which keywords that are compared as text apply, but for `array`."""
_CONSTANTS: Final = {"null": (None,), "boolean": (False, True)}


class Assumptions(NamedTuple):
    """What is assumed of values beyond their schema. The default is that of a schema registry.

    `unnamed_properties_unused`: a value has no properties that its schema does not name, although it allows them. A new
    property is then compatible with an open content model. `formats_are_checked`: a value that does not have the
    `format` of its schema is rejected.
    """

    unnamed_properties_unused: bool = False
    formats_are_checked: bool = False


REGISTRY: Final = Assumptions()


def incompatibilities(
    reader: ParsedJson, writer: ParsedJson, assumptions: Assumptions = REGISTRY
) -> list[Incompatibility]:
    """Return why `reader` does not accept all that `writer` accepts, at most `REPORTED_MAX` reasons.

    Raises `InvalidSchema` if more than `PAIRS_MAX` pairs would have to be compared.
    """
    comparison = _Comparison(assumptions)
    writers = _conjunction((writer.root,))
    if comparison.are_compatible(reader.root, writers):
        return []
    return comparison.reasons(reader.root, writers)


_Conjunction = tuple[JsonNode, ...]
"""Nodes that must all hold, without TRUE and with their conjuncts, in the order of their ids. (FALSE,): no value."""


class _Failure(NamedTuple):
    """A requirement that is not met. `step`: what the path of the reader's node is followed by."""

    rule: str
    step: str
    message: str


class _Part(NamedTuple):
    """A node and a conjunction inside a pair, which must be compatible, too. `rule`: rule to report instead of the
    reasons of the part."""

    reader: JsonNode
    writers: _Conjunction
    step: str
    rule: str = ""


_Pair = Pair[JsonNode, _Conjunction]


class _Comparison:
    """Comparison of two schemas: the pairs that were met."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._pairs = Pairs[JsonNode, _Conjunction](self._evaluate, PAIRS_MAX)
        self._values = ValueCheck()
        self._texts: dict[int, str] = {}
        self._type_nodes = {
            kind: JsonNode("all", types=frozenset(("number" if kind == "fraction" else kind,)))
            for kind in ALL_TYPES
        }

    def are_compatible(self, reader: JsonNode, writers: _Conjunction) -> bool:
        """Evaluate all pairs that matter."""
        root = self._pair(reader, writers)
        self._pairs.evaluate_pending()
        return root.is_compatible

    def reasons(self, reader: JsonNode, writers: _Conjunction) -> list[Incompatibility]:
        """Return the requirements that fail, each with the shortest path that leads to it."""
        found: dict[tuple[str, str], Incompatibility] = {}
        seen: set[tuple[int, ...]] = set()
        waiting = deque(((_Part(reader, writers, ""), ""),))
        while waiting and len(found) < REPORTED_MAX:
            part, path = waiting.popleft()
            pair = self._pair(part.reader, part.writers)
            key = _key(part.reader, part.writers)
            self._pairs.evaluate_pending()  # an evaluation ends with the first requirement that fails
            if pair.is_compatible or key in seen:
                continue
            seen.add(key)
            for each in self._faults(pair):
                place = (path + each.step) or "/"
                if isinstance(each, _Failure):
                    found.setdefault((each.rule, place), Incompatibility(each.rule, place, each.message))
                elif not each.rule:
                    waiting.append((each, path + each.step))
                elif not self.are_compatible(each.reader, each.writers):
                    text = "the schema of the reader does not accept all that the writer may write there"
                    found.setdefault((each.rule, place), Incompatibility(each.rule, place, text))
        return list(found.values())[:REPORTED_MAX]

    def _pair(self, reader: JsonNode, writers: _Conjunction) -> _Pair:
        return self._pairs.pair(_key(reader, writers), reader, writers)

    def _holds(self, user: _Pair, reader: JsonNode, writers: _Conjunction) -> bool:
        return self._pairs.relies_on(user, self._pair(reader, writers))

    def _evaluate(self, pair: _Pair) -> bool:
        reader, writers = pair.reader, pair.writer
        if reader.accepts_everything or reader in writers or writers == (FALSE,):
            return True
        types = _types(writers)
        if not types or self._is_same_text(reader, writers):
            return True
        values = _written_values(writers, types)
        if values is not None:
            return not any(self._rejections(reader, writers, values))
        if self._accepts_directly(pair, types):
            return True
        split = self._split(reader, writers, types)
        return bool(split) and all(self._holds(pair, reader, one) for one in split)

    def _is_same_text(self, reader: JsonNode, writers: _Conjunction) -> bool:
        """Whether a writer's node has the text of the reader's one. Only asked where the keywords do not show it."""
        if reader.kind == "false" or (reader.kind == "all" and not reader.opaque):
            return False
        text = self._text(reader)
        return '"$ref"' not in text and any(
            node.kind == reader.kind and self._text(node) == text for node in writers
        )

    def _text(self, node: JsonNode) -> str:
        if id(node) not in self._texts:
            self._texts[id(node)] = sorted_text(node.raw)
        return self._texts[id(node)]

    def _accepts_directly(self, pair: _Pair, types: frozenset[str]) -> bool:
        """Whether a reader accepts a conjunction without looking at the writer's alternatives one by one."""
        reader, writers = pair.reader, pair.writer
        match reader.kind:
            case "false":
                return False
            case "any" | "one":
                return any(self._holds(pair, part, writers) for part in reader.parts)
            case "not":
                refused = reader.parts[0]
                return not (types & types_of(refused)) or any(
                    self._holds(pair, node.parts[0], _conjunction((refused,)))
                    for node in writers
                    if node.kind == "not"
                )
            case "if":
                return any(
                    all(self._holds(pair, one, other) for one, other in _condition_parts(reader, node))
                    for node in writers
                    if node.kind == "if"
                )
        return all(
            isinstance(each, _Part) and self._holds(pair, each.reader, each.writers)
            for each in self._requirements(reader, writers, types)
        )

    def _split(self, reader: JsonNode, writers: _Conjunction, types: frozenset[str]) -> list[_Conjunction]:
        """Return the conjunctions of the writer's first alternatives; if it has none, and the reader has some, those of
        each type. An empty list if there is one only."""
        for index, node in enumerate(writers):
            if node.kind in ("any", "one"):
                others = writers[:index] + writers[index + 1 :]
                return [_conjunction((part,), others) for part in node.parts]
        kinds = sorted(types - {"integer"} if "fraction" in types else types)
        if reader.kind in ("any", "one", "if", "not") and len(kinds) > 1:
            return [_conjunction((self._type_nodes[kind],), writers) for kind in kinds]
        return []

    def _faults(self, pair: _Pair) -> Iterator[_Failure | _Part]:
        """Return what fails in a pair that is not compatible, and parts of which some fail."""
        reader, writers = pair.reader, pair.writer
        types = _types(writers)
        values = _written_values(writers, types)
        if values is not None:
            for value, keyword in self._rejections(reader, writers, values):
                text = f"the writer may write {shortened(value)}, which the reader rejects"
                yield _Failure(_REJECTIONS.get(keyword, "ENUM_ARRAY_NARROWED"), "", text)
        elif reader.kind == "false":
            yield _Failure("TYPE_CHANGED", "", "the reader accepts nothing")
        elif split := self._split(reader, writers, types):
            yield from (_Part(reader, one, "") for one in split)
        elif reader.kind in ("any", "one"):
            if (
                len(types - {"integer"}) == 1
                and len(same := [one for one in reader.parts if types <= types_of(one)]) == 1
            ):
                yield _Part(same[0], writers, "")
            else:
                yield _Failure("SUM_TYPE_NARROWED", "", f"no alternative accepts what may be {_names(types)}")
        elif reader.kind == "not":
            yield _Failure("NOT_TYPE_NARROWED", "", "the reader refuses what the writer may write")
        elif reader.kind == "if":
            yield _Failure(
                "COMBINED_TYPE_CHANGED", "", "the condition of the reader is not that of the writer"
            )
        else:
            yield from self._requirements(reader, writers, types)

    def _rejections(
        self, reader: JsonNode, writers: _Conjunction, values: Iterable[Any]
    ) -> Iterator[tuple[Any, str]]:
        """Return the values that the writer may write and the reader rejects, each with the keyword."""
        for value in values:
            if self._may_be_written(writers, value):
                try:
                    keyword = self._values.rejection(reader, value)
                except UndecidedPattern:
                    keyword = "pattern"
                if keyword:
                    yield value, keyword

    def _may_be_written(self, writers: _Conjunction, value: Any) -> bool:
        try:
            return not any(self._values.rejection(node, value) for node in writers)
        except UndecidedPattern:
            return True

    def _requirements(
        self, reader: JsonNode, writers: _Conjunction, types: frozenset[str]
    ) -> Iterator[_Failure | _Part]:
        """Return the requirements of a reader's node with keywords: parts, and what already fails."""
        nodes = [node for node in writers if node.kind == "all"]
        lost = types - types_of(reader)
        if lost:
            rule = "TYPE_CHANGED" if lost == types else "TYPE_NARROWED"
            text = (
                f"the writer may write {_names(lost)}, and the reader accepts {_names(types_of(reader))} only"
            )
            yield _Failure(rule, "", text)
            return
        if reader.values is not None:
            text = f"the reader accepts {len(reader.values)} values only, and the writer may write others"
            yield _Failure("ENUM_ARRAY_NARROWED", "", text)
            return
        yield from _requirements_of_limits(reader, nodes, types)
        if types & _NUMERIC:
            yield from _requirements_of_numbers(reader, nodes, types)
        if "string" in types:
            yield from self._requirements_of_strings(reader, nodes)
        if "array" in types:
            yield from _requirements_of_arrays(reader, nodes)
        if "object" in types:
            yield from self._requirements_of_objects(reader, writers, nodes)
        for key, value in reader.opaque.items():
            if _OPAQUE_TYPES.get(key, "array") in types and not _has_opaque(reader, nodes, key):
                text = f"{key} is {shortened(value)}, which cannot be compared with the writer's schema"
                yield _Failure("KEYWORD_CHANGED", "", text)
        for step, part in reader.conjuncts:
            yield _Part(part, writers, step)

    def _requirements_of_strings(self, reader: JsonNode, nodes: list[JsonNode]) -> Iterator[_Failure]:
        keywords = [("pattern", "PATTERN")]
        if self._assumptions.formats_are_checked:
            keywords.append(("format", "FORMAT"))
        for keyword, prefix in keywords:
            limit = reader.keywords.get(keyword)
            own = [node.keywords[keyword] for node in nodes if keyword in node.keywords]
            if limit is not None and limit not in own:
                rule = f"{prefix}_CHANGED" if own else f"{prefix}_ADDED"
                yield _Failure(rule, "", _limit_text(keyword, limit, own[0] if own else None))

    def _requirements_of_objects(
        self, reader: JsonNode, writers: _Conjunction, nodes: list[JsonNode]
    ) -> Iterator[_Failure | _Part]:
        written = _Properties(nodes)
        for name in sorted(reader.required - written.required):
            is_unopen = name in reader.properties and written.additional and name not in written.names
            rule = (
                "REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL" if is_unopen else "REQUIRED_ATTRIBUTE_ADDED"
            )
            text = f"the reader requires {shortened(name)}, and what the writer writes may lack it"
            yield _Failure(rule, _step("properties", name), text)
        if reader.properties or reader.patterns or reader.additional is not None:
            for name in (
                *reader.properties,
                *(name for name in written.names if name not in reader.properties),
            ):
                yield from self._requirements_of_property(reader, written, name)
            yield from self._requirements_of_patterns(reader, written)
            yield from _requirements_of_additional(reader, written)
        if reader.names is not None and not reader.names.accepts_everything:
            own = (node.names for node in nodes if node.names is not None)
            written_names = _conjunction((*own, self._type_nodes["string"]))
            if written.additional != (FALSE,) or written.patterns:
                yield _Part(reader.names, written_names, "/propertyNames")
            elif any(self._rejections(reader.names, written_names, written.names)):
                message = "the reader refuses the name of a property"
                yield _Failure("PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL", "/propertyNames", message)
        yield from _requirements_of_dependencies(reader, writers, nodes, written)

    def _requirements_of_property(
        self, reader: JsonNode, written: _Properties, name: str
    ) -> Iterator[_Failure | _Part]:
        """Return what a reader requires of a property that it or the writer names."""
        own = written.schemas(name)
        if own == (FALSE,):
            return
        is_read, is_written = name in reader.properties, name in written.names or written.has_pattern(name)
        for step, required in _required_schemas(reader, name):
            if required.accepts_everything:
                continue
            if is_read and is_written:
                yield _Part(required, own, step)
            elif is_written:
                place = _step("properties", name)
                if required is FALSE:
                    text = f"the reader accepts no property {shortened(name)}"
                    yield _Failure("PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL", place, text)
                else:
                    rule = "PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"
                    yield _Part(required, own, place, rule)
            elif not self._assumptions.unnamed_properties_unused:
                yield from _requirement_of_new(required, own, step)

    def _requirements_of_patterns(self, reader: JsonNode, written: _Properties) -> Iterator[_Failure | _Part]:
        """Return what a reader requires of properties that match a pattern and that the writer does not name."""
        for pattern, required in reader.patterns.items():
            step = _step("patternProperties", pattern)
            same = written.patterns.get(pattern)
            if required.accepts_everything:
                continue
            if same is not None:
                yield _Part(required, _conjunction(same), step)
                continue
            for others in written.patterns.values():
                yield from _requirement_of_new(required, _conjunction(others), step)
            if written.additional != (FALSE,) and not self._assumptions.unnamed_properties_unused:
                yield from _requirement_of_new(required, written.additional, step)


class _Properties:
    """The properties of what a writer writes, by a conjunction of nodes."""

    def __init__(self, nodes: list[JsonNode]) -> None:
        self._nodes = nodes
        self.names = dict.fromkeys(name for node in nodes for name in node.properties)
        """Names that the writer's schemas have."""
        self.required = frozenset(name for node in nodes for name in node.required)
        self.patterns: dict[str, tuple[JsonNode, ...]] = {}
        """Pattern of names -> schemas of these properties."""
        for node in nodes:
            for pattern, part in node.patterns.items():
                self.patterns[pattern] = (*self.patterns.get(pattern, ()), part)
        self.additional = _conjunction(node.additional for node in nodes if node.additional is not None)
        """Schemas of other properties: empty if the content model is open, (FALSE,) if it is closed."""

    def has_pattern(self, name: str) -> bool:
        return any((finds := matcher(pattern)) is not None and finds(name) for pattern in self.patterns)

    def schemas(self, name: str) -> _Conjunction:
        """Return the schemas of a property."""
        return _conjunction(part for node in self._nodes for part in _known_schemas(node, name))


def _known_schemas(node: JsonNode, name: str) -> Iterator[JsonNode]:
    """Return schemas that a writer's node has for a property, without those of which it is not known."""
    found = name in node.properties
    if found:
        yield node.properties[name]
    for pattern, part in node.patterns.items():
        finds = matcher(pattern)
        if finds is None:
            found = True  # or not: then `additionalProperties` does not apply
        elif finds(name):
            found = True
            yield part
    if not found and node.additional is not None:
        yield node.additional


def _required_schemas(node: JsonNode, name: str) -> Iterator[tuple[str, JsonNode]]:
    """Return schemas that a reader's node may have for a property, each with its path."""
    found = name in node.properties
    if found:
        yield _step("properties", name), node.properties[name]
    for pattern, part in node.patterns.items():
        finds = matcher(pattern)
        if finds is None or finds(name):
            found = found or finds is not None
            yield _step("patternProperties", pattern), part
    if not found and node.additional is not None:
        yield "/additionalProperties", node.additional


def _requirement_of_new(required: JsonNode, own: _Conjunction, step: str) -> Iterator[_Failure | _Part]:
    """Return what a reader requires of properties that the writer does not name."""
    if own:
        yield _Part(required, own, step, "PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL")
    else:
        text = "the reader restricts a property that the writer does not name and that may have any value"
        yield _Failure("PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", step, text)


def _requirements_of_additional(reader: JsonNode, written: _Properties) -> Iterator[_Failure | _Part]:
    """Return what a reader requires of properties that it does not name."""
    required, step = reader.additional, "/additionalProperties"
    if required is None or required.accepts_everything:
        return
    for pattern, others in written.patterns.items():
        if pattern not in reader.patterns:
            rule = "PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"
            yield _Part(required, _conjunction(others), _step("patternProperties", pattern), rule)
    if written.additional == (FALSE,):
        return
    if required is FALSE:
        text = "the reader accepts no further properties"
        yield _Failure("ADDITIONAL_PROPERTIES_REMOVED", "", text)
    elif not written.additional:
        text = "the reader restricts further properties, which may have any value"
        yield _Failure("ADDITIONAL_PROPERTIES_NARROWED", step, text)
    else:
        yield _Part(required, written.additional, step)


def _requirements_of_dependencies(
    reader: JsonNode, writers: _Conjunction, nodes: list[JsonNode], written: _Properties
) -> Iterator[_Failure | _Part]:
    for name, needed in reader.dependencies.items():
        own = [node.dependencies[name] for node in nodes if name in node.dependencies]
        missing = needed - written.required - frozenset(one for names in own for one in names)
        if missing and written.schemas(name) != (FALSE,):
            rule = "DEPENDENCY_ARRAY_EXTENDED" if own else "DEPENDENCY_ARRAY_ADDED"
            text = f"the reader requires {shortened(min(missing))} beside {shortened(name)}"
            yield _Failure(rule, _step("dependentRequired", name), text)
    for name, part in reader.dependent.items():
        if written.schemas(name) != (FALSE,):
            same = (node.dependent[name] for node in nodes if name in node.dependent)
            step = _step("dependentSchemas", name)
            yield _Part(part, _conjunction(same, writers), step, "DEPENDENCY_SCHEMA_ADDED")


def _requirements_of_limits(
    reader: JsonNode, nodes: list[JsonNode], types: frozenset[str]
) -> Iterator[_Failure]:
    for keyword, (kind, prefix) in _LIMITS.items():
        limit = reader.keywords.get(keyword)
        if limit is None or kind not in types:
            continue
        is_lower = keyword.startswith("min")
        own = [node.keywords[keyword] for node in nodes if keyword in node.keywords]
        strictest = (max if is_lower else min)(own) if own else None
        if strictest is None:
            yield _Failure(f"{prefix}_ADDED", "", _limit_text(keyword, limit, None))
        elif (strictest < limit) if is_lower else (strictest > limit):
            rule = f"{prefix}_INCREASED" if is_lower else f"{prefix}_DECREASED"
            yield _Failure(rule, "", _limit_text(keyword, limit, strictest))


def _requirements_of_numbers(
    reader: JsonNode, nodes: list[JsonNode], types: frozenset[str]
) -> Iterator[_Failure]:
    for name, changed in (("Minimum", "INCREASED"), ("Maximum", "DECREASED")):
        bound = _bound((reader,), name)
        own = _bound(nodes, name)
        if bound is None or (own is not None and own >= bound):
            continue
        keyword = f"exclusive{name}" if bound[1] else name.lower()
        prefix = f"{name.upper()}_EXCLUSIVE" if bound[1] else name.upper()
        text = _limit_text(keyword, reader.keywords[keyword], None if own is None else _stated(nodes, name))
        yield _Failure(f"{prefix}_ADDED" if own is None else f"{prefix}_{changed}", "", text)
    divisor = reader.keywords.get("multipleOf")
    if divisor is None or ("fraction" not in types and is_multiple(1, divisor)):
        return
    own_divisors = [node.keywords["multipleOf"] for node in nodes if "multipleOf" in node.keywords]
    if not any(is_multiple(one, divisor) for one in own_divisors):
        own_divisor = own_divisors[0] if own_divisors else None
        rule = "MULTIPLE_ADDED" if own_divisor is None else "MULTIPLE_CHANGED"
        if own_divisor is not None and is_multiple(divisor, own_divisor):
            rule = "MULTIPLE_EXPANDED"
        yield _Failure(rule, "", _limit_text("multipleOf", divisor, own_divisor))


def _bound(nodes: Iterable[JsonNode], name: str) -> tuple[float, bool] | None:
    """Return the strictest lower or upper bound of a number: (value, whether it is exclusive). An upper bound is
    negated, so that a larger bound is stricter in both cases."""
    sign = -1 if name == "Maximum" else 1
    keywords = ((name.lower(), False), (f"exclusive{name}", True))
    found = [
        (sign * node.keywords[keyword], is_exclusive)
        for node in nodes
        for keyword, is_exclusive in keywords
        if keyword in node.keywords
    ]
    return max(found, default=None)


def _stated(nodes: Iterable[JsonNode], name: str) -> Any:
    """Return a lower or upper bound as it is written, for a message."""
    keywords = (name.lower(), f"exclusive{name}")
    return next(node.keywords[one] for node in nodes for one in keywords if one in node.keywords)


def _requirements_of_arrays(reader: JsonNode, nodes: list[JsonNode]) -> Iterator[_Failure | _Part]:
    if "uniqueItems" in reader.keywords and not any("uniqueItems" in node.keywords for node in nodes):
        longest = min((node.keywords["maxItems"] for node in nodes if "maxItems" in node.keywords), default=2)
        if longest > 1:
            text = "the reader requires that items are different"
            yield _Failure("UNIQUE_ITEMS_ADDED", "", text)
    if not reader.prefix and (reader.items is None or reader.items.accepts_everything):
        return
    limit = min((node.keywords["maxItems"] for node in nodes if "maxItems" in node.keywords), default=None)
    own_count = max((len(node.prefix) for node in nodes), default=0)
    count = max(len(reader.prefix), own_count)
    for index in range(count if limit is None else min(count, int(limit))):
        is_read, is_written = index < len(reader.prefix), index < own_count
        required = reader.prefix[index] if is_read else reader.items
        own = _conjunction(part for node in nodes if (part := _item(node, index)) is not None)
        if required is None or required.accepts_everything or own == (FALSE,):
            continue
        step = f"/items/{index}"
        if is_read and is_written:
            yield _Part(required, own, step)
        elif is_written:
            rule = "ITEM_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"
            if required is FALSE:
                rule = "ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL"
            yield _Part(required, own, step, rule)
        elif own:
            yield _Part(required, own, step, "ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL")
        else:
            text = "the reader restricts an item that may have any value"
            yield _Failure("ITEM_ADDED_TO_OPEN_CONTENT_MODEL", step, text)
    others = _conjunction(node.items for node in nodes if node.items is not None)
    is_bounded = limit is not None and limit <= count
    if reader.items is None or reader.items.accepts_everything or others == (FALSE,) or is_bounded:
        return
    if reader.items is FALSE:
        yield _Failure("ADDITIONAL_ITEMS_REMOVED", "/items", "the reader accepts no further items")
    elif reader.prefix and not others:
        text = "the reader restricts further items, which may have any value"
        yield _Failure("ADDITIONAL_ITEMS_NARROWED", "/items", text)
    else:
        yield _Part(reader.items, others, "/items")


def _item(node: JsonNode, index: int) -> JsonNode | None:
    return node.prefix[index] if index < len(node.prefix) else node.items


def _condition_parts(reader: JsonNode, writer: JsonNode) -> list[tuple[JsonNode, _Conjunction]]:
    """Return the pairs that must be compatible so that the `if` of a writer implies that of a reader: the conditions
    accept the same values, and so do the other schemas in one direction."""
    condition, own = reader.parts[0], writer.parts[0]
    pairs = [(condition, _conjunction((own,))), (own, _conjunction((condition,)))]
    branches = zip(reader.parts[1:], writer.parts[1:], strict=True)
    return [*pairs, *((one, _conjunction((other,))) for one, other in branches)]


def _has_opaque(reader: JsonNode, nodes: list[JsonNode], keyword: str) -> bool:
    """Whether a writer's node has the same keyword, whose meaning depends on nothing else."""
    if keyword.startswith("unevaluated"):
        return False  # equal schemas are recognized by their text
    text = sorted_text(reader.opaque[keyword])
    return '"$ref"' not in text and any(
        keyword in node.opaque and sorted_text(node.opaque[keyword]) == text for node in nodes
    )


def _types(writers: _Conjunction) -> frozenset[str]:
    """Return the types of values that a conjunction accepts."""
    found = ALL_TYPES
    for node in writers:
        if node.kind == "all":
            found &= types_of(node)
    return found


def _written_values(writers: _Conjunction, types: frozenset[str]) -> list[Any] | None:
    """Return all values that a conjunction accepts, and maybe others, if it lists them."""
    lists = [node.values for node in writers if node.kind == "all" and node.values is not None]
    if lists:
        return min(lists, key=len)
    if types <= _CONSTANTS.keys():
        return [value for kind in sorted(types) for value in _CONSTANTS[kind]]
    return None


def _conjunction(nodes: Iterable[JsonNode], known: _Conjunction = ()) -> _Conjunction:
    """Return the conjunction of nodes with their conjuncts, and of another conjunction, which is not expanded again: an
    alternative stands for the choice that it is taken from."""
    found = {id(node): node for node in known}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.kind == "false" or known == (FALSE,):
            return (FALSE,)
        if node.kind == "true" or id(node) in found:
            continue
        found[id(node)] = node
        if len(found) > CONJUNCTION_MAX:
            raise InvalidSchema(f"more than {CONJUNCTION_MAX:,} schemas apply to one value")
        waiting.extend(part for _, part in node.conjuncts)
    return tuple(found[key] for key in sorted(found))


def _key(reader: JsonNode, writers: _Conjunction) -> tuple[int, ...]:
    return (id(reader), *map(id, writers))


def _step(*steps: str) -> str:
    return "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in steps)


def _names(types: Iterable[str]) -> str:
    """Return types as JSON Schema names them."""
    names = {"number" if kind == "fraction" else kind for kind in types}
    return " or ".join(sorted(names - {"integer"} if "number" in names else names)) or "nothing"


def _limit_text(keyword: str, limit: Any, own: Any) -> str:
    had = "has none" if own is None else f"has {shortened(own)}"
    return f"{keyword} of the reader is {shortened(limit)}, and the writer {had}"
