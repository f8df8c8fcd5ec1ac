"""State machine of the SASL authentication of one connection (KIP-43, KIP-152, KIP-368).

Which request is allowed depends on the state:

| state         | ApiVersions       | SaslHandshake             | SaslAuthenticate | others    |
|---------------|-------------------|---------------------------|------------------|-----------|
| NEW           | served: VERSIONED | TOKENS                    | illegal          | illegal (1) |
| VERSIONED     | illegal           | TOKENS                    | illegal          | illegal (1) |
| TOKENS        | illegal           | illegal                   | AUTHENTICATED, TOKENS, CHECKING or CLOSED | illegal |
| CHECKING      | illegal           | illegal                   | illegal          | illegal   |
| AUTHENTICATED | served            | TOKENS (re-authentication) or refused | refused | served |
| EXPIRED       | closed            | TOKENS (re-authentication) | closed          | closed    |
| CLOSED        | closed            | closed                    | closed           | closed    |

* (1) The handshake of a broker of the cluster (`state.broker_handshake`) is served: it is an authentication of its own.
  If it succeeds, `accept_broker` makes the state AUTHENTICATED, without a user and without an end.
* Illegal: the request is answered with ILLEGAL_SASL_STATE, and the connection is closed. Refused: answered with that
  error, and the connection stays open, as in Kafka. Closed: the connection is closed without an answer.
* An ApiVersions request in an unknown version is served (it is answered with UNSUPPORTED_VERSION, KIP-511) and leaves
  the state NEW, so that the client can repeat it in version 0.
* CHECKING: a password is being checked on another thread. Clients wait for the answer, so a request is illegal.
* EXPIRED is AUTHENTICATED after `expires_ms`. A client re-authenticates before or after that, with the mechanism and as
  the user of the connection, at most once in `REAUTHENTICATION_INTERVAL_MS`; only where the session has an end.

The client gets one text for a wrong password, an unknown user and a malformed token; the decision's `reason` is for the
log. Everything that affects the state is in this module; the shell performs the decisions.

Source: SaslServerAuthenticator and KafkaChannel of Kafka.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.config.security import ALL_MECHANISMS, CONFIDENTIAL_MECHANISMS, OAUTHBEARER, PLAIN
from mansio.errors import (
    IllegalSaslState,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanism,
    UnsupportedVersion,
)
from mansio.state.authentication.api_keys import ApiKeyCheck
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.oauth_bearer import OAuthBearerServer
from mansio.state.authentication.outcomes import NO_KEYS, Accepted, Challenge, Refused, Rejected
from mansio.state.authentication.plain import PasswordCheck, read_plain_token
from mansio.state.authentication.scram import ScramServer
from mansio.wire.api_versions import ApiKey, is_supported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.errors import RequestError
    from mansio.state.authentication.credentials import CredentialDirectory
    from mansio.state.authentication.oauth_bearer import VerifyToken

SASL_HANDSHAKE: Final = ApiKey.SASL_HANDSHAKE
SASL_AUTHENTICATE: Final = ApiKey.SASL_AUTHENTICATE
BROKER_HANDSHAKE: Final = frozenset({ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER})
"""API keys. The two steps of a broker's handshake are served to a client that is not authenticated."""
HANDSHAKE_VERSION: Final = 1
"""The only version of SaslHandshake that is accepted: after version 0, tokens come without headers. Version 0 is
advertised and refused, because librdkafka requires the advertisement."""
AUTHENTICATE_VERSION_MAX: Final = 2

MECHANISM_CHARACTERS_MAX: Final = 64

REAUTHENTICATION_INTERVAL_MS: Final = 1_000
"""Minimum time between the beginnings of two re-authentications, as in Kafka."""


class Gate(Enum):
    """Where a request goes that is allowed now."""

    SERVE = auto()
    """To its handler."""
    HANDSHAKE = auto()
    """To `SaslSession.handshake`."""
    AUTHENTICATE = auto()
    """To `SaslSession.authenticate`."""


class Closing(Enum):
    """What happens to the connection after a decision."""

    NEVER = auto()
    AFTER_ANSWER = auto()
    DELAYED = auto()
    """Wait, then answer, then close: failed log-ins take longer than successful ones
    (`connection.failed.authentication.delay.ms`)."""
    NOW = auto()
    """Without an answer."""


