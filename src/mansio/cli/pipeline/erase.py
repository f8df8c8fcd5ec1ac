"""`mansio pipeline erase TOPIC`: removes all archived records of keys, without Spark.

Invariants:
* The log and the dead-letter topics are not changed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.archive_options import CatalogOption, WarehouseOption, open_archive
from mansio.cli.support.common import parse_duration_s, usage_error
from mansio.cli.support.formatting import Output, OutputOption, format_cell, show_json, show_table

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_S_MIN = 600
ERASE_COLUMNS = ("table", "rows", "files", "snapshots_expired", "files_deleted", "files_waiting")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("erase")(erase)


def erase(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic whose archive is changed.")],
    warehouse: WarehouseOption,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", "-k", metavar="KEY", help="Erase the records with this key; repeatable."),
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option(
            "--keys-file", metavar="FILE", help="Erase the records with the keys in this file, one per line."
        ),
    ] = None,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="DURATION",
            help="Time for which a file must have been unreferenced before it is deleted.",
        ),
    ] = "1h",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Allow a grace time below 10m, for which no archive job and no reader may run."
        ),
    ] = False,
    drop_tags: Annotated[
        bool, typer.Option("--drop-tags", help="Remove the tags of the tables, which would keep old rows.")
    ] = False,
    drop_damaged: Annotated[
        bool,
        typer.Option(
            "--drop-damaged",
            help="Erase all damaged record batches of the dead-letter table: they may contain a key.",
        ),
    ] = False,
    catalog: CatalogOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Erase all records of keys from the archive of a topic, its dead-letter table, and its compacted tables.

    Rewrites the affected files, and expires all older snapshots. The replaced files are deleted after --grace: repeat
    the command then, until FILES WAITING is 0. Before, produce a tombstone for each key and archive it; compaction then
    removes the keys from the log itself.
    """
    keys = [os.fsencode(one) for one in key or ()] + _read_keys(keys_file)
    if not keys:
        usage_error("give at least one key", "--key / --keys-file")
    grace_s = parse_duration_s(grace, "--grace")
    if grace_s < GRACE_S_MIN and not force:
        usage_error(
            "is below 10m, which may break a running archive or slow readers: stop them, and give --force",
            "--grace",
        )
    archive = open_archive(topic, warehouse, catalog)
    from mansio.pipelines.erase import erase as run_erasure

    report = run_erasure(
        archive,
        keys,
        grace_s=grace_s,
        drop_tags=drop_tags,
        drop_damaged=drop_damaged,
        progress=_progress(),
    )
    if output is Output.JSON:
        show_json(asdict(report))
    else:
        rows = [[format_cell(getattr(one, column)) for column in ERASE_COLUMNS] for one in report.tables]
        show_table(ERASE_COLUMNS, rows)
    if report.damaged_batches:
        print(
            f"{report.damaged_batches:,} damaged record batches remain in the dead-letter table, and compressed ones"
            " may contain a key: --drop-damaged",
            file=sys.stderr,
        )
    if report.files_waiting:
        print(
            f"{report.files_waiting:,} replaced files are deleted by a run after the grace time of {grace}",
            file=sys.stderr,
        )


def _read_keys(path: str | None) -> list[bytes]:
    if path is None:
        return []
    with open(path, "rb") as file:
        return [line for line in file.read().splitlines() if line]


def _progress() -> Callable[[str, int, int], None]:
    """Return a function that prints the number of searched files on a terminal."""
    if not sys.stderr.isatty():
        return lambda _table, _searched, _all: None
    return lambda table, searched, count: print(
        f"\r{table}: {searched:,} of {count:,} files",
        end="\n" if searched == count else "",
        file=sys.stderr,
        flush=True,
    )
