"""JSON Schema: values as JSON text, and as Python values, which are plain JSON. Each is validated, in both directions.

Validation is that of the library jsonschema for the draft that `$schema` names (default: 7), with these differences:

* `pattern` and `patternProperties` take time linear in the text (`mansio.serde.codecs.linear_regex`)
* `$ref` leads into the schema, into those that it refers to by name, or to a draft of JSON Schema; nothing is fetched
* the number of keywords that one value applies is bounded, and `uniqueItems` compares hashes
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urljoin

import jsonschema
from jsonschema import exceptions, validators
from referencing import Registry, Resource
from referencing import exceptions as reference_exceptions
from referencing.jsonschema import DRAFT7, SchemaRegistry

from mansio.serde.codecs.linear_regex import compile_regex
from mansio.serde.codecs.paths import VALUE_DEPTH_MAX, fault, shown_type
from mansio.serde.definition import SchemaType
from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.serde.codecs.paths import Path
    from mansio.serde.definition import ReferencedSchema

    Keyword = Callable[[Any, Any, Any, Any], Iterator[exceptions.ValidationError] | None]

SCHEMA_BYTES_MAX: Final = 1_000_000
SCHEMA_DEPTH_MAX: Final = 64
STEPS_MAX: Final = 2_000_000
"""Maximum number of keywords that are applied to a value and its parts."""

EXPANSIONS_MAX: Final = 1_000
"""Maximum number of schemas that apply to the same value, in a schema with a keyword of `_UNEVALUATED`."""
_UNEVALUATED: Final = frozenset(("unevaluatedProperties", "unevaluatedItems"))
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
"""Keywords whose schemas apply to the same value as the schema in which they are."""

_steps: ContextVar[list[int]] = ContextVar("steps")
"""Number of keywords that the validation of a value may still apply."""


class JsonSchemaCodec:
    """Codec of a JSON Schema. `name`: its title; empty if it has none."""

    kind: Literal[SchemaType.JSON] = SchemaType.JSON

    def __init__(self, text: str, references: Sequence[ReferencedSchema] = ()) -> None:
        """Raise `UnsupportedSchema` for an invalid schema, and for one that exceeds a bound."""
        schema = _parsed(text)
        registry: SchemaRegistry = Registry()  # it fetches nothing
        registry = jsonschema.validators.SPECIFICATIONS.combine(registry)
        base = schema.get("$id", "") if isinstance(schema, dict) else ""
        for one in references:
            resource = Resource.from_contents(_parsed(one.text), default_specification=DRAFT7)
            names = {one.name, urljoin(base, one.name) if isinstance(base, str) else one.name}
            registry = registry.with_resources((name, resource) for name in names)
        draft = validators.validator_for(schema, default=jsonschema.Draft7Validator)
        try:
            draft.check_schema(schema)
        except exceptions.SchemaError as error:
            raise UnsupportedSchema(f"this is no JSON Schema: {reason(error.message)}") from error
        except RecursionError as error:
            raise UnsupportedSchema("this is no JSON Schema: it is nested too deep") from error
        for pattern in _patterns(schema):
            compile_regex(pattern)
        if _has_keyword(schema, _UNEVALUATED):
            _check_unevaluated(schema)
        title = schema.get("title") if isinstance(schema, dict) else None
        self.name: str = title if isinstance(title, str) else ""
        self._validator = _bounded(draft)(schema, registry=registry)

    def encode(self, value: Any) -> bytes:
        """Encode a value of Python's JSON types. Raises `MalformedValue` with the path of what does not match the
        schema."""
        _check_plain(value, None, 0)
        self._validate(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def decode(self, data: bytes, reader: JsonSchemaCodec | None = None) -> Any:
        """Decode a value that matches the schema, that of `reader` if given. Raises `MalformedValue`."""
        try:
            value = json.loads(data, parse_constant=_refuse_constant)
        except RecursionError:
            raise fault(None, "is nested too deep") from None
        except ValueError as error:  # of JSON, UTF-8 and numbers
            raise fault(None, f"is not JSON: {reason(error)}") from error
        _check_plain(value, None, 0)
        (reader or self)._validate(value)
        return value

    encode_json = encode
    decode_json = decode

    def _validate(self, value: Any) -> None:
        token = _steps.set([STEPS_MAX])
        try:
            error = next(self._validator.iter_errors(value), None)
        except (reference_exceptions.Unresolvable, exceptions.UnknownType) as failed:
            raise UnsupportedSchema(
                f"the JSON Schema refers to what neither it nor its references have: {reason(failed)}"
            ) from failed
        except (RecursionError, _TooExpensive):
            raise fault(
                None, "costs too much to validate: its JSON Schema contains itself too often"
            ) from None
        finally:
            _steps.reset(token)
        if error is not None:
            path: Path = None
            for part in error.absolute_path:
                path = path, part
            raise fault(path, f"does not match its JSON Schema: {error.message}")


class _TooExpensive(Exception):
    """The validation of a value has applied `STEPS_MAX` keywords."""


def _parsed(text: str) -> Any:
    if len(text) > SCHEMA_BYTES_MAX:
        raise UnsupportedSchema(f"the JSON Schema is longer than {SCHEMA_BYTES_MAX} characters")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedSchema(f"this is no JSON Schema: {reason(error)}") from error
    if not isinstance(schema, dict | bool):
        raise UnsupportedSchema("this is no JSON Schema: it must be an object or a boolean")
    try:
        _check_plain(schema, None, VALUE_DEPTH_MAX - SCHEMA_DEPTH_MAX)
    except MalformedValue as error:
        raise UnsupportedSchema(
            f"the JSON Schema is nested more than {SCHEMA_DEPTH_MAX} levels deep"
        ) from error
    return schema


def _patterns(schema: Any) -> Iterator[str]:
    """Iterate over the regular expressions of a schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from _patterns(one)
    elif isinstance(schema, dict):
        for name, one in schema.items():
            if name == "pattern" and isinstance(one, str):
                yield one
            elif name == "patternProperties" and isinstance(one, dict):
                yield from one
            if name not in ("enum", "const", "default", "examples"):
                yield from _patterns(one)


