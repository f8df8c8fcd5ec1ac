"""Listening sockets of an address: one for each IP address of a host, or for IPv4 and IPv6 if the host is empty.

Invariant: all sockets of one call have the same port, also if the operating system selects it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Final

ANY_IPV4: Final = "0.0.0.0"  # noqa: S104  # what an empty host means
_FREE_PORT_ATTEMPTS: Final = 10
"""Number of free ports of IPv4 that are tried until one is free for IPv6, too."""
_FAMILY_MISSING: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class ListenError(OSError):
    """An address that a process cannot listen on. `host` and `port` are as in the settings."""

    def __init__(self, error: OSError, host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        reason = error.strerror or str(error)
        super().__init__(error.errno, f"cannot listen on {shown}:{port}: {reason}")
        self.host = host
        self.port = port
        self.reason = reason


async def listening_sockets(
    host: str, port: int, backlog: int, *, is_shared: bool = False
) -> list[socket.socket]:
    """Return non-blocking sockets that listen on `host`; the first one has the port that a free port became.
    `is_shared`: other processes of the same user may listen on the same port (SO_REUSEPORT). Raises `ListenError`."""
    loop = asyncio.get_running_loop()
    if not host:
        addresses = [(socket.AF_INET, ANY_IPV4), (socket.AF_INET6, "::")]
    else:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ListenError(error, host, port) from error
        addresses = list(
            dict.fromkeys((socket.AddressFamily(each[0]), _with_scope(each[4])) for each in found)
        )
    for attempts_left in reversed(range(_FREE_PORT_ATTEMPTS)):
        try:
            return _listen(addresses, port, backlog, may_lack_ipv6=len(addresses) > 1, is_shared=is_shared)
        except OSError as error:
            if port or len(addresses) == 1 or error.errno != errno.EADDRINUSE or not attempts_left:
                raise ListenError(error, host, port) from error
    raise AssertionError("unreachable")


def _with_scope(address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> str:
    """Return the host of a socket address, with the scope of a link-local one."""
    host = str(address[0])
    return f"{host}%{address[3]}" if len(address) == 4 and address[3] and "%" not in host else host


def _listen(
    addresses: list[tuple[socket.AddressFamily, str]],
    port: int,
    backlog: int,
    *,
    may_lack_ipv6: bool,
    is_shared: bool,
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for family, host in addresses:
            try:
                own_port = sockets[0].getsockname()[1] if sockets else port
                listening = _bound(family, host, own_port, is_shared=is_shared)
            except OSError as error:
                if may_lack_ipv6 and family == socket.AF_INET6 and error.errno in _FAMILY_MISSING:
                    continue  # the machine has no IPv6
                raise
            sockets.append(listening)
            listening.listen(backlog)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "no address of the host is available")
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bound(family: socket.AddressFamily, host: str, port: int, *, is_shared: bool) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.setblocking(False)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found
