"""Leaders that move: a follower that learns of the next leader does not wait for its request to the old one."""

from __future__ import annotations

import pytest

from support.replicas import Cluster


@pytest.mark.parametrize("first", [2, 3], ids=["the leader hears first", "a follower hears first"])
@pytest.mark.parametrize("seed", range(4))
def test_a_partition_moves_at_once_to_a_broker_that_is_followed_for_others(seed: int, first: int) -> None:
    """Otherwise nothing is committed for as long as a follower's request waits there for other partitions."""
    cluster = Cluster(partitions=2, seed=seed)
    cluster.run_for(500)
    cluster.elect(2, index=0)
    cluster.tell()
    cluster.run_for(900 + 97 * seed)
    cluster.elect(2, index=1)
    cluster.tell(first)
    cluster.run_for(10)
    cluster.tell()
    cluster.run_for(5)
    ack = cluster[2].append(b"a", index=1)
    cluster.run_until(lambda: ack.acknowledged, 100)
