"""Processor time and memory of the processes of a Spark session, JVM and Python, from `/proc`.

Invariant: this process, its children and their children are counted; a broker is not, because it has its own session.
This process counts as Python, because it drives the queries.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE_S = 0.05
JVM = "java"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessorTime(NamedTuple):
    """Processor seconds; those of ended processes are counted with their parents."""

    jvm_s: float
    python_s: float

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """Processor time since `before`."""
        return ProcessorTime(self.jvm_s - before.jvm_s, self.python_s - before.python_s)


def processor_time() -> ProcessorTime:
    """Processor time of all processes so far."""
    jvm = python = 0
    for pid in (os.getpid(), *below(os.getpid())):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the process has ended
            continue
        user, system, user_of_ended, system_of_ended = map(int, rest.split()[11:15])
        python += user_of_ended + system_of_ended  # children of the JVM are Python as well
        if name == JVM:
            jvm += user + system
        else:
            python += user + system
    return ProcessorTime(jvm / TICKS_PER_S, python / TICKS_PER_S)


class Memory:
    """The highest resident memory of the JVM below this process, and of all other processes below it together: what
    several of them share, as forked ones do, is counted once."""

    def __init__(self) -> None:
        self.jvm_bytes = self.workers_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            jvm = workers = 0
            for pid in below(os.getpid()):
                try:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    size = proportional_bytes(pid)
                except OSError:  # the process has ended
                    continue
                jvm, workers = (jvm + size, workers) if name == JVM else (jvm, workers + size)
            self.jvm_bytes, self.workers_bytes = max(self.jvm_bytes, jvm), max(self.workers_bytes, workers)


def proportional_bytes(pid: int) -> int:
    """Proportional set size of a process (its share of shared memory included)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def below(pid: int) -> Iterator[int]:
    """Descendants of this process; not the broker, which has its own session."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
            ours = [child for child in children if os.getsid(child) == os.getsid(0)]
        except OSError:  # one of them has ended; the next sample is complete
            continue
        for child in ours:
            yield child
            yield from below(child)
