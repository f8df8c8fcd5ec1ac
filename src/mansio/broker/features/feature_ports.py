"""What the features of a broker's partitions use of the outside world (`FeaturePorts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mansio.broker.log_view.replay import ViewReplay
from mansio.broker.log_view.view import LogView

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from mansio.broker.routing.caller import Caller
    from mansio.ports import Background, Clock, Disk, Scheduler
    from mansio.state.authorization.acls import Operation

V = TypeVar("V", bound=LogView[Any])


class Rights(Protocol):
    """The part of `Authorization` that services of features use."""

    def check_topic_id(
        self, caller: Caller, operation: Operation, topic_id: bytes, name_of: Callable[[bytes], str | None]
    ) -> None: ...
    def owner_of(self, caller: Caller, topic: str) -> str: ...


def _everyone_may(_owner: str, _topic: str) -> bool:
    return True


class FeaturePorts(NamedTuple):
    """What features use of the outside world. `background`: the thread that writes snapshots. `may_write`: whether the
    owner of something stored may write to a topic now (`owner_may_write`)."""

    disk: Disk
    background: Background
    scheduler: Scheduler
    clock: Clock
    may_write: Callable[[str, str], bool] = _everyone_may

    def replay(self, partition: Partition, view: V) -> ViewReplay[V]:
        """Keep a view of the log of a partition. Raises `StorageError` and fails the log, if it cannot be read."""
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
            raise log.fail(error, f"cannot read the {view.kind} of {log.directory}") from error
