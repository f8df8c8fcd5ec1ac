"""Authentication of gRPC calls: user and password in the metadata (`authorization: Basic ...`), a token or an API key
(`authorization: Bearer ...`), or a certificate.

An interceptor, so that it is in front of every method of every service, reflection included. One is open: the health
check, which says that the server serves and nothing else, for probes that have no user.

Invariants:
* No message of a call is received before its client has authenticated. Therefore each method is served as one with
  streams: of those, gRPC receives nothing before it calls the handler.
* A call ends when the credential of its user changes, when the certificate of its client expires, and when this broker
  is cut off from its cluster for too long to know its users.
"""

from __future__ import annotations

import contextlib
import inspect
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from mansio.api.client_certificates import checked_expiry_ms
from mansio.api.grpc.endings import end_call, host_of
from mansio.api.request_sessions import request_session, watched_session
from mansio.broker.routing.caller import ANONYMOUS_SESSION, ClientSession
from mansio.errors import InvalidRequest, MansioError, SaslAuthenticationFailed
from mansio.state.authentication.certificate_names import InvalidSubject, user_of_certificate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from mansio.broker.services.log_ins import LogInService
    from mansio.state.authentication.certificate_names import MappingRules

    Identify = Callable[[Any], AbstractAsyncContextManager[ClientSession]]
    """Returns the block in which the client of a call, given its context, is the one of this session."""

OPEN_METHOD: Final = "/grpc.health.v1.Health/Check"

_session: ContextVar[ClientSession] = ContextVar("session", default=ANONYMOUS_SESSION)


def session_of_call() -> ClientSession:
    """Return who the client of the call is in which this is called."""
    return _session.get()


def by_log_in(log_ins: LogInService) -> Identify:
    """Identify clients by the credential in the metadata of each call."""

    @contextlib.asynccontextmanager
    async def identify(context: Any) -> AsyncIterator[ClientSession]:
        found = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if len(found) > 1:  # a proxy in front may have examined the other one
            raise InvalidRequest("the metadata has more than one authorization")
        authorization = found[0] if found and isinstance(found[0], str) else None
        async with request_session(log_ins, authorization, host_of(context.peer())) as session:
            yield session.client

    return identify


def by_certificate(rules: MappingRules, log_ins: LogInService) -> Identify:
    """Identify clients by their certificates, which gRPC has verified."""

    @contextlib.asynccontextmanager
    async def identify(context: Any) -> AsyncIterator[ClientSession]:
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            raise SaslAuthenticationFailed("this listener asks for a certificate")
        try:
            certificate = ssl.PEM_cert_to_DER_cert(found[0].decode())
            expires_ms = checked_expiry_ms(certificate, None, log_ins.now_ms())
            client = ClientSession(user_of_certificate(certificate, rules), expires_ms=expires_ms)
        except (InvalidSubject, ValueError) as error:
            raise SaslAuthenticationFailed(str(error)) from error
        async with watched_session(log_ins, client) as session:
            yield session.client

    return identify


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Interceptor that serves the calls of identified clients only."""

    def __init__(self, identify: Identify) -> None:
        self._identify = identify

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == OPEN_METHOD:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            self._guarded(handler),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, handler: Any) -> Callable[[Any, Any], Awaitable[None]]:
        async def call(requests: Any, context: Any) -> None:
            try:
                async with self._identify(context) as session:
                    _session.set(session)
                    await _serve(handler, requests, context)
            except MansioError as error:
                end_call(context, error)

        return call


async def _serve(handler: Any, requests: Any, context: Any) -> None:
    """Call the handler of a method of any kind, and send what it returns."""
    argument = requests
    if not handler.request_streaming:
        argument = await context.read()
        if argument is grpc.aio.EOF:
            raise InvalidRequest("the call has no request")
    method = (
        (handler.stream_stream if handler.response_streaming else handler.stream_unary)
        if handler.request_streaming
        else (handler.unary_stream if handler.response_streaming else handler.unary_unary)
    )
    if inspect.isasyncgenfunction(method):
        async for response in method(argument, context):
            await context.write(response)
        return
    response = await method(argument, context)
    if response is not None:
        await context.write(response)
