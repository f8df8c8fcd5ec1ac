"""Caller of a service: session, client id, address and deadline of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from mansio.errors import InvalidRequest
from mansio.ports import ForwardedClient

ANONYMOUS_USER: Final = "ANONYMOUS"
"""Name of the user of a client that is not authenticated, as Kafka names it."""

CLIENT_ID_CHARACTERS_MAX: Final = 100
"""Maximum length of the id that a client of a protocol other than Kafka's states."""


@dataclass(frozen=True, slots=True)
class ClientSession:
    """Who a client is, as the listener found out. A new object replaces it when the client authenticates again; it ends
    with the connection.

    `listener` is the name of the listener, "" for a protocol without named listeners. `expires_ms` is the end of the
    session in Unix time, None if it has none. `credential_revision` is the revision of the credential with which the
    client has authenticated, 0 without authentication. `is_broker`: a broker of the cluster asks for itself, and may do
    everything. `groups`: names of the groups of the user, which ACLs name as `Group:NAME`. `credential_id` is the id of
    the API key, access key of SQS or delegation token with which the client has authenticated, "" for any other
    credential. `is_by_token`: the client has authenticated with a token of an identity provider.
    """

    user: str = ANONYMOUS_USER
    listener: str = ""
    expires_ms: int | None = None
    credential_revision: int = 0
    is_broker: bool = False
    groups: tuple[str, ...] = ()
    credential_id: str = ""
    is_by_token: bool = False

    @property
    def may_issue_credentials(self) -> bool:
        """Whether the client may create credentials and set passwords, if it has the right: it has not authenticated
        with a key or a token. Those end, or are revoked, and what they could create would outlive them."""
        return not self.credential_id and not self.is_by_token

    @property
    def principal(self) -> str:
        """The user as ACLs name it."""
        return f"User:{self.user}"


ANONYMOUS_SESSION: Final = ClientSession()
"""Session of a client without authentication."""

BROKER_SESSION: Final = ClientSession(is_broker=True)
"""Session of a broker of the cluster, which has proved its identity."""


@lru_cache(1024)
def on_listener(session: ClientSession, listener: str) -> ClientSession:
    """Return a session with the name of its listener: `http`, `grpc` or `sqs`."""
    return replace(session, listener=listener)


@dataclass(frozen=True, slots=True)
class Caller:
    """The client for which a service is called. One object may be used for all requests of a connection.

    `client_id` is chosen by the client and selects its quota. `address` is the client's host, for logs and
    descriptions. `deadline` is in monotonic seconds; None for no deadline. `api` is the name of the API of
    Kafka's protocol through which the service is called, "" if it is called otherwise; the audit has it.
    """

    session: ClientSession = ANONYMOUS_SESSION
    client_id: str = ""
    address: str = ""
    deadline: float | None = None
    api: str = ""

    @property
    def trace_name(self) -> str:
        """The client in traces of records: user, unless it is anonymous, client id and address."""
        user = "" if self.session.user == ANONYMOUS_USER else f"{self.session.user}/"
        return f"{user}{self.client_id}@{self.address}"

    @property
    def forwarded(self) -> ForwardedClient:
        """The client as requests to other brokers name it."""
        session = self.session
        user = "" if session.user == ANONYMOUS_USER else session.user
        return ForwardedClient(
            self.address,
            user,
            session.listener,
            session.credential_revision,
            session.groups,
            session.credential_id,
            session.is_by_token,
        )

    def timeout_ms(self, timeout_ms: float, now: float) -> float:
        """Return `timeout_ms`, or the time until the deadline if it is shorter; never negative. `now`: monotonic
        seconds."""
        if self.deadline is None:
            return timeout_ms
        return max(0.0, min(timeout_ms, (self.deadline - now) * 1000))


def check_client_id(client_id: str) -> None:
    """Raise `InvalidRequest` unless a stated client id has 1 to `CLIENT_ID_CHARACTERS_MAX` printable characters."""
    if not 1 <= len(client_id) <= CLIENT_ID_CHARACTERS_MAX or not client_id.isprintable():
        raise InvalidRequest(f"client id: 1 to {CLIENT_ID_CHARACTERS_MAX} printable characters")


ANONYMOUS: Final = Caller()
"""Caller without authentication, client id, address and deadline."""


BROKER_CALLER: Final = Caller(BROKER_SESSION)
"""Caller for what a broker does for itself."""


def session_of(client: ForwardedClient) -> ClientSession:
    """Return the session of a client for which another broker forwards a request. That broker ends it."""
    return ClientSession(
        client.user or ANONYMOUS_USER,
        client.listener,
        credential_revision=client.credential_revision,
        groups=client.groups,
        credential_id=client.credential_id,
        is_by_token=client.is_by_token,
    )
