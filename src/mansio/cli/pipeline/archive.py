"""`mansio pipeline archive TOPIC`: copies a topic to an Iceberg table, exactly once, continuously or up to now.

Invariants:
* The command can be killed at any time and restarted with the same arguments; it resumes from the table.
* Progress goes to standard error, the result to standard output.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.archive_options import (
    CatalogOption,
    WarehouseOption,
    open_archive,
    print_open_elsewhere,
)
from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_json
from mansio.cli.support.metrics_option import MetricsOption, serve_metrics
from mansio.cli.support.pipeline_options import print_batch
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
    from mansio.pipelines.archive import ArchiveResult
    from mansio.pipelines.pipeline_progress import BatchProgress, PipelineProgress


class OnUnreadable(StrEnum):
    """What to do with unreadable records."""

    SUSPEND = "suspend"
    SKIP = "skip"
    DEAD_LETTER = "dead-letter"


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("archive")(archive)


def archive(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to archive.")],
    warehouse: WarehouseOption,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The pipeline's name. [default: archive-TOPIC]"),
    ] = None,
    catalog: CatalogOption = None,
    once: Annotated[bool, typer.Option("--once", help="Archive the current records, then end.")] = False,
    trigger: Annotated[
        float,
        typer.Option("--trigger", min=0.1, metavar="SECONDS", help="Minimum interval between batches."),
    ] = 60.0,
    records_max: Annotated[
        int,
        typer.Option("--max-records", min=1, metavar="N", help="Maximum number of records in one batch."),
    ] = 2_000_000,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="If the log has deleted unarchived records, continue at its start.",
        ),
    ] = False,
    on_unreadable: Annotated[
        OnUnreadable,
        typer.Option(
            "--on-unreadable",
            help="Records that cannot be read: suspend ends with their offset; skip lists their offsets in the table;"
            " dead-letter also stores them in the table mansio_dead_letters.TOPIC.",
        ),
    ] = OnUnreadable.SUSPEND,
    value_format: ValueFormatOption = None,
    value_schema: ValueSchemaOption = None,
    value_message: ValueMessageOption = None,
    key_format: KeyFormatOption = None,
    key_schema: KeySchemaOption = None,
    key_message: KeyMessageOption = None,
    schema_registry: SchemaRegistryOption = None,
    metrics: MetricsOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    conf: ConfOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Archive a topic to an Iceberg table, each record exactly once.

    Resumes at the table's end offsets. While it runs, and until `mansio pipeline release`, the broker retains records
    that are not archived yet.
    """
    from mansio.host.extras import require_extra

    require_extra("spark")
    from mansio.pipelines.archive import ArchiveJob
    from mansio.pipelines.archive import archive as run_archive
    from mansio.spark.cluster.problems import SharedDirectory

    decode = decoding_options(
        (topic,),
        value_format=value_format,
        value_schema=value_schema,
        value_message=value_message,
        key_format=key_format,
        key_schema=key_schema,
        key_message=key_message,
        schema_registry=schema_registry,
    )
    job = ArchiveJob(
        topic=topic,
        warehouse=warehouse,
        bootstrap_servers=bootstrap_servers,
        name=name or f"archive-{topic}",
        catalog=catalog,
        stops_when_caught_up=once,
        trigger_s=trigger,
        records_max=records_max,
        accept_loss=accept_loss,
        on_unreadable=on_unreadable.value,
        decode=decode,
    )
    stop_signals = StopSignals()
    with stop_signals.handling(), serve_metrics(metrics, job.name) as collector:
        spark = start_session(
            master,
            f"mansio archive {topic}",
            remote=remote,
            bootstrap_servers=bootstrap_servers,
            directories=[SharedDirectory("warehouse", warehouse, "--warehouse")],
            skip_check=skip_check,
            conf=conf,
        )
        stop_signals.install()

        def report(progress: BatchProgress) -> None:
            print_batch(progress)
            if collector is not None:
                collector.observe_batch(_as_pipeline_progress(progress), _lag_by_topic(topic, progress))

        if not stop_signals():
            _show(run_archive(spark, job, report, stop_signals), output)
            print_open_elsewhere(open_archive(topic, warehouse, catalog).iceberg)


def _show(done: ArchiveResult, output: Output) -> None:
    result: dict[str, Any] = {
        "table": done.table,
        "records": done.records,
        "batches": done.batches,
        "offsets": {str(partition): offset for partition, offset in sorted(done.offsets.items())},
    }
    if output is Output.JSON:
        show_json(result)
    else:
        ends = ", ".join(f"{partition}: {offset}" for partition, offset in result["offsets"].items())
        counts = f"{count_text(done.records, 'record')} in {count_text(done.batches, 'batch')}"
        print(f"{done.table}: {counts}; archived up to {ends}")


def _as_pipeline_progress(progress: BatchProgress) -> PipelineProgress:
    import time

    from mansio.pipelines.pipeline_progress import PipelineProgress

    rate = progress.records / progress.seconds if progress.seconds else 0.0
    return PipelineProgress(
        progress.batch,
        int(time.time() * 1000),
        records=progress.records,
        seconds=progress.seconds,
        processed_per_s=rate,
    )


def _lag_by_topic(topic: str, progress: BatchProgress) -> dict[str, int] | None:
    return None if progress.lag is None else {topic: progress.lag}
