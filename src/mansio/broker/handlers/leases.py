"""SettleLeases (20100), DescribeLeases (20101) and RedriveRecords (20102): see `wire.native`.

Behaviour: all three are answered by the leader of the partition; each partition of a request succeeds or fails by
itself. What is settled or offered again is stored when it is answered. Looking at a share partition that nobody uses
loads its state, if there is one, and never makes one.
Non-obvious: a redrive is answered for the offsets it offered; whoever asks again with the same id gets those as done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinators.refusals import check_group_id
from mansio.broker.handlers.share_answers import names_of, told
from mansio.broker.share import acknowledging
from mansio.broker.share.together import together
from mansio.errors import GroupIdNotFound, InvalidRecordState, InvalidRequest, MansioError
from mansio.state.share_ranges import SETTLED
from mansio.state.share_types import ACQUIRED, ARCHIVED, Settle, ShareKey
from mansio.wire import settle_leases as wire
from mansio.wire.settle_leases import SettledPartition

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from mansio.broker.context import RequestContext
    from mansio.broker.service import Service
    from mansio.broker.share.live_share import LiveShare
    from mansio.ports import Promise
    from mansio.wire.messages import Struct
    from mansio.wire.settle_leases import SettlePartition

SPANS_MAX: Final = 10_000
REDRIVEN_MAX: Final = 10_000
"""Records offered again by one request."""

REDRIVE_ID_CHARACTERS_MAX: Final = 100
PARTITIONS_MAX: Final = 10_000
LOOKS_MAX: Final = 20
LOOK_MS: Final = 250


async def settle_leases(service: Service, request: bytes, context: RequestContext) -> bytes:
    """Accept, release, reject or renew records that a member has leased; no session is needed."""
    group, member, partitions = wire.decode_request(memoryview(request))
    names_of(group, member)
    _check_once(partitions)
    lock_ms = 0

    async def settle(number: int, partition: SettlePartition) -> None:
        nonlocal lock_ms
        topic_id, index, batches = partition
        try:
            live = service.shares.peek(ShareKey(group, topic_id, index))
            if live is None:
                live = await _leasing(service, group, topic_id, index)
            update = acknowledging.settle(live, member, [Settle(*batch) for batch in batches])
            lock_ms = live.core.settings.lock_ms
            if update is not None:
                await live.perform(update)
        except MansioError as error:
            answers[number] = SettledPartition(index, *told(error))
            service.statistics.refused(context.api_key, answers[number].error_code)

    answers = [SettledPartition(index) for _, index, _ in partitions]
    works = [settle(number, partition) for number, partition in enumerate(partitions)]
    errors = await together(service.scheduler, works, name="settle leases")
    topics: dict[bytes, list[SettledPartition]] = {}
    for partition, answer, error in zip(partitions, answers, errors, strict=True):
        if error is not None:  # it was broken off
            answer = SettledPartition(partition.partition, *told(error))
        topics.setdefault(partition.topic_id, []).append(answer)
    return wire.encode_response(context.correlation_id, topics, lock_ms=lock_ms)


async def describe_leases(service: Service, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Who has leased what of a group's share partitions, and what else there is of each."""
    del context
    group = request.group_id
    check_group_id(group)
    spans_max = min(max(request.spans_max, 0), SPANS_MAX)
    if request.topics is None:
        lives = [live for live in service.shares.lives() if live.key.group == group and live.is_ready]
        topics: dict[bytes, list[dict[str, Any]]] = {}
        for live in lives[:PARTITIONS_MAX]:
            topics.setdefault(live.key.topic_id, []).append(_described(service, live, spans_max))
        return {"topics": [{"topic_id": topic_id, "partitions": found} for topic_id, found in topics.items()]}
    places = [(topic.topic_id, index) for topic in request.topics for index in topic.partitions]
    if len(places) > PARTITIONS_MAX:
        raise InvalidRequest(f"{len(places)} partitions; {PARTITIONS_MAX} may be asked about at once")

    async def describe(topic_id: bytes | None, index: int) -> dict[str, Any]:
        try:
            live = await _known(service, group, topic_id, index)
        except MansioError as error:
            return _refused(index, error)
        return _described(service, live, spans_max)

    works = [describe(topic_id, index) for topic_id, index in places]
    answers = await _all(service, works, "describe leases")
    return {"topics": _by_topic([topic_id for topic_id, _ in places], answers)}


