"""Offsets of groups of all types: their reset, by the rules of the type of the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.coordinator.group.group_inspection import SHARE
from mansio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from typing import Literal

    from mansio.client import Client
    from mansio.wire.topic_partition import TopicPartition


async def type_of_group(client: Client, group: str) -> str:
    """Return the type of a group, "" if there is none."""
    return next((each.group_type for each in await client.admin.list_groups() if each.group_id == group), "")


async def reset_group_offsets(
    client: Client,
    group: str,
    topics: Sequence[str],
    *,
    to: Literal["earliest", "latest"] | int | datetime | None = None,
    shift: int | None = None,
    dry_run: bool = False,
) -> dict[TopicPartition, int]:
    """Reset the offsets of a group without members, and return the new ones. Of a share group the start offsets are
    set; its leases and delivery state of these topics are deleted.

    Raises the errors of `Admin.reset_offsets`, and `InvalidRequest` for a shift of a share group."""
    if await type_of_group(client, group) != SHARE:
        return await client.admin.reset_offsets(group, topics, to=to, shift=shift, dry_run=dry_run)
    if shift is not None:
        raise InvalidRequest("the offsets of a share group are not shifted: give to, offset or time")
    offsets = await client.admin.reset_offsets(group, topics, to=to, dry_run=True)
    if not dry_run:
        await client.admin.shares.alter_offsets(group, offsets)
    return offsets
