"""The state of share groups on one broker: the topic, its view, the way to it, and what looks after them.

Owns the life of these parts. The topic is made when a share group is used for the first time; a broker that never has
any does nothing here but look whether it is there.

On a single node nothing that was appended is missing after a start, unless the machine was started anew meanwhile or
the log was cut (`BootMark`). In a cluster that can never be said: who leads now may not have had the end of the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.internal_topic import InternalTopic
from mansio.broker.internal_view import InternalPartition
from mansio.broker.share.persister import LocalDoor, Persister
from mansio.broker.share.places import index_of
from mansio.broker.share.state_store import StateStore, StoreSettings
from mansio.errors import CoordinatorNotAvailable, InvalidRequest, MansioError
from mansio.logs import fields
from mansio.state.share_records import TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.share.boot_mark import BootMark
    from mansio.broker.share.persister import StateDoor
    from mansio.broker.share.places import StatePlaces
    from mansio.cluster.model import BrokerState
    from mansio.errors import StorageError
    from mansio.ports import Clock, Scheduler, Timer
    from mansio.state.share_types import ShareKey

logger = logging.getLogger(__name__)

LETTERS_LOOK_MS: Final = 3_000
"""How often, in a cluster, dead letters on their way are looked for."""


class StatePartition(InternalPartition, Protocol):
    """A partition of the topic, with its role: `mansio.broker.partition.Partition` has it."""

    @property
    def index(self) -> int: ...

    @property
    def leads(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def leader_epoch(self) -> int: ...


class ShareState:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        settings: StoreSettings,
        prune_interval_ms: int,
        node_id: int,
        clock: Clock,
        scheduler: Scheduler,
        create_topic: Callable[[], Awaitable[Sequence[InternalPartition | StorageError]]],
        lock_ms: Callable[[str], int],
        mark: BootMark | None = None,
        places: StatePlaces | None = None,
        remote: Callable[[int], StateDoor] | None = None,
    ) -> None:
        """`lock_ms`: how long a lease of a group lasts. `mark` is given on a single node; `places` and `remote`, the
        doors of others, in a cluster."""
        self.places = places
        self._node_id = node_id
        self._scheduler = scheduler
        self._prune_interval_ms = prune_interval_ms
        self._create_topic = create_topic
        self._mark = mark
        self._cut: dict[int, None] = {}
        self._is_certain = False
        self._closed = False
        self._timers: list[Timer] = []
        self._tidying: Timer | None = None
        self._looking: Timer | None = None
        self.on_archiving: Callable[[Sequence[ShareKey]], None] = lambda _: None
        """In a cluster: told, now and then, whose dead letters are on their way, of states that are kept here."""
        self.store = StateStore(settings, clock, lock_ms=lock_ms, is_certain=self._certain)
        self.topic = InternalTopic(
            TOPIC,
            view=self.store,
            create=self._create,
            scheduler=scheduler,
            clock=clock,
            partition_count=None if places is None else places.partition_count,
            every_record=True,
        )
        self.store.topic = self.topic
        self.store.on_loaded = self._look_after
        self.door = LocalDoor(self.store)
        self.persister = Persister(
            self.door, node_id=node_id, scheduler=scheduler, clock=clock, places=places, remote=remote
        )

    # ------------------------------------------------------------------ life

    async def start(
        self, partitions: Sequence[InternalPartition | StorageError], cut: Sequence[int] = ()
    ) -> None:
        """On a single node: load what there is. `cut`: partitions whose logs lost their ends at this start."""
        self._cut = dict.fromkeys(cut)
        self._is_certain = bool(partitions) and self._mark is not None and self._mark.is_same()
        await self.topic.start(partitions)
        if partitions and self._mark is not None and not self._is_certain:
            # What may have been leased is withheld until then; a start before that has to withhold it anew.
            self._timers.append(self._scheduler.call_later(self.store.lock_ms_longest(), self._keep_mark))

    def role_changed(self, partition: StatePartition) -> None:
        """In a cluster: a partition of the topic leads here, in this leader epoch, or it does not. To be told after
        each change of its role, and before it is closed; telling it again changes nothing."""
        index, leader_epoch = partition.index, partition.leader_epoch
        if self._closed or not partition.leads or partition.closed:
            self.topic.resign(index)
        elif not self.topic.leads(index, partition, leader_epoch):
            self.topic.lead(index, partition, leader_epoch)

    async def close(self) -> None:
        """Nothing is looked after any more."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for looks in (self._tidying, self._looking):
            if looks is not None:
                looks.cancel()
        await self.topic.close()

    async def _create(self) -> Sequence[InternalPartition | StorageError]:
        if self._mark is not None:
            await self._mark.keep()  # there is nothing yet that could be missing
            self._is_certain = self._mark.is_same()
        return await self._create_topic()

    def _keep_mark(self) -> None:
        assert self._mark is not None
        self._scheduler.spawn(self._mark.keep(), name="boot mark")

    def _certain(self, index: int) -> bool:
        return self._is_certain and index not in self._cut

    # ------------------------------------------------------------------ where a state is

    async def place_of(self, text: str) -> BrokerState | None:
        """Who keeps the state of a share partition, named as `group:topic id:partition`; None: this node, the only one.

        Raises `InvalidRequest`, and `CoordinatorNotAvailable` when nobody does now. The first time it makes the topic.
        """
        group, _, _ = text.rpartition(":")[0].rpartition(":")
        if not group:
            raise InvalidRequest("a share partition is named group:topic id:partition")
        if self.places is None:
            return None
        await self.door.ready()
        broker = self.places.leader(index_of(text, self.places.partition_count()))
        if broker is None:
            raise CoordinatorNotAvailable(f"nobody leads the partition that the state of {group!r} lives in")
        return broker

    # ------------------------------------------------------------------ keeping the log short

    def _look_after(self) -> None:
        """There is something to keep short from now on."""
        if self._tidying is None:
            self._tidy_later()
        if self._looking is None and self.places is not None:
            self._look_for_letters()

    def _look_for_letters(self) -> None:
        if not self._closed:
            self.on_archiving(self.store.archiving())
            self._looking = self._scheduler.call_later(LETTERS_LOOK_MS, self._look_for_letters)

    def _tidy_later(self) -> None:
        if not self._closed:
            self._tidying = self._scheduler.call_later(self._prune_interval_ms, self._begin_tidying)

    def _begin_tidying(self) -> None:
        self._scheduler.spawn(self.tidy(), name="prune share states")

    async def tidy(self) -> None:
        """Give up what no state needs of every partition that is led here."""
        try:
            for index in self.topic.led():
                try:
                    await self.store.tidy(index)
                except MansioError as error:
                    known = fields(topic=TOPIC, partition=index, reason=error)
                    logger.warning("share states not pruned", extra=known)
        finally:
            self._tidy_later()
