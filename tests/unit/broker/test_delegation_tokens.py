"""The service of delegation tokens on a metadata store: changes of the owner meanwhile, limits, and what is stored."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services import delegation_tokens
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.delegation_tokens import DelegationTokenService, Principal
from mansio.broker.services.users import CredentialDeletion
from mansio.config.settings import Settings
from mansio.errors import (
    ConcurrentChange,
    DelegationTokenNotFound,
    DelegationTokenRequestNotAllowed,
    InvalidRequest,
    PolicyViolation,
)
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata.image import MetadataImage
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.secrets_keys import SecretsKeys
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin
from unit.broker.test_users import DirectThread, upsert, upsertion
from unit.broker.test_users import service_of as user_service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.services.delegation_tokens import TokenWithSecret

FIRST, SECOND = bytes(32), bytes(range(32))
ALICE = Caller(ClientSession("alice", credential_revision=1))
BY_CERTIFICATE = Caller(ClientSession("CN=carol"))


def service_of(
    admin: Admin, keys: tuple[bytes, ...] = (FIRST,), state: MetadataImage | None = None
) -> DelegationTokenService:
    return DelegationTokenService(
        SecretsKeys(keys),
        store=admin.store,
        state=state or admin.state,
        settings=Settings(),
        scheduler=admin.scheduler,
        random=HostRandom(),
        clock=HostClock(),
        password_thread=DirectThread(),
        authorization=Authorization(None),
    )


async def create(
    tokens: DelegationTokenService, caller: Caller = ALICE, renewers: tuple[Principal, ...] = ()
) -> TokenWithSecret:
    return await tokens.create(
        owner=None, renewers=renewers, max_lifetime_ms=-1, is_confidential=True, caller=caller
    )


async def delete_alice(admin: Admin) -> None:
    deletion = CredentialDeletion("alice", ScramMechanism.SHA_256.kafka_type)
    errors = await user_service(admin).alter_each([], [deletion], is_confidential=True, caller=ANONYMOUS)
    assert errors == {"alice": None}


def run(check: Callable[[Admin], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(":memory:") as store,
            topic_admin(store) as admin,
        ):
            await upsert(user_service(admin), upsertion("alice"))
            await check(admin)

    asyncio.run(main())


def test_a_user_that_is_deleted_meanwhile_gets_no_token() -> None:
    async def check(admin: Admin) -> None:
        behind = await MetadataImage.load(admin.store, "", HostRandom())  # follows no changes
        await delete_alice(admin)
        behind.revision = 1 << 60
        with pytest.raises(ConcurrentChange):
            await create(service_of(admin, state=behind))
        with pytest.raises(DelegationTokenRequestNotAllowed):
            await create(service_of(admin))
        assert not admin.state.tokens

    run(check)


def test_a_user_of_a_certificate_has_tokens_without_a_password() -> None:
    async def check(admin: Admin) -> None:
        created = await create(service_of(admin), BY_CERTIFICATE)
        assert (created.token.owner, created.token.user) == ("User:CN=carol", "CN=carol")

    run(check)


def test_no_token_is_sent_over_a_connection_that_others_can_read() -> None:
    async def check(admin: Admin) -> None:
        tokens = service_of(admin)
        created = await create(tokens)
        with pytest.raises(DelegationTokenRequestNotAllowed, match="encrypted"):
            await tokens.create(
                owner=None, renewers=(), max_lifetime_ms=-1, is_confidential=False, caller=ALICE
            )
        for change in (tokens.renew, tokens.expire):
            with pytest.raises(DelegationTokenRequestNotAllowed):
                await change(created.hmac, -1, is_confidential=False, caller=ALICE)
        with pytest.raises(DelegationTokenRequestNotAllowed):
            await tokens.describe(None, is_confidential=False, caller=ALICE)

    run(check)


def test_a_new_secrets_key_leaves_tokens_valid_and_describes_those_whose_key_it_has() -> None:
    async def check(admin: Admin) -> None:
        created = await create(service_of(admin))
        for keys, secret in (((SECOND, FIRST), created.hmac), ((SECOND,), b"")):
            tokens = service_of(admin, keys)
            (described,) = await tokens.describe(None, is_confidential=True, caller=ALICE)
            assert described.hmac == secret
            expires_ms = await tokens.renew(created.hmac, 1_000, is_confidential=True, caller=ALICE)
            assert expires_ms == admin.state.tokens[created.token.token_id].expires_ms
        with pytest.raises(DelegationTokenNotFound):
            await tokens.renew(b"", -1, is_confidential=True, caller=ALICE)

    run(check)


def test_tokens_and_renewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegation_tokens, "TOKENS_MAX", 2)

    async def check(admin: Admin) -> None:
        tokens = service_of(admin)
        await create(tokens)
        await create(tokens, BY_CERTIFICATE)
        with pytest.raises(PolicyViolation, match="cluster"):
            await create(tokens)
        with pytest.raises(PolicyViolation, match="renewers"):
            await create(tokens, renewers=tuple(Principal("User", str(n)) for n in range(17)))
        for name in ("", "x" * 256):
            with pytest.raises(InvalidRequest, match="1 to 255"):
                await create(tokens, renewers=(Principal("User", name),))

    run(check)


def test_no_stored_value_and_no_text_contains_a_secret() -> None:
    async def check(admin: Admin) -> None:
        created = await create(service_of(admin))
        listing = await admin.store.list(admin.state.keys.prefix)
        stored = b"".join(entry.value for entry in listing.entries)
        shown = repr(created) + repr(admin.state) + repr(admin.state.tokens)
        assert created.token.digest.encode() in stored
        for secret in (created.hmac.hex(), repr(created.hmac)[2:-1]):
            assert secret.encode() not in stored
            assert secret not in shown

    run(check)
