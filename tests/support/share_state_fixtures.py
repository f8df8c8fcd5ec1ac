"""The state of share groups on one broker, on virtual time: shipped logs, partitions and view over a simulated disk.

`kill` ends the process and leaves what it wrote, `lose_power` what a disk may keep of it; both give the next life.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.share.share_coordinator import BootIdFile, ShareCoordinator
from mansio.broker.coordinator.share.state_store import ShareStateSettings
from mansio.broker.partition.append_validation import AppendRules
from mansio.state.share_partition.types import ACQUIRED, ShareKey, StateBatch, Update
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.testing.scheduler import SimulatedBackground, SimulatedClock, Simulation
from mansio.wire.batch.record_batch import TimestampType
from support.partition_bench import PartitionBench

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mansio.broker.partition.partition import Partition

RULES = AppendRules(1 << 20, TimestampType.CREATE, 1 << 62, 1 << 62)
LOCK_MS = 30_000
PARTITIONS = 2
TOPIC = bytes(range(16))


def key_of(group: str = "g", partition: int = 0) -> ShareKey:
    return ShareKey(group, TOPIC, partition)


def leased(first: int, last: int, *, durable: bool = False, deliveries: int = 1, start: int = 0) -> Update:
    change = StateBatch(first, last, ACQUIRED, deliveries, holder="m")
    return Update(0, durable, start, 100, 0, (change,))


def begun(start: int = 0, lease_bound: int = 100) -> Update:
    return Update(
        0, durable=True, start_offset=start, lease_bound=lease_bound, done_count=0, is_snapshot=True
    )


class StateRoom:
    """One life of one broker; `boot` names the start of its machine."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        boot: str = "first",
        segment_bytes: int = 1 << 20,
        updates_per_snapshot: int = 500,
        share_partitions_max: int = 1000,
        began_ms: float = 0.0,
    ) -> None:
        self.simulation = Simulation()
        self.simulation.now_ms = began_ms
        self.scheduler = self.simulation.scheduler("broker")
        self.clock = SimulatedClock(self.simulation)
        self.disk = disk or SimulatedDisk()
        self.boot = boot
        self.options: dict[str, Any] = {
            "segment_bytes": segment_bytes,
            "updates_per_snapshot": updates_per_snapshot,
            "share_partitions_max": share_partitions_max,
        }
        self.lock_ms = LOCK_MS
        self.bench = PartitionBench(
            self.disk,
            directory="data/s",
            settings=(),
            leader_epoch=0,
            log_settings=LogSettings(segment_bytes=segment_bytes),
            rules=RULES,
            topic="__share_group_state",
            internal=True,
            clock=self.clock,
            scheduler=self.scheduler,
            background=SimulatedBackground(self.scheduler, lambda: 1.0),
        )
        self.partitions, self.background = self.bench.partitions, self.bench.background
        self.disk.make_directory("data")
        self.state = ShareCoordinator(
            settings=ShareStateSettings(
                updates_per_snapshot=updates_per_snapshot, share_partitions_max=share_partitions_max
            ),
            prune_interval_ms=1 << 40,
            node_id=1,
            clock=self.clock,
            scheduler=self.scheduler,
            create_topic=self._create,
            lock_ms=lambda _: self.lock_ms,
            boot_id_file=BootIdFile(self.disk, self.background, self.scheduler, "data", boot),
        )
        self.store, self.persister = self.state.store, self.state.persister
        if self.disk.exists("data/s-0"):
            self._open()
        truncated = [partition.index for partition in self.partitions if partition.log.needs_new_epoch]
        self.run(self.state.start(self.partitions, truncated))

    async def _create(self) -> list[Partition]:
        self._open()
        return self.partitions

    def _open(self) -> None:
        for _ in range(PARTITIONS):
            self.bench.open_partition()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.simulation.run(work)

    def partition_of(self, key: ShareKey) -> Partition:
        return self.partitions[self.store.partition_for(key)]

    def begin(self, key: ShareKey, leader_epoch: int = 0, update: Update | None = None) -> None:
        """Read a state that is not there, and make it."""
        assert self.run(self.persister.read(key, leader_epoch)) is None
        self.run(self.persister.write(key, 0, leader_epoch, update or begun()))

    def write(self, key: ShareKey, update: Update, *, state_epoch: int = 0, leader_epoch: int = 0) -> None:
        self.run(self.persister.write(key, state_epoch, leader_epoch, update))

    def read(self, key: ShareKey, leader_epoch: int = 0) -> Any:
        return self.run(self.persister.read(key, leader_epoch))

    # The next life

    def kill(self, *, boot: str | None = None, **options: Any) -> StateRoom:
        self.scheduler.stop()
        return StateRoom(
            self.disk, boot=boot or self.boot, began_ms=self.simulation.now_ms, **(self.options | options)
        )

    def lose_power(self, rng: Random | None = None, *, boot: str = "second", **options: Any) -> StateRoom:
        self.scheduler.stop()
        disk = self.disk.crash(rng or Random(1))
        return StateRoom(disk, boot=boot, began_ms=self.simulation.now_ms, **(self.options | options))
