"""Groups in a timeline: the caller gets the names of those that it may describe."""

from __future__ import annotations

from typing import Any

from mansio.broker.services.trace_service import TraceService
from mansio.state.trace.coverage import TracedRow
from mansio.wire.internal_records.trace_records import DELIVERED, PUBLISHED, TraceRow
from support.authorization import ALICE


class Rights:
    """Alice may describe the group `billing`."""

    def allows(self, caller: object, operation: object, resource_type: object, name: str) -> bool:
        return name == "billing"


def row(group: str, who: str, kind: int = DELIVERED) -> TracedRow:
    return TracedRow(TraceRow(kind, 0, 1, group, who, 5, 0, 1, -1), 1, 1, 0)


def test_groups_that_the_caller_may_not_describe_have_different_numbers_and_no_members() -> None:
    nothing: Any = None
    rights: Any = Rights()
    service = TraceService(
        nothing, node_id=1, topics=nothing, peers=None, clock=nothing, scheduler=nothing, authorization=rights
    )
    rows = [
        row("", "shop", PUBLISHED),
        row("billing", "m1"),
        row("audit", "m2"),
        row("fraud", "m3"),
        row("audit", "m4"),
    ]
    seen = [(each.row.group, each.row.who) for each in service._visible(ALICE, rows)]
    first, second = "(no right to describe group 1)", "(no right to describe group 2)"
    assert seen == [("", "shop"), ("billing", "m1"), (first, ""), (second, ""), (first, "")]
