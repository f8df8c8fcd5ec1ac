"""Deliveries in columns, compared with the timelines of random histories: the same attempts, times, ends and
uncertainties."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pytest

from mansio.spark.trace import deliveries
from mansio.spark.trace.blocks import TraceSelection, select_rows, to_columns
from mansio.spark.trace.deliveries import (
    DELIVERY_KINDS,
    DELIVERY_SCHEMA,
    OFFSET_END,
    DeliveryRange,
    PartitionDeliveries,
)
from mansio.state.trace.coverage import Coverage
from mansio.wire.internal_records.trace_records import TraceBlock
from support.tiers import repetitions, tier
from support.traced_history import GROUP, TOPIC_ID, History

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.trace.timeline import Timeline, TraceEvent

HISTORIES = {"test": 20, "full": 500, "nightly": 10_000}
LEASE_ENDS = ("released", "expired", "acknowledged", "rejected", "attempts-used-up", "dead-lettered")
END_KINDS = (*LEASE_ENDS, "discarded", "deleted")
LEASED = "after a change of the leader: leased"


class Expected(NamedTuple):
    """A delivery as a timeline has it."""

    offset: int
    attempt: int
    member: str | None
    published_ms: int | None
    delivered_ms: int | None
    ended_ms: int | None
    end: str | None
    wait_ms: int | None
    dead_lettered_ms: int | None
    certain: bool
    uncertainties: tuple[str, ...]


def from_timeline(timeline: Timeline) -> Iterator[Expected]:
    """The deliveries of a record, one event after the other."""
    published = next((each.time_ms for each in timeline.events if each.kind == "published"), None)
    found: list[list[TraceEvent]] = []
    for event in timeline.events:
        shows = event.kind in (*LEASE_ENDS, "renewed") or event.detail == LEASED
        if event.kind == "delivered" or (
            shows and event.attempt and not (found and found[-1][0].attempt == event.attempt)
        ):
            found.append([event])
        elif found and event.group and found[-1][0].attempt == event.attempt:
            found[-1].append(event)
    for events in found:
        first = events[0]
        is_delivered = first.kind == "delivered"
        end = next((each for each in events if each.kind in END_KINDS), None)
        yield Expected(
            timeline.offset,
            first.attempt,
            next((each.who for each in events if each.who), None),
            published,
            first.time_ms if is_delivered else None,
            None if end is None else end.time_ms,
            None if end is None else end.kind,
            first.wait_ms if is_delivered and first.wait_ms >= 0 else None,
            next((each.time_ms for each in events if each.kind == "dead-lettered"), None),
            timeline.is_certain,
            timeline.uncertainties,
        )


def columns(history: History, wanted: DeliveryRange = DeliveryRange(), rows_max: int = 1_000) -> pa.Table:  # noqa: B008
    """The deliveries of a history, from its blocks. Those of later processes are read first, as from another partition
    of the trace."""
    coverage: dict[tuple[int, int], Coverage] = {}
    found: list[tuple[tuple[int, int], pa.RecordBatch]] = []
    for data in history.log:
        block = TraceBlock(data)
        process = (block.header.broker_id, block.header.incarnation)
        if coverage.setdefault(process, Coverage(*process)).add(block.header):
            selection = TraceSelection(TOPIC_ID, {0: (wanted.first, wanted.end)}, DELIVERY_KINDS)
            rows = select_rows(block, selection)
            found.append((process, to_columns([] if rows is None else [rows])))
    live = (history.process.broker_id, history.process.incarnation)
    for one in coverage.values():
        one.is_live = (one.broker_id, one.incarnation) == live
    batches = [batch for process in reversed(coverage) for of, batch in found if of == process]
    read = PartitionDeliveries("orders", 0, batches, tuple(coverage.values()), history.now_ms, wanted)
    return pa.Table.from_batches(read.batches(rows_max), DELIVERY_SCHEMA)


def shown(table: pa.Table) -> list[Expected]:
    times = {
        name: [None if each is None else each // 1000 for each in table[name].cast("int64").to_pylist()]
        for name in ("published_at", "delivered_at", "ended_at", "dead_lettered_at")
    }
    return [
        Expected(
            row["offset"],
            row["attempt"],
            row["member"],
            times["published_at"][at],
            times["delivered_at"][at],
            times["ended_at"][at],
            row["end"],
            row["wait_ms"],
            times["dead_lettered_at"][at],
            row["certain"],
            tuple(row["uncertainties"]),
        )
        for at, row in enumerate(table.to_pylist())
    ]


@pytest.mark.parametrize("disturbances", [False, True], ids=["calm", "with kills and lost blocks"])
def test_deliveries_are_those_of_the_timelines(disturbances: bool) -> None:
    counts = Counter[str]()
    for seed in range(
        repetitions(HISTORIES["full"] if tier() == "full" else HISTORIES["test"], HISTORIES["nightly"])
    ):
        history = History(Random(seed))
        history.run(60, disturbances=disturbances)
        expected = [
            each for _, timeline in sorted(history.timelines().items()) for each in from_timeline(timeline)
        ]
        found = shown(columns(history))
        assert found == expected, seed
        counts.update(str(each.end) for each in found)
        counts["certain"] += sum(each.certain for each in found)
        counts["uncertain"] += sum(not each.certain for each in found)
        counts["without a row of the delivery"] += sum(each.delivered_ms is None for each in found)
    assert {"acknowledged", "released", "expired", "rejected", "None", "certain"} <= counts.keys(), counts
    if disturbances:
        assert counts["uncertain"] > 0 < counts["without a row of the delivery"], counts


def test_changes_of_which_the_outcome_is_unknown_make_their_records_uncertain() -> None:
    history = History(Random(5))
    history.run(80, disturbances=False)
    assert history.trace is not None
    history.trace.report_unknown(GROUP, [(1, 2, 1), (2, 2, 1)], history.now_ms)
    history.tick(1)
    history.trace.report_unknown("another", [(2, 3, 1)], history.now_ms)
    history.flush()
    found = shown(columns(history))
    assert found == [
        each for _, timeline in sorted(history.timelines().items()) for each in from_timeline(timeline)
    ]
    reasons = {each.offset: len(each.uncertainties) for each in found}
    assert (reasons[1], reasons[2], reasons[3]) == (1, 2, 1)
    assert {each.offset for each in found if not each.certain} == {1, 2, 3}


def test_small_pieces_give_the_same_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        history = History(Random(seed))
        history.run(80, disturbances=True)
        whole = columns(history)
        with monkeypatch.context() as patched:
            patched.setattr(deliveries, "PIECE_OFFSETS_MAX", 3)
            patched.setattr(deliveries, "PIECE_ROWS_MAX", 5)
            assert columns(history, rows_max=2) == whole


def test_offsets_and_times_select_deliveries() -> None:
    history = History(Random(3))
    history.run(120, disturbances=False)
    whole = shown(columns(history))
    middle = whole[len(whole) // 2]
    assert middle.delivered_ms
    some = [each for each in whole if 2 <= each.offset < middle.offset]
    assert some
    assert shown(columns(history, DeliveryRange(2, middle.offset))) == some
    later = shown(columns(history, DeliveryRange(0, OFFSET_END, middle.delivered_ms)))
    sooner = shown(columns(history, DeliveryRange(0, OFFSET_END, 0, middle.delivered_ms)))
    assert middle in later
    assert sorted(later + sooner) == sorted(whole)
