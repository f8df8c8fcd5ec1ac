"""ListOffsets (2), DeleteRecords (21), InitProducerId (22) and OffsetForLeaderEpoch (23).

Behavior
* ListOffsets: a partition named more than once gets INVALID_REQUEST each time, as in Kafka. A search by timestamp may
  decompress a large batch, so the event loop is yielded every `SLICE_S`.
* DeleteRecords (KIP-107) responds when the new log start is flushed on every in-sync replica (Kafka's brokers do not
  wait for disks), so that deleted records do not return. Internal topics get INVALID_TOPIC_EXCEPTION, compacted ones
  without deletion POLICY_VIOLATION.
* InitProducerId: an idempotent producer always gets a new id.
* OffsetForLeaderEpoch returns the end offset of an epoch (KIP-101, KIP-279), so that a client can detect that its
  position was truncated.

Version notes
* ListOffsets 2: isolation level. 4: leader epochs. 7: offset of the highest timestamp (KIP-734). 8: earliest local
  offset (KIP-405; all data is local). 9: last tiered offset (none: -1).
* InitProducerId 3: the producer's last id and epoch (KIP-360).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import InvalidRequest, MansioError, RequestTimedOut, TransactionsNotOffered

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.ports import Promise
    from mansio.wire.codec.messages import Struct

NO_LOW_WATERMARK = -1

SLICE_S = 0.01
"""Time after which a request yields the event loop."""


async def list_offsets(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Offsets by timestamp, and the start and end of the log."""
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
    promise: Promise[None] = service.scheduler.promise()
    service.scheduler.call_soon(_resume, promise)
    await promise


def _resume(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)


def _list_offset(service: BrokerServices, topic: str, wanted: Struct, isolation_level: int) -> dict[str, Any]:
    try:
        found = service.records.list_offset(
            topic,
            None,
            wanted.partition_index,
            wanted.timestamp,
            isolation_level=isolation_level,
            leader_epoch=wanted.current_leader_epoch,
        )
    except MansioError as error:
        return _no_offset(wanted.partition_index, error.kafka_code)
    return {
        "partition_index": wanted.partition_index,
        "error_code": 0,
        "timestamp": found.timestamp_ms,
        "offset": found.offset,
        "leader_epoch": found.leader_epoch,
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
    """Delete the records below an offset in several partitions."""
    pending: list[tuple[str, list[tuple[int, Promise[int] | MansioError]]]] = []
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
        pending.append((topic.name, entries))
    timeout_ms = min(max(0, request.timeout_ms), service.settings.produce_wait_ms_max)
    timer = service.scheduler.call_later(timeout_ms, _time_out, waits)
    try:
        topics = [
            {"name": name, "partitions": [await _deleted(index, one) for index, one in entries]}
            for name, entries in pending
        ]
    finally:
        timer.cancel()
    return {"topics": topics}


def _time_out(waits: list[Promise[int]]) -> None:
    for wait in waits:
        if not wait.done():
            wait.set_exception(
                RequestTimedOut("the records are deleted, but not all replicas flushed the deletion in time")
            )


async def _deleted(index: int, pending: Promise[int] | MansioError) -> dict[str, Any]:
    try:
        if isinstance(pending, MansioError):
            raise pending
        low_watermark = await pending
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
    """Assign a producer id to an idempotent producer."""
    if request.transactional_id is not None:
        if not request.transactional_id:
            raise InvalidRequest("the transactional id is empty")
        raise TransactionsNotOffered
    producer_id = await service.producer_ids.new_producer_id()
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}


async def offset_for_leader_epoch(
    service: BrokerServices,
    request: Struct,
    context: RequestContext,
) -> dict[str, Any]:
    """The end offset of an epoch in each partition."""
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
        end = service.records.epoch_end(
            topic,
            None,
            wanted.partition,
            wanted.leader_epoch,
            current_leader_epoch=wanted.current_leader_epoch,
        )
    except MansioError as error:
        return {
            "error_code": error.kafka_code,
            "partition": wanted.partition,
            "leader_epoch": -1,
            "end_offset": -1,
        }
    return {
        "error_code": 0,
        "partition": wanted.partition,
        "leader_epoch": end.leader_epoch,
        "end_offset": end.end_offset,
    }
