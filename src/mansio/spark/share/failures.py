"""Records of a batch that failed: they are released or rejected in the share group, and the others are accepted.

Invariants:
* An acknowledgement that was applied before has no effect, so that failures can be sent again after an interruption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConfigError
from mansio.net.range_leases import RangeAcknowledgement, acknowledge_ranges
from mansio.state.share_partition.types import REJECT, RELEASE
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame

    from mansio.spark.sync_client import SyncClient

FAILURES_MAX: Final = 100_000
"""Maximum number of failed records of one batch. More of them are the result of a wrong function, and would take the
driver's memory."""

RETRY: Final = "retry"
REJECTED: Final = "reject"

ANY_DELIVERY: Final = -1
"""The member of a batch has no other delivery of its records."""


class RecordFailure(NamedTuple):
    """A record that failed. `action`: `retry`, after `delay_ms` (-1: the backoff of the group), or `reject`; `reason`:
    that of the dead letter, if it becomes one."""

    topic: str
    partition: int
    offset: int
    action: str = RETRY
    delay_ms: int = -1
    reason: str = ""


def failures_of(frame: DataFrame) -> list[RecordFailure]:
    """Collect the failed rows of a DataFrame with the columns `topic`, `partition`, `offset` and `error` of
    `mansio.spark.work.apply`. Raises `ConfigError` without these columns, or for more than `FAILURES_MAX`."""
    missing = {"topic", "partition", "offset", "error"} - {*frame.columns}
    if missing:
        raise ConfigError(
            f"the failed rows have no column {', '.join(sorted(missing))}: keep those of the source, and the column"
            " error of mansio.spark.work.apply"
        )
    failed = frame.where("error IS NOT NULL").select(
        "topic", "partition", "offset", "error.action", "error.delay_ms", "error.kind", "error.message"
    )
    # Without an order Spark would evaluate the tasks of a limit a few at a time.
    rows = failed.orderBy("topic", "partition", "offset").limit(FAILURES_MAX + 1).collect()
    if len(rows) > FAILURES_MAX:
        raise ConfigError(
            f"more than {FAILURES_MAX} records of a batch failed: correct the function, or lower maxRecordsPerTrigger"
        )
    return [
        RecordFailure(
            row["topic"],
            row["partition"],
            row["offset"],
            row["action"],
            -1 if row["delay_ms"] is None else row["delay_ms"],
            f"{row['kind']}: {row['message']}" if row["message"] else row["kind"],
        )
        for row in rows
    ]


def send_failures(client: SyncClient, group: str, member: str, failures: Iterable[RecordFailure]) -> int:
    """Release or reject failed records of a member's batch; return how many were not, because their lease is lost or
    this was done before."""
    acks: dict[TopicPartition, list[RangeAcknowledgement]] = {}
    for each in sorted({*failures}):
        kind = REJECT if each.action == REJECTED else RELEASE
        ack = RangeAcknowledgement(each.offset, each.offset, ANY_DELIVERY, kind, each.delay_ms, each.reason)
        acks.setdefault(TopicPartition(each.topic, each.partition), []).append(ack)
    return client.run(acknowledge_ranges(client.cluster, group, member, acks))
