"""Publishers of a broker: with the rights of a broker, they do nothing but publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.broker.routing.caller import Caller, ClientSession
from mansio.testing.broker import TestBroker
from support.tiers import smoke_first

if TYPE_CHECKING:
    from mansio.client import Client


@pytest.mark.parametrize("super_users", smoke_first("User:admin", ""))
def test_a_publisher_does_not_create_the_topic_that_was_deleted(super_users: str) -> None:
    settings = {"authorizer": "acl", "super_users": super_users} if super_users else {}
    with TestBroker(auto_create_topics_enable=True, **settings) as broker:
        routed = broker._running().clients
        assert routed is not None
        caller = Caller(ClientSession("admin"))

        async def creates(client: Client) -> bool:
            await client._cluster.refresh_metadata(["deleted"])
            return "deleted" in broker._running().service.topics.state.topics

        async def scenario() -> list[bool]:
            with routed.publisher(caller) as publisher:
                return [await creates(publisher), await creates(routed.client(caller))]

        assert broker._run_on_loop(scenario()) == [False, True], "the client may, the publisher may not"
