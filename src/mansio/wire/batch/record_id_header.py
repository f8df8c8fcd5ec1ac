"""Header `mansio-id`: the id of a record, a UUID of version 7 (RFC 9562) as text.

The producer of Mansio sets it on request. Its time is that of the publication by the client's clock, so a search for an
id reads only what was stored from then on. A caller may set the header to any text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.wire.batch.record_batch import Header

RECORD_ID_HEADER: Final = "mansio-id"
RECORD_ID_NAME: Final = RECORD_ID_HEADER.encode()

_TIME_VERSION: Final = 7


def record_id_time_ms(record_id: str) -> int | None:
    """Return the time in an id, in milliseconds since the Unix epoch; None if it is not a UUID of version 7."""
    try:
        found = UUID(record_id)
    except ValueError:
        return None
    return found.int >> 80 if found.version == _TIME_VERSION else None


def find_record_id(headers: Iterable[Header]) -> str | None:
    """Return the id in the headers of a record, the last if there are several; None if there is none."""
    found: str | None = None
    for name, value in headers:
        if name == RECORD_ID_HEADER and value is not None:
            found = value.decode("utf-8", "replace")
    return found
