"""A listener with TLS and SASL in front of a test broker, which has neither and advertises the front's address.

Ends TLS, authenticates with `SaslSession`, and relays the requests that it admits, frame by frame. Runs on a thread of
its own. Always true: nothing of a client reaches the broker before the client is authenticated.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from mansio.net.blocking import LoopThread
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.plain import PasswordCheck
from mansio.state.authentication.sasl_session import (
    Closing,
    Decision,
    Gate,
    SaslSession,
)
from mansio.state.authentication.scram import NONCE_BYTES
from mansio.testing import TestBroker
from mansio.wire import headers
from mansio.wire.api_versions import ApiKey, advertised_versions, is_supported
from mansio.wire.codec import messages
from support.credentials import credential, directory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.authentication.credentials import CredentialDirectory
    from support.certificates import Certificate

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
UNSUPPORTED_VERSION = 35
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")
DELAY_S = 0.01
NONCE = bytes(range(NONCE_BYTES))


def server_context(
    files: Certificate, *, client_authority: str | None = None, version_max: ssl.TLSVersion | None = None
) -> ssl.SSLContext:
    """The context of a server, which asks for a certificate of clients if `client_authority` is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    if version_max is not None:
        context.maximum_version = version_max
    if client_authority is not None:
        context.load_verify_locations(client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class SecureFront:
    """Use as `with`. Without `users` there is no SASL, without `context` no TLS."""

    def __init__(
        self,
        context: ssl.SSLContext | None = None,
        users: dict[str, str] | None = None,
        *,
        mechanisms: Sequence[str] = MECHANISMS,
        session_ms: int = 0,
        host: str = "localhost",
        **settings: Any,
    ) -> None:
        self.host = host
        self.port = 0
        self.is_silent = False
        """Whether a request that is not allowed gets no answer, as from brokers of Kafka."""
        self.authentications: list[str] = []
        """Users that logged in, in order; again for each connection and re-authentication."""
        self.refusals: list[str] = []
        """Why requests or log-ins were refused."""
        self._context = context
        self._mechanisms = mechanisms
        self._session_ms = session_ms
        self._settings = settings
        self._directory = None if users is None else _directory(users)
        self._thread = LoopThread("secure-front")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self._server = self._thread.run(self._start())
        self.broker = TestBroker(advertised_listeners=self.address, **self._settings).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._stop())
        self._thread.close()
        self.broker.close()

    def set_users(self, users: dict[str, str]) -> None:
        """Replace the users, for new connections."""
        self._directory = _directory(users)

    def cut(self) -> None:
        """End all connections."""
        self._thread.run(self._cancel())

    async def _start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _stop(self) -> None:
        self._server.close()
        await self._cancel()

    async def _cancel(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_broker: asyncio.StreamWriter | None = None
        relay: asyncio.Task[None] | None = None
        session = (
            None
            if self._directory is None
            else SaslSession(self._mechanisms, self._directory, lambda: NONCE, self._session_ms)
        )
        try:
            broker_host, broker_port = self.broker.bootstrap_servers.rsplit(":", 1)
            from_broker, to_broker = await asyncio.open_connection(broker_host, int(broker_port))
            relay = asyncio.create_task(_relay(from_broker, writer))
            while True:
                frame = await _read_frame(reader)
                if session is None or await self._admit(session, frame, writer):
                    to_broker.write(frame)
        except (asyncio.IncompleteReadError, OSError, ssl.SSLError, _Closed):
            pass
        except asyncio.CancelledError:
            if not self._server.is_serving():
                raise
        finally:
            self._tasks.discard(task)
            if relay is not None:
                relay.cancel()
            for one in (writer, to_broker):
                if one is not None:
                    one.transport.abort()

    async def _admit(self, session: SaslSession, frame: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the request goes to the broker; else it is answered here. Raises `_Closed`."""
        header = headers.read_request_header(frame[4:])
        key, version, correlation_id = header.api_key, header.api_version, header.correlation_id
        gate = session.gate(key, version, _now_ms())
        if isinstance(gate, Decision):
            self.refusals.append(f"{key}: {gate.reason}")
            answered = key if key == ApiKey.METADATA and not self.is_silent else None
            await self._perform(gate, answered, version, correlation_id, writer)
            return False
        if gate is Gate.SERVE:
            if key == ApiKey.API_VERSIONS:
                writer.write(_api_versions(version, correlation_id))
            return key != ApiKey.API_VERSIONS
        body = frame[4 + header.body_position :]
        if gate is Gate.HANDSHAKE:
            decision = session.handshake(version, body[2 : 2 + int.from_bytes(body[:2])].decode(), _now_ms())
        else:
            step = session.authenticate(body[4 : 4 + int.from_bytes(body[:4])], _now_ms())
            if isinstance(step, PasswordCheck):
                outcome = await asyncio.to_thread(step.run, _now_ms())
                step = session.complete(outcome, _now_ms())
            assert isinstance(step, Decision)
            decision = step
            if session.is_authenticated and session.user is not None and not decision.error_code:
                self.authentications.append(session.user.name)
        if decision.error_code:
            self.refusals.append(decision.reason)
        await self._perform(decision, key, version, correlation_id, writer)
        return False

    async def _perform(
        self,
        decision: Decision,
        key: int | None,
        version: int,
        correlation_id: int,
        writer: asyncio.StreamWriter,
    ) -> None:
        if decision.closing is Closing.DELAYED:
            await asyncio.sleep(DELAY_S)
        if key is not None and decision.closing is not Closing.NOW:
            fields: dict[str, Any] = {"error_code": decision.error_code}
            if key == SASL_HANDSHAKE:
                fields["mechanisms"] = list(decision.mechanisms)
            elif key == SASL_AUTHENTICATE:
                fields |= {"error_message": decision.error_message, "auth_bytes": decision.auth_bytes}
                fields["session_lifetime_ms"] = decision.session_lifetime_ms
            writer.write(messages.encode_response(key, version, correlation_id, fields))
            with suppress(ConnectionError):
                await writer.drain()
        if decision.closing is not Closing.NEVER:
            writer.close()
            raise _Closed


def _directory(users: dict[str, str]) -> CredentialDirectory:
    return directory_of(
        {
            name: tuple(credential(password, mechanism) for mechanism in ScramMechanism)
            for name, password in users.items()
        }
    )


class _Closed(Exception):
    """The front has closed the connection."""


def _api_versions(version: int, correlation_id: int) -> bytes:
    known = is_supported(ApiKey.API_VERSIONS, version)
    offered = [*advertised_versions(), (SASL_HANDSHAKE, 0, 1), (SASL_AUTHENTICATE, 0, 2)]
    keys = [
        {"api_key": key, "min_version": lowest, "max_version": highest}
        for key, lowest, highest in {one[0]: one for one in offered}.values()
    ]
    fields = {"error_code": 0 if known else UNSUPPORTED_VERSION, "api_keys": keys}
    return messages.encode_response(ApiKey.API_VERSIONS, version if known else 0, correlation_id, fields)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            writer.write(await _read_frame(reader))
            await writer.drain()
    writer.close()


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    length = await reader.readexactly(4)
    return length + await reader.readexactly(int.from_bytes(length))


def _now_ms() -> int:
    return int(time.time() * 1000)
