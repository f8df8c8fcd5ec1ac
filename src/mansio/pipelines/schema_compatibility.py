"""Breaking changes between two versions of a JSON Schema.

A change is breaking if one schema allows a value that the other schema rejects. Backward compatibility: new readers
accept all records of the old schema. Forward compatibility: current readers accept all records of the new schema.
Adding an optional field, or removing a field that is not required, breaks neither.

If a schema allows additional properties, a field that it does not mention is considered unused, although records may
contain it. Keywords that cannot be compared (`not`, `if`, `dependentSchemas`, ...) are reported if they differ.
Reference: https://json-schema.org/draft/2020-12/json-schema-validation.

Invariants:
* Equal schemas have no changes.
* The backward changes from one schema to another are the forward changes in the opposite direction.
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
    """Required compatibility: new readers accept old records (backward), current readers accept new records (forward),
    or both (full).
    """

    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Change:
    """One breaking change: JSON path (`$.flight.delay`, `$.legs[*]`), description, and the compatibility that it
    breaks.
    """

    path: str
    message: str
    breaks: Compatibility


DEPTH_MAX: Final = 64
"""Maximum depth of the comparison. Deeper parts, as of recursive schemas, are not compared."""

_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_LOWER_BOUNDS: Final = ("minLength", "minItems", "minProperties")
_UPPER_BOUNDS: Final = ("maxLength", "maxItems", "maxProperties")
_EXACT_KEYWORDS: Final = ("pattern", "format", "multipleOf", "uniqueItems")
_NUMBER_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ALTERNATIVE_KEYWORDS: Final = ("anyOf", "oneOf")
_ANNOTATION_KEYWORDS: Final = frozenset(
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
_COMPARED_KEYWORDS: Final = frozenset(
    {
        *_LOWER_BOUNDS,
        *_UPPER_BOUNDS,
        *_EXACT_KEYWORDS,
        *_NUMBER_BOUNDS,
        *_ALTERNATIVE_KEYWORDS,
        "type",
        "enum",
        "const",
        "required",
        "properties",
    }
    | {"additionalProperties", "items"}
)
_KEYWORD_TYPES: Final = {
    "multipleOf": "number",
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "items"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
"""The type of values to which each keyword applies."""


def breaking_changes(
    old: Schema, new: Schema, compatibility: Compatibility = Compatibility.FULL
) -> list[Change]:
    """Return the changes from `old` to `new` that break `compatibility`, sorted by path."""
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
    """The schema of the writer of records, and the schema of a reader that must accept them. `subject`: name of these
    records in messages.
    """

    writer: Schema
    reader: Schema
    subject: str
    in_progress: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of subschemas that are being compared, so that a recursive schema is compared once per path."""

    def incompatibilities(self, writer: Any, reader: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        """(path, reason) for each kind of value that `writer` allows and `reader` rejects."""
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
        if any(keyword in schema for keyword in _ALTERNATIVE_KEYWORDS for schema in (writer, reader)):
            yield from self._compare_alternatives(
                _alternatives_by_type(writer), _alternatives(reader), path, depth
            )
            return
        yield from self._compare_values(writer, reader, path)
        yield from self._compare_objects(writer, reader, path, depth)
        if "items" in reader and _may_have_type(writer, "array"):
            yield from self.incompatibilities(
                writer.get("items", True), reader["items"], f"{path}[*]", depth + 1
            )
        for keyword in sorted({*writer, *reader} - _COMPARED_KEYWORDS - _ANNOTATION_KEYWORDS):
            if writer.get(keyword) != reader.get(keyword):
                yield path, f"{keyword} differs, which cannot be judged"

    def _compare_alternatives(
        self, writer: Sequence[Schema], reader: Sequence[Schema], path: str, depth: int
    ) -> Iterator[tuple[str, str]]:
        """Check that an alternative of the reader accepts each alternative of the writer. If none does, the reasons of
        the closest one are reported.
        """
        for one in writer:
            tried = [list(self.incompatibilities(one, other, path, depth + 1)) for other in reader]
            if all(tried):
                yield from min(tried, key=len)

    def _compare_values(self, writer: Schema, reader: Schema, path: str) -> Iterator[tuple[str, str]]:
        lost = [name for name in _allowed_types(writer) if not _allows_type(name, reader)]
        if lost:
            kinds = " or ".join(_allowed_types(reader))
            yield path, f"{self.subject} may be {' or '.join(lost)}, and only {kinds} is taken"
            return
        allowed, values = _enumerated_values(reader), _enumerated_values(writer)
        if allowed is not None:
            missing = None if values is None else [one for one in values if one not in allowed]
            if missing is None:
                yield path, f"{self.subject} may be anything, and only {_values_text(allowed)} is taken"
            elif missing:
                yield path, f"{self.subject} may be {_values_text(missing)}, which is not taken"
        if values is not None:
            yield from self._compare_enumerated(values, reader, path)
        if allowed is not None or values is not None:
            return
        if _may_have_type(writer, "number"):
            for is_upper in (False, True):
                bound, own = _strictest_bound(reader, is_upper), _strictest_bound(writer, is_upper)
                if bound is not None and (own is None or bound > own):
                    yield (
                        path,
                        f"only numbers {_bound_text(bound, is_upper)} are taken, and {self.subject} may be others",
                    )
        for keyword in (*_LOWER_BOUNDS, *_UPPER_BOUNDS, *_EXACT_KEYWORDS):
            limit, own_limit = reader.get(keyword), writer.get(keyword)
            is_none = limit is None or limit is False or (keyword in _LOWER_BOUNDS and limit == 0)
            if is_none or not _may_have_type(writer, _KEYWORD_TYPES[keyword]):
                continue
            if own_limit is None or _is_stricter(keyword, limit, own_limit):
                had = "none" if own_limit is None else json.dumps(own_limit)
                yield path, f"{keyword} is {json.dumps(limit)}, and {self.subject} were written with {had}"

    def _compare_enumerated(
        self, values: Sequence[Any], reader: Schema, path: str
    ) -> Iterator[tuple[str, str]]:
        """Compare the enumerated values of the writer with the bounds of the reader."""
        for keyword in (*_NUMBER_BOUNDS, *_LOWER_BOUNDS, *_UPPER_BOUNDS, "pattern", "multipleOf"):
            limit = reader.get(keyword)
            refused = [one for one in values if limit is not None and not _is_within(keyword, limit, one)]
            if refused:
                yield (
                    path,
                    f"{keyword} is {json.dumps(limit)}, and {self.subject} may be {_values_text(refused)}",
                )

    def _compare_objects(
        self, writer: Schema, reader: Schema, path: str, depth: int
    ) -> Iterator[tuple[str, str]]:
        if not _may_have_type(writer, "object"):
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
    """Return the schema with local `$ref` resolved, and an `allOf` with one element replaced by it."""
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
            found[int(step)]
            if isinstance(found, list) and step.isdigit()
            else _child_schema(found, step, reference)
        )
    return found