class Decision(NamedTuple):
    """Answer to a request, and what becomes of its connection."""

    error_code: int = 0
    error_message: str | None = None
    closing: Closing = Closing.NEVER
    reason: str = ""
    """Why the request failed, for the log. It may reveal whether a user exists; the client does not get it."""
    mechanisms: tuple[str, ...] = ()
    """For the answer to a SaslHandshake: the mechanisms of the listener."""
    auth_bytes: bytes = b""
    """For the answer to a SaslAuthenticate."""
    session_lifetime_ms: int = 0
    """For the answer to a SaslAuthenticate of version 1 or newer; 0: the session has no end."""
    user: str = ""
    """Name that the client of a failed log-in stated, for the log."""


class AuthenticatedUser(NamedTuple):
    """User of an authenticated connection, with the mechanism and the revision of the credential that were used.
    `groups`: of the user, as its token names them."""

    name: str
    mechanism: str
    revision: int
    groups: tuple[str, ...] = ()
    credential_id: str = ""
    """Id of the delegation token (mechanisms SCRAM) or API key (PLAIN) with which the client has authenticated; "" for
    another credential."""
    is_by_token: bool = False
    """Whether the client has authenticated with a token of an identity provider."""


class _State(Enum):
    NEW = auto()
    VERSIONED = auto()
    TOKENS = auto()
    CHECKING = auto()
    AUTHENTICATED = auto()
    CLOSED = auto()


