"""Gate of the connections whose clients have to authenticate: SASL over the Kafka protocol (KIP-43, KIP-152, KIP-368).

`SaslGate` is between one connection and the server until the client has authenticated, and afterwards if the session
has an end. It decides with the header of a request, before anything of the request is decoded; which request is allowed
is in `state.authentication.sasl_session`. A connection without a gate, or whose session has no end, pays nothing.

`Authentication` is what the gates of a server share: the connections that have not authenticated yet, which are closed
after `SaslSettings.timeout_ms`, or earlier if another client connects while `max_connections` are open, and those of
each user, which end when the user's credential changes.

A failed log-in is answered after `failure_delay_ms`, then closed. Where this broker cannot check a log-in at all (no
valid session in the cluster, too many checks), the connection is closed without an answer: clients take an answer for
final, and try again after a lost connection.

Invariants:
* Nothing of a request but its header is read before its client may send it.
* A request template of Produce is used behind the gate only, so it ends with the session.
* What a client sends after the end of the dialogue is dropped.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.broker.routing.caller import ANONYMOUS_USER, ClientSession
from mansio.broker.services.password_checks import QUEUE_FULL
from mansio.broker.services.wrong_credentials import TOO_MANY_WRONG
from mansio.logs import fields
from mansio.state.authentication.outcomes import NO_KEYS, Refused
from mansio.state.authentication.plain import PasswordCheck
from mansio.state.authentication.sasl_session import (
    BROKER_HANDSHAKE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Closing,
    Decision,
    Gate,
    SaslSession,
)
from mansio.state.authentication.scram import NONCE_BYTES
from mansio.state.handshake_admission import address_key
from mansio.wire.api_versions import is_supported
from mansio.wire.codec import messages
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.limits import ServerCounters
    from mansio.api.kafka.connections.pending_response import PendingResponse
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.password_checks import Outcome
    from mansio.ports import Clock
    from mansio.state.authentication.outcomes import Accepted, Rejected
    from mansio.wire.headers import RequestHeader

logger = logging.getLogger(__name__)

NO_RESPONSE: Final[tuple[bytes, ...]] = ()

SASL_KEYS: Final = tuple(key.to_bytes(2, "big") for key in (SASL_HANDSHAKE, SASL_AUTHENTICATE))
"""The first two bytes of the requests that the gate of an authenticated connection processes."""

ENDINGS: Final = frozenset({"expired", "changed", "stale"})
"""Reasons for which the session of an authenticated client ends."""

FAILURES: Final = {58: "credentials", 33: "mechanism", 34: "state", 35: "version"}
"""Kafka's error code -> reason, one of `AUTHENTICATION_FAILURES`."""


NOT_CHECKED: Final = {
    QUEUE_FULL: "too many passwords wait to be checked",
    TOO_MANY_WRONG: "too many wrong passwords or tokens from this address",
    NO_KEYS: "this broker has not got the keys of the issuer of tokens",
}
"""Reason of a refusal -> text for the log."""


class SaslSettings(NamedTuple):
    """How the clients of a listener authenticate."""

    mechanisms: tuple[str, ...]
    """Names of the mechanisms that are offered, of `config.security.ALL_MECHANISMS`."""
    new_nonce: Callable[[int], bytes]
    """Returns this many unpredictable bytes."""
    listener: str
    """Name of the listener."""
    session_ms_max: int
    """Time after which clients have to authenticate again (`connections.max.reauth.ms`); 0: never."""
    failure_delay_ms: int
    """Time before the answer to a failed log-in (`connection.failed.authentication.delay.ms`)."""
    frame_bytes_max: int
    """Maximum size of a request before authentication (`sasl.server.max.receive.size`)."""
    timeout_ms: int
    """Time from the accept in which a client has to authenticate."""


class AuthenticatingServer(Protocol):
    """The attributes and methods of a server that the gates of its connections use."""

    service: BrokerServices
    counters: ServerCounters
    loop: asyncio.AbstractEventLoop
    clock: Clock
    begin: Callable[[Connection, memoryview], Sequence[ResponsePart] | None]


