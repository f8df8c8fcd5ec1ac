"""Share partitions of a fair group: what changes while they are loaded, and states and requests that come late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRecordState, NotCoordinator
from mansio.state.share_partition.fairness import fair_index
from mansio.state.share_partition.types import (
    ACCEPT,
    BACKLOG_QUEUES,
    BASE,
    OPEN_END,
    AcknowledgementBatch,
    Isolation,
    ShareKey,
    StateBatch,
    Update,
)
from support.present import present
from support.tiers import examples
from unit.broker.test_fair_scan import Log
from unit.broker.test_share_exchange import BatchLog
from unit.broker.test_share_partition_leader import SETTINGS, TOPIC, SharePartitionBench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords
    from mansio.broker.coordinator.share.share_partitions import SharePartitions
    from mansio.storage.segment_list import LogSlice

PLACE = (TOPIC, 0)
QUEUE = BACKLOG_QUEUES[0]
FAIR = SETTINGS._replace(is_fair=True)


class KeyedLog:
    """A log of 100 records with these keys, each of one byte."""

    def __init__(self, keys: list[str]) -> None:
        self._keys, self._bytes = Log(keys), BatchLog()

    def batches(self, offset: int) -> Iterator[bytes]:
        return self._keys.batches(offset)

    def read_range(self, first: int, last: int, max_bytes: int, limit: int) -> LogSlice | None:
        return self._bytes.read_range(first, last, max_bytes, limit)


class FairBench(SharePartitionBench):
    """One topic partition with 100 records: by default 94 of a noisy key, and 6 of others at the end."""

    def __init__(self, keys: list[str] | None = None) -> None:
        super().__init__()
        self.settings = FAIR
        self.partition.log = KeyedLog(keys or ["noisy"] * 94 + [f"quiet-{number}" for number in range(6)])
        self.partition.report_damage = lambda *_: None

    def load(self) -> SharePartitions:
        found = self.scheduler.run(self.shares.load("g", PLACE))
        assert isinstance(found.leaders[0].key, ShareKey)
        return found

    def acquire(self, records: int) -> list[AcquiredRecords]:
        """Lease up to so many records, after all isolations are stored."""
        for _ in range(5):
            self.load().leaders[0].count_available("m", 1)
            self.scheduler.pass_time(10)
        found = list(self.load().acquire("m", records, 1_000, strict=True, is_first=True))
        for each in found:
            if each.update is not None:
                self.scheduler.run(each.leader.persist(each.update))
        return found


@pytest.mark.full
@settings(deadline=None, max_examples=examples(10, 100))
@given(
    st.lists(st.sampled_from(["noisy", "noisy", "loud", "third", *"abcdefgh"]), min_size=100, max_size=100),
    st.sampled_from([1, 1, 3, 10]),
)
def test_no_record_waits_for_more_than_its_share_of_the_others(keys: list[str], records: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_index, "BACKLOG_MAX", 3)
        bench = FairBench(keys)
        delivered = deliver_all(bench, records)
    offsets = [offset for _, offset in delivered]
    assert sorted(offsets) == list(range(100))
    queues = len({number for number, _ in delivered}) - 1
    for number in {number for number, _ in delivered}:
        own = [at for at, each in enumerate(delivered) if each[0] == number]
        assert [offsets[at] for at in own] == sorted(offsets[at] for at in own)
        # The weight of `BASE` is the number of its keys, that of a backlog queue at least 1.
        others = queues if number == BASE else queues - 1 + len(set(keys))
        for rank, at in enumerate(own):
            assert at <= (rank + 1) * (1 + others) + 2 * records, (number, rank, delivered)


def deliver_all(bench: FairBench, records: int) -> list[tuple[int, int]]:
    """Lease and accept so many records at a time; return their share partitions and offsets."""
    found: list[tuple[int, int]] = []
    for _ in range(300):
        for each in bench.acquire(records):
            ranges = [(first, last) for first, last, _ in each.acquired]
            found += [
                (each.leader.key.number, offset) for one in ranges for offset in range(one[0], one[1] + 1)
            ]
            batches = [AcknowledgementBatch(*one, bytes((ACCEPT,))) for one in ranges]
            for leader, update in bench.load().acknowledge("m", batches):
                bench.scheduler.run(leader.persist(update))
        if len(found) >= 100:
            break
    return found


def test_settings_that_change_while_a_state_is_loaded_are_used() -> None:
    bench = FairBench()
    bench.settings = SETTINGS
    release = bench.known_state.hold(1)
    leader = bench.shares.find_one(ShareKey("g", TOPIC, 0))
    bench.scheduler.pass_time(1)
    bench.settings = FAIR._replace(record_locks_max=7)
    bench.shares.handle_settings_change("g")
    release()
    bench.scheduler.run(leader.wait_until_loaded())
    assert leader.state_machine.settings == bench.settings
    assert leader.fair_scan is not None


def test_a_state_of_a_backlog_queue_from_before_the_group_was_set_back_is_not_used() -> None:
    bench = FairBench()
    key, queue = ShareKey("g", TOPIC, 0), ShareKey("g", TOPIC, 0, QUEUE)
    done = Update(0, True, 90, 200, 5, (StateBatch(91, 95, 2, 1),), is_snapshot=True)
    bench.scheduler.run(bench.known_state.write(queue, 2, 0, done))
    bench.scheduler.run(bench.known_state.initialize(key, 3, 0))
    assert sorted(offset for _, offset in deliver_all(bench, 100)) == list(range(100))


def test_a_late_acknowledgement_of_a_record_of_a_backlog_queue_that_ended_is_refused() -> None:
    bench = FairBench()
    bench.acquire(100)
    shares = bench.load()
    assert [leader.key.number for leader in shares.leaders] == [BASE, QUEUE]
    index = present(shares.leaders[0].fair_scan).index
    index.retire(QUEUE)
    closed = tuple(each._replace(end=100) for each in index.isolations)
    index.apply((*closed, Isolation(BACKLOG_QUEUES[1], 100, OPEN_END, "", b"other")))
    bench.shares._forget_found(shares.leaders[0].key)
    shares = bench.load()
    with pytest.raises(InvalidRecordState, match="not leased"):
        shares.acknowledge("m", [AcknowledgementBatch(80, 80, bytes((ACCEPT,)))])


def test_a_backlog_queue_is_loaded_again_after_a_failed_write_with_what_was_leased() -> None:
    bench = FairBench()
    bench.acquire(100)
    queue = bench.load().leaders[1]
    leased = queue.state_machine.leased_count
    assert leased > 0
    bench.known_state.fail(1, NotCoordinator("moved"))
    update = queue.acknowledge("m", [AcknowledgementBatch(70, 70, bytes((ACCEPT,)))])
    assert update is not None
    with pytest.raises(NotCoordinator):
        bench.scheduler.run(queue.persist(update))
    bench.scheduler.pass_time(1_000)
    again = bench.load().leaders[1]
    assert again is not queue
    assert again.state_machine.leased_count == leased
    assert bench.load().leaders[0].fair_scan is not None
