"""Share coordinator of one broker (Kafka's ShareCoordinator): the topic `__share_group_state`, its view and its client.

The topic is created when a share group is used for the first time.

On a single node the log of the topic is complete after a start, unless the machine was rebooted meanwhile
(`BootIdFile`) or the log was truncated. In a cluster a log never counts as complete: the current leader may lack
records that a former leader appended.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.broker.coordinator.share.state_client import LocalStateClient, RoutingPersister
from mansio.broker.coordinator.share.state_store import ShareStateSettings, ShareStateStore
from mansio.broker.routing.routes import coordinator_of
from mansio.errors import InvalidRequest, MansioError
from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields
from mansio.ports import complete
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.share.state_client import StateClient
    from mansio.broker.coordinator.view import CoordinatorPartition, CoordinatorReplica
    from mansio.broker.routing.routes import InternalTopicLeaders
    from mansio.errors import StorageError
    from mansio.metadata.model import BrokerState
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler, Timer
    from mansio.state.share_partition.types import ShareKey


logger = logging.getLogger(__name__)

DEAD_LETTER_CHECK_MS: Final = 3_000
"""Interval in which a broker of a cluster searches the states it keeps for waiting dead letters."""


class ShareCoordinator:
    """The share coordinator of one broker. All methods run on the broker's event loop."""

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
        lookup: InternalTopicLeaders | None = None,
        remote_client: Callable[[int], StateClient] | None = None,
        on_archiving: Callable[[Sequence[ShareKey]], None] = lambda _: None,
    ) -> None:
        """`lock_ms`: returns the lease duration of a group. `boot_id_file` is None in a cluster. `lookup` and
        `remote_client`, which returns the state client of another broker, are None on a single node. `on_archiving` is
        called periodically in a cluster with the share partitions whose state this broker keeps and which have waiting
        dead letters."""
        self.lookup = lookup
        self._node_id = node_id
        self._scheduler = scheduler
        self._prune_interval_ms = prune_interval_ms
        self._create_topic = create_topic
        self._boot_id_file = boot_id_file
        self._truncated_partitions: dict[int, None] = {}
        self._is_log_complete = False
        self._closed = False
        self._timers: list[Timer] = []
        self._pruning: Timer | None = None
        self._dead_letter_timer: Timer | None = None
        self._on_archiving = on_archiving
        self.store = ShareStateStore(
            settings,
            clock,
            lock_ms=lock_ms,
            is_log_complete=self._is_complete,
            on_loaded=self._start_timers,
            open_runtime=lambda view: CoordinatorRuntime(
                SHARE_STATE_TOPIC,
                view=view,
                create=self._create,
                scheduler=scheduler,
                clock=clock,
                partition_count=None if lookup is None else lookup.partition_count,
                replays_every_record=True,
            ),
        )
        self.topic = self.store.topic
        self.client = LocalStateClient(self.store)
        self.persister = RoutingPersister(
            self.client,
            node_id=node_id,
            scheduler=scheduler,
            clock=clock,
            lookup=lookup,
            remote_client=remote_client,
        )

    # ------------------------------------------------------------------ start and close

    async def start(
        self, partitions: Sequence[CoordinatorPartition | StorageError], truncated: Sequence[int] = ()
    ) -> None:
        """Load all partitions of the topic, on a single node.

        `truncated`: the numbers of partitions whose logs were truncated at this start."""
        self._truncated_partitions = dict.fromkeys(truncated)
        self._is_log_complete = (
            bool(partitions) and self._boot_id_file is not None and self._boot_id_file.is_current_boot()
        )
        await self.topic.start(partitions)
        if partitions and self._boot_id_file is not None and not self._is_log_complete:
            # Possibly leased records are withheld for the longest lease duration. After a restart before its end they
            # have to be withheld again.
            self._timers.append(self._scheduler.call_later(self.store.lock_ms_max(), self._write_boot_id))

    def handle_role_change(self, partition: CoordinatorReplica) -> None:
        """Apply this broker's role for a partition of the topic, in a cluster. Called after each change of the role and
        before the partition is closed; idempotent."""
        self.topic.apply_role(partition, is_closed=self._closed)

    async def close(self) -> None:
        """Cancel all timers and close the topic."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for looks in (self._pruning, self._dead_letter_timer):
            if looks is not None:
                looks.cancel()
        await self.topic.close()

    async def _create(self) -> Sequence[CoordinatorPartition | StorageError]:
        if self._boot_id_file is not None:
            await self._boot_id_file.write()  # the topic is empty: nothing can be missing
            self._is_log_complete = self._boot_id_file.is_current_boot()
        return await self._create_topic()

    def _write_boot_id(self) -> None:
        assert self._boot_id_file is not None
        self._scheduler.spawn(self._boot_id_file.write(), name="write boot id")

    def _is_complete(self, index: int) -> bool:
        return self._is_log_complete and index not in self._truncated_partitions

    # ------------------------------------------------------------------ lookup

    async def find_state_leader(self, key_text: str) -> BrokerState | None:
        """Return the broker that keeps the state of a share partition; None if it is this broker.

        `key_text`: `group:topic id:partition`, as returned by `share_partition_key`. Creates the topic if it does not
        exist. Raises `InvalidRequest`, `CoordinatorNotAvailable`.
        """
        group, _, _ = key_text.rpartition(":")[0].rpartition(":")
        if not group:
            raise InvalidRequest("the key of a share partition has the form group:topic id:partition")
        if self.lookup is None:
            return None
        await self.client.ensure_topic_exists()
        broker = coordinator_of(key_text, self.lookup)
        return None if broker.node_id == self._node_id else broker

    # ------------------------------------------------------------------ maintenance

    def _start_timers(self) -> None:
        """Start the timers, unless they are started already; called when a partition was loaded."""
        if self._pruning is None:
            self._schedule_pruning()
        if self._dead_letter_timer is None and self.lookup is not None:
            self._check_dead_letters()

    def _check_dead_letters(self) -> None:
        if not self._closed:
            self._on_archiving(self.store.archiving_share_partitions())
            self._dead_letter_timer = self._scheduler.call_later(
                DEAD_LETTER_CHECK_MS, self._check_dead_letters
            )

    def _schedule_pruning(self) -> None:
        if not self._closed:
            self._pruning = self._scheduler.call_later(self._prune_interval_ms, self._start_pruning)

    def _start_pruning(self) -> None:
        self._scheduler.spawn(self.prune(), name="prune share states")

    async def prune(self) -> None:
        """Delete the records that no state needs from all partitions of the topic that this broker leads."""
        try:
            for index in self.topic.loaded_partitions():
                try:
                    await self.store.prune(index)
                except MansioError as error:
                    known = fields(topic=SHARE_STATE_TOPIC, partition=index, reason=error)
                    logger.warning("share_states_not_pruned", extra=known)
        finally:
            self._schedule_pruning()


BOOT_ID_FILE_NAME: Final = "boot"


class BootIdFile:
    """File with the kernel's boot id, by which the broker detects a reboot and thus a loss of the page cache.

    Bytes that were appended and not flushed survive the end of the process, but not a reboot. If the file contains the
    current boot id, no log of the data directory lacks an appended record. Invariant: after a reboot the file keeps the
    older boot id until `write` is called, so that a restart before that is recognized as following a reboot, too.

    `boot_id`: the id of the current boot, "" if it is unknown.
    """

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
        return f"{self._directory}/{BOOT_ID_FILE_NAME}"

    def is_current_boot(self) -> bool:
        """Return whether the file contains the current boot id: the machine was not rebooted since it was written."""
        if not self._boot_id or not self._disk.exists(self._path):
            return False
        return self._disk.read_file(self._path) == self._boot_id.encode()

    async def write(self) -> None:
        """Store the current boot id. A disk error is logged; records may then be withheld after the next start."""
        if not self._boot_id or self.is_current_boot():
            return
        done: Promise[BaseException | None] = self._scheduler.promise()
        self._background.submit(self._write, lambda _, error: complete(done, error))
        error = await done
        if error is not None:
            logger.warning("boot_id_not_written", extra=fields(path=self._path, reason=error))

    def _write(self) -> None:
        write_file_atomically(self._disk, self._path, self._boot_id.encode())
