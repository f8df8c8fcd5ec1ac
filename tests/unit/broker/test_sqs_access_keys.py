"""The service of access keys on a metadata store: who may manage whose keys, and what a change of users means."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.sqs_access_keys import SqsAccessKeyService
from mansio.broker.services.users import CredentialDeletion
from mansio.errors import (
    ClusterAuthorizationFailed,
    ConcurrentChange,
    PolicyViolation,
    ResourceNotFound,
    SecurityDisabled,
    Unavailable,
)
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Put
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.secrets_keys import SecretsKeys
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.state.authorization.authorizer import Authorizer
from support.credentials import reachable_texts
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin
from unit.broker.test_users import service_of as user_service
from unit.broker.test_users import upsert, upsertion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = SecretsKeys((bytes(32),))
ALICE, BOB = (Caller(ClientSession(name)) for name in ("alice", "bob"))
ALICE_BY_TOKEN = Caller(ClientSession("alice", credential_id="token"))


def service_of(
    admin: Admin,
    keys: SecretsKeys | None = KEYS,
    authorizer: Authorizer | None = None,
    state: MetadataImage | None = None,
) -> SqsAccessKeyService:
    return SqsAccessKeyService(
        keys,
        store=admin.store,
        state=state or admin.state,
        scheduler=admin.scheduler,
        random=HostRandom(),
        clock=HostClock(),
        authorization=Authorization(authorizer),
    )


def run(check: Callable[[Admin], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(":memory:") as store,
            topic_admin(store) as admin,
        ):
            await upsert(user_service(admin), upsertion("alice"), upsertion("bob"))
            await check(admin)

    asyncio.run(main())


def test_a_user_manages_the_own_keys_and_needs_rights_for_those_of_others() -> None:
    async def check(admin: Admin) -> None:
        authorizer = Authorizer()
        keys = service_of(admin, authorizer=authorizer)
        own = await keys.create("alice", is_confidential=True, caller=ALICE)
        other = await keys.create("bob", is_confidential=True, caller=BOB)
        assert [each.key_id for each in keys.describe("alice", caller=ALICE)] == [own.key_id]
        for name in ("bob", "absent"):
            with pytest.raises(ClusterAuthorizationFailed):
                await keys.create(name, is_confidential=True, caller=ALICE)
            with pytest.raises(ClusterAuthorizationFailed):
                keys.describe(name, caller=ALICE)
        with pytest.raises(ClusterAuthorizationFailed):
            keys.describe(None, caller=ALICE)
        for key_id in (other.key_id, "absent"):
            with pytest.raises(ClusterAuthorizationFailed) as refused:
                await keys.delete(key_id, caller=ALICE)
            assert key_id not in str(refused.value), "the answer does not tell whether it exists"
        for operation in (Operation.ALTER, Operation.DESCRIBE):
            authorizer.add(
                Acl(
                    ResourceType.CLUSTER,
                    PatternType.LITERAL,
                    CLUSTER_NAME,
                    "User:alice",
                    WILDCARD,
                    operation,
                    Permission.ALLOW,
                )
            )
        assert len(keys.describe(None, caller=ALICE)) == 2
        await keys.delete(other.key_id, caller=ALICE)
        await keys.create("bob", is_confidential=True, caller=ALICE)
        with pytest.raises(ResourceNotFound):
            await keys.delete("absent", caller=ALICE)

    run(check)


def test_a_session_of_a_token_or_access_key_manages_no_keys() -> None:
    async def check(admin: Admin) -> None:
        keys = service_of(admin)
        with pytest.raises(ClusterAuthorizationFailed):
            await keys.create("alice", is_confidential=True, caller=ALICE_BY_TOKEN)
        with pytest.raises(ClusterAuthorizationFailed):
            keys.describe("alice", caller=ALICE_BY_TOKEN)

    run(check)


def test_a_secret_is_sent_on_a_confidential_connection_only_and_needs_a_secrets_key() -> None:
    async def check(admin: Admin) -> None:
        with pytest.raises(PolicyViolation, match="encrypted"):
            await service_of(admin).create("alice", is_confidential=False, caller=ANONYMOUS)
        with pytest.raises(SecurityDisabled, match="secrets_key_file"):
            await service_of(admin, keys=None).create("alice", is_confidential=True, caller=ANONYMOUS)
        assert not admin.state.sqs_access_keys

    run(check)


def test_a_broker_without_the_secrets_key_does_not_take_an_access_key_for_unknown() -> None:
    async def check(admin: Admin) -> None:
        created = await service_of(admin).create("alice", is_confidential=True, caller=ANONYMOUS)
        for keys in (None, SecretsKeys((bytes(range(32)),))):
            service = service_of(admin, keys=keys)
            with pytest.raises(Unavailable, match="secrets_key_file"):
                service.find(created.key_id)
            assert service.undecryptable_count() == 1
        assert service_of(admin).undecryptable_count() == 0

    run(check)


def test_keys_are_found_again_and_removed_by_a_later_start() -> None:
    async def check(admin: Admin) -> None:
        created = await service_of(admin).create("alice", is_confidential=True, caller=ANONYMOUS)
        again = await MetadataImage.load(admin.store, "", HostRandom())
        service = service_of(admin, state=again)
        found = service.find(created.key_id)
        assert found is not None
        assert (found.user, found.secret) == ("alice", created.secret)
        await service_of(admin).delete(created.key_id, caller=ANONYMOUS)
        again._apply_listing(await admin.store.list(again.keys.prefix))
        assert service.find(created.key_id) is None

    run(check)


def test_a_key_that_was_moved_to_another_user_does_not_become_one_of_that_user() -> None:
    async def check(admin: Admin) -> None:
        service = service_of(admin)
        created = await service.create("bob", is_confidential=True, caller=ANONYMOUS)
        name = admin.state.keys.sqs_access_key(created.key_id)
        entry = await admin.store.get(name)
        assert entry is not None
        changed = await admin.store.transact([], [Put(name, entry.value.replace(b'"bob"', b'"alice"'))])
        await admin.state.wait_for_revision(changed.revision, admin.scheduler)
        assert admin.state.sqs_access_keys[created.key_id].user == "alice"
        with pytest.raises(Exception, match="damaged"):
            service.find(created.key_id)

    run(check)


def test_a_key_of_a_user_that_is_deleted_meanwhile_is_not_created() -> None:
    async def check(admin: Admin) -> None:
        behind = await MetadataImage.load(admin.store, "", HostRandom())  # has alice, follows no changes
        deletion = CredentialDeletion("alice", ScramMechanism.SHA_256.kafka_type)
        await user_service(admin).alter_each([], [deletion], is_confidential=True, caller=ANONYMOUS)
        behind.revision = 1 << 60
        with pytest.raises(ConcurrentChange):
            await service_of(admin, state=behind).create("alice", is_confidential=True, caller=ANONYMOUS)

    run(check)


def test_nothing_shows_a_secret() -> None:
    async def check(admin: Admin) -> None:
        created = await service_of(admin).create("alice", is_confidential=True, caller=ANONYMOUS)
        found = service_of(admin).find(created.key_id)
        shown = [repr(created), repr(found), repr(KEYS), repr(admin.state), *reachable_texts(Exception())]
        assert not any(created.secret in text for text in shown)
        listing = await admin.store.list(admin.state.keys.prefix)
        assert not any(created.secret.encode() in entry.value for entry in listing.entries)

    run(check)
