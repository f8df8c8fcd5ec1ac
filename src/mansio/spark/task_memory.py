"""Settings of the C allocator in Spark's Python workers.

Decoding a response creates arrays of a few hundred kilobytes. By default glibc gives the memory of such an array back
to the kernel when it is freed, and the next array has page faults again: a fifth of the processor time of a task.

Invariants:
* A worker keeps at most `TRIM_THRESHOLD_BYTES` of freed memory at the end of its heap.
* Without glibc nothing changes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 8 << 20
"""Size from which an allocation is a mapping of its own, which is unmapped when it is freed."""
TRIM_THRESHOLD_BYTES: Final = 64 << 20
"""Free memory at the end of the heap above which it is given back."""

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@cache
def keep_freed_memory() -> bool:
    """Let this process reuse the memory of freed arrays. Called once per process; returns whether the C library has
    accepted it."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - another library's mallopt may have other parameters
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )
