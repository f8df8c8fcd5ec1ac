"""Sessions of requests with user and password: a request, or stream, ends with the credential of its user."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from mansio.errors import SaslAuthenticationFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from mansio.broker.routing.caller import ClientSession
    from mansio.broker.services.log_ins import LogInService


class SessionEnded(SaslAuthenticationFailed):
    """The password was changed, or the user deleted, while the request waited."""


class RequestSession:
    """Session of one request. `client`: who its client is."""

    __slots__ = ("_limit", "_log_ins", "_unwatch", "client")

    def __init__(self, log_ins: LogInService, client: ClientSession, limit: asyncio.Timeout) -> None:
        self.client = client
        self._log_ins = log_ins
        self._limit = limit
        self._unwatch: Callable[[], None] = log_ins.watch(client, self._on_change)
        self._use_end_of(client)

    def complete(self) -> None:
        """Let the request go on even if the session ends, because what it has to do is done."""
        self._unwatch()
        self._limit.reschedule(None)

    def close(self) -> None:
        """Watch the session no longer."""
        self._unwatch()

    def _on_change(self, client: ClientSession | None) -> None:
        if client is None:
            self._limit.reschedule(asyncio.get_running_loop().time())
        else:
            self._use_end_of(client)

    def _use_end_of(self, client: ClientSession) -> None:
        left_s = self._log_ins.time_left_s(client)
        if left_s is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + left_s)


@contextlib.asynccontextmanager
async def request_session(
    log_ins: LogInService, authorization: str | None, address: str
) -> AsyncIterator[RequestSession]:
    """Log the client of a request in, and cancel the block when its session ends. `authorization`: the value of that
    header, None if there is none.

    Raises `SessionEnded`, and the errors of `LogInService.log_in`."""
    client = await log_ins.log_in(authorization, address)
    limit = asyncio.timeout(None)
    try:
        async with limit:
            session = RequestSession(log_ins, client, limit)
            try:
                yield session
            finally:
                session.close()
    except TimeoutError as error:
        if limit.expired():
            raise SessionEnded("the password was changed, or the user deleted") from error
        raise
