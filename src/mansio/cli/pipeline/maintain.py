"""`mansio pipeline maintain`: rewrites small files of a table, expires its snapshots and deletes orphan files."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.archive_options import CatalogOption, open_archive
from mansio.cli.support.common import parse_duration_s, parse_name_values, usage_error
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from mansio.pipelines.maintain import MaintenanceReport

SIZE_PATTERN = re.compile(r"(\d+)\s*(|K|M|G)i?B?", re.IGNORECASE)
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TARGET_BYTES_MIN = 1 << 20
GRACE_S_MIN = 600


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("maintain")(maintain)


def maintain(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="The topic of the archive.")] = None,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="[[CATALOG.]NAMESPACE.]TABLE",
            help="A table of run --to-table or backfill, instead of an archive. Without CATALOG it is in --warehouse.",
        ),
    ] = None,
    warehouse: Annotated[
        str | None,
        typer.Option(
            "--warehouse",
            "-w",
            metavar="DIR",
            help="Location of the archive, a directory or an address such as s3://bucket/path; directory of the table.",
        ),
    ] = None,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done now, and change nothing.")
    ] = False,
    conf: ConfOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rewrite small files of an archive or a result table, expire snapshots, delete orphan files.

    Runs concurrently with pipelines and readers. Files are deleted by the first run that finds them unreferenced
    for the grace time, so run it regularly. With --master or --remote, tasks of Spark rewrite the files of a result
    table; otherwise this process does.
    """
    target_bytes, grace_s = _parse_size(target_size), parse_duration_s(grace, "--grace")
    if grace_s < GRACE_S_MIN and not force:
        usage_error("below 10m a running reader or batch may lose its files; --force allows it", "--grace")
    if (topic is None) == (table is None):
        usage_error("give one of them", "TOPIC / --table")
    if table is not None:
        if catalog is not None:
            usage_error(
                "it belongs to an archive; --table CATALOG.NAMESPACE.TABLE names a catalog", "--catalog"
            )
        name, report = _maintain_table(
            table,
            warehouse,
            _Options(target_bytes, keep, grace_s, tag, dry_run),
            _Session(master, remote, skip_check, tuple(conf or ())),
        )
    else:
        assert topic is not None
        if warehouse is None:
            usage_error("an archive has one", "--warehouse")
        archive = open_archive(topic, warehouse, catalog)
        from mansio.pipelines.maintain import maintain as run_maintenance

        name = archive.name
        report = run_maintenance(
            archive,
            target_bytes=target_bytes,
            snapshots_kept=keep,
            grace_s=grace_s,
            tag=tag,
            is_dry_run=dry_run,
        )
    if output is Output.JSON:
        show_json({"table": name, "dry_run": dry_run, **asdict(report)})
    else:
        show_table(("what", "count", "bytes"), _rows(report, is_dry_run=dry_run))


class _Options(NamedTuple):
    """Options of the maintenance of a result table."""

    target_bytes: int
    snapshots_kept: int
    grace_s: float
    tag: str | None
    is_dry_run: bool


class _Session(NamedTuple):
    """The Spark session whose tasks rewrite files; none without `master` and `remote`."""

    master: str | None
    remote: str | None
    skip_check: bool
    conf: tuple[str, ...]


def _maintain_table(
    name: str, warehouse: str | None, options: _Options, session: _Session
) -> tuple[str, MaintenanceReport]:
    from mansio.host.extras import require_extra

    require_extra("spark")
    from mansio.iceberg.result_table.table import open_existing_table
    from mansio.pipelines.table_maintenance import maintain_table
    from mansio.spark.cluster.problems import SharedDirectory

    table = open_existing_table(name, warehouse, dict(parse_name_values(session.conf, "--conf")))
    spark = None
    if (session.master or session.remote) and not options.is_dry_run:
        spark = start_session(
            session.master,
            f"mansio maintain {name}",
            remote=session.remote,
            directories=[SharedDirectory("warehouse", warehouse, "--warehouse")] if warehouse else [],
            skip_check=session.skip_check,
            conf=session.conf,
        )
    report = maintain_table(table, **options._asdict(), spark=spark, progress=_print_progress)
    return str(table.name), report


def _print_progress(merged: int, count: int) -> None:
    print(f"rewrote {merged:,} of {count:,} files", file=sys.stderr, flush=True)


def _rows(report: MaintenanceReport, *, is_dry_run: bool) -> list[tuple[str, str, str]]:
    rewritten, swept = report.rewritten, report.swept
    if is_dry_run:
        return [
            ("files to rewrite", str(rewritten.files_replaced), str(rewritten.bytes_before)),
            ("into files", str(rewritten.files_written), "-"),
            ("manifests", str(rewritten.manifests_before), "-"),
            ("snapshots to expire", str(swept.snapshots_expired), "-"),
            ("files to delete", str(swept.files_deleted), str(swept.bytes_deleted)),
            ("files waiting for the grace time", str(swept.files_waiting), str(swept.bytes_waiting)),
            ("files in the table", str(report.files), str(report.bytes)),
            ("rows", str(report.rows), "-"),
        ]
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
