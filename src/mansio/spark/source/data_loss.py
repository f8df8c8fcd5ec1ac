"""Errors for records that no longer exist. Each message is one line and contains the remedy.

With `failOnDataLoss` such an error ends the query; otherwise it is logged as a warning and reading continues.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import DataLoss, TopicRecreated
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

CONTINUE_HINT = "or set failOnDataLoss to false to continue without them"


def raise_or_log(loss: DataLoss, *, fail: bool) -> None:
    """Raise the error if `fail` is true; otherwise log it as a warning."""
    if fail:
        raise copied(loss)
    logger.warning("records are missing, and the query continues (failOnDataLoss is false): %s", loss.message)


def offset_deleted_error(partition: TopicPartition, wanted: int, earliest: int) -> DataLoss:
    """Return the error for an offset below the log start offset: retention or DeleteRecords has deleted it."""
    loss = DataLoss(
        f"offset {wanted} of partition {partition.partition} of topic {partition.topic} was deleted: the log begins at"
        f" {earliest}. Begin later (startingOffsets, or a new checkpoint), keep records longer, {CONTINUE_HINT}"
    )
    loss.next_offset = earliest
    return loss


def log_truncated_error(partition: TopicPartition, wanted: int, latest: int) -> DataLoss:
    """Return the error for an offset above the end that can be read: the log was truncated, the topic was recreated, or
    a transaction is open before the offset.
    """
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} ends at offset {latest}, but offset {wanted} was"
        f" requested: the log is shorter than it was, the topic was recreated, or a transaction is open before the"
        f" offset (isolation.level read_committed). Correct the offsets, use a new checkpoint, {CONTINUE_HINT}"
    )


def first_records_deleted_error(partition: TopicPartition, earliest: int) -> DataLoss:
    """Return the error for a partition that was added while the query ran and has already deleted its first records."""
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} is new to this query and already begins at offset"
        f" {earliest}: its first records were deleted. Keep records longer than a trigger takes, {CONTINUE_HINT}"
    )


def partition_missing_error(partition: TopicPartition) -> DataLoss:
    """Return the error for a partition that no longer exists. A topic never loses partitions, so the topic was deleted,
    recreated with fewer partitions, or is no longer subscribed to.
    """
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} does not exist any more: the topic was"
        f" deleted, or is not subscribed to any more. Create it again, correct the options, use a new checkpoint,"
        f" {CONTINUE_HINT}"
    )


def topic_recreated_error(topic: str) -> TopicRecreated:
    """Return the error for a topic with the same name and another topic id."""
    return TopicRecreated(
        f"topic {topic} was deleted and recreated since this query began to read it: its offsets mean other records"
        f" now. Use a new checkpoint, {CONTINUE_HINT}"
    )
