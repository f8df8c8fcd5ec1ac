"""What the features of a broker's partitions use of the outside world (`FeaturePorts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.broker.log_view.replay import ViewReplay
from mansio.broker.log_view.view import LogView

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Background, Clock, Disk, Scheduler

V = TypeVar("V", bound=LogView[Any])


class FeaturePorts(NamedTuple):
    """What features use of the outside world. `background`: the thread that writes snapshots."""

    disk: Disk
    background: Background
    scheduler: Scheduler
    clock: Clock

    def replay(self, partition: Partition, view: V) -> ViewReplay[V] | None:
        """Keep a view of the log of a partition. Return None if it cannot be read; then the log has failed."""
        log = partition.log
        try:
            return ViewReplay(
                view,
                self.disk,
                self.background,
                self.scheduler,
                log,
                is_leader=lambda: partition.is_leader,
                on_damage=partition.report_damage,
            )
        except OSError as error:
            log.fail(error, f"cannot read the {view.kind} of {log.directory}")
            return None
