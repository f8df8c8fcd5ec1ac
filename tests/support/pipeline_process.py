"""Process of `mansio pipeline ...` that a test can kill.

Owns: the process with all that it starts (a JVM, Spark's Python workers), and the files with what it says. Always true:
of a process that `kill` returned from nothing is left that could still write.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from support.machine import scaled
from support.paths import mansio_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GONE_DEADLINE_S = 120.0
BUDGET_CPU_S = 150.0
"""Processor time of the whole tree for what is waited for. Beside other work a start takes longer, and no more of
this."""
STILL_S = 180.0
"""Nothing moves for so long, neither its processor time nor what it says: it hangs."""
MOVES_CPU_S = 0.5
LOOK_S = 1.0


class PipelineProcess:
    """One start of a command. `place`: its working directory; `words`: what follows `mansio pipeline`."""

    def __init__(
        self, place: Path, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._left: list[psutil.Process] = []
        number = len(list(place.glob("errors-*")))
        self.errors, self.output = place / f"errors-{number}", place / f"output-{number}"
        python, *command = mansio_command()
        with self.errors.open("wb") as errors, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [python, "-P", *command, "pipeline", *words],  # as the installed script: not from `place`
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
        return sum(line.startswith("batch ") for line in self.printed.splitlines())

    def wait_for_batches(self, count: int) -> None:
        """Return when it has reported so many; it is wrong if it ends before, hangs, or works in vain."""
        detector = FailureDetector(self)
        while self.batches < count:
            assert self.process.poll() is None, self.printed
            detector.check()
            time.sleep(0.02)

    @property
    def printed(self) -> str:
        """What it has written to standard error."""
        return self.errors.read_text(errors="replace")

    def cpu_s(self) -> float:
        """Processor time of all that it has started and that still runs, and of what those have seen end."""
        spent = 0.0
        try:
            driver = psutil.Process(self.process.pid)
            for one in (driver, *driver.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    spent += sum(one.cpu_times()[:4])
        except psutil.NoSuchProcess:
            pass
        return spent

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
            psutil.wait_procs(everyone[1:], scaled(GONE_DEADLINE_S))
        self.process.wait(scaled(GONE_DEADLINE_S))

    def kill_driver(self) -> None:
        """SIGKILL to the process that was started, and to nothing else: what it has started is to end by itself."""
        if self.process.poll() is None:
            self._left = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(scaled(GONE_DEADLINE_S))

    def kill_workers(self) -> int:
        """SIGKILL to the Python processes of the tasks and of the commits; returns their number. Their tasks fail."""
        killed = 0
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if one.name().startswith("python"):
                        one.kill()
                        killed += 1
        return killed

    def wait_for_the_rest(self) -> None:
        """What `kill_driver` has left behind is gone; it is wrong if that does not end by itself."""
        _, alive = psutil.wait_procs(self._left, scaled(GONE_DEADLINE_S))
        assert not alive


class FailureDetector:
    """How long to wait for a process on a machine that has other things to do: as long as it moves, and has not had
    more processor time than what is waited for can take."""

    def __init__(self, process: PipelineProcess) -> None:
        self._process = process
        self._spent_before_s = self._spent_s = process.cpu_s()
        self._printed = process.printed
        self._moved = self._looked = time.monotonic()

    def check(self) -> None:
        """Raises `AssertionError` when the wait is in vain. Looks once a second."""
        now = time.monotonic()
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        spent_s, printed = self._process.cpu_s(), self._process.printed
        if printed != self._printed or abs(spent_s - self._spent_s) > MOVES_CPU_S:
            self._spent_s, self._printed, self._moved = spent_s, printed, now
        used_s = spent_s - self._spent_before_s
        assert used_s < BUDGET_CPU_S, f"{used_s:.0f} s of processor time in vain\n{printed}"
        assert now < self._moved + STILL_S, f"it hangs\n{printed}"
