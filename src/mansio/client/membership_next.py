"""One member of a group whose partitions the broker assigns (KIP-848).

Owns the member's life: heartbeat, take what the broker gives, give up what it takes back, leave. What having or losing
partitions means is the `Owner`'s business, as with a member of a classic group.

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

from mansio.errors import (
    FencedMemberEpoch,
    MansioError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from mansio.link.cluster import check_top_level
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .group_description import describe_group
from .membership import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.link.cluster import Cluster

    from .membership import Owner

    Place = tuple[bytes, int]
    """A topic's id, and the index of a partition."""

logger = logging.getLogger(__name__)

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Leave, but keep the partitions for the one who comes back with the same instance id (until the session ends)."""
PATTERN_VERSION: Final = 1
"""The first version of ConsumerGroupHeartbeat that knows regular expressions."""
ANSWER_MS_MAX: Final = 10_000
LEAVE_MS_MAX: Final = 2_000
RELEASED_MS_MAX: Final = 65_000
"""Somewhat more than the longest session a group can have: whoever had an instance id and died is out by then."""
_LANES = itertools.count()


class NextMembership:
    """Runs as one task: `run()` until it is cancelled or fails for good; then `leave()`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        owner: Owner,
        options: GroupOptions,
        pattern: str | None = None,
    ) -> None:
        """`pattern`: a regular expression (RE2) of topics to subscribe to as well."""
        self._cluster = cluster
        self._topics = tuple(topics)
        self._pattern = pattern
        self._owner = owner
        self._options = options
        self.group = group
        self.member_id = str(uuid.uuid4())
        self.epoch = JOIN_EPOCH
        self.lives = 0
        """How often it was put out of the group."""
        self._loop = asyncio.get_running_loop()
        self._told: frozenset[Place] = frozenset()
        """What the broker wants this member to have."""
        self._owned: dict[Place, TopicPartition] = {}
        """What this member has, under the names its owner knows."""
        self._starting: set[Place] = set()
        """Of that, what the owner has not begun to read yet."""
        self._reported: frozenset[Place] = frozenset()
        self._says_all = True
        self._was_in = False
        self._has_sent = False
        self._was_told = False
        self._interval_s = 0.0
        self._failures = 0
        self._unreleased_since: float | None = None
        self._beating = asyncio.Lock()
        self._due = asyncio.Event()
        """A heartbeat is to be sent at once."""
        self._moving: asyncio.Task[None] | None = None
        self._lane = f"member {next(_LANES)}"
        """A connection of its own: a commit that waits for the disk must not hold up a heartbeat."""

    @property
    def identity(self) -> tuple[int, str]:
        """(member epoch, member id) to commit with; nobody's before the group took it in."""
        return (self.epoch, self.member_id) if self._was_in else (-1, "")

    async def run(self) -> None:
        """Be a member. Raises what no retry can heal (`FencedInstanceId`, `UnsupportedVersion`, ...)."""
        self._warn_of_what_is_not_used()
        try:
            while True:
                if self._seconds_left() <= 0:
                    await self._step_aside()
                pause_s = await self._beat_once()
                self._look_at_moves()
                await self._rest(min(pause_s, self._seconds_left()))
        except Exception:
            await self._lose()
            raise
        finally:
            await self._stop_moving()

    async def renew(self, epoch: int) -> None:
        """Learn the epoch by which the group knows this member, if it is another than `epoch` already or by now.
        Raises what the group answers."""
        async with self._beating:
            if self.epoch == JOIN_EPOCH:
                raise UnknownMember(f"group {self.group} went on without this member")
            if self.epoch == epoch:
                try:
                    await self._beat()
                except MansioError:
                    self._due.set()  # `run` is to hear of it, too
                    raise
        self._due.set()

    async def leave(self) -> None:
        """Tell the group that this member is going. A static member keeps its place until its session ends."""
        await self._cluster.close_lane(self._lane)
        if not self._has_sent:
            return
        self._has_sent = False
        epoch = LEAVE_EPOCH if self._options.instance_id is None else LEAVE_STATIC_EPOCH
        try:
            await self._cluster.ask_coordinator(
                self.group,
                ApiKey.CONSUMER_GROUP_HEARTBEAT,
                {**self._identity(epoch), "topic_partitions": None},
                check=check_top_level,
                retry_timeout_ms=LEAVE_MS_MAX,
            )
        except MansioError as error:
            logger.info("leaving group %s: %s", self.group, error)

    # -- heartbeats --------

    async def _beat_once(self) -> float:
        """One heartbeat, and what follows if it fails; returns the seconds until the next."""
        try:
            async with self._beating:
                await self._beat()
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

    async def _beat(self) -> None:
        reported = self._told | self._owned.keys()
        fields = self._identity(self.epoch)
        fields["topic_partitions"] = _grouped(reported) if self._is_news(reported) else None
        if self._says_all:
            await self._check_pattern()
            fields |= self._subscription()
        self._says_all = self._has_sent = True
        timeout_ms = min(ANSWER_MS_MAX, self._cluster.options.request_timeout_ms)
        answer = await self._cluster.ask_coordinator(
            self.group,
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            fields,
            check=check_top_level,
            lane=self._lane,
            timeout_ms=timeout_ms,
            final=(MansioError,),  # what is sent again has to be said anew
        )
        self._says_all, self._reported, self._was_in = False, reported, True
        self.epoch, self.member_id = answer.member_epoch, answer.member_id or self.member_id
        self._interval_s = answer.heartbeat_interval_ms / 1000
        if answer.assignment is not None:
            self._told = frozenset(_places(answer.assignment.topic_partitions))

    def _is_news(self, reported: frozenset[Place]) -> bool:
        return self._says_all or reported != self._reported

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
        connection = await self._cluster.coordinator(self.group, self._lane)
        if connection.version_for(ApiKey.CONSUMER_GROUP_HEARTBEAT) < PATTERN_VERSION:
            raise UnsupportedVersion("the broker does not know regular expressions of topics")

    def _wait_for_release(self, error: UnreleasedInstanceId) -> None:
        """Whoever had this instance id may have died; its session ends in time. Two that live are an error."""
        now = self._loop.time()
        if self._unreleased_since is None:
            self._unreleased_since = now
            logger.warning("group %s: %s; waiting for its session to end", self.group, error)
        if (now - self._unreleased_since) * 1000 > RELEASED_MS_MAX:
            raise error

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._due.wait()
        except TimeoutError:
            pass
        self._due.clear()

    def _seconds_left(self) -> float:
        """Until the application has asked for nothing for too long."""
        return self._options.poll_interval_ms_max / 1000 - self._owner.seconds_since_poll()

    async def _step_aside(self) -> None:
        """The application asked for nothing for too long: others take over until it does."""
        logger.warning(
            "group %s: nothing was asked for within poll_interval_ms_max; leaving the group", self.group
        )
        await self._lose()
        await self.leave()
        await self._owner.polled()

    # -- moving partitions --------

    def _look_at_moves(self) -> None:
        """Begin to move what is to be moved, unless that is under way. Raises what ended it before."""
        if self._moving is not None and self._moving.done():
            ended, self._moving = self._moving, None
            ended.result()
        if self._moving is None and not self._is_settled():
            self._moving = self._loop.create_task(self._move())
            self._moving.add_done_callback(self._moved)

    def _moved(self, moving: asyncio.Task[None]) -> None:
        if not moving.cancelled() and moving.exception() is not None:
            self._due.set()  # `run` is to see it

    def _is_settled(self) -> bool:
        if not self._was_in:
            return True  # nobody has said anything yet
        return self._was_told and not self._starting and self._told == self._owned.keys()

    async def _move(self) -> None:
        """Give up and take until this member has what it is to have."""
        failures = 0
        while not self._is_settled():
            try:
                await self._give_up([place for place in self._owned if place not in self._told])
                await self._take()
                failures = 0
                if self._told == self._owned.keys():
                    return  # if it is promised something, a heartbeat will tell
            except MansioError as error:
                if not error.retriable:
                    raise
                failures += 1
                logger.info("group %s: %s; trying again", self.group, error)
                await asyncio.sleep(self._cluster.backoff.delay_seconds(failures))

    async def _give_up(self, gone: list[Place]) -> None:
        if not gone:
            return
        begun = {self._owned[place] for place in gone if place not in self._starting}
        if begun:
            await self._owner.revoke(begun)
        for place in gone:
            del self._owned[place]
            self._starting.discard(place)
        self._due.set()  # somebody waits for them

    async def _take(self) -> None:
        names = await self._names({topic_id for topic_id, _ in self._told - self._owned.keys()})
        unnamed: list[bytes] = []
        for topic_id, index in self._told - self._owned.keys():
            if topic_id not in names:
                unnamed.append(topic_id)
                continue
            self._owned[topic_id, index] = TopicPartition(names[topic_id], index)
            self._starting.add((topic_id, index))
        is_first = not self._was_told and not unnamed
        if is_first and not self._starting and (await self._is_promised_any() or self._told):
            return
        if self._starting or is_first:
            await self._owner.assign({self._owned[place] for place in self._starting})
            self._starting.clear()
            self._was_told = True
        if unnamed:
            raise UnknownTopicOrPartition(f"no broker knows topic id {uuid.UUID(bytes=unnamed[0])} yet")

    async def _is_promised_any(self) -> bool:
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

    async def _stop_moving(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    async def _lose(self) -> None:
        """The group went on without this member: what it had may be with others already."""
        await self._stop_moving()
        self.lives += 1
        self.epoch = JOIN_EPOCH
        self._told, self._says_all = frozenset(), True
        gone = {named for place, named in self._owned.items() if place not in self._starting}
        self._owned.clear()
        self._starting.clear()
        if gone:
            await self._owner.lose(gone)

    def _warn_of_what_is_not_used(self) -> None:
        usual = GroupOptions()
        for name in ("session_timeout_ms", "heartbeat_interval_ms"):
            if getattr(self._options, name) != getattr(usual, name):
                logger.info(
                    "group %s: %s is for classic groups; here the group's own setting holds", self.group, name
                )


def _places(topics: Iterable[Any]) -> Iterable[Place]:
    return ((topic.topic_id, index) for topic in topics for index in topic.partitions)


def _grouped(places: Iterable[Place]) -> list[dict[str, Any]]:
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(places):
        grouped.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in grouped.items()]
