"""Share partitions led by this broker (Kafka's SharePartitionManager), created on first use.

Owns the `SharePartitionLeader` objects, `SharePartitions` with those of each topic partition and group, and the share
sessions. A leader object is dropped when another broker leads the partition, when the partition is closed, when the
share state is replaced or deleted, when a write fails, and after `IDLE_MS` without use.

Invariants: there is at most one leader object per share partition, there are at most `SHARE_PARTITIONS_MAX` in total,
and `find` returns those of the current leader epoch. When a member's session ends, its leases are released, apart from
those with an update in flight, and from those of a member that keeps them when its connection ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mansio.broker.coordinator.share.partition_leader import (
    NoDeadLetters,
    ShareDependencies,
    SharePartitionLeader,
)
from mansio.broker.coordinator.share.share_indexes import OneSharePartition, TopicShareIndexes
from mansio.broker.coordinator.share.share_partitions import SharePartitions
from mansio.config.share_group_config import (
    AUTO_OFFSET_RESET,
    BY_DURATION,
    DEAD_LETTERS_ENABLE,
    DELIVERY_COUNT_LIMIT,
    EARLIEST,
    ISOLATION_LEVEL,
    KEY_BURST,
    KEY_HEADER,
    KEY_LEASES_MAX,
    KEY_RATE,
    RANGE_LOCKS_MAX,
    RECORD_LOCK_DURATION,
    RECORD_LOCKS_MAX,
    RENEW_ACKNOWLEDGE_ENABLE,
    RETRY_BACKOFF,
    RETRY_BACKOFF_MAX,
    RETRY_BACKOFF_MULTIPLIER,
    RETRY_JITTER,
    SHARE_FAIR,
    SHARE_ORDER,
    duration_ms,
    effective_value,
)
from mansio.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidTopic,
    MansioError,
    NonEmptyGroup,
    NotCoordinator,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.host.gather_results import gather_results
from mansio.logs import fields
from mansio.state.share_group.share_sessions import ShareSessions
from mansio.state.share_partition.key_limits import KeyLimits
from mansio.state.share_partition.types import BACKLOG_QUEUES, BASE, Backoff, ShareKey, ShareSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
    from mansio.broker.coordinator.share.partition_leader import DeadLetterSink
    from mansio.broker.coordinator.share.share_indexes import ShareIndexes
    from mansio.broker.coordinator.share.state_client import SharePersister
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.image import MetadataImage
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer
    from mansio.state.share_partition.types import LoadedState
    from mansio.wire.topic_partition import TopicIdPartition


IN_FLIGHT_RANGES_MAX: Final = 20_000
"""Maximum number of in-flight batches of a share partition."""

logger = logging.getLogger(__name__)

N = TypeVar("N")

SHARE_PARTITIONS_MAX: Final = 100_000
LOAD_RETRY_DELAY_MS: Final = 100
"""Delay before the state of a share partition is read again after a failure."""


class ParkedReceive(Protocol):
    """A request that waits for records to lease."""

    def finish(self) -> None:
        """Stop waiting and answer with the records found so far."""


FAILURES_MAX: Final = 10_000
"""Maximum number of recent errors of share partitions that are remembered."""

IDLE_MS: Final = 10 * 60_000
"""Time without use after which the leader object of a share partition is dropped."""

SWEEP_INTERVAL_MS: Final = 60_000
"""Interval in which idle leader objects are searched."""

DEAD_LETTER_WAIT_MS_MAX: Final = 5_000
"""Maximum time for which the deletion of a share state waits for its dead letters."""

DEAD_LETTER_CHECK_MS: Final = 50
"""Interval in which the deletion of a share state checks whether its dead letters are written."""

DEAD_LETTER_RELOAD_MS: Final = 1_000
"""Delay before a failed share partition is loaded again for its dead letters, if it is not used."""


async def _no_refresh(_group: str) -> None:
    """Of settings that are always current."""


class SharePartitionManager:
    """The share partitions led by one broker. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        find_partition: Callable[[str | None, bytes | None, int], Partition],
        persister: SharePersister,
        settings: Callable[[str, Partition], ShareSettings],
        initial_offset: Callable[[str, Partition], int],
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
        sessions_max: int,
        dead_letters: DeadLetterSink | None = None,
        indexes: ShareIndexes | None = None,
        refresh_settings: Callable[[str], Awaitable[None]] = _no_refresh,
    ) -> None:
        """`find_partition`: returns a partition by topic name or id and number, or raises; `settings`: returns the
        settings of a group for a partition; `initial_offset`: returns the offset at which a group without state starts
        in a partition; `indexes`: of the topic partitions with several share partitions, None for none;
        `refresh_settings`: waits until `settings` and `initial_offset` use all changes that were stored before."""
        self.persister = persister
        self._indexes = indexes or OneSharePartition()
        self._index_of = self._indexes.index_of
        self.sessions = ShareSessions(sessions_max)
        self.parked: dict[ParkedReceive, None] = {}
        self._find_partition = find_partition
        self._clock = clock
        self._scheduler = scheduler
        self._settings = settings
        self._dependencies = ShareDependencies(
            persister,
            clock,
            scheduler,
            random,
            settings,
            refresh_settings,
            initial_offset,
            self._index_of,
            self._load_base,
            self._forget_found,
            self._limits_of,
            dead_letters or NoDeadLetters(),
            self._on_end,
        )
        self._share_partitions: dict[ShareKey, SharePartitionLeader] = {}
        self._found: dict[str, dict[TopicIdPartition, SharePartitions]] = {}
        """By group and topic partition, what `find` has returned, as long as none of the leaders has ended."""
        self._by_group: dict[str, dict[ShareKey, SharePartitionLeader]] = {}
        self._by_partition: dict[tuple[bytes, int], dict[ShareKey, SharePartitionLeader]] = {}
        self._key_limits: dict[tuple[ShareKey, int], KeyLimits] = {}
        """By share partition `BASE` and leader epoch, the limits by key that several share partitions share."""
        self._failures: dict[ShareKey, tuple[float, MansioError, LoadedState | None]] = {}
        self._dead_letter_timers: dict[
            ShareKey, Timer
        ] = {}  # reloads of failed share partitions with waiting dead letters
        self._sweep: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._share_partitions)

    def share_partitions(self) -> list[SharePartitionLeader]:
        """Return the leader objects of all share partitions, in order of creation."""
        return list(self._share_partitions.values())

    # ------------------------------------------------------------------ lookup

    def find(self, group: str, place: TopicIdPartition) -> SharePartitions:
        """Return the share partitions of a topic partition (topic id, index), created on first use; their states may
        still be loading. Raises the errors of `find_one`."""
        try:
            found = self._found[group][place]
        except KeyError:
            pass
        else:
            partition = found.partition
            # As `SharePartitionLeader.is_stale`, which would be a call more in each request.
            if (
                partition.is_leader
                and not partition.closed
                and partition.leader_epoch == found.leader_epoch
                and self._index_of(partition) is found.topic_index
            ):
                return found
        base = self.find_one(ShareKey(group, *place))
        leaders = [base]
        if base.index is not None:
            leaders = [self.find_one(base.key._replace(number=number)) for number in base.index.numbers]
        found = self._found.setdefault(group, {})[place] = SharePartitions(leaders)
        return found

    async def load(self, group: str, place: TopicIdPartition) -> SharePartitions:
        """Return the share partitions of a topic partition after their states are loaded. Raises the errors of `find`,
        and those with which a share partition ends."""
        while True:
            found = self.find(group, place)
            if found.is_loaded:
                return found
            await found.wait_until_loaded()  # then a fair group may have more of them

    async def load_existing(self, group: str, place: TopicIdPartition) -> SharePartitions:
        """As `load`, but without creating a state. Raises `GroupIdNotFound` if there is none."""
        partition = self._find_partition(None, *place)
        partition.ensure_leader()
        key = ShareKey(group, *place)
        base = self._share_partitions.get(key)
        is_known = base is not None and base.is_ready and not base.is_stale
        if not is_known and await self.persister.summary(key) is None:
            raise GroupIdNotFound(f"group {group} has read nothing of {partition.name}")
        return await self.load(group, place)

    def find_loaded(self, group: str, place: TopicIdPartition) -> SharePartitions | None:
        """Return the share partitions of a topic partition if their states are loaded, otherwise None."""
        try:
            found = self._found[group][place]
        except KeyError:
            return None
        is_current = not found.leaders[0].is_stale
        return found if is_current and (found.is_loaded or found.check_loaded()) else None

    def loaded_of(self, group: str) -> list[SharePartitions]:
        """Return those share partitions of a group whose states are loaded, together by topic partition."""
        loaded: dict[TopicIdPartition, list[SharePartitionLeader]] = {}
        for leader in self._by_group.get(group, {}).values():
            if leader.is_ready:
                loaded.setdefault((leader.key.topic_id, leader.key.partition), []).append(leader)
        return [SharePartitions(leaders) for leaders in loaded.values()]

    def find_one(self, key: ShareKey) -> SharePartitionLeader:
        """Return the leader object of one share partition, created on first use; its state may still be loading.

        Raises `UnknownTopicId`, `UnknownTopicOrPartition`, `NotLeaderOrFollower`, `InvalidTopic` for an internal topic,
        and for `LOAD_RETRY_DELAY_MS` after a failure the error of that failure."""
        share_partition = self._share_partitions.get(key)
        if share_partition is not None:
            if not share_partition.is_stale:
                return share_partition
            share_partition.end(
                NotLeaderOrFollower(
                    f"{share_partition.partition.name} is led by another broker, or in a later epoch"
                )
            )
        partition = self._find_partition(None, key.topic_id, key.partition)
        if partition.internal:
            raise InvalidTopic(f"{partition.topic} is an internal topic; it cannot be used by a share group")
        partition.ensure_leader()
        if partition.is_leadership_uncertain:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name}")
        index = self._index_of(partition)
        if key.number not in ((BASE, *BACKLOG_QUEUES) if index is None else index.numbers):
            raise UnknownTopicOrPartition(f"{partition.name} has no share partition {key.number}")
        return self._create_and_load(key, partition)

    async def _load_base(self, key: ShareKey) -> SharePartitionLeader:
        """Return the leader of the share partition `BASE` after its state is loaded, given another one."""
        base = self.find_one(key._replace(number=BASE))
        await base.wait_until_loaded()
        return base

    def _forget_found(self, key: ShareKey) -> None:
        """Let `find` collect the share partitions of a topic partition again, given one of them."""
        if (places := self._found.get(key.group)) is not None:
            places.pop((key.topic_id, key.partition), None)
            if not places:
                del self._found[key.group]

    def _limits_of(self, key: ShareKey, leader_epoch: int) -> KeyLimits:
        """Return the limits by key of the topic partition, given one of its share partitions; new ones if none of them
        is loaded in this leader epoch."""
        place = (key._replace(number=BASE), leader_epoch)
        limits = self._key_limits.get(place)
        if limits is None:
            limits = self._key_limits[place] = KeyLimits(self._now_ms())
        return limits

    async def keys_of(self, key: ShareKey) -> list[ShareKey]:
        """Return the keys of all share partitions of a topic partition of which the group may have state, that of
        `BASE` first, given one of them."""
        summary = await self.persister.summary(key._replace(number=BASE))
        queues = () if summary is None else summary.queues
        return [key._replace(number=number) for number in (*self._indexes.numbers_of(key.topic_id), *queues)]

    def settings_of(self, group: str, partition: Partition) -> ShareSettings:
        """Return the settings of a group for a partition."""
        return self._settings(group, partition)

    def _create_and_load(self, key: ShareKey, partition: Partition) -> SharePartitionLeader:
        if self._closed:
            raise NotCoordinator("the broker is stopping")
        known: LoadedState | None = None
        if (failure := self._failures.get(key)) is not None:
            until_ms, error, known = failure
            if self._now_ms() < until_ms:
                raise type(error)(error.message)
            del self._failures[key]
        if len(self._share_partitions) >= SHARE_PARTITIONS_MAX:
            raise CoordinatorNotAvailable(f"the limit of {SHARE_PARTITIONS_MAX} share partitions is reached")
        share_partition = SharePartitionLeader(key, partition, self._dependencies, known)
        self._share_partitions[key] = share_partition
        self._by_group.setdefault(key.group, {})[key] = share_partition
        self._by_partition.setdefault((key.topic_id, key.partition), {})[key] = share_partition
        if self._sweep is None:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)
        self._scheduler.spawn(share_partition.load(), name="load share partition")
        return share_partition

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    # ------------------------------------------------------------------ end

    def _on_end(self, share_partition: SharePartitionLeader) -> None:
        key = share_partition.key
        if self._share_partitions.get(key) is not share_partition:
            return
        del self._share_partitions[key]
        self._forget_found(key)
        _remove_from_index(self._by_group, key.group, key)
        _remove_from_index(self._by_partition, (key.topic_id, key.partition), key)
        self._drop_limits(key, share_partition.leader_epoch)
        error = share_partition.end_error
        if error is not None and not isinstance(error, NotLeaderOrFollower) and not share_partition.is_stale:
            known = fields(group=key.group, partition=share_partition.partition.name, reason=error)
            logger.warning("share_partition_dropped", extra=known)
            if len(self._failures) >= FAILURES_MAX:
                del self._failures[next(iter(self._failures))]
            self._failures[key] = (self._now_ms() + LOAD_RETRY_DELAY_MS, error, share_partition.known_state)
            self._schedule_dead_letters(share_partition)
        else:
            self._cancel_dead_letters(key)

    def _drop_limits(self, key: ShareKey, leader_epoch: int) -> None:
        """Drop the limits by key of a topic partition whose last share partition in this leader epoch has ended."""
        others = self._by_partition.get((key.topic_id, key.partition), {})
        if not any(
            other.group == key.group and leader.leader_epoch == leader_epoch
            for other, leader in others.items()
        ):
            self._key_limits.pop((key._replace(number=BASE), leader_epoch), None)

    def _schedule_dead_letters(self, share_partition: SharePartitionLeader) -> None:
        """Schedule a reload of a share partition with waiting dead letters, also if no member uses the group.

        If this object was never loaded, a reload is scheduled if one was scheduled for the former object."""
        key, pending = share_partition.key, share_partition.has_pending_dead_letters
        was_scheduled = key in self._dead_letter_timers
        self._cancel_dead_letters(key)
        if (was_scheduled if pending is None else pending) and not self._closed:
            self._schedule_reload(key)

    def _cancel_dead_letters(self, key: ShareKey) -> None:
        if (timer := self._dead_letter_timers.pop(key, None)) is not None:
            timer.cancel()

    def _schedule_reload(self, key: ShareKey) -> None:
        self._dead_letter_timers[key] = self._scheduler.call_later(
            DEAD_LETTER_RELOAD_MS, self._resume_dead_letters, key
        )

    def _resume_dead_letters(self, key: ShareKey) -> None:
        if self._closed or key not in self._dead_letter_timers:
            return
        try:
            self.find_one(key)
        except (NotLeaderOrFollower, UnknownTopicId, UnknownTopicOrPartition):
            del self._dead_letter_timers[key]  # the partition's leader resumes its dead letters
        except MansioError:
            self._schedule_reload(key)

    def handle_role_change(self, partition: Partition) -> None:
        """End the share partitions of a partition that another broker leads, or this broker in a later epoch."""
        found = self._by_partition.get((partition.topic_id.bytes, partition.index), {})
        for share_partition in list(found.values()):
            if share_partition.is_stale:
                share_partition.end(
                    NotLeaderOrFollower(f"{partition.name} is led by another broker, or in a later epoch")
                )

    def drop(self, key: ShareKey) -> None:
        """Drop the `SharePartitionLeader` of a share partition whose state was replaced or deleted."""
        self._failures.pop(key, None)
        share_partition = self._share_partitions.get(key)
        if share_partition is not None:
            share_partition.end(
                NotLeaderOrFollower(f"the state of {share_partition.partition.name} was replaced")
            )

    async def delete(self, key: ShareKey) -> None:
        """Delete the states of a topic partition's share partitions, given one of them, whose group or topic was
        deleted."""
        # In reverse: without the state of `BASE`, the others are not known to a repeated deletion.
        for one in (await self.keys_of(key))[::-1]:
            self.drop(one)
            await self.persister.delete(one)
            self.drop(one)

    async def wait_until_dead_lettered(self, key: ShareKey) -> None:
        """Wait until no record of a topic partition's share partitions, given one of them, waits for its copy in the
        dead-letter topic.

        Deleting the state earlier would lose these dead letters. Raises `NonEmptyGroup` after
        `DEAD_LETTER_WAIT_MS_MAX`."""
        until_ms = self._now_ms() + DEAD_LETTER_WAIT_MS_MAX
        for one in await self.keys_of(key):
            while (summary := await self.persister.summary(one)) is not None and summary.is_archiving:
                if self._now_ms() >= until_ms:
                    raise NonEmptyGroup(f"group {key.group!r} has dead letters that are not written yet")
                timeout: Promise[None] = self._scheduler.promise()
                self._scheduler.call_later(DEAD_LETTER_CHECK_MS, timeout.set_result, None)
                await timeout

    def handle_settings_change(self, group: str) -> None:
        """Apply the changed settings of a group to its share partitions."""
        for share_partition in list(self._by_group.get(group, {}).values()):
            share_partition.reconfigure()

    def handle_default_settings_change(self) -> None:
        """Apply changed defaults of the broker to all share partitions."""
        for share_partition in self.share_partitions():
            share_partition.reconfigure()

    def _sweep_idle(self) -> None:
        self._sweep = None
        oldest_ms = self._now_ms() - IDLE_MS
        for share_partition in self.share_partitions():
            together = [share_partition]
            if share_partition.fair_scan is not None:  # its backlog queues end with it
                key = share_partition.key
                leaders = self._by_partition.get((key.topic_id, key.partition), {})
                together = [leader for other, leader in leaders.items() if other.group == key.group]
            if share_partition.is_stale or all(_may_be_dropped(each, oldest_ms) for each in together):
                share_partition.end(
                    NotLeaderOrFollower(f"idle share partition of {share_partition.partition.name}")
                )
        kept_ms = self._now_ms() - SWEEP_INTERVAL_MS
        self._failures = {key: each for key, each in self._failures.items() if each[0] > kept_ms}
        if self._share_partitions and not self._closed:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)

    def close(self) -> None:
        """End all share partitions, because the broker stops."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for share_partition in self.share_partitions():
            share_partition.end(NotLeaderOrFollower("the broker is stopping"))

    # ------------------------------------------------------------------ release of leases

    def release_leases_of_connection(self, connection: object) -> None:
        """Release the leases of the share sessions of a lost connection, apart from those of members that keep them.

        The delivery counts as an attempt, because a record that crashes its consumer ends a connection each time."""
        for session in self.sessions.end_sessions_of_connection(connection):
            if not session.releases_leases:
                continue
            group, member = session.group, session.member
            writes = self._release_in_state_machines(group, member, uncounted=False)
            if writes:
                self._scheduler.spawn(self._await_writes(writes, group, member), name="release leases")

    async def release_leases(self, group: str, member: str) -> None:
        """Release the leases of a member on this broker, apart from those with an update in flight.

        The releases are stored when this method returns; if storing one fails, the error is logged and the leases
        expire. The deliveries do not count as attempts."""
        await self._await_writes(
            self._release_in_state_machines(group, member, uncounted=True), group, member
        )

    def _release_in_state_machines(
        self, group: str, member: str, *, uncounted: bool
    ) -> list[Coroutine[Any, Any, None]]:
        """Release a member's leases in the state machines at once, so that later requests of the member are not
        affected; return the coroutines that store the releases."""
        share_partitions = list(self._by_group.get(group, {}).values())
        writes = [
            self._release_in_state_machine(share_partition, member, uncounted=uncounted)
            for share_partition in share_partitions
        ]
        return [work for work in writes if work is not None]

    def _release_in_state_machine(
        self, share_partition: SharePartitionLeader, member: str, *, uncounted: bool
    ) -> Coroutine[Any, Any, None] | None:
        if not share_partition.is_ready:
            return None
        try:
            update = share_partition.call_machine_and_set_timer(
                share_partition.state_machine.release_member,
                member,
                share_partition.now_ms(),
                uncounted=uncounted,
            )
        except MansioError:  # the leader object has ended and logged the reason
            return None
        return None if update is None else share_partition.persist(update)

    async def _await_writes(self, writes: list[Coroutine[Any, Any, None]], group: str, member: str) -> None:
        for error in await gather_results(self._scheduler, writes, name="release leases"):
            if error is not None:
                logger.warning("leases_not_released", extra=fields(group=group, member=member, reason=error))


def _may_be_dropped(share_partition: SharePartitionLeader, oldest_ms: float) -> bool:
    """Return whether a leader object can be dropped because it was not used since `oldest_ms`. With a rate of keys it
    is kept while records wait: a member that asks rarely would find empty buckets each time."""
    if (
        share_partition.last_used_ms >= oldest_ms
        or not share_partition.is_ready
        or share_partition.has_waiters_or_writes
    ):
        return False
    machine = share_partition.state_machine
    counts = machine.counts(share_partition.now_ms())
    waits_for_rate = machine.settings.key_rate > 0 and counts.lag > 0
    return not counts.holders and not counts.archiving and not waits_for_rate


def _remove_from_index(index: dict[N, dict[ShareKey, SharePartitionLeader]], name: N, key: ShareKey) -> None:
    del index[name][key]
    if not index[name]:
        del index[name]


def share_settings(configs: Mapping[str, str], *, is_dead_letter_topic: bool) -> ShareSettings:
    """Return the settings of a group's share partitions from the group's `configs`, with defaults for absent ones.

    `is_dead_letter_topic`: the topic is a dead-letter topic, whose records are not dead-lettered."""
    record_locks_max = effective_value(RECORD_LOCKS_MAX, configs)
    order = effective_value(SHARE_ORDER, configs)
    has_limits = order != "partition"
    return ShareSettings(
        lock_ms=effective_value(RECORD_LOCK_DURATION, configs),
        delivery_limit=effective_value(DELIVERY_COUNT_LIMIT, configs),
        record_locks_max=record_locks_max,
        range_locks_max=effective_value(RANGE_LOCKS_MAX, configs),
        in_flight_batches_max=IN_FLIGHT_RANGES_MAX,
        lease_bound_step=2 * record_locks_max,
        is_ordered=order == "partition",
        renewal_enabled=effective_value(RENEW_ACKNOWLEDGE_ENABLE, configs) == "true",
        dead_letters_enabled=effective_value(DEAD_LETTERS_ENABLE, configs) == "true"
        and not is_dead_letter_topic,
        backoff=Backoff(
            effective_value(RETRY_BACKOFF, configs),
            effective_value(RETRY_BACKOFF_MULTIPLIER, configs),
            effective_value(RETRY_BACKOFF_MAX, configs),
            effective_value(RETRY_JITTER, configs),
        ),
        is_ordered_by_key=order == "key",
        is_committed_only=effective_value(ISOLATION_LEVEL, configs) == "read_committed",
        key_header=effective_value(KEY_HEADER, configs),
        is_fair=effective_value(SHARE_FAIR, configs) == "true" and order == "none",
        key_leases_max=effective_value(KEY_LEASES_MAX, configs) if has_limits else 0,
        key_rate=effective_value(KEY_RATE, configs) if has_limits else 0.0,
        key_burst=effective_value(KEY_BURST, configs),
    )


def create_share_partition_manager(
    settings: Settings,
    host_ports: HostPorts,
    partitions: PartitionSet,
    group_configs: GroupConfigManager,
    persister: SharePersister,
    dead_letters: DeadLetterSink | None,
    state: MetadataImage,
) -> SharePartitionManager:
    """Return the share partition manager of one broker."""
    overrides = group_configs.effective

    def effective_settings(group: str, partition: Partition) -> ShareSettings:
        is_dead_letter_topic = partition.settings.is_dead_letter_topic
        return share_settings(overrides(group), is_dead_letter_topic=is_dead_letter_topic)

    return SharePartitionManager(
        find_partition=partitions.find,
        persister=persister,
        settings=effective_settings,
        initial_offset=lambda group, partition: initial_offset(overrides(group), partition, host_ports.clock),
        clock=host_ports.clock,
        scheduler=host_ports.scheduler,
        random=host_ports.random,
        sessions_max=settings.group_share_max_share_sessions,
        dead_letters=dead_letters,
        indexes=TopicShareIndexes(state),
        refresh_settings=group_configs.refresh,
    )


def initial_offset(configs: Mapping[str, str], partition: Partition, clock: Clock) -> int:
    """Return the offset at which a group without state starts in a partition (`share.auto.offset.reset`)."""
    reset: str = effective_value(AUTO_OFFSET_RESET, configs)
    if reset == EARLIEST:
        return partition.start_offset
    end = partition.high_watermark
    if reset.startswith(BY_DURATION):
        since_ms = clock.wall_ms() - duration_ms(reset.removeprefix(BY_DURATION))
        found = partition.offset_at_timestamp(max(since_ms, 0), end)
        return end if found is None else found[0]
    return end