class Authentication:
    """Connections of one server that authenticate. All methods run on its event loop."""

    __slots__ = ("_sessions", "_waiting", "_waiting_by_address", "server")

    def __init__(self, server: AuthenticatingServer) -> None:
        self.server = server
        self._waiting: dict[Connection, float] = {}
        """Connections that have not authenticated -> monotonic time at which they are closed, in order of arrival."""
        self._waiting_by_address: dict[str, dict[Connection, None]] = {}
        """The same connections by `address_key`, those of an address in order of arrival."""
        self._sessions: dict[str, dict[Connection, SaslGate]] = {}
        """Authenticated connections by user."""

    def new_gate(self, settings: SaslSettings) -> SaslGate:
        """Return the gate of a new connection."""
        return SaslGate(self, settings)

    @property
    def waiting_count(self) -> int:
        """Number of connections that have not authenticated."""
        return len(self._waiting)

    def add(self, connection: Connection, timeout_ms: int) -> None:
        """Close the connection after this time unless its client has authenticated."""
        self._waiting[connection] = self.server.clock.monotonic() + timeout_ms / 1000
        self._waiting_by_address.setdefault(address_key(connection.client_host), {})[connection] = None

    def admit(self, connection: Connection, gate: SaslGate, user: str | None) -> None:
        """Note that a client has authenticated as `user`, or as a broker (None)."""
        self._end_wait(connection)
        if user is not None:
            self.server.counters.authentications += 1
            self._sessions.setdefault(user, {})[connection] = gate

    def remove(self, connection: Connection, user: str | None) -> None:
        """Forget a connection."""
        self._end_wait(connection)
        if user is not None and (known := self._sessions.get(user)) is not None:
            known.pop(connection, None)
            if not known:
                del self._sessions[user]

    def take_one_that_gives_way(self) -> Connection | None:
        """Forget and return a connection whose client has not authenticated, which the caller closes so that another
        one may be open: the oldest of the address with the most of them. None if there is none."""
        if not self._waiting:
            return None
        of_address = max(self._waiting_by_address.values(), key=len)
        connection = next(iter(of_address))
        self._end_wait(connection)
        return connection

    def _end_wait(self, connection: Connection) -> None:
        if self._waiting.pop(connection, None) is None:
            return
        key = address_key(connection.client_host)
        of_address = self._waiting_by_address[key]
        del of_address[connection]
        if not of_address:
            del self._waiting_by_address[key]

    def close_late(self, now_s: float) -> None:
        """Close the connections whose clients did not authenticate in time. `now_s`: monotonic seconds."""
        while self._waiting:
            connection, end_s = next(iter(self._waiting.items()))
            if end_s > now_s:
                return
            self._end_wait(connection)
            self.fail(connection, "timeout", "the client did not authenticate in time")
            connection.abort()

    def handle_user_change(self, user: str) -> None:
        """End the sessions whose credential is not valid any more. Requests in progress are answered: one of them may
        be that of a user who changes the own password."""
        for connection, gate in tuple(self._sessions.get(user, {}).items()):
            if not gate.revalidate(connection):
                self.fail(
                    connection, "changed", "the password was changed, or the user or token deleted", user
                )
                connection.abort_when_answered()

    def fail(self, connection: Connection, kind: str, reason: str, user: str = "") -> None:
        """Count and log a failed authentication, or the end of a session. `kind`: one of
        `AUTHENTICATION_FAILURES`."""
        self.server.counters.authentication_failures[kind] += 1
        known = fields(peer=connection.client_host, **({"user": user} if user else {}), reason=reason)
        if kind in ENDINGS:
            logger.info("session_ended", extra=known)
        else:
            logger.warning("authentication_failed", extra=known)


