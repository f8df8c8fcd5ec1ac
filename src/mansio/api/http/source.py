"""What the HTTP door asks a running broker for.

`MetricsSource` is all that `/metrics` needs; `BrokerView` adds what readiness needs. Both are protocols, so
a test hands in a few values and no broker. `service_view.ServiceView` reads them off the real broker.

Always true: every method only reads plain attributes, on the broker's loop, when somebody asks. The hot
path keeps no metric of its own for our sake but plain integers it counts anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

Phase = Literal["starting", "running", "stopping"]


class PartitionSample(NamedTuple):
    """One partition at one moment. Offsets count records, sizes bytes; `failed` is true after a storage
    failure.
    """

    topic: str
    partition: int
    leader_epoch: int
    start_offset: int
    end_offset: int
    high_watermark: int
    size_bytes: int
    failed: bool


class Measurement(NamedTuple):
    """One number of the broker. `name` without the `mansio_` prefix and, for a counter, without `_total`.

    `labels` are pairs; all measurements of one name carry the same label names and the same kind.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricsSource(Protocol):
    """What `/metrics` shows."""

    def partition_samples(self) -> Iterable[PartitionSample]: ...

    def measurements(self) -> Iterable[Measurement]: ...


class BrokerView(MetricsSource, Protocol):
    """What `/metrics` and `/health/ready` show."""

    @property
    def phase(self) -> Phase: ...

    def problems(self) -> Iterable[tuple[str, str]]:
        """(reason, detail) of everything that keeps a running broker from doing its work. Reasons: `log_failed`,
        `partition_not_open`, `metadata_failed`."""
