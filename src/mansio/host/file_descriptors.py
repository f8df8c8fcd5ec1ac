"""File descriptors: the limit of this process, and the number of connections that it allows.

A broker without free descriptors cannot start a new segment, and a log that cannot write is offline until the next
start. Therefore connections are bounded by what the operating system allows, whatever `max_connections` is, and `mansio
serve` first raises its own limit as far as possible.
"""

from __future__ import annotations

import logging
import resource

from mansio.logs import fields

logger = logging.getLogger(__name__)

PER_CONNECTION = 2
"""The socket, and its duplicate for writing (`socket_writer.py`)."""

OTHER = 256
"""Directories, the metadata store, listeners, other protocols, sockets being closed."""

CONNECTIONS_MIN = 16
"""Minimum number of connections, whatever the limit is."""


def raise_limit() -> int:
    """Raise the limit of this process to the hard limit; returns the limit in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # "unlimited" is more than some kernels accept
            logger.info("file_limit_not_raised", extra=fields(open_files=soft, error=error))
            return soft
    return hard


def connections_allowed(max_connections: int, files: int) -> int:
    """`max_connections`, or less if the limit of open files is too low for that many in addition to `files` open files
    (for which at most half of the limit is reserved). Logs a reduction."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    available = (limit - OTHER - min(files, limit // 2)) // PER_CONNECTION
    if available >= max_connections:
        return max_connections
    allowed = max(available, CONNECTIONS_MIN)
    logger.warning(
        "connection_limit_reduced",
        extra=fields(
            allowed=allowed,
            max_connections=max_connections,
            open_files=limit,
            reason="the limit of open files (ulimit -n) is too low",
        ),
    )
    return allowed
