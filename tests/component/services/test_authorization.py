"""What ACLs allow is durable, the same on every broker, and in force when a change is answered."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.services import acls as acl_service
from mansio.broker.services.acls import ACLS_MAX, AclService, follow_acls
from mansio.broker.services.authorization import Authorization
from mansio.config.item_limit import ITEMS_MAX
from mansio.errors import (
    ClusterAuthorizationFailed,
    InvalidRequest,
    PolicyViolation,
    SecurityDisabled,
    StorageError,
    TopicAuthorizationFailed,
    Unavailable,
)
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock, HostRandom
from mansio.host.item_turns import ITEMS_PER_TURN, ItemTurns
from mansio.metadata.acls import acl_document, acl_key, decode_acl
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Delete, Keys, Put, encode
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.state.authorization.authorizer import Authorizer
from mansio.testing.metadata import InMemoryStore
from support.authorization import ADMIN, ALICE
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from mansio.testing.metadata import InMemoryStoreClient


def may(name: str, principal: str = "User:alice", operation: Operation = Operation.READ) -> Acl:
    return Acl(
        ResourceType.TOPIC, PatternType.LITERAL, name, principal, WILDCARD, operation, Permission.ALLOW
    )


class Broker(NamedTuple):
    """The authorization of one broker of a cluster."""

    scheduler: AsyncioScheduler
    client: InMemoryStoreClient
    state: MetadataImage
    asked: Authorization
    acls: AclService


async def stored(broker: Broker) -> list[Acl]:
    return await broker.acls.describe(AclFilter(), caller=ADMIN)


@asynccontextmanager
async def broker_of(store: InMemoryStore, scheduler: AsyncioScheduler) -> AsyncIterator[Broker]:
    client = store.store_client(scheduler)
    state = await MetadataImage.load(client, "", HostRandom())
    authorizer = Authorizer(["User:admin"])
    follow_acls(state, authorizer)
    asked = Authorization(authorizer)
    service = AclService(asked, store=client, state=state, scheduler=scheduler, random=HostRandom())
    state.start(client, scheduler, shared=True)
    try:
        yield Broker(scheduler, client, state, asked, service)
    finally:
        state.stop()
        await client.close()


def run(check: Callable[[Broker, Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        store = InMemoryStore(HostClock(), scheduler)
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            broker_of(store, scheduler) as one,
            broker_of(store, scheduler) as other,
        ):
            await check(one, other)

    asyncio.run(main())


def test_an_acl_is_in_force_on_this_broker_when_answered_and_on_the_others_after_its_revision() -> None:
    async def check(one: Broker, other: Broker) -> None:
        asked = (Operation.READ, ResourceType.TOPIC, "orders")
        with pytest.raises(TopicAuthorizationFailed):
            one.asked.check(ALICE, *asked)
        one.asked.check(ADMIN, *asked)
        before = one.asked.revision

        assert await one.acls.create_each([may("orders")], caller=ADMIN) == [None]
        one.asked.check(ALICE, *asked)
        assert one.asked.revision > before
        await other.state.wait_for_revision(one.state.revision, one.scheduler)
        other.asked.check(ALICE, *asked)
        assert other.asked.allowed_names(ALICE, Operation.DESCRIBE, ResourceType.TOPIC, ["x", "orders"]) == [
            "orders"
        ]

        assert await other.acls.delete_each([AclFilter(principal="User:alice")], caller=ADMIN) == [
            [may("orders")]
        ]
        assert not other.asked.allows(ALICE, *asked)
        await one.state.wait_for_revision(other.state.revision, one.scheduler)
        assert not one.asked.allows(ALICE, *asked)
        assert one.acls.acl_count == 0

    run(check)


def test_a_broker_that_starts_later_has_the_acls_of_the_store() -> None:
    async def check(one: Broker, other: Broker) -> None:
        await one.acls.create_each([may("orders"), may("payments", "User:bob")], caller=ADMIN)
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        async with broker_of(one.client.store, scheduler) as third:
            assert await stored(third) == sorted([may("orders"), may("payments", "User:bob")])
            assert third.asked.allows(ALICE, Operation.READ, ResourceType.TOPIC, "orders")
        del other

    run(check)


def test_creating_an_acl_twice_changes_nothing() -> None:
    async def check(one: Broker, other: Broker) -> None:
        await one.acls.create_each([may("orders")], caller=ADMIN)
        await other.state.wait_for_revision(one.state.revision, one.scheduler)
        revision = one.asked.revision
        assert await one.acls.create_each([may("orders"), may("orders")], caller=ADMIN) == [None, None]
        assert one.asked.revision == revision
        assert await stored(one) == await stored(other) == [may("orders")]

    run(check)


def test_a_broker_that_has_not_learned_a_change_yet_does_not_lose_one_that_it_answers() -> None:
    async def check(one: Broker, other: Broker) -> None:
        orders, payments = may("orders"), may("payments")
        await one.acls.create_each([orders], caller=ADMIN)
        store, keys = one.client.store, one.state.keys

        store.transact([], [Delete(acl_key(keys, orders))])
        assert await stored(one) == [orders], "the broker has not learned it"
        assert await one.acls.create_each([orders], caller=ADMIN) == [None]
        await one.state.wait_for_revision(store.revision, one.scheduler)
        assert await stored(one) == [orders]

        store.transact([], [Put(acl_key(keys, payments), encode(acl_document(payments), "w"))])
        assert await stored(one) == [orders], "the broker has not learned it"
        assert await one.acls.delete_each([AclFilter(name="payments")], caller=ADMIN) == [[payments]]
        await other.state.wait_for_revision(store.revision, one.scheduler)
        assert await stored(one) == await stored(other) == [orders]

    run(check)


def test_more_acls_than_one_transaction_has_operations_are_changed_by_one_request() -> None:
    async def check(one: Broker, other: Broker) -> None:
        acls = [may(f"topic{number}") for number in range(ITEMS_MAX)]
        assert await one.acls.create_each(acls, caller=ADMIN) == [None] * ITEMS_MAX
        assert one.acls.acl_count == ITEMS_MAX
        (deleted,) = await one.acls.delete_each([AclFilter()], caller=ADMIN)
        assert deleted == sorted(acls)
        assert one.acls.acl_count == 0
        del other

    run(check)


def test_filters_of_one_request_report_what_each_selects() -> None:
    async def check(one: Broker, other: Broker) -> None:
        await one.acls.create_each([may("a"), may("b"), may("c")], caller=ADMIN)
        bad = AclFilter(operation=99)
        answers = await one.acls.delete_each(
            [AclFilter(name="a"), bad, AclFilter(name="a"), AclFilter(name="z")], caller=ADMIN
        )
        assert answers[0] == answers[2] == [may("a")]
        assert isinstance(answers[1], InvalidRequest)
        assert answers[3] == []
        assert await stored(one) == [may("b"), may("c")]
        del other

    run(check)


def test_filters_that_select_too_much_together_delete_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(one: Broker, other: Broker) -> None:
        await one.acls.create_each([may("a"), may("b")], caller=ADMIN)
        monkeypatch.setattr(acl_service, "ACLS_MAX", 3)
        answers = await one.acls.delete_each([AclFilter(), AclFilter()], caller=ADMIN)
        assert [type(each) for each in answers] == [PolicyViolation] * 2
        assert await stored(one) == [may("a"), may("b")]
        assert await one.acls.delete_each([AclFilter()], caller=ADMIN) == [[may("a"), may("b")]]
        del other

    run(check)


def test_a_lost_answer_of_the_store_is_repeated_and_an_unreachable_store_is_reported() -> None:
    async def check(one: Broker, other: Broker) -> None:
        one.client.lost_response_count = 1
        assert await one.acls.create_each([may("a")], caller=ADMIN) == [None]
        one.client.unreachable = True
        (error,) = await one.acls.create_each([may("b")], caller=ADMIN)
        assert isinstance(error, Unavailable)
        (answer,) = await one.acls.delete_each([AclFilter(name="a")], caller=ADMIN)
        assert isinstance(answer, Unavailable)
        one.client.unreachable = False
        assert await stored(one) == [may("a")]
        del other

    run(check)


def test_only_who_may_alter_the_cluster_changes_acls() -> None:
    async def check(one: Broker, other: Broker) -> None:
        may_describe, may_alter = (
            Acl(
                ResourceType.CLUSTER,
                PatternType.LITERAL,
                CLUSTER_NAME,
                "User:alice",
                WILDCARD,
                operation,
                Permission.ALLOW,
            )
            for operation in (Operation.DESCRIBE, Operation.ALTER)
        )
        with pytest.raises(ClusterAuthorizationFailed):
            await one.acls.describe(AclFilter(), caller=ALICE)
        await one.acls.create_each([may_describe], caller=ADMIN)
        assert await one.acls.describe(AclFilter(), caller=ALICE) == [may_describe]
        (error,) = await one.acls.create_each([may_alter], caller=ALICE)
        assert isinstance(error, ClusterAuthorizationFailed)
        (answer,) = await one.acls.delete_each([AclFilter()], caller=ALICE)
        assert isinstance(answer, ClusterAuthorizationFailed)
        assert one.acls.acl_count == 1
        await one.acls.create_each([may_alter], caller=ADMIN)
        assert await one.acls.create_each([may("a")], caller=ALICE) == [None]
        del other

    run(check)


@pytest.mark.parametrize("principal", [None, "User:alice"])
def test_a_filter_selects_the_acls_of_one_moment_while_other_work_runs(principal: str | None) -> None:
    async def check(one: Broker, other: Broker) -> None:
        keys = one.state.keys
        known = [may(f"topic{number}") for number in range(4 * ITEMS_PER_TURN)]
        for acl in known:  # as if so many were stored
            one.state.acls[acl_key(keys, acl)] = acl
            one.asked.authorizer.add(acl)
        late = may("added meanwhile")
        others = 0

        async def interfere() -> None:
            nonlocal others
            while True:
                one.state.acls[acl_key(keys, late)] = late
                one.asked.authorizer.add(late)
                one.state.acls.pop(acl_key(keys, known[others % len(known)]), None)
                others += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(one.acls.describe(AclFilter(principal=principal), caller=ADMIN))
        await asyncio.sleep(0)
        interfering = asyncio.create_task(interfere())
        assert await working == sorted(known)
        interfering.cancel()
        assert others >= 2 * 3, "other work has run in between"
        del other

    run(check)


def test_requests_and_acls_are_bounded() -> None:
    async def check(one: Broker, other: Broker) -> None:
        too_many = [may(f"topic{number}") for number in range(ITEMS_MAX + 1)]
        assert all(
            isinstance(error, PolicyViolation) for error in await one.acls.create_each(too_many, caller=ADMIN)
        )
        answers = await one.acls.delete_each([AclFilter()] * (ITEMS_MAX + 1), caller=ADMIN)
        assert all(isinstance(answer, PolicyViolation) for answer in answers)
        for number in range(ACLS_MAX):
            one.state.acls[str(number)] = may("x")  # as if so many were stored
        (error,) = await one.acls.create_each([may("one-more")], caller=ADMIN)
        assert isinstance(error, PolicyViolation)
        assert str(ACLS_MAX) in error.message
        del other

    run(check)


def test_without_an_authorizer_everything_is_allowed_and_acls_are_refused() -> None:
    async def check(one: Broker, other: Broker) -> None:
        nothing = Authorization(None)
        acls = AclService(
            nothing, store=one.client, state=one.state, scheduler=one.scheduler, random=HostRandom()
        )
        assert nothing.allows(ALICE, Operation.DELETE, ResourceType.TOPIC, "orders")
        assert nothing.allowed_names(ALICE, Operation.READ, ResourceType.TOPIC, ["a", "b"]) == ["a", "b"]
        assert nothing.allows_any(ALICE, Operation.WRITE, ResourceType.TOPIC)
        with pytest.raises(SecurityDisabled):
            await acls.describe(AclFilter(), caller=ALICE)
        (error,) = await acls.create_each([may("a")], caller=ALICE)
        assert isinstance(error, SecurityDisabled)
        (answer,) = await acls.delete_each([AclFilter()], caller=ALICE)
        assert isinstance(answer, SecurityDisabled)
        del other

    run(check)


def test_a_damaged_acl_ends_the_broker_rather_than_allow_what_it_denied() -> None:
    keys = Keys("c")
    document = acl_document(may("a"))
    assert decode_acl("k", document) == may("a")
    for damaged in ({**document, "permission": "MAYBE"}, {**document, "operation": 3}, {}):
        with pytest.raises(StorageError, match="damaged"):
            decode_acl("k", damaged)
    assert acl_key(keys, may("a")) == acl_key(keys, may("a")) != acl_key(keys, may("b"))


texts = st.text(min_size=1, max_size=8)
acls = st.builds(
    Acl,
    st.sampled_from(list(ResourceType)),
    st.sampled_from(list(PatternType)),
    texts,
    texts,
    texts,
    st.sampled_from(list(Operation)),
    st.sampled_from(list(Permission)),
)


@settings(max_examples=200)
@given(one=acls, other=acls)
def test_each_acl_has_a_key_of_its_own_and_survives_storing(one: Acl, other: Acl) -> None:
    keys = Keys("c")
    assert decode_acl("k", acl_document(one)) == one
    assert (acl_key(keys, one) == acl_key(keys, other)) == (one == other)


@pytest.mark.parametrize("allow_everyone", [False, True])
@pytest.mark.parametrize("denied", [None, "topic-7", WILDCARD])
def test_many_names_are_chosen_in_turns_as_they_are_at_once(allow_everyone: bool, denied: str | None) -> None:
    authorizer = Authorizer(["User:admin"], allow_everyone_if_no_acl_found=allow_everyone)
    names = [f"topic-{number}" for number in range(3 * ITEMS_PER_TURN)]
    for number in range(0, len(names), 3):
        authorizer.add(may(names[number]))
        authorizer.add(may(names[number + 1], "User:bob"))
    authorizer.add(may("topic-70")._replace(pattern_type=PatternType.PREFIXED))
    if denied is not None:
        authorizer.add(may(denied)._replace(permission=Permission.DENY))
    authorization = Authorization(authorizer)
    wanted = Operation.READ, ResourceType.TOPIC

    async def work() -> None:
        others = 0

        async def take_turns() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(take_turns())
        for caller in (ALICE, ADMIN):
            turns = ItemTurns(AsyncioScheduler(asyncio.get_running_loop()))
            found = await authorization.allowed_names_in_turns(caller, *wanted, names, turns)
            expected = [name for name in names if authorization.allows(caller, *wanted, name)]
            assert found == expected
        task.cancel()
        assert others >= 2 * 3, "other work has run in between"

    asyncio.run(work())