class SaslGate:
    """Gate of one connection."""

    __slots__ = (
        "_asked_at",
        "_client_host",
        "_has_ended",
        "_is_open",
        "_session",
        "_settings",
        "_shared",
        "_user",
    )

    def __init__(self, shared: Authentication, settings: SaslSettings) -> None:
        self._shared = shared
        self._settings = settings
        self._session = self._new_session(is_confidential=False)
        self._is_open = False
        """Whether the client has authenticated and no re-authentication is in progress."""
        self._has_ended = False
        """Whether the connection is being closed."""
        self._user: str | None = None
        self._client_host = ""
        self._asked_at = 0.0
        """Monotonic time at which the last SaslAuthenticate arrived."""

    def _new_session(self, *, is_confidential: bool) -> SaslSession:
        return SaslSession(
            self._settings.mechanisms,
            self._shared.server.service.users.directory,
            self._new_nonce,
            self._settings.session_ms_max,
            is_confidential=is_confidential,
            verify_token=self._verify_token,
        )

    def _verify_token(self, token: str, now_ms: int) -> Accepted | Rejected | Refused:
        tokens = self._shared.server.service.tokens
        assert tokens is not None, "a listener with OAUTHBEARER has it"
        return tokens.verify(token, self._client_host, now_ms)

    def _new_nonce(self) -> bytes:
        return self._settings.new_nonce(NONCE_BYTES)

    @property
    def frame_bytes_max(self) -> int:
        return self._settings.frame_bytes_max

    def on_connected(self, connection: Connection) -> None:
        self._client_host = connection.client_host
        if connection.is_confidential:
            self._session = self._new_session(is_confidential=True)
        self._shared.add(connection, self._settings.timeout_ms)

    def on_lost(self, connection: Connection) -> None:
        self._shared.remove(connection, self._user)

    def revalidate(self, connection: Connection) -> bool:
        """Whether the session goes on after a change of its user. With a previous password it has an end now."""
        if not self._session.revalidate():
            return False
        if self._is_open:
            self._admit(connection)
        return True

    def begin(self, connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None:
        """Serve a request, answer it, or close the connection. Raises `WireError`."""
        if self._has_ended:
            return NO_RESPONSE
        server = self._shared.server
        now_ms = server.clock.wall_ms()
        if self._is_open and not self._session.is_expired(now_ms) and frame[:2] not in SASL_KEYS:
            return server.begin(connection, frame)
        header = read_request_header(frame)
        allowed = self._session.gate(header.api_key, header.api_version, now_ms)
        if isinstance(allowed, Decision):
            self._count(header)
            return self._perform(connection, header, allowed)
        if allowed is Gate.SERVE:
            parts = server.begin(connection, frame)
            if header.api_key in BROKER_HANDSHAKE and not self._is_open and connection.peer is not None:
                self._session.accept_broker()
                self._admit(connection)
            return parts
        self._count(header)
        cluster = server.service.cluster
        if cluster is not None and not cluster.is_session_valid():
            return self._refuse(connection, "unavailable", "this broker has no valid session in the cluster")
        body = bytes(frame[header.body_position :])
        request = messages.decode_request(header.api_key, header.api_version, body)
        self._is_open = False
        if allowed is Gate.HANDSHAKE:
            return self._perform(
                connection, header, self._session.handshake(header.api_version, request.mechanism, now_ms)
            )
        self._asked_at = server.clock.monotonic()
        step = self._session.authenticate(request.auth_bytes, now_ms)
        if isinstance(step, PasswordCheck):
            self._check(connection, header, step)
            return None
        if isinstance(step, Refused):
            return self._refuse(connection, step.reason, NOT_CHECKED[step.reason])
        return self._perform(connection, header, step)

    def _count(self, header: RequestHeader) -> None:
        if is_supported(header.api_key, header.api_version):
            self._shared.server.counters.requests[header.api_key] += 1

    def _check(self, connection: Connection, header: RequestHeader, check: PasswordCheck) -> None:
        """Check a password. Requests behind this one wait."""
        response = connection.defer_response()

        def conclude(outcome: Outcome) -> None:
            if response.is_abandoned:
                return
            parts = self._conclude(connection, header, outcome, response)
            if parts is not None:
                response.answer(parts)

        outcome = self._shared.server.service.passwords.begin(
            check, connection.client_host, conclude, lambda: not response.is_abandoned
        )
        if outcome is not None:
            conclude(outcome)

    def _conclude(
        self,
        connection: Connection,
        header: RequestHeader,
        outcome: Outcome,
        response: PendingResponse,
    ) -> Sequence[ResponsePart] | None:
        if isinstance(outcome, Refused):
            return self._refuse(connection, outcome.reason, NOT_CHECKED[outcome.reason])
        decision = self._session.complete(outcome, self._shared.server.clock.wall_ms())
        return self._perform(connection, header, decision, response)

    def _refuse(self, connection: Connection, kind: str, reason: str) -> Sequence[ResponsePart]:
        """Close the connection of a client that cannot be authenticated now."""
        self._has_ended = True
        self._shared.fail(connection, kind, reason)
        connection.abort()
        return NO_RESPONSE

    def _perform(
        self,
        connection: Connection,
        header: RequestHeader,
        decision: Decision,
        response: PendingResponse | None = None,
    ) -> Sequence[ResponsePart] | None:
        """Perform a decision. Return the response, or None if it is sent later. `response`: the one that waits for the
        decision, if there is one."""
        if self._session.is_authenticated and decision.closing is Closing.NEVER:
            if not self._is_open and not decision.error_code:
                self._admit(connection)
            return [_encode(header, decision)]
        if decision.closing is Closing.NEVER:
            return [_encode(header, decision)]
        self._has_ended = True
        is_expired = self._is_open and self._session.is_expired(self._shared.server.clock.wall_ms())
        kind = FAILURES.get(decision.error_code, "expired" if is_expired else "version")
        self._shared.fail(connection, kind, decision.reason, decision.user or self._user or "")
        parts = _encode_failure(header, decision)
        if decision.closing is Closing.NOW or parts is None:
            connection.abort()
            return NO_RESPONSE
        if decision.closing is Closing.AFTER_ANSWER:
            connection.close_after_response()
            return parts
        pending = connection.defer_response() if response is None else response

        def answer() -> None:
            if not pending.is_abandoned:
                pending.answer(parts)
                connection.close_after_response()

        # From the arrival of the request: the time of the answer does not depend on what was computed meanwhile.
        due = self._asked_at + self._settings.failure_delay_ms / 1000
        self._shared.server.loop.call_later(max(due - self._shared.server.clock.monotonic(), 0), answer)
        return None

    def _admit(self, connection: Connection) -> None:
        """Serve the requests of the client from now on."""
        session, user = self._session, self._session.user
        if not self._is_open:
            self._is_open = True
            self._user = None if user is None else user.name
            self._shared.admit(connection, self, self._user)
        connection.admit(
            ClientSession(
                ANONYMOUS_USER if user is None else user.name,
                self._settings.listener,
                session.expires_ms,
                0 if user is None else user.revision,
                groups=() if user is None else user.groups,
                credential_id="" if user is None else user.credential_id,
                is_by_token=user is not None and user.is_by_token,
            ),
            is_endless=session.expires_ms is None,
        )


def _encode(header: RequestHeader, decision: Decision) -> bytes:
    if header.api_key == SASL_HANDSHAKE:
        body = {"error_code": decision.error_code, "mechanisms": decision.mechanisms}
        return messages.encode_response(header.api_key, header.api_version, header.correlation_id, body)
    fields_of_response = {
        "error_code": decision.error_code,
        "error_message": decision.error_message,
        "auth_bytes": decision.auth_bytes,
        "session_lifetime_ms": decision.session_lifetime_ms,
    }
    return messages.encode_response(
        header.api_key, header.api_version, header.correlation_id, fields_of_response
    )


def _encode_failure(header: RequestHeader, decision: Decision) -> Sequence[bytes] | None:
    """Return the response that reports the failure; None if that version of the API has no error of the whole
    response."""
    key, version = header.api_key, header.api_version
    if not is_supported(key, version):
        return None
    if key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
        return [_encode(header, decision)]
    if "error_code" not in messages.merged_schema(key, messages.RESPONSE).defaults:
        return None
    encoded = messages.encode_response(
        key, version, header.correlation_id, {"error_code": decision.error_code}
    )
    _, decoded = messages.decode_response_frame(key, version, encoded[4:])
    return [encoded] if decoded.error_code == decision.error_code else None
