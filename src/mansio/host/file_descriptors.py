"""File descriptors: how many this process may have open, and how many connections that is good for.

A broker that runs out of descriptors cannot begin a new segment, and a log that cannot write is out of service until
the next start. So connections are bounded by what the operating system allows, whatever `max_connections` says, and
`mansio serve` raises its own limit first as far as it may.
"""

from __future__ import annotations

import logging
import resource

from mansio.logs import fields

logger = logging.getLogger(__name__)

PER_CONNECTION = 2
"""The socket, and the duplicate that answers leave through (`socket_writer.py`)."""

OTHER = 256
"""Directories, the metadata store, listeners, other doors, sockets on their way out."""

CONNECTIONS_MIN = 16
"""So many are tried whatever the limit is."""


def raise_limit() -> int:
    """Raise the limit of this process as far as it may without asking; what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # "unlimited" is more than some kernels take
            logger.info("file_limit_not_raised", extra=fields(open_files=soft, error=error))
            return soft
    return hard


def connections_allowed(max_connections: int, files: int) -> int:
    """`max_connections`, or less where the limit of open files is too low for that many besides `files` open files
    (of which at most a half of the limit is set aside). Says so in one log line."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    room = (limit - OTHER - min(files, limit // 2)) // PER_CONNECTION
    if room >= max_connections:
        return max_connections
    allowed = max(room, CONNECTIONS_MIN)
    logger.warning(
        "fewer connections than max_connections: the limit of open files (ulimit -n) is too low",
        extra=fields(allowed=allowed, max_connections=max_connections, open_files=limit),
    )
    return allowed
