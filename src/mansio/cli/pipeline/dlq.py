"""`mansio pipeline dlq [TOPIC...]`: dead letters by cause, with Spark; redrives chosen ones.

Invariants:
* Without --redrive the command changes nothing.
* A redrive can be killed and repeated with its id; each record is redriven once.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    connect,
    print_error,
    run,
    usage_error,
)
from mansio.cli.support.formatting import (
    Output,
    OutputOption,
    format_cell,
    show_json,
    show_table,
    text_or_base64,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.pipelines.dlq import CauseReport, DeadLetterReport, DeadLetterSample, SharePartitionRedrive

CAUSE_COLUMNS = ("cause", "group", "topic", "dead_letters", "deliveries", "first", "last", "reason")
SAMPLE_COLUMNS = ("cause", "position", "source", "key", "reason")
REDRIVE_COLUMNS = (
    "group", "topic", "partition", "records", "redriven", "repeated", "deleted", "not_dead_lettered", "error"
)  # fmt: skip
REDRIVE_ID_CHARACTERS_MAX = 100
SHOWN_CHARACTERS_MAX = 80


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("dlq")(dlq)


def dlq(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]...",
            help="Dead-letter topics, or the topics of the original records. [default: all dead-letter topics]",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", metavar="GROUP", help="Only records that this share group rejected."),
    ] = None,
    cause: Annotated[
        list[str] | None,
        typer.Option("--cause", metavar="ID", help="Only this cause, as the report names it; repeatable."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, max=1000, metavar="N", help="Number of causes to show.")
    ] = 50,
    samples: Annotated[
        int, typer.Option("--samples", min=0, max=100, metavar="N", help="Number of samples of each cause.")
    ] = 1,
    redrive: Annotated[
        bool,
        typer.Option("--redrive", help="Offer the selected records again to the groups that rejected them."),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            max=10_000_000,
            metavar="N",
            help="Redrive only the N oldest dead-lettered records.",
        ),
    ] = None,
    rate: Annotated[
        int,
        typer.Option(
            "--rate", "-r", min=0, metavar="N", help="Maximum redriven records per second; 0: no limit."
        ),
    ] = 0,
    redrive_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Continue the redrive with this id; records that are done are not repeated. [default: a new id]",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    conf: ConfOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Group dead letters by cause, and redrive chosen ones.

    A cause is a group, a topic, and a reason in which numbers and ids are replaced by placeholders. With --redrive the
    records of the selected dead letters become available to their group again; the dead letters stay. The exit code is
    1 if a redrive failed for some partitions; run it again with the same --id.
    """
    if not redrive and (limit is not None or rate or redrive_id is not None or dry_run):
        usage_error("only with --redrive", "--limit, --rate, --id, --dry-run")
    if redrive_id is not None and not 0 < len(redrive_id) <= REDRIVE_ID_CHARACTERS_MAX:
        usage_error(f"an id has up to {REDRIVE_ID_CHARACTERS_MAX} characters", "--id")
    sources = _dead_letter_topics(bootstrap_servers, topics or ())
    if not sources:
        if output is Output.JSON:
            show_json(_as_json((), None, None, ()))
        else:
            print("no dead-letter topics", file=sys.stderr)
        return

    from mansio.host.extras import require_extra

    require_extra("spark")
    spark = start_session(
        master,
        "mansio dlq",
        remote=remote,
        bootstrap_servers=bootstrap_servers,
        skip_check=skip_check,
        conf=conf,
    )
    from mansio.pipelines.dlq import DeadLetterAnalysis

    name = (redrive_id or _new_id()) if redrive else None
    redriven: Sequence[SharePartitionRedrive] = ()
    with DeadLetterAnalysis(spark, sources, bootstrap_servers, group=group, causes=cause or ()) as analysis:
        report = analysis.report(top=top, samples=samples)
        if output is Output.TABLE:
            _show_report(report, sources)
        if name is not None:
            if not dry_run:
                print(f"redrive {name}", file=sys.stderr, flush=True)
            redriven = analysis.redrive(name, limit=limit, rate=rate, dry_run=dry_run)
    if output is Output.JSON:
        show_json(_as_json(sources, report, name, redriven))
    elif redriven:
        print()
        rows = [[format_cell(getattr(one, column)) for column in REDRIVE_COLUMNS] for one in redriven]
        show_table(REDRIVE_COLUMNS, rows)
    if failed := sum(one.error is not None for one in redriven):
        raise typer.Exit(
            print_error(
                f"{failed} of {len(redriven)} partitions failed: see ERROR; continue with --id {name}"
            )
        )


