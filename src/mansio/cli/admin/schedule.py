"""`mansio schedule`: creates, lists, shows, pauses, resumes and deletes recurring schedules.

Invariants:
* Times are shown in the schedule's time zone, in UTC for intervals.
* Each command can be repeated; creating a schedule that exists with the same definition changes nothing.
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    PARTITIONS_MAX,
    BootstrapServersOption,
    connect,
    parse_duration_s,
    parse_name_values,
    run,
    usage_error,
)
from mansio.cli.support.formatting import (
    Output,
    OutputOption,
    format_cell,
    show_json,
    show_rows,
    show_table,
    text_or_base64,
)

if TYPE_CHECKING:
    from datetime import datetime, tzinfo

    from mansio.client.admin.schedules import Schedule

app = typer.Typer(no_args_is_help=True, help="Create, list, pause, resume and delete recurring schedules.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
TopicOption = Annotated[
    str, typer.Option("--topic", "-t", metavar="TOPIC", help="The topic to which it publishes.")
]

TIMES: Final = 5
INTERVAL_S_MIN: Final = 1
INTERVAL_S_MAX: Final = 366 * 86_400
STATE_LENGTH_MAX: Final = 60
"""Length to which the reason why a schedule cannot fire is truncated in the table of `list`."""
LIST_COLUMNS: Final = ("name", "topic", "when", "catch_up", "firings", "next")


class CatchUpChoice(StrEnum):
    """Which missed firings are caught up."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@app.callback()
def command_group() -> None:
    """Create, list, pause, resume and delete recurring schedules."""


