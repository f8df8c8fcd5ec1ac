"""`/metrics` in the Prometheus text formats.

Everything is collected at scrape time from a `MetricsSource`: the hot path keeps no metric objects and pays
nothing. Numbers are read on the loop (plain attribute reads), the text is made in a worker thread, because
2,000 partitions are 12,000 lines and the loop has records to move.

Always true: names begin with `mansio_`, carry their unit last, counters end in `_total`; the registry is
our own, so two brokers in one process do not mix. Names: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response
from starlette.routing import Route

from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from mansio.api.http.loop_watch import LoopWatch
    from mansio.api.http.source import Measurement, MetricsSource, PartitionSample

PREFIX = "mansio_"

PARTITION_GAUGES = (
    ("partition_log_start_offset", "First offset that can be read.", "start_offset"),
    ("partition_log_end_offset", "Offset the next record gets.", "end_offset"),
    ("partition_high_watermark", "Consumers see records below this offset.", "high_watermark"),
    ("partition_log_size_bytes", "Bytes in the segments of the log.", "size_bytes"),
    ("partition_leader_epoch", "Leader epoch of the partition.", "leader_epoch"),
    ("partition_log_failed", "1 when the log takes no more writes after a storage failure.", "failed"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All numbers of one scrape, read at one moment on the loop. A registry can collect it from any
    thread.
    """

    partitions: Sequence[PartitionSample]
    measurements: Sequence[Measurement]
    loop_lag_s: float
    loop_lag_s_max: float
    loop_stalls: int

    def collect(self) -> Iterable[Metric]:
        yield _build_info()
        yield from _partition_metrics(self.partitions)
        yield from _families(self.measurements)
        yield from self._loop_metrics()

    def _loop_metrics(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            PREFIX + "loop_lag_seconds", "How late the last heartbeat of the event loop was.", self.loop_lag_s
        )
        yield GaugeMetricFamily(
            PREFIX + "loop_lag_max_seconds", "The latest heartbeat since the start.", self.loop_lag_s_max
        )
        yield CounterMetricFamily(
            PREFIX + "loop_stalls", "Times the event loop stood still beyond the bound.", self.loop_stalls
        )


def _build_info() -> Metric:
    family = GaugeMetricFamily(PREFIX + "build_info", "1; the version is the label.", labels=["version"])
    family.add_metric([__version__], 1)
    return family


def _partition_metrics(samples: Sequence[PartitionSample]) -> Iterable[Metric]:
    yield GaugeMetricFamily(PREFIX + "partitions", "Partitions open on this broker.", len(samples))
    yield GaugeMetricFamily(
        PREFIX + "topics",
        "Topics with a partition open on this broker.",
        len({sample.topic for sample in samples}),
    )
    for name, meaning, field in PARTITION_GAUGES:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=["topic", "partition"])
        for sample in samples:
            family.add_metric([sample.topic, str(sample.partition)], float(getattr(sample, field)))
        yield family


def _families(measurements: Sequence[Measurement]) -> Iterable[Metric]:
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for one in measurements:
        family = found.get(one.name)
        if family is None:
            make = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + one.name, one.help, labels=[name for name, _ in one.labels])
            found[one.name] = family
        family.add_metric([value for _, value in one.labels], one.value)
    return found.values()


def take_snapshot(source: MetricsSource, watch: LoopWatch) -> Snapshot:
    """Read everything once; on the loop."""
    return Snapshot(
        partitions=list(source.partition_samples()),
        measurements=list(source.measurements()),
        loop_lag_s=watch.lag_ms / 1000,
        loop_lag_s_max=watch.lag_ms_max / 1000,
        loop_stalls=watch.stalls_total,
    )


def render(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """The text and its content type, in the format the scraper asked for."""
    registry = CollectorRegistry()
    registry.register(snapshot)
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def routes(source: MetricsSource, watch: LoopWatch) -> list[Route]:
    async def metrics(request: Request) -> Response:
        snapshot = take_snapshot(source, watch)
        body, content_type = await asyncio.to_thread(render, snapshot, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]
