"""`mansio topic`: creates, lists, describes, changes and deletes topics, and deletes their oldest records."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    PARTITIONS_MAX,
    TIME_HELP,
    BootstrapServersOption,
    DryRunOption,
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
from mansio.cli.support.formatting import Output, OutputOption, format_cell, show_json, show_rows, show_table
from mansio.errors import (
    InvalidTopic,
    MansioError,
    PolicyViolation,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from mansio.client import Client
    from mansio.client.admin.admin import TopicDescription
    from mansio.client.admin.delays import PendingCounts
    from mansio.client.types import TopicPartition

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter and delete topics.")

NameArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME=VALUE",
        help="A setting of the topic, by Kafka's name (retention.ms=3600000); repeatable.",
    ),
]

REPLICAS_MAX = 1_000
COUNT_TIMEOUT_S: Final = 5.0
"""How long the deletion of a topic waits for the number of its pending records."""
BROKER_DEFAULT_COUNT = -1  # in a request: the broker's default
BEFORE_OPTION_HELP = f"end (all there are), an offset (42), or {TIME_HELP}"
DELETED_COLUMNS = ("topic", "partition", "old_start", "new_start", "offsets", "error")
PARTITION_COLUMNS = ("partition", "leader", "leader_epoch", "replicas", "in_sync", "start", "end", "offsets")
PENDING_COLUMNS = ("partition", "pending", "pending_bytes", "next_due", "overdue_ms")


@app.callback()
def command_group() -> None:
    """Create, list, describe, alter and delete topics."""


@app.command()
def create(
    topic: NameArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=PARTITIONS_MAX,
            metavar="N",
            help="Number of partitions. [default: the broker's num_partitions]",
        ),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1, max=REPLICAS_MAX, metavar="N", help="Replicas of each partition. [default: the broker's]"
        ),
    ] = None,
    config: SettingsOption = None,
    delays: Annotated[
        bool,
        typer.Option("--delays", help="Accept delayed records: -c mansio.delay.enable=true."),
    ] = False,
    priorities: Annotated[
        bool,
        typer.Option(
            "--priorities", help="Deliver by priority to share groups: -c mansio.priority.enable=true."
        ),
    ] = False,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if it already exists.")
    ] = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create a topic."""
    settings = dict(parse_name_values(config or (), "--config"))
    if delays and settings.setdefault("mansio.delay.enable", "true") != "true":
        usage_error("contradicts -c mansio.delay.enable", "--delays")
    if priorities and settings.setdefault("mansio.priority.enable", "true") != "true":
        usage_error("contradicts -c mansio.priority.enable", "--priorities")

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.create_topic(
                topic,
                partitions=BROKER_DEFAULT_COUNT if partitions is None else partitions,
                replication_factor=BROKER_DEFAULT_COUNT if replication_factor is None else replication_factor,
                config=settings,
            )

    try:
        run(work())
    except TopicAlreadyExists:
        if not if_not_exists:
            raise


