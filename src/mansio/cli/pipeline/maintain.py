"""`mansio pipeline maintain`: rewrites small files of an archive, expires snapshots and deletes orphan files."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.archive_options import CatalogOption, WarehouseOption, open_archive
from mansio.cli.support.common import parse_duration_s, usage_error
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from mansio.spark.jobs.maintain import MaintenanceReport

SIZE_PATTERN = re.compile(r"(\d+)\s*(|K|M|G)i?B?", re.IGNORECASE)
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TARGET_BYTES_MIN = 1 << 20
GRACE_S_MIN = 600


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("maintain")(maintain)


def maintain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic of the archive.")],
    warehouse: WarehouseOption,
    catalog: CatalogOption = None,
    target_size: Annotated[
        str, typer.Option("--target-size", metavar="SIZE", help="Target size of files.")
    ] = "256MB",
    keep: Annotated[
        int,
        typer.Option(
            "--keep", min=1, metavar="N", help="Number of snapshots to keep, in addition to tagged ones."
        ),
    ] = 10,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Time for which a file must have been unreferenced before it is deleted.",
        ),
    ] = "1h",
    force: Annotated[
        bool,
        typer.Option("--force", help="Allow a grace time below 10m, which may break slow readers."),
    ] = False,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            metavar="NAME",
            help="Tag the current state of the table; a tagged snapshot is kept permanently.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rewrite small files of an archive, expire snapshots, delete orphan files.

    Runs concurrently with the archive and its readers. Files are deleted by the first run that finds them unreferenced
    for the grace time, so run it regularly.
    """
    target_bytes, grace_s = _parse_size(target_size), parse_duration_s(grace, "--grace")
    if grace_s < GRACE_S_MIN and not force:
        usage_error("below 10m a running reader or batch may lose its files; --force allows it", "--grace")
    table = open_archive(topic, warehouse, catalog)
    from mansio.spark.jobs.maintain import maintain as run_maintenance

    report = run_maintenance(table, target_bytes=target_bytes, snapshots_kept=keep, grace_s=grace_s, tag=tag)
    if output is Output.JSON:
        show_json({"table": table.name, **asdict(report)})
    else:
        show_table(("what", "count", "bytes"), _rows(report))


def _rows(report: MaintenanceReport) -> list[tuple[str, str, str]]:
    rewritten, swept = report.rewritten, report.swept
    return [
        ("files rewritten", str(rewritten.files_replaced), str(rewritten.bytes_before)),
        ("into files", str(rewritten.files_written), str(rewritten.bytes_after)),
        ("manifests before", str(rewritten.manifests_before), "-"),
        ("manifests now", str(rewritten.manifests_after), "-"),
        ("snapshots expired", str(swept.snapshots_expired), "-"),
        ("files deleted", str(swept.files_deleted), str(swept.bytes_deleted)),
        ("files waiting for the grace time", str(swept.files_waiting), str(swept.bytes_waiting)),
        ("files in the table now", str(report.files), str(report.bytes)),
        ("records", str(report.rows), "-"),
    ]


def _parse_size(text: str) -> int:
    """Parse a size such as 256MB, in bytes; units are powers of 1,024."""
    found = SIZE_PATTERN.fullmatch(text.strip())
    size = int(found[1]) * SIZE_UNITS[found[2].upper()] if found else 0
    if size < TARGET_BYTES_MIN:
        usage_error(f"{text!r} is not a size of at least 1MB; example: 256MB", "--target-size")
    return size
