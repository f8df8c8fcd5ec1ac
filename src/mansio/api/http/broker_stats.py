"""Broker statistics: what health checks and metrics read of a running broker.

`MetricsSource` is all that `/metrics` needs; `BrokerStats` adds what readiness needs. Both are protocols, so that tests
need no broker; `service_stats.ServiceStats` implements them for the real broker.

Invariant: every method only reads plain attributes, on the broker's event loop, on request. The hot path maintains no
metrics except plain integers that it counts anyway. Iterators may be read in slices, with other work of the loop in
between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.api.kafka.server.listener import KafkaServer
    from mansio.broker.services.broker_services import BrokerServices

Phase = Literal["starting", "running", "stopping"]


class FollowerSample(NamedTuple):
    """A follower of a partition as its leader sees it: how far its flushed end is behind the leader's log, and for how
    long it has lagged. `records` is -1 while it has not reported its end to this leader."""

    broker: int
    records: int
    seconds: float


class LeaderSample(NamedTuple):
    """Replication of one partition, as known by its leader."""

    is_under_replicated: bool
    is_under_min_isr: bool
    followers: Sequence[FollowerSample]


class PartitionSample(NamedTuple):
    """One partition at the time of the scrape. Offsets count records, sizes bytes; `failed` is true after a storage
    failure. `led` only in a cluster, by its leader."""

    topic: str
    partition: int
    leader_epoch: int
    start_offset: int
    end_offset: int
    high_watermark: int
    size_bytes: int
    failed: bool
    led: LeaderSample | None = None


class Problem(NamedTuple):
    """A problem of a running broker. `reason` is one of the reasons listed in `health`, `detail` is text for operators;
    `topic` and `partition` are set where it concerns one partition."""

    reason: str
    detail: str
    topic: str = ""
    partition: int = -1


class GroupLag(NamedTuple):
    """Records that one group has still to read in one topic; `offsets` is the number of its partitions."""

    group: str
    topic: str
    records: int
    offsets: int


class Measurement(NamedTuple):
    """One value. `name` is without the `mansio_` prefix and, for a counter, without `_total`.

    `labels` are pairs; all measurements of one name have the same label names and the same kind.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Distribution(NamedTuple):
    """A histogram: `counts[i]` observations at or below `bounds[i]` seconds and above the previous bound; the last of
    `counts` is above all bounds. `name` ends in `_seconds`."""

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    bounds: Sequence[float]
    counts: Sequence[int]
    total_s: float


class EtcdMemberStatus(Protocol):
    """State of the etcd member that this broker runs."""

    @property
    def running(self) -> bool: ...

    @property
    def restarts(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A started broker as health checks and metrics see it."""

    services: BrokerServices
    server: KafkaServer
    is_ready: Callable[[], bool]
    """Whether every port accepts connections and the broker is not stopping."""
    etcd_member: EtcdMemberStatus | None = None
    """The etcd member that this broker runs; None if it runs none."""


class Bounds(NamedTuple):
    """Limits of `/metrics`; see the settings of these names."""

    partitions_max: int = 1000
    series_max: int = 1000


class MetricsSource(Protocol):
    """Data of `/metrics`."""

    @property
    def bounds(self) -> Bounds: ...

    @property
    def clustered(self) -> bool:
        """Whether the broker is a member of a cluster: a single node has no replicas."""

    def partition_samples(self) -> Iterable[PartitionSample]: ...

    def group_lags(self) -> Iterable[GroupLag]: ...

    def measurements(self) -> Iterable[Measurement]: ...

    def distributions(self) -> Iterable[Distribution]: ...

    def problems(self) -> Iterable[Problem]:
        """Problems that keep a running broker from its work. Reasons: `log_failed`, `log_corrupt`,
        `partition_not_open`, `metadata_failed`, `session_not_held`."""


class BrokerStats(MetricsSource, Protocol):
    """Data of `/metrics` and `/health/ready`."""

    @property
    def phase(self) -> Phase: ...

    def warnings(self) -> Iterable[Problem]:
        """Problems that an operator should know of although the broker works. Reasons: `corrupt_batch`,
        `log_truncated`, `disk_full`, `hold_released`, `holds_not_loaded`, `dead_letters_pending`, and those of a
        cluster, see `metrics_cluster`."""

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` when a write fails with disk full, and when one succeeds again."""
