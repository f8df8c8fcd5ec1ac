"""Search in /proc (Linux) for the process that listens on a TCP port of this machine.

Used for error messages only: "127.0.0.1:9092 is in use by pid 4711 (java)". The process is unknown on systems without
/proc, and if this process may not read the descriptors of another user's processes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

SOCKET_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
"""Tables of the kernel with all TCP sockets."""
LISTEN_STATE: Final = "0A"
"""State of a listening socket in these tables (TCP_LISTEN)."""


class PortOwner(NamedTuple):
    """Id and name of a process that listens on a port."""

    pid: int
    name: str


def port_owner(port: int) -> PortOwner | None:
    """Return the process that listens on `port`; None if no process does or it cannot be determined."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and _has_open(name, sockets):
                return PortOwner(int(name), _process_name(name))
    return None


def port_in_use_message(host: str, port: int) -> str:
    """Error message for a port that another process uses: `HOST:PORT is in use by pid N (NAME)`."""
    owner = port_owner(port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    who = "another process" if owner is None else f"pid {owner.pid} ({owner.name})"
    return f"{address} is in use by {who}"


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for path in SOCKET_TABLES:
        with suppress(OSError), open(path, encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if len(fields) > 9 and fields[3] == LISTEN_STATE and fields[1].endswith(f":{port:04X}"):
                    found.add(fields[9])
    return found


def _has_open(pid: str, sockets: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in sockets:
                    return True
    return False


def _process_name(pid: str) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return "unknown"
