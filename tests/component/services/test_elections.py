"""Election service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.services.elections import PREFERRED_ELECTION, UNCLEAN_ELECTION
from mansio.errors import (
    ElectionNotNeeded,
    InvalidReplicaAssignment,
    InvalidRequest,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


@pytest.mark.parametrize("election_type", [PREFERRED_ELECTION, UNCLEAN_ELECTION])
def test_a_single_node_needs_no_election(tmp_path: Path, election_type: int) -> None:
    async def work(services: BrokerServices) -> None:
        elect = services.elections.elect_leaders
        named = [("t", 0), ("t", 9), ("none", 0)]
        results = await elect(named, election_type=election_type, timeout_ms=1000)
        assert [(each.topic, each.partition) for each in results] == named
        assert [type(each.error) for each in results] == [
            ElectionNotNeeded,
            UnknownTopicOrPartition,
            UnknownTopicOrPartition,
        ]
        assert await elect(None, election_type=election_type, timeout_ms=1000) == []

    run(tmp_path, work)


def test_an_unknown_type_of_election_is_refused(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        (result,) = await services.elections.elect_leaders([("t", 0)], election_type=7, timeout_ms=1000)
        assert isinstance(result.error, InvalidRequest)

    run(tmp_path, work)


def test_only_a_plan_that_changes_nothing_is_accepted(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        check = services.elections.check_reassignment
        check("t", 1, [7])
        with pytest.raises(InvalidReplicaAssignment):
            check("t", 1, [8])
        with pytest.raises(NoReassignmentInProgress):
            check("t", 1, None)
        with pytest.raises(UnknownTopicOrPartition):
            check("t", 2, [7])
        assert services.elections.list_reassignments(None) == []
        assert services.elections.list_reassignments([("t", 0), ("none", 3)]) == []

    run(tmp_path, work, node_id=7)
