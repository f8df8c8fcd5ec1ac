"""Decoding of a column of encoded values to a typed column, with an error for each malformed value.

Invariants:
* A malformed value never affects another row: its row is null and its error is in `DecodedColumn.errors`.
* An error of the schema registry is not an error of a value: it is raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mansio.serde.errors import MalformedValue, reason
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Decode = Callable[[bytes], Any]
    """Function from an encoded value to the Python object that Arrow converts. Raises `MalformedValue`."""


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """A typed column, and the reason for each row whose value is malformed (null in the column), by row."""

    array: pa.Array
    errors: dict[int, str] = field(default_factory=dict)


def decode_objects(
    values: Sequence[bytes | None], decode: Decode
) -> tuple[list[Any], dict[int, MalformedValue]]:
    """Return the decoded objects, None for a missing or malformed value, and the errors by row."""
    errors: dict[int, MalformedValue] = {}
    objects: list[Any] = [None] * len(values)
    for row, value in enumerate(values):
        if value is not None:
            try:
                objects[row] = decode(value)
            except MalformedValue as error:
                errors[row] = without_traceback(error)
    return objects, errors


def to_column(objects: list[Any], kind: pa.DataType, errors: dict[int, MalformedValue]) -> DecodedColumn:
    """Convert decoded objects to a column. An object that does not fit into the type is malformed, too."""
    reasons = {row: reason(error) for row, error in errors.items()}
    try:
        return DecodedColumn(pa.array(objects, kind), reasons)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        pass
    for row, one in enumerate(objects):
        try:
            pa.array([one], kind)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            objects[row] = None
            reasons[row] = reason(error)
    return DecodedColumn(pa.array(objects, kind), reasons)
