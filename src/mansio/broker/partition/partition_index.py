"""The partitions that clients can find: by the name of their topic, or by its id.

Always true: what is found belongs to a live topic. A partition that is not here is told apart from one that there is
not: in a cluster its client has to look for another broker, and does not have to give up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.partition.partition import Partition
from mansio.errors import (
    CorruptLog,
    MansioError,
    NotLeaderOrFollower,
    StorageError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.metadata.model import Topic


class IndexedTopic:
    """A live topic and its partitions, by index."""

    __slots__ = ("partitions", "topic")

    def __init__(self, topic: Topic, partitions: list[Partition | StorageError | None]) -> None:
        self.topic = topic
        self.partitions = partitions
        """In the place of a partition that could not be opened stands the reason; None: it is not (yet) kept here."""


class PartitionIndex:
    """See the module. Belongs to the broker's loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, IndexedTopic] = {}
        self._by_id: dict[bytes, IndexedTopic] = {}

    def _put(self, served: IndexedTopic) -> None:
        self._by_name[served.topic.name] = served
        self._by_id[served.topic.topic_id.bytes] = served

    def find(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """By name, or by id where the request carries ids. Raises `UnknownTopicOrPartition` / `UnknownTopicId`."""
        if topic is not None:
            found = self._by_name.get(topic)
            if found is None:
                raise UnknownTopicOrPartition(f"there is no topic {topic!r} here")
        else:
            found = self._by_id.get(topic_id or b"")
            if found is None:
                raise UnknownTopicId(f"no topic here has the id {(topic_id or b'').hex()}")
        if not 0 <= index < len(found.partitions):
            raise UnknownTopicOrPartition(f"topic {found.topic.name!r} has no partition {index}")
        partition = found.partitions[index]
        if partition is None:
            raise NotLeaderOrFollower(f"this broker keeps no copy of {found.topic.name}-{index}")
        if isinstance(partition, StorageError):  # raised anew: the frames of all who meet it are not kept
            kind = CorruptLog if isinstance(partition, CorruptLog) else StorageError
            raise kind(f"{found.topic.name}-{index} is not open: {partition.message}")
        return partition

    def get(self, topic: str, index: int) -> Partition | None:
        """The partition, or None where there is none to be had."""
        try:
            return self.find(topic, None, index)
        except MansioError:
            return None

    def of(self, topic: str) -> list[Partition]:
        """All partitions of a topic, none if there is no such topic. Raises the error of one that is not open here."""
        found = self._by_name.get(topic)
        return (
            [] if found is None else [self.find(topic, None, index) for index in range(len(found.partitions))]
        )

    def served(self) -> list[Topic]:
        """The topics that can be found."""
        return [served.topic for served in self._by_id.values()]

    def drop(self, topic: Topic) -> None:
        """It cannot be found any more."""
        self._by_id.pop(topic.topic_id.bytes, None)
        found = self._by_name.get(topic.name)
        if found is not None and found.topic.topic_id == topic.topic_id:
            del self._by_name[topic.name]

    def __iter__(self) -> Iterator[Partition]:
        """The partitions that are open."""
        for topic in self._by_name.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def __len__(self) -> int:
        return sum(
            partition is not None for topic in self._by_name.values() for partition in topic.partitions
        )

    def failures(self) -> dict[str, StorageError]:
        """Every partition that takes no writes, by name, and why."""
        found: dict[str, StorageError] = {}
        for served in self._by_name.values():
            for index, partition in enumerate(served.partitions):
                failure = partition.log.failure if isinstance(partition, Partition) else partition
                if failure is not None:
                    found[f"{served.topic.name}-{index}"] = failure
        return found
