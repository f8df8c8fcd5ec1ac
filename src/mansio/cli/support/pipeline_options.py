"""Options and output that the commands of `mansio pipeline` have in common.

Invariants:
* Importing this module imports only typer and the standard library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.formatting import count_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.iceberg.result_table.table import TableTarget
    from mansio.pipelines.batch_watch import RunningBatch
    from mansio.pipelines.pipeline_progress import BatchProgress

PipelineFileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Python that defines transform(frame) or pipeline(spark, read)."),
]
PipelineNameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="The pipeline's name. [default: the name of the file]"),
]
InputTopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC", help="Input topic of transform; repeatable."),
]
ToTableOption = typer.Option(
    "--to-table",
    metavar="[[CATALOG.]NAMESPACE.]TABLE",
    help="Write to this Iceberg table; created if it does not exist. Without CATALOG it is in --warehouse.",
)
PartitionByOption = Annotated[
    str | None,
    typer.Option(
        "--partition-by",
        metavar="SPEC",
        help="Partition spec of a new table, such as 'day(ts), bucket(16, key)': COLUMN, year, month, day or"
        " hour(COLUMN), bucket(N, COLUMN), truncate(WIDTH, COLUMN).",
    ),
]
SortByOption = Annotated[
    str | None,
    typer.Option("--sort-by", metavar="COLUMNS", help="Sort order of a new table, such as 'ts, key desc'."),
]


def table_target(
    name: str,
    warehouse: str | None,
    partition_by: str | None,
    sort_by: str | None,
    *,
    key: str | None = None,
    order_by: str | None = None,
    on_null_key: str = "suspend",
    renames: Mapping[str, str] | None = None,
) -> TableTarget:
    """Return the options of a result table, parsed. Raises `ConfigError` and `MissingExtra`."""
    from mansio.errors import ConfigError
    from mansio.host.extras import require_extra

    require_extra("spark")
    from mansio.iceberg.result_table.partition_spec import parse_partition_by, parse_sort_by
    from mansio.iceberg.result_table.table import TableTarget
    from mansio.iceberg.result_table.table_name import NO_CATALOG, parse_table_name

    catalog = parse_table_name(name).catalog
    target = TableTarget(
        name,
        warehouse,
        partition_by=parse_partition_by(partition_by) if partition_by else (),
        sort_by=parse_sort_by(sort_by) if sort_by else (),
        key=_column_names(key),
        order_by=_column_names(order_by),
        on_null_key=on_null_key,
        renames=dict(renames or {}),
    )
    if not catalog and warehouse is None:
        raise ConfigError(NO_CATALOG)
    return target


def _column_names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def print_batch(progress: BatchProgress) -> None:
    """Print one line for a batch, to standard error."""
    rate = progress.records / progress.seconds if progress.seconds else 0
    print(
        f"batch {progress.batch}: {count_text(progress.records, 'record')} in {progress.seconds:.1f} s ({rate:,.0f}/s)"
        f"{lag_text(progress.lag)}",
        file=sys.stderr,
        flush=True,
    )


def print_running_batch(running: RunningBatch) -> None:
    """Print one line for a batch that runs for long, to standard error."""
    tasks = "" if running.tasks is None else f": {running.tasks_done} of {running.tasks} tasks are done"
    print(f"batch {running.batch} runs for {running.seconds:.0f} s{tasks}", file=sys.stderr, flush=True)


def lag_text(lag: int | None) -> str:
    """Return the lag as the end of a line; empty if it is unknown."""
    return "" if lag is None else f", {lag:,} behind"
