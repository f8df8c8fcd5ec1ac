"""Out of a batch that cannot be read, what can: the good records around the bad ones. Pure.

A batch whose frame is broken (CRC, lengths, compression) is lost as a whole. Where only what a record says is wrong
(the name of a header, a time that no table can hold), the bad records are found by halving.

Always true: pieces come in the order of offsets and cover the stretch; a batch is decoded a bounded number of times,
and what was not told apart by then counts as bad.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    CorruptMessage,
    InvalidRecord,
    MansioError,
    UnsupportedCompression,
    UnsupportedMessageFormat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    Decode = Callable[[Sequence[str], int, int], list[pa.RecordBatch]]
    """(columns, first offset, offset after the last) -> rows. Raises one of `UNREADABLE`."""

UNREADABLE: Final = (CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat)
"""What decoding says of bytes that are no records."""

ATTEMPTS_MAX: Final = 512
"""So many times one batch is decoded: enough for some thirty bad records in a thousand."""


_ERROR_TEXT: Final = re.compile(r"offsets (\d+) to (\d+) cannot be read: ")


def error_text(first: int, last: int, error: MansioError) -> str:
    """What a dead letter says: which offsets it stands for, both inclusive, and why they are not here as records."""
    return f"offsets {first} to {last} cannot be read: {error.message}"


def parse_error_offsets(text: str) -> tuple[int, int] | None:
    """The offsets in an `error_text`, both inclusive; None for any other text."""
    found = _ERROR_TEXT.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def parse_error_reason(text: str) -> str:
    """Why, in an `error_text`; any other text as it is."""
    found = _ERROR_TEXT.match(text)
    return text if found is None else text[found.end() :]


class DamagedRange(NamedTuple):
    """Offsets whose records cannot be read, both inclusive, and why. `is_frame`: nothing in the batch can be."""

    first: int
    last: int
    error: MansioError
    is_frame: bool


def isolate_bad_records(
    decode: Decode, columns: Sequence[str], start: int, end: int
) -> Iterator[pa.RecordBatch | DamagedRange]:
    """The pieces of one batch with offsets from `start` to below `end`: rows, and what is no rows."""
    try:
        found = decode(("offset",), start, end)
    except UNREADABLE as error:
        yield DamagedRange(start, end - 1, error, is_frame=True)
        return
    offsets = [offset for rows in found for offset in rows.column(0).to_pylist()]
    pending = [(0, len(offsets))] if offsets else []
    attempts = ATTEMPTS_MAX
    while pending:
        low, high = pending.pop()
        attempts -= 1
        try:
            yield from decode(columns, offsets[low], offsets[high - 1] + 1)
        except UNREADABLE as error:
            if high - low == 1 or attempts <= 0:
                yield DamagedRange(offsets[low], offsets[high - 1], error, is_frame=False)
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
