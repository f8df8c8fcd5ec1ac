"""`mansio group`: lists, describes, changes and deletes groups, and resets their offsets.

Invariants:
* Offsets are changed only for a group without members (the broker rejects other changes), and only within the log.
* `--dry-run` shows the same table and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.admin.why import explain, json_of
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    OFFSET_SPEC_HELP,
    BootstrapServersOption,
    DryRunOption,
    OffsetSpec,
    PartitionsOption,
    connect,
    missing_at_sign_hint,
    parse_name_values,
    parse_offset_spec,
    print_error,
    run,
    run_for_each,
    usage_error,
)
from mansio.cli.support.formatting import (
    Output,
    OutputOption,
    count_text,
    format_cell,
    printable,
    show_json,
    show_rows,
    show_table,
)
from mansio.errors import (
    GroupIdNotFound,
    InconsistentGroupProtocol,
    InvalidRequest,
    NonEmptyGroup,
    RequestError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.client import Client, GroupListing, GroupListings
    from mansio.client.admin.explanations import GroupExplanation
    from mansio.client.admin.shares import ShareLeases
    from mansio.client.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="Show, change and delete consumer groups and share groups.")

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")]

MEMBER_COLUMNS = ("member", "epoch", "instance", "host", "reads", "gets", "gives_up")
OFFSET_COLUMNS = ("topic", "partition", "committed", "end", "lag", "member")
RESET_COLUMNS = ("topic", "partition", "old", "new")
LIST_TIMEOUT_MS = 15_000
"""Timeout of the list: more than a cluster needs to declare a broker dead and to move its groups."""

WHY_SAMPLE_S = 0.3
"""Duration of the sample for the answer at the end of a description: `mansio why` looks longer."""

DEAD_STATE = "Dead"  # Kafka's state of a group that does not exist


@app.callback()
def command_group() -> None:
    """Show, change and delete consumer groups and share groups."""


@app.command("list")
def list_groups(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the groups. If a broker does not answer, the command waits some seconds until it is declared dead and its
    groups have a new coordinator; the exit code is 1 if groups are missing.
    """

    async def work() -> GroupListings:
        async with connect(bootstrap_servers) as client:
            return await client.admin.list_groups(timeout_ms=LIST_TIMEOUT_MS)

    groups = run(work())
    show_rows(output, list(map(group_row, groups)), ["group", "type", "state"], empty="no groups")
    if groups.unreachable:
        silent = ", ".join(map(str, groups.unreachable))
        raise typer.Exit(print_error(f"incomplete: broker {silent} did not answer"))
    if groups.missing_partitions:
        missing = ", ".join(map(str, groups.missing_partitions))
        raise typer.Exit(print_error(f"incomplete: partition {missing} of __consumer_offsets has no leader"))


def group_row(group: GroupListing) -> dict[str, Any]:
    """Return a group as the JSON output of `list` has it."""
    return {
        "group": group.group_id,
        "type": group.group_type or None,
        "state": group.state,
        "protocol_type": group.protocol_type,
    }


