"""Publishers: one for each identity while there is an authorizer, and not more of them than are used."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mansio.api.routing import routed_clients
from mansio.api.routing.routed_clients import RoutedClients
from mansio.broker.routing.caller import Caller, ClientSession
from mansio.broker.services.authorization import Authorization
from mansio.client.client import Client
from mansio.state.authorization.authorizer import Authorizer
from support.virtual_time import run_virtually

OWN: Any = SimpleNamespace(endpoint=SimpleNamespace(host="127.0.0.1", port=9092))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    """The clients that were closed, in their order."""
    found: list[Client] = []

    async def close(self: Client, **_: Any) -> None:
        found.append(self)

    monkeypatch.setattr(Client, "close", close)
    return found


def clients(authorizer: Authorizer | None) -> RoutedClients:
    service = SimpleNamespace(authorization=Authorization(authorizer), clock=None, scheduler=None)
    server: Any = SimpleNamespace(service=service, inter_broker_listener=OWN)
    return RoutedClients(server, None)


def caller(user: str, address: str = "10.0.0.1", client_id: str = "id", expires_ms: int = 1) -> Caller:
    return Caller(ClientSession(user, expires_ms=expires_ms), client_id, address)


def publisher_of(routed: RoutedClients, who: Caller) -> Client:
    with routed.publisher(who) as client:
        return client


def test_without_an_authorizer_one_publisher_serves_all_callers(closed: list[Client]) -> None:
    routed = clients(None)
    found = {publisher_of(routed, caller(each)) for each in ("alice", "bob")}
    assert len(found) == 1
    assert not closed


def test_with_an_authorizer_a_publisher_serves_one_identity(closed: list[Client]) -> None:
    routed = clients(Authorizer())
    alice = publisher_of(routed, caller("alice"))
    assert publisher_of(routed, caller("alice", client_id="other", expires_ms=2)) is alice
    others = [caller("alice", "10.0.0.2"), caller("bob"), Caller()]
    assert len({alice, *(publisher_of(routed, each) for each in others)}) == 4
    assert not closed


def test_the_publisher_that_was_idle_for_longest_is_closed_and_none_that_is_used(
    closed: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_clients, "PUBLISHERS_MAX", 2)

    async def scenario() -> None:
        routed = clients(Authorizer())
        with routed.publisher(caller("used")) as used:
            first, second = (publisher_of(routed, caller(each)) for each in ("first", "second"))
            await asyncio.gather(*routed._closing)
            assert closed == [first]
            third = publisher_of(routed, caller("third"))
            await asyncio.gather(*routed._closing)
            assert closed == [first, second]
        assert publisher_of(routed, caller("used")) is used
        await routed.close()
        assert set(closed) == {first, second, third, used}

    run_virtually(scenario())
