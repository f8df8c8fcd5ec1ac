"""Breaking changes between two JSON Schemas. Pure.

Both directions ask the same question: is there a value that one schema allows and the other rejects? From old to new,
such a value is an existing record that new readers reject (backward); from new to old, a record of new writers that
current readers reject (forward). Adding an optional field, or removing a field that is not required, breaks neither.

With open content (`additionalProperties` not false) a field that a schema does not mention is considered unused, though
it might be used. Keywords that cannot be compared (`not`, `if`, `dependentSchemas`, ...) are reported if they differ.
Reference: https://json-schema.org/draft/2020-12/json-schema-validation.

Invariants:
* Equal schemas have no changes.
* `old -> new` of BACKWARD equals `new -> old` of FORWARD.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Schema = Mapping[str, Any]


class Compatibility(StrEnum):
    """Required compatibility: new readers with old records, current readers with new records, or both."""

    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Change:
    """One breaking change: path (`$.flight.delay`, `$.legs[*]`), description, and the direction it breaks."""

    path: str
    message: str
    breaks: Compatibility


DEPTH_MAX: Final = 64
"""Maximum depth of the comparison; deeper, as in recursive schemas, is not compared."""

_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_LOWER: Final = ("minLength", "minItems", "minProperties")
_UPPER: Final = ("maxLength", "maxItems", "maxProperties")
_SAME_OR_NONE: Final = ("pattern", "format", "multipleOf", "uniqueItems")
_NUMBERS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ALTERNATIVES: Final = ("anyOf", "oneOf")
_ANNOTATIONS: Final = frozenset(
    {
        "$schema",
        "$id",
        "$defs",
        "definitions",
        "$comment",
        "$ref",
        "$anchor",
        "title",
        "description",
        "default",
    }
    | {"examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding"}
)
_COMPARED: Final = frozenset(
    {
        *_LOWER,
        *_UPPER,
        *_SAME_OR_NONE,
        *_NUMBERS,
        *_ALTERNATIVES,
        "type",
        "enum",
        "const",
        "required",
        "properties",
    }
    | {"additionalProperties", "items"}
)
_BY_TYPE: Final = {
    "multipleOf": "number",
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "items"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
"""Keywords that apply to values of one type only."""


def breaking_changes(
    old: Schema, new: Schema, compatibility: Compatibility = Compatibility.FULL
) -> list[Change]:
    """The changes from `old` to `new` that break `compatibility`, sorted by path."""
    found: list[Change] = []
    if compatibility is not Compatibility.FORWARD:
        found += _changes(_SchemaPair(old, new, "old records"), Compatibility.BACKWARD)
    if compatibility is not Compatibility.BACKWARD:
        found += _changes(_SchemaPair(new, old, "new records"), Compatibility.FORWARD)
    return sorted(dict.fromkeys(found), key=lambda change: (change.path, change.breaks, change.message))


def _changes(pair: _SchemaPair, breaks: Compatibility) -> Iterator[Change]:
    for path, message in pair.incompatibilities(pair.writer, pair.reader, "$", 0):
        yield Change(path, message, breaks)


@dataclass(frozen=True, slots=True)
class _SchemaPair:
    """The schema of the `writer`, and the schema of the `reader` that must accept its values. `subject` names the
    values in messages.
    """

    writer: Schema
    reader: Schema
    subject: str
    in_progress: set[tuple[str, str]] = field(default_factory=set)
    """Pairs being compared: a recursive schema is compared once per path."""

    def incompatibilities(self, writer: Any, reader: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        """(path, reason) for everything that `writer` allows and `reader` rejects."""
        writer, reader = _resolved(writer, self.writer), _resolved(reader, self.reader)
        if reader is True or writer is False or depth > DEPTH_MAX:
            return
        if reader is False:
            yield path, f"{self.subject} may have it, and it is refused"
            return
        writer = {} if writer is True else writer
        pair = json.dumps(writer, sort_keys=True), json.dumps(reader, sort_keys=True)
        if (pair[0] == pair[1] and '"$ref"' not in pair[0]) or pair in self.in_progress:
            return
        self.in_progress.add(pair)
        yield from self._compare_schemas(writer, reader, path, depth)
        self.in_progress.discard(pair)

    def _compare_schemas(
        self, writer: Schema, reader: Schema, path: str, depth: int
    ) -> Iterator[tuple[str, str]]:
        if any(keyword in schema for keyword in _ALTERNATIVES for schema in (writer, reader)):
            yield from self._compare_alternatives(_cases(writer), _choices(reader), path, depth)
            return
        yield from self._compare_values(writer, reader, path)
        yield from self._compare_objects(writer, reader, path, depth)
        if "items" in reader and _may_be(writer, "array"):
            yield from self.incompatibilities(
                writer.get("items", True), reader["items"], f"{path}[*]", depth + 1
            )
        for keyword in sorted({*writer, *reader} - _COMPARED - _ANNOTATIONS):
            if writer.get(keyword) != reader.get(keyword):
                yield path, f"{keyword} differs, which cannot be judged"

    def _compare_alternatives(
        self, writer: Sequence[Schema], reader: Sequence[Schema], path: str, depth: int
    ) -> Iterator[tuple[str, str]]:
        """Each alternative must be accepted by one of the other schema's; otherwise the reasons of the closest one are
        reported.
        """
        for one in writer:
            tried = [list(self.incompatibilities(one, other, path, depth + 1)) for other in reader]
            if all(tried):
                yield from min(tried, key=len)

    def _compare_values(self, writer: Schema, reader: Schema, path: str) -> Iterator[tuple[str, str]]:
        lost = [name for name in _types(writer) if not _is_type_of(name, reader)]
        if lost:
            kinds = " or ".join(_types(reader))
            yield path, f"{self.subject} may be {' or '.join(lost)}, and only {kinds} is taken"
            return
        allowed, values = _values(reader), _values(writer)
        if allowed is not None:
            missing = None if values is None else [one for one in values if one not in allowed]
            if missing is None:
                yield path, f"{self.subject} may be anything, and only {_listed(allowed)} is taken"
            elif missing:
                yield path, f"{self.subject} may be {_listed(missing)}, which is not taken"
        if values is not None:
            yield from self._compare_enumerated(values, reader, path)
        if allowed is not None or values is not None:
            return
        if _may_be(writer, "number"):
            for is_upper in (False, True):
                bound, own = _bound(reader, is_upper), _bound(writer, is_upper)
                if bound is not None and (own is None or bound > own):
                    yield (
                        path,
                        f"only numbers {_bound_text(bound, is_upper)} are taken, and {self.subject} may be others",
                    )
        for keyword in (*_LOWER, *_UPPER, *_SAME_OR_NONE):
            limit, own_limit = reader.get(keyword), writer.get(keyword)
            is_none = limit is None or limit is False or (keyword in _LOWER and limit == 0)
            if is_none or not _may_be(writer, _BY_TYPE[keyword]):
                continue
            if own_limit is None or _is_stricter(keyword, limit, own_limit):
                had = "none" if own_limit is None else json.dumps(own_limit)
                yield path, f"{keyword} is {json.dumps(limit)}, and {self.subject} were written with {had}"

    def _compare_enumerated(
        self, values: Sequence[Any], reader: Schema, path: str
    ) -> Iterator[tuple[str, str]]:
        """If a schema lists its values, they are compared instead of its bounds."""
        for keyword in (*_NUMBERS, *_LOWER, *_UPPER, "pattern", "multipleOf"):
            limit = reader.get(keyword)
            refused = [one for one in values if limit is not None and not _is_within(keyword, limit, one)]
            if refused:
                yield path, f"{keyword} is {json.dumps(limit)}, and {self.subject} may be {_listed(refused)}"

    def _compare_objects(
        self, writer: Schema, reader: Schema, path: str, depth: int
    ) -> Iterator[tuple[str, str]]:
        if not _may_be(writer, "object"):
            return
        for name in sorted({*reader.get("required", ())} - {*writer.get("required", ())}):
            yield f"{path}.{name}", f"it is required, and {self.subject} may lack it"
        writer_fields, reader_fields = writer.get("properties", {}), reader.get("properties", {})
        reader_additional = reader.get("additionalProperties", True)
        for name in sorted(writer_fields):
            if name in reader_fields:
                yield from self.incompatibilities(
                    writer_fields[name], reader_fields[name], f"{path}.{name}", depth + 1
                )
            elif reader_additional is False:
                yield f"{path}.{name}", f"{self.subject} may have it, and no further fields are taken"
            elif reader_additional is not True:
                yield from self.incompatibilities(
                    writer_fields[name], reader_additional, f"{path}.{name}", depth + 1
                )
        writer_additional = writer.get("additionalProperties", True)
        if reader_additional is not True and writer_additional is not False:
            if reader_additional is False:
                yield path, f"{self.subject} may have further fields, and none are taken"
            else:
                yield from self.incompatibilities(
                    writer_additional, reader_additional, f"{path}.*", depth + 1
                )


def _resolved(schema: Any, root: Schema) -> Any:
    """The schema with local `$ref` resolved, and an `allOf` with one element replaced by it."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            schema = _dereferenced(str(schema["$ref"]), root)
        elif len(parts := schema.get("allOf", ())) == 1:
            schema = {**{key: value for key, value in schema.items() if key != "allOf"}, **parts[0]}
        else:
            return schema
    raise ConfigError("a JSON Schema whose $ref lead in a circle")


