"""Where an archive is: the options of every command that reads or keeps one, and how its table is opened for them.

Always true: importing this costs typer only; the table's libraries are loaded when a command opens one.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mansio.spark.lake.catalog import LakeTable
    from mansio.spark.lake.moments import Moment
    from mansio.spark.lake.scan import Selection

WarehouseOption = Annotated[
    str,
    typer.Option(
        "--warehouse",
        "-w",
        metavar="DIR",
        help="Where the archive's files are: a directory, or an address such as s3://bucket/path.",
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


def open_archive(topic: str, warehouse: str, catalog: str | None) -> LakeTable:
    """The archive of a topic. Raises `LakeNotInstalled`, `TableNotFound` and what else `open_table` does."""
    try:
        import pyiceberg  # noqa: F401  # only to see whether it is there
    except ImportError:
        from mansio.spark.lake.errors import LakeNotInstalled

        raise LakeNotInstalled from None
    from mansio.spark.lake.catalog import open_table

    return open_table(catalog, warehouse, topic)


def moment_option(table: LakeTable, text: str, name: str) -> Moment:
    """`--from-snapshot`: a snapshot's id, a tag, or a time; exit code 2 on nonsense. Says on standard error which time
    the archive knows of, if that is not the newest."""
    from mansio.cli.common import parse_time, refuse
    from mansio.spark.lake.moments import find_moment

    try:
        moment = find_moment(table, text, parse_time)
    except (ValueError, OverflowError):
        refuse(f"{text!r} is no snapshot's id, tag or time; try 2013-11-21T10:30:00Z, -2h, now", name)
    if moment.ends is not None:
        at = datetime.fromtimestamp(moment.at_ms / 1000, UTC).isoformat(timespec="seconds")
        print(f"the archive as it was at {at}", file=sys.stderr)
    return moment


def selection_option(
    partitions: list[int] | None, from_ms: int | None = None, to_ms: int | None = None
) -> Selection:
    """Records of these partitions (all if none are named) and of times from the first up to the second."""
    from mansio.spark.lake.scan import Selection

    return Selection(
        partitions=frozenset(partitions) if partitions else None,
        from_us=None if from_ms is None else from_ms * 1000,
        to_us=None if to_ms is None else to_ms * 1000,
    )
