"""One member of a classic consumer group.

Owns the member's life: find the coordinator, join, share out the partitions when it is the leader, take its own,
heartbeat, join again when the group changes, leave. What having or losing partitions means is the
`RebalanceListener`'s business.

Offers cooperative-sticky and range. With cooperative-sticky (KIP-429) partitions are kept while the group
rebalances, and only those that move are given back, after which the member joins once more. With any other protocol
(a member in the group knows no better) everything is given back before joining.

Always true: `owned` is what the owner was told it has; a partition is given back before the group is told that it is
free, unless the member was thrown out, in which case it is *lost*.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mansio.client.group.assignors import BY_NAME, COOPERATIVE_STICKY, RANGE, Assignor, Member
from mansio.errors import (
    IllegalGeneration,
    MansioError,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)
from mansio.net.cluster import check_top_level
from mansio.net.retry import raise_for
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


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Times in milliseconds, as Kafka's consumer has them.

    `protocol`: "consumer" where the broker offers groups whose partitions it assigns itself (KIP-848), or always
    "classic". The session timeout, the heartbeat interval, the metadata interval and the assignors are for classic
    groups; in the others they are the broker's to set.
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
    """Who reads the partitions."""

    async def revoke(self, partitions: set[TopicPartition]) -> None:
        """Finish with these, commit, and stop: they go to another member after this."""

    async def lose(self, partitions: set[TopicPartition]) -> None:
        """Stop at once: another member may have these already, and nothing can be committed."""

    async def assign(self, partitions: set[TopicPartition]) -> None:
        """Begin to read these as well."""

    def seconds_since_poll(self) -> float:
        """How long ago the application asked for something."""

    async def wait_for_poll(self) -> None:
        """Wait until the application asks for something."""


class ClassicMember:
    """Runs as one task: `run()` until it is cancelled or fails for good; then `leave()`."""

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
        """How often it was put out of the group."""
        self.owned: set[TopicPartition] = set()
        self._protocol: Assignor | None = None
        self._group_topics: set[str] = set()
        self._assigned_counts: dict[str, int] | None = None
        """As the leader: the topics of all members, and the partition counts that were shared out."""
        self._channel = f"member {next(_CHANNEL_NUMBERS)}"
        """A connection of its own: a join waits at the broker, and must not hold up anybody's heartbeat."""

    @property
    def identity(self) -> tuple[int, str]:
        """(generation, member id) to commit with."""
        return self.generation, self.member_id

    async def run(self) -> None:
        """Be a member. Raises what no retry can heal (`FencedInstanceId`, `InvalidGroupId`, ...)."""
        failures = 0
        while True:
            try:
                if await self._join():
                    await self._heartbeat_loop()
                failures = 0
            except RebalanceInProgress:
                continue
            except (UnknownMember, IllegalGeneration) as error:
                logger.info("member %s was put out of group %s: %s", self.member_id, self.group, error)
                if isinstance(error, UnknownMember):
                    self.member_id = ""
                await self._lose()
            except MansioError as error:
                if not error.retriable:
                    await self._lose()
                    raise
                failures += 1
                logger.info("group %s: %s; trying again", self.group, error)
                await asyncio.sleep(self._cluster.backoff.delay_seconds(failures))

    async def leave(self) -> None:
        """Tell the group that this member is going. A static member keeps its place (KIP-345)."""
        await self._cluster.close_channel(self._channel)  # a join may be waiting on it
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
                self.group, ApiKey.LEAVE_GROUP, fields, check=check_top_level, retry_timeout_ms=2_000
            )
        except MansioError as error:
            logger.info("leaving group %s: %s", self.group, error)

    # -- joining --------

    async def _join(self) -> bool:
        """Join and take an assignment. False when the member has to join again at once."""
        if self._protocol is not None and not self._protocol.cooperative:
            await self._revoke(self.owned)
        joined = await self._send_join()
        self.member_id, self.generation = joined.member_id, joined.generation_id
        protocol = BY_NAME[joined.protocol_name]
        if not protocol.cooperative:
            await self._revoke(self.owned)
        self._protocol = protocol
        assignments: dict[str, bytes] = {}
        self._assigned_counts = None
        if joined.leader == joined.member_id:
            assignments = await self._compute_assignments(protocol, joined)
        taken = await self._send_sync(assignments)
        given = set(decode_assignment(taken.assignment).partitions)
        gone = self.owned - given
        await self._revoke(gone)
        added = given - self.owned
        self.owned |= added
        await self._listener.assign(added)
        return not gone

    async def _send_join(self) -> Any:
        owned = tuple(sorted(self.owned))
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

        def check(answer: Any) -> None:
            if answer.error_code == MEMBER_ID_REQUIRED:
                self.member_id = answer.member_id
            raise_for(answer.error_code)

        try:
            return await self._ask(ApiKey.JOIN_GROUP, fields, check, self._join_timeout_ms)
        except MemberIdRequired:
            fields["member_id"] = self.member_id
            return await self._ask(ApiKey.JOIN_GROUP, fields, check, self._join_timeout_ms)

    async def _send_sync(self, assignments: dict[str, bytes]) -> Any:
        fields = {
            **self._identity(),
            "protocol_type": PROTOCOL_TYPE,
            "protocol_name": self._protocol.name if self._protocol else None,
            "assignments": [
                {"member_id": member_id, "assignment": given} for member_id, given in assignments.items()
            ],
        }
        return await self._ask(ApiKey.SYNC_GROUP, fields, check_top_level, self._join_timeout_ms)

    async def _compute_assignments(self, protocol: Assignor, joined: Any) -> dict[str, bytes]:
        """As the leader: who gets what."""
        members = []
        for entry in joined.members:
            told = decode_subscription(entry.metadata)
            members.append(
                Member(entry.member_id, told.topics, told.owned, told.generation, entry.group_instance_id)
            )
        self._group_topics = {topic for member in members for topic in member.topics}
        self._assigned_counts = await self._partition_counts(self._group_topics)
        if joined.skip_assignment:  # KIP-814: a static leader came back, the old assignment stands
            return {}
        shared = protocol.assign(members, self._assigned_counts)
        return {member_id: encode_assignment(Assignment(tuple(given))) for member_id, given in shared.items()}

    async def _partition_counts(self, topics: set[str]) -> dict[str, int]:
        await self._cluster.retry(lambda: self._cluster.refresh(topics))
        views = {topic: self._cluster.cached_topic(topic) for topic in topics}
        return {topic: len(view.partitions) for topic, view in views.items() if view is not None}

    # -- being a member --------

    async def _heartbeat_loop(self) -> None:
        """Heartbeat until the group changes (`RebalanceInProgress`) or this member has to ask for a change."""
        loop = asyncio.get_running_loop()
        look_again = loop.time() + self._options.metadata_interval_ms / 1000
        while True:
            await asyncio.sleep(self._options.heartbeat_interval_ms / 1000)
            if self._listener.seconds_since_poll() * 1000 > self._options.poll_interval_ms_max:
                await self._leave_until_polled()
                return
            await self._ask(ApiKey.HEARTBEAT, self._identity(), check_top_level, None)
            if self._assigned_counts is not None and loop.time() >= look_again:
                look_again = loop.time() + self._options.metadata_interval_ms / 1000
                if await self._partition_counts(self._group_topics) != self._assigned_counts:
                    return

    async def _leave_until_polled(self) -> None:
        """The application asked for nothing for too long: others take over until it does."""
        logger.warning(
            "group %s: nothing was asked for within poll_interval_ms_max; leaving the group", self.group
        )
        await self._lose()
        await self.leave()
        await self._listener.wait_for_poll()

    async def _ask(self, api_key: int, fields: dict[str, Any], check: Any, timeout_ms: float | None) -> Any:
        """A retriable error other than the group's own is retried for a session's time."""
        retry_ms = self._options.session_timeout_ms + (timeout_ms or 0)
        return await self._cluster.request_coordinator(
            self.group,
            api_key,
            fields,
            check=check,
            channel=self._channel,
            timeout_ms=timeout_ms,
            retry_timeout_ms=retry_ms,
            final=(RebalanceInProgress,),
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self._options.instance_id,
        }

    @property
    def _join_timeout_ms(self) -> float:
        return self._options.rebalance_timeout_ms + JOIN_GRACE_MS

    # -- giving up partitions --------

    async def _revoke(self, partitions: set[TopicPartition]) -> None:
        if partitions:
            gone = set(partitions)
            await self._listener.revoke(gone)
            self.owned -= gone

    async def _lose(self) -> None:
        """The group went on without this member: what it had may be with others already."""
        self.generation = -1
        self.fenced_count += 1
        if self.owned:
            gone, self.owned = self.owned, set()
            await self._listener.lose(gone)
