"""A partition with a deduplication window on a simulated disk, as leader or follower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.partition.deduplication_view import DeduplicationView
from mansio.broker.partition.deduplicator import Deduplicator
from support.simulated_partition import DIRECTORY, RULES, SimulatedPartition

if TYPE_CHECKING:
    from mansio.testing.disk import SimulatedDisk

__all__ = ["DIRECTORY", "WINDOW_MS", "DeduplicatedPartition"]

WINDOW_MS = 2_000


class DeduplicatedPartition(SimulatedPartition):
    """A partition with a deduplication window on a simulated disk."""

    def __init__(self, disk: SimulatedDisk, seconds: float, *, is_follower: bool = False) -> None:
        super().__init__(
            disk,
            seconds,
            rules=RULES._replace(deduplicates=True),
            is_follower=is_follower,
            mansio_dedup_ms=str(WINDOW_MS),
        )
        self.producers.has_shorter_batches = True
        self.view = DeduplicationView(
            disk,
            self.background,
            self.scheduler,  # type: ignore[arg-type]
            self.clock,
            self.log,
            window_ms=lambda: WINDOW_MS,
            is_leader=lambda: self.partition.is_leader,
        )
        self.partition.add_hook(self.view)
        self.manager = Deduplicator(self.partition, self.view)
        self.partition.check_ids = self.manager.check
        self.partition.first_offset_of_repeat = self.manager.with_first_offset
        self.scheduler.run()
        assert self.view.is_complete
