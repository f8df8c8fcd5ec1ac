"""Tells, in the log, of partitions led here for which acks=all is refused because too few replicas are in sync; and
when that is over.

A leader that reaches etcd and its clients but no follower stays the leader: nobody else is known to have all that it
acknowledged. It refuses instead, as Kafka does, and an operator has to hear of it.

Always true: changes that come together are one line, however many partitions they are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Scheduler

logger = logging.getLogger(__name__)

GATHER_MS: Final = 500
NAMED_MAX: Final = 5


class UnderMinIsrLog:
    """See the module. All methods belong to the broker's loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[str, None] = {}
        """Partitions that were last told to be short of replicas."""
        self._looked_at: dict[str, Partition] = {}

    def look(self, partition: Partition) -> None:
        """Its role or its in-sync set may have changed. One whose roles are as they were costs a look."""
        if self._is_short(partition) == (partition.name in self._told) or partition.name in self._looked_at:
            return
        if not self._looked_at:
            self._scheduler.call_later(GATHER_MS, self._tell)
        self._looked_at[partition.name] = partition

    def _tell(self) -> None:
        looked_at, self._looked_at = self._looked_at, {}
        now_short = [
            name for name, one in looked_at.items() if self._is_short(one) and name not in self._told
        ]
        over = [name for name, one in looked_at.items() if not self._is_short(one) and name in self._told]
        for name in now_short:
            self._told[name] = None
        for name in over:
            del self._told[name]
        if now_short:
            logger.warning("partition_under_min_isr", extra=_places(now_short))
        if over:
            logger.info("partition_min_isr_restored", extra=_places(over))

    def _is_short(self, partition: Partition) -> bool:
        replica = partition.leader_progress
        return replica is not None and replica.is_under_min_isr and not partition.closed


def _places(names: Sequence[str]) -> dict[str, object]:
    return fields(partitions=len(names), first=",".join(names[:NAMED_MAX]))
