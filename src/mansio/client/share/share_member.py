"""Member of a share group (KIP-932): sends heartbeats and receives its assignment.

Owns the member id, which it generates, and the member epoch. Invariants: `on_assigned` receives each assignment once,
with ids and names of its topics. A fenced member joins again with its id and keeps its partitions until it gets another
assignment: partitions are shared, so no other member waits for them.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import FencedMemberEpoch, MansioError, UnknownMember
from mansio.net.cluster import check_top_level
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.net.cluster import Cluster

    Assignment = dict[TopicPartition, bytes]

logger = logging.getLogger(__name__)

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
_CHANNEL_NUMBERS = itertools.count()


class ShareMember:
    """Runs as one task: `run()` until it is cancelled or fails permanently; then `leave()`."""

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
        self._unresolved: list[Any] | None = None
        self.group = group
        self.member_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.epoch = JOIN_EPOCH

    async def run(self) -> None:
        """Take part in the group. Raises errors that a retry cannot resolve (`InvalidGroupId`, `GroupMaxSizeReached`,
        `InconsistentGroupProtocol`, `UnsupportedVersion`, ...)."""
        failures = 0
        while True:
            try:
                interval_ms = await self._beat()
                failures = 0
            except (UnknownMember, FencedMemberEpoch) as error:
                logger.info("member %s was fenced from share group %s: %s", self.member_id, self.group, error)
                self.epoch = JOIN_EPOCH
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
        """Leave the group."""
        if self.epoch > JOIN_EPOCH:
            self.epoch = LEAVE_EPOCH
            try:
                await self._ask(None, retry_timeout_ms=timeout_ms)
            except MansioError as error:
                logger.info("leaving share group %s: %s", self.group, error)
        await self._cluster.close_channel(self._channel)

    async def _beat(self) -> float:
        """Send one heartbeat; returns the time until the next one in milliseconds."""
        topics = self._topics if self.epoch == JOIN_EPOCH else None
        answer = await self._ask(topics, retry_timeout_ms=self._cluster.retry_timeout_ms)
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self._unresolved = list(answer.assignment.topic_partitions)
        if self._unresolved is not None:
            await self._resolve(self._unresolved)
        return float(answer.heartbeat_interval_ms)

    async def _ask(self, topics: list[str] | None, *, retry_timeout_ms: float) -> Any:
        fields = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "rack_id": None,
            "subscribed_topic_names": topics,
        }
        return await self._cluster.request_coordinator(
            self.group,
            ApiKey.SHARE_GROUP_HEARTBEAT,
            fields,
            check=check_top_level,
            channel=self._channel,
            retry_timeout_ms=retry_timeout_ms,
        )

    async def _resolve(self, on_result: list[Any]) -> None:
        """Resolve the names of assigned topics. Unresolved ones are looked up again with every heartbeat."""
        names = self._names()
        if any(bytes(topic.topic_id) not in names for topic in on_result):
            await self._cluster.refresh(self._topics)
            names = self._names()
        known = [topic for topic in on_result if bytes(topic.topic_id) in names]
        if len(known) == len(on_result):
            self._unresolved = None
        self._on_assigned(
            {
                TopicPartition(names[bytes(topic.topic_id)], index): bytes(topic.topic_id)
                for topic in known
                for index in topic.partitions
            }
        )

    def _names(self) -> dict[bytes, str]:
        views = [self._cluster.cached_topic(name) for name in self._topics]
        return {view.topic_id: view.name for view in views if view is not None}
