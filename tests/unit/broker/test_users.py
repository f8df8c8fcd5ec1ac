"""The user service on a metadata store: KIP-554's rules, the limits, the server secret; nothing shows a key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services import users as users_module
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.users import CredentialDeletion, CredentialUpsertion, DescribedUser, UserService
from mansio.errors import (
    ClusterAuthorizationFailed,
    DuplicateResource,
    InvalidRequest,
    MansioError,
    PolicyViolation,
    ResourceNotFound,
    StorageError,
    UnacceptableCredential,
    UnsupportedSaslMechanism,
)
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Put
from mansio.state.authentication.credentials import ScramMechanism, salt_password
from mansio.state.authentication.plain import PasswordCheck
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
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from mansio.ports import Background

SHA_256, SHA_512 = ScramMechanism
SALT = b"salt" * 8
PASSWORD = "correct horse"


class DirectThread:
    """Runs work where it is submitted."""

    def submit(self, work: Callable[[], object], done: Callable[..., None]) -> None:
        try:
            result = work()
        except MansioError as error:
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None:
        pass


def service_of(
    admin: Admin, state: MetadataImage | None = None, authorizer: Authorizer | None = None
) -> UserService:
    thread: Background = DirectThread()
    return UserService(
        store=admin.store,
        state=state or admin.state,
        scheduler=admin.scheduler,
        random=HostRandom(),
        clock=HostClock(),
        password_thread=thread,
        authorization=Authorization(authorizer),
    )


def run(check: Callable[[Admin, UserService], Awaitable[None]], path: str = ":memory:") -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(path) as store,
            topic_admin(store) as admin,
        ):
            await check(admin, service_of(admin))

    asyncio.run(main())


def upsertion(
    user: str,
    mechanism: ScramMechanism = SHA_256,
    *,
    iterations: int = 4_096,
    password: str = PASSWORD,
    number: int | None = None,
) -> CredentialUpsertion:
    salted = salt_password(mechanism, password.encode(), SALT, iterations)
    kafka_type = mechanism.kafka_type if number is None else number
    return CredentialUpsertion(user, kafka_type, iterations, SALT, salted)


async def upsert(users: UserService, *upsertions: CredentialUpsertion) -> None:
    errors = await users.alter_each(upsertions, [], is_confidential=True, caller=ANONYMOUS)
    assert set(errors.values()) == {None}


def logs_in(users: UserService, user: str, password: str) -> bool:
    check = PasswordCheck(user, password.encode(), users.directory)
    return hasattr(check.run(HostClock().wall_ms()), "revision")


def test_a_user_is_created_changed_described_and_deleted() -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        await users.open_directory()
        changed: list[str] = []
        users.on_change(changed.append)
        await upsert(
            users, upsertion("alice"), upsertion("alice", SHA_512, iterations=8_192), upsertion("bob")
        )
        alice = DescribedUser("alice", {SHA_256: 4_096, SHA_512: 8_192})
        assert users.describe(caller=ANONYMOUS) == [alice, DescribedUser("bob", {SHA_256: 4_096})]
        assert logs_in(users, "alice", PASSWORD)
        first = users.directory.find("alice", SHA_256).credential.revision
        await upsert(users, upsertion("alice", password="other"))
        assert not logs_in(users, "alice", PASSWORD)
        assert logs_in(users, "alice", "other")
        assert users.directory.find("alice", SHA_256).credential.revision > first
        assert users.directory.find("alice", SHA_512).credential.revision == first
        deletions = [CredentialDeletion("alice", one.kafka_type) for one in ScramMechanism]
        assert await users.alter_each([], deletions[:1], is_confidential=False, caller=ANONYMOUS) == {
            "alice": None
        }
        assert users.describe(["alice"], caller=ANONYMOUS) == [DescribedUser("alice", {SHA_512: 8_192})]
        assert await users.alter_each([], deletions[1:], is_confidential=False, caller=ANONYMOUS) == {
            "alice": None
        }
        assert [each.name for each in users.describe(caller=ANONYMOUS)] == ["bob"]
        assert users.user_count == 1
        assert changed == ["alice", "bob", "alice", "alice", "alice"]

    run(check)


def test_each_user_of_a_request_succeeds_or_fails_as_a_whole() -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        errors = await users.alter_each(
            [
                upsertion("good"),
                upsertion("twice"),
                upsertion("twice"),
                upsertion("both"),
                upsertion("few", iterations=4_095),
                upsertion("many", iterations=16_385),
                upsertion("partly"),
                upsertion("partly", SHA_512, iterations=1),
                upsertion("unknown", number=3),
                upsertion("zero", number=0),
                upsertion(""),
                CredentialUpsertion("short", 1, 4_096, SALT, b"short"),
                CredentialUpsertion("saltless", 1, 4_096, b"", bytes(32)),
            ],
            [
                CredentialDeletion("both", 1),
                CredentialDeletion("missing", 1),
                CredentialDeletion("typeless", 9),
            ],
            is_confidential=True,
            caller=ANONYMOUS,
        )
        kinds = {name: None if error is None else type(error) for name, error in errors.items()}
        assert kinds == {
            "both": DuplicateResource,
            "missing": ResourceNotFound,
            "typeless": UnsupportedSaslMechanism,
            "good": None,
            "twice": DuplicateResource,
            "few": UnacceptableCredential,
            "many": UnacceptableCredential,
            "partly": UnacceptableCredential,
            "unknown": UnsupportedSaslMechanism,
            "zero": UnsupportedSaslMechanism,
            "": UnacceptableCredential,
            "short": UnacceptableCredential,
            "saltless": UnacceptableCredential,
        }
        assert [each.name for each in users.describe(caller=ANONYMOUS)] == ["good"]
        described = {
            each.name: each.error for each in users.describe(["good", "no", "x", "x"], caller=ANONYMOUS)
        }
        assert {name: type(error) for name, error in described.items()} == {
            "good": type(None),
            "no": ResourceNotFound,
            "x": DuplicateResource,
        }
        await upsert(users, upsertion("mixed"))
        mixed = await users.alter_each(
            [upsertion("mixed", SHA_512)],
            [CredentialDeletion("mixed", 1)],
            is_confidential=True,
            caller=ANONYMOUS,
        )
        assert mixed == {"mixed": None}
        assert users.describe(["mixed"], caller=ANONYMOUS) == [DescribedUser("mixed", {SHA_512: 4_096})]

    run(check)


@pytest.mark.parametrize(
    "name",
    [
        " a",
        "a ",
        "a\n",
        "a\0b",
        "\u202ea",
        "a\u00ad",
        "\ufb01",
        "A\u030a",
        "ANONYMOUS",
        "*",
        "x" * 256,
        "\ud800",
    ],
)
def test_a_new_name_is_what_every_client_sends_and_every_operator_can_read(name: str) -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        errors = await users.alter_each([upsertion(name)], [], is_confidential=True, caller=ANONYMOUS)
        assert [type(error) for error in errors.values()] == [UnacceptableCredential]
        assert users.describe(caller=ANONYMOUS) == []

    run(check)


@pytest.mark.parametrize("name", ["a", "größe", "a,b=c/d", "日本", "CN=a,O=b", "x" * 255, "admin user"])
def test_other_names_survive_a_restart(tmp_path: Path, name: str) -> None:
    async def create(_admin: Admin, users: UserService) -> None:
        await users.open_directory()
        await upsert(users, upsertion(name), upsertion(name, SHA_512))

    async def find(admin: Admin, users: UserService) -> None:
        secret = admin.state.server_secret
        assert secret is not None
        await users.open_directory()
        assert admin.state.server_secret == secret, "made once"
        assert logs_in(users, name, PASSWORD)
        assert not logs_in(users, name, "other")
        await users.set_password(name, "other", is_confidential=True, caller=ANONYMOUS)
        assert logs_in(users, name, "other")

    run(create, str(tmp_path / "metadata"))
    run(find, str(tmp_path / "metadata"))


def test_passwords_are_not_accepted_where_others_can_read_them() -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        errors = await users.alter_each(
            [upsertion("alice")], [CredentialDeletion("bob", 1)], is_confidential=False, caller=ANONYMOUS
        )
        assert {type(error) for error in errors.values()} == {PolicyViolation}
        await upsert(users, upsertion("alice"))
        with pytest.raises(PolicyViolation):
            await users.set_password("alice", "p", is_confidential=False, caller=ANONYMOUS)

    run(check)


def test_set_password_keeps_the_salts_and_the_present_password_for_the_given_time() -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        await users.open_directory()
        await upsert(users, upsertion("alice"), upsertion("alice", SHA_512, iterations=5_000))
        before = {one: users.directory.find("alice", one).credential for one in ScramMechanism}
        await users.set_password(
            "alice", "second", previous_valid_ms=60_000, is_confidential=True, caller=ANONYMOUS
        )
        for mechanism, old in before.items():
            new = users.directory.find("alice", mechanism).credential
            assert (new.salt, new.iterations) == (old.salt, old.iterations)
            previous = present(new.previous)
            assert (previous.keys, previous.revision) == (old.keys, old.revision)
            assert previous.valid_until_ms > HostClock().wall_ms()
        assert logs_in(users, "alice", PASSWORD)
        await users.set_password(
            "alice", "third", previous_valid_ms=60_000, is_confidential=True, caller=ANONYMOUS
        )
        assert [logs_in(users, "alice", one) for one in (PASSWORD, "second", "third")] == [False, True, True]
        stored = users.directory.find("alice", SHA_512).credential
        await users.set_password(  # of a client that did not get the answer
            "alice", "third", previous_valid_ms=60_000, is_confidential=True, caller=ANONYMOUS
        )
        assert users.directory.find("alice", SHA_512).credential == stored
        assert [logs_in(users, "alice", one) for one in ("second", "third")] == [True, True]
        await users.set_password("alice", "fourth", is_confidential=True, caller=ANONYMOUS)
        assert [logs_in(users, "alice", one) for one in ("third", "fourth")] == [False, True]
        for wrong in (-1, 366 * 24 * 60 * 60 * 1000):
            with pytest.raises(InvalidRequest):
                await users.set_password(
                    "alice", "p", previous_valid_ms=wrong, is_confidential=True, caller=ANONYMOUS
                )
        with pytest.raises(ResourceNotFound):
            await users.set_password("nobody", "p", is_confidential=True, caller=ANONYMOUS)
        for password in ("", "a\0b", "x" * 1_025):
            with pytest.raises(UnacceptableCredential) as caught:
                await users.set_password("alice", password, is_confidential=True, caller=ANONYMOUS)
            assert not password or password not in reachable_texts(caught.value)

    run(check)


def test_numbers_of_users_and_of_changes_in_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        monkeypatch.setattr(users_module, "USERS_MAX", 2)
        await upsert(users, upsertion("a"), upsertion("b"))
        errors = await users.alter_each(
            [upsertion("c"), upsertion("a")], [], is_confidential=True, caller=ANONYMOUS
        )
        assert isinstance(errors["c"], PolicyViolation)
        assert errors["a"] is None
        deletions = [CredentialDeletion("a", 1)] * 1_001
        errors = await users.alter_each([], deletions, is_confidential=True, caller=ANONYMOUS)
        assert isinstance(errors["a"], PolicyViolation)
        assert users.user_count == 2

    run(check)


def test_concurrent_changes_of_one_user_all_take_effect() -> None:
    async def check(_admin: Admin, users: UserService) -> None:
        await users.open_directory()
        await upsert(users, upsertion("alice"))
        await asyncio.gather(
            upsert(users, upsertion("alice", SHA_512)),
            upsert(users, upsertion("alice", password="two")),
            users.set_password(
                "alice", "three", previous_valid_ms=60_000, is_confidential=True, caller=ANONYMOUS
            ),
        )
        assert users.describe(["alice"], caller=ANONYMOUS) == [
            DescribedUser("alice", {SHA_256: 4_096, SHA_512: 4_096})
        ]

    run(check)


def test_another_view_that_missed_changes_has_the_right_users() -> None:
    async def check(admin: Admin, users: UserService) -> None:
        await upsert(users, upsertion("alice"), upsertion("bob"))
        late = await MetadataImage.load(admin.store, "", HostRandom())
        await users.alter_each(
            [upsertion("alice", SHA_512)],
            [CredentialDeletion("bob", 1)],
            is_confidential=True,
            caller=ANONYMOUS,
        )
        changed: list[str] = []
        late.on_user_change(changed.append)
        late._apply_listing(await admin.store.list(late.keys.prefix))
        assert late.users == admin.state.users
        assert set(changed) == {"alice", "bob"}

    run(check)


@pytest.mark.parametrize(
    "value",
    [
        b'{"schema": 1, "iterations": 4096, "salt": "5a", "stored_key": "53637265", "server_key": "aa"}',
        b'{"schema": 1, "iterations": 4096, "salt": "53637265zz"}',
        b'{"schema": 1, "iterations": "53637265"}',
        b'{"53637265',
        b'{"schema": 1, "secret": "53637265"}',
    ],
)
def test_a_damaged_credential_or_secret_is_reported_without_its_content(value: bytes) -> None:
    async def check(admin: Admin, _users: UserService) -> None:
        keys = admin.state.keys
        key = keys.server_secret if b"secret" in value else keys.credential("alice", SHA_256.value)
        await admin.store.transact([], [Put(key, value)])
        with pytest.raises(StorageError, match="damaged") as caught:
            await MetadataImage.load(admin.store, "", HostRandom())
        assert "53637265" not in reachable_texts(caught.value)

    run(check)


def test_no_representation_shows_a_key_or_the_secret() -> None:
    async def check(admin: Admin, users: UserService) -> None:
        await users.open_directory()
        one = upsertion("alice")
        await upsert(users, one)
        credential = users.directory.find("alice", SHA_256).credential
        secret = present(admin.state.server_secret)
        shown = " ".join(
            map(repr, (admin.state, users.describe(caller=ANONYMOUS), one, credential, users.directory))
        )
        for hidden in (secret, one.salted_password, SALT, *credential.keys):
            assert hidden.hex() not in shown
            assert repr(hidden)[2:-1] not in shown

    run(check)


def test_users_need_the_cluster() -> None:
    async def check(admin: Admin, _: UserService) -> None:
        authorizer = Authorizer()
        users = service_of(admin, authorizer=authorizer)
        alice = Caller(ClientSession("alice"))
        change = CredentialUpsertion("bob", ScramMechanism.SHA_256.kafka_type, 4096, SALT, bytes(32))
        for name in ("bob", "absent"):
            with pytest.raises(ClusterAuthorizationFailed):
                users.describe([name], caller=alice)
            with pytest.raises(ClusterAuthorizationFailed):
                await users.set_password(name, PASSWORD, is_confidential=True, caller=alice)
        errors = await users.alter_each([change], [], is_confidential=True, caller=alice)
        assert isinstance(errors["bob"], ClusterAuthorizationFailed)
        assert users.user_count == 0
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
        assert await users.alter_each([change], [], is_confidential=True, caller=alice) == {"bob": None}
        assert [each.name for each in users.describe(caller=alice)] == ["bob"]

    run(check)
