"""Administrative requests are bounded: too many items are refused before the first; a request ends with its client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.config.item_limit import ITEMS_MAX
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.machine import scaled
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICY_VIOLATION: Final = 44
NAMES: Final = [f"topic-{number}" for number in range(ITEMS_MAX + 1)]
TOPICS: Final = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in NAMES]


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create_topics_enable=True) as started:
        yield started


def port_of(broker: TestBroker) -> int:
    return int(broker.bootstrap_servers.rpartition(":")[2])


@pytest.fixture
def peer(broker: TestBroker) -> Iterator[RawPeer]:
    with RawPeer(port_of(broker)) as connected:
        yield connected


def topic_names(broker: TestBroker) -> set[str]:
    with RawPeer(port_of(broker)) as other:
        return {each.name for each in other.call(ApiKey.METADATA, 9, {"topics": None}).topics}


@pytest.mark.parametrize(
    ("api", "version", "fields", "results"),
    [
        (ApiKey.CREATE_TOPICS, 5, {"topics": TOPICS, "timeout_ms": 1000}, "topics"),
        (ApiKey.DELETE_TOPICS, 5, {"topic_names": NAMES, "timeout_ms": 1000}, "responses"),
        (ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": name} for name in NAMES]}, "responses"),
        (ApiKey.CREATE_PARTITIONS, 3, {"topics": [{"name": name, "count": 9} for name in NAMES]}, "results"),
        (
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            1,
            {"resources": [{"resource_type": 2, "resource_name": name, "configs": []} for name in NAMES]},
            "responses",
        ),
        (
            ApiKey.ALTER_CONFIGS,
            2,
            {"resources": [{"resource_type": 2, "resource_name": name, "configs": []} for name in NAMES]},
            "responses",
        ),
        (ApiKey.DELETE_GROUPS, 2, {"groups_names": NAMES}, "results"),
        (
            ApiKey.ALTER_CLIENT_QUOTAS,
            1,
            {
                "entries": [
                    {
                        "entity": [{"entity_type": "client-id", "entity_name": name}],
                        "ops": [{"key": "producer_byte_rate", "value": 1.0, "remove": False}],
                    }
                    for name in NAMES
                ]
            },
            "entries",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ApiKey) else "",
)
def test_a_request_with_too_many_items_is_refused_before_the_first(
    broker: TestBroker, peer: RawPeer, api: ApiKey, version: int, fields: dict[str, Any], results: str
) -> None:
    peer.create_topic(NAMES[0])
    answer = getattr(peer.call(api, version, fields), results)
    assert {each.error_code for each in answer} == {POLICY_VIOLATION}
    assert len(answer) == len(NAMES)
    assert topic_names(broker) == {NAMES[0]}


def test_metadata_of_too_many_topics_creates_none(broker: TestBroker, peer: RawPeer) -> None:
    wanted = {"topics": [{"name": name} for name in NAMES], "allow_auto_topic_creation": True}
    answer = peer.call(ApiKey.METADATA, 9, wanted)
    assert {each.error_code for each in answer.topics} == {3}
    assert not topic_names(broker)


def test_creating_topics_ends_when_the_client_has_gone(broker: TestBroker) -> None:
    """At most the topic in progress is completed."""
    with RawPeer(port_of(broker)) as peer:
        fields = {"topics": TOPICS[:ITEMS_MAX], "timeout_ms": 60_000}
        peer.send(messages.encode_request(ApiKey.CREATE_TOPICS, 5, 1, "gone", fields))
        wait_until(lambda: topic_names(broker), 60, "the first topic")
        peer.vanish()

    async def is_running() -> bool:
        return any(task.get_name() == "create_topics request" for task in asyncio.all_tasks())

    assert broker._loop is not None
    loop = broker._loop
    wait_until(
        lambda: not asyncio.run_coroutine_threadsafe(is_running(), loop).result(scaled(30)), 300, "the end"
    )
    assert len(topic_names(broker)) < ITEMS_MAX
