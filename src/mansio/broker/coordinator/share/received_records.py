"""Leased records that are decoded, for protocols whose clients have no share session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.errors import MansioError
    from mansio.wire.batch.record_batch import Header


@dataclass(frozen=True, slots=True)
class ReceivedRecord:
    """A leased record. `delivery_count`: 1 for the first delivery. `timestamp_ms`: since the Unix epoch."""

    topic: str
    topic_id: bytes
    partition: int
    offset: int
    delivery_count: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """Leased records; those of one partition are in the order of their offsets.

    `member_id`: the member that has the leases, each for `lock_ms`. `errors`: by (topic, partition). `throttle_ms`:
    time for which the client must pause (KIP-219).
    """

    member_id: str
    records: Sequence[ReceivedRecord]
    lock_ms: int
    errors: Mapping[tuple[str, int], MansioError]
    throttle_ms: int = 0
