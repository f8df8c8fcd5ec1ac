"""Plans of moves: which replicas to move so that brokers have even loads, or that a broker has none. Pure functions.

A plan lists, for each partition that changes, its replicas before and after; the first one is the preferred leader. A
rebalance brings each broker near the mean number of replicas, of bytes and of preferred leaderships. The mean is taken
over what racks allow: with three racks and three replicas, each rack has a replica of each partition, and a fourth
broker can take replicas of the brokers of its own rack only. So the numbers are divided among racks in proportion to
their brokers, within the bounds of `_rack_bounds`, and then equally among the brokers of a rack.

A rebalance first moves replicas away from hosts that have another one of their partition, from before the brokers had
labels of their hosts. Then it is a local search. It repeats the first three steps until none of them finds a move:

1. a replica leaves a rack that has too many of its partition;
2. a replica moves because a broker has too many or too few, chosen by size so that bytes become even, too;
3. a replica moves, or is exchanged for a smaller one, because a broker has too many or too few bytes;
4. the replicas of a partition are reordered because a broker is the preferred leader of too many or too few partitions.
   This copies nothing.

Steps 1 to 3 decrease, in this order of precedence, the number of replicas in the wrong rack, the distances of the
numbers of replicas from their bands, and the sum of the squares of the deviations in bytes; so they end. Whether a step
finds a move depends on the present replicas only, so a plan for the outcome of a plan is empty.

Partitions are sorted once by size. The replicas of a broker that may move to a rack are a list in this order, in which
a replica of a wanted size is found by bisection, so that the effort is about n log n in the number of partitions.

Invariants:
* Equal arguments give equal plans, whatever their order.
* Only usable brokers get replicas. No partition gets fewer replicas, nor more. No replica moves to a host that has
  another one of its partition.
* No move of a rebalance or drain increases the number of replicas in the wrong rack where a broker in another one can
  take the replica.
* Partitions without a leader, and those that are moving, keep their replicas.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import islice
from math import ceil, floor
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidReplicaAssignment, InvalidReplicationFactor, InvalidRequest
from mansio.metadata.model import default_host

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

MOVES_PER_BROKER_MAX: Final = 5
"""Number of replicas that are copied to a broker, and from a leader, at once."""
COUNT_TOLERANCE: Final = Fraction(2, 100)
"""Deviation from the mean number of replicas or preferred leaderships that stays. Less than one always stays."""
BYTES_TOLERANCE: Final = 0.05
"""Deviation from the mean number of bytes that stays."""
ROUNDS_MAX: Final = 50
"""Bound of the repetitions of a rebalance; a few are used."""

_CHOICES: Final = 8
"""Replicas of about the wanted size among which a search chooses by topic."""
_USEFUL_SHARE: Final = 4
"""A move for the sake of bytes moves at least the mean size of a replica, divided by this."""
_OVERSHOOT: Final = 0.9
"""A move for the sake of bytes moves less than this share of the difference of both brokers."""


class PlannedBroker(NamedTuple):
    """A broker of the cluster. `is_usable`: whether it may get replicas. `host`: the label of its host; empty: it is a
    host of its own."""

    node_id: int
    rack: str | None
    is_usable: bool = True
    host: str = ""


class PlannedPartition(NamedTuple):
    """A partition, with the size of one replica. `leader` is -1 without a leader; `is_moving`: its replicas are being
    moved, and `replicas` are the future ones."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    size_bytes: int
    leader: int
    is_moving: bool = False


class Move(NamedTuple):
    """New replicas of a partition. `leader` is the broker from which added replicas are copied; `copied_bytes` is the
    size of all added replicas together."""

    topic: str
    partition: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    leader: int
    copied_bytes: int

    @property
    def added(self) -> tuple[int, ...]:
        """The brokers that get a replica; none if the replicas are only reordered."""
        return tuple(node_id for node_id in self.after if node_id not in self.before)


class Rebalance(NamedTuple):
    """The goal that all usable brokers have even loads."""


class Drain(NamedTuple):
    """The goal that a broker has no replicas. Other brokers exchange none."""

    broker: int


class Replace(NamedTuple):
    """The goal that broker `new` gets the replicas of broker `old`, at their positions in the replica lists."""

    old: int
    new: int


Goal = Rebalance | Drain | Replace


