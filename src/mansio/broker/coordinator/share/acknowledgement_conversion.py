"""What members say of the records they have leased: checked, and given to the machine of the share partition.

Always true: one partition's part of a request holds as a whole, or nothing of it does.

Source: KIP-932, KIP-1222 (renewals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import InvalidRequest, NotLeaderOrFollower
from mansio.state.share_partition.types import RENEW, AcknowledgementBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.state.share_partition.types import Update
    from mansio.wire.apis.share_acknowledge import AckBatch


def to_acknowledgements(batches: Sequence[AckBatch], *, is_renew_ack: bool) -> list[AcknowledgementBatch]:
    """As the machine understands them. Raises `InvalidRequest` for renewals in a request that does not announce any."""
    if not is_renew_ack and any(RENEW in types for _, _, types in batches):
        raise InvalidRequest("the request does not say that it renews leases")
    return [AcknowledgementBatch(first, last, types) for first, last, types in batches]


def acknowledge(
    share_partition: SharePartitionLeader, member: str, batches: Sequence[AcknowledgementBatch]
) -> Update | None:
    """What is to be stored so that these hold, at once; None if that is nothing. It is loaded. Raises `InvalidRequest`,
    `InvalidRecordState`, and why the share partition is not to be had here."""
    state_machine = share_partition.ready_state_machine()
    share_partition.ensure_leader()
    if state_machine is None:
        raise share_partition.ended or NotLeaderOrFollower(
            f"{share_partition.partition.name} is not led here"
        )
    # A renewal holds at once, and is shorter than what it renews when the group's leases are by now.
    renews = any(RENEW in each.types for each in batches)
    call = share_partition.call_and_rearm if renews else share_partition.call
    return call(
        state_machine.acknowledge,
        member,
        batches,
        share_partition.now_ms(),
        share_partition.wall_ms(),
        share_partition.random_fraction(),
    )
