"""`mansio demo`: see for yourself what is promised. Each demo is one screen, needs no broker, cleans up."""

from __future__ import annotations

from typing import Annotated

import typer

from mansio.cli.common import run
from mansio.cli.demo.flights import FLIGHTS

app = typer.Typer(no_args_is_help=True, help="Shows that run anywhere, need no broker and clean up.")


@app.callback()
def noun() -> None:
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
    from mansio.cli.demo.story import tell

    raise typer.Exit(run(tell(count)))
