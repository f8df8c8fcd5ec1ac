"""A topic is placed on a broker that is down but not declared dead: the broker hosts it when it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from support.cluster import cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

SESSION_MS = 4000


@pytest.mark.row("C1")
@pytest.mark.timeout(360)
def test_topic_that_was_placed_on_a_killed_broker_is_served_when_that_comes_back(tmp_path: Path) -> None:
    """No directory was ever made, and the leader has changed (to none) since: that is not a lost log."""
    with cluster(tmp_path, broker_session_timeout_ms=SESSION_MS, broker_hand_over_enable=False) as one:
        one.kill(3)
        with blocking.connect(one.brokers[1].bootstrap_servers) as client:
            client.admin.create_topic("t", partitions=6, replication_factor=1)
        placed = [place.index for place in one.places("t") if place.replicas == (3,)]
        assert placed, "its session stood"
        one.wait(lambda: all(one.leader("t", index) == -1 for index in placed), "broker 3 is missed")
        one.start(3)
        one.wait(lambda: all(one.leader("t", index) == 3 for index in placed), "broker 3 leads them")
        one.check_logs()
