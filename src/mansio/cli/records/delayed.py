"""`mansio delayed`: lists, shows, cancels and reschedules delayed records that are pending.

Invariants:
* A record is named PARTITION:ID; the id is the offset in the response to its producer.
* A record is selected if it matches all options.
* `--dry-run` counts the same records and changes nothing.
"""

from __future__ import annotations

import sys
from array import array
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    PartitionsOption,
    connect,
    parse_duration_s,
    parse_time_option,
    print_error,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_rows, text_or_base64

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.client import Client
    from mansio.client.admin.delays import ChangedRecords, PendingRecord, RecordId

app = typer.Typer(no_args_is_help=True, help="List, show, cancel and reschedule delayed records.")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic of the delayed records.")]
RecordsArgument = Annotated[
    list[str], typer.Argument(metavar="PARTITION:ID", help="Pending records, as `list` shows them.")
]
SelectedArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="PARTITION:ID", help="These records; otherwise select with options."),
]
DueFromOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only records that are due at this time or later (+1h, 2027-03-01)."),
]
DueToOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only records that are due before this time.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", "-k", metavar="KEY", help="Only records with this key; reads all in the range."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All pending records of the topic.")]

LIST_COLUMNS: Final = ("record", "due", "key", "bytes", "value")
CHANGE_COLUMNS: Final = ("topic", "changed", "not_pending", "unknown")
DRY_RUN_COLUMNS: Final = ("topic", "records")
SHOWN_CHARACTERS_MAX: Final = 60
PAGE_RECORDS: Final = 10_000
CHANGED_RECORDS: Final = 1_000
PARTITION_MAX: Final = (1 << 31) - 1
ID_MAX: Final = (1 << 63) - 1
NAMED_RECORDS_MAX: Final = 10
"""Maximum number of records that an error names."""


@app.callback()
def command_group() -> None:
    """List, show, cancel and reschedule delayed records."""


class Selection(NamedTuple):
    """Records selected by options. `records`: by name, then the other fields are None."""

    records: Sequence[tuple[int, int]] = ()
    partitions: Sequence[int] | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None
    key: bytes | None = None


@app.command("list")
def list_records(
    topic: TopicArgument,
    due_from: DueFromOption = None,
    due_to: DueToOption = None,
    key: KeyOption = None,
    partition: PartitionsOption = None,
    limit: Annotated[
        int, typer.Option("--max", "-m", min=1, max=10_000, metavar="N", help="Maximum number to show.")
    ] = 20,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="CURSOR", help="Continue a list: the cursor that it printed."),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List pending records in the order in which they are due.

    RECORD is the argument of the other commands. BYTES is the size of the value, of which the table has the beginning.
    """
    selection = _parse_selection((), partition, due_from, due_to, key)

    async def work() -> tuple[list[PendingRecord], str | None]:
        async with connect(bootstrap_servers) as client:
            page = await client.admin.delays.list(
                topic,
                partitions=selection.partitions,
                due_from=selection.due_from,
                due_to=selection.due_to,
                key=selection.key,
                limit=limit,
                after=after,
            )
        return list(page.records), page.next

    try:
        found, cursor = run(work())
    except ValueError as error:  # times and limit are checked before
        usage_error(str(error).partition(": ")[2], "--after")
    if output is Output.JSON:
        show_json({"records": [_json_row(record) for record in found], "next": cursor})
        return
    show_rows(output, [_table_row(record) for record in found], LIST_COLUMNS, empty="no pending records")
    if cursor is not None:
        print(f"more: --after {cursor}", file=sys.stderr)


@app.command()
def describe(
    topic: TopicArgument,
    records: RecordsArgument,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show pending records with headers and whole values. The exit code is 1 if one is not pending."""
    wanted = _parse_records(records)

    async def work() -> dict[RecordId, PendingRecord]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.delays.describe(topic, wanted)

    found = run(work())
    if output is Output.JSON:
        show_json([_json_row(record) for record in found.values()])
    else:
        for number, record in enumerate(found.values()):
            if number:
                print()
            _print_record(record)
    missing = [one for one in wanted if one not in found]
    if missing:
        raise typer.Exit(print_error(f"not pending: {_names(missing)}"))


