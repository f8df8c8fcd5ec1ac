"""Compatibility of Avro schemas: whether a reader can resolve what a writer wrote.

Source: schema resolution of Apache Avro 1.12,
https://avro.apache.org/docs/1.12.0/specification/#schema-resolution. Rules have the names of the enum
`SchemaIncompatibilityType` of Avro's library for Java, and paths its form.

The checker of Apache's package (`avro.compatibility`) is not used:

* It compares aliases as they are written, while those without a namespace are in the namespace of their type.
* While it compares a recursive type it assumes that the pair is compatible, and it keeps what it concludes from that
  even if the assumption turns out wrong. A branch of a union that was tried in vain then makes other fields pass.
* It loses the path inside unions, raises for records of type `error`, and calls itself once per level and reference, so
  that a chain of a few hundred types ends it with `RecursionError`.
* It tries each branch of the writer with each branch of the reader, which takes minutes for unions of thousands.

Here the greatest set of compatible pairs of types is found (`pairs`). The branch of a union for a type of the writer is
found by name.

As in Java's checker, and unlike a literal reading of the specification: any branch of the reader's union will do, not
only the first that matches by name, and scale and precision of decimals are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.serde.compatibility.pairs import Pair, Pairs
from mansio.serde.definition import Incompatibility

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.serde.formats.avro import AvroField, AvroType, ParsedAvro

PAIRS_MAX: Final = 200_000
"""Maximum number of pairs of types that are compared."""
REPORTED_MAX: Final = 100
"""Maximum number of incompatibilities that are returned."""

_PROMOTIONS: Final = {
    "long": ("int",),
    "float": ("int", "long"),
    "double": ("int", "long", "float"),
    "bytes": ("string",),
    "string": ("bytes",),
}
"""Type of the reader -> other types of the writer that it reads."""
_PROMOTED_BY: Final = {
    kind: tuple(reader for reader, writers in _PROMOTIONS.items() if kind in writers)
    for kind in ("int", "long", "float", "string", "bytes")
}


def incompatibilities(reader: ParsedAvro, writer: ParsedAvro) -> list[Incompatibility]:
    """Return why `reader` cannot read what `writer` wrote, at most `REPORTED_MAX` reasons: those of outer types
    first, else in the order of the reader's schema.

    Raises `InvalidSchema` if more than `PAIRS_MAX` pairs of types would have to be compared."""
    comparison = _Comparison()
    if comparison.are_compatible(reader.type, writer.type):
        return []
    return comparison.reasons(reader.type, writer.type)


class _Failure(NamedTuple):
    """A requirement that two types do not meet. `step`: what the path of the reader's type is followed by."""

    rule: str
    step: str
    message: str


class _Part(NamedTuple):
    """Two types inside two types, which must be compatible, too."""

    reader: AvroType
    writer: AvroType
    step: str


_Pair = Pair["AvroType", "AvroType"]


