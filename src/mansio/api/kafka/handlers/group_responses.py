"""What the answers to groups of both new kinds (KIP-848, KIP-932) have in common: a heartbeat's, and that of a group
that cannot be described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.errors import MansioError
    from mansio.state.consumer_group.types import HeartbeatResponse, TopicPartition

Fields = dict[str, Any]


def heartbeat_fields(answer: HeartbeatResponse) -> Fields:
    """A member's epoch, and its partitions when they are others."""
    assignment = None
    if answer.assignment is not None:
        assignment = {"topic_partitions": by_topic(answer.assignment)}
    return {
        "member_id": answer.member_id,
        "member_epoch": answer.member_epoch,
        "heartbeat_interval_ms": answer.heartbeat_interval_ms,
        "assignment": assignment,
    }


def by_topic(partitions: Iterable[TopicPartition]) -> list[Fields]:
    """The partitions, grouped by the id of their topic, in the order given."""
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in partitions:
        grouped.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in grouped.items()]


def describe_error(group_id: str, error: MansioError) -> Fields:
    """In the place of a group's description: why there is none."""
    return {
        "group_id": group_id,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "error_code": error.kafka_code,
        "error_message": error.message,
    }
