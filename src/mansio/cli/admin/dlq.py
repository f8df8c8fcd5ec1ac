"""`mansio dlq`: lists, shows, redrives and deletes dead letters of share groups.

Invariants:
* The argument TOPIC is a dead-letter topic, or the topic of the original records.
* A dead letter is selected if it matches all filters.
* `--dry-run` shows the same rows and changes nothing.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    PartitionsOption,
    UnreadableReport,
    connect,
    print_error,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_json, show_rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.client import Client
    from mansio.client.dead_letters import DeadLetter

FILTER_HELP: Final = (
    "key=VALUE, group=NAME, topic=NAME (where the record was), reason=TEXT, consumer=ID, or header.NAME=VALUE"
)
FILTER_NAMES: Final = ("key", "group", "topic", "reason", "consumer")

app = typer.Typer(no_args_is_help=True, help="List, show, redrive and delete dead letters.")

TopicArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="A dead-letter topic, or the topic of the original records."),
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", "-f", metavar="NAME=VALUE", help=f"Only these: {FILTER_HELP}; may be given again."
    ),
]
GroupOption = Annotated[
    str | None, typer.Option("--group", "-g", metavar="GROUP", help="Only records that this group rejected.")
]

LIST_COLUMNS = ("topic", "partitions", "records", "newest")
PEEK_COLUMNS = ("position", "source", "group", "deliveries", "given_up", "reason", "key")
REDRIVE_COLUMNS = (
    "group", "topic", "partition", "records", "redriven", "repeated", "deleted", "not_dead_lettered", "error"
)  # fmt: skip
APPEND_COLUMNS = ("topic", "records", "appended", "repeated", "without_value", "error")
PURGE_COLUMNS = ("topic", "partition", "old_start", "new_start", "offsets", "error")
SHOWN_CHARACTERS_MAX = 60


@app.callback()
def command_group() -> None:
    """List, show, redrive and delete dead letters."""


@app.command("list")
def list_topics(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the dead-letter topics and the number of dead letters in each."""

    async def work() -> list[dict[str, Any]]:
        from mansio.client.dead_letters import list_dead_letter_topics

        async with connect(bootstrap_servers) as client:
            return [await topic_row(client, name) for name in await list_dead_letter_topics(client)]

    show_rows(output, run(work()), LIST_COLUMNS, empty="no dead-letter topics")


async def topic_row(client: Client, name: str) -> dict[str, Any]:
    """Return a dead-letter topic as the JSON output of `list` has it."""
    from mansio.client.types import TopicPartition

    view = await client.admin.describe_topic(name)
    partitions = [TopicPartition(name, one.index) for one in view.partitions]
    starts = await client.admin.list_offsets(partitions, "earliest")
    ends = await client.admin.list_offsets(partitions, "latest")
    newest = await client.admin.list_offsets(partitions, "max_timestamp")
    newest_ms = max((one.timestamp_ms for one in newest.values()), default=-1)
    return {
        "topic": name,
        "partitions": len(partitions),
        "records": sum(ends[one].offset - starts[one].offset for one in partitions),
        "newest": None if newest_ms < 0 else _format_time(newest_ms),
    }


def _format_time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Filter(NamedTuple):
    """Selects dead letters whose field or header `name` has this value."""

    name: str
    value: str

    def matches(self, dead_letter: DeadLetter) -> bool:
        """Return whether this selects a dead letter."""
        if self.name.startswith("header."):
            return dead_letter.message.header(self.name.removeprefix("header.")) == self.value.encode()
        if self.name == "key":
            return dead_letter.message.key == self.value.encode()
        if self.name == "reason":
            return dead_letter.reason == self.value
        return bool(getattr(dead_letter.headers, self.name) == self.value)


def parse_filter(text: str) -> Filter:
    """Parse a filter such as `group=NAME` (see `FILTER_HELP`). Raises `ValueError`."""
    name, equals, value = text.partition("=")
    if not equals or (
        name not in FILTER_NAMES and not (name.startswith("header.") and len(name) > len("header."))
    ):
        raise ValueError(f"{text!r} is none of: {FILTER_HELP}")
    return Filter(name, value)


