"""What belongs to a user: no more than its limit, also if created concurrently, and nothing that outlives the user."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.routing.caller import Caller, ClientSession
from mansio.broker.services import delegation_tokens, sqs_access_keys
from mansio.broker.services.users import CredentialDeletion
from mansio.errors import PolicyViolation, StorageError
from mansio.metadata.sqlite import store as sqlite_store_module
from mansio.state.authentication.credentials import ScramMechanism
from unit.broker.test_api_keys import Interleaved
from unit.broker.test_issued_credentials import ROOT, Services, run
from unit.broker.test_users import upsertion

if TYPE_CHECKING:
    from mansio.metadata.metadata_store import MetadataStore

ALICE = Caller(ClientSession("alice", credential_revision=1))
CAROL = Caller(ClientSession("carol"))
"""A client with a certificate."""


class Interrupted:
    """A metadata store that fails after a number of transactions."""

    def __init__(self, store: MetadataStore, transactions: int) -> None:
        self._store = store
        self._left = transactions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, *arguments: Any) -> Any:
        if not self._left:
            raise StorageError("no space is left")
        self._left -= 1
        return await self._store.transact(*arguments)


def on_store(services: Services, store: Any) -> Services:
    return Services(replace(services.admin, store=store))


async def delete(services: Services, *mechanisms: ScramMechanism) -> None:
    deletions = [CredentialDeletion("alice", each.kafka_type) for each in mechanisms or ScramMechanism]
    errors = await services.users.alter_each([], deletions, is_confidential=True, caller=ROOT)
    assert errors == {"alice": None}


def owned(services: Services, user: str = "alice") -> int:
    """Return the number of tokens and keys that belong to a user."""
    state = services.admin.state
    tokens = [each for each in state.tokens.values() if each.user == user]
    sqs_keys = [each for each in state.sqs_access_keys.values() if each.user == user]
    return len(tokens) + len(sqs_keys) + len(state.api_keys_of(user).keys)


@pytest.mark.parametrize("caller", [ALICE, CAROL], ids=["password", "certificate"])
def test_concurrent_creations_do_not_pass_the_limit_of_tokens(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    monkeypatch.setattr(delegation_tokens, "TOKENS_PER_OWNER_MAX", 1)

    async def check(services: Services) -> None:
        other = Interleaved(services.admin.store, lambda: services.create_token(caller))
        with pytest.raises(PolicyViolation):
            await on_store(services, other).create_token(caller)
        assert owned(services, caller.session.user) == 1

    run(check)


def test_concurrent_creations_do_not_pass_the_limit_of_access_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqs_access_keys, "KEYS_PER_USER_MAX", 1)

    async def check(services: Services) -> None:
        def create(of: Services) -> Any:
            return of.sqs_keys.create("alice", is_confidential=True, caller=ALICE)

        other = Interleaved(services.admin.store, lambda: create(services))
        with pytest.raises(PolicyViolation):
            await create(on_store(services, other))
        assert owned(services) == 1

    run(check)


async def create_many(services: Services) -> None:
    """Create one API key, three access keys and five tokens of alice."""
    await services.api_keys.create("alice", "", None, is_confidential=True, caller=ROOT)
    for _ in range(3):
        await services.sqs_keys.create("alice", is_confidential=True, caller=ROOT)
    for _ in range(5):
        await services.create_token(ALICE)


def test_a_user_with_more_than_a_transaction_takes_is_deleted_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(services: Services) -> None:
        await create_many(services)
        monkeypatch.setattr(sqlite_store_module, "OPERATIONS_MAX", 4)
        await delete(services)
        assert owned(services) == 0

    run(check)


def test_what_an_interrupted_deletion_leaves_is_of_no_use_and_not_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(services: Services) -> None:
        await services.users.open_directory()
        await create_many(services)
        monkeypatch.setattr(sqlite_store_module, "OPERATIONS_MAX", 4)
        store = Interrupted(services.admin.store, transactions=1)
        await delete(on_store(services, store))
        state, directory = services.admin.state, services.users.directory
        assert owned(services) == 7  # of nine; the API key and one more were in the first transaction
        assert "alice" not in state.users
        for token_id in state.tokens:
            assert not directory.find_token(token_id, ScramMechanism.SHA_256).found.is_known
        assert all(services.sqs_keys.find(key_id) is None for key_id in state.sqs_access_keys)
        await services.users.create("alice", "another")
        assert owned(services) == 0

    run(check)


def test_the_next_check_deletes_tokens_that_an_interrupted_deletion_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(services: Services) -> None:
        await create_many(services)
        await services.create_token(CAROL)
        monkeypatch.setattr(sqlite_store_module, "OPERATIONS_MAX", 4)
        await delete(on_store(services, Interrupted(services.admin.store, transactions=1)))
        await services.tokens._delete_expired()
        assert [each.owner for each in services.admin.state.tokens.values()] == ["User:carol"]

    run(check)


def test_two_deletions_of_one_mechanism_each_leave_nothing() -> None:
    async def check(services: Services) -> None:
        await create_many(services)
        other = Interleaved(services.admin.store, lambda: delete(services, ScramMechanism.SHA_512))
        await delete(on_store(services, other), ScramMechanism.SHA_256)
        assert "alice" not in services.admin.state.users
        assert owned(services) == 0

    run(check)


def test_a_token_of_a_certificate_needs_no_user_and_ends_when_one_of_its_name_is_created() -> None:
    async def check(services: Services) -> None:
        await services.users.open_directory()
        created = await services.create_token(CAROL)
        directory = services.users.directory
        assert directory.find_token(created.token.token_id, ScramMechanism.SHA_256).found.is_known
        other: Any = Interleaved(services.admin.store, lambda: services.create_token(CAROL))
        interrupted = on_store(services, other)
        errors = await interrupted.users.alter_each(
            [upsertion("carol")], [], is_confidential=True, caller=ROOT
        )
        assert errors == {"carol": None}
        assert owned(services, "carol") == 0

    run(check)


def test_an_owner_without_tokens_leaves_no_mark_in_the_store() -> None:
    async def check(services: Services) -> None:
        created = await services.create_token(CAROL)
        await services.tokens.expire(created.hmac, -1, is_confidential=True, caller=CAROL)
        await services.create_token(ALICE)
        assert set(services.admin.state.api_keys) == {"alice", "carol"}
        await services.tokens._delete_expired()
        name = services.admin.state.keys.user_api_keys("carol")
        assert await services.admin.store.get(name) is None
        assert "alice" in services.admin.state.api_keys

    run(check)
