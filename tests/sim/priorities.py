"""Priorities of the records of simulated histories with a share group."""

from __future__ import annotations

from typing import Final
from zlib import crc32

from mansio.wire.batch.priority_header import PRIORITY_HEADER

FIRST_SEED: Final = 600_000
"""Histories with a share group from this seed on have a topic with priorities; batches have records of all of them."""

CONFIGS: Final = {"mansio.priority.enable": "true"}
NAMES: Final = (b"high", b"normal", b"low", None)


def headers_of(seed: int, value: bytes) -> tuple[tuple[str, bytes], ...]:
    """Of a produced record; some have none."""
    if seed < FIRST_SEED:
        return ()
    name = NAMES[crc32(value) % len(NAMES)]
    return () if name is None else ((PRIORITY_HEADER, name),)
