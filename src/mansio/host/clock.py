"""Clock, random numbers and boot id of the host."""

from __future__ import annotations

import os
import random
import time

BOOT_ID = "/proc/sys/kernel/random/boot_id"


class HostClock:
    """Wall time, and a monotonic time that continues while the machine is suspended."""

    __slots__ = ()
    _SOURCE = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        if self._SOURCE is None:
            return time.monotonic()
        return time.clock_gettime(self._SOURCE)


class HostRandom:
    """Random numbers of the operating system."""

    __slots__ = ()

    def bytes(self, length: int) -> bytes:
        return os.urandom(length)

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)


def boot_id() -> str:
    """Id of the machine's current boot on Linux; "" elsewhere."""
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
