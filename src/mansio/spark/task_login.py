"""What the tasks of a query log in with: a delegation token (KIP-48) that the driver gets, so that they have no
password.

The driver passes it with each batch: in the inputs of the source's tasks, and in the writer, which Spark pickles for
each batch. The tokens of a user for Spark are those of which it is owner, requester and the only renewer, which adds no
right. The brokers tell this user their secrets, so all drivers of a user share one, and need no state: for each batch
the driver lists them and takes one, renews it if less than half of its time is left (with the same secret), and creates
another one before the maximum lifetime ends.

Without a password of a user, without delegation tokens in the cluster, or if the brokers refuse one, the tasks log in
as the driver does.

Invariants:
* What a task logs in with is never in options, plans, offsets or logs.
* A token that a batch is planned with is valid for at least half of `LIFETIME`, or of its maximum lifetime if that is
  shorter.
* A new token is used when all brokers that can be reached accept it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.config.security import OAUTHBEARER, PLAIN
from mansio.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionLost,
    DelegationTokenAuthDisabled,
    DelegationTokenAuthorizationFailed,
    DelegationTokenExpired,
    DelegationTokenNotFound,
    DelegationTokenRequestNotAllowed,
    MansioError,
    PolicyViolation,
    RequestTimedOut,
    SaslAuthenticationFailed,
    UnsupportedVersion,
)
from mansio.net.delegation_tokens import create_token, expire_token, list_tokens, renew_token
from mansio.net.retry import call_with_retries
from mansio.net.security_settings import SecuritySettings
from mansio.spark.security_options import CREATE_TOKEN_OPTION
from mansio.spark.sync_client import open_cluster, sync_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.net.cluster import Cluster
    from mansio.net.delegation_tokens import DelegationToken
    from mansio.spark.options import SinkOptions, SourceOptions

T = TypeVar("T")
Options = TypeVar("Options", "SourceOptions", "SinkOptions")

logger = logging.getLogger(__name__)

LIFETIME: Final = timedelta(hours=24)
"""For how long a token is renewed."""
ACCEPT_TIMEOUT_MS: Final = 10_000
"""Time in which all brokers must accept a new token."""

_LOGIN_FIELDS: Final = (
    "user",
    "password",
    "mechanism",
    "delegation_token",
    "token",
    "token_provider",
    "token_endpoint",
    "token_scope",
    "api_key",
    "key_password",
)
_REFUSALS: Final = (
    AuthenticationFailed,
    DelegationTokenAuthDisabled,
    DelegationTokenAuthorizationFailed,
    DelegationTokenRequestNotAllowed,
    PolicyViolation,
    UnsupportedVersion,
)
_EXPECTED_REFUSALS: Final = (DelegationTokenAuthDisabled, UnsupportedVersion)
"""Of a cluster without delegation tokens."""

_refused: set[tuple[str, SecuritySettings]] = set()
"""Clusters and log-ins for which this process has got no token. It does not ask again."""


def without_login(security: SecuritySettings) -> SecuritySettings:
    """Return the settings without passwords and what belongs to them."""
    return with_login(security, SecuritySettings())


def with_login(security: SecuritySettings, login: SecuritySettings | None) -> SecuritySettings:
    """Return the settings with the passwords, and what belongs to them, of `login`; None: unchanged."""
    if login is None:
        return security
    return replace(security, **{name: getattr(login, name) for name in _LOGIN_FIELDS})


def task_login(
    bootstrap_servers: str, security: SecuritySettings, *, creates_token: bool | None = None
) -> SecuritySettings | None:
    """Return what the tasks of the next batch log in with: settings with passwords only; None if there are none.
    `creates_token`: the option `createDelegationToken`, None: if it is possible.

    Raises `ConfigError` and the brokers' errors if a token is required and not possible.
    """
    if without_login(security) == security:
        return None
    own = with_login(SecuritySettings(), security)
    if creates_token is False:
        return own
    if not security.user or security.mechanism == OAUTHBEARER or security.delegation_token:
        if creates_token:
            raise ConfigError(f"option {CREATE_TOKEN_OPTION} needs user and password")
        return own
    if (bootstrap_servers, security) in _refused and not creates_token:
        return own
    client = sync_client(bootstrap_servers, security)
    try:
        token = client.run(_find_token(client.cluster, bootstrap_servers, security))
    except _REFUSALS as error:
        if creates_token:
            raise
        _refused.add((bootstrap_servers, security))
        level = logging.DEBUG if isinstance(error, _EXPECTED_REFUSALS) else logging.WARNING
        logger.log(
            level, "tasks log in with the password, because there is no delegation token: %s", error.message
        )
        return own
    return with_login(SecuritySettings(), _token_settings(security, token))


def options_for_tasks(options: Options) -> Options:
    """Return the options with what the tasks of the next batch log in with. Raises the errors of `task_login`."""
    login = task_login(options.bootstrap_servers, options.security, creates_token=options.creates_token)
    return replace(options, security=with_login(options.security, login))


def _token_settings(security: SecuritySettings, token: DelegationToken) -> SecuritySettings:
    """Return the settings with the token instead of user and password."""
    return replace(
        security,
        user=token.token_id,
        password=token.password,
        mechanism="" if security.mechanism == PLAIN else security.mechanism,
        delegation_token=True,
    )


async def _find_token(
    cluster: Cluster, bootstrap_servers: str, security: SecuritySettings
) -> DelegationToken:
    """Return a token of the user that is valid for long enough. Raises the brokers' errors."""
    user, now = security.user, datetime.now(UTC)
    known = [
        one
        for one in await list_tokens(cluster, user)
        if one.owner == one.requester == user and one.renewers == (user,) and one.hmac and one.expires > now
    ]
    longest = max(known, key=lambda one: (one.expires, one.ends), default=None)
    if longest is not None and longest.expires >= now + _least_left(longest):
        return longest
    latest = max(known, key=lambda one: one.ends, default=None)
    if latest is not None and latest.ends >= now + _least_left(latest) and await _renew(cluster, latest):
        return latest
    created = await create_token(cluster, renewers=[user])
    try:
        await _wait_until_accepted(bootstrap_servers, _token_settings(security, created))
        if created.expires < now + _least_left(created):
            await _renew(cluster, created)
    except BaseException:
        await _delete(cluster, created)
        raise
    return created


