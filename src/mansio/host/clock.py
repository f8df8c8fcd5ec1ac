"""Clock, random numbers and boot id of the host."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from typing import Final

UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
"""File of Linux with a random id of the current boot."""


class HostClock:
    """Clock of the operating system (port `Clock`); on Linux its monotonic time also advances while the machine is
    suspended."""

    __slots__ = ()
    _SOURCE = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        if self._SOURCE is None:
            return time.monotonic()
        return time.clock_gettime(self._SOURCE)


class HostRandom:
    """Random bytes of the operating system and pseudo-random floats (port `Random`)."""

    __slots__ = ()

    def bytes(self, length: int) -> bytes:
        return os.urandom(length)

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)


def processor_s() -> float:
    """Processor time that this process has used, in seconds."""
    return time.process_time()


def boot_id() -> str:
    """Id of the machine's current boot on Linux; "" on other systems."""
    try:
        with open(BOOT_ID_FILE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