def parse_position(text: str) -> tuple[int, int]:
    """Parse `PARTITION:OFFSET`. Raises `ValueError`."""
    partition, colon, offset = text.partition(":")
    if not colon or not (partition.isdecimal() and offset.isdecimal()):
        raise ValueError(f"{text!r} is not PARTITION:OFFSET of a dead letter, such as 0:42")
    return int(partition), int(offset)


@app.command()
def peek(
    topic: TopicArgument,
    filters: FilterOption = None,
    group: GroupOption = None,
    partition: PartitionsOption = None,
    limit: Annotated[
        int, typer.Option("--max", "-m", min=1, metavar="N", help="Maximum number to show, the oldest first.")
    ] = 20,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show dead letters without changing them. JSON also has the record with all headers.

    POSITION is the argument of `redrive --record`; SOURCE is the position of the original record. DELIVERIES is how
    often the group delivered the record. A handler that `run` calls in order may fail several times in one delivery:
    REASON then has the number of its attempts.
    """
    wanted = _parse_filters(filters, group)

    async def work() -> list[DeadLetter]:
        from mansio.client.dead_letters import read_dead_letters, resolve_dead_letter_topic

        found: list[DeadLetter] = []
        async with connect(bootstrap_servers) as client:
            dead_letters = read_dead_letters(
                client,
                await resolve_dead_letter_topic(client, topic),
                partitions=tuple(partition or ()),
                matches=match_all(wanted),
                on_unreadable=UnreadableReport().show,
            )
            async for dead_letter in dead_letters:
                found.append(dead_letter)
                if len(found) >= limit:
                    break
            await dead_letters.aclose()  # otherwise it would continue to read
        return found

    rows = [peek_row(dead_letter) for dead_letter in run(work())]
    if output is Output.TABLE:
        rows = [{**row, "key": _truncate(row["key"]), "reason": _truncate(row["reason"])} for row in rows]
    show_rows(output, rows, PEEK_COLUMNS, empty="no such dead letters")


def peek_row(dead_letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as the JSON output of `peek` has it."""
    from mansio.cli.support.formatting import record_as_json

    record, headers = record_as_json(dead_letter.message), dead_letter.headers
    return {
        "position": f"{dead_letter.message.partition}:{dead_letter.message.offset}",
        "id": headers.dead_letter_id,
        "source": f"{headers.topic}-{headers.partition}@{headers.offset}",
        "group": headers.group,
        "deliveries": headers.deliveries,
        "given_up": _format_time(headers.dead_lettered_ms),
        "reason": dead_letter.reason,
        "consumer": headers.consumer,
        **{name: value for name, value in record.items() if name not in ("topic", "partition", "offset")},
    }


def _truncate(text: str | None) -> str | None:
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS_MAX else f"{line[: SHOWN_CHARACTERS_MAX - 1]}…"


def match_all(filters: Sequence[Filter]) -> Callable[[DeadLetter], bool]:
    """Return a function that reports whether all filters select a dead letter."""
    return lambda dead_letter: all(each.matches(dead_letter) for each in filters)


def _parse_filters(texts: list[str] | None, group: str | None) -> list[Filter]:
    try:
        found = [parse_filter(text) for text in texts or ()]
    except ValueError as error:
        usage_error(str(error), "--filter")
    return found if group is None else [*found, Filter("group", group)]


@app.command()
def redrive(
    topic: TopicArgument,
    filters: FilterOption = None,
    group: GroupOption = None,
    dead_letter: Annotated[
        list[str] | None,
        typer.Option(
            "--record", metavar="PARTITION:OFFSET", help="This dead letter (see `peek`); repeatable."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="TOPIC", help="Append the records to this topic instead, for all its consumers."
        ),
    ] = None,
    rate: Annotated[
        int,
        typer.Option("--rate", "-r", min=0, metavar="N", help="Maximum records per second; 0: no limit."),
    ] = 0,
    redrive_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Continue the redrive with this id; records that are done are not repeated. [default: a new id]",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Offer dead-lettered records again to their share group; the dead letters stay.

    Select with --record, --filter and --group, or use --all. REDRIVEN: available to the group now. REPEATED: redriven
    earlier with the same id. DELETED: deleted from the log (--to appends them from their dead letters). NOT DEAD
    LETTERED: not dead-lettered any more, because of another redrive. The exit code is 1 if something failed; run it
    again with the same --id.
    """
    wanted = _parse_filters(filters, group)
    try:
        positions = [parse_position(text) for text in dead_letter or ()]
    except ValueError as error:
        usage_error(str(error), "--record")
    if not (every or wanted or positions):
        usage_error("select dead letters with --record, --filter, --group, or --all", "redrive")
    if every and positions:
        usage_error("give either --all or a selection, not both", "--record")
    name = redrive_id or new_redrive_id()
    if not 0 < len(name) <= 100:
        usage_error("an id has up to 100 characters", "--id")

    async def work() -> list[dict[str, Any]]:
        from dataclasses import asdict

        from mansio.client.dead_letters import (
            RateLimit,
            read_dead_letters,
            redrive_to_groups,
            redrive_to_topic,
            resolve_dead_letter_topic,
        )

        async with connect(bootstrap_servers) as client:
            source = await resolve_dead_letter_topic(client, topic)
            if not dry_run:
                print(f"redrive {name}", file=sys.stderr, flush=True)
            rate_limit = RateLimit(rate, _progress())

            def dead_letters() -> AsyncIterator[DeadLetter]:
                return read_dead_letters(
                    client,
                    source,
                    positions=positions,
                    matches=match_all(wanted),
                    on_unreadable=UnreadableReport().show,
                )

            if to is None:
                redriven = await redrive_to_groups(client, dead_letters(), name, rate_limit, dry_run=dry_run)
                return [
                    {"group": one.group, "topic": one.topic, "partition": one.partition, **asdict(counts)}
                    for one, counts in redriven
                ]
            again = redrive_id is not None
            appended = await redrive_to_topic(
                client, dead_letters, to, name, rate_limit, again=again, dry_run=dry_run
            )
            return [{"topic": to, **asdict(appended)}]

    rows = run(work())
    columns = REDRIVE_COLUMNS if to is None else APPEND_COLUMNS
    if output is Output.JSON:
        show_json({"id": name, "rows": rows})
    else:
        show_rows(output, rows, columns, empty="no such dead letters")
    if failed := sum(row["error"] is not None for row in rows):
        raise typer.Exit(print_error(f"{failed} of {len(rows)} failed: see ERROR; continue with --id {name}"))


def new_redrive_id() -> str:
    """Return an id that no redrive has had."""
    import uuid

    return uuid.uuid4().hex


def _progress() -> Callable[[int], None]:
    """Return a function that prints the number of processed records on a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda done: print(f"\r{count_text(done, 'record')}", end="", file=sys.stderr, flush=True)


@app.command()
def purge(
    topic: TopicArgument,
    before: Annotated[
        str,
        typer.Option("--before", metavar="WHERE", help="end (all), an offset, or a time (2013-11-21, -7d)."),
    ],
    partition: PartitionsOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete the oldest dead letters of a topic permanently. The original records are not affected."""
    from mansio.cli.admin.topic import parse_before_option

    where = parse_before_option(before)

    async def work() -> list[dict[str, Any]]:
        from mansio.cli.admin.topic import delete_partition_records
        from mansio.client.dead_letters import resolve_dead_letter_topic

        async with connect(bootstrap_servers) as client:
            source = await resolve_dead_letter_topic(client, topic)
            return await delete_partition_records(client, source, where, partition or (), dry_run=dry_run)

    rows = run(work())
    show_rows(output, rows, PURGE_COLUMNS, empty="nothing to delete")
    if failed := sum(row["error"] is not None for row in rows):
        raise typer.Exit(print_error(f"{failed} of {len(rows)} partitions failed: see ERROR"))
