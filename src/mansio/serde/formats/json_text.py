"""JSON text of schemas: parsing with bounds, and the texts that are stored and compared (RFC 8259).

Invariants:
* A document that was read can be written: it has no number beyond a double, no NaN and no lone surrogate.
* No part of it is nested more than `DEPTH_MAX` levels deep, so functions that visit it may call themselves.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from mansio.serde.errors import InvalidSchema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.serde.definition import ReferencedSchema

TEXT_BYTES_MAX: Final = 1_000_000
"""Maximum size of a schema in UTF-8. A record of the topic `_schemas` has one schema, and topics limit a batch to about
a megabyte."""
DEPTH_MAX: Final = 128
"""Maximum number of arrays and objects that contain each other. A record of Avro inside another one takes three."""
REFERENCES_MAX: Final = 1_000
REFERENCED_BYTES_MAX: Final = 4_000_000
"""Maximum size of all schemas together to which a schema refers, directly or not."""


def read_json(text: str, format_name: str) -> Any:
    """Parse the text of a schema. `format_name`: format of the schema in messages. Of a repeated key the last one
    counts, as in other registries. Raises `InvalidSchema`."""
    if len(text) > TEXT_BYTES_MAX or size_of(text) > TEXT_BYTES_MAX:
        raise InvalidSchema(f"the schema is larger than {TEXT_BYTES_MAX:,} bytes")
    try:
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            compact_text(document).encode()
    except RecursionError:
        document = None
        is_too_deep = True
    except UnicodeEncodeError as error:
        raise InvalidSchema("a text in the schema has half of a surrogate pair") from error
    except ValueError as error:
        raise InvalidSchema(f"this is no {format_name}: it is not JSON: {error}") from error
    else:
        is_too_deep = _is_deeper(document, DEPTH_MAX)
    if is_too_deep:
        raise InvalidSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
    return document


def check_references(references: Sequence[ReferencedSchema]) -> None:
    """Raise `InvalidSchema` if there are too many references, or if they are too large together."""
    if len(references) > REFERENCES_MAX:
        raise InvalidSchema(f"the schema refers to more than {REFERENCES_MAX} other schemas")
    if sum(size_of(one.text) for one in references) > REFERENCED_BYTES_MAX:
        raise InvalidSchema(
            f"the schemas to which it refers are larger than {REFERENCED_BYTES_MAX:,} bytes together"
        )


def compact_text(document: Any) -> str:
    """Return the document without white space, in the order in which it was written."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def sorted_text(document: Any) -> str:
    """Return the document without white space, with the keys of each object in alphabetical order."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True)


def size_of(text: str) -> int:
    """Size of a text in UTF-8. Raises `InvalidSchema` for half of a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidSchema("the schema has half of a surrogate pair") from error


def shortened(value: Any) -> str:
    """Return a value as it is cited in a message: JSON of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, list | dict) else _outline(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _outline(value: list[Any] | dict[str, Any]) -> str:
    return "an array" if isinstance(value, list) else "an object"


def _refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond the range of a double")
    return number


def _is_deeper(document: Any, depth_max: int) -> bool:
    """Whether arrays and objects contain each other more than `depth_max` times. Visits one level after the other."""
    level = [document]
    for _ in range(depth_max + 1):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
