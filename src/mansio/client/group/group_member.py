"""Group membership of a consumer, with the protocol that the broker supports.

The member joins a consumer group (`consumer_member`, KIP-848) if the broker supports consumer groups and the caller did
not choose the classic protocol; otherwise it joins a classic group (`classic_member`).

Invariants:
* Commits of one member are sent in the order of the calls, one at a time.
* A commit that failed because the member was removed from the group is not repeated after the member has rejoined.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mansio.client.group.classic_member import ClassicMember
from mansio.client.group.consumer_member import ConsumerMember
from mansio.errors import RequestTimedOut, StaleMemberEpoch, UnsupportedVersion
from mansio.net.offsets import commit_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.client.group.classic_member import GroupOptions, RebalanceListener
    from mansio.net.cluster import Cluster
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)


class GroupMembership:
    """Group membership of one consumer. Run `run()` as a task until it is cancelled or raises, then call `leave()`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        options: GroupOptions,
        topic_regex: str | None = None,
    ) -> None:
        """`topic_regex` is a regular expression (RE2) of further topics, which only consumer groups support."""
        self._cluster = cluster
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener
        self._options = options
        self._topic_regex = topic_regex
        self._committing = asyncio.Lock()
        self.membership: ConsumerMember | ClassicMember = (
            self._classic()
            if options.protocol == "classic"
            else ConsumerMember(cluster, group, topics, listener, options, topic_regex)
        )

    async def run(self) -> None:
        """Join the group and take part in it until cancelled. Raises errors that are not retriable."""
        try:
            await self.membership.run()
        except UnsupportedVersion as error:
            if self._topic_regex is not None or isinstance(self.membership, ClassicMember):
                raise
            logger.info("group %s: %s; joining as a classic member", self._group, error)
            await self.membership.leave()
            self.membership = self._classic()
            await self.membership.run()

    @property
    def identity(self) -> tuple[int, str]:
        """(generation or member epoch, member id) to send in commits."""
        return self.membership.identity

    async def refresh(self, epoch: int) -> bool:
        """Get the current member epoch after the coordinator has refused `epoch`. Returns whether it is another one and
        the member was not removed from the group; False for classic members, which get it by rejoining.

        Raises the coordinator's error, or `UnknownMember`."""
        membership = self.membership
        if isinstance(membership, ClassicMember):
            return False
        fenced_count = membership.fenced_count
        await membership.refresh_epoch(epoch)
        return (
            membership.epoch != epoch
            and membership.fenced_count == fenced_count
            and membership is self.membership
        )

    async def leave(self) -> None:
        """Leave the group."""
        await self.membership.leave()

    async def commit(self, offsets: Mapping[TopicPartition, int], *, retry_timeout_ms: float) -> None:
        """Commit offsets as this member.

        Raises `UnknownMember`, `StaleMemberEpoch` or a similar error if the member was removed from the group, and
        `RequestTimedOut` after twice `retry_timeout_ms`, which includes the wait for earlier commits.
        """
        try:
            async with asyncio.timeout(2 * retry_timeout_ms / 1000), self._committing:
                await self._commit(offsets, retry_timeout_ms)
        except TimeoutError:
            raise RequestTimedOut(
                f"group {self._group}: no commit within {2 * retry_timeout_ms:.0f} ms"
            ) from None

    async def _commit(self, offsets: Mapping[TopicPartition, int], retry_timeout_ms: float) -> None:
        membership = self.membership
        fenced_count = membership.fenced_count
        while True:
            generation, member_id = membership.identity
            try:
                await commit_offsets(
                    self._cluster,
                    self._group,
                    offsets,
                    generation=generation,
                    member_id=member_id,
                    instance_id=self._options.instance_id,
                    retry_timeout_ms=retry_timeout_ms,
                )
            except StaleMemberEpoch:  # the epoch changed in the meantime; classic members have none
                if isinstance(membership, ClassicMember):
                    raise
                await membership.refresh_epoch(generation)
                if membership.fenced_count != fenced_count or membership is not self.membership:
                    raise
            else:
                return

    def _classic(self) -> ClassicMember:
        if self._topic_regex is not None:
            raise UnsupportedVersion("a topic pattern needs a group whose partitions the broker assigns")
        return ClassicMember(self._cluster, self._group, self._topics, self._listener, self._options)
