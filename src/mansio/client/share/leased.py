"""Leased messages, options of a receiver, and errors of leases.

A `Leased` is a `Message` that is leased to this member. Invariants: it is acknowledged at most once; a message that
the client knows to be lost is not acknowledged any more, and the broker refuses an acknowledgement of any other.

Source: KIP-932 (share groups), KIP-1222 (renewal). Delays and reasons are Mansio's own (`wire.apis.mansio_apis`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX
from mansio.client.types import Message
from mansio.errors import InvalidRecordState, InvalidRequest, UnsupportedVersion
from mansio.net.retry import DEFAULT_BACKOFF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError
    from mansio.ports import Backoff

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
"""Types of acknowledgement, as the protocol numbers them."""

HELD, ACKNOWLEDGING, ACKNOWLEDGED, LOST = range(4)
"""State of a lease as known to the client."""

NOT_RENEWING, RENEWAL_WAITS, RENEWAL_SENT = range(3)

MILLISECONDS_PER_SECOND: Final = 1000


class LeaseLost(InvalidRecordState):
    """The record is not leased by this member any more: its lease or the connection of the lease ended. It is delivered
    again, to any member. If a response was lost, the acknowledgement may have been stored nevertheless."""


class DelayNotOffered(UnsupportedVersion):
    """The broker does not support retry delays (Apache Kafka does not): omit `after`."""


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """Options of a receiver; `Client.receive` describes them."""

    group: str
    max_records: int = 500
    auto_extend: bool = True
    extend_max_ms: float = 600_000
    fetch_wait_ms_max: int = 500
    fetch_bytes_max: int = 8 << 20
    prefetch_bytes_max: int = 32 << 20
    batch_bytes_max: int = BATCH_BYTES_MAX
    close_ms_max: float = 5_000
    """Maximum time that closing waits for brokers."""
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        if not self.group:
            raise InvalidRequest("a receiver needs a group")
        if not 0 < self.max_records <= 100_000:
            raise InvalidRequest(f"max_records must be from 1 to 100000, not {self.max_records}")
        if self.extend_max_ms < 0:
            raise InvalidRequest("extend_max_ms must not be negative")


class AckTarget(Protocol):
    """Acknowledges leased messages: `ack_sender.AckSender`."""

    async def acknowledge(self, message: Leased, kind: int, *, delay_ms: int = -1, reason: str = "") -> None:
        """Returns when it is stored. Raises `LeaseLost`, or the error of the broker."""

    def seconds_left(self, message: Leased) -> float:
        """Seconds until the lease ends, negative after that."""


class Lease:
    """Shared data of records leased by one response, or renewed by one request.

    Times are those of the loop, in seconds. `extend_until`: time up to which the lease is renewed before delivery;
    `each_bytes`: approximate size of one record.
    """

    __slots__ = ("ack_target", "deadline", "each_bytes", "extend_until", "lock_s")

    def __init__(
        self, ack_target: AckTarget, deadline: float, lock_s: float, extend_until: float, each_bytes: float
    ) -> None:
        self.ack_target = ack_target
        self.deadline = deadline
        self.lock_s = lock_s
        self.extend_until = extend_until
        self.each_bytes = each_bytes


class Leased(Message):
    """A record leased to this member; no other member of the group receives it during the lease.

    Call `ack`, `retry` or `reject`. A record without acknowledgement is delivered again when its lease ends.
    """

    # Mutable state is kept in the instance's dict: `wire.batch.record_reader` makes them as rows.
    delivery_count: int = 1
    """Delivery count of the record in this group, from 1."""
    _lease: Lease
    _state: int = HELD
    _ack_type: int = GAP
    _extend_until: float | None = None
    """Time up to which the lease is renewed; None before delivery to the application."""
    _is_suspect: bool = False
    _renewal: int = NOT_RENEWING

    @property
    def lease_until(self) -> datetime:
        """End of the lease if it is not renewed, by the local clock, in UTC."""
        return datetime.now(UTC) + timedelta(seconds=self._lease.ack_target.seconds_left(self))

    @property
    def is_acknowledged(self) -> bool:
        """Whether the broker has confirmed an `ack`, `retry` or `reject`."""
        return self._state == ACKNOWLEDGED

    @property
    def is_lost(self) -> bool:
        """Whether the client knows that the lease ended without acknowledgement."""
        return self._state == LOST

    async def ack(self) -> None:
        """Accept the record; returns when that is stored. Raises `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, ACCEPT)

    async def retry(self, after: float | None = None) -> None:
        """Release the record for delivery to any member `after` so many seconds; None for the group's backoff
        (`mansio.retry.backoff.ms`, growing with each attempt). At the group's `share.delivery.count.limit` it is
        dead-lettered instead. Raises `LeaseLost`; `DelayNotOffered` if the broker does not support delays."""
        if after is not None and not 0 <= after < 1e9:
            raise InvalidRequest(f"`after` must be at least 0 and below 1e9 seconds, not {after}")
        delay_ms = -1 if after is None else round(after * MILLISECONDS_PER_SECOND)
        await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=delay_ms)

    async def reject(self, reason: str = "") -> None:
        """Reject the record: it is copied to the group's dead-letter topic with `reason` in its headers (Apache Kafka
        drops the reason) and not delivered again. Raises `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, REJECT, reason=reason)

    async def extend(self) -> None:
        """Renew the lease: it lasts the group's `share.record.lock.duration.ms` from now (KIP-1222). Raises
        `LeaseLost`; `UnsupportedVersion` if the broker does not renew leases."""
        await self._lease.ack_target.acknowledge(self, RENEW)


class AckListener(Protocol):
    """Receives results of acknowledgements."""

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """The result of these messages; called on the event loop, must not raise."""


class AckFuture:
    """Result of several acknowledgements; the first error is raised."""

    __slots__ = ("_error", "_future", "_left")

    def __init__(self, future: Any, count: int) -> None:
        self._future = future
        self._left = count
        self._error: MansioError | None = None

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """The result of these messages."""
        self._left -= len(messages)
        self._error = self._error or error
        if self._left or self._future.done():
            return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)
