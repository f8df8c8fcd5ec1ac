"""`mansio group`: list, describe, reset-offsets, delete.

Always true: offsets are moved only for a group without members (the broker refuses otherwise), and only within what
the log holds; `--dry-run` shows the same table and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.common import DEFAULT_BROKER, BrokerOption, connect, refuse, run
from mansio.cli.output import Output, OutputOption, cell, show_json, show_rows, show_table
from mansio.cli.targets import TARGET_HELP, Target, parse_target
from mansio.errors import GroupIdNotFound, NonEmptyGroup, RequestError, UnknownMember

if TYPE_CHECKING:
    from mansio.client import Client

app = typer.Typer(no_args_is_help=True, help="See where consumer groups are, and move them.")

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")]

OFFSET_COLUMNS = ("topic", "partition", "committed", "end", "lag", "member")
RESET_COLUMNS = ("topic", "partition", "old", "new")
DEAD = "Dead"  # how Kafka describes a group that is not there


@app.callback()
def noun() -> None:
    """See where consumer groups are, and move them."""


@app.command("list")
def list_groups(output: OutputOption = Output.TABLE, broker: BrokerOption = DEFAULT_BROKER) -> None:
    """List the groups."""

    async def work() -> list[dict[str, Any]]:
        async with connect(broker) as client:
            groups = await client.admin.list_groups()
        return [
            {"group": group.group_id, "state": group.state, "protocol_type": group.protocol_type}
            for group in groups
        ]

    show_rows(output, run(work()), ["group", "state"], empty="no groups")


@app.command()
def describe(
    group: GroupArgument, output: OutputOption = Output.TABLE, broker: BrokerOption = DEFAULT_BROKER
) -> None:
    """Show a group's members, and for each partition where it is and how far behind."""

    async def work() -> dict[str, Any]:
        async with connect(broker) as client:
            return await _description(client, group)

    found = run(work())
    if output is Output.JSON:
        show_json(found)
        return
    print(f"group  {group}  {found['state']}, {len(found['members'])} members")
    if found["offsets"]:
        show_table(
            OFFSET_COLUMNS, [[cell(row[column]) for column in OFFSET_COLUMNS] for row in found["offsets"]]
        )


async def _description(client: Client, group: str) -> dict[str, Any]:
    described = await client.admin.describe_group(group)
    if described.state == DEAD:
        raise GroupIdNotFound(f"there is no group {group}")
    readers = {partition: member for member in described.members for partition in member.partitions}
    lags = await client.admin.group_lag(group)
    return {
        "group": group,
        "state": described.state,
        "protocol": described.protocol,
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.client_host,
                "partitions": [f"{topic}-{index}" for topic, index in member.partitions],
            }
            for member in described.members
        ],
        "offsets": [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed": lag.committed,
                "start": lag.start_offset,
                "end": lag.end_offset,
                "lag": lag.lag,
                "member": readers[partition].member_id if partition in readers else None,
            }
            for partition, lag in lags.items()
        ],
    }


@app.command("reset-offsets")
def reset_offsets(
    group: GroupArgument,
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help=TARGET_HELP)],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="TOPIC",
            help="Only this topic; may be given again. [default: all it read]",
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, metavar="N", help="Only this partition; may be given again."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would change, and change nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Move a group that has no members now. Offsets stay within what the partition holds."""
    try:
        target = parse_target(to)
    except (ValueError, OverflowError):
        refuse(f"{to!r} is none of: {TARGET_HELP}", "--to")

    async def work() -> list[dict[str, Any]]:
        async with connect(broker) as client:
            return await _reset(client, group, target, tuple(topic or ()), tuple(partition or ()), dry_run)

    show_rows(
        output, run(work()), RESET_COLUMNS, empty=f"group {group} has read none of that: name a --topic"
    )


async def _reset(
    client: Client,
    group: str,
    target: Target,
    topics: tuple[str, ...],
    indexes: tuple[int, ...],
    dry_run: bool,
) -> list[dict[str, Any]]:
    from mansio.client.types import TopicPartition

    committed = await client.admin.group_offsets(group)
    chosen: set[TopicPartition] = {one for one in committed if not topics or one.topic in topics}
    for topic in topics:
        view = await client.admin.describe_topic(topic)
        chosen |= {TopicPartition(topic, partition.index) for partition in view.partitions}
    if indexes:
        chosen = {one for one in chosen if one.partition in indexes}
    if not chosen:
        return []
    try:
        new = await client.admin.reset_offsets(group, sorted(chosen), **target.arguments(), dry_run=dry_run)
    except UnknownMember as error:  # what Kafka answers to a commit from outside while the group has members
        raise NonEmptyGroup(f"group {group} still has members; stop them first") from error
    return [
        {
            "topic": one.topic,
            "partition": one.partition,
            "old": committed[one].offset if one in committed else None,
            "new": offset,
        }
        for one, offset in new.items()
    ]


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP...", help="The groups to delete.")],
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Forget groups without members, with everything they committed."""

    async def work() -> None:
        async with connect(broker) as client:
            for group in groups:
                try:
                    await client.admin.delete_group(group)
                except RequestError as error:
                    raise type(error)(f"group {group}: {error.message}") from error

    run(work())
