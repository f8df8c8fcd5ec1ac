"""Ids of records: UUIDs of version 7 that a producer sets as headers `mansio-id`.

Within a millisecond the twelve bits after the time count up, from a random number below 2048 (RFC 9562, 6.2, method 1),
so the ids of a producer increase, also where the clock is set back.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from mansio.wire.batch.record_id_header import RECORD_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.types import OutgoingRecord

COUNTER_MAX: Final = 0xFFF
_FIRST_MASK: Final = 0x7FF
_RANDOM_MASK: Final = (1 << 62) - 1


class RecordIds:
    """Makes the ids of one producer."""

    __slots__ = ("_counter", "_last_ms", "_now_ms", "_random")

    def __init__(
        self,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._now_ms = now_ms
        self._random = random
        self._last_ms = -1
        self._counter = 0

    def next(self) -> str:
        """Return an id that is larger than all before."""
        chance = int.from_bytes(self._random(10), "big")
        now_ms = self._now_ms()
        if now_ms > self._last_ms:
            self._last_ms, self._counter = now_ms, chance >> 64 & _FIRST_MASK
        elif self._counter < COUNTER_MAX:
            self._counter += 1
        else:  # more ids than one millisecond has: take the next one
            self._last_ms, self._counter = self._last_ms + 1, chance >> 64 & _FIRST_MASK
        number = self._last_ms << 80 | 7 << 76 | self._counter << 64 | 0b10 << 62 | chance & _RANDOM_MASK
        digits = f"{number:032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def with_id(self, record: OutgoingRecord) -> OutgoingRecord:
        """Return a record with an id. One that has such a header already keeps it."""
        headers = record.headers
        if any(name == RECORD_ID_HEADER for name, _ in headers):
            return record
        return record._replace(headers=(*headers, (RECORD_ID_HEADER, self.next().encode())))
