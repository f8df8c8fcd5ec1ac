"""The feature level of a cluster: what may be written below it, when it may be raised, and that it is never lowered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mansio.config.settings import Settings
from mansio.errors import FeatureNotFinalized, FeatureUpdateFailed, InvalidUpdateVersion, StorageError
from mansio.metadata import metadata_store
from mansio.metadata.feature_level import (
    CURRENT_LEVEL,
    FIRST_RELEASE,
    SUPPORTED,
    FeatureUpdate,
    LevelRange,
    check_operations,
    check_update,
)
from mansio.metadata.image import MetadataImage, find_or_create_cluster
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Delete, Keys, Put, decode, encode
from mansio.metadata.model import BROKER_FENCED
from mansio.node.cluster_bootstrap import check_feature_level
from mansio.wire.features import FIRST_LEVEL, UPGRADE, VERSION_FEATURE
from support.brokers import CLUSTER_ID, TTL_S, Cluster
from support.virtual_time import SeededRandom, run_virtually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.metadata.metadata_store import Compare, TransactionResult
    from support.brokers import Member

KEYS: Final = Keys(CLUSTER_ID)
RAISE: Final = [FeatureUpdate(VERSION_FEATURE, CURRENT_LEVEL)]
FIRST_RELEASE_KEYS: Final = frozenset(
    {
        "broker_configs",
        "brokers",
        "controller",
        "format",
        "group_configs",
        "partitions",
        "prefix",
        "producer_ids",
        "progress",
        "quotas",
        "secret",
        "topics",
    }
)
"""The kinds of keys that 0.1.0 has."""


def put(key: str, **document: Any) -> Put:
    return Put(key, encode(document, "w"))


def partition(adding: Sequence[int] = (), removing: Sequence[int] = ()) -> Put:
    return put(f"{KEYS.partitions}id/0", adding=adding, removing=removing)


NEWER: Final[dict[str, tuple[Put, str]]] = {
    "user": (put(KEYS.credential("alice", "SCRAM-SHA-256")), "users"),
    "acl": (put(f"{KEYS.acls}0"), "access control lists"),
    "API key": (put(KEYS.user_api_keys("alice")), "API keys"),
    "key of SQS": (put(KEYS.sqs_access_key("K")), "access keys of SQS"),
    "token": (put(KEYS.token("T")), "delegation tokens"),
    "server secret": (put(KEYS.server_secret), "authentication of clients"),
    "move": (partition(adding=[4]), "moves of partitions"),
    "end of a move": (partition(removing=[1]), "moves of partitions"),
    "delays": (put(KEYS.topic("t"), configs={"mansio.delay.enable": "true"}), "mansio.delay.enable"),
    "transactions": (put(KEYS.topic("__transaction_state"), configs={}), "transactions"),
    "schemas": (put(KEYS.topic("_schemas"), configs={}, internal=True), "schema registry"),
    "key order": (put(KEYS.group_config("g"), configs={"mansio.share.order": "KEY"}), "mansio.share.order"),
    "rate by key": (put(KEYS.group_config("g"), configs={"mansio.share.key.rate": "1"}), "key.rate"),
    "one delivery": (put(KEYS.group_config("g"), configs={"share.delivery.count.limit": "1"}), "limit=1"),
    "default": (put(KEYS.broker_config(""), configs={"mansio.dedup.ms": "5"}), "mansio.dedup.ms"),
    "locks": (
        put(KEYS.broker_config("1"), configs={"group.share.partition.max.record.locks": "9"}),
        "max.record.locks",
    ),
}

KNOWN: Final[dict[str, Put | Delete]] = {
    "topic": put(KEYS.topic("t"), configs={"retention.ms": "5", "mansio.hold.enable": "true"}),
    "schemas of another registry": put(KEYS.topic("_schemas"), configs={}, internal=False),
    "partition": partition(),
    "group": put(KEYS.group_config("g"), configs={"share.delivery.count.limit": "7"}),
    "broker": put(KEYS.broker_config(""), configs={"log.retention.ms": "7"}),
    "registration": put(KEYS.registration(1), state="active", levels=[1, 2]),
    "quota": put(f"{KEYS.quotas}user", entity={}, values={}),
    "secret": put(KEYS.secret, secret="00"),
    "deletion": Delete(KEYS.credential("alice", "SCRAM-SHA-256")),
}


# What may be written


@pytest.mark.parametrize("name", NEWER)
def test_what_the_first_release_would_misread_is_written_at_the_level_of_this_version_only(name: str) -> None:
    operation, what = NEWER[name]
    with pytest.raises(FeatureNotFinalized, match=rf"{what}.*run 'mansio cluster finalize'") as caught:
        check_operations(FIRST_LEVEL, [KNOWN["topic"], operation])
    assert "\n" not in str(caught.value)
    check_operations(CURRENT_LEVEL, [operation])


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_first_release_reads_is_written_at_any_level(name: str) -> None:
    check_operations(FIRST_LEVEL, [KNOWN[name]])


def test_each_kind_of_key_is_one_of_the_first_release_or_is_not_written_below_the_level_of_this_version() -> (
    None
):
    """A new kind of key needs a decision: what does a broker that does not know it do?"""
    for name in set(Keys.__slots__) - FIRST_RELEASE_KEYS - {"cluster_id", "feature_level"}:
        with pytest.raises(FeatureNotFinalized):
            check_operations(FIRST_LEVEL, [put(f"{getattr(KEYS, name)}")])


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"listener_security_protocol_map": "PLAINTEXT:SASL_PLAINTEXT"},
            "listeners: PLAINTEXT authenticates",
        ),
        ({"authorizer": "acl", "super_users": "User:ANONYMOUS"}, "authorizer: acl"),
        ({"topic_defaults": {"mansio.delay.enable": "true"}}, "topic_defaults: setting mansio.delay.enable"),
        ({"topic_defaults": {"retention.ms": "1000"}}, None),
    ],
)
def test_broker_that_would_be_safe_alone_is_not_started_beside_one_of_the_first_release(
    settings: dict[str, Any], refusal: str | None
) -> None:
    known = Settings(
        node_id=1,
        etcd_endpoints="http://127.0.0.1:2379",
        listeners="127.0.0.1:9092",
        http_listener="",
        **settings,
    )
    check_feature_level(known, CURRENT_LEVEL)
    if refusal is None:
        check_feature_level(known, FIRST_LEVEL)
        return
    with pytest.raises(FeatureNotFinalized, match=refusal):
        check_feature_level(known, FIRST_LEVEL)


# When it may be raised

ranges: Final = st.tuples(st.integers(1, 3), st.integers(1, 4)).map(
    lambda both: LevelRange(min(both), max(both))
)


@given(
    st.integers(1, CURRENT_LEVEL),
    st.integers(-1, 4),
    st.integers(0, 4),
    st.dictionaries(st.integers(1, 5), ranges),
)
@example(1, 2, 2, {1: SUPPORTED})
def test_level_is_raised_only_to_one_that_every_registered_broker_supports(
    current: int, wanted: int, update_type: int, brokers: dict[int, LevelRange]
) -> None:
    is_supported = SUPPORTED.supports(wanted) and all(each.supports(wanted) for each in brokers.values())
    is_due = current < wanted and is_supported and update_type == UPGRADE
    if is_due or wanted == current:
        found = check_update(VERSION_FEATURE, wanted, update_type, current=current, brokers=brokers)
        assert found == is_due
        return
    with pytest.raises(InvalidUpdateVersion) as caught:
        check_update(VERSION_FEATURE, wanted, update_type, current=current, brokers=brokers)
    assert caught.value.kafka_code == 95
    assert "\n" not in caught.value.message


def test_no_other_feature_is_changed() -> None:
    assert not check_update("transaction.version", 2, UPGRADE, current=1, brokers={})
    for feature, level in (("transaction.version", 1), ("metadata.version", 2), ("", 1)):
        with pytest.raises(InvalidUpdateVersion, match=r"only mansio\.version"):
            check_update(feature, level, UPGRADE, current=1, brokers={})


# In the metadata store


def run(check: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            await check(cluster)
        finally:
            await cluster.stop()

    run_virtually(main())


async def created_by_the_first_release(cluster: Cluster) -> None:
    await find_or_create_cluster(cluster.store.store_client(), CLUSTER_ID, SeededRandom(5))


async def upgraded(cluster: Cluster) -> None:
    """Three brokers of this version in a cluster that 0.1.0 has created."""
    await created_by_the_first_release(cluster)
    await cluster.start(1, 2, 3)
    for member in cluster.alive():
        await member.registered()
    await cluster.until(lambda: len(cluster.controllers()) == 1)


async def register_as_the_first_release(cluster: Cluster, node_id: int, state: str = "active") -> None:
    client = cluster.store.store_client()
    await client.transact([], [put(KEYS.registration(node_id), state=state)])


def levels(cluster: Cluster) -> set[int]:
    return {member.state.feature_level for member in cluster.alive()}


async def refused(member: Member, match: str) -> None:
    for validate_only in (True, False):
        with pytest.raises(InvalidUpdateVersion, match=match):
            await member.controller.update_features(RAISE, validate_only=validate_only)


def test_new_cluster_has_the_level_of_the_version_that_creates_it() -> None:
    async def check(cluster: Cluster) -> None:
        await cluster.start(1)
        assert cluster.brokers[1].state.feature_level == CURRENT_LEVEL
        stored = await cluster.store.store_client().get(KEYS.feature_level)
        assert stored is not None
        assert json.loads(stored.value)["schema"] == CURRENT_LEVEL

    run(check)


def test_level_is_raised_once_all_brokers_support_it_and_every_broker_learns_of_it() -> None:
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        assert levels(cluster) == {FIRST_LEVEL}
        await cluster.brokers[2].controller.update_features(RAISE, validate_only=True)
        assert levels(cluster) == {FIRST_LEVEL}
        await cluster.brokers[2].controller.update_features(RAISE, validate_only=False)
        assert cluster.brokers[2].state.feature_level == CURRENT_LEVEL
        await cluster.until(lambda: levels(cluster) == {CURRENT_LEVEL})
        revisions = {member.state.feature_revision for member in cluster.alive()}
        assert len(revisions) == 1
        assert 0 not in revisions
        await cluster.brokers[1].controller.update_features(RAISE, validate_only=False)
        assert {member.state.feature_revision for member in cluster.alive()} == revisions
        with pytest.raises(InvalidUpdateVersion, match="no way back"):
            await cluster.brokers[1].controller.update_features(
                [FeatureUpdate(VERSION_FEATURE, FIRST_LEVEL, 3)], validate_only=False
            )

    run(check)


@pytest.mark.parametrize("state", ["active", "draining", "fenced"])
def test_level_is_not_raised_while_an_older_broker_is_registered_whatever_its_state(state: str) -> None:
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        await register_as_the_first_release(cluster, 4, state)
        await refused(cluster.brokers[1], "broker 4 supports 1; upgrade it, or unregister it")
        if state == BROKER_FENCED:
            await cluster.brokers[1].controller.unregister(4)
            await cluster.brokers[1].controller.update_features(RAISE, validate_only=False)
            await cluster.until(lambda: levels(cluster) == {CURRENT_LEVEL})

    run(check)


def test_broker_that_died_is_known_with_the_levels_of_its_last_registration() -> None:
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        await cluster.brokers[3].kill()
        state = cluster.brokers[1].state
        await cluster.until(lambda: state.registrations[3].state == BROKER_FENCED, within_s=5 * TTL_S)
        assert state.registrations[3].levels == SUPPORTED
        await cluster.brokers[1].controller.update_features(RAISE, validate_only=False)
        assert state.feature_level == CURRENT_LEVEL

    run(check)


def before_each_transaction(member: Member, change: Callable[[], Awaitable[None]], times: int) -> None:
    """Another broker is faster than the transaction that would raise the level."""
    left, original = [change] * times, member.store_client.transact

    async def transact(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TransactionResult:
        if left and any(operation.key == KEYS.feature_level for operation in operations):
            await left.pop()()
        return await original(compares, operations)

    member.store_client.transact = transact


def test_older_broker_that_takes_the_place_of_a_known_one_just_before_the_level_is_stored_prevents_that() -> (
    None
):
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        await cluster.brokers[3].terminate()
        member = cluster.brokers[1]
        before_each_transaction(member, lambda: register_as_the_first_release(cluster, 3), 1)
        with pytest.raises(InvalidUpdateVersion, match="broker 3 supports 1"):
            await member.controller.update_features(RAISE, validate_only=False)
        assert levels(cluster) == {FIRST_LEVEL}

    run(check)


def test_registrations_that_never_stop_to_change_end_the_attempt() -> None:
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        member = cluster.brokers[1]

        async def register_again() -> None:
            document = put(KEYS.registration(9), state="fenced", levels=[1, 2])
            await cluster.store.store_client().transact([], [document])

        await register_again()
        before_each_transaction(member, register_again, CONFLICT_ATTEMPTS_MAX)
        with pytest.raises(FeatureUpdateFailed):
            await member.controller.update_features(RAISE, validate_only=False)
        await member.controller.update_features(RAISE, validate_only=False)
        assert member.state.feature_level == CURRENT_LEVEL

    run(check)


def test_cluster_of_a_development_version_with_users_gets_its_level_at_the_next_start() -> None:
    async def check(cluster: Cluster) -> None:
        await created_by_the_first_release(cluster)
        client = cluster.store.store_client()
        await client.transact([], [NEWER["one delivery"][0]])
        state = await MetadataImage.load(
            cluster.store.store_client(), CLUSTER_ID, SeededRandom(6), has_feature_level=True
        )
        assert state.feature_level == CURRENT_LEVEL

    run(check)


def test_broker_without_a_range_in_its_registration_supports_the_first_level_only() -> None:
    async def check(cluster: Cluster) -> None:
        await upgraded(cluster)
        await register_as_the_first_release(cluster, 7)
        state = cluster.brokers[1].state
        await cluster.until(lambda: 7 in state.registrations)
        assert state.registrations[7].levels == FIRST_RELEASE

    run(check)


def test_version_that_does_not_support_a_level_cannot_read_the_key_that_has_it() -> None:
    later = encode({"level": CURRENT_LEVEL + 1}, "w", schema=CURRENT_LEVEL + 1)
    with pytest.raises(StorageError, match=f"schema {CURRENT_LEVEL + 1}; this version supports 1 to 2"):
        decode(KEYS.feature_level, later)
    assert metadata_store.SCHEMA_VERSION < CURRENT_LEVEL, "0.1.0 reads schema 1 only"
