"""A fetch between brokers costs what has changed, whatever the number of partitions, and so does the check of in-sync
sets: calls and bytes are counted."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from support.replicas import TOPIC, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.state.broker_handshake import BrokerIdentity

LEADER, FOLLOWER = 1, 2
FEW, MANY = 50, 200
IDLE_MS: Final = 3000
COUNTED: Final = (
    "/broker/replication/isr_manager.py",
    "/broker/replication/replica_fetcher.py",
    "/broker/services/fetch.py",
    "/api/kafka/handlers/fetch.py",
    "/state/fetch_session.py",
    "/wire/apis/fetch.py",
)
COUNTED_FUNCTIONS: Final = (
    "check_session",
    "read_for_follower",
    "park_follower",
    "unpark_follower",
    "on_follower_fetch",
    "find",
)


class Cost(NamedTuple):
    """Python calls of both brokers, and bytes of all requests and responses."""

    calls: int
    request_bytes: int
    response_bytes: int


class Counted:
    """Two brokers with partitions that were idle for a while."""

    def __init__(self, partitions: int) -> None:
        self.cluster = cluster = Cluster(2, partitions=partitions)
        self.calls = self.request_bytes = self.response_bytes = 0
        cluster.network.delay_ms = lambda: 0.5
        for node_id in (LEADER, FOLLOWER):
            cluster[node_id].background._latency_ms = lambda: 1.0
        cluster.run_for(2000)
        leader, receive = cluster[LEADER], cluster[LEADER].receive

        def counted(request: bytes, answer: Callable[[bytes], None], sender: BrokerIdentity) -> None:
            def answered(frame: bytes) -> None:
                self.response_bytes += len(frame)
                answer(frame)

            self.request_bytes += len(request)
            receive(request, answered, sender)

        leader.receive = counted

    @contextmanager
    def _counting(self) -> Iterator[None]:
        def count(frame: Any, event: str, _: object) -> None:
            if event == "call":
                code = frame.f_code
                if code.co_filename.endswith(COUNTED) or code.co_name in COUNTED_FUNCTIONS:
                    self.calls += 1

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def cost(self, changed: int) -> Cost:
        """Of `IDLE_MS` in which records are appended to so many partitions, at once."""
        self.calls = self.request_bytes = self.response_bytes = 0
        cluster = self.cluster
        with self._counting():
            acks = [cluster[LEADER].append(b"a", index=index) for index in range(changed)]
            cluster.run_for(IDLE_MS)
        assert all(ack.acknowledged for ack in acks)
        follower = cluster[FOLLOWER]
        assert all(follower.partitions[TOPIC.bytes, each].high_watermark for each in range(changed))
        return Cost(self.calls, self.request_bytes, self.response_bytes)


@pytest.mark.parametrize("changed", [0, 4])
def test_a_fetch_costs_what_has_changed(changed: int) -> None:
    few, many = (Counted(partitions).cost(changed) for partitions in (FEW, MANY))
    assert many == few


def test_each_partition_that_changes_costs_the_same() -> None:
    costs = [Counted(FEW).cost(changed) for changed in (0, 4, 8)]
    for idle, some, more in zip(*costs, strict=True):
        assert some - idle > 0
        assert more - some <= 1.2 * (some - idle)


def test_an_idle_fetch_is_small() -> None:
    idle = Counted(MANY).cost(0)
    exchanges = IDLE_MS // 500
    assert idle.request_bytes <= 100 * (exchanges + 1)
    assert idle.response_bytes <= 40 * (exchanges + 1)
    assert idle.calls <= 60 * (exchanges + 1)
