"""Member of a classic consumer group (JoinGroup, SyncGroup, Heartbeat).

A member finds the coordinator, joins, computes the assignment when it is the leader, sends heartbeats, rejoins when the
group changes, and leaves. Its `RebalanceListener` starts and stops reading the partitions.

With a cooperative assignor (KIP-429) the member keeps its partitions during a rebalance and revokes only those that
move to another member; then it rejoins once more. With any other assignor, which an old member of the group may
require, it revokes all partitions before it joins; after a
change from a cooperative assignor, when it has joined.

Invariants:
* `owned_partitions` are the partitions that the listener reads.
* The listener stops reading a partition before the member reports that it no longer owns it. After the member was
  removed from the group, its partitions are lost instead of revoked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mansio.client.group.assignors import ASSIGNORS, COOPERATIVE_STICKY, RANGE, Assignor, Member
from mansio.errors import (
    IllegalGeneration,
    MansioError,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)
from mansio.net.cluster import check_top_level_error
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.consumer_protocol import (
    Assignment,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.net.cluster import Cluster
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

PROTOCOL_TYPE = "consumer"
MEMBER_ID_REQUIRED = 79
_CHANNEL_NUMBERS = itertools.count()
JOIN_GRACE_MS = 5_000
"""Time by which the timeout of JoinGroup and SyncGroup requests exceeds the rebalance timeout."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group member, as in Kafka's consumer. Times are in milliseconds.

    With `protocol` "consumer" the member joins a consumer group (KIP-848) if the broker supports consumer groups, else
    a classic group; with "classic" always a classic group. Session timeout, heartbeat interval, metadata interval and
    assignors apply to classic groups; in a consumer group they are settings of the group on the broker.
    """

    protocol: Literal["consumer", "classic"] = "consumer"
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 60_000
    heartbeat_interval_ms: int = 3_000
    poll_interval_ms_max: int = 300_000
    metadata_interval_ms: int = 30_000
    instance_id: str | None = None
    assignors: tuple[Assignor, ...] = (COOPERATIVE_STICKY, RANGE)


class RebalanceListener(Protocol):
    """Starts and stops reading partitions when their assignment changes (Kafka's ConsumerRebalanceListener)."""

    async def on_partitions_revoked(self, partitions: set[TopicPartition]) -> None:
        """Finish processing, commit and stop reading partitions; then they are assigned to another member."""

    async def on_partitions_lost(self, partitions: set[TopicPartition]) -> None:
        """Stop reading partitions immediately; another member may own them already, and commits are refused."""

    async def on_partitions_assigned(self, partitions: set[TopicPartition]) -> None:
        """Start to read partitions in addition to those that are read already."""

    def seconds_since_poll(self) -> float:
        """Seconds since the last poll of the application."""

    async def wait_for_poll(self) -> None:
        """Wait until the application polls."""


class ClassicMember:
    """One member of a classic group. Run `run()` as a task until it is cancelled or raises, then call `leave()`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        options: GroupOptions,
    ) -> None:
        self._cluster = cluster
        self._topics = tuple(topics)
        self._listener = listener
        self._options = options
        self.group = group
        self.member_id = ""
        self.generation = -1
        self.fenced_count = 0
        """Number of times the member was removed from the group."""
        self.owned_partitions: set[TopicPartition] = set()
        self._protocol: Assignor | None = None
        self._group_topics: set[str] = set()
        self._assigned_counts: dict[str, int] | None = None
        """Partition counts of all members' topics at the last assignment; None if this member is not the leader."""
        self._channel = f"member {next(_CHANNEL_NUMBERS)}"
        """Name of the member's own channel. The broker holds a JoinGroup request, which on a shared connection would
        delay the heartbeats of other members."""

    @property
    def identity(self) -> tuple[int, str]:
        """(generation, member id) to send in commits."""
        return self.generation, self.member_id

    async def run(self) -> None:
        """Join the group and take part in it until cancelled. Raises errors that are not retriable (`FencedInstanceId`,
        `InvalidGroupId`, ...)."""
        failures = 0
        while True:
            try:
                if await self._join():
                    await self._heartbeat_loop()
                failures = 0
            except RebalanceInProgress:
                continue
            except (UnknownMember, IllegalGeneration) as error:
                logger.info("member %s was removed from group %s: %s", self.member_id, self.group, error)
                if isinstance(error, UnknownMember):
                    self.member_id = ""
                await self._lose()
            except MansioError as error:
                if not error.retriable:
                    await self._lose()
                    raise
                failures += 1
                logger.info("group %s: %s; retrying", self.group, error)
                await asyncio.sleep(self._cluster.backoff.delay_seconds(failures))

    async def leave(self) -> None:
        """Leave the group. A static member stays in the group until its session times out (KIP-345)."""
        await self._cluster.close_channel(self._channel)  # a join may be in flight on it
        if not self.member_id or self._options.instance_id is not None:
            return
        member_id, self.member_id = self.member_id, ""
        fields = {
            "group_id": self.group,
            "member_id": member_id,
            "members": [
                {"member_id": member_id, "group_instance_id": None, "reason": "the consumer is closing"}
            ],
        }
        try:
            await self._cluster.request_coordinator(
                self.group, ApiKey.LEAVE_GROUP, fields, check=check_top_level_error, retry_timeout_ms=2_000
            )
        except MansioError as error:
            logger.info("cannot leave group %s: %s", self.group, error)

    # -- joining --------

    async def _join(self) -> bool:
        """Join the group and apply the assignment. Returns False if the member must rejoin immediately."""
        if self._protocol is not None and not self._protocol.is_cooperative:
            await self._revoke(self.owned_partitions)
        joined = await self._send_join()
        self.member_id, self.generation = joined.member_id, joined.generation_id
        protocol = ASSIGNORS[joined.protocol_name]
        if not protocol.is_cooperative:
            await self._revoke(self.owned_partitions)
        self._protocol = protocol
        assignments: dict[str, bytes] = {}
        self._assigned_counts = None
        if joined.leader == joined.member_id:
            assignments = await self._compute_assignments(protocol, joined)
        synced = await self._send_sync(assignments)
        assigned = set(decode_assignment(synced.assignment).partitions)
        removed = self.owned_partitions - assigned
        await self._revoke(removed)
        added = assigned - self.owned_partitions
        self.owned_partitions |= added
        try:
            await self._listener.on_partitions_assigned(added)
        except (
            MansioError
        ):  # a transaction may keep the offsets unstable for long; the next join assigns them again
            self.owned_partitions -= added
            raise
        return not removed

    async def _send_join(self) -> Any:
        owned = tuple(sorted(self.owned_partitions))
        metadata = encode_subscription(Subscription(self._topics, owned, self.generation if owned else -1))
        fields = {
            "group_id": self.group,
            "session_timeout_ms": self._options.session_timeout_ms,
            "rebalance_timeout_ms": self._options.rebalance_timeout_ms,
            "member_id": self.member_id,
            "group_instance_id": self._options.instance_id,
            "protocol_type": PROTOCOL_TYPE,
            "protocols": [{"name": a.name, "metadata": metadata} for a in self._options.assignors],
            "reason": "",
        }

        def check(response: Any) -> None:
            if response.error_code == MEMBER_ID_REQUIRED:
                self.member_id = response.member_id
            raise_for_code(response.error_code)

        try:
            return await self._request(ApiKey.JOIN_GROUP, fields, check, self._join_timeout_ms)
        except MemberIdRequired:
            fields["member_id"] = self.member_id
            return await self._request(ApiKey.JOIN_GROUP, fields, check, self._join_timeout_ms)

    async def _send_sync(self, assignments: dict[str, bytes]) -> Any:
        fields = {
            **self._identity_fields(),
            "protocol_type": PROTOCOL_TYPE,
            "protocol_name": self._protocol.name if self._protocol else None,
            "assignments": [
                {"member_id": member_id, "assignment": assigned}
                for member_id, assigned in assignments.items()
            ],
        }
        return await self._request(ApiKey.SYNC_GROUP, fields, check_top_level_error, self._join_timeout_ms)

    async def _compute_assignments(self, protocol: Assignor, joined: Any) -> dict[str, bytes]:
        """Compute the assignment of all members (leader only)."""
        members = []
        for entry in joined.members:
            subscription = decode_subscription(entry.metadata)
            members.append(
                Member(
                    entry.member_id,
                    subscription.topics,
                    subscription.owned_partitions,
                    subscription.generation_id,
                    entry.group_instance_id,
                )
            )
        self._group_topics = {topic for member in members for topic in member.topics}
        self._assigned_counts = await self._partition_counts(self._group_topics)
        if joined.skip_assignment:  # KIP-814: a static leader rejoined, the old assignment stays
            return {}
        assignments = protocol.assign(members, self._assigned_counts)
        return {
            member_id: encode_assignment(Assignment(tuple(assigned)))
            for member_id, assigned in assignments.items()
        }

    async def _partition_counts(self, topics: set[str]) -> dict[str, int]:
        await self._cluster.retry(lambda: self._cluster.refresh_metadata(topics))
        views = {topic: self._cluster.cached_topic(topic) for topic in topics}
        return {topic: len(view.partitions) for topic, view in views.items() if view is not None}

    # -- heartbeats --------

    async def _heartbeat_loop(self) -> None:
        """Send heartbeats until the group rebalances (`RebalanceInProgress`) or this member must rejoin."""
        loop = asyncio.get_running_loop()
        next_check = loop.time() + self._options.metadata_interval_ms / 1000
        while True:
            await asyncio.sleep(self._options.heartbeat_interval_ms / 1000)
            if self._listener.seconds_since_poll() * 1000 > self._options.poll_interval_ms_max:
                await self._leave_until_polled()
                return
            await self._request(ApiKey.HEARTBEAT, self._identity_fields(), check_top_level_error, None)
            if self._assigned_counts is not None and loop.time() >= next_check:
                next_check = loop.time() + self._options.metadata_interval_ms / 1000
                if await self._partition_counts(self._group_topics) != self._assigned_counts:
                    return

    async def _leave_until_polled(self) -> None:
        """Leave the group after poll_interval_ms_max without a poll, and wait for the next poll."""
        logger.warning("group %s: no poll within poll_interval_ms_max; leaving the group", self.group)
        await self._lose()
        await self.leave()
        await self._listener.wait_for_poll()

    async def _request(
        self, api_key: int, fields: dict[str, Any], check: Any, timeout_ms: float | None
    ) -> Any:
        """Send a request to the coordinator. Retriable errors except `RebalanceInProgress` are retried for the session
        timeout plus `timeout_ms`."""
        retry_ms = self._options.session_timeout_ms + (timeout_ms or 0)
        return await self._cluster.request_coordinator(
            self.group,
            api_key,
            fields,
            check=check,
            channel=self._channel,
            timeout_ms=timeout_ms,
            retry_timeout_ms=retry_ms,
            not_retried=(RebalanceInProgress,),
        )

    def _identity_fields(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self._options.instance_id,
        }

    @property
    def _join_timeout_ms(self) -> float:
        return self._options.rebalance_timeout_ms + JOIN_GRACE_MS

    # -- revoking partitions --------

    async def _revoke(self, partitions: set[TopicPartition]) -> None:
        if partitions:
            removed = set(partitions)
            await self._listener.on_partitions_revoked(removed)
            self.owned_partitions -= removed

    async def _lose(self) -> None:
        """Stop reading all partitions after the member was removed from the group; other members may already own
        them."""
        self.generation = -1
        self.fenced_count += 1
        if self.owned_partitions:
            removed, self.owned_partitions = self.owned_partitions, set()
            await self._listener.on_partitions_lost(removed)
