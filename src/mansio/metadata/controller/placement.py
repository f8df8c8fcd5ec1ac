"""Which brokers keep a partition. Pure.

Owns the order in which brokers take partitions. Leaders go round all brokers, racks in turn, so each leads as many as
any other, give or take one. The further copies start at another distance in each round, so that the partitions of a
broker that fails are led on by many others and not all by its neighbour.

Always true: the copies of a partition are on different brokers, and on as many racks as there can be. A broker that
tells no rack counts as a rack of its own. The same arguments give the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


class UsableBroker(NamedTuple):
    """A broker that can take partitions."""

    node_id: int
    rack: str | None


def place_replicas(
    count: int, replication_factor: int, places: Iterable[UsableBroker], *, start: int = 0
) -> list[tuple[int, ...]]:
    """The brokers of `count` partitions, the preferred leader first. `start` is where on the round they begin: the
    number of partitions a topic has already, plus anything.

    1 <= `replication_factor` <= number of places.
    """
    ring = _in_turn(places)
    size = len(ring)
    assert 1 <= replication_factor <= size, "the caller knows how many brokers there are"
    placed = []
    for number in range(start, start + count):
        leader, distance = number % size, number // size
        others = [ring[(leader + 1 + (distance + step) % (size - 1)) % size] for step in range(size - 1)]
        placed.append(_spread(ring[leader], others, replication_factor))
    return placed


def _spread(leader: UsableBroker, others: Sequence[UsableBroker], replication_factor: int) -> tuple[int, ...]:
    chosen = [leader]
    taken = {_rack(leader): 1}
    left = list(others)
    while len(chosen) < replication_factor:
        following = min(left, key=lambda one: taken.get(_rack(one), 0))  # the first of those that are equal
        left.remove(following)
        chosen.append(following)
        taken[_rack(following)] = taken.get(_rack(following), 0) + 1
    return tuple(one.node_id for one in chosen)


def _in_turn(places: Iterable[UsableBroker]) -> list[UsableBroker]:
    """One broker of each rack, then the next of each."""
    racks: dict[Hashable, list[UsableBroker]] = {}
    for one in sorted(places, key=lambda one: one.node_id):
        racks.setdefault(_rack(one), []).append(one)
    ring = []
    while racks:
        for rack in list(racks):
            ring.append(racks[rack].pop(0))
            if not racks[rack]:
                del racks[rack]
    return ring


def _rack(one: UsableBroker) -> Hashable:
    return one.rack if one.rack is not None else (one.node_id,)
