"""Rebalances without long gaps: partitions that stay with their member are delivered without interruption, the others
after a short time.

Twelve partitions under steady load; a fourth member joins three, one leaves, one is killed. A second group beside it,
whose members do not change, says what the machine did to everybody at that time.

The rule for partitions that did not move is of two parts. Nobody was told anything of them, whatever the clock says.
And their longest gap at a change is at most 1.3 times the control's longest, and a margin: two processes on a busy
machine are never delayed alike.

librdkafka (2.16) pauses the fetchers of all partitions of a member while any of them comes or goes ("Pausing fetchers
for 4 assigned partition(s): incremental rebalance"), and asks for them again a quarter of a second and more later. That
is the client's own doing, which no broker can prevent; with it, what stays is held to what one that moves may take.

What was delivered, and to whom, has to be right each time. A gap that was too long, or a member that was put out
because it was not let speak for a whole session, may be the machine's doing: only what comes again is the group's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.process import served
from support.read_gaps import Change, Gap, Load, WatchedGroup, longest, percentile, picture, watched
from system.interop.conftest import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.full

PARTITIONS = 12
ATTEMPTS = 3
INTERVAL_S = 0.05
SESSION_S = 3.0
HEARTBEAT_S = 0.3
MOVED_S_MAX = 1.0
RATIO = 1.3
MARGIN_S = 0.25
PAUSE_THEMSELVES = {"confluent-kafka"}
ENVIRONMENT = {
    "MANSIO_GROUP_CONSUMER_SESSION_TIMEOUT_MS": str(int(SESSION_S * 1000)),
    "MANSIO_GROUP_CONSUMER_HEARTBEAT_INTERVAL_MS": str(int(HEARTBEAT_S * 1000)),
}


@pytest.mark.row("G3")
@pytest.mark.parametrize("kind", ["confluent-kafka", "mansio"])
def test_partitions_that_stay_are_delivered_without_a_pause_while_members_join_leave_and_die(
    tmp_path: Path, kind: str
) -> None:
    for attempt in range(ATTEMPTS):
        group, control = changed(tmp_path / f"data-{attempt}", kind)
        print(figures(group, control))
        if group.was_anybody_put_out or control.was_anybody_put_out:
            late = ["a member was put out"]
            continue
        check_deliveries(group, control)
        late = list(too_long(kind, group, control))
        if not late:
            return
    pytest.fail("; ".join(late))


def changed(data: Path, kind: str) -> tuple[WatchedGroup, WatchedGroup]:
    """A group through its three changes, and the control beside it."""
    with served(data, environment=ENVIRONMENT, http=False) as broker:
        topic = create_topic(broker.bootstrap_servers, "steady", PARTITIONS)
        with (
            Load(broker.bootstrap_servers, topic, PARTITIONS, INTERVAL_S) as load,
            watched(kind, broker.bootstrap_servers, load, "abc", "d", group="g") as (group, control),
        ):
            group.join("d")
            group.leave("a")
            group.kill("b")
            load.stop()
            for each in (group, control):
                each.wait_until_all_is_delivered()
    return group, control


def check_deliveries(group: WatchedGroup, control: WatchedGroup) -> None:
    assert len(group.moved(group.changes[0])) == 3  # a fourth of them, and no more than that
    for change in group.changes:
        stayed = set(range(PARTITIONS)) - group.moved(change)
        assert len(stayed) >= PARTITIONS / 2
        assert group.reported(stayed, change) == set()
    assert control.twice() == {}
    # What the dead member got and had not committed comes again, and nothing else does.
    assert {members[0] for members in group.twice().values()} <= {"b"}


def too_long(kind: str, group: WatchedGroup, control: WatchedGroup) -> Iterator[str]:
    """Every gap that no change explains."""
    joined, left, killed = group.changes
    calm = longest(control.gaps(joined.begin, killed.end))
    limit = MOVED_S_MAX + calm if kind in PAUSE_THEMSELVES else RATIO * calm + MARGIN_S
    for change in group.changes:
        stayed = set(range(PARTITIONS)) - group.moved(change)
        if longest(group.gaps(change.begin, change.end, stayed)) > limit:
            yield f"{change.name}: what stayed"
    for change in (joined, left):
        if longest(gaps_of_moved(group, change)) > MOVED_S_MAX + longest(gaps_of(control, change)):
            yield f"{change.name}: what moved"
    if longest(gaps_of_moved(group, killed)) > SESSION_S + MOVED_S_MAX + longest(gaps_of(control, killed)):
        yield f"{killed.name}: what moved"


def gaps_of(group: WatchedGroup, change: Change) -> list[Gap]:
    return group.gaps(change.begin, change.end)


def gaps_of_moved(group: WatchedGroup, change: Change) -> list[Gap]:
    return group.gaps(change.begin, change.end, group.moved(change))


def figures(group: WatchedGroup, control: WatchedGroup) -> str:
    """What was measured, for people."""

    def reported(gaps: list[Gap]) -> str:
        return f"{longest(gaps) * 1000:.0f} ({percentile(gaps, 0.999) * 1000:.0f})"

    lines = ["longest gap in ms (p99.9)"]
    for change in group.changes:
        moved = group.moved(change)
        stayed = group.gaps(change.begin, change.end, set(range(PARTITIONS)) - moved)
        lines.append(
            f"{change.name}, in order after {change.settled - change.begin:.1f} s: "
            f"{len(moved)} moved {reported(gaps_of_moved(group, change))}, stayed {reported(stayed)}, "
            f"control {reported(gaps_of(control, change))}"
        )
    begin, end = group.changes[0].begin - 0.5, group.changes[-1].end
    changes = {change.begin: change.name for change in group.changes}
    drawn = picture(group.gaps(begin, end), begin, end, changes=changes)
    return "\n".join([*lines, f"delivered again: {len(group.twice())}", drawn])
