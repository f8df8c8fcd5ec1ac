"""Decoding of large requests, and encoding of their responses, on a thread: each takes up to half a second."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.host.run_in_thread import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.services.broker_services import BrokerServices

B = TypeVar("B", bytes, memoryview)
T = TypeVar("T")

LARGE_REQUEST_BYTES: Final = 16 << 10
"""Size from which a request is decoded on a thread: up to it, that takes less than 20 ms."""


async def on_thread(service: BrokerServices, work: Callable[[], T]) -> T:
    """Run the decoding of a request, or the encoding of its response, on the thread of large requests."""
    return await run_in_thread(service.scheduler, service.request_thread, work)


async def decoded(service: BrokerServices, decode: Callable[[B], T], request: B) -> T:
    """Decode the bytes of a request: on a thread if they are many. Raises the errors of `decode`."""
    if len(request) <= LARGE_REQUEST_BYTES:
        return decode(request)
    return await on_thread(service, partial(decode, request))