def plan_moves(
    brokers: Iterable[PlannedBroker], partitions: Iterable[PlannedPartition], goal: Goal
) -> list[Move]:
    """Return the moves that reach a goal, those that copy most bytes first.

    Raises `InvalidRequest` for a broker that does not exist or may not get replicas, `InvalidReplicationFactor` if
    without the broker there are fewer brokers than replicas of a partition, and `InvalidReplicaAssignment` if a
    replacement would put more replicas of a partition into one rack.
    """
    brokers, partitions = sorted(brokers), list(partitions)
    if isinstance(goal, Rebalance):
        layout = _Layout(brokers, partitions)
        layout.rebalance()
        return layout.moves()
    leaving = goal.broker if isinstance(goal, Drain) else goal.old
    if all(one.node_id != leaving for one in brokers) and all(
        leaving not in one.replicas for one in partitions
    ):
        raise InvalidRequest(f"there is no broker {leaving}")
    layout = _Layout(brokers, partitions, leaving=leaving)
    if isinstance(goal, Drain):
        layout.drain()
    else:
        layout.replace(goal.new)
    return layout.moves()


def startable_moves(
    pending: Iterable[Move], running: Iterable[Move], *, limit: int = MOVES_PER_BROKER_MAX
) -> list[Move]:
    """Return the moves of `pending` that can start beside those that are `running`, in order: at most `limit` replicas
    are copied to a broker at once, and at most `limit` from a leader. A move that copies more starts alone."""
    into: Counter[int] = Counter()
    out: Counter[int] = Counter()

    def start(move: Move) -> None:
        into.update(move.added)
        out[move.leader] += len(move.added)

    for move in running:
        start(move)
    chosen = []
    for move in pending:
        copies = len(move.added)
        has_room = not out[move.leader] or out[move.leader] + copies <= limit
        if not copies or (has_room and all(into[node_id] < limit for node_id in move.added)):
            chosen.append(move)
            start(move)
    return chosen


def copy_seconds(moves: Iterable[Move], bytes_per_second: int) -> float:
    """Return the time that moves take if each broker copies `bytes_per_second`."""
    return max(incoming_bytes(moves).values(), default=0) / bytes_per_second


def incoming_bytes(moves: Iterable[Move]) -> dict[int, int]:
    """Return the number of bytes that moves copy to each broker."""
    into: Counter[int] = Counter()
    for move in moves:
        for node_id in move.added:
            into[node_id] += move.copied_bytes // len(move.added)
    return dict(into)


class _Band(NamedTuple):
    """Numbers of replicas of a broker at which it keeps them, and their mean."""

    mean: float
    least: int
    most: int


