"""Metrics of a running pipeline in the Prometheus text formats, over HTTP.

Invariants:
* Names begin with `mansio_pipeline_` and end in their unit; counters end in `_total`. The broker's rules are the same.
* One request is served at a time, and a client that sends or receives nothing for `REQUEST_TIMEOUT_S` is disconnected:
  the endpoint uses one thread.
"""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from mansio.pipelines.pipeline_progress import PipelineProgress

PREFIX: Final = "mansio_pipeline_"
PATH: Final = "/metrics"
REQUEST_TIMEOUT_S: Final = 5.0
TOPICS_MAX: Final = 1_000
"""Maximum number of topics whose lag is exported."""

GAUGES: Final = (
    ("batch_records", "Records of the last batch.", "records"),
    ("batch_duration_seconds", "Duration of the last batch.", "seconds"),
    ("input_records_per_second", "Rate at which records arrived, in the last batch.", "input_per_s"),
    (
        "processed_records_per_second",
        "Rate at which records were processed, in the last batch.",
        "processed_per_s",
    ),
    ("state_rows", "Rows in the state of all stateful operators.", "state_rows"),
    ("state_bytes", "Memory used by the state of all stateful operators.", "state_bytes"),
)
"""Name, description, and field of `PipelineProgress`."""


class PipelineMetrics:
    """Collector of the metrics of one pipeline. Any thread may call its methods."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._last: PipelineProgress | None = None
        self._lag: dict[str, int] = {}
        self._batches = self._records = self._late_rows = self._restarts = self._commit_failures = 0

    def observe_batch(self, progress: PipelineProgress, lag: Mapping[str, int] | None) -> None:
        """Count a complete batch. `lag`: number of records that were not read yet, by topic; None if unknown."""
        with self._lock:
            self._last = progress
            self._batches += 1
            self._records += progress.records
            self._late_rows += progress.late_rows
            if lag is not None:
                self._lag = dict(sorted(lag.items())[:TOPICS_MAX])

    def observe_restart(self) -> None:
        """Count a restart of the query after an error."""
        with self._lock:
            self._restarts += 1

    def observe_commit_failure(self) -> None:
        """Count a batch whose offsets could not be committed for the pipeline's group."""
        with self._lock:
            self._commit_failures += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry."""
        with self._lock:
            families = list(self._families())
        yield from families

    def _families(self) -> Iterator[Metric]:
        yield self._counter("batches", "Complete batches.", self._batches)
        yield self._counter("records", "Records of complete batches.", self._records)
        yield self._counter(
            "late_rows", "Rows dropped because they were older than the watermark.", self._late_rows
        )
        yield self._counter("restarts", "Restarts of the query after an error.", self._restarts)
        yield self._counter(
            "offset_commit_failures", "Batches whose offsets could not be committed.", self._commit_failures
        )
        lag = GaugeMetricFamily(
            f"{PREFIX}lag_records",
            "Records that were not read when the last batch was planned.",
            labels=["pipeline", "topic"],
        )
        for topic, records in self._lag.items():
            lag.add_metric([self._pipeline, topic], records)
        yield lag
        if self._last is None:
            return
        for name, description, field in GAUGES:
            yield self._gauge(name, description, getattr(self._last, field))
        yield self._gauge(
            "last_commit_timestamp_seconds", "Time of the last complete batch.", self._last.at_ms / 1000
        )
        if self._last.watermark_ms is not None:
            yield self._gauge(
                "watermark_timestamp_seconds", "The query's watermark.", self._last.watermark_ms / 1000
            )

    def _counter(self, name: str, description: str, value: int) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}{name}", description, labels=["pipeline"])
        family.add_metric([self._pipeline], value)
        return family

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}{name}", description, labels=["pipeline"])
        family.add_metric([self._pipeline], value)
        return family


class MetricsEndpoint:
    """HTTP server for `/metrics` in a thread of its own, from construction until `close`."""

    def __init__(self, metrics: PipelineMetrics, host: str, port: int) -> None:
        """Listen on this address; port 0 is any free port. Raises `ConfigError` if that is impossible."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        try:
            self._server = _MetricsServer((host, port), registry)
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be served on {host}:{port}: {error.strerror or error}. Choose another address"
                " with --metrics"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="mansio-pipeline-metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The address that the server listens on, `host:port`."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop the server and end the thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _MetricsServer(HTTPServer):
    """HTTP server that renders the metrics of a registry."""

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _MetricsHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client has disconnected or was too slow."""


class _MetricsHandler(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"only {PATH} is served here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        text = encode(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name in the base class
        """Do nothing: scrapes are not logged."""


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse `[HOST:]PORT`; without a host only this machine can connect. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(f"{text!r} is not HOST:PORT or PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