class _Comparison:
    """Comparison of two schemas: the pairs of types that were met, one of the reader and one of the writer."""

    def __init__(self) -> None:
        self._pairs = Pairs["AvroType", "AvroType"](self._evaluate, PAIRS_MAX)
        self._branches: dict[int, dict[str, list[AvroType]]] = {}

    def are_compatible(self, reader: AvroType, writer: AvroType) -> bool:
        """Evaluate all pairs that matter."""
        root = self._pair(reader, writer)
        self._pairs.evaluate_pending()
        return root.is_compatible

    def reasons(self, reader: AvroType, writer: AvroType) -> list[Incompatibility]:
        """Return the requirements that fail, each with the first path that leads to it."""
        found: list[Incompatibility] = []
        seen: set[tuple[int, int]] = set()
        waiting = [(_Part(reader, writer, ""), "")]
        while waiting and len(found) < REPORTED_MAX:
            part, path = waiting.pop()
            key = id(part.reader), id(part.writer)
            # An evaluation ends with the first requirement that fails, so some parts may not be known yet.
            if key in seen or self.are_compatible(part.reader, part.writer):
                continue
            seen.add(key)
            inner: list[tuple[_Part, str]] = []
            for each in self._requirements(part.reader, part.writer):
                if isinstance(each, _Part):
                    inner.append((each, path + each.step))
                else:
                    found.append(Incompatibility(each.rule, (path + each.step) or "/", each.message))
            waiting.extend(reversed(inner))
        return found[:REPORTED_MAX]

    def _pair(self, reader: AvroType, writer: AvroType) -> _Pair:
        return self._pairs.pair((id(reader), id(writer)), reader, writer)

    def _evaluate(self, pair: _Pair) -> bool:
        """Whether two types are compatible, as far as is known of their parts."""
        reader, writer = pair.reader, pair.writer
        if reader.kind == "union" and writer.kind != "union":
            return any(self._relies_on(pair, branch, writer) for branch in self._candidates(reader, writer))
        return all(
            isinstance(each, _Part) and self._relies_on(pair, each.reader, each.writer)
            for each in self._requirements(reader, writer)
        )

    def _relies_on(self, user: _Pair, reader: AvroType, writer: AvroType) -> bool:
        return self._pairs.relies_on(user, self._pair(reader, writer))

    def _requirements(self, reader: AvroType, writer: AvroType) -> Iterator[_Failure | _Part]:
        """Return the requirements of two types: parts that must be compatible, and what already fails."""
        if writer.kind == "union":
            is_union = reader.kind == "union"
            for index, branch in enumerate(writer.branches):
                yield _Part(reader, branch, f"/{index}" if is_union else "")
        elif reader.kind == "union":
            text = f"no branch of the reader's union reads the writer's {_text(writer)}"
            yield _Failure("MISSING_UNION_BRANCH", "", text)
        elif reader.kind != writer.kind:
            if writer.kind not in _PROMOTIONS.get(reader.kind, ()):
                text = f"the reader has {_text(reader)}, and the writer {_text(writer)}"
                yield _Failure("TYPE_MISMATCH", "", text)
        elif reader.kind in ("array", "map"):
            assert reader.items is not None
            assert writer.items is not None
            yield _Part(reader.items, writer.items, "/items" if reader.kind == "array" else "/values")
        elif reader.name:
            yield from _requirements_of_named(reader, writer)

    def _candidates(self, union: AvroType, writer: AvroType) -> Sequence[AvroType]:
        """Return the branches of the reader's union that may read a type of the writer."""
        known = self._branches.get(id(union))
        if known is None:
            known = self._branches[id(union)] = _branches_by_name(union)
        if writer.name:
            same = known.get(f"{writer.kind} {writer.short_name}", ())
            return [*same, *known.get(f"alias {writer.name}", ())]
        kinds = (writer.kind, *_PROMOTED_BY.get(writer.kind, ()))
        return [branch for kind in kinds for branch in known.get(kind, ())]


def _branches_by_name(union: AvroType) -> dict[str, list[AvroType]]:
    found: dict[str, list[AvroType]] = defaultdict(list)
    for branch in union.branches:
        found[f"{branch.kind} {branch.short_name}" if branch.name else branch.kind].append(branch)
        for alias in branch.aliases:
            found[f"alias {alias}"].append(branch)
    return found


def _requirements_of_named(reader: AvroType, writer: AvroType) -> Iterator[_Failure | _Part]:
    """Return the requirements of two records, two enums or two fixed."""
    if reader.short_name != writer.short_name and writer.name not in reader.aliases:
        text = (
            f"the writer's {writer.kind} is {writer.name}, and the reader's {reader.name} has no such alias"
        )
        yield _Failure("NAME_MISMATCH", "/name", text)
    if reader.kind == "record":
        yield from _requirements_of_records(reader, writer)
    elif reader.kind == "enum":
        missing = [symbol for symbol in writer.symbols if symbol not in reader.symbols]
        if missing and reader.default_symbol is None:
            text = f"the reader's {reader.name} has no default and lacks {_list_text(missing)}"
            yield _Failure("MISSING_ENUM_SYMBOLS", "/symbols", text)
    elif reader.size != writer.size:
        text = f"the reader's {reader.name} has {reader.size} bytes, and the writer's {writer.size}"
        yield _Failure("FIXED_SIZE_MISMATCH", "/size", text)


def _requirements_of_records(reader: AvroType, writer: AvroType) -> Iterator[_Failure | _Part]:
    written = {each.name: each for each in writer.fields}
    for index, each in enumerate(reader.fields):
        found = _written_field(each, written)
        if found is not None:
            yield _Part(each.type, found.type, f"/fields/{index}/type")
        elif not each.has_default:
            text = f"the reader's field {each.name} has no default, and the writer does not have it"
            yield _Failure("READER_FIELD_MISSING_DEFAULT_VALUE", f"/fields/{index}", text)


def _written_field(each: AvroField, written: dict[str, AvroField]) -> AvroField | None:
    """Find the writer's field of a reader's field: by its name, else by its aliases."""
    for name in (each.name, *each.aliases):
        if name in written:
            return written[name]
    return None


def _text(kind: AvroType) -> str:
    return f"{kind.kind} {kind.name}" if kind.name else kind.kind


def _list_text(names: Sequence[str]) -> str:
    text = ", ".join(names[:5])
    return text if len(names) <= 5 else f"{text} and {len(names) - 5} others"
