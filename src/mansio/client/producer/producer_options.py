"""Options of a producer, validated when `ProducerOptions` is created."""

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
    """Options of a producer. Raises `ValueError` for an invalid value. Sizes are in bytes, times in milliseconds.

    `acks`: when the broker acknowledges a record. "all": every in-sync replica has flushed it to disk; 1: it is in the
    leader's page cache; 0: the broker sends no response.
    `idempotent`: whether retries store each record at most once; None: exactly if `acks` is "all".
    `when_full`: whether publishing waits for buffer space or raises `QueueFull` while `buffer_bytes_max` bytes are
    unacknowledged.
    `delivery_timeout_ms`: time after which a record that is not acknowledged fails with `RequestTimedOut`.
    `record_ids`: whether each record gets an id, the header `mansio-id` with a UUID of version 7, by which its history
    is found. A record that has such a header keeps it. The id takes 48 bytes, and is in the `RecordMetadata`.
    `in_flight_batches_max`: number of batches per partition that are sent before the first one is acknowledged.
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
    record_ids: bool = False
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
        """Whether the producer is idempotent: `idempotent`, or the default for `acks` if it is None."""
        return self.acks == "all" if self.idempotent is None else self.idempotent
