"""Group service without any wire protocol."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.groups import LeavingMember
from mansio.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidGroupId,
    InvalidRequest,
    NonEmptyGroup,
    NotEnoughReplicas,
    UnknownMember,
)
from mansio.state.classic_group.types import Join, Protocol, Sync
from mansio.state.consumer_group.types import Heartbeat
from unit.broker.consumer_groups_fixtures import ConsumerBroker


def joining(member_id: str = "m", **fields: Any) -> Heartbeat:
    defaults = {"rebalance_timeout_ms": 10_000, "topic_names": ("t",), "owned": frozenset()}
    return Heartbeat(member_id, 0, **{**defaults, **fields})


def classic_join(member_id: str) -> Join:
    return Join(member_id, None, "client", "/host", 10_000, 10_000, "connect", (Protocol("default", b""),))


def test_a_consumer_joins_and_is_described_listed_and_deleted() -> None:
    broker = ConsumerBroker()
    run, groups = broker.scheduler.run, broker.group_service
    joined = run(groups.consumer_heartbeat("g", joining(), caller=ANONYMOUS))
    assert len(joined.assignment) == 4
    described = groups.describe_consumer_group("g", caller=ANONYMOUS)
    assert [each.member_id for each in described.members] == ["m"]
    assert [(each.group_id, each.group_type) for each in groups.list_groups(caller=ANONYMOUS)] == [
        ("g", "consumer")
    ]
    assert groups.list_groups(types=["classic"], caller=ANONYMOUS) == []
    assert isinstance(run(groups.delete(["g"], caller=ANONYMOUS))[0], NonEmptyGroup)
    run(groups.consumer_heartbeat("g", Heartbeat("m", -1), caller=ANONYMOUS))
    errors = run(groups.delete(["g", "other"], caller=ANONYMOUS))
    assert errors[0] is None
    assert isinstance(errors[1], GroupIdNotFound)
    with pytest.raises(GroupIdNotFound):
        groups.describe_consumer_group("g", caller=ANONYMOUS)


@pytest.mark.parametrize(
    "request_",
    [
        joining(instance_id=""),
        joining(rack_id="r" * 40_000),
        joining(topic_names=("t" * 300,)),
        Heartbeat("m", -3),
    ],
)
def test_invalid_heartbeats_are_rejected(request_: Heartbeat) -> None:
    broker = ConsumerBroker()
    with pytest.raises(InvalidRequest):
        broker.scheduler.run(broker.group_service.consumer_heartbeat("g", request_, caller=ANONYMOUS))


def test_a_classic_member_joins_syncs_and_leaves() -> None:
    broker = ConsumerBroker()
    run, groups = broker.scheduler.run, broker.group_service
    first = run(groups.join("c", classic_join(""), caller=ANONYMOUS))
    assert first.must_rejoin
    joined = run(groups.join("c", classic_join(first.member_id), caller=ANONYMOUS))
    synced = run(
        groups.sync(
            "c",
            Sync(joined.member_id, None, joined.generation, {joined.member_id: b"assignment"}),
            caller=ANONYMOUS,
        )
    )
    assert synced.assignment == b"assignment"
    groups.heartbeat("c", joined.member_id, None, joined.generation, caller=ANONYMOUS)
    assert groups.describe("c", caller=ANONYMOUS).state == "Stable"
    members = [LeavingMember("unknown", None), LeavingMember(joined.member_id, None)]
    errors = list(groups.leave_each("c", members, caller=ANONYMOUS))
    assert isinstance(errors[0], UnknownMember)
    assert errors[1] is None
    assert groups.describe("c", caller=ANONYMOUS).state == "Empty"


def test_offsets_are_committed_fetched_and_deleted() -> None:
    broker = ConsumerBroker()
    run, groups = broker.scheduler.run, broker.group_service
    assert run(
        groups.commit_offsets("o", [OffsetToCommit("t", 0, 7, metadata="note")], caller=ANONYMOUS)
    ) == [None]
    assert (
        run(groups.fetch_offsets("o", requires_stable=False, caller=ANONYMOUS)).committed["t", 0].offset == 7
    )
    assert run(groups.fetch_offsets("o", [("t", 1)], requires_stable=False, caller=ANONYMOUS)).committed == {}
    with pytest.raises(GroupIdNotFound):
        run(groups.delete_offsets("none", [("t", 0)], caller=ANONYMOUS))
    assert run(groups.delete_offsets("o", [("t", 0)], caller=ANONYMOUS)) == [None]
    assert run(groups.fetch_offsets("o", requires_stable=False, caller=ANONYMOUS)).committed == {}


def test_a_single_node_coordinates_every_group() -> None:
    broker = ConsumerBroker()
    assert broker.scheduler.run(broker.group_service.find_coordinator("g", caller=ANONYMOUS)) is None
    with pytest.raises(InvalidGroupId):
        broker.scheduler.run(broker.group_service.find_coordinator("", caller=ANONYMOUS))


def test_errors_of_the_offsets_topic_are_coordinator_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = ConsumerBroker()
    partition = broker.home

    def refuse(*_: object, **__: object) -> None:
        raise NotEnoughReplicas("one replica is in sync")

    monkeypatch.setattr(partition, "append", refuse)
    with pytest.raises(CoordinatorNotAvailable):
        broker.scheduler.run(
            broker.group_service.commit_offsets("g", [OffsetToCommit("t", 0, 7)], caller=ANONYMOUS)
        )
