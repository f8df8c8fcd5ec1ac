"""`mansio pipeline mirror`: copies topics to another cluster, with the offsets of their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.common import usage_error
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_json, show_rows
from mansio.cli.support.metrics_option import MetricsOption, serve_metrics
from mansio.cli.support.pipeline_options import lag_text, print_batch
from mansio.cli.support.signals import StopSignals

if TYPE_CHECKING:
    from mansio.pipelines.mirroring.mirror import MirrorJob, MirrorResult
    from mansio.wire.topic_partition import TopicPartition

TRANSLATED_COLUMNS = ("topic", "partition", "offset", "target", "translated")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("mirror")(mirror)


def mirror(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="Topics of the source.")],
    source: Annotated[
        str,
        typer.Option("--from", metavar="HOST:PORT[,...]", help="Brokers of the source: Mansio or Kafka."),
    ],
    target: Annotated[
        str,
        typer.Option("--to", metavar="HOST:PORT[,...]", help="Brokers of the target."),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The pipeline's name. [default: mirror-TOPIC]"),
    ] = None,
    rename: Annotated[
        str,
        typer.Option(
            "--rename",
            metavar="PATTERN",
            help="Names on the target, such as {source}.{topic}, the default of MirrorMaker 2.",
        ),
    ] = "{topic}",
    source_name: Annotated[
        str | None,
        typer.Option(
            "--source-name", metavar="NAME", help="{source} in --rename. [default: the cluster's id]"
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Translate the offsets of this group; repeatable. [default: all groups with offsets in the topics]",
        ),
    ] = None,
    no_groups: Annotated[
        bool, typer.Option("--no-groups", help="Do not translate the offsets of groups.")
    ] = False,
    groups_interval: Annotated[
        float,
        typer.Option("--groups-interval", min=0, metavar="SECONDS", help="Interval of translating offsets."),
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Copy the current records, then end.")] = False,
    trigger: Annotated[
        float,
        typer.Option("--trigger", min=0.05, metavar="SECONDS", help="Minimum interval between batches."),
    ] = 1.0,
    from_end: Annotated[
        bool,
        typer.Option("--from-end", help="Topics that were never mirrored: new records only."),
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="If the source has deleted records before they were copied, continue at its start.",
        ),
    ] = False,
    no_hold: Annotated[
        bool,
        typer.Option(
            "--no-hold",
            help="Commit nothing on the source: it holds no records back, and mansio pipeline lag shows nothing.",
        ),
    ] = False,
    compression: Annotated[
        str, typer.Option("--compression", metavar="CODEC", help="none, gzip, snappy, lz4 or zstd.")
    ] = "none",
    translate: Annotated[
        list[str] | None,
        typer.Option(
            "--translate",
            metavar="TOPIC:PARTITION:OFFSET",
            help="Only print the target's offset for this one of the source; repeatable.",
        ),
    ] = None,
    metrics: MetricsOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy topics to another cluster, each record exactly once, and let groups continue there.

    Partitions, keys, headers, timestamps and order are kept. The position is on the target: the same command continues
    on any machine, and a second one ends the first. A record is not copied to a cluster that it has passed, so mirrors
    in both directions are possible. Offsets of groups are translated while they have no members on the target.
    """
    from mansio.host.extras import require_extra

    require_extra("iceberg")
    from mansio.pipelines.mirroring.mirror import MirrorJob, run_mirror
    from mansio.wire.batch.compression import Codec

    if no_groups and group:
        usage_error("give one of them", "--group / --no-groups")
    if compression.upper() not in Codec.__members__:
        usage_error("must be none, gzip, snappy, lz4 or zstd", "--compression")
    job = MirrorJob(
        tuple(topics),
        source,
        target,
        name=name or f"mirror-{topics[0]}",
        topic_pattern=rename,
        source_name=source_name,
        translates_groups=not no_groups,
        groups=tuple(group or ()),
        groups_interval_s=groups_interval,
        stops_when_caught_up=once,
        trigger_s=trigger,
        starts_at_end=from_end,
        accept_loss=accept_loss,
        commits_on_source=not no_hold,
        compression=compression.lower(),
    )
    if translate:
        _show_translated(job, translate, output)
        return
    stop_signals = StopSignals()
    with stop_signals.handling(), serve_metrics(metrics, job.name) as collector:
        _show(run_mirror(job, print_batch, stop_signals, collector), output)


def _show(done: MirrorResult, output: Output) -> None:
    if output is Output.JSON:
        show_json(
            {
                "pipeline": done.name,
                "batches": done.batches,
                "records": done.records,
                "skipped": done.skipped,
                "group_offsets": done.group_offsets,
                "lag": done.lag,
            }
        )
        return
    counts = f"{count_text(done.records, 'record')} in {count_text(done.batches, 'batch')}"
    groups = f"; {count_text(done.group_offsets, 'offset')} of groups translated"
    print(f"{done.name}: {counts}{lag_text(done.lag)}{groups}")


def _show_translated(job: MirrorJob, texts: list[str], output: Output) -> None:
    from mansio.pipelines.mirroring.mirror import target_topics, translate_offsets

    offsets = dict(map(_parse_offset, texts))
    names = target_topics(job, {place.topic for place in offsets})
    rows = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "offset": offsets[place],
            "target": names[place.topic],
            "translated": translated,
        }
        for place, translated in translate_offsets(job, offsets).items()
    ]
    show_rows(output, rows, TRANSLATED_COLUMNS, empty="no offsets")


def _parse_offset(text: str) -> tuple[TopicPartition, int]:
    from mansio.wire.topic_partition import TopicPartition

    topic, _, rest = text.partition(":")
    partition, _, offset = rest.partition(":")
    if not (topic and partition.isdecimal() and offset.isdecimal()):
        usage_error(f"{text!r} is not TOPIC:PARTITION:OFFSET", "--translate")
    return TopicPartition(topic, int(partition)), int(offset)