@app.command("list")
def list_topics(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include internal topics.")] = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the topics."""

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            topics = await client.admin.describe_topics(include_internal=everything)
        return [
            {
                "name": topic.name,
                "partitions": len(topic.partitions),
                "replicas": max((len(partition.replicas) for partition in topic.partitions), default=0),
                "internal": topic.is_internal,
            }
            for topic in topics
        ]

    columns = ["name", "partitions", "replicas"] + ["internal"] * everything
    show_rows(output, run(work()), columns, empty="no topics")


@app.command()
def describe(
    topic: NameArgument,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show a topic's partitions and settings.

    OFFSETS is END - START: the number of records, unless compaction, delayed records or transactions left gaps. The
    table has the settings that differ from their defaults, JSON all settings. Partitions with pending delayed records
    are listed below; OVERDUE MS is for how long the earliest has been due. Recurring schedules are counted.

    Settings need DESCRIBE_CONFIGS on the topic and schedules READ. Without these rights the table says so, and in JSON
    `configs`, or `schedules` and `schedules_failing`, are null.
    """

    async def work() -> dict[str, Any]:
        async with connect(bootstrap_servers) as client:
            return await describe_topic(client, topic)

    found = run(work())
    if output is Output.JSON:
        show_json(found)
        return
    print(f"topic    {found['name']}  id {found['id']}")
    if found["configs"] is None:
        print(f"settings: not allowed (DESCRIBE_CONFIGS on topic {topic})")
    for name, setting in (found["configs"] or {}).items():
        if setting["source"] != "default":
            print(f"setting  {name}={setting['value']}")
    if found["schedules"] is None:
        print(f"schedules: not allowed (READ on topic {topic})")
    if found["schedules"]:
        failing = found["schedules_failing"]
        print(f"schedules  {found['schedules']:,}" + (f", {failing:,} cannot fire" if failing else ""))
    show_table(
        PARTITION_COLUMNS,
        [[format_cell(row[column]) for column in PARTITION_COLUMNS] for row in found["partitions"]],
    )
    pending = [row for row in found["partitions"] if row["pending"]]
    if pending:
        print()
        show_table(
            PENDING_COLUMNS,
            [[format_cell(row[column]) for column in PENDING_COLUMNS] for row in pending],
        )


async def describe_topic(client: Client, topic: str) -> dict[str, Any]:
    """Describe a topic, for the JSON output. Fields that the user may not see are None."""
    from uuid import UUID

    from mansio.client.types import TopicPartition

    view = await client.admin.describe_topic(topic)
    every = [TopicPartition(topic, partition.index) for partition in view.partitions]
    starts = await client.admin.list_offsets(every, "earliest")
    ends = await client.admin.list_offsets(every, "latest")
    settings = await _unless_refused(client.admin.describe_config(topic))
    delayed = await client.admin.delays.counts(topic)
    schedules = await _unless_refused(client.admin.schedules.list(topic, times=0))
    return {
        "name": topic,
        "id": str(UUID(bytes=view.topic_id)),
        "internal": view.is_internal,
        "configs": None
        if settings is None
        else {
            name: {"value": setting.value, "source": setting.source}
            for name, setting in sorted(settings.items())
        },
        "schedules": None if schedules is None else len(schedules),
        "schedules_failing": None if schedules is None else sum(one.error is not None for one in schedules),
        "partitions": [
            {
                "partition": partition.index,
                "leader": partition.leader,
                "leader_epoch": partition.leader_epoch,
                "replicas": partition.replicas,
                "in_sync": partition.in_sync_replicas,
                "start": starts[one].offset,
                "end": ends[one].offset,
                "offsets": ends[one].offset - starts[one].offset,
                **_pending_cells(delayed[partition.index]),
            }
            for one, partition in zip(every, view.partitions, strict=True)
        ],
    }


async def _unless_refused(work: Awaitable[T]) -> T | None:
    """Return the result of `work`; None if the user does not have the right on the topic."""
    try:
        return await work
    except TopicAuthorizationFailed:
        return None


def _pending_cells(counts: PendingCounts) -> dict[str, Any]:
    next_due = counts.next_due
    return {
        "pending": counts.count,
        "pending_bytes": counts.size_bytes,
        "next_due": None
        if next_due is None
        else next_due.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "overdue_ms": counts.overdue_ms,
    }


@app.command()
def alter(
    topic: NameArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=PARTITIONS_MAX,
            metavar="N",
            help="New number of partitions; new records of a key may then go to another partition than existing ones.",
        ),
    ] = None,
    config: SettingsOption = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", "-u", metavar="NAME", help="Reset a setting to its default; repeatable."),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Add partitions to a topic or change its settings; other settings are not changed."""
    changes: dict[str, str | None] = dict(parse_name_values(config or (), "--config"))
    changes.update(dict.fromkeys(unset or (), None))
    if partitions is None and not changes:
        usage_error("give --partitions, --config or --unset", "alter")

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            if changes:
                await client.admin.alter_topic_config(topic, changes)
            if partitions is not None:
                await client.admin.create_partitions(topic, partitions)

    run(work())


@app.command("delete-records")
def delete_records(
    topic: NameArgument,
    before: Annotated[str, typer.Option("--before", metavar="WHERE", help=BEFORE_OPTION_HELP)],
    partition: PartitionsOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete the oldest records of a topic permanently; the topic and its settings stay.

    One row per partition. If a partition fails, ERROR has the reason, the others continue, and the exit code is 1. An
    offset below a partition's start deletes nothing; one beyond its end is rejected.
    """
    where = parse_before_option(before)

    async def work() -> list[dict[str, Any]]:

        async with connect(bootstrap_servers) as client:
            return await delete_partition_records(client, topic, where, partition or (), dry_run=dry_run)

    rows = run(work())
    show_rows(output, rows, DELETED_COLUMNS, empty="nothing to delete")
    failed = sum(row["error"] is not None for row in rows)
    if failed:
        raise typer.Exit(print_error(f"{failed} of {len(rows)} partitions failed: see ERROR"))


def parse_before_option(text: str) -> Any:
    """Parse the option `--before` for `Admin.delete_records`: `end`, an offset, or a time; exit code 2 if invalid."""
    if text == "end":
        return text
    try:
        target = parse_offset_spec(text)
    except (ValueError, OverflowError):
        target = None
    if target is None or target.kind not in ("offset", "time"):
        usage_error(f"{text!r} is none of: {BEFORE_OPTION_HELP}", "--before")
    if (note := missing_at_sign_hint(target)) is not None:
        print_error(note)
    return target.arguments()["to"]


@app.command()
def delete(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="The topics to delete.")],
    if_exists: Annotated[bool, typer.Option("--if-exists", help="Ignore topics that do not exist.")] = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete topics with all their records permanently. Pending delayed records and schedules are deleted, too, and
    counted.

    A failure does not stop the others; the exit code is 1 then.
    """

    async def work() -> None:
        async with connect(bootstrap_servers) as client:

            async def delete_one(topic: str) -> None:
                pending, schedules = await _count_pending(client, topic)
                try:
                    await client.admin.delete_topic(topic)
                except UnknownTopicOrPartition:
                    if not if_exists:
                        raise
                    return
                counts = ((pending, "pending delayed record"), (schedules, "schedule"))
                deleted = [f"{count:,} {name}{'s' * (count > 1)}" for count, name in counts if count]
                if deleted:
                    verb = "was" if pending + schedules == 1 else "were"
                    print(f"{topic}: {' and '.join(deleted)} {verb} deleted", file=sys.stderr)

            await run_for_each(topics, delete_one)

    run(work())


async def _count_pending(client: Client, topic: str) -> tuple[int, int]:
    """Numbers of pending delayed records and of schedules in a topic; 0 if they are unknown, because a topic whose
    leaders do not answer can be deleted, too."""
    import asyncio

    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            pending = sum(one.count for one in (await client.admin.delays.counts(topic)).values())
            return pending, len(await client.admin.schedules.list(topic, times=0))
    except (MansioError, TimeoutError):
        return 0, 0


# -- record deletion --------


CONCURRENT_REQUESTS_MAX: Final = 16
"""Maximum number of concurrent requests for single partitions."""

SEARCHED_GROUPS_MAX: Final = 1_000
"""Maximum number of groups that are searched for the pipeline that prevents a deletion."""


async def delete_partition_records(
    client: Client, topic: str, before: Any, indexes: Iterable[int], *, dry_run: bool
) -> list[dict[str, Any]]:
    """One row per partition, sorted; `error` is the reason why nothing was deleted. `before` as in
    `Admin.delete_records`;
    without `indexes`: all partitions. Raises errors of the topic as a whole.
    """
    from mansio.client.types import TopicPartition

    view = await client.admin.describe_topic(topic)
    await _check_deletable(client, view)
    known = {partition.index for partition in view.partitions}
    outcomes: dict[TopicPartition, int | MansioError] = {}
    for index in sorted(set(indexes) or known):
        outcomes[TopicPartition(topic, index)] = UnknownTopicOrPartition(
            f"topic {topic} has no partition {index}"
        )
    chosen = [one for one in outcomes if one.partition in known]

    async def starts_of(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        listed = await client.admin.list_offsets(partitions, "earliest")
        return {one: entry.offset for one, entry in listed.items()}

    async def delete(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return await client.admin.delete_records(partitions, before=before, dry_run=dry_run)

    starts = await request_for_each(chosen, starts_of)
    outcomes.update(starts)
    outcomes.update(await request_for_each([one for one in chosen if isinstance(starts[one], int)], delete))
    await _name_holding_pipelines(client, outcomes, dry_run=dry_run)
    return [_deletion_row(one, starts.get(one), outcome) for one, outcome in outcomes.items()]


async def _name_holding_pipelines(
    client: Client, outcomes: dict[TopicPartition, int | MansioError], *, dry_run: bool
) -> None:
    """Replace the error of a deletion in `outcomes` that a retention hold prevents by one that names the pipeline: the
    response has no field for it. Only the first `SEARCHED_GROUPS_MAX` groups are searched. In a dry run, replace the
    offset of a deletion that a hold would prevent; the limits of holds are unknown, so the hold may not apply any more.
    """
    candidates = {
        one: outcome
        for one, outcome in outcomes.items()
        if isinstance(outcome, PolicyViolation) or (dry_run and isinstance(outcome, int))
    }
    if not candidates:
        return
    from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_name_of

    for group in (await client.admin.list_groups())[:SEARCHED_GROUPS_MAX]:
        pipeline = pipeline_name_of(group.group_id)
        if pipeline is None:
            continue
        for one, committed in (await client.admin.group_offsets(group.group_id)).items():
            outcome = candidates.get(one)
            if outcome is None or parse_hold_metadata(committed.metadata) is None:
                continue
            if isinstance(outcome, PolicyViolation) or outcome > committed.offset:
                outcomes[one] = PolicyViolation(
                    f"pipeline {pipeline} still needs the records from offset {committed.offset} on; "
                    f"`mansio pipeline release {pipeline}` gives them up"
                )


async def _check_deletable(client: Client, view: TopicDescription) -> None:
    """Check the broker's rules for the whole topic. The command checks them itself, so that a dry run applies
    them too.
    """
    if view.is_internal:
        raise InvalidTopic(f"{view.name} is an internal topic: its records cannot be deleted")
    policy = (await client.admin.describe_config(view.name)).get("cleanup.policy")
    if policy is not None and policy.value == "compact":
        raise PolicyViolation(
            f"{view.name} has cleanup.policy=compact: its records are deleted by compaction only"
        )


async def request_for_each(
    partitions: list[TopicPartition],
    request: Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, T]]],
) -> dict[TopicPartition, T | MansioError]:
    """Return the result of `request`, or its error, for each partition. First one request has all partitions. If it
    fails, each partition is requested separately, to find the failing ones; so `request` must be idempotent.
    """
    if not partitions:
        return {}
    try:
        return {**await request(partitions)}
    except MansioError as error:
        if len(partitions) == 1:
            return {partitions[0]: without_traceback(error)}
    import asyncio

    semaphore = asyncio.Semaphore(CONCURRENT_REQUESTS_MAX)

    async def request_one(one: TopicPartition) -> T | MansioError:
        async with semaphore:
            try:
                return (await request([one]))[one]
            except MansioError as error:
                return without_traceback(error)

    responses = await asyncio.gather(*map(request_one, partitions))
    return dict(zip(partitions, responses, strict=True))


def _deletion_row(
    one: TopicPartition, start: int | MansioError | None, outcome: int | MansioError
) -> dict[str, Any]:
    old = start if isinstance(start, int) else None
    new = outcome if isinstance(outcome, int) else None
    return {
        "topic": one.topic,
        "partition": one.partition,
        "old_start": old,
        "new_start": new,
        "offsets": None if old is None or new is None else new - old,
        "error": outcome.message if isinstance(outcome, MansioError) else None,
    }
