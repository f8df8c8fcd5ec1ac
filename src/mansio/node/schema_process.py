"""`python -m mansio.node.schema_process`: the process in which a broker parses and compares schemas of clients.

`mansio.host.worker_process` starts it; its standard input is a socket to the broker. A schema may need any time and
memory: the broker ends the process after a deadline, and the system refuses it more memory than `MEMORY_BYTES_MAX`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mansio.host.worker_process import serve_jobs
from mansio.serde.worker_jobs import run_job

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND: Final = (sys.executable, "-P", "-m", "mansio.node.schema_process")
"""Without the working directory of the broker in the path of modules."""

MEMORY_BYTES_MAX: Final = 2 << 30
"""Of address space, of which the libraries take several hundred MB."""


def _run(job: bytes, _: Sequence[int]) -> bytes:
    return run_job(job)


def limit_memory() -> None:
    """Let allocations fail beyond `MEMORY_BYTES_MAX`, where the platform can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    except (ImportError, ValueError, OSError):
        pass


if __name__ == "__main__":
    limit_memory()
    serve_jobs(_run, is_idle=False)
