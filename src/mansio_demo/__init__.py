"""`mansio demo`: see for yourself what is promised. Each demo is one screen, needs no broker, cleans up."""

from __future__ import annotations

from typing import Annotated

import typer

from mansio.cli.support.common import run
from mansio_demo.flights import FLIGHTS

app = typer.Typer(no_args_is_help=True, help="Shows that run anywhere, need no broker and clean up.")


@app.callback()
def command_group() -> None:
    """Shows that run anywhere, need no broker and clean up."""


@app.command()
def broker(
    count: Annotated[
        int, typer.Option(metavar="N", help="How many of the flights to stream.", min=20_000, max=FLIGHTS)
    ] = FLIGHTS,
) -> None:
    """Stream 336,776 flights through a broker that is killed half way, and check what came out.

    Starts a broker of its own on free ports in a temporary directory. A producer (acks=all, idempotent)
    publishes the flights keyed by aircraft into 6 partitions, three consumers of one group read them at the
    same time, the broker gets SIGKILL half way and is started again. Exit code 0 only if nothing
    acknowledged was lost, moved, duplicated or reordered. Takes under 90 s.
    """
    from mansio_demo.broker_demo import run_demo

    raise typer.Exit(run(run_demo(count)))


@app.command()
def delivery() -> None:
    """Work on flights of which some cannot be dealt with, bring them back, and let a worker join a group.

    Starts a broker of its own, in a temporary directory. Three workers of a share group handle 842 flights; four
    of them make the workers fail, are tried again after growing rests, and end in the dead-letter topic. The workers
    are fixed and the four offered to them again, and to nobody else. Then a fourth worker joins a consumer group
    that reads eight partitions: a picture shows who read what when. Exit code 0 only if every number is right.
    Takes under 40 s.
    """
    from mansio_demo.delivery_demo import run_demo

    raise typer.Exit(run(run_demo()))


@app.command()
def pipeline(
    count: Annotated[
        int, typer.Option(metavar="N", help="How many of the flights to stream.", min=20_000, max=FLIGHTS)
    ] = FLIGHTS,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Where the picture goes (SVG).")
    ] = "flights-delays.svg",
) -> None:
    """Archive flights with Spark while they stream in, delete the log, ask the table, and bring a day back.

    Starts a broker and a Spark session of its own, in a temporary directory. When the flights until November
    are in the lake table, those of December follow into the log alone, and retention is cut to nothing: the
    log loses what is archived and keeps the rest. One read over both halves gives the mean departure delay by
    carrier and month, compared with the file; a deleted day is replayed. Exit code 0 only if every number is
    right. Takes one or two minutes; needs `mansio[spark,lake]` and a Java (or `mansio[jre]`).
    """
    from mansio_demo.pipeline_demo import run_demo

    raise typer.Exit(run(run_demo(count, plot)))
