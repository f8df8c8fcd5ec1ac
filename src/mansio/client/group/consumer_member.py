"""One member of a group whose partitions the broker assigns (KIP-848).

Owns the member's life: heartbeat, take what the broker gives, give up what it takes back, leave. What having or losing
partitions means is the `RebalanceListener`'s business, as with a member of a classic group.

Heartbeats go on while partitions change hands: what moves is worked off by a task beside them, and what does not move
is not touched. A partition is known by the id of its topic, for one made anew under an old name is another.

Always true:
* What is reported as owned is everything that is read or may be read next, so that the group gives none of it to
  others before this member has said that it let go; which it says at once.
* After an answer that did not come, the next heartbeat says everything anew.
* A member that was put out *loses* what it had, and joins again with the same id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from mansio.client.admin.group_description import describe_group
from mansio.client.group.classic_member import GroupOptions
from mansio.errors import (
    FencedMemberEpoch,
    MansioError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from mansio.net.cluster import check_top_level
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.client.group.classic_member import RebalanceListener
    from mansio.net.cluster import Cluster

    PartitionId = tuple[bytes, int]
    """A topic's id, and the index of a partition."""

logger = logging.getLogger(__name__)

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Leave, but keep the partitions for the one who comes back with the same instance id (until the session ends)."""
PATTERN_VERSION: Final = 1
"""The first version of ConsumerGroupHeartbeat that knows regular expressions."""
RESPONSE_MS_MAX: Final = 10_000
LEAVE_MS_MAX: Final = 2_000
INSTANCE_RELEASE_MS_MAX: Final = 65_000
"""Somewhat more than the longest session a group can have: whoever had an instance id and died is out by then."""
_CHANNEL_NUMBERS = itertools.count()


class ConsumerMember:
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
        """`pattern`: a regular expression (RE2) of topics to subscribe to as well."""
        self._cluster = cluster
        self._topics = tuple(topics)
        self._pattern = pattern
        self._listener = listener
        self._options = options
        self.group = group
        self.member_id = str(uuid.uuid4())
        self.epoch = JOIN_EPOCH
        self.fenced_count = 0
        """How often it was put out of the group."""
        self._loop = asyncio.get_running_loop()
        self._target: frozenset[PartitionId] = frozenset()
        """What the broker wants this member to have."""
        self._owned: dict[PartitionId, TopicPartition] = {}
        """What this member has, under the names its owner knows."""
        self._pending_assign: set[PartitionId] = set()
        """Of that, what the owner has not begun to read yet."""
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
        """A heartbeat is to be sent at once."""
        self._reconciliation: asyncio.Task[None] | None = None
        self._channel = f"member {next(_CHANNEL_NUMBERS)}"
        """A connection of its own: a commit that waits for the disk must not hold up a heartbeat."""

    @property
    def identity(self) -> tuple[int, str]:
        """(member epoch, member id) to commit with; nobody's before the group took it in."""
        return (self.epoch, self.member_id) if self._has_joined else (-1, "")

    async def run(self) -> None:
        """Be a member. Raises what no retry can heal (`FencedInstanceId`, `UnsupportedVersion`, ...)."""
        self._log_unused_options()
        try:
            while True:
                if self._seconds_left() <= 0:
                    await self._leave_until_polled()
                pause_s = await self._heartbeat_once()
                self._start_reconciliation()
                await self._wait(min(pause_s, self._seconds_left()))
        except Exception:
            await self._lose()
            raise
        finally:
            await self._stop_reconciliation()

    async def refresh_epoch(self, epoch: int) -> None:
        """Learn the epoch by which the group knows this member, if it is another than `epoch` already or by now.
        Raises what the group answers."""
        async with self._heartbeat_lock:
            if self.epoch == JOIN_EPOCH:
                raise UnknownMember(f"group {self.group} went on without this member")
            if self.epoch == epoch:
                try:
                    await self._heartbeat()
                except MansioError:
                    self._heartbeat_due.set()  # `run` is to hear of it, too
                    raise
        self._heartbeat_due.set()

    async def leave(self) -> None:
        """Tell the group that this member is going. A static member keeps its place until its session ends."""
        await self._cluster.close_channel(self._channel)
        if not self._has_sent:
            return
        self._has_sent = False
        epoch = LEAVE_EPOCH if self._options.instance_id is None else LEAVE_STATIC_EPOCH
        try:
            await self._cluster.request_coordinator(
                self.group,
                ApiKey.CONSUMER_GROUP_HEARTBEAT,
                {**self._identity(epoch), "topic_partitions": None},
                check=check_top_level,
                retry_timeout_ms=LEAVE_MS_MAX,
            )
        except MansioError as error:
            logger.info("leaving group %s: %s", self.group, error)

    # -- heartbeats --------

    async def _heartbeat_once(self) -> float:
        """One heartbeat, and what follows if it fails; returns the seconds until the next."""
        try:
            async with self._heartbeat_lock:
                await self._heartbeat()
        except (UnknownMember, FencedMemberEpoch) as error:
            logger.info("member %s was put out of group %s: %s", self.member_id, self.group, error)
            await self._lose()
        except UnreleasedInstanceId as error:
            self._wait_for_release(error)
        except MansioError as error:
            if not error.retriable:
                raise
            logger.info("group %s: %s; trying again", self.group, error)
        else:
            self._failures, self._unreleased_since = 0, None
            return self._interval_s
        self._failures += 1
        return self._cluster.backoff.delay_seconds(self._failures)

    async def _heartbeat(self) -> None:
        reported = self._target | self._owned.keys()
        fields = self._identity(self.epoch)
        fields["topic_partitions"] = _grouped(reported) if self._has_changed(reported) else None
        if self._sends_full:
            await self._check_pattern()
            fields |= self._subscription()
        self._sends_full = self._has_sent = True
        timeout_ms = min(RESPONSE_MS_MAX, self._cluster.options.request_timeout_ms)
        answer = await self._cluster.request_coordinator(
            self.group,
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            fields,
            check=check_top_level,
            channel=self._channel,
            timeout_ms=timeout_ms,
            final=(MansioError,),  # what is sent again has to be said anew
        )
        self._sends_full, self._reported, self._has_joined = False, reported, True
        self.epoch, self.member_id = answer.member_epoch, answer.member_id or self.member_id
        self._interval_s = answer.heartbeat_interval_ms / 1000
        if answer.assignment is not None:
            self._target = frozenset(_partition_ids(answer.assignment.topic_partitions))

    def _has_changed(self, reported: frozenset[PartitionId]) -> bool:
        return self._sends_full or reported != self._reported

    def _identity(self, epoch: int) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": epoch,
            "instance_id": self._options.instance_id,
        }

    def _subscription(self) -> dict[str, Any]:
        return {
            "rebalance_timeout_ms": self._options.rebalance_timeout_ms,
            "subscribed_topic_names": list(self._topics),
            "subscribed_topic_regex": self._pattern,
        }

    async def _check_pattern(self) -> None:
        """An older broker would not see the expression, and give nothing."""
        if self._pattern is None:
            return
        connection = await self._cluster.coordinator(self.group, self._channel)
        if connection.version_for(ApiKey.CONSUMER_GROUP_HEARTBEAT) < PATTERN_VERSION:
            raise UnsupportedVersion("the broker does not know regular expressions of topics")

    def _wait_for_release(self, error: UnreleasedInstanceId) -> None:
        """Whoever had this instance id may have died; its session ends in time. Two that live are an error."""
        now = self._loop.time()
        if self._unreleased_since is None:
            self._unreleased_since = now
            logger.warning("group %s: %s; waiting for its session to end", self.group, error)
        if (now - self._unreleased_since) * 1000 > INSTANCE_RELEASE_MS_MAX:
            raise error

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._heartbeat_due.wait()
        except TimeoutError:
            pass
        self._heartbeat_due.clear()

    def _seconds_left(self) -> float:
        """Until the application has asked for nothing for too long."""
        return self._options.poll_interval_ms_max / 1000 - self._listener.seconds_since_poll()

    async def _leave_until_polled(self) -> None:
        """The application asked for nothing for too long: others take over until it does."""
        logger.warning(
            "group %s: nothing was asked for within poll_interval_ms_max; leaving the group", self.group
        )
        await self._lose()
        await self.leave()
        await self._listener.wait_for_poll()

    # -- moving partitions --------

    def _start_reconciliation(self) -> None:
        """Begin to move what is to be moved, unless that is under way. Raises what ended it before."""
        if self._reconciliation is not None and self._reconciliation.done():
            ended, self._reconciliation = self._reconciliation, None
            ended.result()
        if self._reconciliation is None and not self._is_reconciled():
            self._reconciliation = self._loop.create_task(self._reconcile())
            self._reconciliation.add_done_callback(self._on_reconciled)

    def _on_reconciled(self, moving: asyncio.Task[None]) -> None:
        if not moving.cancelled() and moving.exception() is not None:
            self._heartbeat_due.set()  # `run` is to see it

    def _is_reconciled(self) -> bool:
        if not self._has_joined:
            return True  # nobody has said anything yet
        return self._has_assignment and not self._pending_assign and self._target == self._owned.keys()

    async def _reconcile(self) -> None:
        """Give up and take until this member has what it is to have."""
        failures = 0
        while not self._is_reconciled():
            try:
                await self._revoke([place for place in self._owned if place not in self._target])
                await self._assign()
                failures = 0
                if self._target == self._owned.keys():
                    return  # if it is promised something, a heartbeat will tell
            except MansioError as error:
                if not error.retriable:
                    raise
                failures += 1
                logger.info("group %s: %s; trying again", self.group, error)
                await asyncio.sleep(self._cluster.backoff.delay_seconds(failures))

    async def _revoke(self, gone: list[PartitionId]) -> None:
        if not gone:
            return
        begun = {self._owned[place] for place in gone if place not in self._pending_assign}
        if begun:
            await self._listener.revoke(begun)
        for place in gone:
            del self._owned[place]
            self._pending_assign.discard(place)
        self._heartbeat_due.set()  # somebody waits for them

    async def _assign(self) -> None:
        names = await self._names({topic_id for topic_id, _ in self._target - self._owned.keys()})
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
            await self._listener.assign({self._owned[place] for place in self._pending_assign})
            self._pending_assign.clear()
            self._has_assignment = True
        if unnamed:
            raise UnknownTopicOrPartition(f"no broker knows topic id {uuid.UUID(bytes=unnamed[0])} yet")

    async def _has_pending_target(self) -> bool:
        """Whether this member, which has nothing, gets something when others let go of it: one that reads to the end
        has not come to it."""
        described = await describe_group(self._cluster, self.group)
        return any(each.target for each in described.members if each.member_id == self.member_id)

    async def _names(self, ids: set[bytes]) -> dict[bytes, str]:
        """The topics of these ids, as far as they are known."""
        known = self._cached_names()
        if ids <= known.keys():
            return known
        if self._pattern is not None:
            return {view.topic_id: name for name, view in (await self._cluster.topics()).items()}
        await self._cluster.refresh(self._topics)
        return self._cached_names()

    def _cached_names(self) -> dict[bytes, str]:
        names = {*self._topics, *(partition.topic for partition in self._owned.values())}
        views = ((name, self._cluster.cached_topic(name)) for name in names)
        return {view.topic_id: name for name, view in views if view is not None}

    async def _stop_reconciliation(self) -> None:
        moving, self._reconciliation = self._reconciliation, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    async def _lose(self) -> None:
        """The group went on without this member: what it had may be with others already."""
        await self._stop_reconciliation()
        self.fenced_count += 1
        self.epoch = JOIN_EPOCH
        self._target, self._sends_full = frozenset(), True
        gone = {named for place, named in self._owned.items() if place not in self._pending_assign}
        self._owned.clear()
        self._pending_assign.clear()
        if gone:
            await self._listener.lose(gone)

    def _log_unused_options(self) -> None:
        usual = GroupOptions()
        for name in ("session_timeout_ms", "heartbeat_interval_ms"):
            if getattr(self._options, name) != getattr(usual, name):
                logger.info(
                    "group %s: %s is for classic groups; here the group's own setting holds", self.group, name
                )


def _partition_ids(topics: Iterable[Any]) -> Iterable[PartitionId]:
    return ((topic.topic_id, index) for topic in topics for index in topic.partitions)


def _grouped(places: Iterable[PartitionId]) -> list[dict[str, Any]]:
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(places):
        grouped.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in grouped.items()]
