"""Parsing of bootstrap addresses (`host:port`), and the default bootstrap address.

This module imports nothing that is slow to import, so that the command line starts fast.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_PORT = 9092
DEFAULT_BOOTSTRAP_SERVERS = "127.0.0.1:9092"
BOOTSTRAP_SERVERS_VARIABLE = "MANSIO_BOOTSTRAP_SERVERS"
ADDRESS = re.compile(r"(?:\[([^\s\[\]]+)\]|([^\s:\[\]]+))(?::([0-9]{1,5}))?")


def default_bootstrap_servers() -> str:
    """Return the value of the environment variable MANSIO_BOOTSTRAP_SERVERS, or `127.0.0.1:9092` if the variable is not
    set or empty."""
    return os.environ.get(BOOTSTRAP_SERVERS_VARIABLE) or DEFAULT_BOOTSTRAP_SERVERS


def parse_addresses(bootstrap_servers: str | Iterable[str]) -> list[tuple[str, int]]:
    """(host, port) pairs parsed from a string such as `"a:9092,b"` or a list such as `["a:9092", "[::1]:9092"]`.

    The default port is 9092. Raises `ConfigError` if an address is invalid or there is none.
    """
    parts = bootstrap_servers.split(",") if isinstance(bootstrap_servers, str) else list(bootstrap_servers)
    if not parts:
        raise ConfigError("no broker address given (host:port expected)")
    addresses = []
    for part in parts:
        found = ADDRESS.fullmatch(part.strip()) if isinstance(part, str) else None
        port = int(found[3] or DEFAULT_PORT) if found else 0
        if found is None or not 0 < port < 65536:
            within = (
                f" in {bootstrap_servers!r}"
                if isinstance(bootstrap_servers, str) and bootstrap_servers != part
                else ""
            )
            raise ConfigError(f"not an address: {part!r}{within} (host:port expected)")
        addresses.append((found[1] or found[2], port))
    return addresses
