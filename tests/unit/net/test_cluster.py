"""Routing and retries: retriable errors are retried, others raised immediately."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mansio.errors import (
    ConfigError,
    ConnectionLost,
    GroupIdNotFound,
    LeaderNotAvailable,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from mansio.net.addresses import parse_addresses
from mansio.net.cluster import Cluster, check_top_level_error
from mansio.net.connection import ConnectionOptions
from mansio.net.offsets import commit_offsets, list_offsets
from mansio.net.retry import call_with_retries, client_error_for_code
from mansio.ports import Backoff
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import EARLIEST_TIMESTAMP
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.virtual_time import run_virtually
from unit.net.stub_broker import HANG_UP, SAY_NOTHING, StubBroker

FAST = Backoff(first_ms=1, longest_ms=5)


def cluster_of(*brokers: str, **changes: Any) -> Cluster:
    return Cluster(brokers, options=ConnectionOptions(connect_timeout_ms=2_000), backoff=FAST, **changes)


async def asked_for_metadata(broker: StubBroker) -> None:
    while not broker.asked(ApiKey.METADATA):  # noqa: ASYNC110  # the stub has no event for it
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:1,b:2", [("a", 1), ("b", 2)]),
        (["host"], [("host", 9092)]),
        ("[::1]:19092", [("::1", 19092)]),
        ("[::1]", [("::1", 9092)]),
    ],
)
def test_addresses(given: Any, expected: list[tuple[str, int]]) -> None:
    assert parse_addresses(given) == expected


@pytest.mark.parametrize(
    "given", ["", "::::", "a:b", ":9092", "a:0", "a:70000", "a:²", "a:1,,b:2", "a:1,", "::1", "[]:1", "a b:1"]
)
def test_invalid_addresses_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        parse_addresses(given)


def test_empty_address_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="no broker address"):
        parse_addresses([])


def test_second_bootstrap_address_is_used_when_the_first_is_dead() -> None:
    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:
            cluster = cluster_of("127.0.0.1:1", broker.address)
            await cluster.start()
            assert cluster.cluster_id == "stub"
            await cluster.close()

    asyncio.run(scenario())


def test_unknown_topic_is_retried_for_a_limited_time() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            cluster = cluster_of(broker.address, topic_wait_ms=2_000)
            waiting = asyncio.ensure_future(cluster.topic("late"))
            await asked_for_metadata(broker)
            broker.topics["late"] = 2
            assert len((await waiting).partitions) == 2
            with pytest.raises(UnknownTopicOrPartition, match="missing"):
                await cluster.topic("missing", wait_ms=20)
            await cluster.close()

    asyncio.run(scenario())


def test_concurrent_callers_share_one_metadata_request() -> None:
    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:
            cluster = cluster_of(broker.address)
            await asyncio.gather(*(cluster.topic("t") for _ in range(20)))
            assert len(broker.asked(ApiKey.METADATA)) <= 2
            await cluster.close()

    asyncio.run(scenario())


def test_lost_connection_is_reopened_and_the_request_retried() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            reported: list[Any] = [HANG_UP, HANG_UP, {"error_code": 0, "groups": []}]
            broker.answers[ApiKey.LIST_GROUPS] = lambda request: reported.pop(0)
            cluster = cluster_of(broker.address)
            await cluster.request(ApiKey.LIST_GROUPS, {}, check=check_top_level_error)
            assert not reported
            await cluster.close()

    asyncio.run(scenario())


def test_request_to_a_dead_controller_goes_to_the_next_controller() -> None:
    """The client knew the dead one, and still receives it for a while."""

    async def scenario() -> None:
        async with StubBroker() as broker, StubBroker() as dead:
            controllers = [2, 2, 2, 1]

            def metadata(request: Any) -> dict[str, Any]:
                reported = broker.metadata(request)
                other = {"node_id": 2, "host": "127.0.0.1", "port": dead.port, "rack": None}
                controller = controllers.pop(0) if len(controllers) > 1 else controllers[0]
                return {**reported, "brokers": [*reported["brokers"], other], "controller_id": controller}

            broker.answers[ApiKey.METADATA] = metadata
            broker.answers[ApiKey.LIST_GROUPS] = lambda request: {"error_code": 0, "groups": []}
            cluster = cluster_of(broker.address, retry_timeout_ms=5_000)
            await cluster.start()
            await dead.__aexit__()
            await cluster.request_controller(ApiKey.LIST_GROUPS, {}, check=check_top_level_error)
            assert controllers == [1]
            assert len(broker.asked(ApiKey.LIST_GROUPS)) == 1
            await cluster.close()

    asyncio.run(scenario())


def test_non_retriable_error_is_raised_immediately() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.LIST_GROUPS] = lambda request: {"error_code": 69, "groups": []}
            cluster = cluster_of(broker.address)
            with pytest.raises(GroupIdNotFound):
                await cluster.request(ApiKey.LIST_GROUPS, {}, check=check_top_level_error)
            assert len(broker.asked(ApiKey.LIST_GROUPS)) == 1
            await cluster.close()

    asyncio.run(scenario())


def test_only_failed_partitions_are_retried() -> None:
    async def scenario() -> None:
        async with StubBroker({"t": 2}) as broker:
            moved = [6]  # NOT_LEADER_OR_FOLLOWER, once

            def answer(request: Any) -> dict[str, Any]:
                (topic,) = request.topics
                return {
                    "topics": [
                        {
                            "name": "t",
                            "partitions": [
                                {
                                    "partition_index": p.partition_index,
                                    "error_code": moved.pop() if p.partition_index == 1 and moved else 0,
                                    "timestamp": -1,
                                    "offset": 10 + p.partition_index,
                                    "leader_epoch": 0,
                                }
                                for p in topic.partitions
                            ],
                        }
                    ]
                }

            broker.answers[ApiKey.LIST_OFFSETS] = answer
            cluster = cluster_of(broker.address)
            found = await list_offsets(
                cluster,
                {TopicPartition("t", 0): EARLIEST_TIMESTAMP, TopicPartition("t", 1): EARLIEST_TIMESTAMP},
            )
            assert {partition.partition: entry.offset for partition, entry in found.items()} == {0: 10, 1: 11}
            asked = [
                [p.partition_index for p in r.topics[0].partitions] for r in broker.asked(ApiKey.LIST_OFFSETS)
            ]
            assert asked == [[0, 1], [1]]
            await cluster.close()

    asyncio.run(scenario())


def test_moved_coordinator_is_looked_up_again() -> None:
    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:
            broker.answers[ApiKey.FIND_COORDINATOR] = lambda request: {
                "coordinators": [
                    {"key": "g", "node_id": 1, "host": "127.0.0.1", "port": broker.port, "error_code": 0}
                ]
            }
            codes = [16, 14, 0]  # NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS

            def commit(request: Any) -> dict[str, Any]:
                return {
                    "topics": [
                        {"name": "t", "partitions": [{"partition_index": 0, "error_code": codes.pop(0)}]}
                    ]
                }

            broker.answers[ApiKey.OFFSET_COMMIT] = commit
            cluster = cluster_of(broker.address)
            await commit_offsets(cluster, "g", {TopicPartition("t", 0): 5})
            assert not codes
            assert len(broker.asked(ApiKey.FIND_COORDINATOR)) == 2
            await cluster.close()

    asyncio.run(scenario())


def test_unresponsive_coordinator_is_looked_up_again() -> None:
    """It may be stopped, and its groups at another broker: an open connection proves nothing."""

    async def scenario() -> None:
        async with StubBroker({"t": 1}) as stopped, StubBroker({"t": 1}) as broker:
            ports = [stopped.port, broker.port]
            broker.answers[ApiKey.FIND_COORDINATOR] = lambda request: {
                "coordinators": [
                    {"key": "g", "node_id": 1, "host": "127.0.0.1", "port": ports.pop(0), "error_code": 0}
                ]
            }
            stopped.answers[ApiKey.HEARTBEAT] = lambda request: SAY_NOTHING
            broker.answers[ApiKey.HEARTBEAT] = lambda request: {"error_code": 0}
            cluster = cluster_of(broker.address)
            fields = {"group_id": "g", "generation_id": 1, "member_id": "m", "group_instance_id": None}
            await cluster.request_coordinator(
                "g", ApiKey.HEARTBEAT, fields, check=check_top_level_error, timeout_ms=scaled(0.4) * 1000
            )
            assert len(stopped.asked(ApiKey.HEARTBEAT)) == len(broker.asked(ApiKey.HEARTBEAT)) == 1
            assert not ports
            await cluster.close()

    asyncio.run(scenario())


def test_close_fails_pending_requests_and_opens_no_connection() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            cluster = cluster_of(broker.address)
            waiting = asyncio.ensure_future(cluster.topic("never", wait_ms=60_000))
            await asked_for_metadata(broker)
            await cluster.close()
            with pytest.raises((ConnectionLost, UnknownTopicOrPartition)):
                await waiting
            connections = broker.connections
            with pytest.raises(ConnectionLost):
                await cluster.start()
            assert broker.connections == connections

    asyncio.run(scenario())


def test_retry_timeout_raises_the_last_error() -> None:
    attempts: list[int] = []

    async def attempt() -> None:
        attempts.append(1)
        raise LeaderNotAvailable("no leader")

    async def scenario() -> None:
        with pytest.raises(LeaderNotAvailable, match="no leader"):
            await call_with_retries(attempt, timeout_ms=50, backoff=FAST)

    run_virtually(scenario())  # on a busy machine 50 ms may pass between two attempts
    assert len(attempts) > 3


def test_backoff_grows_to_its_bound() -> None:
    backoff = Backoff(first_ms=10, longest_ms=100, jitter=0)
    assert [backoff.delay_seconds(n) * 1000 for n in (1, 2, 3, 5, 500)] == [10, 20, 40, 100, 100]


def test_codes_without_an_error_class_are_retriable_as_in_the_protocol() -> None:
    assert client_error_for_code(72).retriable
    assert not client_error_for_code(58).retriable
    assert client_error_for_code(83).retriable  # ELIGIBLE_LEADERS_NOT_AVAILABLE
    assert not client_error_for_code(84).retriable  # ELECTION_NOT_NEEDED: nothing will come of waiting
    assert isinstance(client_error_for_code(6), NotLeaderOrFollower)
