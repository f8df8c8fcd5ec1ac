"""Delegation tokens (KIP-48); available as `client.admin.tokens`.

A user gets a token for programs that act for it, which log in with the token instead of the password. Only a client
that has authenticated with a password or a certificate, on an encrypted connection or from the broker's machine,
creates, changes and sees tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.net.delegation_tokens import (
    DelegationToken,
    create_token,
    expire_token,
    list_tokens,
    renew_token,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from mansio.net.cluster import Cluster


class TokenAdmin:
    """Delegation tokens of one cluster; available as `client.admin.tokens`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create(
        self,
        *,
        owner: str | None = None,
        renewers: Sequence[str] = (),
        max_lifetime: timedelta | None = None,
    ) -> DelegationToken:
        """Create a token. `owner`: another user than that of this client, which needs the right CREATE_TOKENS;
        `renewers`: users who may renew it, too; `max_lifetime`: shorter than that of the brokers. If the answer is
        lost, a token may exist: `list` shows it.

        Raises `DelegationTokenAuthDisabled` if the brokers have no `secrets_key_file`,
        `DelegationTokenRequestNotAllowed`, `DelegationTokenAuthorizationFailed`, `PolicyViolation` for too many tokens.
        """
        return await create_token(self._cluster, owner=owner, renewers=renewers, max_lifetime=max_lifetime)

    async def renew(self, hmac: bytes, *, period: timedelta | None = None) -> datetime:
        """Let a token end later: after `period` from now, None: that of the brokers' settings. Return when it ends.

        Raises `DelegationTokenNotFound`, `DelegationTokenExpired`, `DelegationTokenOwnerMismatch`, and the errors of
        `create`.
        """
        return await renew_token(self._cluster, hmac, period)

    async def expire(self, hmac: bytes, *, after: timedelta | None = None) -> None:
        """Delete a token, which ends its sessions within a second; with `after`, let it end that long from now. Raises
        the errors of `renew`."""
        await expire_token(self._cluster, hmac, after)

    async def list(self, owner: str | None = None) -> Sequence[DelegationToken]:
        """Tokens that this client may see, in the order of their creation: its own, those that it may renew, and those
        for which it has a right. `owner`: only those that this user may renew. Raises
        `DelegationTokenAuthDisabled`, `DelegationTokenRequestNotAllowed`."""
        return await list_tokens(self._cluster, owner)
