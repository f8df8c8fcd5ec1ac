"""`mansio pipeline replay`: writes archived records to a topic again, including deleted ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.archive_options import (
    CatalogOption,
    WarehouseOption,
    open_archive,
    parse_version_option,
    select_records,
)
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    RELATIVE_TIME_PATTERN,
    BootstrapServersOption,
    PartitionsOption,
    parse_time_option,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_rows

if TYPE_CHECKING:
    from collections.abc import Callable

REPLAY_COLUMNS = ("topic", "partition", "there_already", "written")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("replay")(replay)


def replay(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic whose archive is replayed.")],
    warehouse: WarehouseOption,
    to: Annotated[
        str, typer.Option("--to", metavar="TOPIC", help="The target topic; created if it does not exist.")
    ],
    from_snapshot: Annotated[
        str,
        typer.Option(
            "--from-snapshot",
            metavar="ID|DATE",
            help="Version of the archive: a snapshot's id, a tag, or a time.",
        ),
    ] = "now",
    from_time: Annotated[
        str | None,
        typer.Option("--from-time", metavar="TIME", help="Only records with at least this timestamp."),
    ] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", metavar="TIME", help="Only records with an earlier timestamp.")
    ] = None,
    partition: PartitionsOption = None,
    include_deleted: Annotated[
        bool, typer.Option("--include-deleted", help="Include records that the topic has deleted since.")
    ] = False,
    catalog: CatalogOption = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Write archived records to a topic again, in order, each with its key, headers, timestamp and partition.

    A repeated run adds nothing, and an interrupted one resumes: records that the target already has, in order, are not
    written again. Without --include-deleted only records that TOPIC itself still has are written.
    """
    from_ms, to_ms = parse_time_option(from_time, "--from-time"), parse_time_option(to_time, "--to-time")
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        usage_error("must be later than --from-time", "--to-time")
    if to == topic and RELATIVE_TIME_PATTERN.fullmatch(from_snapshot):
        usage_error(
            "a replay into the topic itself requires a fixed version, because a relative time would include the copies"
            " in a later run; give a date, a snapshot's id or a tag",
            "--from-snapshot",
        )
    table = open_archive(topic, warehouse, catalog)
    from mansio.pipelines.replay import replay as run_replay

    report = run_replay(
        table,
        bootstrap_servers,
        to,
        select_records(partition, from_ms, to_ms),
        version=parse_version_option(table, from_snapshot, "--from-snapshot"),
        include_deleted=include_deleted,
        progress=_progress() if sys.stderr.isatty() else None,
    )
    rows = [
        {
            "topic": to,
            "partition": one.partition,
            "there_already": one.already_present,
            "written": one.written,
        }
        for one in report.partitions
    ]
    show_rows(output, rows, REPLAY_COLUMNS, empty="the archive has no such records")


def _progress() -> Callable[[int], None]:
    """Return a function that adds the number of records replayed since its last call, and shows the total on a
    terminal; 0 ends the line."""
    written = 0

    def show(count: int) -> None:
        nonlocal written
        written += count
        print(
            f"\r{count_text(written, 'record')} replayed",
            end="" if count else "\n",
            file=sys.stderr,
            flush=True,
        )

    return show