def _has_keyword(schema: Any, wanted: frozenset[str]) -> bool:
    if isinstance(schema, list):
        return any(_has_keyword(one, wanted) for one in schema)
    if not isinstance(schema, dict):
        return False
    return any(name in wanted or _has_keyword(one, wanted) for name, one in schema.items())


def _check_unevaluated(root: Any) -> None:
    """Refuse a schema for which jsonschema may search long for what other keywords have evaluated: it counts no steps
    and uses Python's regular expressions there."""
    if _has_keyword(root, frozenset(("patternProperties",))):
        raise UnsupportedSchema("unevaluatedProperties is not supported together with patternProperties")
    left = EXPANSIONS_MAX

    def expand(schema: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise UnsupportedSchema(f"more than {EXPANSIONS_MAX} schemas apply to the same value")
        for name, one in schema.items() if isinstance(schema, dict) else ():
            if name in ("$ref", "$dynamicRef", "$recursiveRef"):
                expand(_local_target(root, one))
            elif name in _IN_PLACE:
                for inner in (
                    one if isinstance(one, list) else one.values() if name == _IN_PLACE[-1] else (one,)
                ):
                    expand(inner)

    def visit(schema: Any) -> None:
        if isinstance(schema, dict) and not _UNEVALUATED.isdisjoint(schema):
            expand(schema)
        for one in (
            schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        ):
            visit(one)

    visit(root)


def _local_target(root: Any, reference: Any) -> Any:
    """Return what a `$ref` leads to in the schema. Raises `UnsupportedSchema` if it leads elsewhere, or to a name."""
    target = root
    parts = reference.split("/") if isinstance(reference, str) else [""]
    for part in parts[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    if parts[0] != "#" or target is None:
        raise UnsupportedSchema(
            f"a $ref to {reference!r} is not supported together with unevaluated keywords"
        )
    return target


def _refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts and RFC 8259 does not allow."""
    raise ValueError(f"{word} is no number")


def _check_plain(value: Any, path: Path, depth: int) -> None:
    """Raise `MalformedValue` for a value that has no JSON text, or is nested too deep."""
    if depth > VALUE_DEPTH_MAX:
        raise fault(path, f"is nested more than {VALUE_DEPTH_MAX} levels deep")
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise fault(path, f"has a key {shown_type(key)}, not a string")
            _check_plain(one, (path, key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _check_plain(one, (path, index), depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            raise fault(path, "has a surrogate, which is no text")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise fault(path, "is no number of JSON")
    elif value is not None and not isinstance(value, bool | int):
        raise fault(path, f"is {shown_type(value)}, which JSON does not have")


# -- keywords --------


def _bounded(draft: Any) -> Any:
    """Return the validator of a draft with the keywords of this module, of which each application is counted."""
    keywords = {name: _counted(one) for name, one in draft.VALIDATORS.items()}
    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    return validators.extend(draft, keywords | {name: _counted(one) for name, one in own.items()})


def _counted(keyword: Any) -> Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        left = _steps.get()
        left[0] -= 1
        if left[0] < 0:
            raise _TooExpensive
        return keyword(validator, value, instance, schema)

    return counted


def _pattern(
    validator: Any, pattern: Any, instance: Any, _schema: Any
) -> Iterator[exceptions.ValidationError]:
    if validator.is_type(instance, "string") and not compile_regex(pattern)(instance):
        yield exceptions.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Any, instance: Any, _schema: Any
) -> Iterator[exceptions.ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, schema in patterns.items():
        matches = compile_regex(pattern)
        for name, value in instance.items():
            if matches(name):
                yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, others: Any, instance: Any, schema: Any
) -> Iterator[exceptions.ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    known = schema.get("properties", {})
    patterns = [compile_regex(one) for one in schema.get("patternProperties", ())]
    for name, value in instance.items():
        if name in known or any(matches(name) for matches in patterns):
            continue
        if isinstance(others, dict):
            yield from validator.descend(value, others, path=name)
        elif not others:
            yield exceptions.ValidationError(f"the property {name!r} is not allowed")


def _unique_items(
    validator: Any, is_wanted: Any, instance: Any, _schema: Any
) -> Iterator[exceptions.ValidationError]:
    if is_wanted and validator.is_type(instance, "array"):
        seen = set()
        for one in instance:
            key = _hashable(one)
            if key in seen:
                yield exceptions.ValidationError("it has an item twice")
                return
            seen.add(key)


def _hashable(value: Any) -> Any:
    """Return what is equal for two JSON values that are equal, and has a hash. True is not 1 in JSON."""
    if isinstance(value, dict):
        return "object", frozenset((name, _hashable(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return "array", tuple(map(_hashable, value))
    return isinstance(value, bool), value
