"""What members say of the records they have leased: checked, and given to the machine of the share partition.

Always true: one partition's part of a request holds as a whole, or nothing of it does.

Source: KIP-932, KIP-1222 (renewals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import InvalidRequest, NotLeaderOrFollower
from mansio.state.share_types import RENEW, Settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.share.live_share import LiveShare
    from mansio.state.share_types import Update
    from mansio.wire.share_acknowledge import AckBatch


def settles(batches: Sequence[AckBatch], *, is_renew_ack: bool) -> list[Settle]:
    """As the machine understands them. Raises `InvalidRequest` for renewals in a request that does not announce any."""
    if not is_renew_ack and any(RENEW in types for _, _, types in batches):
        raise InvalidRequest("the request does not say that it renews leases")
    return [Settle(first, last, types) for first, last, types in batches]


def settle(live: LiveShare, member: str, batches: Sequence[Settle]) -> Update | None:
    """What is to be stored so that these hold, at once; None if that is nothing. It is loaded. Raises `InvalidRequest`,
    `InvalidRecordState`, and why the share partition is not to be had here."""
    core = live.look()
    live.check_leads()
    if core is None:
        raise live.ended or NotLeaderOrFollower(f"{live.partition.name} is not led here")
    # A renewal holds at once, and is shorter than what it renews when the group's leases are by now.
    renews = any(RENEW in each.types for each in batches)
    decide = live.ask if renews else live.decide
    return decide(core.settle, member, batches, live.now_ms(), live.wall_ms(), live.chance())
