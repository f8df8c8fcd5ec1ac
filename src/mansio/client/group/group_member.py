"""A consumer's part in a group, by whichever protocol the broker offers.

Owns the choice: the broker assigns (KIP-848, `membership_next`) where it can and nobody asked for the other, else the
members share the partitions out themselves (`membership`). And the order of commits, which is the same for both.

Always true: commits of one member reach the group in the order in which they were asked for; none of a member that was
put out of the group meanwhile is made good by its next life.
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
    """Runs as one task: `run()` until it is cancelled or fails for good; then `leave()`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        options: GroupOptions,
        pattern: str | None = None,
    ) -> None:
        """`pattern`: a regular expression (RE2) of topics to subscribe to as well; only where the broker assigns."""
        self._cluster = cluster
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener
        self._options = options
        self._pattern = pattern
        self._committing = asyncio.Lock()
        self.membership: ConsumerMember | ClassicMember = (
            self._classic()
            if options.protocol == "classic"
            else ConsumerMember(cluster, group, topics, listener, options, pattern)
        )

    async def run(self) -> None:
        """Be a member. Raises what no retry can heal."""
        try:
            await self.membership.run()
        except UnsupportedVersion as error:
            if self._pattern is not None or isinstance(self.membership, ClassicMember):
                raise
            logger.info("group %s: %s; joining as a classic member", self._group, error)
            await self.membership.leave()
            self.membership = self._classic()
            await self.membership.run()

    async def leave(self) -> None:
        """Tell the group that this member is going."""
        await self.membership.leave()

    async def commit(self, offsets: Mapping[TopicPartition, int], *, retry_timeout_ms: float) -> None:
        """Store offsets as this member. Raises `UnknownMember`, `StaleMemberEpoch` and the like when the group went on
        without it. Commits asked for before may take half of the time."""
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
            except StaleMemberEpoch:  # its epoch changed on the way; a classic member has none
                if isinstance(membership, ClassicMember):
                    raise
                await membership.refresh_epoch(generation)
                if membership.fenced_count != fenced_count or membership is not self.membership:
                    raise
            else:
                return

    def _classic(self) -> ClassicMember:
        if self._pattern is not None:
            raise UnsupportedVersion(
                "an expression of topics needs a group whose partitions the broker assigns"
            )
        return ClassicMember(self._cluster, self._group, self._topics, self._listener, self._options)