def _dereferenced(reference: str, root: Schema) -> Any:
    if not reference.startswith("#"):
        raise ConfigError(f"the $ref {reference!r} leads out of its schema, which cannot be followed")
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = (
            found[int(step)] if isinstance(found, list) and step.isdigit() else _step(found, step, reference)
        )
    return found


def _step(found: Any, step: str, reference: str) -> Any:
    if not isinstance(found, dict) or step not in found:
        raise ConfigError(f"the $ref {reference!r} leads nowhere")
    return found[step]


def _choices(schema: Schema) -> list[Schema]:
    """The alternatives of `anyOf` or `oneOf`, each with the other keywords of the schema; else the schema itself."""
    for keyword in _ALTERNATIVES:
        if keyword in schema:
            shared = {key: value for key, value in schema.items() if key != keyword}
            return [{**shared, **(one if isinstance(one, dict) else {})} for one in schema[keyword]]
    return [schema]


def _cases(schema: Schema) -> list[Schema]:
    """The alternatives; one with several types is split into one per type."""
    return [
        {**one, "type": name} if isinstance(one.get("type"), list) else one
        for one in _choices(schema)
        for name in (one["type"] if isinstance(one.get("type"), list) else ("",))
    ]


def _bound(schema: Schema, is_upper: bool) -> tuple[float, bool] | None:
    """The strictest numeric bound: (signed value, is exclusive); larger is stricter."""
    sign, names = (-1, _NUMBERS[2:]) if is_upper else (1, _NUMBERS[:2])
    bounds = [
        (sign * schema[name], is_exclusive)
        for name, is_exclusive in zip(names, (False, True), strict=True)
        if isinstance(schema.get(name), int | float)
    ]
    return max(bounds, default=None)


