"""Sessions of the requests of users: a request, or stream, ends with the credential or the certificate of its user, and
when this broker is cut off from its cluster for too long to know whether the user still exists."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from mansio.broker.services.log_ins import CUT_OFF
from mansio.errors import SaslAuthenticationFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from mansio.broker.routing.caller import ClientSession
    from mansio.broker.services.log_ins import LogInService

EXPIRED: Final = "the certificate or the token has expired"


class SessionEnded(SaslAuthenticationFailed):
    """The credential of the user was changed or deleted, or has expired, while the request waited."""


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

    Raises the errors of `LogInService.log_in` and of `watched_session`."""
    async with watched_session(log_ins, await log_ins.log_in(authorization, address)) as session:
        yield session


@contextlib.asynccontextmanager
async def watched_session(log_ins: LogInService, client: ClientSession) -> AsyncIterator[RequestSession]:
    """Cancel the block when the session of its client ends.

    Raises `SessionEnded`; `Unavailable` if this broker is cut off from its cluster for too long."""
    if log_ins.is_stale():
        raise Unavailable(CUT_OFF)
    if log_ins.time_left_s(client) == 0:
        raise _ended(client)
    limit = asyncio.timeout(None)
    try:
        async with limit:
            session = RequestSession(log_ins, client, limit)
            try:
                yield session
            finally:
                session.close()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise (Unavailable(CUT_OFF) if log_ins.is_stale() else _ended(client)) from error


def _ended(client: ClientSession) -> SessionEnded:
    if client.credential_revision:
        return SessionEnded("the password was changed, or the user deleted")
    if client.credential_id:
        return SessionEnded("the key has expired, or was deleted")
    return SessionEnded(EXPIRED)
