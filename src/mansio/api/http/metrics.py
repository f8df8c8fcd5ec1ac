"""`/metrics` in the Prometheus text formats.

Everything is collected at scrape time from a `MetricsSource`: the hot path has no metric objects. Values are read on
the event loop (plain attribute reads), in turns; the text is rendered in a worker thread.

Invariants:
* Names begin with `mansio_` and end in their unit; counters end in `_total`.
* The number of series is bounded by settings, whatever the names of topics and groups: partitions are listed up to
  `metrics_partitions_max`, topics and groups up to `metrics_series_max`; `mansio_metrics_omitted` is the number of
  those not listed.
* On a listener that authenticates its clients, a user needs DESCRIBE for the cluster.
* One scrape is processed at a time, and only few may wait. The registry is separate, so that two brokers in one process
  do not mix.

Names: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from mansio.api.http.authentication import may_see_names
from mansio.api.http.errors import error_response
from mansio.api.http.path_route import PathRoute
from mansio.errors import ClusterAuthorizationFailed, Unavailable
from mansio.host.asyncio_loop import RunningLoop
from mansio.host.item_turns import ItemTurns
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from mansio.api.http.broker_stats import (
        Distribution,
        GroupLag,
        LeaderSample,
        Measurement,
        MetricsSource,
        PartitionSample,
    )
    from mansio.api.http.monitors import DiskMonitor, EventLoopMonitor
    from mansio.broker.services.health import Problem

T = TypeVar("T")

PREFIX: Final = "mansio_"

SCRAPES_WAITING_MAX: Final = 4
"""Maximum number of scrapes that wait for the current one; further scrapes get an error."""

FAILED_PARTITIONS_MAX: Final = 100
"""Maximum number of failed partitions that are listed; the others are only counted."""

GROUP_OFFSETS_MAX: Final = 100_000
"""Maximum number of committed offsets that one scrape reads."""

LABEL_CHARACTERS_MAX: Final = 255
"""Maximum length of a label value; longer values are truncated."""

PARTITION_GAUGES: Final = (
    ("partition_log_start_offset", "First offset that can be read.", "start_offset"),
    ("partition_log_end_offset", "Offset the next record gets.", "end_offset"),
    ("partition_high_watermark", "Consumers see records below this offset.", "high_watermark"),
    ("partition_log_size_bytes", "Bytes in the segments of the log.", "size_bytes"),
    (
        "partition_last_stable_offset_lag_records",
        "Offsets below the high watermark for which readers of committed records wait, because of open transactions.",
        "stable_lag",
    ),
    ("partition_leader_epoch", "Leader epoch of the partition.", "leader_epoch"),
)

PENDING_GAUGES: Final = (
    ("partition_pending_records", "Delayed records that are pending.", "records"),
    ("partition_pending_bytes", "Bytes of the delayed records that are pending.", "size_bytes"),
    (
        "partition_next_due_seconds",
        "Time until the next pending record is due; below 0 if it is overdue.",
        "next_due_s",
    ),
)
"""Gauges of partitions that this broker leads and that have pending records."""

SCHEDULE_GAUGES: Final = (
    ("partition_schedules", "Recurring schedules, also paused ones.", "schedules"),
    ("partition_schedules_failing", "Recurring schedules that cannot fire at present.", "failing"),
    (
        "partition_next_firing_seconds",
        "Time until the next schedule fires, or is tried again; below 0 if that is overdue.",
        "next_firing_s",
    ),
)
"""Gauges of partitions that this broker leads and that have schedules."""


@dataclass(slots=True)
class TopicTotals:
    """Sums over the open partitions of one topic."""

    partitions: int = 0
    records: int = 0
    size_bytes: int = 0
    pending_records: int = 0
    schedules: int = 0
    failing_schedules: int = 0


@dataclass(slots=True)
class LeaderTotals:
    """Sums over the partitions that this broker leads in a cluster. `records` and `seconds`: the largest lag of a
    follower on each broker, by broker id."""

    partitions: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    reassigned: int = 0
    records: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, led: LeaderSample) -> None:
        self.partitions += 1
        self.under_replicated += led.is_under_replicated
        self.under_min_isr += led.is_under_min_isr
        self.reassigned += led.is_reassigned
        for broker, records, seconds in led.followers:
            if records >= 0:
                self.records[broker] = max(self.records.get(broker, 0), records)
            self.seconds[broker] = max(self.seconds.get(broker, 0.0), seconds)


@dataclass(slots=True, eq=False)
class Snapshot:
    """All values of one scrape. Once the snapshot is complete, a Prometheus registry can collect it in any thread."""

    measurements: Sequence[Measurement]
    distributions: Sequence[Distribution]
    problems: Sequence[Problem]
    loop_lag_s: float
    loop_lag_s_max: float
    loop_hold_s_max: float
    event_loop_stalls: int
    partition_count: int = 0
    size_bytes: int = 0
    partitions: list[PartitionSample] = field(default_factory=list)
    topics: dict[str, TopicTotals] = field(default_factory=dict)
    lags: list[GroupLag] = field(default_factory=list)
    partitions_left_out: int = 0
    topics_left_out: int = 0
    lags_left_out: int = 0
    disk: DiskMonitor | None = None
    led: LeaderTotals | None = None

    def collect(self) -> Iterable[Metric]:
        yield _family("gauge", "build_info", "1; the version is the label.", [({"version": __version__}, 1)])
        yield from self._partition_metrics()
        yield from self._failure_metrics()
        if self.led is not None:
            yield from _replica_metrics(self.led)
        yield _family(
            "gauge",
            "group_lag_records",
            "Records that a group has still to read in a topic, of the partitions that this broker has a copy of.",
            [({"group": lag.group, "topic": lag.topic}, lag.records) for lag in self.lags],
            ("group", "topic"),
        )
        yield _family(
            "gauge",
            "metrics_omitted",
            "Series not shown because there are too many of their kind.",
            [
                ({"kind": "partition"}, self.partitions_left_out),
                ({"kind": "topic"}, self.topics_left_out),
                ({"kind": "group"}, self.lags_left_out),
            ],
        )
        yield from _families(self.measurements)
        yield from _histograms(self.distributions)
        yield from self._machine_metrics()

    def _partition_metrics(self) -> Iterable[Metric]:
        yield _one("partitions", "Partitions open on this broker.", self.partition_count)
        yield _one(
            "topics", "Topics with a partition open on this broker.", len(self.topics) + self.topics_left_out
        )
        yield _one("log_size_bytes", "Bytes of all logs.", self.size_bytes)
        for kind, name, meaning, attribute in (
            ("gauge", "topic_partitions", "Partitions of the topic open on this broker.", "partitions"),
            ("gauge", "topic_log_size_bytes", "Bytes in the logs of the topic.", "size_bytes"),
            (
                "counter",
                "topic_records",
                "Offsets assigned in the topic's partitions on this broker; the rate is records per second.",
                "records",
            ),
            (
                "gauge",
                "topic_pending_records",
                "Delayed records that are pending in the topic's partitions that this broker leads.",
                "pending_records",
            ),
            (
                "gauge",
                "topic_schedules",
                "Recurring schedules in the topic's partitions that this broker leads.",
                "schedules",
            ),
            (
                "gauge",
                "topic_schedules_failing",
                "Recurring schedules of those that cannot fire at present.",
                "failing_schedules",
            ),
        ):
            samples = [({"topic": name_}, getattr(found, attribute)) for name_, found in self.topics.items()]
            yield _family(kind, name, meaning, samples, ("topic",))
        for name, meaning, attribute in PARTITION_GAUGES:
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["topic", "partition"])
            for sample in self.partitions:
                family.add_metric([sample.topic, str(sample.partition)], float(getattr(sample, attribute)))
            yield family
        for name, meaning, attribute in PENDING_GAUGES:
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["topic", "partition"])
            for sample in self.partitions:
                if sample.pending is not None:
                    value = float(getattr(sample.pending, attribute))
                    family.add_metric([sample.topic, str(sample.partition)], value)
            yield family
        for name, meaning, attribute in SCHEDULE_GAUGES:
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["topic", "partition"])
            for sample in self.partitions:
                if (found := getattr(sample.schedules, attribute, None)) is not None:
                    family.add_metric([sample.topic, str(sample.partition)], float(found))
            yield family

    def _failure_metrics(self) -> Iterable[Metric]:
        failed = [problem for problem in self.problems if problem.topic]
        yield _one("failed_partitions", "Partitions that accept no writes or are not open.", len(failed))
        yield _family(
            "gauge",
            "partition_failed",
            "1 for a partition that accepts no writes or is not open; others are not listed.",
            [
                ({"topic": one.topic, "partition": str(one.partition), "reason": one.reason}, 1)
                for one in failed[:FAILED_PARTITIONS_MAX]
            ],
            ("topic", "partition", "reason"),
        )
        metadata_failed = any(problem.reason == "metadata_failed" for problem in self.problems)
        yield _one("metadata_failed", "1 when metadata changes are no longer received.", metadata_failed)

    def _machine_metrics(self) -> Iterable[Metric]:
        yield _one(
            "event_loop_lag_seconds", "Delay of the last heartbeat of the event loop.", self.loop_lag_s
        )
        yield _one(
            "event_loop_lag_max_seconds", "Largest delay of a heartbeat since the start.", self.loop_lag_s_max
        )
        yield _one(
            "event_loop_hold_max_seconds",
            "Longest time since the start for which one request kept all others waiting.",
            self.loop_hold_s_max,
        )
        yield _family(
            "counter",
            "event_loop_stalls",
            "Stalls of the event loop.",
            [({}, self.event_loop_stalls)],
        )
        if self.disk is not None:
            if self.disk.space is not None:
                yield _one(
                    "disk_free_bytes",
                    "Free bytes of the data's file system.",
                    self.disk.space.free_bytes,
                )
                yield _one(
                    "disk_size_bytes", "Size of the data directory's file system.", self.disk.space.size_bytes
                )
            yield _one("disk_low", "1 when less is free than disk_free_warn_bytes.", self.disk.is_low)


def _replica_metrics(led: LeaderTotals) -> Iterable[Metric]:
    yield _one("leader_partitions", "Partitions led by this broker.", led.partitions)
    yield _one(
        "under_replicated_partitions",
        "Partitions led here with a replica out of sync, without those that a reassignment adds.",
        led.under_replicated,
    )
    yield _one(
        "under_min_isr_partitions",
        "Partitions led here that reject acks=all because too few replicas are in sync.",
        led.under_min_isr,
    )
    yield _one(
        "reassigning_partitions", "Partitions led here whose replicas are being moved.", led.reassigned
    )
    for name, meaning, found in (
        (
            "follower_lag_records",
            "Lag of a broker's replicas in records, of the partition led here that",
            led.records,
        ),
        (
            "follower_lag_seconds",
            "Lag of a broker's replicas in seconds, of the partition led here that",
            led.seconds,
        ),
    ):
        samples = [({"follower": str(broker)}, value) for broker, value in sorted(found.items())]
        yield _family("gauge", name, f"{meaning} is furthest behind.", samples, ("follower",))


def _one(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, float(value))


def _family(
    kind: str,
    name: str,
    meaning: str,
    samples: Sequence[tuple[dict[str, str], float]],
    labels: Sequence[str] = (),
) -> Metric:
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = make(PREFIX + name, meaning, labels=list(samples[0][0]) if samples else list(labels))
    for values, value in samples:
        family.add_metric(list(values.values()), float(value))
    return family


def _families(measurements: Sequence[Measurement]) -> Iterable[Metric]:
    found: dict[str, list[Measurement]] = {}
    for one in measurements:
        found.setdefault(one.name, []).append(one)
    for name, samples_of_name in found.items():
        first = samples_of_name[0]
        yield _family(
            first.kind, name, first.help, [(dict(one.labels), one.value) for one in samples_of_name]
        )


def _histograms(distributions: Sequence[Distribution]) -> Iterable[Metric]:
    found: dict[str, HistogramMetricFamily] = {}
    for one in distributions:
        family = found.get(one.name)
        if family is None:
            family = found[one.name] = HistogramMetricFamily(
                PREFIX + one.name, one.help, labels=[name for name, _ in one.labels]
            )
        bounds = [*map(str, one.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(one.counts)), strict=True))
        family.add_metric([value for _, value in one.labels], buckets, sum_value=one.total_s)
    yield from found.values()


async def take_snapshot(
    source: MetricsSource, loop_monitor: EventLoopMonitor, disk: DiskMonitor | None = None
) -> Snapshot:
    """Collect all values on the event loop, in turns."""
    snapshot = Snapshot(
        measurements=list(source.measurements()),
        distributions=list(source.distributions()),
        problems=list(source.problems()),
        loop_lag_s=loop_monitor.lag_ms / 1000,
        loop_lag_s_max=loop_monitor.lag_ms_max / 1000,
        loop_hold_s_max=loop_monitor.hold_ms_max / 1000,
        event_loop_stalls=loop_monitor.stalls_total,
        disk=disk,
        led=LeaderTotals() if source.is_in_cluster else None,
    )
    bounds = source.bounds
    topics_left_out: set[str] = set()
    async for sample in _yield_in_turns(source.partition_samples()):
        snapshot.partition_count += 1
        snapshot.size_bytes += sample.size_bytes
        if sample.replication is not None and snapshot.led is not None:
            snapshot.led.add(sample.replication)
        if len(snapshot.partitions) < bounds.partitions_max:
            snapshot.partitions.append(sample)
        topic = snapshot.topics.get(sample.topic)
        if topic is None:
            if len(snapshot.topics) >= bounds.series_max:
                topics_left_out.add(sample.topic)
                continue
            topic = snapshot.topics[sample.topic] = TopicTotals()
        topic.partitions += 1
        topic.records += sample.end_offset
        topic.size_bytes += sample.size_bytes
        if sample.pending is not None:
            topic.pending_records += sample.pending.records
        if sample.schedules is not None:
            topic.schedules += sample.schedules.schedules
            topic.failing_schedules += sample.schedules.failing
    snapshot.topics_left_out = len(topics_left_out)
    if snapshot.partition_count > bounds.partitions_max:
        snapshot.partitions.clear()  # all or none: the selection must not be arbitrary
        snapshot.partitions_left_out = snapshot.partition_count
    await _read_lags(snapshot, source)
    return snapshot


async def _read_lags(snapshot: Snapshot, source: MetricsSource) -> None:
    offsets = 0
    async for lag in _yield_in_turns(source.group_lags()):
        offsets += lag.offsets
        if len(lag.group) > LABEL_CHARACTERS_MAX or len(snapshot.lags) >= source.bounds.series_max:
            snapshot.lags_left_out += 1
        else:
            snapshot.lags.append(lag)
        if offsets >= GROUP_OFFSETS_MAX:
            snapshot.lags_left_out += 1  # at least; the others are not read
            break


async def _yield_in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other work of the event loop run after each turn."""
    turns = ItemTurns(RunningLoop())
    for item in items:
        yield item
        await turns.next()


def render(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """Return the metrics as text and its content type, in the format that the Accept header requests."""
    registry = CollectorRegistry()
    registry.register(snapshot)
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def routes(
    source: MetricsSource, loop_monitor: EventLoopMonitor, disk: DiskMonitor | None = None
) -> list[PathRoute]:
    turn = asyncio.Lock()
    waiting = 0

    async def metrics(request: Request) -> Response:
        nonlocal waiting
        if not may_see_names(request, source.may_describe):
            return error_response(ClusterAuthorizationFailed("metrics need DESCRIBE for the cluster"))
        if waiting >= SCRAPES_WAITING_MAX:
            return error_response(Unavailable("too many scrapes at a time"))
        waiting += 1
        try:
            async with turn:
                snapshot = await take_snapshot(source, loop_monitor, disk)
                accept = request.headers.get("accept", "")
                body, content_type = await asyncio.to_thread(render, snapshot, accept)
        finally:
            waiting -= 1
        return Response(body, headers={"content-type": content_type})

    return [PathRoute("/metrics", metrics)]
