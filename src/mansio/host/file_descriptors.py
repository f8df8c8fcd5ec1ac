"""Limit of file descriptors of this process, and how it is divided between files and connections.

A broker without free descriptors can neither create a segment nor accept a connection. Therefore the limit of
descriptors bounds open files, partitions and the connections of each protocol, even if the settings allow more, and
`mansio serve` raises the limit as far as possible when it starts.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

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
"""Descriptors reserved for checkpoints, directories, the metadata store, logs of the process, listeners, and sockets
being closed; at most a quarter of the limit."""

UNLIMITED = 1 << 20
"""Limit that is used where the system has none."""

CACHED_FILES_MAX = 4096
"""Maximum number of open files of closed segments."""

CACHED_FILES_MIN = 2
"""The file of one closed segment that is cached, and that of one to which only a response refers."""

ACTIVE_FILES_MIN = 2
"""The files of the old and the new active segment are open while a log rolls."""

OTHER_CONNECTIONS_MAX = 128
"""Maximum number of connections of HTTP, and of SQS."""

GRPC_CONNECTIONS_MAX = 500

OTHER_CONNECTIONS_MIN = 8
"""Number of connections of each of these protocols that is allowed even if the limit is too low for them."""

PARTITIONS_PER_FILE = 16
"""Partitions for each file of an active segment that may be open. With more, files would be opened and closed again
for most of the appends."""

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


class DescriptorBudget(NamedTuple):
    """How the limit of descriptors is divided. `limit` is the limit itself."""

    limit: int
    connections: int
    """Kafka connections."""
    other_connections: int
    """Connections of each of HTTP and SQS."""
    grpc_connections: int
    active_files: int
    """Open files of active segments. Beyond this number logs with nothing to flush close theirs until they are written
    to."""
    cached_files: int
    """Open files of closed segments."""
    partitions: int
    """Partitions beyond which no topic is created."""


def descriptor_budget(max_connections: int, open_files_max: int) -> DescriptorBudget:
    """Divide the limit of descriptors of this process: a reserve, and a half each for segment files and for sockets.

    `max_connections` bounds the Kafka connections, `open_files_max` the files, 0: by the limit only.
    """
    limit = UNLIMITED
    if resource is not None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = UNLIMITED
    available = limit - min(OTHER_DESCRIPTORS, limit // 4)
    files = min(open_files_max or available, available // 2)
    cached = max(min(CACHED_FILES_MAX, files // 4), CACHED_FILES_MIN)
    active = max(files - cached, ACTIVE_FILES_MIN)
    sockets = available - files
    others_max = 2 * OTHER_CONNECTIONS_MAX + GRPC_CONNECTIONS_MAX
    others = min(others_max, sockets // 4)
    each = max(others * OTHER_CONNECTIONS_MAX // others_max, OTHER_CONNECTIONS_MIN)
    return DescriptorBudget(
        limit=limit,
        connections=min(
            max((sockets - others) // DESCRIPTORS_PER_CONNECTION, CONNECTIONS_MIN), max_connections
        ),
        other_connections=min(each, OTHER_CONNECTIONS_MAX),
        grpc_connections=min(max(others - 2 * each, OTHER_CONNECTIONS_MIN), GRPC_CONNECTIONS_MAX),
        active_files=active,
        cached_files=cached,
        partitions=active * PARTITIONS_PER_FILE,
    )


def log_reductions(budget: DescriptorBudget, max_connections: int) -> None:
    """Log a warning if the limit of descriptors allows fewer connections than `max_connections`."""
    if budget.connections < max_connections:
        logger.warning(
            "connection_limit_reduced",
            extra=fields(
                allowed=budget.connections,
                max_connections=max_connections,
                open_files=budget.limit,
                reason="the limit of open files (ulimit -n) is too low",
            ),
        )
