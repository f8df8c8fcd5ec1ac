"""Member of a consumer group, whose partitions the broker assigns (KIP-848).

A member sends heartbeats, reconciles the partitions that it owns with the target assignment, and leaves the group. Its
`RebalanceListener` starts and stops reading the partitions, as for members of classic groups.

A background task revokes and assigns partitions, so that heartbeats continue and partitions that the member keeps are
read without interruption. Partitions are identified by topic id, because a topic that was deleted and created again is
a different topic.

Invariants:
* The member reports all partitions that it reads or may start to read, so that the coordinator assigns none of them to
  another member. It sends a heartbeat immediately after it has revoked partitions.
* After a heartbeat without a response, the next heartbeat is a full heartbeat.
* A member that was fenced loses its partitions and joins again with the same member id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from mansio.client.admin.groups import describe_group
from mansio.client.group.classic_member import GroupOptions
from mansio.config.config_def import Operation, ResourceType
from mansio.errors import (
    FencedMemberEpoch,
    MansioError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from mansio.net.cluster import check_top_level_error
from mansio.net.retry import client_error_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.client.group.classic_member import RebalanceListener
    from mansio.net.cluster import Cluster

    PartitionId = tuple[bytes, int]
    """(topic id, partition index)."""

logger = logging.getLogger(__name__)

# Member epochs of a heartbeat with which a member joins or leaves (KIP-848).
JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Member epoch with which a static member leaves: its partitions stay reserved for the instance id until the session
times out."""
TOPIC_REGEX_VERSION_MIN: Final = 1
"""First version of ConsumerGroupHeartbeat that supports regular expressions of topics."""
HEARTBEAT_TIMEOUT_MS_MAX: Final = 10_000
LEAVE_TIMEOUT_MS_MAX: Final = 2_000
INSTANCE_RELEASE_WAIT_MS_MAX: Final = 65_000
"""How long a member waits until an earlier member with the same instance id is removed from the group: slightly longer
than the longest session timeout."""
SESSION_TIMEOUT_CONFIG: Final = "consumer.session.timeout.ms"
_CHANNEL_NUMBERS = itertools.count()


