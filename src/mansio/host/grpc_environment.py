"""Settings of gRPC's core, which reads them from the environment when it is imported."""

from __future__ import annotations

import os


def set_grpc_environment() -> None:
    """Set what the environment leaves open; called before grpc is imported.

    A broker starts other processes, and uvloop forks for that. Between fork and exec the handlers that gRPC's core
    registers for a fork end the child when a call is in progress: a failed check of its poller (SIGABRT). A child that
    calls exec needs no handlers.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC writes warnings to stderr
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
