"""Leased messages, options of a receiver, and errors of leases.

A `Leased` is a `Message` that is leased to this member.

Invariants:
* A message is acknowledged at most once.
* The client does not acknowledge a message whose lease it knows to have ended. If the lease has ended without the
  client's knowledge, the broker refuses the acknowledgement.

Source: KIP-932 (share groups), KIP-1222 (renewal). Retry delays and reasons are extensions by Mansio
(`wire.apis.mansio_apis`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX
from mansio.client.types import Message
from mansio.errors import InvalidRequest
from mansio.net.retry import DEFAULT_BACKOFF
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError
    from mansio.ports import Backoff

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
"""Types of acknowledgement, with the numbers of the protocol (KIP-932, KIP-1222)."""

HELD, ACKNOWLEDGING, ACKNOWLEDGED, LOST = range(4)
"""States of a leased record as known to the client: leased; acknowledgement without result yet; acknowledged; lease
ended without acknowledgement."""

NO_RENEWAL, RENEWAL_QUEUED, RENEWAL_SENT = range(3)
"""States of a lease's renewal: none requested; waiting to be sent; sent to the broker."""

MILLISECONDS_PER_SECOND: Final = 1000

LEASE_MS_MAX: Final = 12 * 60 * 60 * 1000
"""Maximum duration of a lease that a member can choose."""


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
    lease_ms: int | None = None
    keeps_leases: bool = False
    prefetch: int | None = None
    close_ms_max: float = 5_000
    """Maximum time for which closing the receiver waits for brokers, in milliseconds."""
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        if not self.group:
            raise InvalidRequest("a receiver needs a group")
        if not 0 < self.max_records <= 100_000:
            raise InvalidRequest(f"max_records must be from 1 to 100000, not {self.max_records}")
        if self.prefetch is not None and not 0 <= self.prefetch <= self.max_records:
            raise InvalidRequest(f"prefetch must be from 0 to max_records, not {self.prefetch}")
        if self.lease_ms is not None:
            check_lease_ms(self.lease_ms, 1)
        if self.extend_max_ms < 0:
            raise InvalidRequest("extend_max_ms must not be negative")


class AckTarget(Protocol):
    """Interface through which a message is acknowledged, implemented by `ack_sender.AckSender`."""

    async def acknowledge(
        self, message: Leased, ack_type: int, *, delay_ms: int = -1, reason: str = ""
    ) -> None:
        """Acknowledge a message and return when the broker has stored the acknowledgement. Raises `LeaseLost` or the
        broker's error."""

    def renew_in_background(self, message: Leased) -> None:
        """Renew a lease without waiting; the result is recorded in `InFlightRecords`."""

    def release(self, message: Leased) -> None:
        """Release a message without waiting for the result, if it is held."""

    def seconds_left(self, message: Leased) -> float:
        """Return the number of seconds until the lease of the message ends, negative after its end."""


class Lease:
    """Lease of the records that one response granted, or of the record that one request renewed.

    `deadline_s` (end of the lease) and `extend_until_s` (time until which the lease is renewed before delivery) are
    times of the event loop. `lease_s`: duration of the lease; `record_bytes`: average size of a record. `is_chosen`:
    this member has chosen the duration, so that a renewal does not change it.
    """

    __slots__ = ("ack_target", "deadline_s", "extend_until_s", "is_chosen", "lease_s", "record_bytes")

    def __init__(
        self,
        ack_target: AckTarget,
        deadline: float,
        lease_s: float,
        extend_until: float,
        record_bytes: float,
        *,
        is_chosen: bool = False,
    ) -> None:
        self.ack_target = ack_target
        self.deadline_s = deadline
        self.lease_s = lease_s
        self.extend_until_s = extend_until
        self.record_bytes = record_bytes
        self.is_chosen = is_chosen


class Leased(Message):
    """A record leased to this member; no other member of the group receives it during the lease.

    Call `ack`, `retry` or `reject`. A record without acknowledgement is delivered again when its lease ends.
    """

    # A Leased is a tuple that `wire.batch.record_reader` creates; the mutable state is in its `__dict__`.
    delivery_count: int = 1
    """Delivery count of the record in this group, from 1."""
    _lease: Lease
    _state: int = HELD
    _ack_type: int = GAP
    _extend_until_s: float | None = None
    """Time of the event loop until which the lease is renewed; None before delivery to the application."""
    _is_suspect: bool = False
    _renewal_state: int = NO_RENEWAL

    @property
    def lease_until(self) -> datetime:
        """Time at which the lease ends if it is not renewed, by the local clock, in UTC."""
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
        """Accept the record: it is processed and is not delivered again. Returns when the broker has stored that.
        Raises `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, ACCEPT)

    async def retry(self, after: float | None = None) -> None:
        """Release the record, so that it is delivered again, to any member, in `after` seconds; None for the group's
        backoff (`mansio.retry.backoff.ms`, longer after each attempt). If its delivery count has reached the group's
        `share.delivery.count.limit`, the record is dead-lettered instead. Raises `LeaseLost`; `DelayNotOffered` if the
        broker does not support delays."""
        if after is not None and not 0 <= after < 1e9:
            raise InvalidRequest(f"`after` must be at least 0 and below 1e9 seconds, not {after}")
        delay_ms = -1 if after is None else round(after * MILLISECONDS_PER_SECOND)
        await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=delay_ms)

    async def reject(self, reason: str = "") -> None:
        """Reject the record, so that it is not delivered again. The broker copies it to the group's dead-letter topic
        with `reason` in its headers (Apache Kafka ignores the reason). Raises `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, REJECT, reason=reason)

    async def extend(self, lease_ms: int | None = None) -> None:
        """Renew the lease, which then ends `lease_ms` from now (0 to 12 hours), by default the duration that it was
        received or extended with, or `share.record.lock.duration.ms` of the group (KIP-1222). 0 releases the record at
        once.

        Raises `LeaseLost`; `UnsupportedVersion` if the broker does not renew leases, or only for the group's duration;
        `ValueError` for another duration."""
        if lease_ms is None:
            await self._lease.ack_target.acknowledge(self, RENEW)
            return
        check_lease_ms(lease_ms)
        if lease_ms == 0:
            await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=0)
        else:
            await self._lease.ack_target.acknowledge(self, RENEW, delay_ms=lease_ms)


def check_lease_ms(lease_ms: int, lowest_ms: int = 0) -> None:
    """Raise `ValueError` if this cannot be the duration of a lease."""
    is_number = isinstance(lease_ms, int) and not isinstance(lease_ms, bool)
    if not is_number or not lowest_ms <= lease_ms <= LEASE_MS_MAX:
        raise ValueError(f"lease_ms: not an integer from {lowest_ms} to 12 hours in ms: {lease_ms!r}")


class AckListener(Protocol):
    """Object that receives the results of acknowledgements."""

    def on_completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """Called on the event loop with the result of the acknowledgement of `messages`: an error, or None if the
        broker has stored it. Must not raise."""


class AckFuture:
    """Listener that completes `future` when the results of `message_count` messages are known; if an acknowledgement
    failed, with the first error."""

    __slots__ = ("_error", "_future", "_remaining")

    def __init__(self, future: Any, message_count: int) -> None:
        self._future = future
        self._remaining = message_count
        self._error: MansioError | None = None

    def on_completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """Record the result of `messages`."""
        self._remaining -= len(messages)
        self._error = self._error or without_traceback(error)
        if self._remaining or self._future.done():
            return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(copied(self._error))
