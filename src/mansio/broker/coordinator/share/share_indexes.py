"""Which topic partitions have several share partitions for each group: the only place of the broker that knows which
features of topics divide offsets among share partitions.

Invariant: the numbers of a topic contain those of the indexes of its partitions, also if this broker has none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.broker.features.priorities.priority_view import PriorityView
from mansio.config.topic_config import PRIORITY_ENABLE
from mansio.state.share_partition.types import BASE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.metadata.image import MetadataImage
    from mansio.state.share_partition.share_index import ShareIndex


_PRIORITIES: Final = tuple(sorted(PriorityIndex.numbers))


class ShareIndexes(Protocol):
    """The indexes of the topic partitions of a broker."""

    def numbers_of(self, topic_id: bytes) -> Sequence[int]:
        """Return the numbers of the share partitions of which a group may have state, `BASE` first."""

    def index_of(self, partition: Partition) -> ShareIndex | None:
        """Return the index of a partition, the same object as long as it is valid; None if a group has one share
        partition of it."""


class OneSharePartition:
    """`ShareIndexes` without any index."""

    def numbers_of(self, topic_id: bytes) -> Sequence[int]:  # noqa: ARG002 - of `ShareIndexes`
        """Return the number of the only share partition."""
        return (BASE,)

    def index_of(self, partition: Partition) -> ShareIndex | None:  # noqa: ARG002 - of `ShareIndexes`
        """Return None."""
        return None


class TopicShareIndexes:
    """`ShareIndexes` of the topics' features: the priorities."""

    __slots__ = ("_state",)

    def __init__(self, state: MetadataImage) -> None:
        self._state = state

    def numbers_of(self, topic_id: bytes) -> Sequence[int]:
        """Return the numbers of a topic's share partitions; of a deleted topic all that it may have had."""
        topic = self._state.topics_by_id.get(UUID(bytes=topic_id))
        has_priorities = topic is None or topic.configs.get(PRIORITY_ENABLE) == "true"
        return _PRIORITIES if has_priorities else (BASE,)

    def index_of(self, partition: Partition) -> ShareIndex | None:
        """Return the index of the priorities of a partition's records; None if its topic has none."""
        priorities = partition.find_feature(PriorityView)
        return None if priorities is None else priorities.index
