"""Limit of file descriptors of this process, and the number of connections that this limit allows.

A broker without free descriptors cannot create a segment, and a log that cannot be written stays offline until the
broker restarts. Therefore the limit of descriptors bounds the number of connections, even if `max_connections` is
higher, and `mansio serve` raises the limit as far as possible when it starts.
"""

from __future__ import annotations

import logging

from mansio.logs import fields
from mansio.tracebacks import without_traceback

try:
    import resource
except ImportError:  # Windows, where no broker runs
    resource = None  # type: ignore[assignment]  # only brokers use it

logger = logging.getLogger(__name__)

DESCRIPTORS_PER_CONNECTION = 2
"""Descriptors of one connection: the socket, and its duplicate for writing (`socket_writer.py`)."""

OTHER_DESCRIPTORS = 256
"""Descriptors reserved for directories, the metadata store, listeners, other protocols, and sockets being closed."""

CONNECTIONS_MIN = 16
"""Number of connections that are allowed even if the limit of descriptors is too low for them."""

OPEN_FILES_STEPS = (1 << 20, 1 << 16, 10_240)
"""Limits that `raise_file_limit` tries where the system refuses the hard limit. macOS reports "unlimited", refuses to
set it, and accepts at least 10,240 (its OPEN_MAX)."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files of this process to the hard limit, or as far as the system accepts.

    Returns the limit in effect; `resource.RLIM_INFINITY` if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    is_unlimited = hard == resource.RLIM_INFINITY
    steps = [step for step in OPEN_FILES_STEPS if soft < step and (is_unlimited or step < hard)]
    refusal: Exception | None = None
    for limit in (hard, *steps):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError) as error:
            refusal = without_traceback(error)
        else:
            return limit
    logger.info("file_limit_not_raised", extra=fields(open_files=soft, error=refusal))
    return soft


def allowed_connection_count(max_connections: int, reserved_files: int) -> int:
    """`max_connections`, or less if the limit of open files is too low for so many connections.

    `reserved_files` descriptors, but at most half of the limit, are reserved for files. Logs a reduction.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    available = (limit - OTHER_DESCRIPTORS - min(reserved_files, limit // 2)) // DESCRIPTORS_PER_CONNECTION
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
