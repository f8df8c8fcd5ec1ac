"""Metadata without an authorizer has no cost of authorization, and with one it decides for all topics at once: the
calls that a broker makes per request are counted."""

from __future__ import annotations

import asyncio
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

import mansio
from component.test_delay_costs import SOURCE, CountedBroker
from mansio.broker.topics.topics import NewTopic
from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission, ResourceType
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.authorization import PEER
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION: Final = 12
AUTHORIZER: Final = str(SOURCE / "state" / "authorization")
ROUNDS: Final = 20
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "all": {"topics": None},
    "all with operations": {"topics": None, "include_topic_authorized_operations": True},
    "named": {"topics": [{"name": "t0", "topic_id": None}]},
}


@contextmanager
def counted_broker(directory: Path, topics: int, authorizer: str) -> Iterator[CountedBroker]:
    """A broker with topics t0, t1 and so on, which everybody may describe."""
    with mansio.Broker(directory, authorizer=authorizer) as broker:
        started = present(broker._broker)
        services = started.service
        everybody = Acl(
            ResourceType.TOPIC,
            PatternType.PREFIXED,
            "t",
            "User:*",
            WILDCARD,
            Operation.DESCRIBE,
            Permission.ALLOW,
        )

        async def prepare() -> None:
            for number in range(topics):
                await services.topics.create(NewTopic(f"t{number}", 1))
            if authorizer == "acl":
                assert await services.acls.create_each([everybody], caller=PEER) == [None]

        asyncio.run_coroutine_threadsafe(prepare(), started.server.loop).result(scaled(30))
        with closing(CountedBroker(broker)) as counted:
            counted.rounds = ROUNDS
            yield counted


def calls_of(broker: CountedBroker, name: str) -> tuple[int, set[str]]:
    return broker.calls_of(messages.encode_request(ApiKey.METADATA, VERSION, 7, "client", REQUESTS[name]))


@pytest.mark.row("A8")
def test_metadata_without_an_authorizer_calls_nothing_of_it(tmp_path: Path) -> None:
    per_topic: dict[str, int] = {}
    for topics in (10, 20):
        with counted_broker(tmp_path / str(topics), topics, "none") as broker:
            for name in REQUESTS:
                calls, functions = calls_of(broker, name)
                assert not {each for each in functions if each.startswith(AUTHORIZER)}, name
                per_topic[name] = calls - per_topic.get(name, 0)
    assert per_topic["all"] == per_topic["all with operations"], "the operations are the same for all topics"
    assert per_topic["named"] == 0


@pytest.mark.full
def test_metadata_of_more_topics_takes_no_decision_more(tmp_path: Path) -> None:
    fewest: dict[str, int] = {}
    for topics in (40, 60):
        for authorizer in ("none", "acl"):
            with counted_broker(tmp_path / f"{authorizer}{topics}", topics, authorizer) as broker:
                calls, functions = calls_of(broker, "all")
                fewest[f"{authorizer}{topics}"] = calls
                is_asked = any(each.startswith(AUTHORIZER) for each in functions)
                assert is_asked == (authorizer == "acl")
    added = fewest["acl60"] - fewest["none60"] - (fewest["acl40"] - fewest["none40"])
    # A name is compared with the prefixes and looked up, with 3 calls; on a slow machine there is one turn more.
    assert added <= 5 * 20, "a name is compared with the prefixes and looked up, and nothing else"
