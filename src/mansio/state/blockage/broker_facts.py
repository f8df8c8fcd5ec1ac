"""What one broker knows about a group, and what the coordinator of the group asks it for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.blockage.facts import (
        LogFacts,
        Place,
        RefusalFacts,
        ShareFacts,
        ThrottleFacts,
        TransactionFacts,
    )


class AskedPartition(NamedTuple):
    """A partition about which a coordinator asks. `position`: committed offset of the group, `UNKNOWN` without one."""

    place: Place
    position: int


class PartitionReport(NamedTuple):
    """What the leader of a partition knows. `error`: why it knows nothing, "" if it does."""

    place: Place
    log: LogFacts | None = None
    share: ShareFacts | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What one broker knows about a group."""

    partitions: Sequence[PartitionReport] = ()
    transactions: Sequence[TransactionFacts] = ()
    throttles: Sequence[ThrottleFacts] = ()
    refusals: Sequence[RefusalFacts] = ()
