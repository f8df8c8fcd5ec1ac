"""`mansio pipeline lag [NAME]`: committed offsets and lag of pipelines.

Invariants:
* The committed offsets are those of a pipeline's last complete micro-batch. The command changes nothing.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption
from mansio.cli.support.formatting import (
    Output,
    OutputOption,
    format_cell,
    show_json,
    show_rows,
    show_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.pipelines.lag import PartitionLag
    from mansio.pipelines.pipeline_progress import PipelineProgress

LAG_COLUMNS = ("pipeline", "topic", "partition", "committed", "end", "lag")
NO_REPORT = "no report"
"""State of a pipeline that has neither ended nor reported for a minute."""
PROGRESS_COLUMNS = (
    "pipeline", "state", "lag", "last_commit", "batch", "records_per_s", "state_rows", "watermark", "error"
)  # fmt: skip


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
    """Show the number of records that pipelines have not read yet, per partition, and the progress of each pipeline.

    A pipeline publishes its position and progress after each batch, so this is exact within one trigger, and remains
    after the pipeline has ended: LAST COMMIT is the end of its last batch. STATE is running, stopped or failed, or how
    long a pipeline has not reported: a running one does every 15 seconds, a killed one does not. `mansio group describe
    mansio.pipeline.NAME` shows the same lag.
    """
    from mansio.pipelines.lag import pipeline_lag
    from mansio.spark.sync_client import close_sync_clients, sync_client

    try:
        rows = pipeline_lag(sync_client(bootstrap_servers), name)
    finally:
        close_sync_clients()
    if output is Output.JSON:
        show_json(_pipelines_as_json(rows))
        return
    cells = [{name: getattr(row, name) for name in LAG_COLUMNS} for row in rows]
    show_rows(output, cells, LAG_COLUMNS, empty="no pipelines")
    if rows:
        print()
        show_table(PROGRESS_COLUMNS, _progress_cells(rows))


def _pipelines_as_json(rows: Sequence[PartitionLag]) -> list[dict[str, Any]]:
    """Return an object for each pipeline, with its progress once and its partitions."""
    pipelines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.pipeline not in pipelines:
            progress = None if row.progress is None else _progress_as_json(row.progress)
            pipelines[row.pipeline] = {
                "pipeline": row.pipeline,
                "lag": 0,
                "progress": progress,
                "partitions": [],
            }
        pipelines[row.pipeline]["lag"] += row.lag or 0
        pipelines[row.pipeline]["partitions"].append(
            {
                "topic": row.topic,
                "partition": row.partition,
                "committed": row.committed,
                "end": row.end,
                "lag": row.lag,
                "holds": row.has_retention_hold,
            }
        )
    return list(pipelines.values())


def _progress_as_json(progress: PipelineProgress) -> dict[str, Any]:
    is_silent = progress.silent_ms(_now_ms()) is not None
    return {
        "state": progress.ended or (NO_REPORT if is_silent else "running"),
        "last_commit": _format_time(progress.at_ms),
        "last_report": _format_time(max(progress.at_ms, progress.reported_ms or 0)),
        "batch": None if progress.batch < 0 else progress.batch,
        "records": progress.records,
        "seconds": progress.seconds,
        "input_records_per_second": progress.input_per_s,
        "processed_records_per_second": progress.processed_per_s,
        "state_rows": progress.state_rows,
        "state_bytes": progress.state_bytes,
        "late_rows": progress.late_rows,
        "watermark": None if progress.watermark_ms is None else _format_time(progress.watermark_ms),
        "error": progress.error,
    }


def _progress_cells(rows: Sequence[PartitionLag]) -> list[list[str]]:
    """One row per pipeline."""
    cells = []
    for pipeline in dict.fromkeys(row.pipeline for row in rows):
        of_pipeline = [row for row in rows if row.pipeline == pipeline]
        found = of_pipeline[0].progress
        progress = {} if found is None else _progress_as_json(found)
        values = {**progress, "pipeline": pipeline, "lag": sum(row.lag for row in of_pipeline)}
        if found is not None:
            silent_ms = found.silent_ms(_now_ms())
            if silent_ms is not None:
                values["state"] = f"{NO_REPORT} for {_format_duration(silent_ms)}"
            values["records_per_s"] = f"{found.processed_per_s:,.0f}"
        cells.append([format_cell(values.get(column)) for column in PROGRESS_COLUMNS])
    return cells


def _now_ms() -> int:
    return int(time.time() * 1000)


def _format_duration(milliseconds: int) -> str:
    """Return a duration of a minute and more, in its largest unit."""
    minutes = milliseconds // 60_000
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // (24 * 60)} d"


def _format_time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
