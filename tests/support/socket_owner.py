"""Process that owns a connection on this machine, found by its two ports with `sock_diag(7)`.

By `sock_diag(7)`, which looks up one socket in microseconds. The list in /proc/net/tcp takes milliseconds where many
connections come and go, and may lack one meanwhile; it serves where the kernel cannot be asked.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

SOCK_DIAG: Final = 4
BY_FAMILY: Final = 20
REQUEST: Final = 1
ERROR: Final = 2
ANSWER_BYTES: Final = 4096

HEADER: Final = struct.Struct("=IHHII")
"""Of a netlink message: length, type, flags, sequence, sender."""
QUESTION: Final = struct.Struct("=BBBxI")
"""Address family, protocol, what else is wanted, states."""
ENDS: Final = struct.Struct("!HH4s12x4s12x")
"""Port and port, address and address: the socket's own and its peer's."""
ANYWHERE: Final = bytes(4) + b"\xff" * 8
"""Any interface, and no cookie."""
INODE: Final = struct.Struct("=I")
INODE_POSITION: Final = HEADER.size + 4 + ENDS.size + 12 + 16
LOOPBACK: Final = bytes((127, 0, 0, 1))


def socket_of(port: int, peer_port: int) -> int | None:
    """The inode of the socket on loopback that has this port and that peer; None where no process holds it (any
    more)."""
    return _asked(port, peer_port) if _can_be_asked() else _listed(port, peer_port)


def holds(pid: int, inode: int) -> bool:
    """Whether a process has this socket open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") == f"socket:[{inode}]":
                    return True
    return False


def _asked(port: int, peer_port: int) -> int | None:
    question = (
        QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + ENDS.pack(port, peer_port, LOOPBACK, LOOPBACK)
        + ANYWHERE
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.send(HEADER.pack(HEADER.size + len(question), BY_FAMILY, REQUEST, 1, 0) + question)
        answer = kernel.recv(ANSWER_BYTES)
    _, kind, _, _, _ = HEADER.unpack_from(answer)
    if kind == ERROR:
        return None
    (inode,) = INODE.unpack_from(answer, INODE_POSITION)
    return inode or None


@functools.cache
def _can_be_asked() -> bool:
    """Whether this kernel finds a connection of ours."""
    with (
        suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        return _asked(one.getsockname()[1], listener.getsockname()[1]) == os.fstat(one.fileno()).st_ino
    return False


def _listed(port: int, peer_port: int) -> int | None:
    loopback = int.from_bytes(LOOPBACK, "little")
    wanted = [f"{loopback:08X}:{port:04X}", f"{loopback:08X}:{peer_port:04X}"]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted and fields[9] != "0":
            return int(fields[9])
    return None
