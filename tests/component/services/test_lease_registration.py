"""A share group is registered at its coordinator, or later: an answer to the client does not depend on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mansio.broker.routing.caller import ANONYMOUS, Caller
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.share_groups.leases import LeaseService
from mansio.errors import GroupIdNotFound, MansioError, Unavailable, UnknownTopicOrPartition
from support.virtual_time import run_virtually


class Coordinator:
    """Another broker that coordinates the group; `error`: its answer."""

    def __init__(self, error: MansioError | None) -> None:
        self.error = error
        self.calls = 0

    async def register(self, *_: Any) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def registered(coordinator: Coordinator, topic: Any) -> LeaseService:
    async def find_coordinator(_: str, *, caller: Caller) -> Any:
        del caller
        return SimpleNamespace(node_id=2)

    stub: Any = SimpleNamespace
    return LeaseService(
        receive=stub(),
        share_service=stub(),
        group_coordinator=stub(),
        groups=stub(find_coordinator=find_coordinator),
        topics=stub(find=lambda _: topic),
        clock=stub(monotonic=lambda: 0.0),
        scheduler=stub(),
        random=stub(),
        authorization=Authorization(None),
        forwarder=coordinator,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "error", [None, Unavailable("down"), UnknownTopicOrPartition("there is no topic 't'")]
)
def test_a_coordinator_that_does_not_know_a_new_topic_yet_is_asked_again_later(
    error: MansioError | None,
) -> None:
    topic: Any = SimpleNamespace(topic_id=SimpleNamespace(bytes=bytes(16)), partitions=[0])
    coordinator = Coordinator(error)
    leases = registered(coordinator, topic)
    for _ in range(2):
        run_virtually(leases.register("g", ["t"], caller=ANONYMOUS))
    assert coordinator.calls == (1 if error is None else 2)


def test_the_id_of_a_group_of_another_type_is_refused() -> None:
    topic: Any = SimpleNamespace(topic_id=SimpleNamespace(bytes=bytes(16)), partitions=[0])
    leases = registered(Coordinator(GroupIdNotFound("g is a consumer group")), topic)
    with pytest.raises(GroupIdNotFound):
        run_virtually(leases.register("g", ["t"], caller=ANONYMOUS))