class ConsumerMember:
    """One member of a consumer group. Run `run()` as a task until it is cancelled or raises, then call `leave()`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        options: GroupOptions,
        topic_regex: str | None = None,
    ) -> None:
        """`topic_regex` is a regular expression (RE2); the member also subscribes to all topics that match it."""
        self._cluster = cluster
        self._topics = tuple(topics)
        self._topic_regex = topic_regex
        self._listener = listener
        self._options = options
        self.group = group
        self.member_id = str(uuid.uuid4())
        self.epoch = JOIN_EPOCH
        self.fenced_count = 0
        """Number of times the member was removed from the group."""
        self._loop = asyncio.get_running_loop()
        self._target: frozenset[PartitionId] = frozenset()
        """Target assignment of the last heartbeat response."""
        self._owned: dict[PartitionId, TopicPartition] = {}
        """Partitions that this member owns, with the topic names that the listener uses."""
        self._pending_assign: set[PartitionId] = set()
        """Owned partitions that the listener has not started to read yet."""
        self._reported: frozenset[PartitionId] = frozenset()
        self._sends_full = True
        self._has_joined = False
        self._has_sent = False
        self._has_assignment = False
        self._interval_s = 0.0
        self._failures = 0
        self._unreleased_since: float | None = None
        self._heartbeat_lock = asyncio.Lock()
        self._heartbeat_due = asyncio.Event()
        """Set when a heartbeat must be sent immediately."""
        self._reconciliation: asyncio.Task[None] | None = None
        self._channel = f"member {next(_CHANNEL_NUMBERS)}"
        """Name of the member's own channel, so that a commit that waits for the disk does not delay a heartbeat."""

    @property
    def identity(self) -> tuple[int, str]:
        """(member epoch, member id) to send in commits; (-1, "") before the member has joined."""
        return (self.epoch, self.member_id) if self._has_joined else (-1, "")

    async def run(self) -> None:
        """Join the group and take part in it until cancelled. Raises errors that are not retriable (`FencedInstanceId`,
        `UnsupportedVersion`, ...)."""
        await self._use_options()
        try:
            while True:
                if self._seconds_until_poll_timeout() <= 0:
                    await self._leave_until_polled()
                pause_s = await self._heartbeat_once()
                self._start_reconciliation()
                await self._wait_until_heartbeat_due(min(pause_s, self._seconds_until_poll_timeout()))
        except Exception:
            await self._lose()
            raise
        finally:
            await self._stop_reconciliation()

    async def refresh_epoch(self, epoch: int) -> None:
        """Send a heartbeat if the member epoch is still `epoch`, to get the current one. Raises the coordinator's
        error, or `UnknownMember` if the member was removed from the group."""
        async with self._heartbeat_lock:
            if self.epoch == JOIN_EPOCH:
                raise UnknownMember(f"the member was removed from group {self.group}")
            if self.epoch == epoch:
                try:
                    await self._heartbeat()
                except MansioError:
                    self._heartbeat_due.set()  # `run` must handle it as well
                    raise
        self._heartbeat_due.set()

    async def leave(self) -> None:
        """Leave the group. The partitions of a static member stay reserved until its session times out."""
        await self._cluster.close_channel(self._channel)
        if not self._has_sent:
            return
        self._has_sent = False
        epoch = LEAVE_EPOCH if self._options.instance_id is None else LEAVE_STATIC_EPOCH
        try:
            await self._cluster.request_coordinator(
                self.group,
                ApiKey.CONSUMER_GROUP_HEARTBEAT,
                {**self._identity_fields(epoch), "topic_partitions": None},
                check=check_top_level_error,
                retry_timeout_ms=LEAVE_TIMEOUT_MS_MAX,
            )
        except MansioError as error:
            logger.info("cannot leave group %s: %s", self.group, error)

    # -- heartbeats --------

    async def _heartbeat_once(self) -> float:
        """Send one heartbeat and handle its errors. Returns the time until the next heartbeat in seconds."""
        try:
            async with self._heartbeat_lock:
                await self._heartbeat()
        except (UnknownMember, FencedMemberEpoch) as error:
            logger.info("member %s was removed from group %s: %s", self.member_id, self.group, error)
            await self._lose()
        except UnreleasedInstanceId as error:
            self._check_instance_release(error)
        except MansioError as error:
            if not error.retriable:
                raise
            logger.info("group %s: %s; retrying", self.group, error)
        else:
            self._failures, self._unreleased_since = 0, None
            return self._interval_s
        self._failures += 1
        return self._cluster.backoff.delay_seconds(self._failures)

    async def _heartbeat(self) -> None:
        reported = self._target | self._owned.keys()
        fields = self._identity_fields(self.epoch)
        fields["topic_partitions"] = (
            _topic_partition_fields(reported) if self._must_report_partitions(reported) else None
        )
        if self._sends_full:
            await self._check_topic_regex_support()
            fields |= self._subscription_fields()
        self._sends_full = self._has_sent = True
        timeout_ms = min(HEARTBEAT_TIMEOUT_MS_MAX, self._cluster.options.request_timeout_ms)
        response = await self._cluster.request_coordinator(
            self.group,
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            fields,
            check=check_top_level_error,
            channel=self._channel,
            timeout_ms=timeout_ms,
            not_retried=(MansioError,),  # a retry must be a full heartbeat
        )
        self._sends_full, self._reported, self._has_joined = False, reported, True
        self.epoch, self.member_id = response.member_epoch, response.member_id or self.member_id
        self._interval_s = response.heartbeat_interval_ms / 1000
        if response.assignment is not None:
            self._target = frozenset(_partition_ids(response.assignment.topic_partitions))

    def _must_report_partitions(self, reported: frozenset[PartitionId]) -> bool:
        return self._sends_full or reported != self._reported

    def _identity_fields(self, epoch: int) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": epoch,
            "instance_id": self._options.instance_id,
        }

    def _subscription_fields(self) -> dict[str, Any]:
        return {
            "rebalance_timeout_ms": self._options.rebalance_timeout_ms,
            "subscribed_topic_names": list(self._topics),
            "subscribed_topic_regex": self._topic_regex,
        }

    async def _check_topic_regex_support(self) -> None:
        """Raise `UnsupportedVersion` if there is a regular expression and the broker is too old to support it; such a
        broker would ignore the expression."""
        if self._topic_regex is None:
            return
        connection = await self._cluster.coordinator(self.group, self._channel)
        if connection.version_for(ApiKey.CONSUMER_GROUP_HEARTBEAT) < TOPIC_REGEX_VERSION_MIN:
            raise UnsupportedVersion("the broker does not support regular expressions of topics")

    def _check_instance_release(self, error: UnreleasedInstanceId) -> None:
        """Raise `error` if another member has kept the instance id for longer than a session can last.

        Until then the other member may have failed, and the group removes it when its session times out.
        """
        now = self._loop.time()
        if self._unreleased_since is None:
            self._unreleased_since = now
            logger.warning("group %s: %s; waiting for its session to time out", self.group, error)
        if (now - self._unreleased_since) * 1000 > INSTANCE_RELEASE_WAIT_MS_MAX:
            raise copied(error)

    async def _wait_until_heartbeat_due(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._heartbeat_due.wait()
        except TimeoutError:
            pass
        self._heartbeat_due.clear()

    def _seconds_until_poll_timeout(self) -> float:
        """Seconds until `poll_interval_ms_max` has passed since the last poll of the application."""
        return self._options.poll_interval_ms_max / 1000 - self._listener.seconds_since_poll()

    async def _leave_until_polled(self) -> None:
        """Leave the group after poll_interval_ms_max without a poll, and wait for the next poll."""
        logger.warning("group %s: no poll within poll_interval_ms_max; leaving the group", self.group)
        await self._lose()
        await self.leave()
        await self._listener.wait_for_poll()

    # -- reconciliation --------

    def _start_reconciliation(self) -> None:
        """Start the reconciliation if it is needed and not running. Raises the error of the previous reconciliation."""
        if self._reconciliation is not None and self._reconciliation.done():
            ended, self._reconciliation = self._reconciliation, None
            ended.result()
        if self._reconciliation is None and not self._is_reconciled():
            self._reconciliation = self._loop.create_task(self._reconcile())
            self._reconciliation.add_done_callback(self._on_reconciled)

    def _on_reconciled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._heartbeat_due.set()  # `run` raises it

    def _is_reconciled(self) -> bool:
        if not self._has_joined:
            return True  # no assignment yet
        return self._has_assignment and not self._pending_assign and self._target == self._owned.keys()

    async def _reconcile(self) -> None:
        """Revoke and assign partitions until this member owns its target assignment."""
        failures = 0
        while not self._is_reconciled():
            try:
                await self._revoke(
                    [partition_id for partition_id in self._owned if partition_id not in self._target]
                )
                await self._assign()
                failures = 0
                if self._target == self._owned.keys():
                    return  # partitions that become free arrive with a heartbeat
            except MansioError as error:
                if not error.retriable:
                    raise
                failures += 1
                logger.info("group %s: %s; retrying", self.group, error)
                await asyncio.sleep(self._cluster.backoff.delay_seconds(failures))

    async def _revoke(self, removed: list[PartitionId]) -> None:
        if not removed:
            return
        started = {
            self._owned[partition_id] for partition_id in removed if partition_id not in self._pending_assign
        }
        if started:
            await self._listener.on_partitions_revoked(started)
        for partition_id in removed:
            del self._owned[partition_id]
            self._pending_assign.discard(partition_id)
        self._heartbeat_due.set()  # another member may wait for them

    async def _assign(self) -> None:
        names = await self._topic_names({topic_id for topic_id, _ in self._target - self._owned.keys()})
        unnamed: list[bytes] = []
        for topic_id, index in self._target - self._owned.keys():
            if topic_id not in names:
                unnamed.append(topic_id)
                continue
            self._owned[topic_id, index] = TopicPartition(names[topic_id], index)
            self._pending_assign.add((topic_id, index))
        is_first = not self._has_assignment and not unnamed
        if is_first and not self._pending_assign and (await self._has_pending_target() or self._target):
            return
        if self._pending_assign or is_first:
            await self._listener.on_partitions_assigned(
                {self._owned[partition_id] for partition_id in self._pending_assign}
            )
            self._pending_assign.clear()
            self._has_assignment = True
        if unnamed:
            raise UnknownTopicOrPartition(f"topic id {uuid.UUID(bytes=unnamed[0])} is not known yet")

    async def _has_pending_target(self) -> bool:
        """Whether this member's target assignment has partitions that other members still own. A consumer that reads to
        the end must wait for them."""
        described = await describe_group(self._cluster, self.group)
        return any(each.target_partitions for each in described.members if each.member_id == self.member_id)

    async def _topic_names(self, ids: set[bytes]) -> dict[bytes, str]:
        """Topic names by topic id; ids of unknown topics are absent."""
        known = self._cached_topic_names()
        if ids <= known.keys():
            return known
        if self._topic_regex is not None:
            return {view.topic_id: name for name, view in (await self._cluster.topics()).items()}
        await self._cluster.refresh_metadata(self._topics)
        return self._cached_topic_names()

    def _cached_topic_names(self) -> dict[bytes, str]:
        names = {*self._topics, *(partition.topic for partition in self._owned.values())}
        views = ((name, self._cluster.cached_topic(name)) for name in names)
        return {view.topic_id: name for name, view in views if view is not None}

    async def _stop_reconciliation(self) -> None:
        task, self._reconciliation = self._reconciliation, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _lose(self) -> None:
        """Stop reading all partitions after the member was removed from the group; other members may already own
        them."""
        await self._stop_reconciliation()
        self.fenced_count += 1
        self.epoch = JOIN_EPOCH
        self._target, self._sends_full = frozenset(), True
        removed = {
            named for partition_id, named in self._owned.items() if partition_id not in self._pending_assign
        }
        self._owned.clear()
        self._pending_assign.clear()
        if removed:
            await self._listener.on_partitions_lost(removed)

    async def _use_options(self) -> None:
        """Store a session timeout that is not the default in the group's settings, because the coordinator takes it
        from there. A broker that refuses it keeps its own."""
        defaults = GroupOptions()
        if self._options.heartbeat_interval_ms != defaults.heartbeat_interval_ms:
            logger.info(
                "group %s: heartbeat_interval_ms applies to classic groups only; the group's own setting is used",
                self.group,
            )
        if self._options.session_timeout_ms == defaults.session_timeout_ms:
            return
        value = str(self._options.session_timeout_ms)
        resource = {"resource_type": ResourceType.GROUP, "resource_name": self.group}
        described = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS,
            {
                "resources": [{**resource, "configuration_keys": [SESSION_TIMEOUT_CONFIG]}],
                "include_synonyms": False,
                "include_documentation": False,
            },
        )
        if any(entry.value == value for result in described.results for entry in result.configs or ()):
            return
        change = {"name": SESSION_TIMEOUT_CONFIG, "config_operation": Operation.SET, "value": value}
        answer = await self._cluster.request_controller(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            {"resources": [{**resource, "configs": [change]}], "validate_only": False},
        )
        for result in answer.responses:
            if result.error_code:
                error = client_error_for_code(result.error_code, result.error_message)
                logger.warning(
                    "group %s: session_timeout_ms=%s has no effect: %s", self.group, value, error.message
                )


def _partition_ids(topics: Iterable[Any]) -> Iterable[PartitionId]:
    return ((topic.topic_id, index) for topic in topics for index in topic.partitions)


def _topic_partition_fields(partition_ids: Iterable[PartitionId]) -> list[dict[str, Any]]:
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partition_ids):
        grouped.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in grouped.items()]
