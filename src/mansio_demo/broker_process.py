"""A `mansio serve` process that can be killed and restarted on the same ports.

Invariants:
* `start` returns after the `ready` line; after the `with` block the process has ended.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from mansio_demo.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping


class BrokerProcess(ServerProcess):
    """One broker on one directory. The first start chooses free ports; later starts use the same ones."""

    def __init__(
        self, directory: str, settings: Mapping[str, str] | None = None, *, is_secure: bool = False
    ) -> None:
        """Prepare a broker. Parameters: see `ServerProcess`."""
        super().__init__(directory, settings, is_secure=is_secure)
        self.kafka = "127.0.0.1:0"
        self.http = "127.0.0.1:0"

    def start(self) -> float:
        """Start the broker and wait until it is ready. Returns the duration in seconds. Raises `Unavailable` with its
        output.
        """
        started = time.monotonic()
        fields = self.launch(["serve", "--data", self.directory, "--kafka", self.kafka, "--http", self.http])
        self.kafka, self.http = fields["kafka"], fields["http"]
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL: nothing is flushed. No effect if it does not run."""
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self.end(signal.SIGTERM)
