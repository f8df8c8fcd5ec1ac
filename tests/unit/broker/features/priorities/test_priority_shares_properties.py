"""Division of deliveries among priorities: no starvation in any window, high first, reserved locks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.broker.features.priorities.priority_shares import WINDOW_RECORDS, PriorityShares
from mansio.state.share_partition.offset_numbers import NumberedRange
from mansio.state.share_partition.share_index import ACKNOWLEDGED_OFFSETS_MAX, split_acknowledgements
from mansio.state.share_partition.types import ACCEPT, AcknowledgementBatch
from mansio.wire.batch.priority_header import PRIORITIES, Priority

HIGH, NORMAL, LOW = PRIORITIES
BACKLOG = st.fixed_dictionaries(
    {priority: st.sampled_from([0, 1, 20, 2_000, 10**6]) for priority in PRIORITIES}
)


def deliver(
    shares: PriorityShares, backlog: dict[int, int], records_max: int, seen_max: int = 10**9
) -> list[Priority]:
    """One request of a member; returns the priorities of the delivered records in the order of their acquisition."""
    available: dict[int, int] = {priority: min(backlog[priority], seen_max) for priority in PRIORITIES}
    limits = shares.divide(records_max, available)
    assert sum(limit.records for limit in limits) == min(records_max, sum(available.values()))
    delivered: dict[int, int] = dict.fromkeys(PRIORITIES, 0)
    for priority, records in limits:
        delivered[priority] = records
        backlog[priority] -= records
    shares.record(delivered, available)
    return [priority for priority, records in limits for _ in range(records)]


@given(backlog=BACKLOG, sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), rounds=st.integers(1, 60))
def test_lower_priority_gets_one_in_sixteen_of_any_256_deliveries(
    backlog: dict[int, int], sizes: list[int], rounds: int
) -> None:
    shares = PriorityShares()
    delivered: list[Priority] = []
    waiting: list[set[Priority]] = []
    """The priorities that had records after each delivery."""
    for size in (sizes * (rounds * 20))[: rounds * 20]:
        found = deliver(shares, backlog, size)
        left = {priority for priority in PRIORITIES if backlog[priority]}
        delivered += found
        waiting += [left] * len(found)
    # A request's records are acquired at once: a window begins and ends between two requests, or is one record longer.
    slack = max(sizes)
    for begin in range(0, len(delivered) - WINDOW_RECORDS - slack, 7):
        window = delivered[begin : begin + WINDOW_RECORDS + slack]
        for priority in (NORMAL, LOW):
            if all(priority in each for each in waiting[begin : begin + WINDOW_RECORDS + slack]):
                assert window.count(priority) >= WINDOW_RECORDS // 16, (begin, priority)


def test_single_deliveries_keep_the_guarantee_exactly() -> None:
    shares = PriorityShares()
    backlog: dict[int, int] = dict.fromkeys(PRIORITIES, 100_000)
    delivered = [deliver(shares, backlog, 1)[0] for _ in range(3_000)]
    for begin in range(len(delivered) - WINDOW_RECORDS):
        window = delivered[begin : begin + WINDOW_RECORDS]
        assert window.count(NORMAL) >= 16
        assert window.count(LOW) >= 16
        assert window.count(HIGH) >= WINDOW_RECORDS - 2 * 19


def test_high_priority_is_first_and_nothing_is_owed_while_none_waits() -> None:
    shares = PriorityShares()
    backlog: dict[int, int] = {HIGH: 0, NORMAL: 0, LOW: 10_000}
    for _ in range(100):
        deliver(shares, backlog, 10)
    backlog[HIGH] = 14
    assert deliver(shares, backlog, 14) == [HIGH] * 14


def test_owed_records_that_did_not_fit_come_first() -> None:
    shares = PriorityShares()
    available: dict[int, int] = {HIGH: 100, NORMAL: 0, LOW: 100}
    for _ in range(40):
        shares.record({HIGH: 1}, available)
    assert shares.divide(1, available)[0].priority is LOW


@given(
    leased=st.fixed_dictionaries({priority: st.integers(0, 60) for priority in PRIORITIES}),
    locks_max=st.integers(3, 200),
)
def test_reserved_locks_are_never_used_by_other_priorities(leased: dict[int, int], locks_max: int) -> None:
    reserved = max(locks_max // 16, 1)
    for priority in PRIORITIES:
        taken = max(PriorityShares().free_locks(priority, leased, locks_max), 0)
        now = {**leased, priority: leased[priority] + taken}
        if taken:
            assert sum(now.values()) <= locks_max
            for other in PRIORITIES:
                if other is not priority:
                    assert locks_max - sum(now.values()) >= reserved - leased[other]


def test_acknowledgements_of_more_offsets_than_can_be_leased_are_not_split() -> None:
    index = PriorityIndex(0)
    end = 2 * ACKNOWLEDGED_OFFSETS_MAX
    index.append(end, [NumberedRange(at, at, Priority.HIGH) for at in range(0, end, 2)])
    size = ACKNOWLEDGED_OFFSETS_MAX // 2
    batches = [AcknowledgementBatch(at, at + size - 1, bytes([ACCEPT])) for at in range(0, end, size)]
    assert set(split_acknowledgements(batches[:2], index)) == {HIGH, NORMAL}
    assert split_acknowledgements(batches[:3], index) == {NORMAL: batches[:3]}