def _described(service: Service, live: LiveShare, spans_max: int) -> dict[str, Any]:
    core = live.look() or live.core
    now_ms = live.now_ms()
    core.high_watermark = max(core.high_watermark, live.partition.high_watermark)
    found = core.counts(now_ms)
    desk = service.dead_letters
    return {
        "partition_index": live.key.partition,
        "start_offset": found.start,
        "end_offset": found.end,
        "lag": found.open,
        "leased": found.leased,
        "parked": found.parked,
        "withheld": found.withheld,
        "archiving": found.archiving,
        "dead": found.dead,
        "trouble": "" if desk is None else desk.trouble_of(live.key),
        "holders": [
            {"member_id": one.member_id, "leased": one.leased, "oldest_ms": one.oldest_ms}
            for one in found.holders
        ],
        "ranges": list(_leased(live, spans_max, now_ms)),
    }


def _leased(live: LiveShare, spans_max: int, now_ms: float) -> Iterator[dict[str, Any]]:
    lock_ms = live.core.settings.lock_ms
    shown = 0
    for span in live.core.ranges:
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


async def redrive_records(service: Service, request: Struct, context: RequestContext) -> dict[str, Any]:
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
    live = await _known(service, request.group_id, request.topic_id, request.partition_index)
    await _quiet(service, live)
    live.look()
    live.check_leads()
    update, result = live.ask(live.core.redrive, request.redrive_id, offsets, request.most, live.now_ms())
    if update is not None:
        await live.perform(update)
    return {
        "offered": result.offered,
        "done_before": result.done_before,
        "gone": result.gone,
        "dead": live.core.counts(live.now_ms()).dead,
    }


async def _quiet(service: Service, live: LiveShare) -> None:
    """Wait until what died just now is stored, or for a while: until then it cannot be offered."""
    for _ in range(LOOKS_MAX):
        ranges = live.core.ranges
        if live.ended is not None or all(one.unsettled == SETTLED for one in ranges if one.state == ARCHIVED):
            return
        woken = service.scheduler.promise()

        def wake(woken: Promise[None] = woken) -> None:
            if not woken.done():
                woken.set_result(None)

        live.park(wake)
        timer = service.scheduler.call_later(LOOK_MS, wake)
        try:
            await woken
        finally:
            timer.cancel()
            live.unpark(wake)


async def _leasing(service: Service, group: str, topic_id: bytes | None, index: int) -> LiveShare:
    """One of which somebody may have something. Raises `InvalidRecordState` where the group never was."""
    try:
        return await _known(service, group, topic_id, index)
    except GroupIdNotFound as error:
        raise InvalidRecordState(error.message) from error


async def _known(service: Service, group: str, topic_id: bytes | None, index: int) -> LiveShare:
    """One that has a state. Raises `GroupIdNotFound` where the group never was."""
    partition = service.partitions.find(None, topic_id or b"", index)
    partition.check_leads()
    key = ShareKey(group, topic_id or b"", index)
    if service.shares.peek(key) is None and await service.shares.persister.summary(key) is None:
        raise GroupIdNotFound(f"group {group} has read nothing of {partition.name}")
    live = service.shares.find(group, topic_id or b"", index)
    await live.loaded()
    return live


def _check_once(partitions: Sequence[SettlePartition]) -> None:
    """Raises `InvalidRequest` for a partition that is there twice, or too many of them."""
    if len(partitions) == 1:
        return
    if len({(topic_id, index) for topic_id, index, _ in partitions}) != len(partitions):
        raise InvalidRequest("a partition is in the request more than once")
    if len(partitions) > PARTITIONS_MAX:
        raise InvalidRequest(f"{len(partitions)} partitions; {PARTITIONS_MAX} may be settled at once")


async def _all(
    service: Service, works: Sequence[Coroutine[Any, Any, dict[str, Any]]], name: str
) -> list[dict[str, Any]]:
    """All at once, and what each says, in order."""
    answers: list[dict[str, Any]] = [{} for _ in works]

    async def keep(number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        answers[number] = await work

    await together(service.scheduler, [keep(number, work) for number, work in enumerate(works)], name=name)
    return answers


def _by_topic(topic_ids: Sequence[bytes | None], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[bytes | None, list[dict[str, Any]]] = {}
    for topic_id, answer in zip(topic_ids, answers, strict=True):
        found.setdefault(topic_id, []).append(answer)
    return [{"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in found.items()]


def _refused(index: int, error: MansioError) -> dict[str, Any]:
    return {"partition_index": index, "error_code": error.kafka_code, "error_message": error.message}
