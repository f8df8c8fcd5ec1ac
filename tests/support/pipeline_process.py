"""`mansio pipeline ...` in a process of its own, started as a person starts it, and killed as nobody should.

Owns: the process with all that it starts (a JVM, Spark's Python workers), and the files with what it says. Always true:
of a process that `kill` returned from nothing is left that could still write.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

import psutil

from support.places import mansio_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GONE_DEADLINE_S = 30.0
START_DEADLINE_S = 150.0
"""To the first batch, with other processes beside it."""


class PipelineProcess:
    """One start of a command. `place`: its working directory; `words`: what follows `mansio pipeline`."""

    def __init__(
        self, place: Path, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        number = len(list(place.glob("errors-*")))
        self.errors, self.output = place / f"errors-{number}", place / f"output-{number}"
        with self.errors.open("wb") as errors, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*mansio_command(), "pipeline", *words],
                cwd=place,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def batches(self) -> int:
        """How many batches it has reported."""
        return sum(line.startswith("batch ") for line in self.errors.read_text(errors="replace").splitlines())

    def wait_for_batches(self, count: int) -> None:
        """Return when it has reported so many; it is wrong if it ends before."""
        end = time.monotonic() + START_DEADLINE_S
        while self.batches < count:
            said = self.errors.read_text(errors="replace")
            assert self.process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.02)

    def wait(self, deadline_s: float) -> int:
        """Its exit code, when it ends by itself."""
        return self.process.wait(deadline_s)

    def kill(self) -> None:
        """SIGKILL to Python, the JVM and the workers at once. Harmless when they are gone."""
        if self.process.poll() is None:
            driver = psutil.Process(self.process.pid)
            everyone = [driver, *driver.children(recursive=True)]
            for one in everyone:
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(everyone[1:], GONE_DEADLINE_S)
        self.process.wait(GONE_DEADLINE_S)

    def kill_driver(self) -> None:
        """SIGKILL to the process that was started, and to nothing else: what it has started is to end by itself."""
        self.process.kill()
        self.process.wait(GONE_DEADLINE_S)
