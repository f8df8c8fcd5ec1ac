"""Response fields that several group APIs share: errors, heartbeats, groups that cannot be described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.errors import MansioError
    from mansio.state.consumer_group.types import HeartbeatResponse
    from mansio.wire.topic_partition import TopicIdPartition

Fields = dict[str, Any]


def error_code(error: MansioError | None) -> int:
    """Return the Kafka error code of an error; 0 for None."""
    return 0 if error is None else error.kafka_code


async def described_groups(
    service: BrokerServices,
    group_ids: Iterable[str],
    describe: Callable[[str], Fields],
    *,
    has_operations: bool,
    caller: Caller,
) -> Fields:
    """Return the response with the description of each group, once even if its id is repeated; with `has_operations`
    also what the caller may do with each group that could be described (KIP-430)."""
    turns = ItemTurns(service.scheduler)
    groups = []
    for group_id in dict.fromkeys(group_ids):
        found = describe(group_id)
        if has_operations and not found.get("error_code"):
            found["authorized_operations"] = service.group_service.authorized_operations(
                group_id, caller=caller
            )
        groups.append(found)
        await turns.next(1 + len(found.get("members", ())))
    return {"groups": groups}


def heartbeat_fields(answer: HeartbeatResponse) -> Fields:
    """Return the fields of a heartbeat response: the epoch of the member, and its partitions if they have changed."""
    assignment = None
    if answer.assignment is not None:
        assignment = {"topic_partitions": group_by_topic_id(answer.assignment)}
    return {
        "member_id": answer.member_id,
        "member_epoch": answer.member_epoch,
        "heartbeat_interval_ms": answer.heartbeat_interval_ms,
        "assignment": assignment,
    }


def group_by_topic_id(partitions: Iterable[TopicIdPartition]) -> list[Fields]:
    """Group partitions by topic id, in the order of `partitions`."""
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in partitions:
        grouped.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in grouped.items()]


def group_error_fields(group_id: str, error: MansioError) -> Fields:
    """Return the fields that describe a group with an error."""
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