@app.command()
def describe(
    group: GroupArgument,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show a group's members, settings, and position and lag per partition.

    For a group with server-side assignment the table has a row per member: its epoch, the partitions it READS, those it
    GETS when other members have revoked them, and those it GIVES UP. The table has the settings of the group itself,
    JSON all settings.

    For a share group it has a row per partition: the range of open records, and how many are LEASED, IN BACKOFF
    until their next delivery, being written to the dead-letter topic (ARCHIVING) or DEAD; and a row per member with
    leases.

    The last lines say what keeps the group from going on, as `mansio why` does.
    """

    async def work() -> tuple[dict[str, Any], GroupExplanation | None]:
        async with connect(bootstrap_servers) as client:
            shared = await describe_share_group(client, group)
            described = shared or await describe_consumer_group(client, group)
            return described, await _explain(client, group)

    found, explanation = run(work())
    if output is Output.JSON:
        show_json({**found, "why": None if explanation is None else json_of(explanation)})
        return
    if found["type"] == "share":
        show_share_group(found)
    else:
        _show_group(group, found)
    if explanation is not None:
        print(f"\n{explanation.summary}")
        for each in explanation.findings[:1]:
            print(f"  {each.advice}:\n  {each.command}")


async def _explain(client: Client, group: str) -> GroupExplanation | None:
    """Return what keeps the group from going on; None if the broker does not say it."""
    try:
        return await explain(client, group, WHY_SAMPLE_S)
    except UnsupportedVersion:
        return None


def _show_group(group: str, found: dict[str, Any]) -> None:
    print(
        f"group    {group}  {found['state']}, {count_text(len(found['members']), 'member')}{_epoch_text(found)}"
    )
    for name, setting in found["configs"].items():
        if setting["source"] == "group":
            print(f"setting  {name}={setting['value']}")
    if found["type"] == "consumer" and found["members"]:
        show_table(MEMBER_COLUMNS, [_member_row(member) for member in found["members"]])
        print()
    if found["offsets"]:
        show_table(
            OFFSET_COLUMNS,
            [[format_cell(row[column]) for column in OFFSET_COLUMNS] for row in found["offsets"]],
        )


def _epoch_text(found: dict[str, Any]) -> str:
    """Return the epochs and the assignor of a consumer group (KIP-848) as text; empty for other groups."""
    if found["type"] != "consumer":
        return ""
    behind = "" if found["target_epoch"] == found["epoch"] else f" (assigned: {found['target_epoch']})"
    return f", epoch {found['epoch']}{behind}, {found['protocol']}"


def _member_row(member: dict[str, Any]) -> list[str]:
    reads, target = member["partitions"], member["target"] or []
    return [
        format_cell(member["member"]),
        format_cell(member["epoch"]),
        format_cell(member["instance"]),
        format_cell(member["host"].removeprefix("/")),
        format_cell(reads),
        format_cell([one for one in target if one not in reads]),
        format_cell([one for one in reads if one not in target]),
    ]


async def describe_consumer_group(client: Client, group: str) -> dict[str, Any]:
    """Describe a group that is not a share group, for the JSON output. Raises `GroupIdNotFound`."""
    described = await client.admin.describe_group(group)
    if described.state == DEAD_STATE:
        raise GroupIdNotFound(f"there is no group {group}")
    readers = {partition: member for member in described.members for partition in member.partitions}
    lags = await client.admin.group_lag(group)
    return {
        "group": group,
        "type": described.group_type,
        "state": described.state,
        "protocol": described.protocol,
        "epoch": described.group_epoch,
        "target_epoch": described.assignment_epoch,
        "configs": await _group_settings(client, group),
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.client_host,
                "protocol": member.protocol,
                "epoch": member.member_epoch,
                "topics": list(member.topics),
                "pattern": member.topic_regex,
                "partitions": _partition_names(member.partitions),
                "target": None
                if member.target_partitions is None
                else _partition_names(member.target_partitions),
            }
            for member in described.members
        ],
        "offsets": [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed": lag.committed_offset,
                "start": lag.start_offset,
                "end": lag.end_offset,
                "lag": lag.lag,
                "member": readers[partition].member_id if partition in readers else None,
            }
            for partition, lag in sorted(lags.items())
        ],
    }


def _partition_names(partitions: Iterable[TopicPartition]) -> list[str]:
    return [f"{topic}-{index}" for topic, index in partitions]


async def _group_settings(client: Client, group: str) -> dict[str, dict[str, Any]]:
    """Return the group's settings and their sources; empty if the broker does not support group settings."""
    try:
        found = await client.admin.describe_config(group, kind="group")
    except RequestError:
        return {}
    return {
        name: {"value": setting.value, "source": setting.source} for name, setting in sorted(found.items())
    }


@app.command()
def alter(
    group: GroupArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="A setting of the group, by Kafka's name (consumer.session.timeout.ms=6000).",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            "--unset", "-u", metavar="NAME", help="Reset a setting to the broker's value; repeatable."
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Change settings of a group atomically; other settings are not changed.

    The group need not exist yet. Its members receive the change with their next heartbeat.
    """
    changes: dict[str, str | None] = dict(parse_name_values(settings or (), "NAME=VALUE"))
    changes.update(dict.fromkeys(unset or (), None))
    if not changes:
        usage_error("give NAME=VALUE or --unset", "alter")

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.alter_group_config(group, changes)

    run(work())


@app.command("reset-offsets")
def reset_offsets(
    group: GroupArgument,
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help=OFFSET_SPEC_HELP)],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="TOPIC",
            help="Only this topic; repeatable. [default: all topics with committed offsets]",
        ),
    ] = None,
    partition: PartitionsOption = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the group if it does not exist, with these offsets.")
    ] = False,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Change the committed offsets of a group without members. Offsets stay within the partition's log.

    Rows are sorted by topic and partition.
    """
    try:
        target = parse_offset_spec(to)
    except (ValueError, OverflowError):
        usage_error(f"{to!r} is none of: {OFFSET_SPEC_HELP}", "--to")

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            await _check_resettable(client, group, create=create)
            chosen = await _select_partitions(client, group, tuple(topic or ()), frozenset(partition or ()))
            return await _reset_offsets(client, group, target, chosen, dry_run=dry_run)

    if (note := missing_at_sign_hint(target)) is not None:
        print_error(note)
    show_rows(output, run(work()), RESET_COLUMNS, empty="no partitions to reset")


async def _check_resettable(client: Client, group: str, *, create: bool) -> None:
    """Check that the offsets of the group can be reset. The broker alone would create a missing group, and would not
    check a dry run.
    """
    described = await client.admin.describe_group(group)
    if described.state == DEAD_STATE and not create:
        raise GroupIdNotFound(f"there is no group {group}; --create makes it")
    if described.members:
        raise NonEmptyGroup(f"group {group} still has members; stop them first")


async def _select_partitions(
    client: Client, group: str, topics: tuple[str, ...], indexes: frozenset[int]
) -> dict[TopicPartition, int | None]:
    """Return the partitions to change, sorted, with their committed offsets. Raises `UnknownTopicOrPartition`."""
    from mansio.client.types import TopicPartition

    committed = {one: entry.offset for one, entry in (await client.admin.group_offsets(group)).items()}
    chosen = {one for one in committed if not topics or one.topic in topics}
    for topic in topics:
        view = await client.admin.describe_topic(topic)
        every = {TopicPartition(topic, partition.index) for partition in view.partitions}
        if missing := indexes - {one.partition for one in every}:
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {min(missing)}")
        chosen |= every
    if indexes:
        chosen = {one for one in chosen if one.partition in indexes}
    if not chosen:
        raise UnknownTopicOrPartition(
            f"group {group} has no committed offset in any of these partitions; give --topic"
        )
    return {one: committed.get(one) for one in sorted(chosen)}


async def _reset_offsets(
    client: Client, group: str, target: OffsetSpec, chosen: dict[TopicPartition, int | None], *, dry_run: bool
) -> list[dict[str, Any]]:
    if target.kind == "relative":
        chosen = {one: old for one, old in chosen.items() if old is not None}
        if not chosen:
            raise InvalidRequest(
                f"group {group} has no committed offset there; give --to an absolute position"
            )
    try:
        new = await client.admin.reset_offsets(group, chosen, **target.arguments(), dry_run=dry_run)
    except UnknownMember as error:  # Kafka's error for an external commit while the group has members
        raise NonEmptyGroup(f"group {group} still has members; stop them first") from error
    return [
        {"topic": one.topic, "partition": one.partition, "old": old, "new": new[one]}
        for one, old in chosen.items()
    ]


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", help="The groups to delete.")],
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete groups without members, with all committed offsets.

    A failure does not stop the others; the exit code is 1 then.
    """

    async def work() -> None:
        async with connect(bootstrap_servers) as client:

            async def delete_one(group: str) -> None:
                try:
                    await client.admin.delete_group(group)
                except RequestError as error:
                    raise type(error)(f"group {group}: {error.message}") from error

            await run_for_each(groups, delete_one)

    run(work())


# -- share groups --------


SHARE_PARTITION_COLUMNS = (
    "topic",
    "partition",
    "start",
    "end",
    "lag",
    "leased",
    "in_backoff",
    "archiving",
    "dead",
)
SHARE_PRIORITY_COLUMNS = (
    "topic",
    "partition",
    "priority",
    "start",
    "end",
    "lag",
    "leased",
    "in_backoff",
    "dead",
)
SHARE_MEMBER_COLUMNS = ("topic", "partition", "member", "leased", "oldest")
LEASED_RANGES_SHOWN_MAX = 100
"""Maximum number of leased ranges of one partition that the JSON output has."""


async def describe_share_group(client: Client, group: str) -> dict[str, Any] | None:
    """Describe a share group, for the JSON output; None if the group does not exist or is not a share group."""
    try:
        described = await client.admin.shares.describe(group)
    except (GroupIdNotFound, InconsistentGroupProtocol):
        return None
    offsets = await client.admin.shares.offsets(group)
    assigned = {one for member in described.members for one in member.partitions}
    partitions = sorted({*offsets, *assigned})
    leases = await client.admin.shares.leases(group, partitions, ranges_max=LEASED_RANGES_SHOWN_MAX)
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
        "partitions": [
            _share_partition_row(one, found) for one in partitions if (found := leases[one]) is not None
        ],
    }


def _share_partition_row(one: TopicPartition, found: ShareLeases) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "start": found.start_offset,
        "end": found.end_offset,
        "lag": found.lag,
        "leased": found.leased,
        "in_backoff": found.in_backoff,
        "withheld": found.withheld,
        "archiving": found.archiving,
        "dead": found.dead,
        "dead_letter_error": found.dead_letter_error or None,
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
                "lease_ms": each.lease_ms,
            }
            for each in found.ranges
        ],
        "priorities": [
            {
                "priority": each.priority,
                "start": each.start_offset,
                "end": each.end_offset,
                "lag": each.lag,
                "leased": each.leased,
                "in_backoff": each.in_backoff,
                "dead": each.dead,
            }
            for each in found.priorities
        ],
        "keys_at_lease_limit": found.keys_at_lease_limit,
        "keys_at_rate_limit": found.keys_at_rate_limit,
        "limited_keys": [printable(key) for key in found.limited_keys],
        "isolated_key_count": found.isolated_key_count,
        "isolated_keys": [printable(key) for key in found.isolated_keys],
    }


def show_share_group(found: dict[str, Any]) -> None:
    """Print the result of `describe_share_group` as tables."""
    print(f"share group  {found['group']}  {found['state']}, {count_text(len(found['members']), 'member')}")
    partitions = found["partitions"]
    if partitions:
        show_table(
            SHARE_PARTITION_COLUMNS,
            [[format_cell(row[column]) for column in SHARE_PARTITION_COLUMNS] for row in partitions],
        )
    priorities = [
        [row["topic"], format_cell(row["partition"])]
        + [format_cell(each[column]) for column in SHARE_PRIORITY_COLUMNS[2:]]
        for row in partitions
        for each in row["priorities"]
    ]
    if priorities:
        print()
        show_table(SHARE_PRIORITY_COLUMNS, priorities)
    holders = [
        [
            row["topic"],
            format_cell(row["partition"]),
            each["member"],
            format_cell(each["leased"]),
            _format_age(each["oldest_ms"]),
        ]
        for row in partitions
        for each in row["holders"]
    ]
    if holders:
        print()
        show_table(SHARE_MEMBER_COLUMNS, holders)
    for row in partitions:
        if row["keys_at_lease_limit"] or row["keys_at_rate_limit"]:
            print(f"\n{_limited_keys(row)}")
        if row["isolated_key_count"]:
            isolated = count_text(row["isolated_key_count"], "key")
            print(
                f"\n{row['topic']}-{row['partition']}: {isolated} with a backlog: {', '.join(row['isolated_keys'])}"
            )
        if row["dead_letter_error"]:
            name = f"{row['topic']}-{row['partition']}"
            print(
                f"\n{count_text(row['archiving'], 'dead letter')} of {name} wait: {row['dead_letter_error']}"
            )


def _limited_keys(row: dict[str, Any]) -> str:
    """Return a line about the group keys of one partition whose records wait for a limit by key."""
    parts = [
        f"{count_text(row[name], 'key')} at {limit}"
        for name, limit in (
            ("keys_at_lease_limit", "the limit of leases"),
            ("keys_at_rate_limit", "the rate"),
        )
        if row[name]
    ]
    shown = f": {', '.join(row['limited_keys'])}" if row["limited_keys"] else ""
    return f"{row['topic']}-{row['partition']}: {' and '.join(parts)}{shown}"


def _format_age(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f}s"
