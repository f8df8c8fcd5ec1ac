"""The API key service on a metadata store: limits, rights, and the end of keys with their user."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services import api_keys as api_keys_module
from mansio.broker.services.api_keys import ApiKeyService
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.users import CredentialDeletion, UserService
from mansio.errors import (
    ClusterAuthorizationFailed,
    InvalidRequest,
    PolicyViolation,
    ResourceNotFound,
    StorageError,
)
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata.api_keys import decode_api_keys
from mansio.metadata.image import MetadataImage
from mansio.state.authentication.api_keys import ApiKeyCheck, StoredApiKey, format_key, hash_key, id_of_key
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.outcomes import Accepted, Rejected
from mansio.state.authorization.acls import CLUSTER_NAME, Operation
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import ALICE, CLUSTER, acl
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin
from unit.broker.test_users import service_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.services.api_keys import NewApiKey
    from mansio.metadata.metadata_store import MetadataStore


def keys_of(admin: Admin, authorizer: Authorizer | None = None) -> ApiKeyService:
    return ApiKeyService(
        store=admin.store,
        state=admin.state,
        scheduler=admin.scheduler,
        random=HostRandom(),
        clock=HostClock(),
        authorization=Authorization(authorizer),
    )


def run(check: Callable[[Admin, UserService, ApiKeyService], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(":memory:") as store,
            topic_admin(store) as admin,
        ):
            users = service_of(admin)
            await users.create("alice", "password")
            await check(admin, users, keys_of(admin))

    asyncio.run(main())


async def create(keys: ApiKeyService, user: str = "alice", caller: Caller = ANONYMOUS) -> NewApiKey:
    return await keys.create(user, "a test", None, is_confidential=True, caller=caller)


async def delete_user(users: UserService, name: str = "alice") -> None:
    deletions = [CredentialDeletion(name, each.kafka_type) for each in ScramMechanism]
    assert await users.alter_each([], deletions, is_confidential=True, caller=ANONYMOUS) == {name: None}


def test_keys_survive_a_restart_and_end_with_their_user() -> None:
    async def check(admin: Admin, users: UserService, keys: ApiKeyService) -> None:
        first, second = await create(keys), await create(keys)
        again = await MetadataImage.load(admin.store, "", HostRandom())
        assert again.api_keys_of("alice").keys == {
            each.api_key.key_id: each.api_key for each in (first, second)
        }
        assert again.find_api_key(first.api_key.key_id) == first.api_key
        await keys.delete(first.api_key.key_id, caller=ANONYMOUS)
        assert keys.list(caller=ANONYMOUS) == [second.api_key]
        one = [CredentialDeletion("alice", ScramMechanism.SHA_256.kafka_type)]
        await users.alter_each([], one, is_confidential=True, caller=ANONYMOUS)
        assert admin.state.find_api_key(second.api_key.key_id) is not None  # the user has another credential
        other = [CredentialDeletion("alice", ScramMechanism.SHA_512.kafka_type)]
        await users.alter_each([], other, is_confidential=True, caller=ANONYMOUS)
        await users.create("alice", "another")
        assert keys.list("alice", caller=ANONYMOUS) == []
        assert admin.state.find_api_key(second.api_key.key_id) is None

    run(check)


def test_a_key_that_is_created_while_its_user_is_deleted_does_not_outlive_it() -> None:
    async def check(admin: Admin, users: UserService, keys: ApiKeyService) -> None:
        results = await asyncio.gather(create(keys), delete_user(users), create(keys), return_exceptions=True)
        assert not [
            each
            for each in results
            if isinstance(each, BaseException) and not isinstance(each, ResourceNotFound)
        ]
        assert keys.list(caller=ANONYMOUS) == []
        await users.create("alice", "another")
        assert keys.list(caller=ANONYMOUS) == []
        assert not admin.state.api_keys

    run(check)


class Interleaved:
    """A metadata store that calls a function, once, before a transaction."""

    def __init__(self, store: MetadataStore, before: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._before: Callable[[], Awaitable[object]] | None = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, *arguments: Any) -> Any:
        before, self._before = self._before, None
        if before is not None:
            await before()
        return await self._store.transact(*arguments)


def test_creation_and_deletion_of_a_user_see_each_other_at_the_store() -> None:
    async def check(admin: Admin, users: UserService, keys: ApiKeyService) -> None:
        store: Any = Interleaved(admin.store, lambda: create(keys))
        await delete_user(service_of(replace(admin, store=store)))
        assert not admin.state.api_keys
        await users.create("alice", "another")

        async def renew() -> None:
            await delete_user(users)
            await users.create("alice", "a third")

        store = Interleaved(admin.store, lambda: delete_user(users))
        with pytest.raises(ResourceNotFound):
            await create(keys_of(replace(admin, store=store)))
        assert not admin.state.api_keys
        await users.create("alice", "another")
        store = Interleaved(admin.store, renew)
        await create(keys_of(replace(admin, store=store)))  # for the new user of this name, after all
        assert len(keys.list(caller=ANONYMOUS)) == 1

    run(check)


def test_a_key_is_checked_against_its_end_and_its_user() -> None:
    text = format_key(bytes(40))
    key_id = id_of_key(text)
    assert key_id is not None
    known = StoredApiKey(key_id, "alice", hash_key(text), 0, expires_ms=1_000)

    def check(sent: str, user: str | None, now_ms: int) -> Accepted | Rejected:
        return ApiKeyCheck(sent, {key_id: known}.get, user).run(now_ms)

    accepted = Accepted("alice", valid_until_ms=1_000, credential_id=key_id)
    for user in (None, "alice", key_id):
        assert check(text, user, 999) == accepted
        assert isinstance(check(text, user, 1_000), Rejected)
    assert isinstance(check(text, "bob", 0), Rejected)
    assert isinstance(check(text[:-1] + "1", None, 0), Rejected)
    assert text not in repr(ApiKeyCheck(text, lambda _: None))


def test_what_is_not_permitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys_module, "KEYS_PER_USER_MAX", 2)

    async def check(_: Admin, __: UserService, keys: ApiKeyService) -> None:
        for description, valid_ms in (("a\nb", None), ("d" * 201, None), ("", 0), ("", -5), ("", 1 << 62)):
            with pytest.raises(InvalidRequest):
                await keys.create("alice", description, valid_ms, is_confidential=True, caller=ANONYMOUS)
        with pytest.raises(PolicyViolation, match="encrypted"):
            await keys.create("alice", "", None, is_confidential=False, caller=ANONYMOUS)
        with pytest.raises(ResourceNotFound):
            await create(keys, "nobody")
        with pytest.raises(ResourceNotFound):
            await keys.delete("0" * 16, caller=ANONYMOUS)
        await create(keys)
        await create(keys)
        with pytest.raises(PolicyViolation, match="the user has 2"):
            await create(keys)
        monkeypatch.setattr(api_keys_module, "KEYS_MAX", 2)
        with pytest.raises(PolicyViolation, match="there are 2"):
            await create(keys)

    run(check)


def test_a_user_administers_its_own_keys_and_others_need_the_cluster() -> None:
    async def check(admin: Admin, users: UserService, _: ApiKeyService) -> None:
        await users.create("bob", "password")
        authorizer = Authorizer()
        keys = keys_of(admin, authorizer)
        own = await create(keys, caller=ALICE)
        bobs = await create(keys, "bob", Caller(ClientSession("bob")))
        assert keys.list("alice", caller=ALICE) == [own.api_key]
        for name in (None, "bob", "absent"):
            with pytest.raises(ClusterAuthorizationFailed):
                keys.list(name, caller=ALICE)
        for name in ("bob", "absent", "ANONYMOUS"):
            with pytest.raises(ClusterAuthorizationFailed):
                await create(keys, name, ALICE)
        for key_id in (bobs.api_key.key_id, "0" * 16):
            with pytest.raises(ClusterAuthorizationFailed):
                await keys.delete(key_id, caller=ALICE)
        with pytest.raises(ClusterAuthorizationFailed):
            await create(keys, "ANONYMOUS", ANONYMOUS)
        by_key = Caller(ClientSession("alice", credential_id=own.api_key.key_id))
        with pytest.raises(ClusterAuthorizationFailed):
            await create(keys, caller=by_key)
        with pytest.raises(ClusterAuthorizationFailed):
            await keys.delete(own.api_key.key_id, caller=by_key)
        assert keys.list("alice", caller=by_key) == [own.api_key]
        authorizer.add(acl(CLUSTER, CLUSTER_NAME, Operation.ALTER))
        await create(keys, "bob", ALICE)
        await keys.delete(bobs.api_key.key_id, caller=ALICE)
        await keys.delete(own.api_key.key_id, caller=ALICE)

    run(check)


def test_the_form_of_keys_can_be_found_by_scanners_and_has_their_bytes() -> None:
    text = format_key(bytes(range(40)))
    assert text == f"mansio_{bytes(range(8)).hex()}_{bytes(range(8, 40)).hex()}"
    assert id_of_key(text) == bytes(range(8)).hex()
    for other in ("", text[:-1], text + "\n", f" {text}", text.replace("_", "-")):
        assert id_of_key(other) is None
    with pytest.raises(ValueError, match="40"):
        format_key(bytes(39))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"keys": []},
        {"keys": {"a": {}}},
        {"keys": {"a": {"sha256": "ab", "created_ms": 1, "expires_ms": None, "description": ""}}},
    ],
)
def test_damaged_value_is_reported(document: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="apikeys"):
        decode_api_keys("apikeys/alice", "alice", document, 1)
