"""Machine factor: how much slower than the reference machine this one is now, at least 1.

Measured once per test session by a short fixed workload (computation and process starts) in the process that starts the
workers, which inherit the result in the environment. Load that begins later is taken from the load average, and from
the number of threads that can run now, because the average needs a minute to rise. Time limits and deadlines of tests
are multiplied by the factor, so that a slow or busy machine does not fail them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import time
from typing import Final

VARIABLE: Final = "MANSIO_TEST_MACHINE_FACTOR"
REFERENCE_S: Final = 0.42
"""Duration of the workload on the reference machine: two quiet cores, Python 3.11."""
FACTOR_MAX: Final = 12.0

_ROUNDS: Final = 2000
_PROCESSES: Final = 10


def measured_s() -> float:
    """Run the workload and return its wall time in seconds."""
    begin = time.perf_counter()
    block = bytes(range(256)) * 64
    for number in range(_ROUNDS):
        block = hashlib.sha256(block + bytes((number & 255,))).digest() * 512
        sum(number * each for each in block[:2048])
    for _ in range(_PROCESSES):
        subprocess.run([sys.executable, "-S", "-c", "import json"], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - begin


@functools.cache
def factor() -> float:
    """The factor of this session, between 1 and `FACTOR_MAX`."""
    inherited = os.environ.get(VARIABLE)
    value = float(inherited) if inherited else measured_s() / REFERENCE_S
    value = min(max(value, 1.0), FACTOR_MAX)
    os.environ[VARIABLE] = f"{value:.2f}"
    return value


def scaled(seconds: float) -> float:
    """A time limit in seconds, multiplied by the machine factor or, if that is more, by the load per processor."""
    return seconds * min(max(factor(), _load() / (os.cpu_count() or 1)), FACTOR_MAX)


def _load() -> float:
    """How many threads run or wait for a processor, now or in the last minute."""
    try:
        with open("/proc/loadavg") as file:
            average, _, _, runnable, _ = file.read().split()
    except OSError:  # no Linux
        return os.getloadavg()[0]
    return max(float(average), float(runnable.partition("/")[0]))
