"""Small requests for large responses: repeated items are answered once, and responses have size limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.api.kafka.handlers import producers
from mansio.broker.services import configs
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import ApiKey
from support.raw_peer import RawPeer, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INVALID_REQUEST = 42
TOPIC, GROUP = 2, 32
TIMES = 2000


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[RawPeer]:
    with (
        EmbeddedBroker(tmp_path) as broker,
        RawPeer(int(broker.address.rpartition(":")[2])) as peer,
    ):
        peer.create_topic("t", 2)
        yield peer


def described(peer: RawPeer, resources: list[tuple[int, str, list[str] | None]]) -> list[Any]:
    wanted = [
        {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        for kind, name, keys in resources
    ]
    return list(peer.call(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": wanted}).results)


def test_settings_that_are_asked_for_many_times_are_returned_once(peer: RawPeer) -> None:
    (every, one) = described(peer, [(TOPIC, "t", None)] * TIMES + [(TOPIC, "t", ["retention.ms"])] * TIMES)
    assert len(every.configs) > 10
    assert [entry.name for entry in one.configs] == ["retention.ms"]


def test_settings_of_very_many_resources_are_refused_from_some_on(
    peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "ENTRIES_MAX", 50)
    found = described(peer, [(GROUP, f"g{number}", None) for number in range(100)])
    succeeded = [one for one in found if one.error_code == 0]
    assert 50 <= sum(len(one.configs) for one in succeeded) < 100
    assert {one.error_code for one in found[len(succeeded) :]} == {INVALID_REQUEST}
    assert "fewer resources" in found[-1].error_message


def producers_of(peer: RawPeer, indexes: list[int], times: int = 1) -> list[Any]:
    topics = [{"name": "t", "partition_indexes": indexes}] * times
    (topic,) = peer.call(ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": topics}).topics
    return list(topic.partitions)


def test_producers_that_are_asked_for_many_times_are_returned_once_and_only_so_many(
    peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for producer_id, partition in ((1, 0), (2, 0), (3, 1)):
        batch = batch_of(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0)
        assert peer.produce("t", batch, partition=partition).error_code == 0
    found = producers_of(peer, [0, 1] * TIMES, times=3)
    assert [(one.partition_index, len(one.active_producers)) for one in found] == [(0, 2), (1, 1)]
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 1)
    few, shown = producers_of(peer, [0, 1])
    assert (few.error_code, shown.error_code) == (INVALID_REQUEST, 0)
    assert "fewer partitions" in few.error_message


def test_offsets_of_a_group_that_is_named_many_times_are_refused(peer: RawPeer) -> None:
    groups = [{"group_id": group, "topics": None} for group in ("twice", "once", "twice")]
    found = peer.call(ApiKey.OFFSET_FETCH, 8, {"groups": groups}).groups
    assert [one.error_code for one in found] == [INVALID_REQUEST, 0, INVALID_REQUEST]
    shares = peer.call(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, {"groups": groups[::2]}).groups
    assert [one.error_code for one in shares] == [INVALID_REQUEST] * 2
