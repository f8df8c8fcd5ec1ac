"""What the processes of a Spark session take: processor time and memory, of the JVM and of Python, as `/proc` has them.

Always true: the processes that this one has started are counted, and theirs; a broker is not, which is in a session of
its own; and this process itself counts as Python, for it drives the queries.
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
    """Seconds since the processes began, those of ended ones with their parents'."""

    jvm_s: float
    python_s: float

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """What was used after `before`."""
        return ProcessorTime(self.jvm_s - before.jvm_s, self.python_s - before.python_s)


def processor_time() -> ProcessorTime:
    """What all have used up to now."""
    jvm = python = 0
    for pid in (os.getpid(), *below(os.getpid())):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        user, system, user_of_ended, system_of_ended = map(int, rest.split()[11:15])
        python += user_of_ended + system_of_ended  # a JVM's children are Python, too
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
                except OSError:  # it has ended
                    continue
                jvm, workers = (jvm + size, workers) if name == JVM else (jvm, workers + size)
            self.jvm_bytes, self.workers_bytes = max(self.jvm_bytes, jvm), max(self.workers_bytes, workers)


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with its part of what it shares with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def below(pid: int) -> Iterator[int]:
    """The processes that this one has started, and theirs; not the broker, which is in a session of its own."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
            ours = [child for child in children if os.getsid(child) == os.getsid(0)]
        except OSError:  # one of them has ended: it is looked at again soon
            continue
        for child in ours:
            yield child
            yield from below(child)
