"""Option `--metrics` of the streaming pipelines: serves the metrics of the pipeline over HTTP while it runs.

Invariants:
* Importing this module imports only typer and the standard library.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.pipelines.pipeline_metrics import PipelineMetrics

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus at http://HOST:PORT/metrics; without HOST on 127.0.0.1.",
    ),
]


@contextmanager
def serve_metrics(address: str | None, pipeline: str) -> Iterator[PipelineMetrics | None]:
    """Context manager that serves the metrics of a pipeline at the address of `--metrics`; None without an address.
    Exit code 2 if the address is invalid. Raises `ConfigError` if it cannot be used.
    """
    if address is None:
        yield None
        return
    from mansio.cli.support.common import usage_error
    from mansio.pipelines.pipeline_metrics import MetricsEndpoint, PipelineMetrics, parse_metrics_address

    try:
        host, port = parse_metrics_address(address)
    except ValueError as error:
        usage_error(str(error), "--metrics")
    metrics = PipelineMetrics(pipeline)
    endpoint = MetricsEndpoint(metrics, host, port)
    print(f"metrics: http://{endpoint.address}/metrics", file=sys.stderr, flush=True)
    try:
        yield metrics
    finally:
        endpoint.close()