def _dead_letter_topics(bootstrap_servers: str, names: Sequence[str]) -> list[str]:
    """Return the dead-letter topics for these names, without repetitions; without names all dead-letter topics."""
    from mansio.client.dead_letters import list_dead_letter_topics, resolve_dead_letter_topic

    async def work() -> list[str]:
        async with connect(bootstrap_servers) as client:
            if not names:
                return await list_dead_letter_topics(client)
            return list(dict.fromkeys([await resolve_dead_letter_topic(client, name) for name in names]))

    return run(work())


def _new_id() -> str:
    import uuid

    return uuid.uuid4().hex


def _as_json(
    sources: Sequence[str],
    report: DeadLetterReport | None,
    redrive_id: str | None,
    redriven: Sequence[SharePartitionRedrive],
) -> dict[str, Any]:
    return {
        "dead_letter_topics": list(sources),
        "dead_letters": report.dead_letters if report else 0,
        "unrecognized": report.unrecognized if report else 0,
        "causes": [_cause_as_json(one) for one in report.causes] if report else [],
        "other_causes": report.other_causes if report else 0,
        "other_dead_letters": report.other_dead_letters if report else 0,
        "redrive": None
        if redrive_id is None
        else {"id": redrive_id, "rows": [asdict(one) for one in redriven]},
    }


def _cause_as_json(one: CauseReport) -> dict[str, Any]:
    return {
        "cause": one.cause,
        "group": one.group,
        "topic": one.topic,
        "message": one.message,
        "reason": one.template,
        "dead_letters": one.dead_letters,
        "deliveries_max": one.deliveries_max,
        "first": _format_time(one.first_ms),
        "last": _format_time(one.last_ms),
        "samples": [_sample_as_json(one, sample) for sample in one.samples],
    }


def _sample_as_json(cause: CauseReport, sample: DeadLetterSample) -> dict[str, Any]:
    fields = {
        "dead_letter_topic": sample.dead_letter_topic,
        "position": f"{sample.dead_letter_partition}:{sample.dead_letter_offset}",
        "source": f"{cause.topic}-{sample.partition}@{sample.offset}",
        "deliveries": sample.deliveries,
        "given_up": _format_time(sample.dead_lettered_ms),
        "reason": sample.reason,
        "consumer": sample.consumer,
    }
    for name in ("key", "value"):
        text, encoding = text_or_base64(getattr(sample, name))
        fields[name] = text
        if encoding:
            fields[f"{name}_encoding"] = encoding
    return fields


def _show_report(report: DeadLetterReport, sources: Sequence[str]) -> None:
    if not report.causes:
        print(f"no such dead letters in {', '.join(sources)}", file=sys.stderr)
    else:
        show_table(CAUSE_COLUMNS, [_cause_cells(one) for one in report.causes])
        sample_rows = [_sample_cells(one, sample) for one in report.causes for sample in one.samples]
        if sample_rows:
            print()
            show_table(SAMPLE_COLUMNS, sample_rows)
    if report.other_causes:
        print(
            f"and {report.other_dead_letters:,} dead letters of {report.other_causes:,} other causes (--top)",
            file=sys.stderr,
        )
    if report.unrecognized:
        print(f"{report.unrecognized:,} records were not written by Mansio's brokers", file=sys.stderr)


def _cause_cells(one: CauseReport) -> list[str]:
    reason = one.template or one.message
    return [
        one.cause,
        one.group,
        one.topic,
        f"{one.dead_letters:,}",
        str(one.deliveries_max),
        _format_time(one.first_ms),
        _format_time(one.last_ms),
        reason,
    ]


def _sample_cells(cause: CauseReport, sample: DeadLetterSample) -> list[str]:
    key = text_or_base64(sample.key)[0]
    return [
        cause.cause,
        f"{sample.dead_letter_partition}:{sample.dead_letter_offset}",
        f"{cause.topic}-{sample.partition}@{sample.offset}",
        format_cell(_truncated(key)),
        format_cell(_truncated(sample.reason)),
    ]


def _truncated(text: str | None) -> str | None:
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS_MAX else f"{line[: SHOWN_CHARACTERS_MAX - 1]}…"


def _format_time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
