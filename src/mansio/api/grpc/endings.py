"""Ends of calls with the status of an error, and the addresses of their clients."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import grpc

from mansio.errors import InvalidRequest, MansioError


def end_call(context: Any, error: Exception) -> None:
    """End a call with the status of an error. A `ValueError` is that of an invalid argument.

    Not by `context.abort`: the exception that it raises forms a reference cycle with the state of the call, which would
    hold the request until the garbage collector runs.
    """
    if isinstance(error, TimeoutError):
        context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
        context.set_details("no answer in time: the outcome is unknown")
        return
    found = error if isinstance(error, MansioError) else InvalidRequest(str(error))
    context.set_trailing_metadata(
        (("mansio-error", type(found).__name__), ("mansio-code", str(found.kafka_code)))
    )
    context.set_code(grpc.StatusCode[found.grpc_status])
    context.set_details(found.message)


def host_of(peer: str) -> str:
    """Return the host in the name of a peer, such as `ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(address).rpartition(":")[0].strip("[]")
