"""`mansio pipeline lag [NAME]`: committed offsets and lag of pipelines.

Invariants:
* The committed offsets are those of a pipeline's last complete micro-batch. The command changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption
from mansio.cli.support.formatting import Output, OutputOption, show_rows

LAG_COLUMNS = ("pipeline", "topic", "partition", "committed", "end", "lag")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("lag")(lag)


def lag(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The pipeline's name. [default: all]")
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show the number of records that pipelines have not read yet, per partition.

    A pipeline publishes its position after each batch, so this is exact within one trigger. `mansio group describe
    mansio.pipeline.NAME` shows the same.
    """
    from mansio.spark.jobs.lag import pipeline_lag
    from mansio.spark.sync_client import close_sync_clients, sync_client

    try:
        rows = pipeline_lag(sync_client(bootstrap_servers), name)
    finally:
        close_sync_clients()
    show_rows(
        output,
        [
            {
                "pipeline": row.pipeline,
                "topic": row.topic,
                "partition": row.partition,
                "committed": row.committed,
                "end": row.end,
                "lag": row.lag,
                "holds": row.has_retention_hold,
            }
            for row in rows
        ],
        LAG_COLUMNS,
        empty="no pipelines",
    )
