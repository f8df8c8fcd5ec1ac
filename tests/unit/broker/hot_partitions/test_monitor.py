"""The monitor of hot partitions: what counts as a rate, when other brokers are asked, and what it costs."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pytest

from mansio.broker.hot_partitions.monitor import HotPartitionMonitor
from mansio.broker.hot_partitions.rate_exchange import RateExchange
from mansio.config.settings import Settings
from mansio.errors import RequestTimedOut
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

WINDOW_S: Final = 10.0
TOPIC: Final = UUID(int=1)
OTHER: Final = UUID(int=2)
CALLS_PER_PARTITION_MAX: Final = 6


@dataclass(eq=False)
class Replica:
    """What the monitor uses of a partition."""

    index: int
    topic_id: UUID = TOPIC
    end_offset: int = 0
    leader_epoch: int = 0
    is_leader: bool = True
    internal: bool = False
    closed: bool = False
    topic: str = "t"
    log: Any = field(init=False)

    def __post_init__(self) -> None:
        self.log = self


class Exchange:
    """What other brokers answer; a topic that is not in `answers` is unknown."""

    def __init__(self) -> None:
        self.answers: dict[UUID, list[float]] = {TOPIC: [], OTHER: []}
        self.asked: list[set[UUID]] = []

    async def ask(self, topic_ids: Collection[UUID]) -> Mapping[UUID, Sequence[float]]:
        self.asked.append(set(topic_ids))
        return {topic_id: self.answers[topic_id] for topic_id in topic_ids if topic_id in self.answers}


class Sampler:
    def __init__(self) -> None:
        self.followed: list[Any] = []

    def follow(self, partitions: Any) -> None:
        self.followed = list(partitions)

    def rotate(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Bench:
    """A monitor whose windows a test ends. `counts`: numbers of partitions of the topics."""

    def __init__(self, replicas: list[Replica], **counts: int) -> None:
        self.replicas = replicas
        self.now = 100.0
        self.used_s = 0.0
        self.exchange = Exchange()
        self.sampler = Sampler()
        sizes = {TOPIC: counts.get("topic", len(replicas)), OTHER: counts.get("other", 1)}
        topics = {topic_id: SimpleNamespace(partitions=range(count)) for topic_id, count in sizes.items()}
        self.loop = asyncio.new_event_loop()
        self.monitor = HotPartitionMonitor(
            self.replicas,  # type: ignore[arg-type]
            settings=Settings(),
            state=SimpleNamespace(topics_by_id=topics),  # type: ignore[arg-type]
            exchange=self.exchange,  # type: ignore[arg-type]
            sampler=self.sampler,  # type: ignore[arg-type]
            clock=SimpleNamespace(monotonic=lambda: self.now),
            scheduler=AsyncioScheduler(self.loop),
            processor_s=lambda: self.used_s,
        )
        self.window()

    def rates(self) -> list[float]:
        return [*self.monitor.rates_for_others(self.replicas)]  # type: ignore[arg-type]

    def window(self, *records: int) -> list[int]:
        """End a window in which the partitions got so many records; return the indexes of those that are hot."""
        for replica, count in zip(self.replicas, records, strict=False):
            replica.end_offset += count
        self.now += WINDOW_S
        self.loop.run_until_complete(self.monitor.end_window())
        return [each.partition.index for each in self.monitor.hot]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench([Replica(index) for index in range(4)])
    yield made
    made.loop.close()


def test_rates_and_load_are_those_of_the_window(bench: Bench) -> None:
    bench.used_s += 4.0
    bench.window(20_000, 100, 0, 300)
    assert sorted(bench.rates()) == [10.0, 30.0, 2_000.0]
    assert bench.monitor.load == (1, 2_040.0, 0.4)
    for _ in range(2):
        hot = bench.window(20_000, 100, 0, 300)
    assert hot == [0]
    (found,) = bench.monitor.hot
    assert (found.skew.rate, found.skew.median, found.skew.topic_rate) == (2_000.0, 20.0, 2_040.0)
    assert found.led_s == 3 * WINDOW_S
    assert bench.sampler.followed == [bench.replicas[0]]
    assert bench.monitor.is_hot(bench.replicas[0])  # type: ignore[arg-type]


def test_nothing_counts_of_a_window_in_which_leadership_began(bench: Bench) -> None:
    """A follower that becomes the leader may have copied much before."""
    replica = bench.replicas[0]
    replica.is_leader = False
    bench.window(1_000_000)
    replica.is_leader = True
    replica.leader_epoch += 1
    bench.window(1_000_000)
    assert bench.rates() == []
    bench.window(1_000)
    assert bench.rates() == [100.0]
    replica.leader_epoch += 1  # elected again
    bench.window(1_000)
    assert bench.rates() == []


def test_another_broker_gets_the_higher_rate_of_the_last_window_and_the_present_one(bench: Bench) -> None:
    """A burst that it has counted in its last window may be in the present one here."""
    bench.window(1_000, 2_000, 0, 0)
    assert bench.rates() == [100.0, 200.0]
    bench.replicas[0].end_offset += 3_000
    bench.replicas[1].end_offset += 50
    bench.replicas[2].end_offset += 1_000
    assert bench.rates() == [300.0, 200.0, 100.0]
    bench.replicas[2].is_leader = False
    bench.replicas[0].leader_epoch += 1
    assert bench.rates() == [100.0, 200.0]


def test_internal_topics_do_not_count(bench: Bench) -> None:
    bench.replicas[0].internal = True
    bench.window(1_000_000)
    assert bench.monitor.load.rate == 0


def test_a_partition_that_this_broker_does_not_lead_any_more_is_not_hot(bench: Bench) -> None:
    for _ in range(3):
        hot = bench.window(20_000, 100, 100, 100)
    assert hot == [0]
    bench.replicas[0].is_leader = False
    assert bench.window(20_000, 100, 100, 100) == []
    assert bench.sampler.followed == []


def test_others_are_asked_only_about_topics_that_could_be_uneven(bench: Bench) -> None:
    for records in ((100, 0, 0, 0), (20_000, 20_000, 20_000, 20_000), (20_000, 15_000, 9_000, 100)):
        for _ in range(5):
            assert bench.window(*records) == []
    assert bench.exchange.asked == []
    bench.window(20_000, 100, 100, 100)
    assert bench.exchange.asked == [{TOPIC}]


def test_partitions_on_other_brokers_decide_whether_one_is_hot() -> None:
    bench = Bench([Replica(0)], topic=6)
    bench.exchange.answers[TOPIC] = [900.0, 1_100.0, 1_000.0, 950.0, 1_050.0]
    for _ in range(5):
        assert bench.window(10_000) == []
    bench.exchange.answers[TOPIC] = [100.0, 90.0, 110.0]
    for _ in range(3):
        hot = bench.window(10_000)
    assert hot == [0]
    assert next(iter(bench.monitor.hot)).skew.median == 95.0
    bench.loop.close()


def test_a_window_with_unknown_rates_neither_flags_nor_clears() -> None:
    bench = Bench([Replica(0), Replica(0, OTHER)], topic=4, other=4)
    del bench.exchange.answers[TOPIC]
    for _ in range(5):
        hot = bench.window(10_000, 10_000)
    assert [each.partition.topic_id for each in bench.monitor.hot] == [OTHER]
    del bench.exchange.answers[OTHER]
    bench.exchange.answers[TOPIC] = []
    for _ in range(2):
        hot = bench.window(10_000, 0)
    assert [each.partition.topic_id for each in bench.monitor.hot] == [OTHER]
    hot = bench.window(10_000, 0)
    assert len(hot) == 2
    bench.exchange.answers[OTHER] = []
    for _ in range(3):
        bench.window(10_000, 0)
    assert [each.partition.topic_id for each in bench.monitor.hot] == [TOPIC]
    bench.loop.close()


class OtherBrokers:
    """Answers of brokers whose windows end at other times."""

    def __init__(self, benches: list[Bench]) -> None:
        self._benches = benches

    async def ask(self, topic_ids: Collection[UUID]) -> Mapping[UUID, Sequence[float]]:
        return {topic_id: [rate for each in self._benches for rate in each.rates()] for topic_id in topic_ids}


def test_bursts_in_all_partitions_flag_none_of_them_although_windows_are_not_aligned() -> None:
    benches = [Bench([Replica(index)], topic=3) for index in range(3)]
    for bench in benches:
        others = [each for each in benches if each is not bench]
        bench.monitor._exchange = OtherBrokers(others)  # type: ignore[assignment]
    hot: list[int] = []
    for step in range(120):  # seconds; each window has ten
        if step % 20 == 12:
            for bench in benches:
                bench.replicas[0].end_offset += 50_000
        for number, bench in enumerate(benches):
            if step % 10 == 3 * number:
                hot += bench.window()
    assert hot == []
    for bench in benches:
        bench.loop.close()


@pytest.mark.parametrize("count", [100, 1_000])
def test_a_partition_in_which_nothing_happens_costs_a_few_calls_in_a_window(count: int) -> None:
    bench = Bench([Replica(index) for index in range(count)])
    calls = 0

    def counted(_frame: Any, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    try:
        bench.window()
    finally:
        sys.setprofile(None)
    assert calls <= CALLS_PER_PARTITION_MAX * count + 200
    bench.loop.close()


class Peers:
    """Other brokers that answer DescribePartitionRates; `down` do not."""

    def __init__(self, rates: dict[int, dict[UUID, list[float]]], down: Collection[int] = ()) -> None:
        self.rates = rates
        self.down = down
        self.requests: list[tuple[int, set[UUID]]] = []

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        del timeout_ms
        asked = messages.decode_request(ApiKey.DESCRIBE_PARTITION_RATES, 0, request[4 + 8 + 2 + 21 + 1 :])
        topic_ids = {UUID(bytes=each) for each in asked.topic_ids}
        self.requests.append((node_id, topic_ids))
        if node_id in self.down:
            raise RequestTimedOut("it does not answer")
        topics = [{"topic_id": each, "rates": self.rates[node_id].get(each, [])} for each in topic_ids]
        fields = {"topics": topics}
        return messages.encode_response(ApiKey.DESCRIBE_PARTITION_RATES, 0, 0, fields)[4:]


def exchange_of(peers: Peers, loop: asyncio.AbstractEventLoop, level: int | None = None) -> RateExchange:
    """Broker 1 of three. Of the topic, each leads a partition; of the other one, brokers 1 and 2."""
    from mansio.metadata.feature_level import CURRENT_LEVEL

    def topic(*leaders: int) -> SimpleNamespace:
        return SimpleNamespace(partitions=[SimpleNamespace(leader=leader) for leader in leaders])

    state = SimpleNamespace(
        topics_by_id={TOPIC: topic(1, 2, 3, -1), OTHER: topic(1, 2)},
        feature_level=CURRENT_LEVEL if level is None else level,
    )
    return RateExchange(
        state,  # type: ignore[arg-type]
        node_id=1,
        broker_epoch=lambda: 7,
        peers=peers,
        scheduler=AsyncioScheduler(loop),
    )


def test_the_rates_of_all_leaders_are_combined_with_one_request_to_each() -> None:
    loop = asyncio.new_event_loop()
    peers = Peers({2: {TOPIC: [5.0, 6.0], OTHER: [7.0]}, 3: {TOPIC: [8.0]}})
    found = loop.run_until_complete(exchange_of(peers, loop).ask([TOPIC, OTHER, UUID(int=9)]))
    assert {key: sorted(rates) for key, rates in found.items()} == {TOPIC: [5.0, 6.0, 8.0], OTHER: [7.0]}
    assert sorted(peers.requests) == [(2, {TOPIC, OTHER}), (3, {TOPIC})]
    loop.close()


def test_a_broker_that_does_not_answer_leaves_its_topics_unknown() -> None:
    loop = asyncio.new_event_loop()
    peers = Peers({2: {TOPIC: [5.0], OTHER: [7.0]}, 3: {}}, down={3})
    assert loop.run_until_complete(exchange_of(peers, loop).ask([TOPIC, OTHER])) == {OTHER: [7.0]}
    loop.close()


def test_brokers_of_an_older_version_are_not_asked() -> None:
    loop = asyncio.new_event_loop()
    peers = Peers({})
    assert loop.run_until_complete(exchange_of(peers, loop, level=1).ask([TOPIC])) == {}
    assert peers.requests == []
    loop.close()
