"""What a receiver hands out, what it was asked for, and what can go wrong with a lease.

A `Leased` is a `Message` that belongs to this member for a while. Always true: it is settled at most once; what this
client knows to be lost is not settled any more, and what it does not know the broker refuses.

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
"""What this client knows of a lease."""

NOT_RENEWING, RENEWAL_WAITS, RENEWAL_SENT = range(3)

MILLISECONDS_PER_SECOND: Final = 1000


class LeaseLost(InvalidRecordState):
    """The record is not leased by this member any more: its lease ended, or the connection that it belonged to. It
    comes again, to whichever member. Where an answer was lost on the way it may have been settled all the same."""


class DelayNotOffered(UnsupportedVersion):
    """The broker knows no delay of its own for a retry (Apache Kafka does not): leave `after` out."""


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """How to receive; see `Client.receive` for the meaning."""

    group: str
    max_records: int = 500
    auto_extend: bool = True
    extend_max_ms: float = 600_000
    fetch_wait_ms_max: int = 500
    fetch_bytes_max: int = 8 << 20
    prefetch_bytes_max: int = 32 << 20
    batch_bytes_max: int = BATCH_BYTES_MAX
    close_ms_max: float = 5_000
    """How long closing may wait for brokers that do not answer."""
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        if not self.group:
            raise InvalidRequest("receiving needs a group")
        if not 0 < self.max_records <= 100_000:
            raise InvalidRequest(f"max_records is from 1 to 100000, not {self.max_records}")
        if self.extend_max_ms < 0:
            raise InvalidRequest("extend_max_ms must not be negative")


class AckTarget(Protocol):
    """Who settles leases: a receiver's `settles.AckSender`."""

    async def acknowledge(self, message: Leased, kind: int, *, delay_ms: int = -1, reason: str = "") -> None:
        """Returns when it is so; `LeaseLost`, or what the broker refused."""

    def seconds_left(self, message: Leased) -> float:
        """Until the lease ends; below 0 when it has."""


class Lease:
    """What records have in common that came in one answer, or whose leases were extended together.

    Times are the loop's, in seconds. `extend_until`: up to when it is extended while the application has not got
    the record;
    `each_bytes`: what one of the records takes, about.
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
    """A record that this member has for a while, and that nobody else in the group gets meanwhile.

    Say what became of it: `ack`, `retry` or `reject`; what is not settled comes again when its lease ends.
    """

    # What changes is kept beside the tuple, in the instance's dict: `wire.batch.record_reader` makes them as rows.
    delivery_count: int = 1
    """Which delivery of the record in this group this is, from 1."""
    _lease: Lease
    _state: int = HELD
    _ack_type: int = GAP
    _extend_until: float | None = None
    """Up to when its lease is extended; None: the application has not got it yet."""
    _is_suspect: bool = False
    _renewal: int = NOT_RENEWING

    @property
    def lease_until(self) -> datetime:
        """When the lease ends if nobody extends it, by this machine's clock, in UTC."""
        return datetime.now(UTC) + timedelta(seconds=self._lease.ack_target.seconds_left(self))

    @property
    def is_acknowledged(self) -> bool:
        """Whether it was acknowledged, given back or rejected, and the broker has said yes."""
        return self._state == ACKNOWLEDGED

    @property
    def is_lost(self) -> bool:
        """Whether this client knows that the lease is over without having been settled."""
        return self._state == LOST

    async def ack(self) -> None:
        """It is done with; returns when that is stored. `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, ACCEPT)

    async def retry(self, after: float | None = None) -> None:
        """Give it back, to be tried again by any member `after` so many seconds; None: after the group's backoff
        (`mansio.retry.backoff.ms`, growing with each try). At the group's `share.delivery.count.limit` it goes to the
        dead letters instead. `LeaseLost`; `DelayNotOffered` for a delay where the broker knows none."""
        if after is not None and not 0 <= after < 1e9:
            raise InvalidRequest(f"a record cannot be tried again after {after} seconds")
        delay_ms = -1 if after is None else round(after * MILLISECONDS_PER_SECOND)
        await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=delay_ms)

    async def reject(self, reason: str = "") -> None:
        """No member is to try it again: it goes to the group's dead-letter topic, with `reason` in its headers where
        the broker is Mansio (Apache Kafka keeps none). `LeaseLost`."""
        await self._lease.ack_target.acknowledge(self, REJECT, reason=reason)

    async def extend(self) -> None:
        """The lease lasts the group's `share.record.lock.duration.ms` from now (KIP-1222). `LeaseLost`;
        `UnsupportedVersion` where the broker cannot do that."""
        await self._lease.ack_target.acknowledge(self, RENEW)


class AckListener(Protocol):
    """Who is told what becomes of what was said."""

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """It is known of these; called on the loop's thread, and raises nothing."""


class AckFuture:
    """What one or more settles that somebody waits for together came to. The first error counts."""

    __slots__ = ("_error", "_future", "_left")

    def __init__(self, future: Any, count: int) -> None:
        self._future = future
        self._left = count
        self._error: MansioError | None = None

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """It is known what became of these."""
        self._left -= len(messages)
        self._error = self._error or error
        if self._left or self._future.done():
            return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)