class SaslSession:
    """The authentication of one connection. Times are Unix times in milliseconds.

    For each request: `gate`, then what it names. After `authenticate` has returned a `PasswordCheck`, the result of its
    `run` is passed to `complete`.
    """

    def __init__(
        self,
        mechanisms: Sequence[str],
        directory: CredentialDirectory,
        new_nonce: Callable[[], bytes],
        session_ms_max: int = 0,
        *,
        is_confidential: bool = True,
        verify_token: VerifyToken = lambda *_: Refused(NO_KEYS),
    ) -> None:
        """Begin the session of a new connection.

        `mechanisms`: those of the listener, of `ALL_MECHANISMS`. `new_nonce` returns `scram.NONCE_BYTES` unpredictable
        bytes. `session_ms_max` (`connections.max.reauth.ms`): time after which clients have to authenticate again; 0:
        never. `is_confidential`: whether nobody else can read the connection; PLAIN and OAUTHBEARER are not offered
        otherwise. `verify_token`: verifies the tokens of OAUTHBEARER.
        """
        unknown = [name for name in mechanisms if name not in ALL_MECHANISMS]
        if unknown or not mechanisms:
            raise ValueError(f"mechanisms are some of {', '.join(ALL_MECHANISMS)}; not {unknown}")
        self.user: AuthenticatedUser | None = None
        """The user of the connection; None until the first authentication has succeeded. It remains during a
        re-authentication: requests that were accepted before continue as this user."""
        self.expires_ms: int | None = None
        """End of the session; None: it has none."""
        self._reauthentication_due_ms: int | None = None
        """End of the session by `session_ms_max`."""
        self._mechanisms = tuple(
            name for name in mechanisms if is_confidential or name not in CONFIDENTIAL_MECHANISMS
        )
        self._directory = directory
        self._new_nonce = new_nonce
        self._verify_token = verify_token
        self._session_ms_max = session_ms_max
        self._state = _State.NEW
        self._mechanism = ""
        self._exchange: ScramServer | OAuthBearerServer | None = None
        """Of a mechanism that is not PLAIN."""
        self._reauthentication_began_ms: int | None = None

    @property
    def is_authenticated(self) -> bool:
        """Whether requests are served, apart from the end of the session."""
        return self._state is _State.AUTHENTICATED

    def accept_broker(self) -> None:
        """Note that another broker of the cluster has authenticated on the connection."""
        assert self._state in (_State.NEW, _State.VERSIONED), "gate admits its handshake"
        self._state = _State.AUTHENTICATED

    def revalidate(self) -> bool:
        """Whether the credential with which the user has authenticated is still valid. If it is that of a previous
        password now, the session ends with it. With a delegation token it ends with the token, also if that was renewed
        meanwhile."""
        user = self.user
        if user is None or user.mechanism == OAUTHBEARER:  # a token is valid until it expires
            return True
        if user.credential_id and user.mechanism == PLAIN:
            return self._directory.find_api_key(user.credential_id) is not None
        if user.credential_id:
            token = self._directory.find_token(user.credential_id, ScramMechanism(user.mechanism))
            due_ms = self._reauthentication_due_ms
            self.expires_ms = token.expires_ms if due_ms is None else min(due_ms, token.expires_ms)
            return token.found.is_known and token.user == user.name
        found, is_known = (
            self._directory.find_any(user.name)
            if user.mechanism == PLAIN
            else self._directory.find(user.name, ScramMechanism(user.mechanism))
        )
        if not is_known:
            return False
        if found.revision == user.revision:
            return True
        previous = found.previous
        if previous is None or previous.revision != user.revision:
            return False
        end_ms = previous.valid_until_ms
        self.expires_ms = end_ms if self.expires_ms is None else min(self.expires_ms, end_ms)
        return True

    def is_expired(self, now_ms: int) -> bool:
        """Whether the session has ended."""
        return self.expires_ms is not None and now_ms > self.expires_ms

    def gate(self, api_key: int, api_version: int, now_ms: int) -> Gate | Decision:
        """Return where a request goes, or the decision about one that is not allowed. It is called with the header:
        a request that is not allowed is not decoded."""
        match self._state:
            case _State.AUTHENTICATED:
                return self._gate_authenticated(api_key, api_version, now_ms)
            case _State.NEW if api_key == ApiKey.API_VERSIONS:
                if is_supported(api_key, api_version):
                    self._state = _State.VERSIONED
                return Gate.SERVE
            case _State.NEW | _State.VERSIONED if api_key == SASL_HANDSHAKE:
                return self._gate_version(Gate.HANDSHAKE, api_version, HANDSHAKE_VERSION)
            case _State.TOKENS if api_key == SASL_AUTHENTICATE:
                return self._gate_version(Gate.AUTHENTICATE, api_version, AUTHENTICATE_VERSION_MAX)
            case _State.NEW | _State.VERSIONED if api_key in BROKER_HANDSHAKE:
                return Gate.SERVE
            case _State.CLOSED:
                return Decision(closing=Closing.NOW, reason="a request after the end of the connection")
        return self._illegal(api_key)

    def _gate_authenticated(self, api_key: int, api_version: int, now_ms: int) -> Gate | Decision:
        if api_key == SASL_HANDSHAKE and self._may_reauthenticate(now_ms):
            return self._gate_version(Gate.HANDSHAKE, api_version, HANDSHAKE_VERSION)
        if self.is_expired(now_ms):
            return self._close(Decision(closing=Closing.NOW, reason="the session has ended"))
        if api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
            if not is_supported(api_key, api_version):
                return self._close_version(api_version)
            return _failure(IllegalSaslState("The connection is authenticated."), Closing.NEVER)
        return Gate.SERVE

    def _may_reauthenticate(self, now_ms: int) -> bool:
        began_ms = self._reauthentication_began_ms
        return self.expires_ms is not None and (
            began_ms is None or now_ms - began_ms >= REAUTHENTICATION_INTERVAL_MS
        )

    def _gate_version(self, gate: Gate, version: int, version_max: int) -> Gate | Decision:
        if 0 <= version <= version_max:
            return gate
        return self._close_version(version)

    def _close_version(self, version: int) -> Decision:
        return self._close(Decision(closing=Closing.NOW, reason=f"version {version} of a SASL request"))

    def handshake(self, version: int, mechanism: str, now_ms: int) -> Decision:
        """Process a SaslHandshake that `gate` has admitted."""
        assert self._state in (_State.NEW, _State.VERSIONED, _State.AUTHENTICATED), "gate admits it"
        if version < HANDSHAKE_VERSION:
            return self._close(
                _failure(
                    UnsupportedVersion("SaslHandshake 0, whose tokens have no headers, is not supported."),
                    Closing.AFTER_ANSWER,
                    self._mechanisms,
                )
            )
        if mechanism not in self._mechanisms:
            name = mechanism[:MECHANISM_CHARACTERS_MAX]
            return self._unsupported_mechanism(f"The listener does not offer the SASL mechanism {name!r}.")
        if self.user is not None and mechanism != self.user.mechanism:
            return self._unsupported_mechanism(
                f"A connection authenticated with {self.user.mechanism} is re-authenticated with it."
            )
        if self.user is not None:
            self._reauthentication_began_ms = now_ms
        self._mechanism = mechanism
        self._exchange = self._new_exchange(mechanism)
        self._state = _State.TOKENS
        return Decision(mechanisms=self._mechanisms)

    def _new_exchange(self, mechanism: str) -> ScramServer | OAuthBearerServer | None:
        if mechanism == PLAIN:
            return None
        if mechanism == OAUTHBEARER:
            return OAuthBearerServer(self._verify_token)
        return ScramServer(ScramMechanism(mechanism), self._directory, self._new_nonce())

    def _unsupported_mechanism(self, message: str) -> Decision:
        return self._close(
            _failure(UnsupportedSaslMechanism(message), Closing.AFTER_ANSWER, self._mechanisms)
        )

    def authenticate(self, token: bytes, now_ms: int) -> Decision | PasswordCheck | Refused:
        """Process a SaslAuthenticate that `gate` has admitted. Returns a check that has to run on a thread for a
        password of PLAIN; until `complete`, requests are illegal. `Refused`: the caller closes the connection."""
        assert self._state is _State.TOKENS, "gate admits it"
        if self._exchange is not None:
            outcome = self._exchange.step(token, now_ms)
            if isinstance(outcome, Refused):
                self._close(Decision(closing=Closing.NOW))
                return outcome
            return self._conclude(outcome, now_ms)
        check = read_plain_token(token, self._directory)
        if isinstance(check, Rejected):
            return self._conclude(check, now_ms)
        if isinstance(check, ApiKeyCheck):
            return self._conclude(check.run(now_ms), now_ms)
        self._state = _State.CHECKING
        return check

    def complete(self, outcome: Accepted | Rejected, now_ms: int) -> Decision:
        """Process the result of a password check, or a rejection where the check could not run. If the connection was
        closed meanwhile, it stays closed."""
        if self._state is not _State.CHECKING:
            return Decision(closing=Closing.NOW, reason="the connection was closed during the check")
        return self._conclude(outcome, now_ms)

    def _conclude(self, outcome: Challenge | Accepted | Rejected, now_ms: int) -> Decision:
        match outcome:
            case Challenge(token):
                return Decision(auth_bytes=token)
            case Rejected(reason, user):
                return self._fail(reason, user)
            case Accepted(name) if self.user is not None and name != self.user.name:
                return self._fail("another user in a re-authentication", name)
            case Accepted(name, token, revision, valid_until_ms, groups, credential_id, is_by_token):
                before = self.user, self.expires_ms
                self.user = AuthenticatedUser(
                    name, self._mechanism, revision, groups, credential_id, is_by_token
                )
                self._reauthentication_due_ms = (
                    now_ms + self._session_ms_max if self._session_ms_max else None
                )
                ends_ms = [self._reauthentication_due_ms, valid_until_ms]
                self.expires_ms = min(
                    (max(each, now_ms) for each in ends_ms if each is not None), default=None
                )
                if not self.revalidate():
                    self.user, self.expires_ms = before
                    return self._fail("the password was changed during the log-in", name)
                self._exchange = None
                self._state = _State.AUTHENTICATED
                lifetime_ms = 0 if self.expires_ms is None else self.expires_ms - now_ms
                return Decision(auth_bytes=token, session_lifetime_ms=lifetime_ms)

    def _fail(self, reason: str, user: str) -> Decision:
        kind = "authentication" if self.user is None else "re-authentication"
        text = (
            f"Authentication failed during {kind} due to invalid credentials "
            f"with SASL mechanism {self._mechanism}"
        )
        failure = _failure(SaslAuthenticationFailed(text), Closing.DELAYED)
        return self._close(failure._replace(reason=reason, user=user))

    def _illegal(self, api_key: int) -> Decision:
        error = IllegalSaslState(f"The API {api_key} is not allowed in this state of the authentication.")
        return self._close(_failure(error, Closing.AFTER_ANSWER))

    def _close(self, decision: Decision) -> Decision:
        self._state = _State.CLOSED
        self._exchange = None
        return decision


def _failure(error: RequestError, closing: Closing, mechanisms: tuple[str, ...] = ()) -> Decision:
    return Decision(error.kafka_code, error.message, closing, error.message, mechanisms)
