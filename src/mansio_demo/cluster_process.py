"""A `mansio dev-cluster --secure` process: three brokers and etcd, of which one broker can be killed.

Invariants:
* `start` returns when all brokers are ready; after the `with` block all processes have ended.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Final

from mansio.errors import Unavailable
from mansio_demo.server_process import READY_S_MAX, ServerProcess

BROKERS: Final = 3
KILLED: Final = 1
"""Number of the broker that is killed."""
SESSION_MS: Final = 3_000
"""Time after which a broker that is not heard of is dead, and the partitions that it leads get other leaders."""
POLL_INTERVAL_S: Final = 0.02
_READY_LINE: Final = re.compile(r"^mansio .* ready kafka=.* pid=(\d+)$", re.MULTILINE)


class ClusterProcess(ServerProcess):
    """A protected cluster on one directory, on free ports. A broker that was killed is started again by the cluster."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, is_secure=True)
        self.kafka = ""
        """Addresses of the brokers, separated by commas."""
        self.etcd = ""
        """URL of etcd."""
        self._starts = 1

    def start(self) -> float:
        """Start the cluster, or wait until the killed broker is ready again. Returns the duration in seconds. Raises
        `Unavailable`."""
        started = time.monotonic()
        if self.is_running:
            self._wait_until_ready_again()
        else:
            session = f"broker_session_timeout_ms={SESSION_MS}"
            fields = self.launch(
                ["dev-cluster", "--data", self.directory, "--brokers", str(BROKERS), "--set", session]
            )
            self.kafka, self.etcd = fields["kafka"], fields["etcd"]
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL for one broker."""
        self._starts = len(self._pids()) + 1
        os.kill(self._pids()[-1], signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM for the cluster; returns the exit code."""
        return self.end(signal.SIGTERM)

    def _wait_until_ready_again(self) -> None:
        end = time.monotonic() + READY_S_MAX
        while len(self._pids()) < self._starts:
            if time.monotonic() > end:
                raise Unavailable(f"broker {KILLED} was not ready again after {READY_S_MAX:g} s")
            time.sleep(POLL_INTERVAL_S)

    def _pids(self) -> list[int]:
        """Return the processes of the broker that is killed, the last one at the end."""
        log = Path(self.directory, f"broker-{KILLED}.log").read_text(encoding="utf-8", errors="replace")
        return [int(pid) for pid in _READY_LINE.findall(log)]
