"""Partitions about which the controller has to decide: those that have changed since it decided, or all.

A decision depends on the partition, its topic, the sessions and registrations of the brokers, and which brokers are
expected back. So the controller decides about all partitions when it is elected and when something about the brokers
changes, and otherwise about the few that have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from uuid import UUID

    from mansio.metadata.cluster_view import PartitionChange
    from mansio.metadata.model import Topic, TopicChange


class DuePartitions:
    """Partitions about which the controller has to decide, at first none."""

    __slots__ = ("_all", "_some")

    def __init__(self) -> None:
        self._all = False
        self._some: dict[str, set[int]] = {}

    def __bool__(self) -> bool:
        return self._all or bool(self._some)

    def add_all(self) -> None:
        """Add all partitions that exist when they are taken."""
        self._all = True
        self._some.clear()

    def add(self, topic: str, indexes: Iterable[int]) -> None:
        """Add partitions of one topic."""
        if not self._all:
            self._some.setdefault(topic, set()).update(indexes)

    def add_from(self, others: DuePartitions) -> None:
        """Add the partitions of another object, which then has none."""
        if others._all:
            self.add_all()
        for topic, indexes in others._some.items():
            self.add(topic, indexes)
        others._all = False
        others._some = {}

    def add_changed(self, change: TopicChange) -> None:
        """Add the partitions that a change of a live topic concerns."""
        if change.after is not None:
            self.add(change.after.name, change.changed_partitions())

    def add_decided(self, changes: Iterable[PartitionChange], topics: Mapping[UUID, Topic]) -> None:
        """Add partitions with a decision, which may fail. `topics`: the live topics by id."""
        for change in changes:
            if (topic := topics.get(change.topic_id)) is not None:
                self.add(topic.name, (change.partition,))

    def take(self) -> Mapping[str, Collection[int]] | None:
        """Return the partitions, as indexes by name of their topic, or None for all; none are left."""
        some, self._some = self._some, {}
        has_all, self._all = self._all, False
        return None if has_all else {topic: sorted(indexes) for topic, indexes in some.items()}
