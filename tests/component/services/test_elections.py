"""The services of elections and reassignments without any wire protocol."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.elections import PREFERRED_ELECTION, UNCLEAN_ELECTION
from mansio.errors import (
    ClusterAuthorizationFailed,
    ElectionNotNeeded,
    InvalidReplicaAssignment,
    InvalidRequest,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from mansio.metadata.reassignment import Reassignment
from mansio.state.authorization.acls import CLUSTER_NAME, Operation
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import ALICE, CLUSTER, acl

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


@pytest.mark.parametrize("election_type", [PREFERRED_ELECTION, UNCLEAN_ELECTION])
def test_a_single_node_needs_no_election(tmp_path: Path, election_type: int) -> None:
    async def work(services: BrokerServices) -> None:
        elect = partial(services.elections.elect_leaders, caller=ANONYMOUS)
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
        (result,) = await services.elections.elect_leaders(
            [("t", 0)], election_type=7, timeout_ms=1000, caller=ANONYMOUS
        )
        assert isinstance(result.error, InvalidRequest)

    run(tmp_path, work)


def test_a_single_node_accepts_only_a_reassignment_that_changes_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        wanted = [
            Reassignment("t", 1, [7]),
            Reassignment("t", 1, [8]),
            Reassignment("t", 1, None),
            Reassignment("t", 2, [7]),
        ]
        errors = await services.reassignments.alter(wanted, may_change_factor=True, caller=ANONYMOUS)
        assert [type(error) for error in errors] == [
            type(None),
            InvalidReplicaAssignment,
            NoReassignmentInProgress,
            UnknownTopicOrPartition,
        ]
        list_ongoing = partial(services.reassignments.list_ongoing, caller=ANONYMOUS)
        assert await list_ongoing(None) == []
        assert await list_ongoing([("t", 0), ("none", 3)]) == []

    run(tmp_path, work, node_id=7)


def test_elections_and_reassignments_need_the_cluster(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        elections, reassignments = services.elections, services.reassignments
        authorizer = Authorizer()
        elections._authorization = reassignments._authorization = Authorization(authorizer)
        for _ in range(2):
            with pytest.raises(ClusterAuthorizationFailed):
                await elections.elect_leaders(
                    None, election_type=PREFERRED_ELECTION, timeout_ms=1000, caller=ALICE
                )
            for topic in ("t", "none"):
                with pytest.raises(ClusterAuthorizationFailed):
                    await reassignments.alter(
                        [Reassignment(topic, 0, [7])], may_change_factor=True, caller=ALICE
                    )
            if authorizer.acl_count == 0:
                with pytest.raises(ClusterAuthorizationFailed):
                    await reassignments.list_ongoing(None, caller=ALICE)
            authorizer.add(acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE))
        assert await reassignments.list_ongoing(None, caller=ALICE) == []
        authorizer.add(acl(CLUSTER, CLUSTER_NAME, Operation.ALTER))
        unchanged = [Reassignment("t", 0, [7])]
        assert await reassignments.alter(unchanged, may_change_factor=True, caller=ALICE) == [None]
        assert (
            await elections.elect_leaders(
                None, election_type=PREFERRED_ELECTION, timeout_ms=1000, caller=ALICE
            )
            == []
        )

    run(tmp_path, work, node_id=7)
