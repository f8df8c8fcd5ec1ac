"""`mansio pipeline trace-report`: how long the records of topics wait for their deliveries.

Invariants:
* The command changes nothing. The exit code is 0 also if deliveries are uncertain.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    parse_time_option,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, format_cell, show_json, show_table

if TYPE_CHECKING:
    from mansio.pipelines.trace_report import TraceReport, WaitRow

WAIT_COLUMNS = (
    "topic", "group", "attempt", "hour", "deliveries", "p50_ms", "p95_ms", "p99_ms", "max_ms", "uncertain"
)  # fmt: skip
UNCERTAINTY_COLUMNS = ("topic", "deliveries", "uncertain_because")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("trace-report")(trace_report)


def trace_report(
    topics: Annotated[
        list[str], typer.Option("--topic", metavar="TOPIC", help="A topic of the report; repeatable.")
    ],
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only deliveries that began at this time or later."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Only deliveries that began before this time."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Also write charts to this file, as SVG.")
    ] = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    conf: ConfOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Report how long records wait for their deliveries to share groups: p50, p95 and p99 by topic, group, attempt and
    hour, from the trace of records.

    Deliveries of which something may be missing are counted, with the reasons.
    """
    since_ms, until_ms = parse_time_option(since, "--since"), parse_time_option(until, "--until")
    if since_ms is not None and until_ms is not None and until_ms <= since_ms:
        usage_error("must be later than --since", "--until")
    spark = start_session(
        master,
        f"mansio trace-report {' '.join(topics)}",
        remote=remote,
        bootstrap_servers=bootstrap_servers,
        skip_check=skip_check,
        conf=conf,
    )
    from mansio.pipelines.bar_charts import render_svg
    from mansio.pipelines.trace_report import report_topics, wait_charts

    report = report_topics(spark, topics, bootstrap_servers, since_ms=since_ms, until_ms=until_ms)
    if plot is not None:
        with open(plot, "w", encoding="utf-8") as file:
            file.write(render_svg(wait_charts(report)))
    if output is Output.JSON:
        show_json(_as_json(report))
    else:
        _show(report)


def _as_json(report: TraceReport) -> dict[str, Any]:
    return {
        "waits": [_row_as_json(each) for each in report.waits],
        "uncertainties": [asdict(each) for each in report.uncertainties],
        "is_truncated": report.is_truncated,
    }


def _row_as_json(row: WaitRow) -> dict[str, Any]:
    hour = None if row.hour is None else f"{row.hour:%Y-%m-%dT%H:%M:%SZ}"
    return {**asdict(row), "hour": hour}


def _show(report: TraceReport) -> None:
    if not report.waits:
        print("no deliveries")
        return
    rows = [_row_as_json(each) for each in report.waits]
    show_table(WAIT_COLUMNS, [[format_cell(row[column]) for column in WAIT_COLUMNS] for row in rows])
    if report.is_truncated:
        print("there are more rows: give fewer topics, or --since and --until")
    print()
    if report.uncertainties:
        show_table(
            UNCERTAINTY_COLUMNS,
            [[each.topic, format_cell(each.deliveries), each.reason] for each in report.uncertainties],
        )
    else:
        print("certain: nothing is missing")
