"""Who may create credentials and set passwords: no client with a key or a token, which ends, or is revoked, before what
it could create."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services.api_keys import ApiKeyService
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.delegation_tokens import (
    COMPUTATIONS_MAX,
    DelegationTokenService,
    Principal,
)
from mansio.broker.services.sqs_access_keys import SqsAccessKeyService
from mansio.broker.services.users import CredentialDeletion, UserService
from mansio.config.item_limit import ITEMS_MAX
from mansio.config.settings import Settings
from mansio.errors import (
    ClusterAuthorizationFailed,
    DelegationTokenAuthorizationFailed,
    DelegationTokenRequestNotAllowed,
    PolicyViolation,
    ThrottlingQuotaExceeded,
)
from mansio.host.clock import HostClock, HostRandom
from mansio.state.authentication.secrets_keys import SecretsKeys
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.authorization.authorizer import Authorizer
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin
from unit.broker.test_users import DirectThread, upsertion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Caller(ClientSession("root", credential_revision=1))
BY_KEY = Caller(ClientSession("root", credential_id="key"))
BY_TOKEN = Caller(ClientSession("root", is_by_token=True))
"""A super user with a password, with an API key or a delegation token, and with a token of an identity provider."""


class HeldThread(DirectThread):
    """Runs nothing until `release`."""

    def __init__(self) -> None:
        self.held: list[tuple[Any, Any]] = []

    def submit(self, work: Any, done: Any) -> None:
        self.held.append((work, done))

    def release(self) -> None:
        held, self.held = self.held, []
        for work, done in held:
            super().submit(work, done)


async def wait_for_idle() -> None:
    for _ in range(20):  # more turns than a creation takes until its work is submitted
        await asyncio.sleep(0)


class Services:
    """The services that create credentials, on one metadata store, and what they report as refused."""

    def __init__(self, admin: Admin, token_thread: DirectThread | None = None) -> None:
        self.admin = admin
        self.mutations_left = 1_000
        """Number of changes until the quota of callers is used up."""
        self.refusals: list[tuple[str, Operation, ResourceType]] = []
        authorization = Authorization(
            Authorizer(super_users=frozenset({"User:root"})),
            lambda caller, operation, kind, _, **__: self.refusals.append(
                (caller.session.user, operation, kind)
            ),
        )
        common: dict[str, Any] = {
            "store": admin.store,
            "state": admin.state,
            "scheduler": admin.scheduler,
            "random": HostRandom(),
            "clock": HostClock(),
            "authorization": authorization,
        }
        keys, thread = SecretsKeys((bytes(32),)), DirectThread()
        self.users = UserService(**common, password_thread=thread)
        common["count_mutation"] = self._count_mutation
        self.api_keys = ApiKeyService(**common)
        self.sqs_keys = SqsAccessKeyService(keys, **common)
        self.tokens = DelegationTokenService(
            keys, **common, settings=Settings(), password_thread=token_thread or thread
        )

    def _count_mutation(self, _caller: Caller) -> None:
        if not self.mutations_left:
            raise ThrottlingQuotaExceeded("used up")
        self.mutations_left -= 1

    async def create_token(self, caller: Caller, owner: Principal | None = None) -> Any:
        return await self.tokens.create(
            owner=owner, renewers=(), max_lifetime_ms=-1, is_confidential=True, caller=caller
        )


def run(check: Callable[[Services], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(":memory:") as store,
            topic_admin(store) as admin,
        ):
            services = Services(admin)
            await services.users.create("root", "password")
            await services.users.create("alice", "password")
            await check(services)

    asyncio.run(main())


@pytest.mark.parametrize("caller", [BY_KEY, BY_TOKEN], ids=["key", "token"])
@pytest.mark.parametrize("user", ["root", "alice"])
def test_with_a_key_or_a_token_no_client_creates_credentials_or_sets_passwords(
    caller: Caller, user: str
) -> None:
    async def check(services: Services) -> None:
        with pytest.raises(ClusterAuthorizationFailed, match="certificate"):
            await services.api_keys.create(user, "", None, is_confidential=True, caller=caller)
        with pytest.raises(ClusterAuthorizationFailed, match="certificate"):
            await services.sqs_keys.create(user, is_confidential=True, caller=caller)
        with pytest.raises(ClusterAuthorizationFailed, match="certificate"):
            await services.users.set_password(user, "another", is_confidential=True, caller=caller)
        with pytest.raises(DelegationTokenRequestNotAllowed, match="certificate"):
            await services.create_token(caller, Principal("User", user))
        errors = await services.users.alter_each([upsertion(user)], [], is_confidential=True, caller=caller)
        assert isinstance(errors[user], ClusterAuthorizationFailed)
        assert services.refusals == [("root", Operation.ALTER, ResourceType.CLUSTER)] * 5
        state = services.admin.state
        assert [state.api_key_count, len(state.sqs_access_keys), len(state.tokens)] == [0, 0, 0]

    run(check)


def test_with_a_password_a_super_user_creates_them_and_with_a_key_it_deletes_users() -> None:
    async def check(services: Services) -> None:
        await services.api_keys.create("alice", "", None, is_confidential=True, caller=ROOT)
        await services.sqs_keys.create("alice", is_confidential=True, caller=ROOT)
        await services.create_token(ROOT, Principal("User", "alice"))
        await services.users.set_password("alice", "another", is_confidential=True, caller=ROOT)
        deletions = [CredentialDeletion("alice", number) for number in (1, 2)]
        errors = await services.users.alter_each([], deletions, is_confidential=True, caller=BY_KEY)
        assert errors == {"alice": None}

    run(check)


def test_a_refused_token_of_another_owner_is_reported() -> None:
    async def check(services: Services) -> None:
        bob = Caller(ClientSession("bob"))
        with pytest.raises(DelegationTokenAuthorizationFailed):
            await services.create_token(bob, Principal("User", "alice"))
        assert services.refusals == [("bob", Operation.CREATE_TOKENS, ResourceType.USER)]

    run(check)


def test_anonymous_clients_of_an_open_cluster_create_users() -> None:
    assert ANONYMOUS.session.may_issue_credentials  # without an authorizer: how the first users are made


def test_changes_of_own_credentials_count_in_the_quota_of_the_caller() -> None:
    async def check(services: Services) -> None:
        api_key = await services.api_keys.create("root", "", None, is_confidential=True, caller=ROOT)
        sqs_key = await services.sqs_keys.create("root", is_confidential=True, caller=ROOT)
        token = await services.create_token(ROOT)
        services.mutations_left = 1
        await services.tokens.renew(token.hmac, -1, is_confidential=True, caller=ROOT)
        revision = services.admin.state.revision
        for change in (
            services.api_keys.create("root", "", None, is_confidential=True, caller=ROOT),
            services.sqs_keys.create("root", is_confidential=True, caller=ROOT),
            services.create_token(ROOT),
            services.api_keys.delete(api_key.api_key.key_id, caller=ROOT),
            services.sqs_keys.delete(sqs_key.key_id, caller=ROOT),
            services.tokens.renew(token.hmac, -1, is_confidential=True, caller=ROOT),
            services.tokens.expire(token.hmac, -1, is_confidential=True, caller=ROOT),
        ):
            with pytest.raises(ThrottlingQuotaExceeded):
                await change
        assert services.admin.state.revision == revision

    run(check)


def test_few_tokens_are_computed_at_a_time() -> None:
    """The thread also checks passwords, which would wait for all of them."""

    async def check(services: Services) -> None:
        thread = HeldThread()
        services = Services(services.admin, thread)
        creations = [asyncio.ensure_future(services.create_token(ROOT)) for _ in range(COMPUTATIONS_MAX + 3)]
        await wait_for_idle()
        assert len(thread.held) == COMPUTATIONS_MAX
        refused = [each for each in creations if each.done()]
        assert [type(each.exception()) for each in refused] == 3 * [ThrottlingQuotaExceeded]
        thread.release()
        await asyncio.wait(creations)
        assert not thread.held
        again = asyncio.ensure_future(services.create_token(ROOT))
        await wait_for_idle()
        assert len(thread.held) == 1  # there is room again
        again.cancel()

    run(check)


def test_tokens_of_too_many_owners_are_not_described() -> None:
    async def check(services: Services) -> None:
        await services.create_token(ROOT)
        owners = [Principal("User", str(number)) for number in range(ITEMS_MAX)]
        assert await services.tokens.describe(owners, is_confidential=True, caller=ROOT) == []
        owners[-1] = Principal("User", "root")
        assert len(await services.tokens.describe(owners, is_confidential=True, caller=ROOT)) == 1
        with pytest.raises(PolicyViolation):
            await services.tokens.describe([*owners, owners[0]], is_confidential=True, caller=ROOT)

    run(check)
