"""Readers that know no leader epoch meet a leader that is none any more."""

from __future__ import annotations

import pytest

from mansio.errors import NotLeaderOrFollower, OffsetOutOfRange
from support.replicas import Cluster


def test_a_leader_that_may_be_none_any_more_calls_no_offset_out_of_range() -> None:
    """A consumer would begin elsewhere: at the start, or behind what it has not read."""
    cluster = Cluster(configs={"min.insync.replicas": "2"})
    cluster.run_for(500)
    zombie = cluster[1]
    ack = zombie.append(b"a")
    cluster.run_until(lambda: ack.acknowledged)
    with pytest.raises(OffsetOutOfRange):
        zombie.partition.read(2, 1000)
    zombie.session_until_s = 0
    with pytest.raises(NotLeaderOrFollower):
        zombie.partition.read(2, 1000)
    assert zombie.partition.read(0, 1000) is not None
    assert zombie.partition.read(1, 1000) is None