def _bound_text(bound: tuple[float, bool], is_upper: bool) -> str:
    """A bound as text."""
    words = ("at most", "below") if is_upper else ("at least", "above")
    return f"{words[bound[1]]} {-bound[0] if is_upper else bound[0]}"


def _types(schema: Schema) -> list[str]:
    """The types that a schema allows; if it lists values, their types."""
    stated = schema.get("type")
    if stated is not None:
        return [stated] if isinstance(stated, str) else list(stated)
    values = _values(schema)
    if values is not None:
        return list(dict.fromkeys(map(_type_of, values)))
    return list(_TYPES)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _is_type_of(name: str, schema: Schema) -> bool:
    allowed = _types(schema)
    return name in allowed or (name == "integer" and "number" in allowed)


def _may_be(schema: Schema, name: str) -> bool:
    return not name or name in _types(schema) or (name == "number" and "integer" in _types(schema))


def _values(schema: Schema) -> list[Any] | None:
    """The listed values of a schema, if there are any."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _is_stricter(keyword: str, bound: Any, own: Any) -> bool:
    if keyword in _LOWER:
        return bool(bound > own)
    if keyword in _UPPER:
        return bool(bound < own)
    if keyword == "multipleOf":
        return bool(own % bound)
    return bool(bound != own)


def _is_within(keyword: str, limit: Any, value: Any) -> bool:
    """Whether one value satisfies a keyword; true for values of other types."""
    kind = "number" if keyword in _NUMBERS else _BY_TYPE[keyword]
    if not _is_type_of(_type_of(value), {"type": kind}):
        return True
    if keyword == "pattern":
        return re.search(limit, value) is not None
    size = value if kind == "number" else len(value)
    if keyword == "multipleOf":
        return not size % limit
    if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        return bool(size > limit if keyword == "exclusiveMinimum" else size < limit)
    return bool(size >= limit if keyword in (*_LOWER, "minimum") else size <= limit)


def _listed(values: Sequence[Any]) -> str:
    text = " or ".join(json.dumps(value) for value in values[:5])
    return text if len(values) <= 5 else f"{text} or {len(values) - 5} others"
