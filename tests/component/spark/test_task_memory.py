"""Memory of a worker: freed arrays do not cost page faults again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_BYTES = 4096
ROUNDS = 50
TOUCHED_BYTES = 8 * 400_000
PROGRAM = f"""
import resource
from mansio.spark.task_memory import keep_freed_memory

CALL
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    kept = [bytearray(b"x" * 400_000) for _ in range(8)]
touch()
before = faults()
for _ in range({ROUNDS}):
    touch()
print(faults() - before)
"""


def page_faults(call: str) -> int:
    command = [sys.executable, "-c", PROGRAM.replace("CALL", call)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_arrays_are_reused_without_page_faults() -> None:
    assert page_faults("assert keep_freed_memory()") < ROUNDS * TOUCHED_BYTES // PAGE_BYTES // 10
