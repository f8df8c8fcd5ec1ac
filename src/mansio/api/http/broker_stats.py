"""Broker statistics: the data of a running broker that health checks and metrics read.

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
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.health import Problem
    from mansio.config.addresses import Address
    from mansio.net.tls.certificate_reloader import CertificateReloader
    from mansio.net.tls.handshake_failures import FailureReason

Phase = Literal["starting", "running", "stopping"]


class FollowerSample(NamedTuple):
    """Replication lag of one follower of a partition, as its leader knows it. `records`: number of records by which its
    flushed end is behind the end of the leader's log, -1 until it has reported its end. `seconds`: time for which it
    has been behind. `broker`: its broker id."""

    broker: int
    records: int
    seconds: float


class LeaderSample(NamedTuple):
    """State of the replication of one partition, as its leader knows it."""

    is_under_replicated: bool
    is_under_min_isr: bool
    followers: Sequence[FollowerSample]
    is_reassigned: bool = False


class PendingSample(NamedTuple):
    """Delayed records of one partition that are pending, at least one. `next_due_s`: time until the first is due, below
    0 if it is overdue."""

    records: int
    size_bytes: int
    next_due_s: float


class ScheduleSample(NamedTuple):
    """Schedules of one partition, at least one. `failing`: number of those that cannot fire; `next_firing_s`: time
    until the first is due, below 0 if it is overdue, None if none is due."""

    schedules: int
    failing: int
    next_firing_s: float | None


class PartitionSample(NamedTuple):
    """One open partition of this broker at the time of the scrape. `has_failed`: after a storage failure.
    `stable_lag`: number of offsets below the high watermark for which readers of committed records wait.
    `replication`: None on a single node and on followers; `pending`, `schedules`: None without any, and on
    followers."""

    topic: str
    partition: int
    leader_epoch: int
    start_offset: int
    end_offset: int
    high_watermark: int
    size_bytes: int
    has_failed: bool
    replication: LeaderSample | None = None
    pending: PendingSample | None = None
    schedules: ScheduleSample | None = None
    stable_lag: int = 0


class GroupLag(NamedTuple):
    """Lag of one group in one topic. `records`: number of records after the committed offsets. `offsets`: number of
    partitions for which the group has committed offsets."""

    group: str
    topic: str
    records: int
    offsets: int


class Measurement(NamedTuple):
    """One value of a metric. `name`: without the prefix `mansio_` and, for a counter, without `_total`.

    `labels`: (name, value) pairs. All measurements with the same name have the same label names and the same kind.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Distribution(NamedTuple):
    """A histogram metric. `counts[i]`: number of observations at or below `bounds[i]` seconds and above the previous
    bound; the last of `counts` is the number above all bounds. `name`: ends in `_seconds`."""

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    bounds: Sequence[float]
    counts: Sequence[int]
    total_s: float


class EtcdMemberStatus(Protocol):
    """State of the etcd member that this broker runs."""

    @property
    def is_running(self) -> bool: ...

    @property
    def restarts(self) -> int: ...


class KafkaListenerCounters(Protocol):
    """Counters of the Kafka listeners. `requests`: by API key."""

    @property
    def requests(self) -> Mapping[int, int]: ...

    @property
    def connections_accepted(self) -> int: ...

    @property
    def rejected_by_reason(self) -> Mapping[str, int]: ...

    @property
    def closed_by_reason(self) -> Mapping[str, int]: ...

    @property
    def authentications(self) -> int: ...

    @property
    def authentication_failures(self) -> Mapping[str, int]: ...


class KafkaListenerLimits(Protocol):
    """Limits of the Kafka listeners."""

    @property
    def max_connections(self) -> int: ...


class RequestMemory(Protocol):
    """Memory of the requests that the Kafka listeners are receiving."""

    @property
    def held_bytes(self) -> int: ...


class KafkaAuthentication(Protocol):
    """Authentication of the clients of the Kafka listener."""

    @property
    def waiting_count(self) -> int: ...


class TlsHandshakes(Protocol):
    """Handshakes of one listener with TLS. `failed`: by reason."""

    @property
    def completed(self) -> int: ...

    @property
    def failed(self) -> Mapping[FailureReason, int]: ...


class KafkaListener(Protocol):
    """State of the Kafka listeners that metrics show."""

    @property
    def counters(self) -> KafkaListenerCounters: ...

    @property
    def limits(self) -> KafkaListenerLimits: ...

    @property
    def memory(self) -> RequestMemory: ...

    @property
    def authentication(self) -> KafkaAuthentication: ...

    @property
    def acceptors(self) -> Sequence[TlsHandshakes]: ...

    @property
    def waiting_handshake_count(self) -> int: ...

    @property
    def throttled_connection_count(self) -> int: ...

    @property
    def connection_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A started broker as health checks and metrics see it."""

    services: BrokerServices
    server: KafkaListener
    clients: RoutedClients
    address: Address
    """Address of the first Kafka listener."""
    is_ready: Callable[[], bool]
    """Whether every port accepts connections and the broker is not stopping."""
    etcd_member: EtcdMemberStatus | None = None
    """The etcd member that this broker runs; None if it runs none."""
    certificates: CertificateReloader | None = None
    """The certificate of the listeners with TLS; None if there are none."""


class Bounds(NamedTuple):
    """Limits of `/metrics`: the settings `metrics_partitions_max` and `metrics_series_max`."""

    partitions_max: int = 1000
    series_max: int = 1000


class MetricsSource(Protocol):
    """The data that `/metrics` returns."""

    @property
    def bounds(self) -> Bounds: ...

    def may_describe(self, caller: Caller) -> bool:
        """Whether a caller may see the names of topics and groups."""

    @property
    def is_in_cluster(self) -> bool:
        """Whether the broker is a member of a cluster; on a single node, metrics of replication are omitted."""

    def partition_samples(self) -> Iterable[PartitionSample]: ...

    def group_lags(self) -> Iterable[GroupLag]: ...

    def measurements(self) -> Iterable[Measurement]: ...

    def distributions(self) -> Iterable[Distribution]: ...

    def problems(self) -> Iterable[Problem]:
        """Return the problems because of which a running broker is not ready. Reasons: `log_failed`, `log_corrupt`,
        `partition_not_open`, `metadata_failed`, `session_not_held`."""


class BrokerStats(MetricsSource, Protocol):
    """The data that `/metrics` and `/health/ready` return."""

    @property
    def phase(self) -> Phase: ...

    def warnings(self) -> Iterable[Problem]:
        """Return the problems that an operator should know although the broker works. Reasons: `corrupt_batch`,
        `unreadable_batch`, `log_truncated`, `disk_full`, `hold_released`, `holds_not_loaded`, `dead_letters_pending`,
        `delayed_records_near_limit`, `schedule_cannot_fire`, and those of a cluster, see `metrics_cluster`."""

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` when a write fails because the disk is full, and when a write succeeds again afterwards."""
