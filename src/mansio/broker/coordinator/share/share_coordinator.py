"""The state of share groups on one broker: the topic, its view, the way to it, and what looks after them.

Owns the life of these parts. The topic is made when a share group is used for the first time; a broker that never has
any does nothing here but look whether it is there.

On a single node nothing that was appended is missing after a start, unless the machine was started anew meanwhile or
the log was cut (`BootIdFile`). In a cluster that can never be said: who leads now may not have had the end of the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.broker.coordinator.share.state_client import LocalStateClient, RoutingPersister
from mansio.broker.coordinator.share.state_lookup import index_of
from mansio.broker.coordinator.share.state_store import ShareStateSettings, ShareStateStore
from mansio.broker.coordinator.view import CoordinatorPartition
from mansio.errors import CoordinatorNotAvailable, InvalidRequest, MansioError
from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields
from mansio.state.share_partition.state_records import TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.share.state_client import StateClient
    from mansio.broker.coordinator.share.state_lookup import StateLookup
    from mansio.errors import StorageError
    from mansio.metadata.model import BrokerState
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler, Timer
    from mansio.state.share_partition.types import ShareKey


logger = logging.getLogger(__name__)

DEAD_LETTER_CHECK_MS: Final = 3_000
"""How often, in a cluster, dead letters on their way are looked for."""


class StatePartition(CoordinatorPartition, Protocol):
    """A partition of the topic, with its role: `mansio.broker.partition.partition.Partition` has it."""

    @property
    def index(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def leader_epoch(self) -> int: ...


class ShareCoordinator:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        settings: ShareStateSettings,
        prune_interval_ms: int,
        node_id: int,
        clock: Clock,
        scheduler: Scheduler,
        create_topic: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        lock_ms: Callable[[str], int],
        boot_id_file: BootIdFile | None = None,
        places: StateLookup | None = None,
        remote: Callable[[int], StateClient] | None = None,
    ) -> None:
        """`lock_ms`: how long a lease of a group lasts. `boot_id_file` is given on a single node; `places` and
        `remote`, the doors of others, in a cluster."""
        self.places = places
        self._node_id = node_id
        self._scheduler = scheduler
        self._prune_interval_ms = prune_interval_ms
        self._create_topic = create_topic
        self._boot_id_file = boot_id_file
        self._truncated: dict[int, None] = {}
        self._is_log_complete = False
        self._closed = False
        self._timers: list[Timer] = []
        self._pruning: Timer | None = None
        self._dead_letter_timer: Timer | None = None
        self.on_archiving: Callable[[Sequence[ShareKey]], None] = lambda _: None
        """In a cluster: told, now and then, whose dead letters are on their way, of states that are kept here."""
        self.store = ShareStateStore(settings, clock, lock_ms=lock_ms, check_complete_log=self._is_complete)
        self.topic = CoordinatorRuntime(
            TOPIC,
            view=self.store,
            create=self._create,
            scheduler=scheduler,
            clock=clock,
            partition_count=None if places is None else places.partition_count,
            replays_every_record=True,
        )
        self.store.topic = self.topic
        self.store.on_loaded = self._start_timers
        self.client = LocalStateClient(self.store)
        self.persister = RoutingPersister(
            self.client, node_id=node_id, scheduler=scheduler, clock=clock, places=places, remote=remote
        )

    # ------------------------------------------------------------------ life

    async def start(
        self, partitions: Sequence[CoordinatorPartition | StorageError], truncated: Sequence[int] = ()
    ) -> None:
        """On a single node: load what there is. `truncated`: partitions whose logs lost their ends at this start."""
        self._truncated = dict.fromkeys(truncated)
        self._is_log_complete = (
            bool(partitions) and self._boot_id_file is not None and self._boot_id_file.is_current_boot()
        )
        await self.topic.start(partitions)
        if partitions and self._boot_id_file is not None and not self._is_log_complete:
            # What may have been leased is withheld until then; a start before that has to withhold it anew.
            self._timers.append(self._scheduler.call_later(self.store.lock_ms_max(), self._write_boot_id))

    def role_changed(self, partition: StatePartition) -> None:
        """In a cluster: a partition of the topic leads here, in this leader epoch, or it does not. To be told after
        each change of its role, and before it is closed; telling it again changes nothing."""
        index, leader_epoch = partition.index, partition.leader_epoch
        if self._closed or not partition.is_leader or partition.closed:
            self.topic.resign(index)
        elif not self.topic.is_leader(index, partition, leader_epoch):
            self.topic.lead(index, partition, leader_epoch)

    async def close(self) -> None:
        """Nothing is looked after any more."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for looks in (self._pruning, self._dead_letter_timer):
            if looks is not None:
                looks.cancel()
        await self.topic.close()

    async def _create(self) -> Sequence[CoordinatorPartition | StorageError]:
        if self._boot_id_file is not None:
            await self._boot_id_file.write()  # there is nothing yet that could be missing
            self._is_log_complete = self._boot_id_file.is_current_boot()
        return await self._create_topic()

    def _write_boot_id(self) -> None:
        assert self._boot_id_file is not None
        self._scheduler.spawn(self._boot_id_file.write(), name="boot mark")

    def _is_complete(self, index: int) -> bool:
        return self._is_log_complete and index not in self._truncated

    # ------------------------------------------------------------------ where a state is

    async def find_state_leader(self, text: str) -> BrokerState | None:
        """Who keeps the state of a share partition, named as `group:topic id:partition`; None: this node, the only one.

        Raises `InvalidRequest`, and `CoordinatorNotAvailable` when nobody does now. The first time it makes the topic.
        """
        group, _, _ = text.rpartition(":")[0].rpartition(":")
        if not group:
            raise InvalidRequest("a share partition is named group:topic id:partition")
        if self.places is None:
            return None
        await self.client.ready()
        broker = self.places.leader(index_of(text, self.places.partition_count()))
        if broker is None:
            raise CoordinatorNotAvailable(f"nobody leads the partition that the state of {group!r} lives in")
        return broker

    # ------------------------------------------------------------------ keeping the log short

    def _start_timers(self) -> None:
        """There is something to keep short from now on."""
        if self._pruning is None:
            self._schedule_pruning()
        if self._dead_letter_timer is None and self.places is not None:
            self._check_dead_letters()

    def _check_dead_letters(self) -> None:
        if not self._closed:
            self.on_archiving(self.store.archiving())
            self._dead_letter_timer = self._scheduler.call_later(
                DEAD_LETTER_CHECK_MS, self._check_dead_letters
            )

    def _schedule_pruning(self) -> None:
        if not self._closed:
            self._pruning = self._scheduler.call_later(self._prune_interval_ms, self._start_pruning)

    def _start_pruning(self) -> None:
        self._scheduler.spawn(self.prune(), name="prune share states")

    async def prune(self) -> None:
        """Give up what no state needs of every partition that is led here."""
        try:
            for index in self.topic.led():
                try:
                    await self.store.prune(index)
                except MansioError as error:
                    known = fields(topic=TOPIC, partition=index, reason=error)
                    logger.warning("share states not pruned", extra=known)
        finally:
            self._schedule_pruning()


