"""Service manager and terminal of a process that serves: notifications to systemd, and whether there is a terminal.

Invariant: notifications never block and never fail the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.logs import LineHandler

START_TIMEOUT_EXTENSION_S: Final = 30
SUPPRESSED_LINES_INTERVAL_S: Final = 1.0
"""Interval at which suppressed log lines are released."""
HEARTBEAT_INTERVAL_S: Final = 5.0
"""Interval of heartbeats, unless the watchdog requires a shorter one."""


class SystemdNotifier:
    """sd_notify messages to systemd (`Type=notify`): ready, stopping, watchdog.

    Without `NOTIFY_SOCKET` in the environment nothing is sent. During the start each heartbeat extends the start
    timeout, so that systemd does not end a long recovery; afterwards it resets the watchdog, if the unit has one.
    Heartbeats run on the broker's event loop, so systemd restarts a broker whose event loop hangs.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._ready = False
        self._socket: socket.socket | None = None
        self._address = variables.get("NOTIFY_SOCKET", "")
        watchdog_us = variables.get("WATCHDOG_USEC", "")
        is_for_this_process = variables.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self._has_watchdog = watchdog_us.isdigit() and is_for_this_process
        self.watchdog_s = int(watchdog_us) / 1_000_000 if self._has_watchdog else None
        """Time without a heartbeat after which systemd restarts the process; None if it does not."""
        self.heartbeat_interval_s = (
            min(HEARTBEAT_INTERVAL_S, int(watchdog_us) / 1_000_000 / 3)
            if self._has_watchdog
            else HEARTBEAT_INTERVAL_S
        )
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        if self._address and hasattr(socket, "AF_UNIX"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def heartbeat(self) -> None:
        """Send a heartbeat. Call it every `heartbeat_interval_s`."""
        if not self._ready:
            self._send(f"EXTEND_TIMEOUT_USEC={START_TIMEOUT_EXTENSION_S * 1_000_000}\nSTATUS=reading logs")
        elif self._has_watchdog:
            self._send("WATCHDOG=1")

    def ready(self, status: str) -> None:
        """Notify systemd that all ports accept connections."""
        self._ready = True
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Notify systemd that the broker stops and accepts no new requests."""
        self._send("STOPPING=1\nSTATUS=draining")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(
                OSError
            ):  # the manager has ended or reads too slowly; not an error of the broker
                self._socket.sendto(message.encode(), self._address)


def has_terminal() -> bool:
    """Whether standard input is a terminal that exists."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return False
    return True


async def send_heartbeats(manager: SystemdNotifier, lines: LineHandler) -> None:
    """Send heartbeats to systemd and release suppressed log lines, at their intervals, until cancelled."""
    import asyncio

    next_heartbeat_s = 0.0
    loop = asyncio.get_running_loop()
    while True:
        if loop.time() >= next_heartbeat_s:
            manager.heartbeat()
            next_heartbeat_s = loop.time() + manager.heartbeat_interval_s
        lines.write_suppressed()
        await asyncio.sleep(min(SUPPRESSED_LINES_INTERVAL_S, manager.heartbeat_interval_s))
