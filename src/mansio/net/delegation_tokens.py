"""Requests about delegation tokens (KIP-48). Used by the admin client and Spark."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.net.cluster import Cluster

DEFAULT_MS: Final = -1
"""A period that stands for that of the brokers' settings."""
_USER: Final = "User"


@dataclass(frozen=True, slots=True)
class DelegationToken:
    """A delegation token. `owner`, `requester`, `renewers`: names of users; `expires`: when it ends unless it is
    renewed, at the latest at `ends`. `hmac` is its secret, empty if the broker does not have it."""

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued: datetime
    expires: datetime
    ends: datetime
    hmac: bytes = field(repr=False)

    @property
    def password(self) -> str:
        """The password with which a program logs in; its user is `token_id`."""
        return base64.b64encode(self.hmac).decode()


async def create_token(
    cluster: Cluster,
    *,
    owner: str | None = None,
    renewers: Sequence[str] = (),
    max_lifetime: timedelta | None = None,
) -> DelegationToken:
    """Create a token. `owner`: None for the user of this client; `max_lifetime`: None for that of the brokers. Raises
    the brokers' errors."""
    fields: dict[str, Any] = {
        "renewers": [{"principal_type": _USER, "principal_name": name} for name in renewers],
        "max_lifetime_ms": _period_ms(max_lifetime),
    }
    if owner is not None:
        fields |= {"owner_principal_type": _USER, "owner_principal_name": owner}
    answer = await cluster.request(ApiKey.CREATE_DELEGATION_TOKEN, fields, check=_check_error)
    return _token(answer, tuple(renewers))


async def renew_token(cluster: Cluster, hmac: bytes, period: timedelta | None = None) -> datetime:
    """Let a token end after `period` from now, None: that of the brokers' settings. Return when it ends. Raises the
    brokers' errors."""
    fields = {"hmac": hmac, "renew_period_ms": _period_ms(period)}
    answer = await cluster.request(ApiKey.RENEW_DELEGATION_TOKEN, fields, check=_check_error)
    return _time(answer.expiry_timestamp)


async def expire_token(cluster: Cluster, hmac: bytes, after: timedelta | None = None) -> None:
    """Delete a token; with `after`, let it end that long from now. Raises the brokers' errors."""
    fields = {"hmac": hmac, "expiry_time_period_ms": _period_ms(after)}
    await cluster.request(ApiKey.EXPIRE_DELEGATION_TOKEN, fields, check=_check_error)


async def list_tokens(cluster: Cluster, owner: str | None = None) -> list[DelegationToken]:
    """Return the tokens that this client may see, in the order of their creation. `owner`: only those that this user
    may renew. Raises the brokers' errors."""
    owners = None if owner is None else [{"principal_type": _USER, "principal_name": owner}]
    answer = await cluster.request(ApiKey.DESCRIBE_DELEGATION_TOKEN, {"owners": owners}, check=_check_error)
    return [
        _token(each, tuple(renewer.principal_name for renewer in each.renewers)) for each in answer.tokens
    ]


def _token(answer: Any, renewers: tuple[str, ...]) -> DelegationToken:
    return DelegationToken(
        answer.token_id,
        answer.principal_name,
        answer.token_requester_principal_name or answer.principal_name,
        renewers,
        _time(answer.issue_timestamp),
        _time(answer.expiry_timestamp),
        _time(answer.max_timestamp),
        bytes(answer.hmac),
    )


def _time(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _period_ms(period: timedelta | None) -> int:
    return DEFAULT_MS if period is None else max(period // timedelta(milliseconds=1), 0)


def _check_error(answer: Any) -> None:
    raise_for_code(answer.error_code)
