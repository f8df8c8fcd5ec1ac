"""ListOffsets (2), DeleteRecords (21), InitProducerId (22) and OffsetForLeaderEpoch (23).

Version notes: ListOffsets 2 isolation level, 4 leader epochs, 7 the offset of the highest timestamp (KIP-734), 8 the
earliest local offset (KIP-405: here all is local), 9 the last tiered one (there is none: -1). A partition that is named
more than once gets INVALID_REQUEST each time, as in Kafka; a look-up by time may open a large batch, so others have
their turn in between.
DeleteRecords (KIP-107) answers when the new start of the log is durable on every in-sync replica (Kafka's brokers do
not wait for disks): deleted records do not come back. Internal topics get INVALID_TOPIC_EXCEPTION, compacted ones that
do not delete POLICY_VIOLATION.
InitProducerId 3 carries the producer's last id and epoch (KIP-360); an idempotent producer always gets a new id.
OffsetForLeaderEpoch answers where an epoch ended (KIP-101, KIP-279), so that a client can tell whether its position
was truncated.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import InvalidRequest, MansioError, RequestTimedOut, TransactionsNotOffered

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.ports import Promise
    from mansio.wire.codec.messages import Struct

NO_LOW_WATERMARK = -1

SLICE_S = 0.01
"""So long offsets are looked up before others have their turn."""


async def list_offsets(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Offsets by time, and the ends of the log."""
    named = Counter(
        (topic.name, wanted.partition_index) for topic in request.topics for wanted in topic.partitions
    )
    slice_end = service.clock.monotonic() + SLICE_S
    topics = []
    for topic in request.topics:
        answers = []
        for wanted in topic.partitions:
            if named[topic.name, wanted.partition_index] > 1:
                answers.append(_no_offset(wanted.partition_index, InvalidRequest.kafka_code))
                continue
            answers.append(_list_offset(service, topic.name, wanted, request.isolation_level))
            if service.clock.monotonic() >= slice_end:
                await _yield_to_loop(service)
                slice_end = service.clock.monotonic() + SLICE_S
        topics.append({"name": topic.name, "partitions": answers})
    return {"topics": topics}


async def _yield_to_loop(service: BrokerServices) -> None:
    turn: Promise[None] = service.scheduler.promise()
    service.scheduler.call_soon(_over, turn)
    await turn


def _over(turn: Promise[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _list_offset(service: BrokerServices, topic: str, wanted: Struct, isolation_level: int) -> dict[str, Any]:
    try:
        partition = service.records.readable(topic, None, wanted.partition_index)
        partition.check_leader_epoch(wanted.current_leader_epoch)
        offset, timestamp, epoch = service.records.look_up(partition, wanted.timestamp, isolation_level)
    except MansioError as error:
        return _no_offset(wanted.partition_index, error.kafka_code)
    return {
        "partition_index": wanted.partition_index,
        "error_code": 0,
        "timestamp": timestamp,
        "offset": offset,
        "leader_epoch": epoch,
    }


def _no_offset(index: int, code: int) -> dict[str, Any]:
    return {
        "partition_index": index,
        "error_code": code,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": -1,
    }


async def delete_records(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Delete the records below an offset, in many partitions at once."""
    begun: list[tuple[str, list[tuple[int, Promise[int] | MansioError]]]] = []
    waits: list[Promise[int]] = []
    for topic in request.topics:
        entries: list[tuple[int, Promise[int] | MansioError]] = []
        for wanted in topic.partitions:
            try:
                promise = service.records.delete(topic.name, wanted.partition_index, wanted.offset)
            except MansioError as error:
                entries.append((wanted.partition_index, error))
            else:
                entries.append((wanted.partition_index, promise))
                waits.append(promise)
        begun.append((topic.name, entries))
    timeout_ms = min(max(0, request.timeout_ms), service.settings.produce_wait_ms_max)
    timer = service.scheduler.call_later(timeout_ms, _time_out, waits)
    try:
        topics = [
            {"name": name, "partitions": [await _deleted(index, begun) for index, begun in entries]}
            for name, entries in begun
        ]
    finally:
        timer.cancel()
    return {"topics": topics}


def _time_out(waits: list[Promise[int]]) -> None:
    for wait in waits:
        if not wait.done():
            wait.set_exception(
                RequestTimedOut(
                    "the records are deleted, but that did not become durable on all replicas in time"
                )
            )


async def _deleted(index: int, begun: Promise[int] | MansioError) -> dict[str, Any]:
    try:
        if isinstance(begun, MansioError):
            raise begun
        low_watermark = await begun
    except MansioError as error:
        return {
            "partition_index": index,
            "low_watermark": NO_LOW_WATERMARK,
            "error_code": error.kafka_code,
        }
    return {"partition_index": index, "low_watermark": low_watermark, "error_code": 0}


async def init_producer_id(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """A producer id for an idempotent producer."""
    if request.transactional_id is not None:
        if not request.transactional_id:
            raise InvalidRequest("the transactional id is empty")
        raise TransactionsNotOffered
    producer_id = await service.records.new_producer_id()
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}


async def offset_for_leader_epoch(
    service: BrokerServices,
    request: Struct,
    context: RequestContext,
) -> dict[str, Any]:
    """Where an epoch ended in each partition."""
    topics = [
        {
            "topic": topic.topic,
            "partitions": [_epoch_end(service, topic.topic, wanted) for wanted in topic.partitions],
        }
        for topic in request.topics
    ]
    return {"topics": topics}


def _epoch_end(service: BrokerServices, topic: str, wanted: Struct) -> dict[str, Any]:
    try:
        partition = service.records.readable(topic, None, wanted.partition)
        partition.check_leader_epoch(wanted.current_leader_epoch)
        epoch, end_offset = partition.log.end_offset_for_epoch(wanted.leader_epoch)
    except MansioError as error:
        return {
            "error_code": error.kafka_code,
            "partition": wanted.partition,
            "leader_epoch": -1,
            "end_offset": -1,
        }
    return {"error_code": 0, "partition": wanted.partition, "leader_epoch": epoch, "end_offset": end_offset}
