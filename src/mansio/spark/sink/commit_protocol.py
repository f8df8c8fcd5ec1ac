"""How a write of many tasks becomes one: what a task reports, and what the driver does with the reports.

The sink is at-least-once. A task's records are acknowledged by all brokers before it reports; within the task no retry
doubles a record, because the task is one idempotent producer (KIP-98). What can double is a whole task: Spark runs one
again when it failed or, after a crash, when the batch had not been noted as done, and each attempt is a producer of its
own. Readers that must not count twice go by a key, or by the offsets of the input.

Where this is decided: a task ends with a `TaskReport` that names its producer, and the driver hears of all reports of a
batch at once, in `SinkProtocol.commit`, again with the same batch id after a crash. With transactions, that call is the
place where the broker is told to make the batch visible, and `abort` where it is told to forget it.

Always true: pure values that pickle; nothing here talks to anybody.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

BATCH_WRITE = -1
"""The batch id of a write that is no stream."""


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Where records of one task lie in one partition. Others may have written in between: `rows` counts this task's.

    The offsets are -1 where the broker did not say, because it knew a batch of a retry already.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What one attempt of one task wrote, all of it acknowledged. `producer_id` is -1 where the producer was not
    idempotent, or had nothing to write."""

    producer_id: int
    producer_epoch: int
    ranges: tuple[WrittenRange, ...]

    @property
    def rows(self) -> int:
        return sum(written.rows for written in self.ranges)


NOTHING_WRITTEN = TaskReport(-1, -1, ())


class SinkProtocol:
    """The driver's side of one write."""

    def commit(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """All tasks of a batch have reported. May be called again with the same batch: tasks that Spark ran again after
        a crash have reported anew, and what the first ones wrote is there as well."""
        logger.debug(
            "sink batch written",
            extra=fields(
                query=query_id, batch=batch_id, tasks=len(reports), rows=sum(one.rows for one in reports)
            ),
        )

    def abort(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """The batch failed. What its tasks had written stays; a later attempt writes it again."""
        rows = sum(one.rows for one in reports)
        if rows:
            logger.warning(
                "sink batch failed after records were written",
                extra=fields(query=query_id, batch=batch_id, tasks=len(reports), rows=rows),
            )
