"""Member of a share group (KIP-932): sends heartbeats and receives its assignment.

The member generates its own member id.

Invariants:
* `on_assigned` is called with the assigned partitions once the names of their topics are known.
* A fenced member joins again with the same id and keeps its partitions until it gets another assignment. Members share
  partitions, so no other member waits for them.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import FencedMemberEpoch, MansioError, UnknownMember
from mansio.net.cluster import check_top_level_error
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.net.cluster import Cluster

    Assignment = dict[TopicPartition, bytes]

logger = logging.getLogger(__name__)

JOIN_EPOCH: Final = 0
"""Member epoch of a heartbeat that joins the group."""
LEAVE_EPOCH: Final = -1
"""Member epoch of a heartbeat that leaves the group."""
_CHANNEL_NUMBERS = itertools.count()


class ShareMember:
    """Membership in one share group. The owner runs `run()` as a task until it is cancelled or fails, then calls
    `leave()`.

    `on_assigned` is called with the assigned partitions and the ids of their topics.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        on_assigned: Callable[[Assignment], None],
    ) -> None:
        self._cluster = cluster
        self._topics = sorted(set(topics))
        self._on_assigned = on_assigned
        self._channel = f"share member {next(_CHANNEL_NUMBERS)}"
        self._pending_assignment: list[Any] | None = None
        """The last assignment while the names of some of its topics are unknown; else None."""
        self.group = group
        self.member_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.member_epoch = JOIN_EPOCH

    async def run(self) -> None:
        """Join the group and send heartbeats until cancelled. Raises errors that are not retriable (`InvalidGroupId`,
        `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `UnsupportedVersion`, ...)."""
        failures = 0
        while True:
            try:
                interval_ms = await self._heartbeat()
                failures = 0
            except (UnknownMember, FencedMemberEpoch) as error:
                logger.info("member %s was fenced from share group %s: %s", self.member_id, self.group, error)
                self.member_epoch = JOIN_EPOCH
                interval_ms = 0.0
                failures += 1
            except MansioError as error:
                if not error.retriable:
                    raise
                logger.info("share group %s: %s; trying again", self.group, error)
                interval_ms = 0.0
                failures += 1
            if failures:
                interval_ms = self._cluster.backoff.delay_seconds(failures) * 1000
            await asyncio.sleep(interval_ms / 1000)

    async def leave(self, *, timeout_ms: float) -> None:
        """Leave the group and close the member's connection. Errors are logged."""
        if self.member_epoch > JOIN_EPOCH:
            self.member_epoch = LEAVE_EPOCH
            try:
                await self._send_heartbeat(None, retry_timeout_ms=timeout_ms)
            except MansioError as error:
                logger.info("leaving share group %s: %s", self.group, error)
        await self._cluster.close_channel(self._channel)

    async def _heartbeat(self) -> float:
        """Send one heartbeat and apply the assignment in its response. Returns the time until the next heartbeat, in
        milliseconds."""
        topics = self._topics if self.member_epoch == JOIN_EPOCH else None
        answer = await self._send_heartbeat(topics, retry_timeout_ms=self._cluster.retry_timeout_ms)
        self.member_epoch = answer.member_epoch
        if answer.assignment is not None:
            self._pending_assignment = list(answer.assignment.topic_partitions)
        if self._pending_assignment is not None:
            await self._resolve_topics(self._pending_assignment)
        return float(answer.heartbeat_interval_ms)

    async def _send_heartbeat(self, topics: list[str] | None, *, retry_timeout_ms: float) -> Any:
        fields = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self.member_epoch,
            "rack_id": None,
            "subscribed_topic_names": topics,
        }
        return await self._cluster.request_coordinator(
            self.group,
            ApiKey.SHARE_GROUP_HEARTBEAT,
            fields,
            check=check_top_level_error,
            channel=self._channel,
            retry_timeout_ms=retry_timeout_ms,
        )

    async def _resolve_topics(self, assignment: list[Any]) -> None:
        """Look up the names of the assigned topics and call `on_assigned` with the partitions whose topic is known.
        The names of other topics are looked up again with every heartbeat."""
        names = self._topic_names()
        if any(bytes(topic.topic_id) not in names for topic in assignment):
            await self._cluster.refresh_metadata(self._topics)
            names = self._topic_names()
        known = [topic for topic in assignment if bytes(topic.topic_id) in names]
        if len(known) == len(assignment):
            self._pending_assignment = None
        self._on_assigned(
            {
                TopicPartition(names[bytes(topic.topic_id)], index): bytes(topic.topic_id)
                for topic in known
                for index in topic.partitions
            }
        )

    def _topic_names(self) -> dict[bytes, str]:
        views = [self._cluster.cached_topic(name) for name in self._topics]
        return {view.topic_id: view.name for view in views if view is not None}
