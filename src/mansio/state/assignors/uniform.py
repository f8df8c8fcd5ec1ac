"""The `uniform` assignor: equal numbers of partitions per member, with few moves of partitions.

If all members have the same subscription, their numbers of partitions differ by at most one, and no assignor with the
same balance moves fewer partitions. With different subscriptions, the result is balanced if no chain of moves (A gives
a partition to B, B gives one of its own to C) could reduce the load of the member at its start without giving another
member the same load. Chains are searched only when no single move improves the balance.

Source: KIP-848 defines the assignor and its goals; the algorithms are Mansio's.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from mansio.state.assignors.partition_sets import all_partitions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.state.assignors import MemberSpec
    from mansio.wire.topic_partition import TopicIdPartition


class UniformAssignor:
    """Assignor that gives the members equal numbers of partitions, with few moves."""

    name = "uniform"

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> dict[str, frozenset[TopicIdPartition]]:
        ordered = sorted(members)
        if not ordered:
            return {}
        first = ordered[0].topics
        alike = all(each.topics is first or set(each.topics) == set(first) for each in ordered)
        kept, unassigned = _keep_valid_partitions(ordered, partitions, alike=alike)
        return (
            _balance_same_subscriptions(kept, unassigned)
            if alike
            else _HeterogeneousAssignment(ordered, kept).balance(sorted(unassigned))
        )


def _keep_valid_partitions(
    members: Sequence[MemberSpec], partitions: Mapping[bytes, int], *, alike: bool
) -> tuple[dict[str, frozenset[TopicIdPartition]], set[TopicIdPartition]]:
    """Return the partitions that each member keeps, by member id, and the set of unassigned partitions of all
    subscribed topics. A member keeps a partition that exists, to which it subscribes, and that no earlier member keeps.
    `alike`: all members have the same subscription."""
    wanted = {topic for member in (members[:1] if alike else members) for topic in member.topics}
    free = set(all_partitions(wanted, partitions))
    kept: dict[str, frozenset[TopicIdPartition]] = {}
    for member in members:
        own = member.assigned if member.assigned <= free else member.assigned & free
        if not alike:
            topics = frozenset(member.topics)
            own = frozenset(each for each in own if each[0] in topics)
        free -= own
        kept[member.member_id] = own
    return kept, free


def _balance_same_subscriptions(
    kept: dict[str, frozenset[TopicIdPartition]], free: set[TopicIdPartition]
) -> dict[str, frozenset[TopicIdPartition]]:
    """Balance members with the same subscription: each gets its share and keeps as many partitions as possible. Visits
    only the partitions that move, because there may be many others."""
    unassigned = list(free)
    share, one_more = divmod(len(unassigned) + sum(len(each) for each in kept.values()), len(kept))
    for member, owned in kept.items():
        most = share
        if len(owned) > share and one_more:
            most, one_more = share + 1, one_more - 1
        if len(owned) > most:
            surplus = heapq.nlargest(len(owned) - most, owned)
            kept[member] = owned.difference(surplus)
            unassigned += surplus
    # distribute from the end of the list, lowest partition first, one per member and turn, so that each member gets
    # some partitions of each topic
    unassigned.sort(reverse=True)
    added: dict[str, list[TopicIdPartition]] = {
        member: [] for member, owned in kept.items() if len(owned) < share
    }
    below_share = list(added)
    while below_share:
        for member in below_share:
            added[member].append(unassigned.pop())
        below_share = [each for each in below_share if len(kept[each]) + len(added[each]) < share]
    for member, owned in kept.items():
        if unassigned and len(owned) + len(added.get(member, ())) == share:
            added.setdefault(member, []).append(unassigned.pop())
    return kept | {member: kept[member].union(more) for member, more in added.items()}


class _HeterogeneousAssignment:
    """Assignment of members with different subscriptions. `_held`: member id -> topic id -> partition indexes.
    `_loads`: number of partitions by member id."""

    def __init__(self, members: list[MemberSpec], kept: dict[str, frozenset[TopicIdPartition]]) -> None:
        self._topics: dict[str, tuple[bytes, ...]] = {each.member_id: each.topics for each in members}
        self._subscribers: dict[bytes, list[str]] = {}
        for member in members:
            for topic in member.topics:
                self._subscribers.setdefault(topic, []).append(member.member_id)
        self._loads = {each: len(owned) for each, owned in kept.items()}
        self._held: dict[str, dict[bytes, list[int]]] = {each: {} for each in kept}
        for holder, owned in kept.items():
            for topic, index in sorted(owned):
                self._held[holder].setdefault(topic, []).append(index)

    def balance(self, unassigned: list[TopicIdPartition]) -> dict[str, frozenset[TopicIdPartition]]:
        """Assign the unassigned partitions, move partitions until the result is balanced, and return the assignment."""
        self._assign_unassigned(unassigned)
        by_choice = sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic))
        moved = True
        while moved:
            moved = False
            for topic in by_choice:
                moved |= self._move_single_partitions(topic)
        while self._move_chain():
            pass
        return {
            member: frozenset((topic, index) for topic, indexes in held.items() for index in indexes)
            for member, held in self._held.items()
        }

    def _assign_unassigned(self, unassigned: list[TopicIdPartition]) -> None:
        """Assign each partition to the subscriber with the fewest partitions; topics with the fewest subscribers
        first."""
        by_topic: dict[bytes, list[int]] = {}
        for topic, index in unassigned:
            by_topic.setdefault(topic, []).append(index)
        for topic in sorted(by_topic, key=lambda each: (len(self._subscribers[each]), each)):
            least = [(self._loads[member], member) for member in self._subscribers[topic]]
            heapq.heapify(least)
            for index in sorted(by_topic[topic]):
                load, member = least[0]
                self._held[member].setdefault(topic, []).append(index)
                self._loads[member] = load + 1
                heapq.heapreplace(least, (load + 1, member))

    def _move_single_partitions(self, topic: bytes) -> bool:
        """Move single partitions of a topic from the owner with the most partitions to the subscriber with the fewest,
        while that improves the balance. Returns whether any partition moved."""
        loads, moved = self._loads, False
        least = [(loads[member], member) for member in self._subscribers[topic]]
        most = [
            (-loads[member], member) for member in self._subscribers[topic] if topic in self._held[member]
        ]
        heapq.heapify(least)
        heapq.heapify(most)
        while most:
            load, source = -most[0][0], most[0][1]
            if load != loads[source] or topic not in self._held[source]:
                heapq.heappop(most)
                continue
            target_load, target = least[0]
            if target_load != loads[target]:
                heapq.heapreplace(least, (loads[target], target))
                continue
            if load - target_load < 2:
                break
            self._move(topic, source, target)
            moved = True
            heapq.heapreplace(most, (-loads[source], source))
            heapq.heappush(most, (-loads[target], target))
            heapq.heapreplace(least, (loads[target], target))
            heapq.heappush(least, (loads[source], source))
        return moved

    def _move_chain(self) -> bool:
        """Execute one chain of moves that starts at a member with as many partitions as possible. Returns whether there
        was one."""
        for load in sorted(set(self._loads.values()), reverse=True):
            if load - min(self._loads.values()) < 2:
                return False
            sources = [member for member in self._loads if self._loads[member] >= load]
            if chain := self._find_move_chain(sources, load - 2):
                for source, topic, target in chain:
                    self._move(topic, source, target)
                return True
        return False

    def _find_move_chain(self, sources: list[str], load_max: int) -> list[tuple[str, bytes, str]]:
        """Return the shortest chain of moves (source, topic, target) from one of `sources` to a member with at most
        `load_max` partitions; empty if there is none."""
        came_from: dict[str, tuple[str, bytes] | None] = dict.fromkeys(sources)
        topics_seen: set[bytes] = set()
        queue = deque(sources)
        while queue:
            source = queue.popleft()
            for topic in sorted(self._held[source].keys() - topics_seen):
                topics_seen.add(topic)
                for target in self._subscribers[topic]:
                    if target in came_from:
                        continue
                    came_from[target] = (source, topic)
                    if self._loads[target] <= load_max:
                        return _moves_to(came_from, target)
                    queue.append(target)
        return []

    def _move(self, topic: bytes, source: str, target: str) -> None:
        indexes = self._held[source][topic]
        self._held[target].setdefault(topic, []).append(indexes.pop())
        if not indexes:
            del self._held[source][topic]
        self._loads[source] -= 1
        self._loads[target] += 1


def _moves_to(came_from: dict[str, tuple[str, bytes] | None], end: str) -> list[tuple[str, bytes, str]]:
    steps = []
    while (step := came_from[end]) is not None:
        steps.append((step[0], step[1], end))
        end = step[0]
    return steps[::-1]
