"""AcknowledgeRecords (20100), DescribeLeases (20101) and RedriveRecords (20102): see `wire.apis.mansio_apis`.

Behaviour: all three are answered by the leader of the partition; each partition of a request succeeds or fails by
itself. What is settled or offered again is stored when it is answered. Looking at a share partition that nobody uses
loads its state, if there is one, and never makes one.
Non-obvious: a redrive is answered for the offsets it offered; whoever asks again with the same id gets those as done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.share_responses import checked_ids, error_for_client
from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share import acknowledgement_conversion
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.errors import GroupIdNotFound, InvalidRecordState, InvalidRequest, MansioError
from mansio.state.share_partition.in_flight import NOT_PENDING
from mansio.state.share_partition.types import ACQUIRED, ARCHIVED, AcknowledgementBatch, ShareKey
from mansio.wire.apis import acknowledge_records as wire
from mansio.wire.apis.acknowledge_records import AcknowledgedPartition

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.ports import Promise
    from mansio.wire.apis.acknowledge_records import AcknowledgePartition
    from mansio.wire.codec.messages import Struct

RANGES_MAX: Final = 10_000
REDRIVEN_MAX: Final = 10_000
"""Records offered again by one request."""

REDRIVE_ID_CHARACTERS_MAX: Final = 100
PARTITIONS_MAX: Final = 10_000
LOOKS_MAX: Final = 20
LOOK_MS: Final = 250


async def acknowledge_records(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    """Accept, release, reject or renew records that a member has leased; no session is needed."""
    group, member, partitions = wire.decode_request(memoryview(request))
    checked_ids(group, member)
    _check_once(partitions)
    lock_ms = 0

    async def acknowledge(number: int, partition: AcknowledgePartition) -> None:
        nonlocal lock_ms
        topic_id, index, batches = partition
        try:
            share_partition = service.shares.peek(ShareKey(group, topic_id, index))
            if share_partition is None:
                share_partition = await _leasing(service, group, topic_id, index)
            update = acknowledgement_conversion.acknowledge(
                share_partition, member, [AcknowledgementBatch(*batch) for batch in batches]
            )
            lock_ms = share_partition.state_machine.settings.lock_ms
            if update is not None:
                await share_partition.persist(update)
        except MansioError as error:
            answers[number] = AcknowledgedPartition(index, *error_for_client(error))
            service.statistics.refused(context.api_key, answers[number].error_code)

    answers = [AcknowledgedPartition(index) for _, index, _ in partitions]
    works = [acknowledge(number, partition) for number, partition in enumerate(partitions)]
    errors = await gather_results(service.scheduler, works, name="settle leases")
    topics: dict[bytes, list[AcknowledgedPartition]] = {}
    for partition, answer, error in zip(partitions, answers, errors, strict=True):
        if error is not None:  # it was broken off
            answer = AcknowledgedPartition(partition.partition, *error_for_client(error))
        topics.setdefault(partition.topic_id, []).append(answer)
    return wire.encode_response(context.correlation_id, topics, lock_ms=lock_ms)


async def describe_leases(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Who has leased what of a group's share partitions, and what else there is of each."""
    del context
    group = request.group_id
    check_group_id(group)
    spans_max = min(max(request.spans_max, 0), RANGES_MAX)
    if request.topics is None:
        share_partitions = [
            share_partition
            for share_partition in service.shares.share_partitions()
            if share_partition.key.group == group and share_partition.is_ready
        ]
        topics: dict[bytes, list[dict[str, Any]]] = {}
        for share_partition in share_partitions[:PARTITIONS_MAX]:
            topics.setdefault(share_partition.key.topic_id, []).append(
                _described(service, share_partition, spans_max)
            )
        return {"topics": [{"topic_id": topic_id, "partitions": found} for topic_id, found in topics.items()]}
    places = [(topic.topic_id, index) for topic in request.topics for index in topic.partitions]
    if len(places) > PARTITIONS_MAX:
        raise InvalidRequest(f"{len(places)} partitions; {PARTITIONS_MAX} may be asked about at once")

    async def describe(topic_id: bytes | None, index: int) -> dict[str, Any]:
        try:
            share_partition = await _known(service, group, topic_id, index)
        except MansioError as error:
            return _refused(index, error)
        return _described(service, share_partition, spans_max)

    works = [describe(topic_id, index) for topic_id, index in places]
    answers = await _all(service, works, "describe leases")
    return {"topics": _by_topic([topic_id for topic_id, _ in places], answers)}


def _described(
    service: BrokerServices, share_partition: SharePartitionLeader, spans_max: int
) -> dict[str, Any]:
    state_machine = share_partition.ready_state_machine() or share_partition.state_machine
    now_ms = share_partition.now_ms()
    state_machine.high_watermark = max(state_machine.high_watermark, share_partition.partition.high_watermark)
    found = state_machine.counts(now_ms)
    desk = service.dead_letters
    return {
        "partition_index": share_partition.key.partition,
        "start_offset": found.start,
        "end_offset": found.end,
        "lag": found.open,
        "leased": found.leased,
        "parked": found.parked,
        "withheld": found.withheld,
        "archiving": found.archiving,
        "dead": found.dead,
        "trouble": "" if desk is None else desk.last_error_of(share_partition.key),
        "holders": [
            {"member_id": one.member_id, "leased": one.leased, "oldest_ms": one.oldest_ms}
            for one in found.holders
        ],
        "ranges": list(_leased(share_partition, spans_max, now_ms)),
    }