def _child_schema(found: Any, step: str, reference: str) -> Any:
    if not isinstance(found, dict) or step not in found:
        raise ConfigError(f"the $ref {reference!r} leads nowhere")
    return found[step]


def _alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of `anyOf` or `oneOf`, each with the other keywords of the schema; else the schema
    itself.
    """
    for keyword in _ALTERNATIVE_KEYWORDS:
        if keyword in schema:
            shared = {key: value for key, value in schema.items() if key != keyword}
            return [{**shared, **(one if isinstance(one, dict) else {})} for one in schema[keyword]]
    return [schema]


def _alternatives_by_type(schema: Schema) -> list[Schema]:
    """Return the alternatives of the schema; an alternative with several types is split into one per type."""
    return [
        {**one, "type": name} if isinstance(one.get("type"), list) else one
        for one in _alternatives(schema)
        for name in (one["type"] if isinstance(one.get("type"), list) else ("",))
    ]


def _strictest_bound(schema: Schema, is_upper: bool) -> tuple[float, bool] | None:
    """Return the strictest lower or upper bound of a number: (value, whether it is exclusive). An upper bound is
    negated, so that a larger value is stricter in both cases.
    """
    sign, names = (-1, _NUMBER_BOUNDS[2:]) if is_upper else (1, _NUMBER_BOUNDS[:2])
    bounds = [
        (sign * schema[name], is_exclusive)
        for name, is_exclusive in zip(names, (False, True), strict=True)
        if isinstance(schema.get(name), int | float)
    ]
    return max(bounds, default=None)


def _bound_text(bound: tuple[float, bool], is_upper: bool) -> str:
    """Return a result of `_strictest_bound` as text."""
    words = ("at most", "below") if is_upper else ("at least", "above")
    return f"{words[bound[1]]} {-bound[0] if is_upper else bound[0]}"


def _allowed_types(schema: Schema) -> list[str]:
    """Return the types of values that a schema allows; if the schema enumerates values, their types."""
    stated = schema.get("type")
    if stated is not None:
        return [stated] if isinstance(stated, str) else list(stated)
    values = _enumerated_values(schema)
    if values is not None:
        return list(dict.fromkeys(map(_type_of, values)))
    return list(_TYPES)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _allows_type(name: str, schema: Schema) -> bool:
    allowed = _allowed_types(schema)
    return name in allowed or (name == "integer" and "number" in allowed)


def _may_have_type(schema: Schema, name: str) -> bool:
    return (
        not name
        or name in _allowed_types(schema)
        or (name == "number" and "integer" in _allowed_types(schema))
    )


def _enumerated_values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema enumerates (`const`, `enum`), or None."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _is_stricter(keyword: str, bound: Any, own: Any) -> bool:
    if keyword in _LOWER_BOUNDS:
        return bool(bound > own)
    if keyword in _UPPER_BOUNDS:
        return bool(bound < own)
    if keyword == "multipleOf":
        return bool(own % bound)
    return bool(bound != own)


def _is_within(keyword: str, limit: Any, value: Any) -> bool:
    """Whether a value satisfies a keyword; true for a value of a type to which the keyword does not apply."""
    kind = "number" if keyword in _NUMBER_BOUNDS else _KEYWORD_TYPES[keyword]
    if not _allows_type(_type_of(value), {"type": kind}):
        return True
    if keyword == "pattern":
        return re.search(limit, value) is not None
    size = value if kind == "number" else len(value)
    if keyword == "multipleOf":
        return not size % limit
    if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        return bool(size > limit if keyword == "exclusiveMinimum" else size < limit)
    return bool(size >= limit if keyword in (*_LOWER_BOUNDS, "minimum") else size <= limit)


def _values_text(values: Sequence[Any]) -> str:
    text = " or ".join(json.dumps(value) for value in values[:5])
    return text if len(values) <= 5 else f"{text} or {len(values) - 5} others"
