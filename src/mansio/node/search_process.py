"""`python -m mansio.node.search_process`: the process in which a broker searches segments by key or id.

`mansio.host.worker_process` starts it; its standard input is a socket to the broker.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.host.worker_process import serve_jobs
from mansio.storage.record_search import decode_job, encode_result, search_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_give_way: Final[Callable[[], object]] = getattr(os, "sched_yield", os.getppid)
"""A system call, that of its name where the platform has it."""

COMMAND: Final = (sys.executable, "-P", "-m", "mansio.node.search_process")
"""Without the working directory of the broker in the path of modules."""


def run_job(job: bytes, descriptors: Sequence[int]) -> bytes:
    """Search the files with these descriptors."""
    task, files = decode_job(job)
    with ExitStack() as mapped:
        result = search_files(task, files, partial(_map, mapped, descriptors), _monotonic)
    return encode_result(result)


def _map(mapped: ExitStack, descriptors: Sequence[int], number: int, size: int) -> mmap.mmap:
    return mapped.enter_context(mmap.mmap(descriptors[number], size, access=mmap.ACCESS_READ))


def _monotonic() -> float:
    """Give way to the processes that wait, and return the time. A kernel with lazy preemption interrupts a process that
    makes no system call at the next tick only, also under SCHED_IDLE: others would wait for milliseconds."""
    _give_way()
    return time.monotonic()


if __name__ == "__main__":
    serve_jobs(run_job)