BOOT_ID_FILE: Final = "boot"


class BootIdFile:
    """See the module. `boot_id`: of the machine's start now, "" where nobody knows."""

    def __init__(
        self, disk: Disk, background: Background, scheduler: Scheduler, directory: str, boot_id: str
    ) -> None:
        self._disk = disk
        self._background = background
        self._scheduler = scheduler
        self._directory = directory
        self._boot_id = boot_id

    @property
    def _path(self) -> str:
        return f"{self._directory}/{BOOT_ID_FILE}"

    def is_current_boot(self) -> bool:
        """Is the machine the same, not started since the mark was kept?"""
        if not self._boot_id or not self._disk.exists(self._path):
            return False
        return self._disk.read_file(self._path) == self._boot_id.encode()

    async def write(self) -> None:
        """From now on this start is the one. An error of the disk is told, and costs a later start some time only."""
        if not self._boot_id or self.is_current_boot():
            return
        done: Promise[BaseException | None] = self._scheduler.promise()
        self._background.submit(self._write, lambda _, error: None if done.done() else done.set_result(error))
        error = await done
        if error is not None:
            logger.warning("boot mark not written", extra=fields(path=self._path, reason=error))

    def _write(self) -> None:
        write_file_atomically(self._disk, self._path, self._boot_id.encode())
