"""Options of a producer, validated when they are created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mansio.net.retry import DEFAULT_BACKOFF
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from mansio.ports import Backoff

CODECS = {codec.name.lower(): codec for codec in Codec}


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options of a producer. Sizes are in bytes, times in milliseconds.

    `acks`: "all" (flushed to disk on every in-sync replica), 1 (in the leader's page cache), 0 (no response).
    `idempotent`: None means yes with acks "all". `when_full`: wait for buffer space, or raise `QueueFull`.
    """

    acks: Literal["all", 1, 0] = "all"
    idempotent: bool | None = None
    codec: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    batch_bytes_max: int = 128 << 10
    request_bytes_max: int = 1 << 20
    linger_ms: float = 0
    buffer_bytes_max: int = 32 << 20
    when_full: Literal["wait", "raise"] = "wait"
    delivery_timeout_ms: float = 120_000
    in_flight_batches_max: int = 5
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        if self.acks not in ("all", 1, 0):
            raise ValueError(f"acks must be 'all', 1 or 0, not {self.acks!r}")
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {self.codec!r}")
        if self.idempotent and self.acks != "all":
            raise ValueError("an idempotent producer needs acks='all'")
        if not 1 <= self.in_flight_batches_max <= (5 if self.is_idempotent else 1_000):
            raise ValueError("in_flight_batches_max must be 1 to 5 for an idempotent producer")
        if self.batch_bytes_max > self.buffer_bytes_max:
            raise ValueError("batch_bytes_max must fit into buffer_bytes_max")

    @property
    def is_idempotent(self) -> bool:
        return self.acks == "all" if self.idempotent is None else self.idempotent