def _least_left(token: DelegationToken) -> timedelta:
    return min(LIFETIME, token.ends - token.issued) / 2


async def _renew(cluster: Cluster, token: DelegationToken) -> bool:
    """Return whether the token exists."""
    try:
        await renew_token(cluster, token.hmac, LIFETIME)
    except (DelegationTokenNotFound, DelegationTokenExpired):
        return False
    return True


async def _delete(cluster: Cluster, token: DelegationToken) -> None:
    try:
        await expire_token(cluster, token.hmac)
    except MansioError as error:
        logger.warning("delegation token %s was not deleted: %s", token.token_id, error.message)


async def _wait_until_accepted(bootstrap_servers: str, login: SecuritySettings) -> None:
    """Log in at each broker, which may not know the token yet. A broker that cannot be reached is left out. Raises
    `AuthenticationFailed` if one refuses it for long, `UnsupportedSaslMechanism` if a listener has no SCRAM."""
    cluster = await _retried(partial(open_cluster, bootstrap_servers, login))
    try:
        for node_id in list(cluster.nodes):
            with suppress(ConnectionLost, RequestTimedOut):
                await _retried(partial(cluster.connection, node_id))
    finally:
        await cluster.close()


async def _retried(attempt: Callable[[], Awaitable[T]]) -> T:
    return await call_with_retries(
        attempt,
        timeout_ms=ACCEPT_TIMEOUT_MS,
        should_retry=lambda error: isinstance(error, SaslAuthenticationFailed),
    )
