"""The share partitions that this broker leads: found by group, topic and partition; made when somebody asks for one.

Owns the `LiveShare`s and the sessions of members. One is dropped when its partition is led elsewhere or closed, when
its state is made anew or deleted, when a write fails, and when nobody has used it for a while.

Always true: there is one live object of a share partition at most, and it is of the leader epoch in force when it is
found; there are at most `LIVE_MAX`; a member whose session is over has its leases released, as soon as no update of
them is under way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mansio.broker.share.live_share import LiveShare
from mansio.broker.share.surroundings import NoDeadLetters, Surroundings
from mansio.broker.share.together import together
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
from mansio.state.share_session import Sessions
from mansio.state.share_types import ShareKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mansio.broker.connection import Connection
    from mansio.broker.partition import Partition
    from mansio.broker.share.ports import SharePersister
    from mansio.broker.share.surroundings import DeadLetterDesk
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer
    from mansio.state.share_types import LoadedState, ShareSettings

logger = logging.getLogger(__name__)

N = TypeVar("N")

LIVE_MAX: Final = 100_000
RETRY_MS: Final = 100
"""How soon a state is read again that could not be read."""


class ParkedShareFetch(Protocol):
    """A fetch that waits for something to lease."""

    def wait_over(self) -> None:
        """Answer with what there is."""


FAILURES_MAX: Final = 10_000
IDLE_MS: Final = 10 * 60_000
SWEEP_INTERVAL_MS: Final = 60_000
LETTERS_MS_MAX: Final = 5_000
LETTERS_LOOK_MS: Final = 50
LETTERS_AGAIN_MS: Final = 1_000
"""How soon a share partition that failed is loaded again for its dead letters, if nobody else needs it."""


class SharePartitions:
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
        dead_letters: DeadLetterDesk | None = None,
    ) -> None:
        """`find` a partition on this broker, or raise; `settings` in force for a group in a partition; `first_offset`:
        where a group begins in one."""
        self.persister = persister
        self.sessions = Sessions(sessions_max)
        self.parked: dict[ParkedShareFetch, None] = {}
        self._find = find
        self._clock = clock
        self._scheduler = scheduler
        self._settings = settings
        self._around = Surroundings(
            persister,
            clock,
            scheduler,
            random,
            settings,
            first_offset,
            dead_letters or NoDeadLetters(),
            self._ended,
        )
        self._lives: dict[ShareKey, LiveShare] = {}
        self._of_group: dict[str, dict[ShareKey, LiveShare]] = {}
        self._of_partition: dict[tuple[bytes, int], dict[ShareKey, LiveShare]] = {}
        self._failures: dict[ShareKey, tuple[float, MansioError, LoadedState | None]] = {}
        self._owed: dict[ShareKey, Timer] = {}  # dead letters of what failed: when it is loaded again
        self._sweep: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._lives)

    def lives(self) -> list[LiveShare]:
        """All there are, in the order in which they were made."""
        return list(self._lives.values())

    # ------------------------------------------------------------------ finding one

    def find(self, group: str, topic_id: bytes, index: int) -> LiveShare:
        """The share partition, which may still be loading. Raises `UnknownTopicId`, `UnknownTopicOrPartition`,
        `NotLeaderOrFollower`, `InvalidTopic` (an internal one), and what its state could not be read for just now."""
        key = ShareKey(group, topic_id, index)
        live = self._lives.get(key)
        if live is not None:
            if not live.is_stale:
                return live
            live.end(
                NotLeaderOrFollower(f"{live.partition.name} is led by another broker, or in a later epoch")
            )
        partition = self._find(None, topic_id, index)
        if partition.internal:
            raise InvalidTopic(f"{partition.topic} is an internal topic; no group can share it")
        partition.check_leads()
        if partition.outdated:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name} by now")
        return self._begin(key, partition)

    def peek(self, key: ShareKey) -> LiveShare | None:
        """The share partition, if it is there and ready."""
        live = self._lives.get(key)
        return live if live is not None and live.is_ready and not live.is_stale else None

    def settings_of(self, group: str, partition: Partition) -> ShareSettings:
        """What is in force for a group in a partition."""
        return self._settings(group, partition)

    def _begin(self, key: ShareKey, partition: Partition) -> LiveShare:
        if self._closed:
            raise NotCoordinator("the broker is stopping")
        known: LoadedState | None = None
        if (failure := self._failures.get(key)) is not None:
            until_ms, error, known = failure
            if self._now_ms() < until_ms:
                raise type(error)(error.message)
            del self._failures[key]
        if len(self._lives) >= LIVE_MAX:
            raise CoordinatorNotAvailable(f"{LIVE_MAX} share partitions are in use here, and no more may be")
        live = LiveShare(key, partition, self._around, known)
        self._lives[key] = live
        self._of_group.setdefault(key.group, {})[key] = live
        self._of_partition.setdefault((key.topic_id, key.partition), {})[key] = live
        if self._sweep is None:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)
        self._scheduler.spawn(live.load(), name="load share partition")
        return live

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    # ------------------------------------------------------------------ the end of one

    def _ended(self, live: LiveShare) -> None:
        key = live.key
        if self._lives.get(key) is not live:
            return
        del self._lives[key]
        _take_out(self._of_group, key.group, key)
        _take_out(self._of_partition, (key.topic_id, key.partition), key)
        error = live.ended
        if error is not None and not isinstance(error, NotLeaderOrFollower) and not live.is_stale:
            known = fields(group=key.group, partition=live.partition.name, reason=error)
            logger.warning("share partition dropped", extra=known)
            if len(self._failures) >= FAILURES_MAX:
                del self._failures[next(iter(self._failures))]
            self._failures[key] = (self._now_ms() + RETRY_MS, error, live.memory)
            self._owe(live)
        else:
            self._owe_nothing(key)

    def _owe(self, live: LiveShare) -> None:
        """What of it is on its way to the dead-letter topic goes on, whether or not anybody uses the group. One that
        was never loaded owes what the one before it did."""
        key, owes = live.key, live.owes_letters
        owed_before = key in self._owed
        self._owe_nothing(key)
        if (owed_before if owes is None else owes) and not self._closed:
            self._take_up_later(key)

    def _owe_nothing(self, key: ShareKey) -> None:
        if (timer := self._owed.pop(key, None)) is not None:
            timer.cancel()

    def _take_up_later(self, key: ShareKey) -> None:
        self._owed[key] = self._scheduler.call_later(LETTERS_AGAIN_MS, self._take_up, key)

    def _take_up(self, key: ShareKey) -> None:
        if self._closed or key not in self._owed:
            return
        try:
            self.find(*key)
        except (NotLeaderOrFollower, UnknownTopicId, UnknownTopicOrPartition):
            del self._owed[key]  # whoever leads it takes them up
        except MansioError:
            self._take_up_later(key)

    def role_changed(self, partition: Partition) -> None:
        """In a cluster: the partition leads, follows or rests here from now on."""
        found = self._of_partition.get((partition.topic_id.bytes, partition.index), {})
        for live in list(found.values()):
            if live.is_stale:
                live.end(
                    NotLeaderOrFollower(f"{partition.name} is led by another broker, or in a later epoch")
                )

    def forget(self, key: ShareKey) -> None:
        """Its state was made anew, or is gone: what is known of it here is of no use."""
        self._failures.pop(key, None)
        live = self._lives.get(key)
        if live is not None:
            live.end(NotLeaderOrFollower(f"the state of {live.partition.name} was made anew"))

    async def delete(self, key: ShareKey) -> None:
        """Delete its state: the group, or the topic, is gone."""
        self.forget(key)
        await self.persister.delete(key)
        self.forget(key)

    async def letters_written(self, key: ShareKey) -> None:
        """Returns when none of its records is on its way to the dead-letter topic: whoever forgets its state would
        forget them, too. Raises `NonEmptyGroup` when some still are after a while."""
        until_ms = self._now_ms() + LETTERS_MS_MAX
        while (summary := await self.persister.summary(key)) is not None and summary.is_archiving:
            if self._now_ms() >= until_ms:
                raise NonEmptyGroup(f"group {key.group!r} has dead letters that are not written yet")
            over: Promise[None] = self._scheduler.promise()
            self._scheduler.call_later(LETTERS_LOOK_MS, over.set_result, None)
            await over

    def settings_changed(self, group: str) -> None:
        """The group's settings are others now: they hold for what is leased from now on."""
        for live in list(self._of_group.get(group, {}).values()):
            live.reconfigure()

    def _sweep_idle(self) -> None:
        self._sweep = None
        oldest_ms = self._now_ms() - IDLE_MS
        for live in self.lives():
            idle = live.last_used_ms < oldest_ms and live.is_ready and not live.is_awaited
            counts = live.core.counts(self._now_ms()) if idle else None
            if live.is_stale or (counts is not None and not counts.holders and not counts.archiving):
                live.end(NotLeaderOrFollower(f"nobody used the share partition of {live.partition.name}"))
        kept_ms = self._now_ms() - SWEEP_INTERVAL_MS
        self._failures = {key: each for key, each in self._failures.items() if each[0] > kept_ms}
        if self._lives and not self._closed:
            self._sweep = self._scheduler.call_later(SWEEP_INTERVAL_MS, self._sweep_idle)

    def close(self) -> None:
        """The broker stops: whoever waits looks for another one."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for live in self.lives():
            live.end(NotLeaderOrFollower("the broker is stopping"))

    # ------------------------------------------------------------------ members that are gone

    def connection_lost(self, connection: Connection) -> None:
        """Its sessions are over: what their members have leased is released. It counts as tried, for a record that
        kills whoever handles it ends a connection each time."""
        for session in self.sessions.lost(connection):
            group, member = session.group, session.member
            works = self._released(group, member, forgive=False)
            if works:
                self._scheduler.spawn(self._done(works, group, member), name="release leases")

    async def release(self, group: str, member: str) -> None:
        """Offer others what a member has leased on this broker; it is stored when this returns, or its leases end by
        themselves. What is in an update under way is left alone."""
        await self._done(self._released(group, member, forgive=True), group, member)

    def _released(self, group: str, member: str, *, forgive: bool) -> list[Coroutine[Any, Any, None]]:
        """The machines know it at once, so that no later request of the member is meant; this is to be stored."""
        lives = list(self._of_group.get(group, {}).values())
        works = [self._released_in(live, member, forgive=forgive) for live in lives]
        return [work for work in works if work is not None]

    def _released_in(
        self, live: LiveShare, member: str, *, forgive: bool
    ) -> Coroutine[Any, Any, None] | None:
        if not live.is_ready:
            return None
        try:
            update = live.ask(live.core.release_member, member, live.now_ms(), forgive=forgive)
        except MansioError:  # it is ended, and said why
            return None
        return None if update is None else live.perform(update)

    async def _done(self, works: list[Coroutine[Any, Any, None]], group: str, member: str) -> None:
        for error in await together(self._scheduler, works, name="release leases"):
            if error is not None:
                logger.warning("leases not released", extra=fields(group=group, member=member, reason=error))


def _take_out(index: dict[N, dict[ShareKey, LiveShare]], name: N, key: ShareKey) -> None:
    del index[name][key]
    if not index[name]:
        del index[name]
