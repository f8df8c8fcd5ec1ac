"""The shared receive memory: its bound, its fairness, and that it never comes to a standstill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.receive_memory import PROGRESS_BYTES_MIN, STALL_S, ReceiveMemory

if TYPE_CHECKING:
    from mansio.broker.connection import Connection

BUDGET = 100


class Peer:
    """Sends one frame of `size`, doubling what it holds, until it has all of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.got = 1
        self.received_bytes = 0


def as_connection(peer: Peer) -> Connection:
    return peer  # type: ignore[return-value]  # all that the memory looks at


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    choices=st.lists(st.integers(0, 1 << 16), max_size=400),
)
def test_every_frame_is_received_in_the_end_and_the_bound_holds(sizes: list[int], choices: list[int]) -> None:
    memory = ReceiveMemory(BUDGET)
    peers = [Peer(size) for size in sizes]
    largest = max(sizes)
    for step in range(20_000):
        ready = [peer for peer in peers if not memory.waits(as_connection(peer))]
        if not peers:
            return
        assert ready, "everybody waits for everybody"
        peer = ready[choices[step % len(choices)] % len(ready)] if choices else ready[0]
        if peer.got == peer.size:
            peers.remove(peer)
            memory.release(as_connection(peer))
        else:
            memory.take(as_connection(peer), min(peer.size, 2 * peer.got))
            if not memory.waits(as_connection(peer)):
                peer.got = min(peer.size, 2 * peer.got)
        assert memory.held_bytes <= BUDGET + largest
    raise AssertionError("not all frames were received")


def test_only_a_holder_that_keeps_others_waiting_and_hardly_sends_is_stalled() -> None:
    memory = ReceiveMemory(BUDGET)
    lazy, busy, late = Peer(90), Peer(90), Peer(90)
    memory.take(as_connection(lazy), 50)
    memory.take(as_connection(busy), 50)
    assert memory.stalled(0.0) == []
    assert memory.stalled(100.0) == [], "nobody waits"
    memory.take(as_connection(late), 50)
    assert memory.waits(as_connection(late))
    assert memory.stalled(101.0) == [], "they have just been seen"
    busy.received_bytes += PROGRESS_BYTES_MIN
    lazy.received_bytes += 1  # a byte now and then is no progress
    assert memory.stalled(101.0 + STALL_S) == [as_connection(lazy)]
    assert memory.release(as_connection(lazy)) == [as_connection(late)]
    assert memory.held_bytes == 100
    for peer in (busy, late):
        memory.release(as_connection(peer))
    assert memory.held_bytes == 0


def test_whoever_is_helped_by_anothers_wait_is_told() -> None:
    memory = ReceiveMemory(BUDGET)
    first, second = Peer(200), Peer(200)
    memory.take(as_connection(first), 50)
    memory.take(as_connection(second), 50)
    assert memory.take(as_connection(first), 100) == []
    assert memory.waits(as_connection(first))
    assert memory.take(as_connection(second), 100) == [as_connection(first)], "all wait: the first goes on"
    assert not memory.waits(as_connection(first))
    assert memory.waits(as_connection(second))


def test_a_frame_larger_than_the_budget_still_gets_through_when_alone() -> None:
    memory = ReceiveMemory(BUDGET)
    giant = as_connection(Peer(500))
    for wanted in (90, 500):
        memory.take(giant, wanted)
        assert not memory.waits(giant)
