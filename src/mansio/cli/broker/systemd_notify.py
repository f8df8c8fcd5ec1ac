"""Tells systemd how the broker does: ready, stopping, still alive (sd_notify, `Type=notify`).

Without `NOTIFY_SOCKET` in the environment nothing happens. While the broker starts, each beat asks for more time, so a
long recovery is not taken for a hang; once it is ready, each beat feeds the watchdog, if the unit has one. Beats run on
the broker's own loop: one that hangs is noticed and restarted.

Always true: telling never blocks and never fails the broker; what cannot be told is not told.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

START_EXTENSION_S: Final = 30
HEARTBEAT_INTERVAL_S: Final = 5.0
"""Between beats, unless the watchdog wants them more often."""


class SystemdNotifier:
    """One connection to the service manager."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._ready = False
        self._socket: socket.socket | None = None
        self._address = variables.get("NOTIFY_SOCKET", "")
        watchdog_us = variables.get("WATCHDOG_USEC", "")
        is_for_this_process = variables.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self._has_watchdog = watchdog_us.isdigit() and is_for_this_process
        self.heartbeat_interval_s = (
            min(HEARTBEAT_INTERVAL_S, int(watchdog_us) / 1_000_000 / 3)
            if self._has_watchdog
            else HEARTBEAT_INTERVAL_S
        )
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        if self._address and hasattr(socket, "AF_UNIX"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def heartbeat(self) -> None:
        """We are alive. Call every `heartbeat_interval_s`."""
        if not self._ready:
            self._send(f"EXTEND_TIMEOUT_USEC={START_EXTENSION_S * 1_000_000}\nSTATUS=reading logs")
        elif self._has_watchdog:
            self._send("WATCHDOG=1")

    def ready(self, status: str) -> None:
        """Every port accepts."""
        self._ready = True
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """No new work is taken."""
        self._send("STOPPING=1\nSTATUS=draining")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # a manager that is gone, or reads too slowly: nothing of ours
                self._socket.sendto(message.encode(), self._address)
