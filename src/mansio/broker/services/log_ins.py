"""Log-ins of clients that send their credential with each request of HTTP, or in the metadata of each call of gRPC:
user and password (Basic), a token of an identity provider, or an API key (Bearer).

A request gets a `ClientSession`, which ends when the user's credential changes. `watch` reports that to a request that
waits, and to a stream, so that no request outlives the password with which it began.

Invariants:
* While a broker is cut off from its cluster it does not learn that a user was deleted: watched sessions end when that
  has lasted for `authorization_stale_max_ms`, as the Kafka connections of users do.
* Unknown users and wrong passwords get the same answer, after the same work.
* No error and no log line contains a password or a token.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.routing.caller import ClientSession
from mansio.broker.services.password_checks import QUEUE_FULL
from mansio.broker.services.wrong_credentials import TOO_MANY_WRONG
from mansio.errors import SaslAuthenticationFailed, ThrottlingQuotaExceeded, Unavailable
from mansio.logs import fields
from mansio.ports import complete_from
from mansio.state.authentication.api_keys import ApiKeyCheck, id_of_key
from mansio.state.authentication.basic import read_basic
from mansio.state.authentication.bearer import is_bearer, read_bearer
from mansio.state.authentication.outcomes import NO_KEYS, Refused, Rejected
from mansio.tracebacks import result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.services.password_checks import Outcome, PasswordChecker
    from mansio.broker.services.token_checks import TokenChecker
    from mansio.broker.services.users import UserService
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.authentication.outcomes import Accepted
    from mansio.state.authentication.plain import PasswordCheck

    OnChange = Callable[[ClientSession | None], None]
    """Called with the session that replaces the watched one, None if it has ended."""

logger = logging.getLogger(__name__)

LOG_IN_FAILURES: Final = (
    "credentials",
    "changed",
    "stale",
    "unavailable",
    QUEUE_FULL,
    TOO_MANY_WRONG,
    NO_KEYS,
)
"""Reasons for which a log-in fails, or its session ends: wrong credentials; the password was changed; this broker is
cut off from the cluster; it has no session there; the password was not checked (`password_checks`), or the token
(`token_checks`)."""

CUT_OFF: Final = "this broker is cut off from the cluster"

WRONG: Final = "the user or the password is wrong"
_CHANGED: Final = "the credential was changed, or it or its user deleted"
NOT_VALID: Final = "the token is not valid"
MISSING: Final = "this listener asks for a user and a password, or for a token"


class LogInService:
    """Log-ins of one broker. All methods run on its event loop."""

    __slots__ = (
        "_clock",
        "_is_available",
        "_known_at",
        "_passwords",
        "_scheduler",
        "_stale_s",
        "_tokens",
        "_users",
        "_watched",
        "accepted",
        "failures",
    )

    def __init__(
        self,
        users: UserService,
        passwords: PasswordChecker,
        tokens: TokenChecker | None,
        clock: Clock,
        scheduler: Scheduler,
        is_available: Callable[[], bool],
        stale_max_ms: float,
    ) -> None:
        """`tokens`: None if tokens are not accepted. `is_available`: whether this broker knows the present users, as
        one without a session in its cluster may not. `stale_max_ms`: time without that after which sessions end."""
        self._users = users
        self._passwords = passwords
        self._tokens = tokens
        self._clock = clock
        self._scheduler = scheduler
        self._is_available = is_available
        self._stale_s = stale_max_ms / 1000
        self._known_at = clock.monotonic()
        """Time at which this broker was last seen to know the present users."""
        self._watched: dict[str, dict[object, tuple[ClientSession, OnChange]]] = {}
        """Sessions of requests in progress by user."""
        self.accepted = 0
        """Number of requests whose credential was right."""
        self.failures = dict.fromkeys(LOG_IN_FAILURES, 0)
        users.on_change(self._handle_user_change)

    async def log_in(self, authorization: str | None, address: str) -> ClientSession:
        """Return the session of a client that sends this value of `Authorization` from this address; None: it sends
        none.

        Raises `SaslAuthenticationFailed`, `ThrottlingQuotaExceeded` after too many wrong passwords or tokens from the
        address, `Unavailable` if the credential cannot be checked now.
        """
        if not authorization:
            raise SaslAuthenticationFailed(MISSING)
        if not self._is_available():
            self._count("unavailable", address, "this broker has no valid session in the cluster")
            raise Unavailable("this broker cannot check credentials now")
        wrong = NOT_VALID if is_bearer(authorization) else WRONG
        outcome = await self._outcome(authorization, address)
        if isinstance(outcome, Refused):
            self._count(outcome.reason, address, "the credential was not checked")
            if outcome.reason == NO_KEYS:
                raise Unavailable("this broker cannot check tokens now")
            if outcome.reason == TOO_MANY_WRONG:
                what = "tokens" if is_bearer(authorization) else "passwords"
                raise ThrottlingQuotaExceeded(f"too many wrong {what} came from this address")
            raise Unavailable("too many passwords wait to be checked")
        if isinstance(outcome, Rejected):
            self._count("credentials", address, outcome.reason, outcome.user)
            raise SaslAuthenticationFailed(wrong)
        session = self._present(_session_of(outcome))
        if session is None:
            self._count("changed", address, "the credential was changed during the log-in", outcome.user)
            raise SaslAuthenticationFailed(wrong)
        self.accepted += 1
        return session

    async def _outcome(self, authorization: str, address: str) -> Outcome:
        if is_bearer(authorization):
            return self._check_bearer(read_bearer(authorization), address)
        check = read_basic(authorization, self._users.directory)
        if isinstance(check, ApiKeyCheck):
            return check.run(self._clock.wall_ms())
        return check if isinstance(check, Rejected) else await self._check(check, address)

    def _check_bearer(self, token: str, address: str) -> Outcome:
        now_ms = self._clock.wall_ms()
        if id_of_key(token) is not None:
            return ApiKeyCheck(token, self._users.directory.find_api_key).run(now_ms)
        if self._tokens is None:
            return Rejected("tokens are not accepted")
        return self._tokens.verify(token, address, now_ms)

    async def _check(self, check: PasswordCheck, address: str) -> Outcome:
        promise: Promise[Outcome] = self._scheduler.promise()
        known = self._passwords.begin(
            check,
            address,
            on_done=lambda outcome: complete_from(promise, outcome, None),
            is_wanted=lambda: not promise.done(),  # done if the request was cancelled
        )
        return await result_of(promise) if known is None else known

    def is_stale(self) -> bool:
        """Whether this broker has been cut off from its cluster for too long to know whether users still exist."""
        now = self._clock.monotonic()
        if self._is_available():
            self._known_at = now
        return now - self._known_at > self._stale_s

    def end_stale(self) -> None:
        """End all watched sessions if this broker is cut off for too long. Called every second."""
        if not self.is_stale():
            return
        for user, watched in tuple(self._watched.items()):
            for key, (_, on_change) in tuple(watched.items()):
                self._unwatch(user, key)
                self.failures["stale"] += 1
                logger.info("session_ended", extra=fields(user=user, reason=CUT_OFF))
                on_change(None)

    def time_left_s(self, session: ClientSession) -> float | None:
        """Return the seconds until a session ends; None if it has no end."""
        if session.expires_ms is None:
            return None
        return max(session.expires_ms - self._clock.wall_ms(), 0) / 1000

    def now_ms(self) -> int:
        """Return the Unix time with which the ends of sessions are compared."""
        return self._clock.wall_ms()

    def watch(self, session: ClientSession, on_change: OnChange) -> Callable[[], None]:
        """Report changes of a session to `on_change` until the returned function is called."""
        key = object()
        self._watched.setdefault(session.user, {})[key] = session, on_change
        return partial(self._unwatch, session.user, key)

    def _unwatch(self, user: str, key: object) -> None:
        known = self._watched.get(user)
        if known is not None:
            known.pop(key, None)
            if not known:
                del self._watched[user]

    def _handle_user_change(self, user: str) -> None:
        for key, (session, on_change) in tuple(self._watched.get(user, {}).items()):
            present = self._present(session)
            if present is None:
                self._unwatch(user, key)
                self.failures["changed"] += 1
                logger.info(
                    "session_ended",
                    extra=fields(user=user, reason=_CHANGED),
                )
                on_change(None)
            elif present != session:
                self._watched[user][key] = present, on_change
                on_change(present)

    def _present(self, session: ClientSession) -> ClientSession | None:
        """Return a session with its present end; None if its credential is not valid any more. With a previous
        password it ends with that, and with an API key or access key when that is deleted. A session without a
        credential, as by a certificate, does not depend on one."""
        if session.credential_id:
            return session if self._users.has_key(session.user, session.credential_id) else None
        if not session.credential_revision:
            return session
        found = self._users.directory.find_any(session.user)
        if not found.is_known:
            return None
        if found.credential.revision == session.credential_revision:
            return session
        previous = found.credential.previous
        if previous is None or previous.revision != session.credential_revision:
            return None
        if previous.valid_until_ms <= self._clock.wall_ms():
            return None
        return replace(session, expires_ms=previous.valid_until_ms)

    def _count(self, kind: str, address: str, reason: str, user: str = "") -> None:
        """Count and log a failed log-in. `kind`: one of `LOG_IN_FAILURES`."""
        self.failures[kind] += 1
        known = fields(peer=address, **({"user": user} if user else {}), reason=reason)
        logger.warning("authentication_failed", extra=known)


def _session_of(accepted: Accepted) -> ClientSession:
    return ClientSession(
        accepted.user,
        expires_ms=accepted.valid_until_ms,
        credential_revision=accepted.revision,
        groups=accepted.groups,
        credential_id=accepted.credential_id,
        is_by_token=accepted.is_by_token,
    )
