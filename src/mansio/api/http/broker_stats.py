"""What the HTTP door asks a running broker for.

`MetricsSource` is all that `/metrics` needs; `BrokerStats` adds what readiness needs. Both are protocols, so
a test hands in a few values and no broker. `service_view.ServiceStats` reads them off the real broker.

Always true: every method only reads plain attributes, on the broker's loop, when somebody asks. The hot
path keeps no metric of its own for our sake but plain integers it counts anyway. What is iterated over may
be read in pieces, with other work of the loop between them.
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
    """A follower of a partition as its leader sees it: how far its durable end is behind the leader's log, and for how
    long it has not had all of it. `records` is -1 while it has not told its end to this leader."""

    broker: int
    records: int
    seconds: float


class LeaderSample(NamedTuple):
    """What a broker of a cluster knows of a partition that it leads."""

    is_under_replicated: bool
    is_under_min_isr: bool
    followers: Sequence[FollowerSample]


class PartitionSample(NamedTuple):
    """One partition at one moment. Offsets count records, sizes bytes; `failed` is true after a storage
    failure. `led` only in a cluster, by its leader.
    """

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
    """Something that keeps a running broker from doing its work. `reason` is one of the words of `health`, `detail`
    is for people; `topic` and `partition` where it is about one partition.
    """

    reason: str
    detail: str
    topic: str = ""
    partition: int = -1


class GroupLag(NamedTuple):
    """How many records one group has still to read in one topic; `offsets` of its partitions were looked at."""

    group: str
    topic: str
    records: int
    offsets: int


class Measurement(NamedTuple):
    """One number of the broker. `name` without the `mansio_` prefix and, for a counter, without `_total`.

    `labels` are pairs; all measurements of one name carry the same label names and the same kind.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Distribution(NamedTuple):
    """A histogram: `counts[i]` observations at or below `bounds[i]` seconds and above the bound before; the last of
    `counts` is above all bounds. `name` ends in `_seconds`.
    """

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
    """How much `/metrics` may show: see the settings of these names."""

    partitions_max: int = 1000
    series_max: int = 1000


class MetricsSource(Protocol):
    """What `/metrics` shows."""

    @property
    def bounds(self) -> Bounds: ...

    @property
    def clustered(self) -> bool:
        """Whether it is one of a cluster: a single broker has no replicas to tell of."""

    def partition_samples(self) -> Iterable[PartitionSample]: ...

    def group_lags(self) -> Iterable[GroupLag]: ...

    def measurements(self) -> Iterable[Measurement]: ...

    def distributions(self) -> Iterable[Distribution]: ...

    def problems(self) -> Iterable[Problem]:
        """Everything that keeps a running broker from doing its work. Reasons: `log_failed`, `log_corrupt`,
        `partition_not_open`, `metadata_failed`, `session_not_held`."""


class BrokerStats(MetricsSource, Protocol):
    """What `/metrics` and `/health/ready` show."""

    @property
    def phase(self) -> Phase: ...

    def warnings(self) -> Iterable[Problem]:
        """What somebody should look at, although the broker does its work. Reasons: `corrupt_batch`, `log_truncated`,
        `disk_full`, `hold_released`, `holds_not_loaded`, `dead_letters_pending`, and those of a cluster: see
        `metrics_cluster`."""

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        """Have `listener` called when a write finds the disk full, and when one finds room again."""
