"""Options of the commands that use an archive, and access to its table.

Invariants:
* Importing this module imports only typer and the standard library; the table's libraries are imported when a table
  is opened.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_scan import Selection
    from mansio.iceberg.archive.time_travel import TableVersion

WarehouseOption = Annotated[
    str,
    typer.Option(
        "--warehouse",
        "-w",
        metavar="DIR",
        help="Location of the archive: a directory, or an address such as s3://bucket/path.",
    ),
]
CatalogOption = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="URI",
        help="The Iceberg catalog: http(s)://... of a REST catalog. [default: a SQLite file in the warehouse]",
    ),
]


def open_archive(topic: str, warehouse: str, catalog: str | None) -> ArchiveTable:
    """Return the archive of a topic. Raises `MissingExtra`, `TableNotFound` and the errors of `open_table`."""
    from mansio.host.extras import require_extra

    require_extra("iceberg")
    from mansio.iceberg.archive.table import open_table

    return open_table(catalog, warehouse, topic)


def print_open_elsewhere(table: Table) -> None:
    """Print how other engines open a table, to standard error."""
    from mansio.iceberg.archive.open_elsewhere import open_elsewhere

    print("Open the table elsewhere:", *open_elsewhere(table), sep="\n  ", file=sys.stderr)


def parse_version_option(table: ArchiveTable, text: str, name: str) -> TableVersion:
    """Find the version that the option `name` selects by a snapshot's id, a tag, or a time; exit code 2 if invalid. If
    the version was found by time, prints its time to standard error.
    """
    from mansio.cli.support.common import parse_time, usage_error
    from mansio.iceberg.archive.time_travel import find_version

    try:
        version = find_version(table, text, parse_time)
    except (ValueError, OverflowError):
        usage_error(
            f"{text!r} is not a snapshot's id, tag or time; examples: 2013-11-21T10:30:00Z, -2h, now", name
        )
    if version.ends is not None:
        at = datetime.fromtimestamp(version.at_ms / 1000, UTC).isoformat(timespec="seconds")
        print(f"the archive as it was at {at}", file=sys.stderr)
    return version


def select_records(
    partitions: list[int] | None, from_ms: int | None = None, to_ms: int | None = None
) -> Selection:
    """Select the records of these partitions (all if none are given) with timestamps in [`from_ms`, `to_ms`)."""
    from mansio.iceberg.archive.table_scan import Selection

    return Selection(
        partitions=frozenset(partitions) if partitions else None,
        from_us=None if from_ms is None else from_ms * 1000,
        to_us=None if to_ms is None else to_ms * 1000,
    )
