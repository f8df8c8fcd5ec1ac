"""The `uniform` assignor: everybody gets as many partitions as everybody else, and moves are few.

Where all members subscribe to the same topics the numbers differ by one at most, and no assignor that balances as well
could move fewer partitions. Where they do not, balanced means that no chain of hand-overs (A gives one of its
partitions to B, who gives one of its own to C) could make the fullest member of the chain less full without making
another as full; a chain is looked for only once no single hand-over helps.

Source: KIP-848 names the assignor and its aims; the algorithms are our own.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.state.assignors import MemberSpec, TopicPartition


class UniformAssignor:
    """See the module."""

    name = "uniform"

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> dict[str, list[TopicPartition]]:
        ordered = sorted(members)
        if not ordered:
            return {}
        kept, unassigned = _kept(ordered, partitions)
        subscriptions = {frozenset(each.topics) for each in ordered}
        if len(subscriptions) == 1:
            _level(kept, unassigned)
        else:
            _Uneven(ordered, kept).settle(unassigned)
        return {each.member_id: sorted(kept[each.member_id]) for each in ordered}


def _kept(
    members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
) -> tuple[dict[str, list[TopicPartition]], list[TopicPartition]]:
    """What members have and may keep (it is there, they subscribe to it, nobody before them has it), by member in the
    order given; and what nobody has of all that somebody subscribes to. Both in order."""
    free = {
        (topic, index)
        for topic in {topic for member in members for topic in member.topics}
        for index in range(partitions.get(topic, 0))
    }
    kept: dict[str, list[TopicPartition]] = {}
    for member in members:
        topics = frozenset(member.topics)
        own = sorted(each for each in member.assigned if each[0] in topics and each in free)
        free.difference_update(own)
        kept[member.member_id] = own
    return kept, sorted(free)


def _level(kept: dict[str, list[TopicPartition]], unassigned: list[TopicPartition]) -> None:
    """All members subscribe to the same: each gets its share, and keeps as much of it as there is."""
    total = len(unassigned) + sum(len(each) for each in kept.values())
    share, one_more = divmod(total, len(kept))
    for owned in kept.values():
        most = share
        if len(owned) > share and one_more:
            most, one_more = share + 1, one_more - 1
        while len(owned) > most:
            unassigned.append(owned.pop())
    unassigned.sort(
        reverse=True
    )  # dealt out from its end, lowest first, in turns: so each gets some of each topic
    open_hands = [owned for owned in kept.values() if len(owned) < share]
    while open_hands:
        for owned in open_hands:
            owned.append(unassigned.pop())
        open_hands = [owned for owned in open_hands if len(owned) < share]
    for owned in kept.values():
        if unassigned and len(owned) == share:
            owned.append(unassigned.pop())


class _Uneven:
    """Members with subscriptions of their own. `held`: member -> topic -> indexes; `loads`: how many in all."""

    def __init__(self, members: list[MemberSpec], kept: dict[str, list[TopicPartition]]) -> None:
        self._kept = kept
        self._topics: dict[str, tuple[bytes, ...]] = {each.member_id: each.topics for each in members}
        self._subscribers: dict[bytes, list[str]] = {}
        for member in members:
            for topic in member.topics:
                self._subscribers.setdefault(topic, []).append(member.member_id)
        self._loads = {each: len(owned) for each, owned in kept.items()}
        self._held: dict[str, dict[bytes, list[int]]] = {each: {} for each in kept}
        for holder, owned in kept.items():
            for topic, index in owned:
                self._held[holder].setdefault(topic, []).append(index)

    def settle(self, unassigned: list[TopicPartition]) -> None:
        self._place(unassigned)
        by_choice = sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic))
        moved = True
        while moved:
            moved = False
            for topic in by_choice:
                moved |= self._hand_over(topic)
        while self._chain():
            pass
        for member, held in self._held.items():
            self._kept[member] = [(topic, index) for topic in held for index in held[topic]]

    def _place(self, unassigned: list[TopicPartition]) -> None:
        """Give each to its least loaded subscriber; topics with the least choice first."""
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

    def _hand_over(self, topic: bytes) -> bool:
        """Single moves within a topic, from its fullest holder to its emptiest subscriber; whether there were any."""
        loads, moved = self._loads, False
        least = [(loads[member], member) for member in self._subscribers[topic]]
        most = [
            (-loads[member], member) for member in self._subscribers[topic] if topic in self._held[member]
        ]
        heapq.heapify(least)
        heapq.heapify(most)
        while most:
            load, giver = -most[0][0], most[0][1]
            if load != loads[giver] or topic not in self._held[giver]:
                heapq.heappop(most)
                continue
            taker_load, taker = least[0]
            if taker_load != loads[taker]:
                heapq.heapreplace(least, (loads[taker], taker))
                continue
            if load - taker_load < 2:
                break
            self._move(topic, giver, taker)
            moved = True
            heapq.heapreplace(most, (-loads[giver], giver))
            heapq.heappush(most, (-loads[taker], taker))
            heapq.heapreplace(least, (loads[taker], taker))
            heapq.heappush(least, (loads[giver], giver))
        return moved

    def _chain(self) -> bool:
        """One chain of hand-overs, from the fullest members that can start one; whether there was any."""
        for load in sorted(set(self._loads.values()), reverse=True):
            if load - min(self._loads.values()) < 2:
                return False
            givers = [member for member in self._loads if self._loads[member] >= load]
            if chain := self._search(givers, load - 2):
                for giver, topic, taker in chain:
                    self._move(topic, giver, taker)
                return True
        return False

    def _search(self, givers: list[str], load_max: int) -> list[tuple[str, bytes, str]]:
        """The shortest chain from one of `givers` to a member with at most `load_max`; empty if there is none."""
        came_from: dict[str, tuple[str, bytes] | None] = dict.fromkeys(givers)
        topics_seen: set[bytes] = set()
        queue = deque(givers)
        while queue:
            giver = queue.popleft()
            for topic in sorted(self._held[giver].keys() - topics_seen):
                topics_seen.add(topic)
                for taker in self._subscribers[topic]:
                    if taker in came_from:
                        continue
                    came_from[taker] = (giver, topic)
                    if self._loads[taker] <= load_max:
                        return _path(came_from, taker)
                    queue.append(taker)
        return []

    def _move(self, topic: bytes, giver: str, taker: str) -> None:
        indexes = self._held[giver][topic]
        self._held[taker].setdefault(topic, []).append(indexes.pop())
        if not indexes:
            del self._held[giver][topic]
        self._loads[giver] -= 1
        self._loads[taker] += 1


def _path(came_from: dict[str, tuple[str, bytes] | None], end: str) -> list[tuple[str, bytes, str]]:
    steps = []
    while (step := came_from[end]) is not None:
        steps.append((step[0], step[1], end))
        end = step[0]
    return steps[::-1]
