"""`mansio pipeline backfill FILE`: a user's function over the records of a time range, into a table.

Invariants:
* A killed command leaves the table unchanged; a repeated one replaces the rows of its range.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.archive_options import CatalogOption, print_open_elsewhere
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    parse_name_values,
    parse_time,
    parse_time_option,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_json
from mansio.cli.support.pipeline_options import (
    InputTopicsOption,
    PartitionByOption,
    PipelineFileArgument,
    PipelineNameOption,
    SortByOption,
    ToTableOption,
    table_target,
)
from mansio.cli.support.value_formats import (
    KeyFormatOption,
    KeyMessageOption,
    KeySchemaOption,
    SchemaRegistryOption,
    ValueFormatOption,
    ValueMessageOption,
    ValueSchemaOption,
    decoding_options,
)

if TYPE_CHECKING:
    from mansio.pipelines.backfilling.backfill import BackfillReport


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("backfill")(backfill)


def backfill(
    file: PipelineFileArgument,
    from_time: Annotated[
        str,
        typer.Option(
            "--from-time", "--from", metavar="TIME", help="Only records with at least this timestamp."
        ),
    ],
    to_time: Annotated[
        str,
        typer.Option("--to-time", "--to", metavar="TIME", help="Only records with an earlier timestamp."),
    ],
    to_table: Annotated[str, ToTableOption],
    topic: InputTopicsOption = None,
    whole_topic: Annotated[
        list[str] | None,
        typer.Option(
            "--whole-topic",
            metavar="TOPIC",
            help="Read this input from its beginning, as for a table that is joined; repeatable.",
        ),
    ] = None,
    warehouse: Annotated[
        str | None,
        typer.Option(
            "--warehouse",
            "-w",
            metavar="DIR",
            help="Directory of the archives of the topics, and of tables that are in no configured catalog.",
        ),
    ] = None,
    partition_by: PartitionByOption = None,
    sort_by: SortByOption = None,
    name: PipelineNameOption = None,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Continue if records of the range may have been deleted."),
    ] = False,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend",
            help="Replace the rows of earlier ranges that this one contains, as of the same range with an earlier end.",
        ),
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Additional options of the source; repeatable."),
    ] = None,
    value_format: ValueFormatOption = None,
    value_schema: ValueSchemaOption = None,
    value_message: ValueMessageOption = None,
    key_format: KeyFormatOption = None,
    key_schema: KeySchemaOption = None,
    key_message: KeyMessageOption = None,
    schema_registry: SchemaRegistryOption = None,
    conf: ConfOption = None,
    catalog: CatalogOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Apply your function to the records of a time range, as a batch, and write the result to an Iceberg table.

    Reads the log, united with the topic's archive if the warehouse has one. The rows of the range appear in one commit;
    repeating the command replaces them, --extend those of a shorter range. Other ranges can be added to the same table
    as long as they do not overlap.
    """
    from_ms, to_ms = parse_time_option(from_time, "--from-time"), parse_time_option(to_time, "--to-time")
    assert from_ms is not None
    assert to_ms is not None
    if from_ms >= to_ms:
        usage_error("must be later than --from-time", "--to-time")
    if to_ms > parse_time("now"):
        usage_error(
            "must not be in the future, because records that arrive later would be missing", "--to-time"
        )

    from mansio.host.extras import require_extra

    require_extra("spark")
    options = dict(parse_name_values(option or (), "--option"))
    options |= decoding_options(
        topic or (),
        value_format=value_format,
        value_schema=value_schema,
        value_message=value_message,
        key_format=key_format,
        key_schema=key_schema,
        key_message=key_message,
        schema_registry=schema_registry,
    )
    from mansio.pipelines.pipeline_file import load_pipeline_file
    from mansio.spark.cluster.problems import SharedDirectory

    load_pipeline_file(file)  # report errors of the file and of the options before Spark starts
    table = table_target(to_table, warehouse, partition_by, sort_by)
    called = name or Path(file).stem
    from mansio.iceberg.result_table.backfill_ranges import TimeRange
    from mansio.pipelines.backfilling.backfilled_table import check_backfill

    times = TimeRange(from_ms, to_ms)
    settings = dict(parse_name_values(conf or (), "--conf"))
    check_backfill(table, called, tuple(topic or ()), times, settings, extends=extend)
    spark = start_session(
        master,
        f"mansio backfill {called}",
        remote=remote,
        bootstrap_servers=bootstrap_servers,
        directories=[SharedDirectory("warehouse", warehouse, "--warehouse")] if warehouse else [],
        skip_check=skip_check,
        conf=conf,
    )
    from mansio.pipelines.backfilling.backfill import BackfillJob
    from mansio.pipelines.backfilling.backfill import backfill as run_backfill

    job = BackfillJob(
        file=file,
        name=called,
        bootstrap_servers=bootstrap_servers,
        times=times,
        table=table,
        warehouse=warehouse,
        inputs=tuple(topic or ()),
        catalog=catalog,
        whole_topics=tuple(whole_topic or ()),
        accept_loss=accept_loss,
        extends=extend,
        options=options,
    )
    report = run_backfill(spark, job)
    _show(report, output)
    print_open_elsewhere(report.table.iceberg)


def _show(report: BackfillReport, output: Output) -> None:
    if output is Output.JSON:
        show_json(
            {
                "table": str(report.table.name),
                "pipeline": report.range.pipeline,
                "from_ms": report.range.times.from_ms,
                "to_ms": report.range.times.to_ms,
                "topics": report.sources,
                "rows": report.rows,
                "files": report.files,
                "replaced_files": report.replaced_files,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    sources = ", ".join(f"{topic} ({source})" for topic, source in sorted(report.sources.items()))
    replaced = f", in place of {count_text(report.replaced_files, 'file')}" if report.replaced_files else ""
    written = (
        f"{count_text(report.rows, 'row')} of {report.range.times} in {count_text(report.files, 'file')}"
    )
    print(f"{report.table.name}: {written}{replaced}; from {sources}")