class _Layout:
    """The replicas of all partitions, as a plan changes them.

    Brokers have slots: the usable ones come first, sorted by node id. A partition's number is its position in the order
    of sizes. `_held` has the numbers of the movable partitions of each usable broker, in ascending order; `_choices`
    has, for a broker and another rack, those that may move there. In its own rack all may move.
    """

    def __init__(
        self,
        brokers: Sequence[PlannedBroker],
        partitions: Sequence[PlannedPartition],
        *,
        leaving: int | None = None,
    ) -> None:
        """`leaving`: a broker that is to have no replicas."""
        usable = [one for one in brokers if one.is_usable and one.node_id != leaving]
        others = [one.node_id for one in brokers if not one.is_usable or one.node_id == leaving]
        self._usable = len(usable)
        self._node_ids = [one.node_id for one in usable] + others
        self._slots = {node_id: slot for slot, node_id in enumerate(self._node_ids)}
        self._leaving = leaving
        racks: dict[Hashable, int] = {}
        for one in usable:
            racks.setdefault(_rack(one), len(racks))
        by_id = {one.node_id: one for one in brokers}
        self._racks = [racks.get(_rack(by_id[node_id]), -1) for node_id in self._node_ids]
        """The rack of each slot; -1 for one without a usable broker."""
        self._hosts = [_host(by_id[node_id]) for node_id in self._node_ids]
        """The label of the host of each slot."""
        self._has_shared_hosts = len(set(self._hosts)) < len(self._hosts)
        hosts: list[set[str]] = [set() for _ in racks]
        rack_brokers = [0] * len(racks)
        for node_id, rack, host in zip(self._node_ids, self._racks, self._hosts, strict=True):
            if rack >= 0 and node_id != leaving:
                hosts[rack].add(host)
                rack_brokers[rack] += 1
        self._rack_sizes = [len(each) for each in hosts]
        """Number of hosts in each rack: that of the replicas of one partition that it can take."""
        self._has_shared_racks = any(number > 1 for number in rack_brokers)
        """Whether a rack has several brokers; otherwise no replica can be in the wrong one."""
        self._partitions = sorted(partitions, key=lambda one: (one.size_bytes, one.partition, one.topic))
        self._sizes = [one.size_bytes for one in self._partitions]
        self._load_replicas()
        self._set_targets()

    def _load_replicas(self) -> None:
        self._count = [0] * self._usable
        self._bytes = [0] * self._usable
        self._held: list[list[int]] = [[] for _ in range(self._usable)]
        self._topics: list[Counter[str]] = [Counter() for _ in range(self._usable)]
        self._choices: list[dict[int, list[int]]] = [{} for _ in range(self._usable)]
        """By slot and rack; a list is made when it is needed first."""
        self._versions = [0] * self._usable
        """Number of changes of the replicas of each usable broker."""
        self._even_pairs: dict[tuple[int, int], tuple[int, int]] = {}
        """Pairs of brokers between which no move helps to even bytes, with their versions at that time."""
        self._replicas: list[list[int]] = []
        self._factors: list[int] = []
        """Number of replicas of each partition that are, or shall be, in racks with usable brokers."""
        slots, racks = self._slots, self._racks
        for number, (topic, _, replicas, size_bytes, leader, is_moving) in enumerate(self._partitions):
            placed = []
            factor = 0
            for node_id in replicas:
                if (slot := slots.get(node_id)) is None:
                    slot = self._add_unknown(node_id)
                placed.append(slot)
                factor += racks[slot] >= 0 or node_id == self._leaving
                if slot < self._usable:
                    self._count[slot] += 1
                    self._bytes[slot] += size_bytes
                    self._topics[slot][topic] += 1
                    if leader >= 0 and not is_moving:
                        self._held[slot].append(number)
            self._replicas.append(placed)
            self._factors.append(factor)
        self._original = [tuple(placed) for placed in self._replicas]

    def _add_unknown(self, node_id: int) -> int:
        """Add a broker that is not registered, but has replicas."""
        slot = self._slots[node_id] = len(self._node_ids)
        self._node_ids.append(node_id)
        self._racks.append(-1)
        self._hosts.append(default_host(node_id))
        return slot

    def _is_movable(self, number: int) -> bool:
        partition = self._partitions[number]
        return partition.leader >= 0 and not partition.is_moving

    # -- targets --------

    def _set_targets(self) -> None:
        """Set the bounds of racks, and the mean number of replicas and bytes of each usable broker."""
        self._bounds = {factor: _rack_bounds(self._rack_sizes, factor) for factor in set(self._factors)}
        brokers = [0] * len(self._rack_sizes)
        for rack in self._racks[: self._usable]:
            brokers[rack] += 1
        counted: Counter[int] = Counter(self._factors)
        sized: Counter[int] = Counter()
        for factor, size_bytes in zip(self._factors, self._sizes, strict=True):
            sized[factor] += size_bytes
        fixed_count, fixed_bytes = [0] * len(brokers), [0] * len(brokers)
        leaving_count = leaving_bytes = 0
        if len(self._node_ids) > self._usable:
            for number, placed in enumerate(self._replicas):
                for slot in placed:
                    if slot < self._usable:
                        continue
                    if self._node_ids[slot] == self._leaving:
                        if self._is_movable(number):
                            leaving_count += 1
                            leaving_bytes += self._sizes[number]
                    elif self._racks[slot] >= 0:
                        fixed_count[self._racks[slot]] += 1
                        fixed_bytes[self._racks[slot]] += self._sizes[number]
        counts = self._divide(brokers, counted, fixed_count, sum(self._count) + leaving_count)
        sizes = self._divide(brokers, sized, fixed_bytes, sum(self._bytes) + leaving_bytes)
        self._rack_most = [
            sum(number * self._bounds[factor][rack][1] for factor, number in counted.items())
            - fixed_count[rack]
            for rack in range(len(brokers))
        ]
        self._count_bands = [_band(counts[rack]) for rack in self._racks[: self._usable]]
        self._byte_means = [float(sizes[rack]) for rack in self._racks[: self._usable]]
        replicas = sum(self._count) + leaving_count
        self._mean_size = (sum(self._bytes) + leaving_bytes) / replicas if replicas else 0.0

    def _divide(
        self, brokers: Sequence[int], by_factor: Counter[int], fixed: Sequence[int], total: int
    ) -> list[Fraction]:
        """Divide a total among racks; return the mean of a broker of each rack."""
        least, most = [0] * len(brokers), [0] * len(brokers)
        for factor, number in by_factor.items():
            for rack, (low, high) in enumerate(self._bounds[factor]):
                least[rack] += low * number
                most[rack] += high * number
        shares = _divide(
            total,
            brokers,
            [max(0, low - there) for low, there in zip(least, fixed, strict=True)],
            [max(0, high - there) for high, there in zip(most, fixed, strict=True)],
        )
        return [share / number for share, number in zip(shares, brokers, strict=True)]

    # -- changes --------

    def _move(self, number: int, source: int, target: int) -> None:
        """Replace the replica at `source` by one at `target`, at the same position."""
        placed = self._replicas[number]
        is_other_rack = self._racks[source] != self._racks[target]
        if is_other_rack and self._has_shared_racks:
            self._even_pairs.clear()  # the numbers of replicas in the racks change
        for slot in placed if is_other_rack else (source,):
            self._remove_choices(number, slot)
        placed[placed.index(source)] = target
        topic, size_bytes = self._partitions[number].topic, self._sizes[number]
        if source < self._usable:
            self._versions[source] += 1
            self._count[source] -= 1
            self._bytes[source] -= size_bytes
            self._topics[source][topic] -= 1
            held = self._held[source]
            del held[bisect_left(held, number)]
        self._versions[target] += 1
        self._count[target] += 1
        self._bytes[target] += size_bytes
        self._topics[target][topic] += 1
        insort(self._held[target], number)
        for slot in placed if is_other_rack else (target,):
            self._add_choices(number, slot)

    def _remove_choices(self, number: int, source: int) -> None:
        if source < self._usable:
            for choices in self._choices[source].values():
                position = bisect_left(choices, number)
                if position < len(choices) and choices[position] == number:
                    del choices[position]

    def _add_choices(self, number: int, source: int) -> None:
        if source < self._usable:
            for rack, choices in self._choices[source].items():
                if self._misplacement(number, source, rack) <= 0:
                    insort(choices, number)

    def _movable(self, source: int, target: int) -> list[int]:
        """Return the partitions of which a replica may move from `source` to the rack of `target`, the smallest
        first."""
        rack = self._racks[target]
        if rack == self._racks[source] or not self._has_shared_racks:
            return self._held[source]
        choices = self._choices[source].get(rack)
        if choices is None:
            held = self._held[source]
            choices = [number for number in held if self._misplacement(number, source, rack) <= 0]
            self._choices[source][rack] = choices
        return choices

    def _misplacement(self, number: int, source: int, to_rack: int) -> int:
        """Return by how much a move to a rack changes the number of replicas in the wrong rack."""
        racks = self._racks
        from_rack = racks[source]
        if from_rack == to_rack or not self._has_shared_racks:
            return 0
        in_from = in_to = 0
        for slot in self._replicas[number]:
            rack = racks[slot]
            if rack == from_rack:
                in_from += 1
            elif rack == to_rack:
                in_to += 1
        bounds = self._bounds[self._factors[number]]
        least, most = bounds[to_rack]
        change = (in_to >= most) - (in_to < least)
        if from_rack >= 0:
            least, most = bounds[from_rack]
            change += (in_from <= least) - (in_from > most)
        return change

    def _is_allowed(self, number: int, source: int, target: int) -> bool:
        """Whether a replica may move: to a host without one, and not into a rack that has enough."""
        return (
            self._is_host_free(number, source, target)
            and self._misplacement(number, source, self._racks[target]) <= 0
        )

    def _is_host_free(self, number: int, source: int, target: int) -> bool:
        """Whether a partition has no replica at `target`, nor on its host, but for the one at `source`."""
        placed, hosts = self._replicas[number], self._hosts
        if target in placed:
            return False
        if not self._has_shared_hosts:
            return True
        host = hosts[target]
        return all(hosts[slot] != host for slot in placed if slot != source)

    def _fullness(self, slot: int, size_bytes: int) -> float:
        """Return the load of a broker with one more replica, relative to its means."""
        return max(
            (self._count[slot] + 1) / (self._count_bands[slot].mean + 1),
            (self._bytes[slot] + size_bytes) / (self._byte_means[slot] + 1),
        )

    def _target(self, number: int, source: int) -> int | None:
        """Return the best broker for a replica that leaves `source`; None if all hosts with usable brokers have one."""
        size_bytes = self._sizes[number]
        return min(
            (slot for slot in range(self._usable) if self._is_host_free(number, source, slot)),
            key=lambda slot: (
                self._misplacement(number, source, self._racks[slot]),
                self._fullness(slot, size_bytes),
                slot,
            ),
            default=None,
        )

    # -- drain and replace --------

    def _leaving_replicas(self) -> Iterator[int]:
        """Yield the movable partitions of the broker that leaves, the largest first."""
        assert self._leaving is not None
        slot = self._slots.get(self._leaving, -1)
        for number in range(len(self._partitions) - 1, -1, -1):
            if slot in self._replicas[number] and self._is_movable(number):
                yield number

    def drain(self) -> None:
        """Move all replicas of the broker that leaves to others."""
        assert self._leaving is not None
        drained = list(self._leaving_replicas())
        for number in drained:
            self._drain_replica(number)
        self._even_leaderships(drained)

    def _drain_replica(self, number: int) -> None:
        assert self._leaving is not None
        slot = self._slots[self._leaving]
        target = self._target(number, slot)
        if target is None:
            topic, index, replicas, *_ = self._partitions[number]
            raise InvalidReplicationFactor(
                f"{topic}-{index} has {len(replicas)} replica(s), and without broker {self._leaving} there is no usable"
                " broker for one of them: add a broker, or lower the replication factor"
            )
        self._move(number, slot, target)

    def replace(self, new: int) -> None:
        """Put the broker `new` in the place of the one that leaves. A partition of which it has a replica already gets
        another broker instead."""
        slot = self._slots.get(new, self._usable)
        if slot >= self._usable:
            raise InvalidRequest(f"broker {new} is not there, or may not get replicas")
        assert self._leaving is not None
        old = self._slots.get(self._leaving, -1)
        for number in list(self._leaving_replicas()):
            if not self._is_host_free(number, old, slot):
                self._drain_replica(number)
                continue
            if self._misplacement(number, old, self._racks[slot]) > 0 and self._is_placeable(number, old):
                topic, index, *_ = self._partitions[number]
                raise InvalidReplicaAssignment(
                    f"{topic}-{index} would have more replicas in the rack of broker {new} than are necessary: replace"
                    f" broker {self._leaving} by one in its own rack, or drain it"
                )
            self._move(number, old, slot)

    def _is_placeable(self, number: int, source: int) -> bool:
        """Whether a usable broker can take a replica without more replicas in the wrong rack."""
        return any(self._is_allowed(number, source, slot) for slot in range(self._usable))

    # -- rebalance --------

    def rebalance(self) -> None:
        """Make the loads of the usable brokers even."""
        self._correct_hosts()
        for _ in range(ROUNDS_MAX):
            found = self._correct_racks()
            found |= self._even_counts()
            found |= self._even_bytes()
            if not found:
                break
        self._even_leaderships(range(len(self._partitions)))

    def _correct_hosts(self) -> None:
        """Move replicas away from hosts that have another one of their partition, where a host without one can take
        them."""
        if not self._has_shared_hosts:
            return
        hosts = self._hosts
        for number in range(len(self._partitions) - 1, -1, -1):
            if not self._is_movable(number):
                continue
            placed = self._replicas[number]
            if len({hosts[slot] for slot in placed}) == len(placed):
                continue
            for source in placed[::-1]:
                is_shared = any(slot != source and hosts[slot] == hosts[source] for slot in placed)
                if is_shared and source < self._usable:
                    target = self._target(number, source)
                    if target is not None:
                        self._move(number, source, target)

    def _correct_racks(self) -> bool:
        """Move replicas out of racks that have too many of their partition; return whether any moved."""
        if not self._has_shared_racks:
            return False
        found = False
        for number in range(len(self._partitions) - 1, -1, -1):
            if self._is_movable(number):
                while (move := self._rack_move(number)) is not None:
                    self._move(number, *move)
                    found = True
        return found

    def _rack_move(self, number: int) -> tuple[int, int] | None:
        placed, racks = self._replicas[number], self._racks
        factor = self._factors[number]
        if factor < len(self._rack_sizes) and len({racks[slot] for slot in placed}) == len(placed):
            return None  # the usual case: more racks than replicas, and no two in one rack
        bounds = self._bounds[factor]
        there = Counter(racks[slot] for slot in placed)
        if all(low <= there[rack] <= high for rack, (low, high) in enumerate(bounds)):
            return None
        best: tuple[int, float, int, int] | None = None
        for source in placed:
            if source >= self._usable:
                continue
            changes = [self._misplacement(number, source, rack) for rack in range(len(bounds))]
            for target in range(self._usable):
                change = changes[racks[target]]
                if change >= 0 or (best is not None and change > best[0]):
                    continue
                if not self._is_host_free(number, source, target):
                    continue
                score = (change, self._fullness(target, self._sizes[number]), source, target)
                if best is None or score < best:
                    best = score
        return None if best is None else best[2:]

    def _even_counts(self) -> bool:
        """Move replicas until the number of each broker is in its band, or no move is allowed; return whether any
        moved."""
        found = False
        while (move := self._count_move()) is not None:
            self._move(*move)
            found = True
        return found

    def _count_move(self) -> tuple[int, int, int] | None:
        """Return (partition, source, target) of the next move for the sake of numbers."""
        bands, count = self._count_bands, self._count
        above = [count[slot] - band.mean for slot, band in enumerate(bands)]
        lowest = sorted(range(self._usable), key=above.__getitem__)
        highest = sorted(range(self._usable), key=above.__getitem__, reverse=True)
        for source in highest:
            if count[source] > bands[source].most:
                for target in lowest:
                    if count[target] < bands[target].most and source != target:
                        number = self._count_candidate(source, target, above)
                        if number is not None:
                            return number, source, target
        for target in lowest:
            if count[target] < bands[target].least:
                for source in highest:
                    if count[source] > bands[source].least and source != target:
                        number = self._count_candidate(source, target, above)
                        if number is not None:
                            return number, source, target
        return None

    def _count_candidate(self, source: int, target: int, above: Sequence[float]) -> int | None:
        if self._is_rack_full(source, target):
            return None
        surplus = min(
            self._bytes[source] - self._byte_means[source], self._byte_means[target] - self._bytes[target]
        )
        moves = max(1.0, min(above[source], -above[target]))
        return self._candidate(source, target, max(0.0, surplus / moves), 0, self._sizes[-1])

    def _is_rack_full(self, source: int, target: int) -> bool:
        """Whether another rack than that of `source` has all the replicas that racks allow."""
        rack = self._racks[target]
        if rack == self._racks[source]:
            return False
        there = sum(self._count[slot] for slot in range(self._usable) if self._racks[slot] == rack)
        return there >= self._rack_most[rack]

    def _even_bytes(self) -> bool:
        """Move and exchange replicas until the bytes of each broker are in their band, or nothing helps; return whether
        any moved."""
        found = False
        if self._mean_size > 0:
            while (moves := self._byte_moves()) is not None:
                for move in moves:
                    self._move(*move)
                found = True
        return found

    def _byte_moves(self) -> list[tuple[int, int, int]] | None:
        """Return the next move for the sake of bytes, or the two moves of an exchange."""
        means = self._byte_means
        above = [there - mean for there, mean in zip(self._bytes, means, strict=True)]
        lowest = sorted(range(self._usable), key=above.__getitem__)
        for source in reversed(lowest):
            if above[source] > BYTES_TOLERANCE * means[source]:
                for target in lowest:
                    if above[target] >= 0:
                        break
                    if (moves := self._byte_moves_between(source, target, above)) is not None:
                        return moves
        for target in lowest:
            if -above[target] > BYTES_TOLERANCE * means[target]:
                for source in reversed(lowest):
                    if above[source] <= 0:
                        break
                    if (moves := self._byte_moves_between(source, target, above)) is not None:
                        return moves
        return None

    def _byte_moves_between(
        self, source: int, target: int, above: Sequence[float]
    ) -> list[tuple[int, int, int]] | None:
        """Return the move or exchange of two brokers; None if none helps, which stays so until one of them changes."""
        versions = self._versions[source], self._versions[target]
        if self._even_pairs.get((source, target)) == versions:
            return None
        moves = self._byte_pair(source, target, above)
        if moves is None:
            self._even_pairs[source, target] = versions
        return moves

    def _byte_pair(
        self, source: int, target: int, above: Sequence[float]
    ) -> list[tuple[int, int, int]] | None:
        needed = min(above[source], -above[target])
        least, most = self._mean_size / _USEFUL_SHARE, _OVERSHOOT * (above[source] - above[target])
        if most < least:
            return None
        if self._may_change_counts(source, target) and not self._is_rack_full(source, target):
            number = self._candidate(source, target, needed, least, most)
            if number is not None:
                return [(number, source, target)]
        returning = (
            back for back in self._movable(target, source) if self._is_host_free(back, target, source)
        )
        for back in islice(returning, _CHOICES):
            size_bytes = self._sizes[back]
            number = self._candidate(
                source, target, needed + size_bytes, least + size_bytes, most + size_bytes
            )
            if number is not None:
                return [(number, source, target), (back, target, source)]
        return None

    def _may_change_counts(self, source: int, target: int) -> bool:
        return (
            self._count[source] > self._count_bands[source].least
            and self._count[target] < self._count_bands[target].most
        )

    def _candidate(self, source: int, target: int, wanted: float, least: float, most: float) -> int | None:
        """Return the partition of which a replica moves from `source` to `target`: one whose size is about `wanted` and
        from `least` to `most`, of a topic that `source` has more of. None if there is none."""
        choices, sizes, is_free = self._movable(source, target), self._sizes, self._is_host_free
        after = bisect_left(choices, bisect_left(sizes, min(max(wanted, least), most)))
        before = after - 1
        found: list[int] = []
        distance_max = 0.0
        while len(found) < _CHOICES:
            while before >= 0 and not is_free(choices[before], source, target):
                before -= 1
            while after < len(choices) and not is_free(choices[after], source, target):
                after += 1
            below = (
                wanted - sizes[choices[before]] if before >= 0 and sizes[choices[before]] >= least else None
            )
            above = (
                sizes[choices[after]] - wanted
                if after < len(choices) and sizes[choices[after]] <= most
                else None
            )
            if above is not None and (below is None or above <= below):
                distance, number = above, choices[after]
                after += 1
            elif below is not None:
                distance, number = below, choices[before]
                before -= 1
            else:
                break
            if not found:
                distance_max = max(distance, wanted / 4)
            elif distance > distance_max:
                break
            found.append(number)
        there, here, partitions = self._topics[source], self._topics[target], self._partitions
        return max(
            found,
            key=lambda number: there[partitions[number].topic] - here[partitions[number].topic],
            default=None,
        )

    # -- leaderships --------

    def _even_leaderships(self, numbers: Iterable[int]) -> None:
        """Reorder the replicas of some partitions until each broker is the preferred leader of its mean number."""
        leads, forced = [0] * self._usable, [0] * self._usable
        movable = []
        given = set(numbers)
        for number, placed in enumerate(self._replicas):
            first = placed[0]
            if first >= self._usable:
                continue
            leads[first] += 1
            if len(placed) > 1 and number in given and self._is_movable(number):
                movable.append(number)
            else:
                forced[first] += 1
        most = [max(*both) for both in zip(self._count, forced, strict=True)]
        bands = [_band(share) for share in _divide(sum(leads), [1] * self._usable, forced, most)]
        if all(band.least <= led <= band.most for band, led in zip(bands, leads, strict=True)):
            return
        changed = [number for number in movable if tuple(self._replicas[number]) != self._original[number]]
        waiting: defaultdict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        """(leader, other replica) -> heap of partitions, those that move anyway first."""
        kept = sorted(set(movable).difference(changed))
        for is_kept, group in ((False, changed), (True, kept)):
            for number in group:
                first, *others = self._replicas[number]
                for other in others:
                    if other < self._usable:
                        waiting[first, other].append((is_kept, number))
        while (pair := _leadership_pair(leads, bands, waiting)) is not None:
            source, target = pair
            is_kept, number = heapq.heappop(waiting[pair])
            placed = self._replicas[number]
            if placed[0] != source:
                continue  # led by another broker since it was added
            position = placed.index(target)
            placed[0], placed[position] = target, source
            leads[source] -= 1
            leads[target] += 1
            for other in placed[1:]:
                if other < self._usable:
                    heapq.heappush(waiting[target, other], (is_kept, number))

    def moves(self) -> list[Move]:
        """Return the partitions that change, those that copy most bytes first."""
        found = []
        for number, (placed, original) in enumerate(zip(self._replicas, self._original, strict=True)):
            if tuple(placed) != original:
                partition = self._partitions[number]
                added = len(set(placed).difference(original))
                found.append(
                    Move(
                        partition.topic,
                        partition.partition,
                        partition.replicas,
                        tuple(self._node_ids[slot] for slot in placed),
                        partition.leader,
                        added * partition.size_bytes,
                    )
                )
        return sorted(found, key=lambda move: (-move.copied_bytes, move.topic, move.partition))


