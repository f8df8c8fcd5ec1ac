"""Fairness by key in simulated histories with a share group: its keys, smaller bounds, and changes of its settings.

What is promised of deliveries stays the same, and is judged by `support.share_history`: a group with fairness loses
nothing, delivers nothing again that was accepted, and gives no record to two members, whatever happens while keys are
isolated, and while fairness and the header of the keys change.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final
from unittest.mock import patch
from zlib import crc32

from mansio.broker.coordinator.share import fair_scan
from mansio.state.share_partition import offset_numbers
from mansio.state.share_partition.fairness import fair_index

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_SEED: Final = 700_000
"""Histories with a share group from this seed on have fairness, most of the time."""

LIMITED_FIRST_SEED: Final = 750_000
"""Those from this seed on have limits by key, too; their group keys are always the keys of the records."""

HEADER: Final = "tenant"
BOUNDS: Final = (
    (fair_index, "BACKLOG_MAX", 1),
    (fair_index, "ISOLATED_KEYS_SCALE", 4),
    (fair_index, "ISOLATIONS_MAX", 12),
    (fair_index, "BACKLOG_QUEUES", range(16, 19)),
    (fair_scan, "SCANNED_RECORDS_MAX", 7),
    (fair_scan, "SCAN_AHEAD_RECORDS", 40),
    (fair_scan, "REVIEW_INTERVAL_MS", 150),
    (offset_numbers, "CHUNK_OFFSETS", 64),
)
"""Module, name, and a value that a history of some seconds reaches."""

BATCH_SIZES: Final = (1, 2, 6)
"""Of producers, in records."""

NOISY_RECORDS: Final = 60
"""Records of a producer after which another key is the noisy one."""


def has_fairness(seed: int) -> bool:
    """Of a history with a share group."""
    return seed >= FIRST_SEED


def key_of(value: bytes) -> bytes | None:
    """Of a produced record; some have none, and one is too long to be stored as it is."""
    hashed = crc32(value)
    if hashed % 8 < 4:
        producer, _, number = value.rpartition(b":")
        return b"noisy %d" % ((int(number) // NOISY_RECORDS + len(producer)) % 3)
    if hashed % 8 == 7:
        return None
    return (b"long" * 40) if hashed % 48 == 6 else b"key %d" % (hashed // 8 % 12)


def headers_of(value: bytes) -> tuple[tuple[str, bytes], ...]:
    """The header of a produced record; some have none."""
    hashed = crc32(value, 1)
    if hashed % 8 == 7:
        return ()
    return ((HEADER, b"loud" if hashed % 8 < 4 else b"tenant %d" % (hashed // 8 % 12)),)


@contextmanager
def smaller_bounds() -> Iterator[None]:
    """While a history runs."""
    with ExitStack() as stack:
        for module, name, value in BOUNDS:
            stack.enter_context(patch.object(module, name, value))
        yield
