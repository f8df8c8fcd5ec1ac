"""`mansio pipeline run FILE`: a user's function on DataFrames, from topics to a topic, an Iceberg table or a directory.

Invariants:
* The command can be stopped or killed at any time and restarted with the same arguments.
* Progress goes to standard error, the result to standard output.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.archive_options import print_open_elsewhere
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    parse_name_values,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_json
from mansio.cli.support.metrics_option import MetricsOption, serve_metrics
from mansio.cli.support.pipeline_options import (
    InputTopicsOption,
    PartitionByOption,
    PipelineFileArgument,
    PipelineNameOption,
    SortByOption,
    ToTableOption,
    lag_text,
    print_batch,
    print_running_batch,
    table_target,
)
from mansio.cli.support.signals import StopSignals
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
    from mansio.pipelines.run import PipelineResult


TRIGGER_INTERVAL_S: Final = 1.0
TABLE_TRIGGER_INTERVAL_S: Final = 60.0
KEYED_RECORDS_MAX: Final = 1_000_000
"""Default maximum of records in a batch that is upserted: tasks hold the keys of a batch in memory."""


class StartPosition(StrEnum):
    """Start position of a pipeline without a checkpoint."""

    EARLIEST = "earliest"
    LATEST = "latest"


class OnNullKey(StrEnum):
    """What to do with rows without a key."""

    SUSPEND = "suspend"
    SKIP = "skip"
    DEAD_LETTER = "dead-letter"


class OutputMode(StrEnum):
    """Spark's output modes that a target supports."""

    APPEND = "append"
    UPDATE = "update"


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("run")(run)