def _leadership_pair(
    leads: Sequence[int],
    bands: Sequence[_Band],
    waiting: defaultdict[tuple[int, int], list[tuple[bool, int]]],
) -> tuple[int, int] | None:
    """Return (broker that leads too many partitions, broker that leads too few) with a partition in common."""
    above = [led - band.mean for led, band in zip(leads, bands, strict=True)]
    lowest = sorted(range(len(leads)), key=above.__getitem__)
    for source in reversed(lowest):
        if leads[source] > bands[source].most:
            for target in lowest:
                if above[source] - above[target] <= 1:
                    break
                if waiting.get((source, target)):
                    return source, target
    for target in lowest:
        if leads[target] < bands[target].least:
            for source in reversed(lowest):
                if above[source] - above[target] <= 1:
                    break
                if waiting.get((source, target)):
                    return source, target
    return None


def _rack(one: PlannedBroker) -> Hashable:
    """Return the rack of a broker; without one, its host is a rack of its own."""
    return one.rack if one.rack is not None else (_host(one),)


def _host(one: PlannedBroker) -> str:
    return one.host or default_host(one.node_id)


def _rack_bounds(sizes: Sequence[int], replication_factor: int) -> list[tuple[int, int]]:
    """Return (least, most) replicas of a partition in each rack: as even as the numbers of brokers, `sizes`, allow."""
    level = 0
    while level < max(sizes, default=0) and sum(min(size, level + 1) for size in sizes) <= replication_factor:
        level += 1
    rest = replication_factor - sum(min(size, level) for size in sizes)
    return [(level, level + 1) if size > level and rest > 0 else (min(size, level),) * 2 for size in sizes]


