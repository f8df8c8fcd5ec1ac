"""`mansio group describe` of a share group: members, and for each partition who has leased what, and what waits why.

`description` gives None for a group that is no share group, so that whoever describes groups asks here first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.cli.support.formatting import cell, show_table
from mansio.errors import GroupIdNotFound, InconsistentGroupProtocol

if TYPE_CHECKING:
    from mansio.client import Client
    from mansio.client.admin.admin_shares import ShareLeases
    from mansio.client.types import TopicPartition

COLUMNS = ("topic", "partition", "start", "end", "lag", "leased", "parked", "archiving", "dead")
HOLDER_COLUMNS = ("topic", "partition", "member", "leased", "oldest")
RANGES_MAX = 100
"""Leased ranges of one partition in JSON."""


async def description(client: Client, group: str) -> dict[str, Any] | None:
    """All there is to say about a share group; None if this is none."""
    try:
        described = await client.admin.shares.describe(group)
    except (GroupIdNotFound, InconsistentGroupProtocol):
        return None
    offsets = await client.admin.shares.offsets(group)
    assigned = {one for member in described.members for one in member.partitions}
    partitions = sorted({*offsets, *assigned})
    leases = await client.admin.shares.leases(group, partitions, ranges_max=RANGES_MAX)
    return {
        "group": group,
        "type": "share",
        "state": described.state,
        "members": [
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.client_host,
                "partitions": [f"{topic}-{index}" for topic, index in member.partitions],
            }
            for member in described.members
        ],
        "partitions": [_partition(one, found) for one in partitions if (found := leases[one]) is not None],
    }


def _partition(one: TopicPartition, found: ShareLeases) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "start": found.start_offset,
        "end": found.end_offset,
        "lag": found.lag,
        "leased": found.leased,
        "parked": found.parked,
        "withheld": found.withheld,
        "archiving": found.archiving,
        "dead": found.dead,
        "trouble": found.trouble or None,
        "holders": [
            {"member": each.member_id, "leased": each.leased, "oldest_ms": each.oldest_ms}
            for each in found.holders
        ],
        "leases": [
            {
                "first": each.first_offset,
                "last": each.last_offset,
                "member": each.member_id,
                "delivery": each.delivery_count,
                "age_ms": each.age_ms,
            }
            for each in found.ranges
        ],
    }


def show(found: dict[str, Any]) -> None:
    """The description as tables."""
    print(f"share group  {found['group']}  {found['state']}, {len(found['members'])} members")
    partitions = found["partitions"]
    if partitions:
        show_table(COLUMNS, [[cell(row[column]) for column in COLUMNS] for row in partitions])
    holders = [
        [row["topic"], cell(row["partition"]), each["member"], cell(each["leased"]), _age(each["oldest_ms"])]
        for row in partitions
        for each in row["holders"]
    ]
    if holders:
        print()
        show_table(HOLDER_COLUMNS, holders)
    for row in partitions:
        if row["trouble"]:
            name = f"{row['topic']}-{row['partition']}"
            print(f"\n{row['archiving']} dead letters of {name} wait: {row['trouble']}")


def _age(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f}s"
