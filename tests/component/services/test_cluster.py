"""Cluster description service without any wire protocol."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.topics.topics import NewTopic
from mansio.errors import InvalidRequest, InvalidTopic, UnknownTopicOrPartition
from mansio.host.item_turns import ItemTurns
from support.listeners import served_listener

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.cluster import Cursor

LISTENER = ("broker.example", 19092)


def test_a_single_node_is_its_own_controller_at_the_address_of_the_listener(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        described = services.cluster_description.describe(served_listener(*LISTENER, node_id=7, rack="east"))
        (broker,) = described.brokers
        assert (broker.node_id, broker.host, broker.port, broker.rack) == (7, *LISTENER, "east")
        assert described.controller_id == 7
        assert described.cluster_id
        assert described.live_broker_ids == {7}
        assert list(described.fenced) == []
        assert services.cluster_description.controller_request_target(described) == 7
        assert services.cluster is None

    run(tmp_path, work, node_id=7, broker_rack="east")


def test_topics_are_described_in_pages(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("a", 3))
        describe = partial(
            services.cluster_description.describe_topics,
            turns=ItemTurns(services.scheduler),
            caller=ANONYMOUS,
        )
        seen: list[tuple[str, int]] = []
        cursor: Cursor | None = None
        pages = 0
        while True:
            page = await describe((), cursor=cursor, partitions_max=2)
            seen += [(one.name, index) for one in page.topics for index in one.partitions]
            pages += 1
            cursor = page.next_cursor
            if cursor is None:
                break
        assert seen == [("a", 0), ("a", 1), ("a", 2), ("t", 0), ("t", 1)]
        assert pages == 3
        skipped = await describe((), cursor=("deleted", 4), partitions_max=100)
        assert [one.name for one in skipped.topics] == ["t"]

    run(tmp_path, work)


def test_each_topic_fails_on_its_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        describe = partial(
            services.cluster_description.describe_topics,
            turns=ItemTurns(services.scheduler),
            caller=ANONYMOUS,
        )
        page = await describe(["t", "none", "no/name"], partitions_max=100)
        assert [(one.name, type(one.error)) for one in page.topics] == [
            ("no/name", InvalidTopic),
            ("none", UnknownTopicOrPartition),
            ("t", type(None)),
        ]
        assert page.next_cursor is None
        with pytest.raises(InvalidRequest):
            await describe((), cursor=("t", -1))

    run(tmp_path, work)
