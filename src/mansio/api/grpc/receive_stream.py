"""One Receive stream: records out as far as the client has given credits, acknowledgements in.

Invariants:
* No more records are sent than credits were given, and at most `CREDITS_MAX` credits are open.
* When the stream ends, the leases of records without an acknowledgement are released; their deliveries do not count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.answers import records_response
from mansio.api.grpc.conversion import error_of
from mansio.api.grpc.requests import parse
from mansio.broker.services.share_groups.leases import Acknowledgement, Receipt
from mansio.broker.services.share_groups.receive_records import RECEIVED_RECORDS_MAX
from mansio.errors import InvalidRequest
from mansio.state.share_partition.types import ACCEPT, REJECT, RELEASE, RENEW

if TYPE_CHECKING:
    from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices

CREDITS_MAX: Final = 100_000
RECORDS_DEFAULT: Final = 500
TOPICS_MAX: Final = 100
WAIT_MS: Final = 10_000
RETRY_S: Final = 0.2
MEMBER_CHARACTERS: Final = 22
"""Characters at the start of a receipt that contain the id of its member."""


class ReceiveStream:
    """A stream of one client. `run` ends with the stream."""

    def __init__(self, services: BrokerServices, context: Any, caller: Caller) -> None:
        self._services = services
        self._context = context
        self._caller = caller
        self._credits = 0
        self._has_credits = asyncio.Event()
        self._open: Counter[str] = Counter()
        """Number of records without acknowledgement, by the member that has leased them."""
        self._acknowledged = 0
        self._writing = asyncio.Lock()
        self._group = ""

    async def run(self) -> None:
        """Serve the stream. Raises `MansioError`."""
        first = await self._next()
        if first is grpc.aio.EOF or not first.HasField("open"):
            raise InvalidRequest("the first request of a Receive stream has `open`")
        opening = first.open
        self._group = opening.group
        if not 1 <= len(opening.topics) <= TOPICS_MAX:
            raise InvalidRequest(f"topics: 1 to {TOPICS_MAX}")
        if not 0 <= opening.max_records <= RECEIVED_RECORDS_MAX:
            raise InvalidRequest(f"max_records: 0 to {RECEIVED_RECORDS_MAX}")
        self._services.leases.check(opening.group, _lease_ms(opening))
        self._add_credits(first.credits)
        sending = asyncio.ensure_future(self._send(opening))
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
            for each in (reading, sending):
                if each.done():
                    each.result()
        finally:
            for each in (reading, sending):
                each.cancel()
            try:
                await asyncio.gather(reading, sending, return_exceptions=True)
            finally:  # the server may cancel this call more than once
                for member in self._open:
                    self._services.scheduler.spawn(
                        self._services.leases.release(self._group, member, caller=self._caller),
                        name="release leases",
                    )

    async def _next(self) -> Any:
        """Return the next request of the client, or `EOF`. Raises `InvalidRequest`."""
        data = await self._context.read()
        return data if data is grpc.aio.EOF else parse(pb.ReceiveRequest, data)

    def _add_credits(self, count: int) -> None:
        if count < 0 or self._credits + count > CREDITS_MAX:
            raise InvalidRequest(f"credits: at most {CREDITS_MAX} are open")
        self._credits += count
        if self._credits:
            self._has_credits.set()

    async def _send(self, opening: Any) -> None:
        """Receive records and send them, as long as there are credits."""
        topics = list(opening.topics)
        limit = opening.max_records or RECORDS_DEFAULT
        lease_ms = _lease_ms(opening)
        while True:
            await self._has_credits.wait()
            result = await self._services.leases.receive(
                self._group,
                topics,
                max_records=min(limit, self._credits),
                max_wait_ms=WAIT_MS,
                lease_ms=lease_ms,
                caller=self._caller,
            )
            count = len(result.records)
            if not count:
                if result.errors:
                    raise next(iter(result.errors.values()))
                continue
            self._open[result.member_id] += count
            self._credits -= count
            if self._credits <= 0:
                self._has_credits.clear()
            delivery = partial(self._delivery, result)
            await self._write(await records_response(pb.ReceiveResponse, result.records, delivery))

    def _delivery(self, result: ReceiveResult, record: ReceivedRecord) -> tuple[str, int]:
        """Return receipt and delivery count of a record of `result`."""
        return self._services.leases.receipt_of(result, record), record.delivery_count

    async def _write(self, response: Any) -> None:
        async with self._writing:
            if not isinstance(response, bytes):  # a large one, which is encoded already, has no other fields
                response.acknowledged, self._acknowledged = self._acknowledged, 0
            await self._context.write(response)

    async def _read(self) -> None:
        """Apply the requests of the client until it ends the stream."""
        while (request := await self._next()) is not grpc.aio.EOF:
            if request.HasField("open"):
                raise InvalidRequest("only the first request of a Receive stream has `open`")
            self._add_credits(request.credits)
            acknowledgements = [
                *(Acknowledgement(receipt, ACCEPT) for receipt in request.ack),
                *acknowledgements_of(RELEASE, request.retry),
                *acknowledgements_of(REJECT, request.reject),
                *acknowledgements_of(RENEW, request.extend),
            ]
            if acknowledgements:
                await self._acknowledge(acknowledgements)

    async def _acknowledge(self, acknowledgements: list[Acknowledgement]) -> None:
        results = await self._services.leases.acknowledge(self._group, acknowledgements, caller=self._caller)
        failed, closed = [], []
        for each, error in zip(acknowledgements, results, strict=True):
            if error is not None:
                failed.append(pb.FailedAcknowledgement(receipt=each.receipt, error=error_of(error)))
                continue
            self._acknowledged += 1
            if each.kind != RENEW:
                closed.append(each.receipt)
        self._close_records(closed)
        await self._write(pb.ReceiveResponse(failed=failed))

    def _close_records(self, receipts: list[str]) -> None:
        """Count records as acknowledged. Receipts with equal first characters are those of one member, so that one of
        them is decoded."""
        starts = [receipt[:MEMBER_CHARACTERS] for receipt in receipts]
        members = dict(zip(starts, receipts, strict=True))
        for start, count in Counter(starts).items():
            member = Receipt.decode(members[start]).member_id
            if member in self._open:
                self._open[member] -= count
                if self._open[member] <= 0:
                    del self._open[member]


def acknowledgements_of(kind: int, entries: Any) -> list[Acknowledgement]:
    """Return the acknowledgements of `Retry`, `Reject` or `Extend` messages. Raises `InvalidRequest`."""
    if kind == RELEASE:
        return [
            Acknowledgement(each.receipt, kind, _delay(each.delay_ms) if each.HasField("delay_ms") else -1)
            for each in entries
        ]
    if kind == RENEW:
        return [
            Acknowledgement(each.receipt, kind, _delay(each.lease_ms) if each.HasField("lease_ms") else -1)
            for each in entries
        ]
    return [Acknowledgement(each.receipt, kind, reason=each.reason) for each in entries]


def _lease_ms(opening: Any) -> int:
    """Return the duration of the leases, -1 for the group's. Raises `InvalidRequest`."""
    return _delay(opening.lease_ms) if opening.HasField("lease_ms") else -1


def _delay(delay_ms: int) -> int:
    if delay_ms < 0:
        raise InvalidRequest(f"{delay_ms} ms is not between 0 and the maximum")
    return delay_ms