@app.command()
def create(
    name: NameArgument,
    topic: TopicOption,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="FIELDS",
            help="Minute, hour, day of month, month and day of week, for example '0 9 * * mon-fri'.",
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(
            "--timezone",
            metavar="ZONE",
            help="Time zone of --cron, for example Europe/Berlin. [default: UTC]",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Instead of --cron: publish in this interval, for example 15m."
        ),
    ] = None,
    catch_up: Annotated[
        CatchUpChoice,
        typer.Option(
            "--catch-up",
            help="Which firings to catch up that were missed by more than a minute, because the broker was down.",
        ),
    ] = CatchUpChoice.NONE,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of the record.")
    ] = None,
    value: Annotated[
        str | None, typer.Option("--value", metavar="TEXT", help="The value of the record. [default: null]")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; repeatable."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            max=PARTITIONS_MAX,
            metavar="N",
            help="Partition of the record. [default: by the key, or else by the name]",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create a schedule: publish a record again and again, by a cron expression or in an interval.

    The topic must have mansio.delay.enable=true. Prints the schedule with its next times. One that exists with the
    same definition stays as it is, also if it is paused.
    """
    if (cron is None) == (every is None):
        usage_error("give either a cron expression or an interval", "--cron / --every")
    if every is not None and timezone is not None:
        usage_error("an interval has no time zone", "--timezone")
    interval = None if every is None else _parse_interval(every)
    headers = parse_name_values(header or (), "--header")

    async def work() -> Schedule:
        async with connect(bootstrap_servers) as client:
            return await client.admin.schedules.create(
                topic,
                name,
                value,
                cron=cron,
                every=interval,
                timezone=timezone,
                catch_up=catch_up.value,
                key=key,
                headers=headers,
                partition=partition,
            )

    created = run(work())
    if created.is_paused:
        hint = f"mansio schedule resume {shlex.quote(name)} --topic {topic}"
        print(f"mansio: schedule {name!r} exists and stays paused: {hint}", file=sys.stderr, flush=True)
    _show(created, output)


def _parse_interval(text: str) -> timedelta:
    """Parse the value of --every; exit code 2 if it is invalid."""
    seconds = parse_duration_s(text, "--every", examples=f"{INTERVAL_S_MIN}s (the minimum), 15m, 1h, 2d")
    if not INTERVAL_S_MIN <= seconds <= INTERVAL_S_MAX:
        usage_error(f"{text!r} is not between 1s and 366d", "--every")
    return timedelta(seconds=seconds)


@app.command("list")
def list_schedules(
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Only those of this topic.")
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the schedules, each with its next five times."""

    async def work() -> list[Schedule]:
        async with connect(bootstrap_servers) as client:
            topics = await client.admin.list_topics() if topic is None else [topic]
            return [one for each in topics for one in await client.admin.schedules.list(each, times=TIMES)]

    found = run(work())
    if output is Output.JSON or not found:
        show_rows(output, list(map(json_row, found)), LIST_COLUMNS, empty="no schedules")
        return
    rows: list[list[str]] = []
    for schedule in found:
        times = _times(schedule) or [_state(schedule)]
        if schedule.error:
            times = [_truncated(_state(schedule))]
        cells = (schedule.name, schedule.topic, _when(schedule), schedule.catch_up, schedule.firings)
        rows.append([*map(format_cell, cells), times[0]])
        rows += [[""] * len(cells) + [moment] for moment in times[1:]]
    show_table(LIST_COLUMNS, rows)


@app.command()
def describe(
    name: NameArgument,
    topic: TopicOption,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show a schedule with its record and its next five times."""

    async def work() -> Schedule:
        async with connect(bootstrap_servers) as client:
            return await client.admin.schedules.describe(topic, name, times=TIMES)

    _show(run(work()), output)


@app.command()
def pause(
    name: NameArgument,
    topic: TopicOption,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Stop the firings of a schedule until it is resumed."""

    async def work() -> Schedule | None:
        async with connect(bootstrap_servers) as client:
            await client.admin.schedules.pause(topic, name)
            if output is not Output.JSON:
                return None
            return await client.admin.schedules.describe(topic, name, times=TIMES)

    changed = run(work())
    if changed is not None:
        show_json(json_row(changed))


@app.command()
def resume(
    name: NameArgument,
    topic: TopicOption,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Let a paused schedule fire again, from its next time on; the firings in the pause are not caught up."""

    async def work() -> Schedule | None:
        async with connect(bootstrap_servers) as client:
            await client.admin.schedules.resume(topic, name)
            if output is not Output.JSON:
                return None
            return await client.admin.schedules.describe(topic, name, times=TIMES)

    changed = run(work())
    if changed is not None:
        show_json(json_row(changed))


@app.command()
def delete(
    name: NameArgument,
    topic: TopicOption,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete a schedule. The records that it has published stay."""

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.schedules.delete(topic, name)

    run(work())
    if output is Output.JSON:
        show_json({"name": name, "topic": topic, "deleted": True})


# -- output --------


def _show(schedule: Schedule, output: Output) -> None:
    if output is Output.JSON:
        show_json(json_row(schedule))
        return
    print(f"schedule   {schedule.name}  id {schedule.id}")
    print(f"topic      {schedule.topic}, partition {schedule.partition}")
    print(f"when       {_when(schedule)}, catch-up {schedule.catch_up}")
    print(
        f"state      {_state(schedule)}, {schedule.firings:,} firings since {_format(schedule.created, UTC)}"
    )
    print(f"key        {_text(schedule.key)}")
    for header, content in schedule.headers:
        print(f"header     {header}={_text(content)}")
    print(f"value      {_text(schedule.value)}")
    for moment in _times(schedule):
        print(f"next       {moment}")


def json_row(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as the JSON output has it."""
    row: dict[str, Any] = {
        "name": schedule.name,
        "id": str(schedule.id),
        "topic": schedule.topic,
        "partition": schedule.partition,
        "cron": schedule.cron,
        "timezone": schedule.timezone or None,
        "every_ms": None if schedule.every is None else schedule.every // timedelta(milliseconds=1),
        "catch_up": schedule.catch_up,
        "paused": schedule.is_paused,
        "firings": schedule.firings,
        "created": _format(schedule.created, UTC),
        "next": _times(schedule),
        "error": schedule.error,
        "value_bytes": schedule.value_size,
    }
    for field, content in (("key", schedule.key), ("value", schedule.value)):
        row[field], encoding = text_or_base64(content)
        if encoding:
            row[f"{field}_encoding"] = encoding
    row["headers"] = [{"name": name, "value": text_or_base64(value)[0]} for name, value in schedule.headers]
    return row


def _when(schedule: Schedule) -> str:
    if schedule.every is None:
        return f"{schedule.cron} {schedule.timezone}"
    seconds = schedule.every.total_seconds()
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds % size == 0:
            return f"every {seconds // size:.0f}{unit}"
    return f"every {seconds:g}s"


def _state(schedule: Schedule) -> str:
    if schedule.error:
        return f"cannot fire: {schedule.error}"
    return "paused" if schedule.is_paused else "active"


def _truncated(text: str) -> str:
    return text if len(text) <= STATE_LENGTH_MAX else f"{text[: STATE_LENGTH_MAX - 3]}..."


def _times(schedule: Schedule) -> list[str]:
    from mansio.broker.features.delays.recurrence import find_zone
    from mansio.errors import InvalidSchedule

    try:
        zone = find_zone(schedule.timezone)
    except InvalidSchedule:  # this machine does not know the zone; the broker does
        zone = UTC
    return [_format(moment, zone) for moment in schedule.next_times]


def _format(moment: datetime, zone: tzinfo) -> str:
    return moment.astimezone(zone).isoformat(timespec="seconds").replace("+00:00", "Z")


def _text(content: bytes | None) -> str:
    return text_or_base64(content)[0] or "-"
