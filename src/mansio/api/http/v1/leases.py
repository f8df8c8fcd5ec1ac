"""Share groups over HTTP: receive records on leases, and acknowledge, retry, reject or extend them by receipt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field
from starlette.responses import Response

from mansio.api.asgi.problems import error_value
from mansio.api.http.v1.answers import records_answer
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.api.http.v1.values import Record, ValueFormat  # noqa: TC001  # pydantic reads the types
from mansio.broker.services.share_groups.leases import (
    ACKNOWLEDGEMENTS_MAX,
    REASON_CHARACTERS_MAX,
    Acknowledgement,
)
from mansio.state.share_partition.types import (
    ACCEPT,
    LEASE_MS_MAX,
    REJECT,
    RELEASE,
    RENEW,
    REQUESTED_DELAY_MS_MAX,
)
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from mansio.broker.coordinator.share.received_records import ReceivedRecord

LEASED_RECORDS_MAX: Final = 1_000
TOPICS_MAX: Final = 100
WAIT_MS_MAX: Final = 30_000
BYTES_MAX: Final = 4 << 20

Receipts = Annotated[
    list[Annotated[str, Field(max_length=100)]], Field(min_length=1, max_length=ACKNOWLEDGEMENTS_MAX)
]


class Receive(Body):
    topics: Annotated[list[str], Field(min_length=1, max_length=TOPICS_MAX)]
    max_records: Annotated[int, Field(ge=1, le=LEASED_RECORDS_MAX)] = 1
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = Field(
        0, description="Wait for a record, if there is none."
    )
    lease_ms: Annotated[int, Field(ge=0, le=LEASE_MS_MAX)] | None = Field(
        None, description="Duration of the leases; the group's, if there is none."
    )
    values: ValueFormat = "auto"


class Received(Body):
    """Leased records. `errors`: partitions from which none could be leased."""

    records: list[Record]
    lease_ms: int
    errors: list[dict[str, Any]]


class Ack(Body):
    receipts: Receipts


class Retry(Body):
    receipts: Receipts
    delay_ms: Annotated[int, Field(ge=0, le=REQUESTED_DELAY_MS_MAX)] | None = Field(
        None,
        description="Time until the records are offered again; by the group's backoff, if there is none.",
    )


class Reject(Body):
    receipts: Receipts
    reason: Annotated[str, Field(max_length=REASON_CHARACTERS_MAX)] = ""


class Extend(Body):
    receipts: Receipts
    lease_ms: Annotated[int, Field(ge=0, le=LEASE_MS_MAX)] | None = Field(
        None, description="New duration of the leases from now on; the same as before, if there is none."
    )


class Acknowledged(Result):
    """`errors`: the receipts that had no effect, by position."""

    acknowledged: int
    errors: list[dict[str, Any]]


async def receive(call: Call) -> Response:
    body: Receive = call.body
    group, leases = call.path("group"), call.services.leases
    work = asyncio.ensure_future(
        leases.receive(
            group,
            [check_topic_name(topic) for topic in body.topics],
            max_records=body.max_records,
            max_wait_ms=body.wait_ms,
            max_bytes=BYTES_MAX,
            lease_ms=-1 if body.lease_ms is None else body.lease_ms,
            caller=call.caller,
        )
    )
    disconnected = asyncio.ensure_future(call.request.receive())  # the body is read: it can only be the end
    try:
        await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # its client is gone
        result = work.result()
        if disconnected.done():
            await leases.release(group, result.member_id, caller=call.caller)
            return Response(status_code=499)
    finally:
        work.cancel()
        disconnected.cancel()
        await asyncio.wait({work, disconnected})
    if result.errors and not result.records:
        raise next(iter(result.errors.values()))
    errors = [
        {"topic": topic, "partition": partition, **error_value(error)}
        for (topic, partition), error in result.errors.items()
    ]

    def fields(record: ReceivedRecord) -> dict[str, Any]:
        return {
            "receipt": leases.receipt_of(result, record),
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "delivery_count": record.delivery_count,
            "timestamp_ms": record.timestamp_ms,
        }

    return records_answer(result.records, body.values, fields, {"lease_ms": result.lock_ms, "errors": errors})


async def _acknowledge(
    call: Call, receipts: list[str], kind: int, delay_ms: int | None = None, reason: str = ""
) -> Acknowledged:
    acknowledgements = [
        Acknowledgement(receipt, kind, -1 if delay_ms is None else delay_ms, reason) for receipt in receipts
    ]
    results = await call.services.leases.acknowledge(call.path("group"), acknowledgements, caller=call.caller)
    failed = [(position, error) for position, error in enumerate(results) if error is not None]
    if failed and len(receipts) == 1:
        raise copied(failed[0][1])
    errors = [{"position": position, **error_value(error)} for position, error in failed]
    return Acknowledged(acknowledged=len(receipts) - len(failed), errors=errors)


async def ack(call: Call) -> Acknowledged:
    return await _acknowledge(call, call.body.receipts, ACCEPT)


async def retry(call: Call) -> Acknowledged:
    return await _acknowledge(call, call.body.receipts, RELEASE, call.body.delay_ms)


async def reject(call: Call) -> Acknowledged:
    return await _acknowledge(call, call.body.receipts, REJECT, reason=call.body.reason)


async def extend(call: Call) -> Acknowledged:
    return await _acknowledge(call, call.body.receipts, RENEW, call.body.lease_ms)


def _operation(name: str, summary: str, handler: Any, body: Any, result: Any = Acknowledged) -> Operation:
    return Operation(
        "POST", f"/groups/{{group}}/{name}", summary, handler, body=body, result=result, tag="share groups"
    )


OPERATIONS: Final = (
    _operation("receive", "Receive records, each on a lease", receive, Receive, Received),
    _operation("ack", "Acknowledge records: they are done", ack, Ack),
    _operation("retry", "Release records: they are delivered again", retry, Retry),
    _operation("reject", "Reject records: they become dead letters", reject, Reject),
    _operation("extend", "Extend leases", extend, Extend),
)