@app.command()
def cancel(
    topic: TopicArgument,
    records: SelectedArgument = None,
    every: AllOption = False,
    due_from: DueFromOption = None,
    due_to: DueToOption = None,
    key: KeyOption = None,
    partition: PartitionsOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Cancel pending records: they are not delivered.

    NOT PENDING: delivered or cancelled before. UNKNOWN: an answer was lost, and the record is not pending any more; the
    exit code is 1 then, and if a record that was named is not pending.
    """
    selection = _parse_selection(records, partition, due_from, due_to, key, every=every)
    _change(
        topic,
        selection,
        lambda client, ids: client.admin.delays.cancel(topic, ids),
        dry_run,
        output,
        bootstrap_servers,
    )


@app.command()
def reschedule(
    topic: TopicArgument,
    records: SelectedArgument = None,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay", metavar="DURATION", help="Deliver after this time from now, for example 15m."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="TIME", help="Deliver at this time, for example 2026-12-01T09:00+01:00."
        ),
    ] = None,
    every: AllOption = False,
    due_from: DueFromOption = None,
    due_to: DueToOption = None,
    key: KeyOption = None,
    partition: PartitionsOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Change when pending records are due. Columns and exit code as in `cancel`."""
    from mansio.client.producer.delays import parse_delay_ms, parse_moment_ms

    if (delay is None) == (at is None):
        usage_error("give either a duration or a time", "--delay / --at")
    seconds = None if delay is None else parse_duration_s(delay, "--delay")
    moment = _parse_time(at, "--at")
    try:
        _ = parse_moment_ms(moment) if seconds is None else parse_delay_ms(seconds)
    except ValueError as error:
        usage_error(str(error).partition(": ")[2], "--delay / --at")
    selection = _parse_selection(records, partition, due_from, due_to, key, every=every)
    _change(
        topic,
        selection,
        lambda client, ids: client.admin.delays.reschedule(topic, ids, delay=seconds, at=moment),
        dry_run,
        output,
        bootstrap_servers,
    )


@app.command("deliver-now")
def deliver_now(
    topic: TopicArgument,
    records: SelectedArgument = None,
    every: AllOption = False,
    due_from: DueFromOption = None,
    due_to: DueToOption = None,
    key: KeyOption = None,
    partition: PartitionsOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Deliver pending records now. Columns and exit code as in `cancel`."""
    selection = _parse_selection(records, partition, due_from, due_to, key, every=every)
    _change(
        topic,
        selection,
        lambda client, ids: client.admin.delays.deliver_now(topic, ids),
        dry_run,
        output,
        bootstrap_servers,
    )


# -- selection --------


def _parse_selection(
    records: Sequence[str] | None,
    partitions: Sequence[int] | None,
    due_from: str | None,
    due_to: str | None,
    key: str | None,
    *,
    every: bool | None = None,
) -> Selection:
    """Parse the options that select records; exit code 2 if they are invalid. `every` None: all without options."""
    options = any(one is not None for one in (due_from, due_to, key)) or bool(partitions)
    if every is not None and bool(records) + every + options != 1:
        usage_error("give records, or options that select them, or --all", "PARTITION:ID")
    return Selection(
        _parse_records(records or ()),
        [*partitions] if partitions else None,
        _parse_time(due_from, "--due-from"),
        _parse_time(due_to, "--due-to"),
        None if key is None else key.encode(),
    )


def _parse_records(texts: Sequence[str]) -> list[tuple[int, int]]:
    found = []
    for text in texts:
        partition, separator, number = text.partition(":")
        if not (separator and partition.isdecimal() and number.isdecimal()):
            usage_error(f"{text!r} is not PARTITION:ID, for example 0:1024", "PARTITION:ID")
        found.append((int(partition), int(number)))
        if int(partition) > PARTITION_MAX or int(number) > ID_MAX:
            usage_error(f"{text!r} cannot be the id of a record", "PARTITION:ID")
    return list(dict.fromkeys(found))


def _parse_time(text: str | None, name: str) -> datetime | None:
    milliseconds = parse_time_option(text, name)
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds)


async def _selected_ids(client: Client, topic: str, selection: Selection) -> dict[int, array[int]]:
    """Return the ids of the selected records by partition. All of them, before any is changed, because a change may
    move a record to a place where the list comes later; eight bytes per record."""
    found: dict[int, array[int]] = {}
    for partition, number in selection.records:
        found.setdefault(partition, array("q")).append(number)
    cursor = None
    while not selection.records:
        page = await client.admin.delays.list(
            topic,
            partitions=selection.partitions,
            due_from=selection.due_from,
            due_to=selection.due_to,
            key=selection.key,
            limit=PAGE_RECORDS,
            after=cursor,
            with_content=False,
        )
        for record in page.records:
            found.setdefault(record.partition, array("q")).append(record.id)
        if page.next is None:
            break
        cursor = page.next
    return found


# -- changes --------


def _change(
    topic: str,
    selection: Selection,
    change: Callable[[Client, list[tuple[int, int]]], Awaitable[ChangedRecords]],
    dry_run: bool,
    output: Output,
    bootstrap_servers: str,
) -> None:
    """Change the selected records, print how many were changed, and exit."""
    results: list[ChangedRecords] = []

    async def work() -> int:
        async with connect(bootstrap_servers) as client:
            selected = await _selected_ids(client, topic, selection)
            total = sum(map(len, selected.values()))
            done = 0
            for partition, ids in selected.items():
                for begin in range(0, 0 if dry_run else len(ids), CHANGED_RECORDS):
                    chunk = [(partition, one) for one in ids[begin : begin + CHANGED_RECORDS]]
                    results.append(await change(client, chunk))
                    done += len(chunk)
                    if sys.stderr.isatty():
                        print(f"\r{done:,} of {total:,} records", end="", file=sys.stderr, flush=True)
            return total

    total = run(work())
    if results and sys.stderr.isatty():
        print(file=sys.stderr)
    if dry_run:
        show_rows(output, [{"topic": topic, "records": total}], DRY_RUN_COLUMNS, empty="")
        return
    lists = {
        name: [record for one in results for record in getattr(one, name)] for name in CHANGE_COLUMNS[1:]
    }
    if output is Output.JSON:
        show_json({"topic": topic, **{name: [_name(one) for one in ids] for name, ids in lists.items()}})
    else:
        counts = {name: len(ids) for name, ids in lists.items()}
        show_rows(output, [{"topic": topic, **counts}], CHANGE_COLUMNS, empty="")
    if lists["unknown"]:
        raise typer.Exit(print_error(f"an answer was lost; not pending any more: {_names(lists['unknown'])}"))
    if selection.records and lists["not_pending"]:
        raise typer.Exit(print_error(f"not pending: {_names(lists['not_pending'])}"))


# -- output --------


def _name(record: tuple[int, int]) -> str:
    return f"{record[0]}:{record[1]}"


def _names(records: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(map(_name, records[:NAMED_RECORDS_MAX]))
    more = len(records) - NAMED_RECORDS_MAX
    return shown if more <= 0 else f"{shown} and {more:,} more"


def _table_row(record: PendingRecord) -> dict[str, Any]:
    return {
        "record": _name(record.record_id),
        "due": _format_time(record.due),
        "key": _shorten(record.key),
        "bytes": record.value_size,
        "value": f"unreadable: {record.error}" if record.error else _shorten(record.value),
    }


def _json_row(record: PendingRecord) -> dict[str, Any]:
    row: dict[str, Any] = {
        "record": _name(record.record_id),
        "partition": record.partition,
        "id": record.id,
        "due": _format_time(record.due),
        "timestamp_ms": record.timestamp_ms,
        "value_bytes": record.value_size,
        "error": record.error,
    }
    for name, content in (("key", record.key), ("value", record.value)):
        row[name], encoding = text_or_base64(content)
        if encoding:
            row[f"{name}_encoding"] = encoding
    row["headers"] = [{"name": name, "value": text_or_base64(value)[0]} for name, value in record.headers]
    return row


def _print_record(record: PendingRecord) -> None:
    left = record.due - datetime.now(UTC)
    seconds = round(abs(left.total_seconds()))
    span = timedelta(seconds=seconds)
    print(f"record     {_name(record.record_id)} of {record.topic}")
    print(f"due        {_format_time(record.due)} ({'in' if left > timedelta() else 'overdue for'} {span})")
    if record.error:
        print(f"unreadable {record.error}")
        return
    produced = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=max(0, record.timestamp_ms))
    print(f"timestamp  {_format_time(produced)}")
    print(f"key        {_text(record.key)}")
    for name, value in record.headers:
        print(f"header     {name}={_text(value)}")
    print(f"value      {_text(record.value)}")


def _format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shorten(content: bytes | None) -> str | None:
    text = text_or_base64(content)[0]
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS_MAX else f"{line[: SHOWN_CHARACTERS_MAX - 1]}…"


def _text(content: bytes | None) -> str:
    return text_or_base64(content)[0] or "-"
