"""What all of a broker's share partitions use, and who takes what they give up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.coordinator.share.share_persister import SharePersister
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.share_partition.types import ArchivingRange, Producer, ShareSettings


class DeadLetterSink(Protocol):
    """Who takes what is to go to the dead-letter topic: `broker.coordinator.share.dead_letter_manager`."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """A share partition is led here; what its machine says is on its way there is to be taken up again."""

    def add(self, share_partition: SharePartitionLeader, letters: Sequence[ArchivingRange]) -> None:
        """More of it, which is stored."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """It is led here no more, or is read anew."""


class NoDeadLetters:
    """Takes nothing: what is ARCHIVING stays so, until a broker takes it up."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """See `DeadLetterSink`."""

    def add(self, share_partition: SharePartitionLeader, letters: Sequence[ArchivingRange]) -> None:
        """See `DeadLetterSink`."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """See `DeadLetterSink`."""


@dataclass(frozen=True, slots=True)
class ShareDependencies:
    """What all of a broker's share partitions use. `on_end` is told of each that ended; `first_offset`: where a group
    begins that was never there."""

    persister: SharePersister
    clock: Clock
    scheduler: Scheduler
    random: Random
    settings: Callable[[str, Partition], ShareSettings]
    first_offset: Callable[[str, Partition], int]
    dead_letters: DeadLetterSink
    on_end: Callable[[SharePartitionLeader], None]
