"""Free ports of one address of this machine.

Invariant: an allocated port was free, and is below the range for outgoing connections.
"""

from __future__ import annotations

import errno
import random
import socket
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError, Unavailable
from mansio.host.port_owner import port_in_use_message

if TYPE_CHECKING:
    from collections.abc import Iterable

PORT_MIN: Final = 12_000
PORT_END: Final = 32_000
PORT_ATTEMPTS_MAX: Final = 1000


class PortAllocator:
    """Allocates free ports of one address, each once."""

    def __init__(self, host: str, remedy: str) -> None:
        """`remedy`: what a user can do about a port that is in use."""
        self._host = host
        self._remedy = remedy
        self._allocated: set[int] = set()

    def allocate(self) -> int:
        """Return a free port. Raises `Unavailable` if none is found."""
        for _ in range(PORT_ATTEMPTS_MAX):
            port = random.randrange(PORT_MIN, PORT_END)
            if port not in self._allocated and is_free(self._host, port):
                self._allocated.add(port)
                return port
        raise Unavailable(f"no free port between {PORT_MIN} and {PORT_END}")

    def exclude(self, ports: Iterable[int]) -> None:
        """Never allocate these ports, whether they are free or not."""
        self._allocated.update(ports)

    def reserve(self, ports: Iterable[int]) -> None:
        """Reserve exactly these ports. Raises `ConfigError` if one is in use."""
        for port in ports:
            if port in self._allocated or not is_free(self._host, port):
                raise ConfigError(
                    f"{port_in_use_message(self._host, port)}, and this cluster needs it: {self._remedy}"
                )
            self._allocated.add(port)

    def reuse(self, port: int) -> int:
        """Return the port itself if it is free or already allocated, otherwise another free port."""
        if port in self._allocated:
            return port
        if not is_free(self._host, port):
            return self.allocate()
        self._allocated.add(port)
        return port


def is_free(host: str, port: int) -> bool:
    """Whether no socket of another process is bound to the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
