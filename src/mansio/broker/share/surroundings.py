"""What all of a broker's share partitions use, and who takes what they give up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition import Partition
    from mansio.broker.share.live_share import LiveShare
    from mansio.broker.share.ports import SharePersister
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.share_types import Archiving, Producer, ShareSettings


class DeadLetterDesk(Protocol):
    """Who takes what is to go to the dead-letter topic: `broker.share.dead_letters`."""

    def opened(self, live: LiveShare, producer: Producer | None) -> None:
        """A share partition is led here; what its machine says is on its way there is to be taken up again."""

    def add(self, live: LiveShare, letters: Sequence[Archiving]) -> None:
        """More of it, which is stored."""

    def dropped(self, live: LiveShare) -> None:
        """It is led here no more, or is read anew."""


class NoDeadLetters:
    """Takes nothing: what is ARCHIVING stays so, until a broker takes it up."""

    def opened(self, live: LiveShare, producer: Producer | None) -> None:
        """See `DeadLetterDesk`."""

    def add(self, live: LiveShare, letters: Sequence[Archiving]) -> None:
        """See `DeadLetterDesk`."""

    def dropped(self, live: LiveShare) -> None:
        """See `DeadLetterDesk`."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all of a broker's share partitions use. `on_end` is told of each that ended; `first_offset`: where a group
    begins that was never there."""

    persister: SharePersister
    clock: Clock
    scheduler: Scheduler
    random: Random
    settings: Callable[[str, Partition], ShareSettings]
    first_offset: Callable[[str, Partition], int]
    dead_letters: DeadLetterDesk
    on_end: Callable[[LiveShare], None]
