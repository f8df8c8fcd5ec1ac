"""Authentication of the HTTP listener: in each request user and password (HTTP Basic, RFC 7617) or a bearer token (RFC
6750), which may be an API key, or a certificate of the connection.

It is in front of all routes, known or not, with one exception: health checks without credentials, which answer whether
the broker is live or ready and nothing else, for probes that have no user.

Invariants:
* Nothing of a request but its head is read before its client has authenticated.
* A request that waits, and an event stream, end when the credential of their user changes, when the certificate of
  their client expires, and when this broker is cut off from its cluster for too long to know its users. A response that
  has begun, and is no event stream, is completed: what it contains was read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from mansio.api.asgi.connection import CLIENT_CERTIFICATE
from mansio.api.client_certificates import checked_expiry_ms
from mansio.api.http.errors import on_mansio_error
from mansio.api.http.path_route import path_segments
from mansio.api.request_sessions import request_session, watched_session
from mansio.broker.routing.caller import ANONYMOUS_SESSION, Caller, ClientSession
from mansio.errors import (
    AuthenticationFailed,
    InvalidRequest,
    MansioError,
    SaslAuthenticationFailed,
    Unavailable,
)
from mansio.state.authentication import bearer
from mansio.state.authentication.basic import CHALLENGE
from mansio.state.authentication.bearer import is_bearer
from mansio.state.authentication.certificate_names import InvalidSubject, user_of_certificate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mansio.api.request_sessions import RequestSession
    from mansio.broker.services.log_ins import LogInService
    from mansio.state.authentication.certificate_names import MappingRules
    from mansio.state.authentication.revocation import RevocationLists

OPEN_PATHS: Final = (("health", "live"), ("health", "ready"))
EVENT_STREAM: Final = b"text/event-stream"

SUPERVISOR: Final = "mansio.supervisor"
"""Key of the scope of a request that the supervisor of this process sends, past all listeners."""
_SESSION: Final = "mansio.session"
"""Key in the scope of a request: its `ClientSession`, None for a health check without credentials."""


def session_of_request(request: Request) -> ClientSession:
    """Return who the client of a request is."""
    return request.scope.get(_SESSION) or ANONYMOUS_SESSION


def may_see_names(request: Request, may_describe: Callable[[Caller], bool]) -> bool:
    """Whether the client of a request may see the names of topics and groups in health checks and metrics, which
    `may_describe` decides for the caller: on a listener without authentication for the anonymous user. A probe without
    credentials, on one with authentication, may not; the supervisor of this process may."""
    if SUPERVISOR in request.scope:
        return True
    session: ClientSession | None = request.scope.get(_SESSION, ANONYMOUS_SESSION)
    address = request.client
    return session is not None and may_describe(
        Caller(session, address="" if address is None else address.host)
    )


class LogInAuthentication:
    """ASGI application that passes the requests of users on to another one."""

    def __init__(
        self, app: ASGIApp, log_ins: Callable[[], LogInService | None], *, is_required: bool = True
    ) -> None:
        """`log_ins`: returns the service, None before the broker has started. `is_required`: otherwise a client that
        sends no user is anonymous."""
        self._app = app
        self._log_ins = log_ins
        self._is_required = is_required

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        authorization = request.headers.get("authorization")
        if authorization is None and not self._is_required:
            await self._app(scope, receive, send)
            return
        if authorization is None and _is_open(scope):
            scope[_SESSION] = None
            await self._app(scope, receive, send)
            return
        log_ins = self._log_ins()
        if log_ins is None:
            await _answer(Unavailable("the broker is starting"), request, scope, receive, send)
            return
        address = request.client
        host = "" if address is None else address.host
        await _serve(self._app, request_session(log_ins, authorization, host), scope, receive, send)


class CertificateAuthentication:
    """ASGI application that passes requests on to another one with the user of the client's certificate, which the TLS
    connection has verified; a connection may be older than the revocation lists, and outlive the certificate."""

    def __init__(
        self,
        app: ASGIApp,
        rules: MappingRules,
        log_ins: Callable[[], LogInService | None],
        revocations: Callable[[], RevocationLists | None] = lambda: None,
    ) -> None:
        """`log_ins`: returns the service, None before the broker has started. `revocations`: returns the revocation
        lists."""
        self._app = app
        self._rules = rules
        self._log_ins = log_ins
        self._revocations = revocations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        log_ins = self._log_ins()
        try:
            client = self._client(scope.get(CLIENT_CERTIFICATE), 0 if log_ins is None else log_ins.now_ms())
        except SaslAuthenticationFailed as error:
            await _answer(error, Request(scope), scope, receive, send)
            return
        if log_ins is None:
            scope[_SESSION] = client
            await self._app(scope, receive, send)
        elif log_ins.is_stale() and _is_open(scope):
            scope[_SESSION] = None
            await self._app(scope, receive, send)
        else:
            await _serve(self._app, watched_session(log_ins, client), scope, receive, send)

    def _client(self, certificate: bytes | None, now_ms: float) -> ClientSession:
        """Return who a client with this certificate, if any, is. Raises `SaslAuthenticationFailed`."""
        if certificate is None:
            return ANONYMOUS_SESSION
        expires_ms = checked_expiry_ms(certificate, self._revocations(), now_ms)
        try:
            return ClientSession(user_of_certificate(certificate, self._rules), expires_ms=expires_ms)
        except InvalidSubject as error:
            raise SaslAuthenticationFailed(str(error)) from error


async def _serve(
    app: ASGIApp,
    identified: AbstractAsyncContextManager[RequestSession],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Pass a request on with the session of its client, and end it with the session. `identified`: the block in which
    the session lasts."""
    is_begun = False
    try:
        async with identified as session:

            async def send_noted(message: Message) -> None:
                nonlocal is_begun
                if message["type"] == "http.response.start":
                    is_begun = True
                    if not _is_event_stream(message):
                        session.complete()
                await send(message)

            scope[_SESSION] = session.client
            await app(scope, receive, send_noted)
    except (AuthenticationFailed, Unavailable) as error:
        if is_begun:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await _answer(error, Request(scope), scope, receive, send)


async def _answer(error: MansioError, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
    response = await on_mansio_error(request, error)
    if response.status_code == 401:
        is_invalid = is_bearer(request.headers.get("authorization", ""))
        response.headers["www-authenticate"] = CHALLENGE
        response.headers.append("www-authenticate", bearer.INVALID_TOKEN if is_invalid else bearer.CHALLENGE)
    await response(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Whether a request goes to a health check: by the segments that its route is chosen by."""
    try:
        return path_segments(scope) in OPEN_PATHS
    except InvalidRequest:
        return False


def _is_event_stream(message: Mapping[str, Any]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(EVENT_STREAM)
        for name, value in message.get("headers", ())
    )
