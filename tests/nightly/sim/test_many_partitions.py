"""A hundred thousand partitions on fifty brokers, as far as planner, controller and metadata image go."""

from __future__ import annotations

import pytest
from bench.many_partitions import SimulatedCluster, check_costs, steps_of

PARTITIONS = 100_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("partitions", [100, 5_000])
def test_a_hundred_thousand_partitions_cost_transactions_for_what_changes(partitions: int) -> None:
    cluster = SimulatedCluster(50)
    cluster.start()
    for step in steps_of(cluster, PARTITIONS // partitions, partitions):
        check_costs(step(), PARTITIONS)
