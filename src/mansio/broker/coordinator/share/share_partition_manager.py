"""The share partitions that this broker leads: found by group, topic and partition; made when somebody asks for one.

Owns the `SharePartitionLeader`s and the sessions of members. One is dropped when its partition is led elsewhere or
closed, when its state is made anew or deleted, when a write fails, and when nobody has used it for a while.

Always true: there is one live object of a share partition at most, and it is of the leader epoch in force when it is
found; there are at most `LIVE_MAX`; a member whose session is over has its leases released, as soon as no update of
them is under way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.share.partition_leader import (
    NoDeadLetters,
    ShareDependencies,
    SharePartitionLeader,
)
from mansio.config.share_group_config import (
    BY_DURATION,
    EARLIEST,
    OFFSET_RESET,
    duration_ms,
    in_force,
    share_settings,
)
from mansio.errors import (
    CoordinatorNotAvailable,
    InvalidTopic,
    MansioError,
    NonEmptyGroup,
    NotCoordinator,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.logs import fields
from mansio.state.share_group.share_sessions import Sessions
from mansio.state.share_partition.types import ShareKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from mansio.api.kafka.server.connection import Connection
    from mansio.broker.coordinator.share.partition_leader import DeadLetterSink
    from mansio.broker.coordinator.share.state_client import SharePersister
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer
    from mansio.state.share_partition.types import LoadedState, ShareSettings

    Overrides = Callable[[str], Mapping[str, str]]


logger = logging.getLogger(__name__)

N = TypeVar("N")

LIVE_MAX: Final = 100_000
RETRY_MS: Final = 100
"""How soon a state is read again that could not be read."""


class ParkedReceive(Protocol):
    """A request that waits for records to lease."""

    def finish(self) -> None:
        """Stop waiting and return what there is."""


FAILURES_MAX: Final = 10_000
IDLE_MS: Final = 10 * 60_000
SWEEP_INTERVAL_MS: Final = 60_000
DEAD_LETTER_WAIT_MS_MAX: Final = 5_000
DEAD_LETTER_CHECK_MS: Final = 50
DEAD_LETTER_RELOAD_MS: Final = 1_000
"""How soon a share partition that failed is loaded again for its dead letters, if nobody else needs it."""


class SharePartitionManager:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        find: Callable[[str | None, bytes | None, int], Partition],
        persister: SharePersister,
        settings: Callable[[str, Partition], ShareSettings],
        first_offset: Callable[[str, Partition], int],
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
        sessions_max: int,
        dead_letters: DeadLetterSink | None = None,
    ) -> None:
        """`find` a partition on this broker, or raise; `settings` in force for a group in a partition; `first_offset`:
        where a group begins in one."""
        self.persister = persister
        self.sessions = Sessions(sessions_max)
        self.parked: dict[ParkedReceive, None] = {}
        self._find = find
        self._clock = clock
        self._scheduler = scheduler
        self._settings = settings
        self._dependencies = ShareDependencies(
            persister,
            clock,
            scheduler,
            random,
            settings,
            first_offset,
            dead_letters or NoDeadLetters(),
            self._ended,
        )
        self._share_partitions: dict[ShareKey, SharePartitionLeader] = {}
        self._of_group: dict[str, dict[ShareKey, SharePartitionLeader]] = {}
        self._of_partition: dict[tuple[bytes, int], dict[ShareKey, SharePartitionLeader]] = {}
        self._failures: dict[ShareKey, tuple[float, MansioError, LoadedState | None]] = {}
        self._dead_letter_timers: dict[
            ShareKey, Timer
        ] = {}  # dead letters of what failed: when it is loaded again
        self._sweep: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._share_partitions)

    def share_partitions(self) -> list[SharePartitionLeader]:
        """All there are, in the order in which they were made."""
        return list(self._share_partitions.values())

    # ------------------------------------------------------------------ finding one

    def find(self, group: str, topic_id: bytes, index: int) -> SharePartitionLeader:
        """The share partition, which may still be loading. Raises `UnknownTopicId`, `UnknownTopicOrPartition`,
        `NotLeaderOrFollower`, `InvalidTopic` (an internal one), and what its state could not be read for just now."""
        key = ShareKey(group, topic_id, index)
        share_partition = self._share_partitions.get(key)
        if share_partition is not None:
            if not share_partition.is_stale:
                return share_partition
            share_partition.end(
                NotLeaderOrFollower(
                    f"{share_partition.partition.name} is led by another broker, or in a later epoch"
                )
            )
        partition = self._find(None, topic_id, index)
        if partition.internal:
            raise InvalidTopic(f"{partition.topic} is an internal topic; no group can share it")
        partition.ensure_leader()
        if partition.is_leadership_uncertain:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name} by now")
        return self._begin(key, partition)

    def peek(self, key: ShareKey) -> SharePartitionLeader | None:
        """The share partition, if it is there and ready."""
        share_partition = self._share_partitions.get(key)
        return (
            share_partition
            if share_partition is not None and share_partition.is_ready and not share_partition.is_stale
            else None
        )

    def settings_of(self, group: str, partition: Partition) -> ShareSettings:
        """What is in force for a group in a partition."""
        return self._settings(group, partition)

    def _begin(self, key: ShareKey, partition: Partition) -> SharePartitionLeader:
        if self._closed:
            raise NotCoordinator("the broker is stopping")
        known: LoadedState | None = None
        if (failure := self._failures.get(key)) is not None:
            until_ms, error, known = failure
            if self._now_ms() < until_ms:
                raise type(error)(error.message)
            del self._failures[key]
        if len(self._share_partitions) >= LIVE_MAX:
            raise CoordinatorNotAvailable(f"{LIVE_MAX} share partitions are in use here, and no more may be")
        share_partition = SharePartitionLeader(key, partition, self._dependencies, known)
        self._share_partitions[key] = share_partition
        self._of_group.setdefault(key.group, {})[key] = share_partition
        self._of_partition.setdefault((key.topic_id, key.partition), {})[key] = share_partition
        if self._sweep is None:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)
        self._scheduler.spawn(share_partition.load(), name="load share partition")
        return share_partition

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    # ------------------------------------------------------------------ the end of one

    def _ended(self, share_partition: SharePartitionLeader) -> None:
        key = share_partition.key
        if self._share_partitions.get(key) is not share_partition:
            return
        del self._share_partitions[key]
        _take_out(self._of_group, key.group, key)
        _take_out(self._of_partition, (key.topic_id, key.partition), key)
        error = share_partition.ended
        if error is not None and not isinstance(error, NotLeaderOrFollower) and not share_partition.is_stale:
            known = fields(group=key.group, partition=share_partition.partition.name, reason=error)
            logger.warning("share partition dropped", extra=known)
            if len(self._failures) >= FAILURES_MAX:
                del self._failures[next(iter(self._failures))]
            self._failures[key] = (self._now_ms() + RETRY_MS, error, share_partition.known_state)
            self._schedule_dead_letters(share_partition)
        else:
            self._cancel_dead_letters(key)

    def _schedule_dead_letters(self, share_partition: SharePartitionLeader) -> None:
        """What of it is on its way to the dead-letter topic goes on, whether or not anybody uses the group. One that
        was never loaded owes what the one before it did."""
        key, owes = share_partition.key, share_partition.has_pending_dead_letters
        owed_before = key in self._dead_letter_timers
        self._cancel_dead_letters(key)
        if (owed_before if owes is None else owes) and not self._closed:
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
            self.find(*key)
        except (NotLeaderOrFollower, UnknownTopicId, UnknownTopicOrPartition):
            del self._dead_letter_timers[key]  # whoever leads it takes them up
        except MansioError:
            self._schedule_reload(key)

    def role_changed(self, partition: Partition) -> None:
        """In a cluster: the partition leads, follows or rests here from now on."""
        found = self._of_partition.get((partition.topic_id.bytes, partition.index), {})
        for share_partition in list(found.values()):
            if share_partition.is_stale:
                share_partition.end(
                    NotLeaderOrFollower(f"{partition.name} is led by another broker, or in a later epoch")
                )

    def forget(self, key: ShareKey) -> None:
        """Its state was made anew, or is gone: what is known of it here is of no use."""
        self._failures.pop(key, None)
        share_partition = self._share_partitions.get(key)
        if share_partition is not None:
            share_partition.end(
                NotLeaderOrFollower(f"the state of {share_partition.partition.name} was made anew")
            )

    async def delete(self, key: ShareKey) -> None:
        """Delete its state: the group, or the topic, is gone."""
        self.forget(key)
        await self.persister.delete(key)
        self.forget(key)

    async def wait_for_dead_letters(self, key: ShareKey) -> None:
        """Returns when none of its records is on its way to the dead-letter topic: whoever forgets its state would
        forget them, too. Raises `NonEmptyGroup` when some still are after a while."""
        until_ms = self._now_ms() + DEAD_LETTER_WAIT_MS_MAX
        while (summary := await self.persister.summary(key)) is not None and summary.is_archiving:
            if self._now_ms() >= until_ms:
                raise NonEmptyGroup(f"group {key.group!r} has dead letters that are not written yet")
            over: Promise[None] = self._scheduler.promise()
            self._scheduler.call_later(DEAD_LETTER_CHECK_MS, over.set_result, None)
            await over

    def settings_changed(self, group: str) -> None:
        """The group's settings are others now: they hold for what is leased from now on."""
        for share_partition in list(self._of_group.get(group, {}).values()):
            share_partition.reconfigure()

    def _sweep_idle(self) -> None:
        self._sweep = None
        oldest_ms = self._now_ms() - IDLE_MS
        for share_partition in self.share_partitions():
            idle = (
                share_partition.last_used_ms < oldest_ms
                and share_partition.is_ready
                and not share_partition.is_awaited
            )
            counts = share_partition.state_machine.counts(self._now_ms()) if idle else None
            if share_partition.is_stale or (
                counts is not None and not counts.holders and not counts.archiving
            ):
                share_partition.end(
                    NotLeaderOrFollower(
                        f"nobody used the share partition of {share_partition.partition.name}"
                    )
                )
        kept_ms = self._now_ms() - SWEEP_INTERVAL_MS
        self._failures = {key: each for key, each in self._failures.items() if each[0] > kept_ms}
        if self._share_partitions and not self._closed:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)

    def close(self) -> None:
        """The broker stops: whoever waits looks for another one."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for share_partition in self.share_partitions():
            share_partition.end(NotLeaderOrFollower("the broker is stopping"))

    # ------------------------------------------------------------------ members that are gone

    def connection_lost(self, connection: Connection) -> None:
        """Its sessions are over: what their members have leased is released. It counts as tried, for a record that
        kills whoever handles it ends a connection each time."""
        for session in self.sessions.lost(connection):
            group, member = session.group, session.member
            works = self._released(group, member, uncounted=False)
            if works:
                self._scheduler.spawn(self._done(works, group, member), name="release leases")

    async def release(self, group: str, member: str) -> None:
        """Offer others what a member has leased on this broker; it is stored when this returns, or its leases end by
        themselves. What is in an update under way is left alone."""
        await self._done(self._released(group, member, uncounted=True), group, member)

    def _released(self, group: str, member: str, *, uncounted: bool) -> list[Coroutine[Any, Any, None]]:
        """The machines know it at once, so that no later request of the member is meant; this is to be stored."""
        share_partitions = list(self._of_group.get(group, {}).values())
        works = [
            self._released_in(share_partition, member, uncounted=uncounted)
            for share_partition in share_partitions
        ]
        return [work for work in works if work is not None]

    def _released_in(
        self, share_partition: SharePartitionLeader, member: str, *, uncounted: bool
    ) -> Coroutine[Any, Any, None] | None:
        if not share_partition.is_ready:
            return None
        try:
            update = share_partition.call_and_rearm(
                share_partition.state_machine.release_member,
                member,
                share_partition.now_ms(),
                uncounted=uncounted,
            )
        except MansioError:  # it is ended, and said why
            return None
        return None if update is None else share_partition.persist(update)

    async def _done(self, works: list[Coroutine[Any, Any, None]], group: str, member: str) -> None:
        for error in await gather_results(self._scheduler, works, name="release leases"):
            if error is not None:
                logger.warning("leases not released", extra=fields(group=group, member=member, reason=error))


def _take_out(index: dict[N, dict[ShareKey, SharePartitionLeader]], name: N, key: ShareKey) -> None:
    del index[name][key]
    if not index[name]:
        del index[name]


def share_partitions(
    settings: Settings,
    host_ports: HostPorts,
    partitions: PartitionSet,
    overrides: Overrides,
    persister: SharePersister,
    dead_letters: DeadLetterSink | None = None,
) -> SharePartitionManager:
    """Those of one broker. `overrides`: the settings a group has of its own."""

    def in_force_for(group: str, partition: Partition) -> ShareSettings:
        takes_dead_letters = partition.settings.takes_dead_letters
        return share_settings(overrides(group), takes_dead_letters=takes_dead_letters)

    return SharePartitionManager(
        find=partitions.find,
        persister=persister,
        settings=in_force_for,
        first_offset=lambda group, partition: first_offset(overrides(group), partition, host_ports.clock),
        clock=host_ports.clock,
        scheduler=host_ports.scheduler,
        random=host_ports.random,
        sessions_max=settings.group_share_max_share_sessions,
        dead_letters=dead_letters,
    )


def first_offset(configs: Mapping[str, str], partition: Partition, clock: Clock) -> int:
    """Where a group begins in a partition it never read (`share.auto.offset.reset`)."""
    reset: str = in_force(OFFSET_RESET, configs)
    if reset == EARLIEST:
        return partition.start_offset
    end = partition.high_watermark
    if reset.startswith(BY_DURATION):
        since_ms = clock.wall_ms() - duration_ms(reset.removeprefix(BY_DURATION))
        found = partition.offset_at_timestamp(max(since_ms, 0), end)
        return end if found is None else found[0]
    return end
