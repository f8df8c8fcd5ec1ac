"""Jobs on schemas of clients, which a broker has done by another process: they may need much time and memory.

A job and its answer are JSON objects. `parse`: the text and the identity of a schema. `identities`: those of several
schemas of one format. `check`: why a new schema is not compatible with earlier ones. `names`: of the records that a
schema describes. `serialize`: a schema of Protobuf as a descriptor. `encode`: values of plain JSON. A schema that is
not valid is in the answer, as `refused`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError
from mansio.host.extras import require_extra
from mansio.serde.definition import ReferencedSchema, SchemaType
from mansio.serde.errors import InvalidSchema, MalformedValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.serde.codecs.compiled import Codec
    from mansio.serde.definition import ParsedSchema

EXTRA: Final = "registry"
PARSED_MAX: Final = 256
"""Number of parsed schemas that the process keeps."""
KEPT_CHARACTERS_MAX: Final = 32 << 10
"""Length of a schema up to which it is kept: a parsed one may take a hundred times as much memory."""
CODECS_MAX: Final = 64

_MODULES: Final = {
    SchemaType.AVRO: "mansio.serde.formats.avro",
    SchemaType.JSON: "mansio.serde.formats.json_schema",
    SchemaType.PROTOBUF: "mansio.serde.formats.protobuf",
}


def run_job(job: bytes) -> bytes:
    """Do a job. Errors are part of the answer."""
    task = json.loads(job)
    try:
        try:
            answer = _JOBS[task["job"]](task)
        except MemoryError:  # others may have left no room
            _parse_once.cache_clear()
            _codec_of.cache_clear()
            answer = _JOBS[task["job"]](task)
    except (InvalidSchema, RecursionError, MemoryError) as error:
        answer = {"refused": _line(error)}
    except MansioError as error:
        answer = {"unavailable": error.message}
    except Exception as error:  # noqa: BLE001 - a schema of a client must not end the process, whatever a library does
        answer = {"refused": f"it cannot be processed: {type(error).__name__}: {_line(error)}"}
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return " ".join(str(error).split())


def _parse(task: dict[str, Any]) -> dict[str, Any]:
    parsed = _parsed_schema(task["kind"], task["schema"], normalize=task["normalize"])
    return {"text": parsed.text, "identity": parsed.identity, "names": list(parsed.record_names)}


def _identities(task: dict[str, Any]) -> dict[str, Any]:
    found: list[str | None] = []
    for each in task["schemas"]:
        try:
            found.append(_parsed_schema(task["kind"], each, normalize=task["normalize"]).identity)
        except (InvalidSchema, RecursionError):
            found.append(None)
    return {"identities": found}


def _check(task: dict[str, Any]) -> dict[str, Any]:
    from mansio.serde.compatibility.levels import EarlierVersion, level_messages
    from mansio.state.registry.schema import Compatibility

    kind = SchemaType(task["kind"])
    earlier = [
        EarlierVersion(each["version"], SchemaType(each["kind"]), _parsed_schema(each["kind"], each))
        for each in task["earlier"]
    ]
    new = _parsed_schema(kind, task["schema"])
    return {"messages": level_messages(Compatibility(task["level"]), kind, new, earlier)}


def _names(task: dict[str, Any]) -> dict[str, Any]:
    schema = task["schema"]
    return {"names": list(_parsed_schema(schema["kind"], schema).record_names)}


def _serialize(task: dict[str, Any]) -> dict[str, Any]:
    text, references = _serialized_files(task["schema"]["text"], _references(task["schema"]))
    return {"text": text, "references": references}


def _encode(task: dict[str, Any]) -> dict[str, Any]:
    """Encode values of plain JSON. A value that does not match is named by its position, and its path."""
    from mansio.serde.serde import encoded

    schema = task["schema"]
    codec = _codec_of(schema["kind"], schema["text"], _references(schema))
    found: list[str] = []
    for position, value in enumerate(task["values"]):
        try:
            indexes, payload = encoded(codec, value, "", is_json=True)
        except (MalformedValue, RecursionError) as error:
            return {"malformed": position, "reason": _line(error)}
        found.append(b64encode(indexes + payload).decode())
    return {"encoded": found}


def _serialized_files(
    text: str, references: tuple[ReferencedSchema, ...]
) -> tuple[str, tuple[ReferencedSchema, ...]]:
    """Return the texts of Protobuf files as a `FileDescriptorProto` in base64 each."""
    serialized = [
        each._replace(text=_serialized(each.text, references[:number], each.name))
        for number, each in enumerate(references)
    ]
    return _serialized(text, references), tuple(serialized)


def _serialized(text: str, references: tuple[ReferencedSchema, ...], name: str | None = None) -> str:
    parsed: Any = _parse_once(SchemaType.PROTOBUF, text, references, False)
    serialized: str = parsed.serialized(name)
    return serialized


@lru_cache(CODECS_MAX)
def _codec_of(kind: str, text: str, references: tuple[ReferencedSchema, ...]) -> Codec:
    from mansio.serde.codecs.compiled import compile_codec
    from mansio.serde.source import RegisteredSchema

    if kind == SchemaType.PROTOBUF:
        text, references = _serialized_files(text, references)
    return compile_codec(RegisteredSchema(SchemaType(kind), text, references))


_JOBS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "nothing": lambda _: {},
    "parse": _parse,
    "identities": _identities,
    "check": _check,
    "names": _names,
    "serialize": _serialize,
    "encode": _encode,
}


def _parsed_schema(kind: str, schema: dict[str, Any], *, normalize: bool = False) -> ParsedSchema:
    references = _references(schema)
    characters = len(schema["text"]) + sum(len(each.text) for each in references)
    parse = _parse_once if characters <= KEPT_CHARACTERS_MAX else _parse_once.__wrapped__
    return parse(kind, schema["text"], references, normalize)


def _references(schema: dict[str, Any]) -> tuple[ReferencedSchema, ...]:
    return tuple(ReferencedSchema(name, text) for name, text in schema["references"])


@lru_cache(PARSED_MAX)
def _parse_once(
    kind: str, text: str, references: tuple[ReferencedSchema, ...], normalize: bool
) -> ParsedSchema:
    require_extra(EXTRA)
    parsed: ParsedSchema = import_module(_MODULES[SchemaType(kind)]).parse(
        text, references, normalize=normalize
    )
    return parsed
