"""Errors for records that no longer exist, each one line with the remedy.

With `failOnDataLoss` a loss ends the query; without it the loss is logged as a warning and reading continues.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import DataLoss, TopicRecreated

if TYPE_CHECKING:
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

CONTINUE_HINT = "or set failOnDataLoss to false to continue without them"


def report(loss: DataLoss, *, fail: bool) -> None:
    """Raise the loss (`fail`), or log it as a warning."""
    if fail:
        raise loss
    logger.warning("records are missing, and the query continues (failOnDataLoss is false): %s", loss.message)


def log_start_passed(partition: TopicPartition, wanted: int, earliest: int) -> DataLoss:
    """The log start offset is above the requested offset: retention or DeleteRecords."""
    loss = DataLoss(
        f"offset {wanted} of partition {partition.partition} of topic {partition.topic} was deleted: the log begins at"
        f" {earliest}. Begin later (startingOffsets, or a new checkpoint), keep records longer, {CONTINUE_HINT}"
    )
    loss.next_offset = earliest
    return loss


def log_truncated(partition: TopicPartition, wanted: int, latest: int) -> DataLoss:
    """The log ends before the requested offset: it was truncated, or it is another log of the same name."""
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} ends at offset {latest}, but offset {wanted} was"
        f" requested: the log is shorter than it was, or the topic was recreated. Correct the offsets, use a new"
        f" checkpoint, {CONTINUE_HINT}"
    )


def partition_added_late(partition: TopicPartition, earliest: int) -> DataLoss:
    """A partition that was added while the query ran has already deleted its first records."""
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} is new to this query and already begins at offset"
        f" {earliest}: its first records were deleted. Keep records longer than a trigger takes, {CONTINUE_HINT}"
    )


def partition_missing(partition: TopicPartition) -> DataLoss:
    """A partition no longer exists. Kafka topics never lose partitions: the topic was deleted, recreated or
    unsubscribed.
    """
    return DataLoss(
        f"partition {partition.partition} of topic {partition.topic} does not exist any more: the topic was"
        f" deleted, or is not subscribed to any more. Create it again, correct the options, use a new checkpoint,"
        f" {CONTINUE_HINT}"
    )


def topic_recreated(topic: str) -> TopicRecreated:
    """The topic name is the same, the topic id is not."""
    return TopicRecreated(
        f"topic {topic} was deleted and recreated since this query began to read it: its offsets mean other records"
        f" now. Use a new checkpoint, {CONTINUE_HINT}"
    )
