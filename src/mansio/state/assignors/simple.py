"""SimpleAssignor of share groups (KIP-932): several members may be assigned the same partition.

Invariants:
* Every subscribed partition has at least one member, and every member at least one partition if its topics have any.
* If all members subscribe to the same topics, the numbers of partitions per member, and of members per partition,
  differ by at most one.
* Members keep their partitions as far as possible. Equal input gives an equal result.

Source: KIP-932 (SimpleAssignor).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.wire.topic_partition import TopicIdPartition


def assign_simple(
    subscriptions: Mapping[str, frozenset[bytes]],
    partitions: Mapping[bytes, int],
    before: Mapping[str, frozenset[TopicIdPartition]],
) -> dict[str, frozenset[TopicIdPartition]]:
    """Return the assigned partitions by member id. `subscriptions`: topic ids by member id. `partitions`: topic id ->
    number of partitions. `before`: previous assignment by member id."""
    members = sorted(subscriptions)
    wanted = sorted({topic for each in subscriptions.values() for topic in each})
    everything = [(topic, index) for topic in wanted for index in range(partitions.get(topic, 0))]
    found: dict[str, set[TopicIdPartition]] = {member: set() for member in members}
    _assign_every_partition(everything, members, subscriptions, before, found)
    idle = [member for member in members if not found[member]]
    _assign_every_idle_member(everything, idle, len(members), subscriptions, before, found)
    return {member: frozenset(each) for member, each in found.items()}


def _assign_every_partition(
    everything: list[TopicIdPartition],
    members: list[str],
    subscriptions: Mapping[str, frozenset[bytes]],
    before: Mapping[str, frozenset[TopicIdPartition]],
    found: dict[str, set[TopicIdPartition]],
) -> None:
    """Assign each partition to one member: to a previous member unless that member has its even share already,
    otherwise to the subscribed member with the fewest partitions."""
    share, extra = divmod(len(everything), max(len(members), 1))
    had: dict[TopicIdPartition, list[str]] = {}
    for member in members:
        for partition in before.get(member, frozenset()):
            if partition[0] in subscriptions[member]:
                had.setdefault(partition, []).append(member)
    free = []
    for partition in everything:
        for member in had.get(partition, ()):
            load = len(found[member])
            if load < share or (load == share and extra > 0):
                extra -= load == share
                found[member].add(partition)
                break
        else:
            free.append(partition)
    heaps: dict[bytes, list[tuple[int, str]]] = {}
    for partition in free:
        topic = partition[0]
        if topic not in heaps:
            heaps[topic] = [(len(found[each]), each) for each in members if topic in subscriptions[each]]
            heapify(heaps[topic])
        member = _pop_least_loaded_member(heaps[topic], found)
        found[member].add(partition)
        heappush(heaps[topic], (len(found[member]), member))


def _pop_least_loaded_member(heap: list[tuple[int, str]], found: Mapping[str, set[TopicIdPartition]]) -> str:
    """Pop and return the member with the fewest partitions. Numbers in the heap may be outdated."""
    while True:
        load, member = heappop(heap)
        if load == len(found[member]):
            return member
        heappush(heap, (len(found[member]), member))


def _assign_every_idle_member(
    everything: list[TopicIdPartition],
    idle: list[str],
    members: int,
    subscriptions: Mapping[str, frozenset[bytes]],
    before: Mapping[str, frozenset[TopicIdPartition]],
    found: dict[str, set[TopicIdPartition]],
) -> None:
    """Assign one partition to each member without any: a previous partition if that has fewer members than an even
    share, otherwise the subscribed partition with the fewest members."""
    if not idle or not everything:
        return
    counts = dict.fromkeys(everything, 0)
    for each in found.values():
        for partition in each:
            counts[partition] += 1
    share, extra = divmod(members, len(everything))
    extra -= sum(max(count - share, 0) for count in counts.values())
    for member in idle:
        for partition in sorted(before.get(member, frozenset())):
            count = counts.get(partition, members)
            fits = count < share or (count == share and extra > 0)
            if partition[0] in subscriptions[member] and fits:
                extra -= count == share
                counts[partition] += 1
                found[member].add(partition)
                break
    heaps: dict[frozenset[bytes], list[tuple[int, TopicIdPartition]]] = {}
    for member in idle:
        if found[member]:
            continue
        topics = subscriptions[member]
        if topics not in heaps:
            heaps[topics] = _partition_heap(everything, topics, counts)
        if heaps[topics]:
            partition = _pop_least_assigned_partition(heaps[topics], counts)
            counts[partition] += 1
            found[member].add(partition)
            heappush(heaps[topics], (counts[partition], partition))


def _partition_heap(
    everything: Iterable[TopicIdPartition], topics: frozenset[bytes], counts: Mapping[TopicIdPartition, int]
) -> list[tuple[int, TopicIdPartition]]:
    heap = [(counts[each], each) for each in everything if each[0] in topics]
    heapify(heap)
    return heap


def _pop_least_assigned_partition(
    heap: list[tuple[int, TopicIdPartition]], counts: Mapping[TopicIdPartition, int]
) -> TopicIdPartition:
    while True:
        count, partition = heappop(heap)
        if count == counts[partition]:
            return partition
        heappush(heap, (counts[partition], partition))
