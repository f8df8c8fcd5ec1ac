"""ListOffsets in bulk: one request may name many partitions, and each look-up by time may open a large batch."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

from mansio.api.kafka.handlers.records import list_offsets
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.records import ListedOffset, RecordService
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.ports import SliceTimes

INVALID_REQUEST = 42


class SlowClock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def asked(indexes: list[int]) -> Any:
    partitions = [
        SimpleNamespace(partition_index=index, current_leader_epoch=-1, timestamp=1) for index in indexes
    ]
    return SimpleNamespace(
        replica_id=-1, isolation_level=0, topics=[SimpleNamespace(name="t", partitions=partitions)]
    )


def answered(indexes: list[int]) -> tuple[list[tuple[int, int]], list[str]]:
    """((partition, error code) of each answer, what happened in which order)"""
    happened: list[str] = []

    class Records(RecordService):
        def list_offset(self, *_: object, **__: object) -> ListedOffset:
            happened.append("looked up")
            return ListedOffset(7, 1, 0)

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        partitions = SimpleNamespace(get=lambda topic, index: None)
        scheduler = AsyncioScheduler(loop)
        scheduler.slices = SliceTimes(SlowClock().monotonic)
        records = Records(
            cast("Any", partitions),
            scheduler=scheduler,
            wait_ms_max=0,
            authorization=Authorization(None),
        )
        service = SimpleNamespace(records=records, scheduler=scheduler)

        def others() -> None:
            happened.append("others")
            loop.call_soon(others)

        loop.call_soon(others)
        return await list_offsets(
            cast("Any", service), asked(indexes), cast("Any", SimpleNamespace(caller=ANONYMOUS))
        )

    (topic,) = asyncio.run(run())["topics"]
    return [(one["partition_index"], one["error_code"]) for one in topic["partitions"]], happened


def test_long_look_ups_leave_the_loop_to_others_in_between() -> None:
    answers, happened = answered([0, 1, 2])
    assert answers == [(0, 0), (1, 0), (2, 0)]
    places = [place for place, what in enumerate(happened) if what == "looked up"]
    assert all("others" in happened[a:b] for a, b in itertools.pairwise(places)), happened


def test_partition_that_is_named_twice_is_refused_and_not_looked_up() -> None:
    answers, happened = answered([0, 1, 0])
    assert answers == [(0, INVALID_REQUEST), (1, 0), (0, INVALID_REQUEST)]
    assert happened.count("looked up") == 1
