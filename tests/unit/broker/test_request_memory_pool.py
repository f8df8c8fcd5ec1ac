"""Request memory pool: its limit, its fairness, and freedom from deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.api.kafka.connections.connection import MUTE_MS_MAX
from mansio.api.kafka.connections.request_memory_pool import (
    BLOCKED_BY_BROKER_S,
    PROGRESS_BYTES_MIN,
    STALL_S,
    STALL_S_MIN,
    RequestMemoryPool,
)
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.api.kafka.connections.connection import Connection

BUDGET = 100


class Peer:
    """Sends one frame of `size`, doubling what it holds, until it has all of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.got = 1
        self.received_bytes = 0
        self.is_waiting_for_disk = False
        self.is_blocked_by_broker = False


def as_connection(peer: Peer) -> Connection:
    return peer  # type: ignore[return-value]  # all that the memory looks at


@settings(max_examples=examples(25, 300), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    choices=st.lists(st.integers(0, 1 << 16), max_size=400),
)
def test_every_frame_is_received_in_the_end_and_the_bound_holds(sizes: list[int], choices: list[int]) -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    peers = [Peer(size) for size in sizes]
    largest = max(sizes)
    for step in range(20_000):
        ready = [peer for peer in peers if not memory.is_waiting(as_connection(peer))]
        if not peers:
            return
        assert ready, "everybody waits for everybody"
        peer = ready[choices[step % len(choices)] % len(ready)] if choices else ready[0]
        if peer.got == peer.size:
            peers.remove(peer)
            memory.release(as_connection(peer))
        else:
            memory.acquire(as_connection(peer), min(peer.size, 2 * peer.got))
            if not memory.is_waiting(as_connection(peer)):
                peer.got = min(peer.size, 2 * peer.got)
        assert memory.held_bytes <= BUDGET + largest
    raise AssertionError("not all frames were received")


def test_only_a_holder_that_keeps_others_waiting_and_hardly_sends_is_stalled() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    lazy, busy, late = Peer(90), Peer(90), Peer(90)
    memory.acquire(as_connection(lazy), 50)
    memory.acquire(as_connection(busy), 50)
    assert memory.find_stalled(0.0) == []
    assert memory.find_stalled(100.0) == [], "nobody waits"
    memory.acquire(as_connection(late), 50)
    assert memory.is_waiting(as_connection(late))
    assert memory.find_stalled(101.0) == [], "they have just been seen"
    busy.received_bytes += PROGRESS_BYTES_MIN
    lazy.received_bytes += 1  # a byte now and then is no progress
    assert memory.find_stalled(101.0 + STALL_S) == [as_connection(lazy)]
    assert memory.release(as_connection(lazy)) == [as_connection(late)]
    assert memory.held_bytes == 100
    for peer in (busy, late):
        memory.release(as_connection(peer))
    assert memory.held_bytes == 0


def test_a_client_that_is_helped_by_anothers_wait_learns_it() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    first, second = Peer(200), Peer(200)
    memory.acquire(as_connection(first), 50)
    memory.acquire(as_connection(second), 50)
    assert memory.acquire(as_connection(first), 100) == []
    assert memory.is_waiting(as_connection(first))
    assert memory.acquire(as_connection(second), 100) == [as_connection(first)], "all wait: the first goes on"
    assert not memory.is_waiting(as_connection(first))
    assert memory.is_waiting(as_connection(second))


def test_a_frame_larger_than_the_budget_still_gets_through_when_alone() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    giant = as_connection(Peer(500))
    for wanted in (90, 500):
        memory.acquire(giant, wanted)
        assert not memory.is_waiting(giant)


def test_many_clients_that_stop_in_mid_frame_are_closed_after_a_few_times_the_idle_limit() -> None:
    """Each holds as much as it gets and then sends nothing more; the last one gets room in the end, and soon."""
    last = as_connection(Peer(8))
    slow_peers = [as_connection(Peer(8)) for _ in range(400)]
    memory = RequestMemoryPool[Any](BUDGET)
    wanted = dict.fromkeys([*slow_peers, last], 2)
    to_read = [*slow_peers, last]
    now = 0.0
    while True:
        while to_read:
            reader = to_read.pop(0)
            to_read += memory.acquire(reader, wanted[reader])
            if not memory.is_waiting(reader) and wanted[reader] < 8:
                wanted[reader] *= 2
                to_read.append(reader)
        if wanted[last] == 8 and not memory.is_waiting(last):
            break
        now += 0.1
        assert now < 1000, "the last never gets room"
        for stalled in memory.find_stalled(now):
            to_read += memory.release(stalled)
    assert now < 2 * 400 * 8 / BUDGET * STALL_S_MIN + 2 * STALL_S, "by the dozen, not one after the other"


def test_who_has_begun_goes_before_who_is_new_and_the_oldest_first() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    old, young, new = (as_connection(Peer(90)) for _ in range(3))
    blocker = as_connection(Peer(90))
    for peer in (old, young):
        memory.acquire(peer, 20)
    memory.acquire(blocker, 60)
    memory.acquire(new, 5)
    assert memory.is_waiting(new), "more than half is taken"
    memory.acquire(young, 40)
    memory.acquire(old, 40)
    assert memory.release(blocker) == [old, young]
    assert memory.is_waiting(new)
    assert memory.release(old) == [new]
    assert not memory.has_waiters
    for peer in (young, new):
        memory.release(peer)
    assert memory.held_bytes == 0


def test_a_client_that_the_broker_holds_up_is_spared_but_neither_for_ever_nor_with_the_whole_budget() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    muted, second, late = Peer(90), Peer(90), Peer(90)
    memory.acquire(as_connection(muted), 45)
    memory.acquire(as_connection(second), 50)
    memory.acquire(as_connection(late), 50)
    assert memory.is_waiting(as_connection(late))
    muted.is_blocked_by_broker = second.is_blocked_by_broker = True
    assert BLOCKED_BY_BROKER_S >= MUTE_MS_MAX / 1000
    found: dict[str, float] = {}
    names: dict[Any, str] = {muted: "muted", second: "second"}
    for step in range(500):
        for stalled in memory.find_stalled(step / 10):
            found.setdefault(names[stalled], step / 10)
    assert found["second"] <= STALL_S, "together they would hold more than half"
    assert BLOCKED_BY_BROKER_S < found["muted"] <= BLOCKED_BY_BROKER_S + STALL_S + 0.5


def test_a_client_that_is_held_up_again_after_a_frame_began_is_spared_again() -> None:
    memory = RequestMemoryPool[Any](BUDGET)
    muted, late = Peer(90), Peer(90)
    memory.acquire(as_connection(muted), 90)
    memory.acquire(as_connection(late), 95)
    muted.is_blocked_by_broker = True
    for step in range(900):
        assert memory.find_stalled(step / 10) == []
        if step % 250 == 249:
            memory.shrink(as_connection(muted), 90 - step // 250 - 1)
