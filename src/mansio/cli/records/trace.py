"""`mansio trace`: the history of a record."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    connect,
    parse_time_option,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from mansio.client.admin.record_search import SearchProgress
    from mansio.client.admin.traces import RecordTrace, TraceEvent

DEFAULT_TIMEOUT_MS: Final = 600_000

COLUMNS: Final = ("time", "event", "group", "attempt", "after", "who", "detail")

_RECORD: Final = re.compile(r"([^/]+)/(\d{1,9})/(\d{1,18})", re.ASCII)


def trace(
    record: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC[/PARTITION/OFFSET]",
            help="The record; with --key or --id, the topic in which to search.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Search the topic for the records with this key."),
    ] = None,
    record_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Search the topic for the record with this id, its header mansio-id."
        ),
    ] = None,
    last_failed: Annotated[
        str | None,
        typer.Option(
            "--last-failed",
            metavar="GROUP",
            help="The record that this share group has rejected, or given up after too many attempts, last.",
        ),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Search only this partition.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only records since this time: ISO 8601, or relative as -15m. An id is searched from ten minutes "
            "before its own time on.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only records until this time.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="End after so many records: 10 with --key, 1 with --id.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="End a search after this time.")
    ] = DEFAULT_TIMEOUT_MS / 1000,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show what has happened to a record: who published it, who had it, why it came back, and how long each step took.

    AFTER is the time since the event before it of the same group, or since the publication. Lines marked * are not
    from the trace: they say what the brokers know now. The last line says whether something may be missing, and why.

    With --key or --id the brokers read the log of the topic, with the lowest priority, and the timelines come as the
    records are found; with -o json, one object on each line. Exit code 1 if no record is found.
    """
    if key is not None or record_id is not None:
        if key is not None and record_id is not None:
            usage_error("give either a key or an id", "--key / --id")
        if record is None or "/" in record or last_failed is not None:
            usage_error("a search for a key or an id needs a topic", "TOPIC")
        query = _Query(
            record,
            key,
            record_id,
            partition,
            _moment(parse_time_option(since, "--since")),
            _moment(parse_time_option(until, "--until")),
            limit,
            timeout * 1000,
        )
        run(_search(query, bootstrap_servers, output))
        return
    if partition is not None or since is not None or until is not None or limit is not None:
        usage_error("they are for a search: give --key or --id", "--partition / --since / --until / --limit")
    if (record is None) == (last_failed is None):
        usage_error("name either a record or a group", "TOPIC/PARTITION/OFFSET / --last-failed")
    topic, index, offset = ("", -1, -1) if record is None else _parse(record)

    async def work() -> RecordTrace:
        async with connect(bootstrap_servers) as client:
            if last_failed is not None:
                return await client.admin.traces.last_failed(last_failed)
            return await client.admin.traces.record(topic, index, offset)

    found = run(work())
    if output is Output.JSON:
        show_json(json_of(found))
        return
    _show(found)


class _Query(NamedTuple):
    """Arguments of a search."""

    topic: str
    key: str | None
    record_id: str | None
    partition: int | None
    since: datetime | None
    until: datetime | None
    limit: int | None
    timeout_ms: float


async def _search(query: _Query, bootstrap_servers: str, output: Output) -> None:
    progress: SearchProgress | None = None
    count = 0
    line = _ProgressLine()

    def show_progress(now: SearchProgress) -> None:
        nonlocal progress
        progress = now
        line.show(_progress_text(now))

    async with connect(bootstrap_servers) as client:
        traces = client.admin.traces
        try:
            async for found in traces.find(**query._asdict(), on_progress=show_progress):
                timeline = await traces.record(found.topic, found.partition, found.offset)
                line.clear()
                if output is Output.JSON:
                    print(json.dumps(json_of(timeline), ensure_ascii=False, default=str), flush=True)
                else:
                    if count:
                        print()
                    _show(timeline)
                count += 1
        finally:
            line.clear()
    for each in () if progress is None else progress.skipped:
        print(
            f"not searched: {query.topic}/{each.partition}, offsets {each.first_offset} to {each.end_offset - 1}: "
            f"{each.reason}",
            file=sys.stderr,
        )
    if not count:
        what = f"the key {query.key!r}" if query.record_id is None else f"the id {query.record_id!r}"
        print(f"no record of topic {query.topic!r} with {what}", file=sys.stderr)
        raise typer.Exit(1)


class _ProgressLine:
    """The last line of a terminal, on standard error; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._is_shown = False
        self._is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False


def _progress_text(now: SearchProgress) -> str:
    searched, left = now.searched_bytes / (1 << 20), now.left_bytes / (1 << 20)
    done = f"{now.finished_partitions} of {now.partitions} partitions"
    return f"{searched:,.0f} MiB searched, {left:,.0f} MiB left; {done}"


def _moment(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)


def _show(found: RecordTrace) -> None:
    """Print a timeline."""
    stored = f"{found.size_bytes:,} bytes" if found.is_stored else "not in the log"
    print(f"{found.topic}/{found.partition}/{found.offset}, {stored}")
    show_table(COLUMNS, [_row(each) for each in found.events])
    if found.total_ms is not None:
        print(f"total: {_duration(found.total_ms)}")
    print("certain: nothing is missing" if found.certain else "uncertain:")
    for text in found.uncertainties:
        print(f"  {text}")


def _parse(text: str) -> tuple[str, int, int]:
    match = _RECORD.fullmatch(text)
    if match is None:
        _refuse(text)
    topic, partition, offset = match.groups()
    return topic, int(partition), int(offset)


def _refuse(text: str) -> NoReturn:
    usage_error(f"{text[:80]!r} is not TOPIC/PARTITION/OFFSET, such as orders/0/17", "TOPIC/PARTITION/OFFSET")


def _row(event: TraceEvent) -> list[str]:
    return [
        "-" if event.time is None else _local(event.time),
        f"{event.kind} *" if event.is_computed else event.kind,
        event.group or "-",
        str(event.attempt) if event.attempt else "-",
        "-" if event.wait_ms is None else _duration(event.wait_ms),
        event.who or "-",
        event.detail or "-",
    ]


def _local(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


def _duration(milliseconds: int) -> str:
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    seconds = milliseconds / 1_000
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def json_of(found: RecordTrace) -> dict[str, Any]:
    """Return the timeline as the JSON output has it."""
    result = asdict(found)
    result["events"] = [{**asdict(each), "time": _iso(each.time)} for each in found.events]
    result["timestamp"] = _iso(found.timestamp)
    return result


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