def run(
    file: PipelineFileArgument,
    topic: InputTopicsOption = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Write to this topic; created if it does not exist."),
    ] = None,
    at_least_once: Annotated[
        bool,
        typer.Option(
            "--at-least-once",
            help="Into a topic: readers see records before their batch is complete, and those of a batch that a crash"
            " repeats twice.",
        ),
    ] = False,
    to_table: Annotated[str | None, ToTableOption] = None,
    to_path: Annotated[
        str | None,
        typer.Option("--to-path", metavar="DIR", help="Write Parquet files to this directory."),
    ] = None,
    warehouse: Annotated[
        str | None,
        typer.Option(
            "--warehouse",
            "-w",
            metavar="DIR",
            help="Directory of the tables that are in no configured catalog.",
        ),
    ] = None,
    partition_by: PartitionByOption = None,
    sort_by: SortByOption = None,
    rename_column: Annotated[
        list[str] | None,
        typer.Option(
            "--rename-column", metavar="OLD=NEW", help="Rename a column of the table first; repeatable."
        ),
    ] = None,
    name: PipelineNameOption = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="DIR",
            help="Checkpoint directory; on a cluster a shared location. [default: checkpoints/NAME]",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Process the current records, then end.")] = False,
    trigger: Annotated[
        float | None,
        typer.Option(
            "--trigger",
            min=0,
            metavar="SECONDS",
            help="Minimum interval between batches. [default: 1; 60 into an Iceberg table]",
        ),
    ] = None,
    start: Annotated[
        StartPosition, typer.Option("--from", help="Start position without a checkpoint.")
    ] = StartPosition.EARLIEST,
    share_group: Annotated[
        str | None,
        typer.Option(
            "--share-group",
            metavar="GROUP",
            help="Process the records of this share group one by one: leased, retried and dead-lettered by row.",
        ),
    ] = None,
    records_max: Annotated[
        int | None,
        typer.Option(
            "--max-records",
            min=1,
            metavar="N",
            help="Maximum number of records in one batch, of all inputs together: the oldest by timestamp. [default:"
            " none; 1000000 with --key]",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit code 1 if rows were dropped because they were older than the watermark when they were read.",
        ),
    ] = False,
    mode: Annotated[
        OutputMode,
        typer.Option(
            "--mode",
            help="append: final rows; update: changed rows, which into a table replace those of their --key.",
        ),
    ] = OutputMode.APPEND,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="COLUMNS", help="Columns of the table's key, for --mode update."),
    ] = None,
    order_by: Annotated[
        str | None,
        typer.Option(
            "--order-by",
            metavar="COLUMNS",
            help="Columns that decide which row of a key is the last in a batch. [default: the order of the rows]",
        ),
    ] = None,
    on_null_key: Annotated[
        OnNullKey,
        typer.Option(
            "--on-null-key",
            help="Rows without a key: suspend ends the run; skip omits them; dead-letter writes them to the table"
            " TABLE_dead_letters.",
        ),
    ] = OnNullKey.SUSPEND,
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
    metrics: MetricsOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Run your function on DataFrames: records of topics in, a topic, an Iceberg table or Parquet files out.

    Resumes from its checkpoint. Output is exactly-once. Readers of a topic with read_committed, the default of most
    clients, see a batch when it is complete. Into a topic, a result without a column value is written as JSON of its
    columns. A table gets new columns of the result, and wider types. While it runs, and until `mansio
    pipeline release`, the broker retains unread records. Ctrl-C and SIGTERM let the running batch complete.
    """
    if sum(one is not None for one in (to, to_table, to_path)) != 1:
        usage_error("give one of them", "--to / --to-table / --to-path")
    if to_table is None and any((warehouse, partition_by, sort_by, rename_column, key, order_by)):
        usage_error(
            "they belong to --to-table",
            "--warehouse / --partition-by / --sort-by / --rename-column / --key / --order-by",
        )
    if at_least_once and to is None:
        usage_error("it belongs to --to", "--at-least-once")
    if to_path is not None and mode is OutputMode.UPDATE:
        usage_error("files cannot be updated: use --to or --to-table", "--mode")
    if to_table is not None and (mode is OutputMode.UPDATE) != (key is not None):
        usage_error("rows are updated by key: give both --mode update and --key", "--mode / --key")
    if share_group is not None and mode is OutputMode.UPDATE and to_table is None:
        usage_error("records of a share group are processed one by one: use append", "--mode")
    if key is None and (order_by is not None or on_null_key is not OnNullKey.SUSPEND):
        usage_error("they belong to --key", "--order-by / --on-null-key")
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
    called = name or Path(file).stem
    renames = dict(parse_name_values(rename_column or (), "--rename-column"))

    from mansio.pipelines.pipeline_file import load_pipeline_file
    from mansio.spark.cluster.problems import SharedDirectory

    load_pipeline_file(file)  # report errors of the file and of the options before Spark starts
    location = checkpoint or os.path.join(os.getcwd(), "checkpoints", called)
    directories = [SharedDirectory("checkpoint", location, "--checkpoint")]
    table = None
    if to_table is not None:
        table = table_target(
            to_table,
            warehouse,
            partition_by,
            sort_by,
            key=key,
            order_by=order_by,
            on_null_key=on_null_key.value,
            renames=renames,
        )
    if warehouse is not None:
        directories.append(SharedDirectory("warehouse", warehouse, "--warehouse"))
    if to_path is not None:
        directories.append(SharedDirectory("target", to_path, "--to-path"))
    stop_signals = StopSignals()
    with stop_signals.handling(), serve_metrics(metrics, called) as collector:
        from mansio.spark.session import master_with_attempts

        spark = start_session(
            master if share_group is None else master_with_attempts(master, remote),
            f"mansio pipeline {called}",
            remote=remote,
            bootstrap_servers=bootstrap_servers,
            directories=directories,
            skip_check=skip_check,
            conf=conf,
        )
        stop_signals.install()

        from mansio.pipelines import run as job

        wanted = job.PipelineJob(
            file=file,
            name=called,
            bootstrap_servers=bootstrap_servers,
            checkpoint=location,
            inputs=tuple(topic or ()),
            topic=to,
            table=table,
            path=None if to_path is None else absolute_location(to_path),
            stops_when_caught_up=once,
            trigger_s=_default_trigger_s(to_table) if trigger is None else trigger,
            starting_offsets=start.value,
            records_max=records_max or (KEYED_RECORDS_MAX if key else None),
            output_mode=mode.value,
            options=options,
            share_group=share_group,
            exactly_once=not at_least_once,
        )
        if to is not None and wanted.exactly_once:
            print(
                f"{called}: exactly once into topic {to}; readers with read_committed see a batch when it is complete",
                file=sys.stderr,
            )
        if not stop_signals():
            done = job.run_pipeline(spark, wanted, print_batch, stop_signals, collector, print_running_batch)
            _show(done, output)
            if strict and done.late_rows:
                raise typer.Exit(1)


def _default_trigger_s(to_table: str | None) -> float:
    """Return the interval of batches. Every batch into a table creates files and a snapshot, so there are fewer."""
    return TRIGGER_INTERVAL_S if to_table is None else TABLE_TRIGGER_INTERVAL_S


def absolute_location(directory: str) -> str:
    """Make a path absolute; an address such as `s3://...` is returned unchanged."""
    return directory if "://" in directory else os.path.abspath(directory)


def _show(done: PipelineResult, output: Output) -> None:
    if done.late_rows:
        print(
            f"{done.name}: dropped {count_text(done.late_rows, 'late row')}: older than the watermark when read",
            file=sys.stderr,
        )
    if done.table is not None:
        if done.table.changes:
            print(f"table {done.table.name}: columns {done.table.changes}", file=sys.stderr)
        print_open_elsewhere(done.table.iceberg)
    if output is Output.JSON:
        show_json(
            {
                "pipeline": done.name,
                "target": done.target,
                "batches": done.batches,
                "records": done.records,
                "lag": done.lag,
                "late_rows": done.late_rows,
            }
        )
    else:
        print(
            f"{done.name}: {count_text(done.records, 'record')} in {count_text(done.batches, 'batch')}, into"
            f" {done.target}{lag_text(done.lag)}"
        )
