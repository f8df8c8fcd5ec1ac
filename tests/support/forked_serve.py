"""Broker processes that are forked from `fork_parent`, so that a test can kill and start them quickly.

Always true: when the `with` block of `forked` ends, neither the broker nor its parent is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.process import ServedBroker, inherited

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PARENT = str(Path(__file__).with_name("fork_parent.py"))


class Forked:
    """As much of `subprocess.Popen` as `ServedBroker` needs."""

    returncode = "a code that nobody knows"

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def poll(self) -> int | None:
        """0 when it is gone."""
        if not self._ended:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._ended = True
        return 0 if self._ended else None

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, deadline_s: float) -> int:
        end = time.monotonic() + deadline_s
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("mansio serve", deadline_s)
            time.sleep(0.002)
        return 0


class ForkedBroker(ServedBroker):
    """`point`: where its next start is to die, see `killing_serve`."""

    def __init__(self, data: Path, parent: subprocess.Popen[bytes], arguments: Sequence[str]) -> None:
        super().__init__(data, arguments=arguments, http=False)
        self.point = ""
        self._parent = parent

    def _launch(self, command: Sequence[str]) -> Any:
        requests, answers = self._parent.stdin, self._parent.stdout
        assert requests is not None
        assert answers is not None
        arguments = list(command[command.index("serve") :])
        self.output.touch()
        known = {"arguments": arguments, "output": str(self.output), "point": self.point}
        requests.write(json.dumps(known).encode() + b"\n")
        requests.flush()
        return Forked(int(answers.readline()))


@contextmanager
def forked(data: Path, *, arguments: Sequence[str] = ()) -> Iterator[ForkedBroker]:
    """A running broker, killed at the end of the block if it still runs."""
    environment = {**inherited(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        broker = ForkedBroker(data, parent, arguments)
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()
            parent.kill()
