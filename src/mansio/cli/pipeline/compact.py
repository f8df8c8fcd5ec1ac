"""`mansio pipeline compact TOPIC`: the latest record of each key of an archive, as a separate table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.archive_options import (
    CatalogOption,
    WarehouseOption,
    open_archive,
    print_open_elsewhere,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("compact")(compact)


def compact(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic whose archive is compacted.")],
    warehouse: WarehouseOption,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TABLE", help="The table for the result. [default: TOPIC-latest]"),
    ] = None,
    catalog: CatalogOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    conf: ConfOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a table with the latest record of each key of an archive.

    The table is in the archive's catalog. Each run replaces its content in one commit; readers see the rows of one run
    or the other. It does not contain keys whose latest record has no value, nor records without a key.
    """
    archive = open_archive(topic, warehouse, catalog)

    from mansio.spark.cluster.problems import SharedDirectory

    spark = start_session(
        master,
        f"mansio compact {topic}",
        remote=remote,
        directories=[SharedDirectory("warehouse", warehouse, "--warehouse")],
        skip_check=skip_check,
        conf=conf,
    )
    from mansio.pipelines.compact import compact as run_compaction

    report = run_compaction(spark, archive, to or f"{topic}-latest")
    print_open_elsewhere(archive.iceberg.catalog.load_table(tuple(report.table.split(".", 1))))
    if output is Output.JSON:
        show_json({**asdict(report), "offsets": {str(one): at for one, at in sorted(report.offsets.items())}})
        return
    rows = [
        ("records read", f"{report.records:,}"),
        ("records without a key", f"{report.without_key:,}"),
        ("keys deleted", f"{report.deleted_keys:,}"),
        ("keys in the table", f"{report.keys:,}"),
        ("files", f"{report.files:,}"),
    ]
    print(f"{report.table}, from {archive.name}")
    show_table(("what", "count"), rows)