def _band(mean: Fraction) -> _Band:
    return _Band(
        float(mean),
        min(floor(mean), ceil(mean * (1 - COUNT_TOLERANCE))),
        max(ceil(mean), floor(mean * (1 + COUNT_TOLERANCE))),
    )


def _divide(total: int, weights: Sequence[int], least: Sequence[int], most: Sequence[int]) -> list[Fraction]:
    """Divide `total` in proportion to weights, within bounds of each part: the parts have one level, multiplied by the
    weight, unless a bound is nearer."""

    def parts(level: Fraction) -> list[Fraction]:
        return [
            max(Fraction(low), min(level * weight, Fraction(high)))
            for weight, low, high in zip(weights, least, most, strict=True)
        ]

    if total <= sum(least):
        return [Fraction(low) for low in least]
    if total >= sum(most):
        return [Fraction(high) for high in most]
    levels = sorted(
        {
            Fraction(bound, weight)
            for weight, *both in zip(weights, least, most, strict=True)
            for bound in both
        }
    )
    begin, end = 0, len(levels) - 1
    while end - begin > 1:
        middle = (begin + end) // 2
        if sum(parts(levels[middle])) <= total:
            begin = middle
        else:
            end = middle
    low, high = sum(parts(levels[begin])), sum(parts(levels[end]))
    return parts(levels[begin] + (levels[end] - levels[begin]) * (total - low) / (high - low))
