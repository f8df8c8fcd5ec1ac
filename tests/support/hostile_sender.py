"""Process that sends hostile bodies, so that making and sending them takes no time from the process that measures.

Started with the addresses of a broker. For each line with an index in `ALL` on stdin it makes the body and prints
`made`; at the next line it sends the body and prints the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.hostile_bodies import ALL, Addresses, send
from support.process import inherited

if TYPE_CHECKING:
    from typing import IO

NICE = 10
"""The sender runs when the broker and the process that measures do not want to."""


class Sender:
    """One such process, as its parent sees it."""

    def __init__(self, at: Addresses) -> None:
        tests = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.hostile_sender", *at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**inherited(), "PYTHONPATH": os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))},
        )

    @property
    def answers(self) -> IO[str]:
        """Readable when the answer has arrived."""
        assert self._process.stdout is not None
        return self._process.stdout

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def make(self, index: int) -> None:
        """Make a body, and return when it is made."""
        self._write(str(index))
        assert self.answers.readline() == "made\n"

    def send(self) -> None:
        """Send it; `answers` has a line when the answer has arrived."""
        self._write("send")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(at: Addresses) -> None:
    os.nice(NICE)
    for line in iter(sys.stdin.readline, ""):
        hostile = ALL[int(line)]
        body = hostile.make()
        print("made", flush=True)
        sys.stdin.readline()
        try:
            answer = send(at, hostile, body)
        except OSError as error:
            answer = repr(error)
        del body
        print(answer, flush=True)


if __name__ == "__main__":
    main(Addresses(*sys.argv[1:]))
