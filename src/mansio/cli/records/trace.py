"""`mansio trace`: the history of a record."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    connect,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from datetime import datetime

    from mansio.client.admin.traces import RecordTrace, TraceEvent

COLUMNS: Final = ("time", "event", "group", "attempt", "after", "who", "detail")

_RECORD: Final = re.compile(r"([^/]+)/(\d{1,9})/(\d{1,18})", re.ASCII)


def trace(
    record: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The record.", show_default=False),
    ] = None,
    last_failed: Annotated[
        str | None,
        typer.Option(
            "--last-failed",
            metavar="GROUP",
            help="The record that this share group has rejected, or given up after too many attempts, last.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show what has happened to a record: who published it, who had it, why it came back, and how long each step took.

    AFTER is the time since the event before it of the same group, or since the publication. Lines marked * are not
    from the trace: they say what the brokers know now. The last line says whether something may be missing, and why.
    """
    if (record is None) == (last_failed is None):
        usage_error("name either a record or a group", "TOPIC/PARTITION/OFFSET / --last-failed")
    topic, partition, offset = ("", -1, -1) if record is None else _parse(record)

    async def work() -> RecordTrace:
        async with connect(bootstrap_servers) as client:
            if last_failed is not None:
                return await client.admin.traces.last_failed(last_failed)
            return await client.admin.traces.record(topic, partition, offset)

    found = run(work())
    if output is Output.JSON:
        show_json(json_of(found))
        return
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