def _leased(share_partition: SharePartitionLeader, spans_max: int, now_ms: float) -> Iterator[dict[str, Any]]:
    lock_ms = share_partition.state_machine.settings.lock_ms
    shown = 0
    for span in share_partition.state_machine.ranges:
        if span.state != ACQUIRED:
            continue
        if shown >= spans_max:
            return
        shown += 1
        yield {
            "first_offset": span.first,
            "last_offset": span.last,
            "member_id": span.holder,
            "delivery_count": span.deliveries,
            "age_ms": max(round(now_ms - span.deadline_ms + lock_ms), 0),
        }


async def redrive_records(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Offer dead records of one partition to their group again."""
    del context
    check_group_id(request.group_id)
    if not 0 < len(request.redrive_id) <= REDRIVE_ID_CHARACTERS_MAX:
        raise InvalidRequest(f"a redrive needs an id of up to {REDRIVE_ID_CHARACTERS_MAX} characters")
    if not 0 < request.most <= REDRIVEN_MAX:
        raise InvalidRequest(f"{request.most} records; 1 to {REDRIVEN_MAX} may be offered at once")
    offsets = None
    if request.offsets is not None:
        offsets = [(one.first_offset, one.last_offset) for one in request.offsets]
    share_partition = await _known(service, request.group_id, request.topic_id, request.partition_index)
    await _quiet(service, share_partition)
    share_partition.ready_state_machine()
    share_partition.ensure_leader()
    update, result = share_partition.call_and_rearm(
        share_partition.state_machine.redrive,
        request.redrive_id,
        offsets,
        request.most,
        share_partition.now_ms(),
    )
    if update is not None:
        await share_partition.persist(update)
    return {
        "offered": result.offered,
        "done_before": result.done_before,
        "gone": result.gone,
        "dead": share_partition.state_machine.counts(share_partition.now_ms()).dead,
    }


async def _quiet(service: BrokerServices, share_partition: SharePartitionLeader) -> None:
    """Wait until what died just now is stored, or for a while: until then it cannot be offered."""
    for _ in range(LOOKS_MAX):
        ranges = share_partition.state_machine.ranges
        if share_partition.ended is not None or all(
            one.pending_token == NOT_PENDING for one in ranges if one.state == ARCHIVED
        ):
            return
        woken = service.scheduler.promise()

        def wake(woken: Promise[None] = woken) -> None:
            if not woken.done():
                woken.set_result(None)

        share_partition.park(wake)
        timer = service.scheduler.call_later(LOOK_MS, wake)
        try:
            await woken
        finally:
            timer.cancel()
            share_partition.unpark(wake)


async def _leasing(
    service: BrokerServices, group: str, topic_id: bytes | None, index: int
) -> SharePartitionLeader:
    """One of which somebody may have something. Raises `InvalidRecordState` where the group never was."""
    try:
        return await _known(service, group, topic_id, index)
    except GroupIdNotFound as error:
        raise InvalidRecordState(error.message) from error


async def _known(
    service: BrokerServices, group: str, topic_id: bytes | None, index: int
) -> SharePartitionLeader:
    """One that has a state. Raises `GroupIdNotFound` where the group never was."""
    partition = service.partitions.find(None, topic_id or b"", index)
    partition.ensure_leader()
    key = ShareKey(group, topic_id or b"", index)
    if service.shares.peek(key) is None and await service.shares.persister.summary(key) is None:
        raise GroupIdNotFound(f"group {group} has read nothing of {partition.name}")
    share_partition = service.shares.find(group, topic_id or b"", index)
    await share_partition.loaded()
    return share_partition


def _check_once(partitions: Sequence[AcknowledgePartition]) -> None:
    """Raises `InvalidRequest` for a partition that is there twice, or too many of them."""
    if len(partitions) == 1:
        return
    if len({(topic_id, index) for topic_id, index, _ in partitions}) != len(partitions):
        raise InvalidRequest("a partition is in the request more than once")
    if len(partitions) > PARTITIONS_MAX:
        raise InvalidRequest(f"{len(partitions)} partitions; {PARTITIONS_MAX} may be settled at once")


async def _all(
    service: BrokerServices, works: Sequence[Coroutine[Any, Any, dict[str, Any]]], name: str
) -> list[dict[str, Any]]:
    """All at once, and what each says, in order."""
    answers: list[dict[str, Any]] = [{} for _ in works]

    async def keep(number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        answers[number] = await work

    await gather_results(
        service.scheduler, [keep(number, work) for number, work in enumerate(works)], name=name
    )
    return answers


def _by_topic(topic_ids: Sequence[bytes | None], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[bytes | None, list[dict[str, Any]]] = {}
    for topic_id, answer in zip(topic_ids, answers, strict=True):
        found.setdefault(topic_id, []).append(answer)
    return [{"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in found.items()]


def _refused(index: int, error: MansioError) -> dict[str, Any]:
    return {"partition_index": index, "error_code": error.kafka_code, "error_message": error.message}
