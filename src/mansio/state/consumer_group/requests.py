"""What a request of a member says, and whether it may: the checks of a consumer group that change nothing.

Source: KIP-848; the order and the errors are those of Apache Kafka's GroupMetadataManager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import (
    FencedInstanceId,
    FencedMemberEpoch,
    IllegalGeneration,
    InvalidRequest,
    StaleMemberEpoch,
    UnreleasedInstanceId,
)
from mansio.state.consumer_group.records import MemberMetadata

if TYPE_CHECKING:
    from mansio.state.consumer_group.member import ConsumerMember
    from mansio.state.consumer_group.stored_state import StoredGroup
    from mansio.state.consumer_group.types import Heartbeat

EMPTY_METADATA: Final = MemberMetadata(None, None, "", "", (), None, -1, None)
"""Of a member that has said nothing yet."""


def updated_metadata(metadata: MemberMetadata, request: Heartbeat) -> MemberMetadata:
    """The metadata with what the request says; what it leaves out is as before."""
    names, regex = request.topic_names, request.topic_regex
    return metadata._replace(
        instance_id=metadata.instance_id if request.instance_id is None else request.instance_id,
        rack_id=metadata.rack_id if request.rack_id is None else request.rack_id,
        topic_names=metadata.topic_names if names is None else tuple(sorted(set(names))),
        topic_regex=metadata.topic_regex if regex is None else regex or None,
        rebalance_timeout_ms=(
            metadata.rebalance_timeout_ms
            if request.rebalance_timeout_ms < 0
            else request.rebalance_timeout_ms
        ),
        assignor=metadata.assignor if request.assignor is None else request.assignor,
    )


def is_keep_alive(request: Heartbeat) -> bool:
    fields = request.topic_names, request.topic_regex, request.owned, request.assignor, request.rack_id
    return request.rebalance_timeout_ms < 0 and fields == (None, None, None, None, None)


def is_full_request(request: Heartbeat) -> bool:
    """A member that sends everything may have missed an answer."""
    subscribes = request.topic_names is not None or request.topic_regex is not None
    return request.rebalance_timeout_ms >= 0 and subscribes and request.owned is not None


def check_join(request: Heartbeat) -> None:
    """A member that joins says everything, and has nothing. Raises `InvalidRequest`."""
    if request.rebalance_timeout_ms <= 0 or request.owned is None or request.owned:
        raise InvalidRequest("a member joins with a rebalance timeout, and with no partitions")
    if request.topic_names is None and request.topic_regex is None:
        raise InvalidRequest("a member joins with a subscription")


def find_member_or_static(
    stored: StoredGroup, member_id: str, instance_id: str | None
) -> ConsumerMember | None:
    """The member that joins anew, or whose place is taken; None for a new one. Raises `UnreleasedInstanceId`,
    `FencedInstanceId`."""
    known = stored.members.get(member_id)
    holder = stored.static_members.get(instance_id or "")
    if instance_id is None or holder is None or holder == member_id:
        return known
    if known is not None:
        raise FencedInstanceId(f"instance id {instance_id} belongs to another member")
    existing = stored.members[holder]
    if not existing.is_static_offline and not existing.is_classic:
        raise UnreleasedInstanceId(f"instance id {instance_id} is still used by another member")
    return existing


def check_epoch(member: ConsumerMember, request: Heartbeat) -> None:
    """The epoch is the member's, or the one before if all it has is assigned to it: it has missed an answer."""
    current, epoch = member.current, request.member_epoch
    if member.is_classic:
        raise FencedMemberEpoch(f"member {member.member_id} speaks the classic protocol")
    if epoch == current.epoch:
        return
    missed = epoch == current.previous_epoch and epoch < current.epoch
    if not missed or request.owned is None or not request.owned <= current.assigned:
        raise FencedMemberEpoch(f"member {member.member_id} is at epoch {current.epoch}, not {epoch}")


def check_commit_epoch(member: ConsumerMember, epoch: int) -> None:
    """Offsets are committed in the member's own epoch. Raises `StaleMemberEpoch`; `IllegalGeneration` to a classic
    member."""
    if epoch != member.current.epoch:
        wrong = f"member {member.member_id} is at epoch {member.current.epoch}, not {epoch}"
        raise IllegalGeneration(wrong) if member.is_classic else StaleMemberEpoch(wrong)
