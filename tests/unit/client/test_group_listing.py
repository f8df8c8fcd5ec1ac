"""A listing of groups is complete, or reports what is missing, while partitions of `__consumer_offsets` move."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from mansio.client.admin.groups import GroupListings, list_groups
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import Backoff
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from unit.net.stub_broker import HANG_UP, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

OFFSETS_TOPIC = "__consumer_offsets"
NO_LEADER, NO_TOPIC = -1, 3
LOADING = 14
NODES = (1, 2)


class Brokers:
    """Two brokers. `leaders[node]`: the leader and leader epoch of each partition as that broker knows them.
    `groups[node]`: what it lists, or an error code. `on_list` is called before each of its answers."""

    def __init__(self) -> None:
        self.stubs = {node_id: StubBroker() for node_id in NODES}
        self.leaders: dict[int, list[tuple[int, int]]] = {node_id: [(1, 0), (2, 0)] for node_id in NODES}
        self.groups: dict[int, list[str] | int] = {1: ["on-1"], 2: ["on-2"]}
        self.on_list: Callable[[int], object] = lambda _: None
        self.has_topic = True
        for node_id, stub in self.stubs.items():
            stub.answers[ApiKey.METADATA] = partial(self.metadata, node_id)
            stub.answers[ApiKey.LIST_GROUPS] = partial(lambda node_id, _: self.list(node_id), node_id)

    def metadata(self, node_id: int, request: Any) -> dict[str, Any]:
        partitions = [
            {
                "partition_index": index,
                "leader_id": leader,
                "leader_epoch": epoch,
                "replica_nodes": NODES,
                "isr_nodes": NODES,
            }
            for index, (leader, epoch) in enumerate(self.leaders[node_id])
        ]
        topic = {
            "error_code": 0 if self.has_topic else NO_TOPIC,
            "name": OFFSETS_TOPIC,
            "topic_id": None,
            "partitions": partitions if self.has_topic else [],
        }
        assert not request.topics or not request.allow_auto_topic_creation
        return {
            "brokers": [
                {"node_id": node_id, "host": "127.0.0.1", "port": stub.port, "rack": None}
                for node_id, stub in self.stubs.items()
            ],
            "cluster_id": "stub",
            "controller_id": 1,
            "topics": [topic] if request.topics else [],
        }

    def list(self, node_id: int) -> dict[str, Any]:
        self.on_list(node_id)
        groups = self.groups[node_id]
        if isinstance(groups, int):
            return {"error_code": groups, "groups": []}
        return {
            "error_code": 0,
            "groups": [{"group_id": each, "protocol_type": "consumer"} for each in groups],
        }

    def listed(self, timeout_ms: float) -> GroupListings:
        async def scenario() -> GroupListings:
            async with AsyncExitStack() as stack:
                for stub in self.stubs.values():
                    await stack.enter_async_context(stub)
                cluster = Cluster(
                    self.stubs[1].address,
                    options=ConnectionOptions(connect_timeout_ms=2_000),
                    backoff=Backoff(first_ms=1, longest_ms=5),
                )
                try:
                    await cluster.start()
                    return await list_groups(cluster, timeout_ms)
                finally:
                    await cluster.close()

        return asyncio.run(scenario())


def ids(listing: GroupListings) -> list[str]:
    return [group.group_id for group in listing]


def test_groups_of_all_brokers_are_listed_by_id() -> None:
    listing = Brokers().listed(30_000)
    assert (ids(listing), listing.is_complete) == (["on-1", "on-2"], True)


def test_listing_without_the_offsets_topic_is_complete() -> None:
    brokers = Brokers()
    brokers.has_topic = False
    brokers.groups = {1: [], 2: []}
    listing = brokers.listed(30_000)
    assert (ids(listing), listing.is_complete) == ([], True)


def test_partition_without_a_leader_is_retried() -> None:
    brokers = Brokers()
    brokers.leaders = {node_id: [(1, 0), (NO_LEADER, 0)] for node_id in NODES}
    brokers.groups = {1: ["on-1"], 2: []}
    answered: list[int] = []

    def elect(node_id: int) -> None:
        answered.append(node_id)
        if answered.count(1) > 1:
            brokers.leaders = {node_id: [(1, 0), (1, 1)] for node_id in NODES}
            brokers.groups[1] = ["on-1", "on-2"]

    brokers.on_list = elect
    listing = brokers.listed(30_000)
    assert (ids(listing), listing.is_complete) == (["on-1", "on-2"], True)


def test_new_leader_that_is_not_aware_of_its_election_is_retried() -> None:
    """Another broker knows of the election before."""
    brokers = Brokers()
    brokers.leaders = {1: [(1, 0), (2, 1)], 2: [(1, 0), (NO_LEADER, 0)]}
    brokers.groups[2] = []
    answered: list[int] = []

    def learn(node_id: int) -> None:
        answered.append(node_id)
        if answered.count(2) > 1:
            brokers.leaders[2] = [(1, 0), (2, 1)]
            brokers.groups[2] = ["on-2"]

    brokers.on_list = learn
    listing = brokers.listed(30_000)
    assert (ids(listing), listing.is_complete) == (["on-1", "on-2"], True)


def test_loading_broker_is_retried() -> None:
    brokers = Brokers()
    brokers.groups[2] = LOADING
    answered: list[int] = []

    def load(node_id: int) -> None:
        answered.append(node_id)
        if answered.count(2) > 2:
            brokers.groups[2] = ["on-2"]

    brokers.on_list = load
    listing = brokers.listed(30_000)
    assert (ids(listing), listing.is_complete) == (["on-1", "on-2"], True)


def test_partition_that_moves_during_the_listing_is_listed_again() -> None:
    """Its old leader listed its groups no more, its new leader not yet."""
    brokers = Brokers()
    brokers.groups[2] = []
    asked: list[int] = []

    def move(node_id: int) -> None:
        asked.append(node_id)
        if node_id == 2:
            brokers.leaders = {each: [(1, 0), (1, 1)] for each in NODES}
        if asked.count(1) > 1:
            brokers.groups[1] = ["on-1", "on-2"]

    brokers.on_list = move
    listing = brokers.listed(30_000)
    assert (ids(listing), listing.is_complete) == (["on-1", "on-2"], True)


def test_incomplete_listing_reports_the_partitions_without_a_leader() -> None:
    brokers = Brokers()
    brokers.leaders = {node_id: [(1, 0), (NO_LEADER, 0)] for node_id in NODES}
    brokers.groups[2] = []
    listing = brokers.listed(scaled(500))
    assert ids(listing) == ["on-1"]
    assert (listing.unreachable, listing.missing_partitions, listing.is_complete) == ((), (1,), False)


def test_listing_without_a_broker_reports_it_and_its_partitions() -> None:
    brokers = Brokers()
    brokers.stubs[2].answers[ApiKey.LIST_GROUPS] = lambda _: HANG_UP
    listing = brokers.listed(scaled(500))
    assert ids(listing) == ["on-1"]
    assert (listing.unreachable, listing.missing_partitions, listing.is_complete) == ((2,), (1,), False)


def test_incomplete_listing_is_returned_if_no_broker_responds_to_a_later_attempt() -> None:
    brokers = Brokers()
    brokers.leaders = {node_id: [(1, 0), (NO_LEADER, 0)] for node_id in NODES}
    brokers.groups[2] = []
    answered: list[int] = []

    def hang_up_afterwards(node_id: int) -> None:
        answered.append(node_id)
        if set(answered) == set(NODES):
            for stub in brokers.stubs.values():
                stub.answers[ApiKey.LIST_GROUPS] = lambda _: HANG_UP

    brokers.on_list = hang_up_afterwards
    listing = brokers.listed(scaled(500))
    assert (ids(listing), listing.missing_partitions) == (["on-1"], (1,))
