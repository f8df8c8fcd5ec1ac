"""Timeline of one record: what happened to it, and whether that is all.

The rows of the trace log are put in order, and get what only several of them tell: the member whose lease has ended,
and how long each step took. A timeline is *certain* if the trace log has everything from the publication of the record
until now: the processes that led the partition in this time are known, one after the other, each ended in an orderly
way, and no block of theirs is missing. Otherwise each gap is named. Committed positions of ordinary groups are written
at most once a second for each group, by the coordinators of the groups; they do not count for certainty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.share_partition.types import ACQUIRED, ARCHIVED, ARCHIVING, AVAILABLE
from mansio.wire.internal_records import trace_records as rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.trace.coverage import Coverage, TracedRow

KIND_NAMES: Final = {
    rows.PUBLISHED: "published",
    rows.DELIVERED: "delivered",
    rows.RELEASED: "released",
    rows.EXPIRED: "expired",
    rows.ACKNOWLEDGED: "acknowledged",
    rows.REJECTED: "rejected",
    rows.ATTEMPTS_USED_UP: "attempts-used-up",
    rows.DEAD_LETTERED: "dead-lettered",
    rows.REDRIVEN: "redriven",
    rows.RENEWED: "renewed",
    rows.DISCARDED: "discarded",
    rows.DELETED: "deleted",
    rows.DUE: "due",
    rows.POSITION: "position-committed",
    rows.LOADED: "state-loaded",
    rows.UNKNOWN_OUTCOME: "outcome-unknown",
}
"""Names of the kinds of events that rows tell."""

ACCEPTED: Final = "accepted"
ABORTED: Final = "aborted"
REPLICATED: Final = "replicated"
KEPT: Final = "kept"

DETAILS: Final = {
    (rows.RELEASED, rows.BY_MEMBER): "by the member",
    (rows.RELEASED, rows.MEMBER_LEFT): "the member has left the group",
    (rows.EXPIRED, 0): "the lease has ended",
    (rows.ATTEMPTS_USED_UP, 0): "the lease has ended",
    (rows.ATTEMPTS_USED_UP, rows.BY_MEMBER): "released by the member",
    (rows.ATTEMPTS_USED_UP, rows.MEMBER_LEFT): "the member has left the group",
    (rows.DISCARDED, 0): "without a copy in a dead-letter topic",
    (rows.DELETED, 0): "from the log, before it was done",
    (rows.UNKNOWN_OUTCOME, 0): "a change of state may be stored, or not",
}
"""Details of events by the kind and the cause of their rows."""
_STATES: Final = {
    AVAILABLE: "available",
    ACQUIRED: "leased",
    ARCHIVING: "being copied to the dead-letter topic",
    ARCHIVED: "dead-lettered or discarded",
}
STATE_AFTER: Final = {
    rows.DELIVERED: ACQUIRED,
    rows.RENEWED: ACQUIRED,
    rows.RELEASED: AVAILABLE,
    rows.EXPIRED: AVAILABLE,
    rows.REDRIVEN: AVAILABLE,
    rows.REJECTED: ARCHIVING,
    rows.ATTEMPTS_USED_UP: ARCHIVING,
    rows.DEAD_LETTERED: ARCHIVED,
    rows.DISCARDED: ARCHIVED,
}
"""Delivery state after a row of a kind. A `LOADED` row that repeats it is no event of its own."""

NOT_WRITTEN: Final = "broker {} has not written its last rows yet"
NOT_ASKED: Final = "broker {} cannot be asked"
_SILENT: Final = re.compile("|".join(each.format(r"(\d+)") for each in (NOT_WRITTEN, NOT_ASKED)))

NO_PUBLICATION: Final = (
    "there is no row about its publication: it is older than the trace, or the trace was off"
)
_FINAL: Final = frozenset({"acknowledged", "dead-lettered", "discarded", "deleted", "position-committed"})


class TraceEvent(NamedTuple):
    """One event. `time_ms`: since the Unix epoch, -1 if it is not known. `group`: "" for an event of the record itself.
    `attempt`: number of the delivery, 0 for none. `who`: member or publisher, "" if unknown. `wait_ms`: time since the
    event before it of the same group, or since the publication; -1 if it is not known. `is_computed`: derived from what
    the broker knows now, not from the trace."""

    kind: str
    time_ms: int
    group: str = ""
    attempt: int = 0
    who: str = ""
    detail: str = ""
    wait_ms: int = -1
    is_computed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """What the leader of the partition knows of the record now.

    `is_stored`: the record is in the log; otherwise the facts about it are the defaults. `leader_epoch`: in which it
    was appended. `origin`: why the broker itself has appended it, "" if a client has. `accepted_offset`, `due_ms`: of a
    record that was delayed, the offset at which it was accepted, and when it was due; otherwise -1. `is_pending`: it is
    not due yet. `kept_until_ms`: when retention may delete it at the earliest, -1 if nothing deletes it by age.
    """

    leader: int = -1
    replicas: tuple[int, ...] = ()
    in_sync: tuple[int, ...] = ()
    log_start: int = 0
    log_end: int = 0
    is_stored: bool = False
    timestamp_ms: int = -1
    leader_epoch: int = -1
    size_bytes: int = 0
    origin: str = ""
    accepted_offset: int = -1
    due_ms: int = -1
    is_pending: bool = False
    is_aborted: bool = False
    kept_until_ms: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of a record in their order. `total_ms`: from the publication to the last event with which a group was
    done, -1 if there is none. `uncertainties`: why something may be missing; none if the timeline is certain."""

    offset: int
    events: tuple[TraceEvent, ...]
    total_ms: int
    uncertainties: tuple[str, ...]
    facts: RecordFacts

    @property
    def is_certain(self) -> bool:
        """Whether nothing can be missing."""
        return not self.uncertainties


class Leadership:
    """The time in which one process led the partition in one leader epoch."""

    __slots__ = ("begin_ms", "end_ms", "epoch", "has_ended", "is_off", "process", "was_off")

    def __init__(self, traced: TracedRow) -> None:
        self.process = (traced.broker_id, traced.incarnation)
        self.epoch = traced.leader_epoch
        row = traced.row
        self.begin_ms = row.extra if row.cause == rows.CONTINUED else row.time_ms
        self.was_off = row.cause == rows.TURNED_ON
        self.is_off = self.has_ended = row.cause == rows.LED_WITHOUT_TRACE
        self.end_ms = row.time_ms if self.is_off else -1


def build_timeline(
    offset: int,
    found: Sequence[TracedRow],
    coverage: Sequence[Coverage],
    facts: RecordFacts,
    now_ms: int,
    missing: Iterable[str] = (),
) -> Timeline:
    """Return the timeline of the record at `offset`.

    `found`: the rows about it, about `facts.accepted_offset`, and about the partition, those of one process in their
    order. `coverage`: of the processes that have written to the trace. `missing`: what could not be read.
    """
    ordered = sorted(found, key=lambda each: (each.leader_epoch, each.incarnation))
    published = _published(offset, ordered, facts)
    events = [] if published is None else [published]
    if facts.accepted_offset >= 0:
        events += _delay_events(facts, published)
    events += _group_events(offset, ordered)
    begin_ms = published.time_ms if published is not None else -1
    events = _with_waits(events, begin_ms)
    done = [each.time_ms for each in events if each.kind in _FINAL]
    total_ms = max(done) - begin_ms if done and begin_ms >= 0 else -1
    uncertainties = [*missing, *_gaps(offset, ordered, coverage, facts, published, now_ms)]
    uncertainties += _unknown_outcomes(events)
    events += _computed(facts)
    return Timeline(
        offset=offset,
        events=tuple(events),
        total_ms=total_ms,
        uncertainties=tuple(dict.fromkeys(uncertainties)),
        facts=facts,
    )


def _published(offset: int, found: Sequence[TracedRow], facts: RecordFacts) -> TraceEvent | None:
    """Return the publication: the row in the leader epoch of the record, because an earlier leader may have appended
    another record at the offset, which was lost."""
    wanted = offset if facts.accepted_offset < 0 else facts.accepted_offset
    known: TracedRow | None = None
    for each in found:
        row = each.row
        if row.kind == rows.PUBLISHED and row.first <= wanted < row.first + row.size:
            is_delayed = facts.accepted_offset >= 0  # accepted in an epoch that the record does not tell
            if facts.leader_epoch in (-1, each.leader_epoch) or is_delayed:
                known = each
    if known is not None:
        return TraceEvent(KIND_NAMES[rows.PUBLISHED], known.row.time_ms, who=known.row.who)
    if facts.origin:
        kind, at_ms = KIND_NAMES[rows.PUBLISHED], facts.timestamp_ms
        return TraceEvent(kind, at_ms, who="the broker", detail=facts.origin, is_computed=True)
    return None


def _delay_events(facts: RecordFacts, published: TraceEvent | None) -> list[TraceEvent]:
    at_ms = -1 if published is None else published.time_ms
    detail = f"as a delayed record, at offset {facts.accepted_offset}"
    events = [TraceEvent(ACCEPTED, at_ms, detail=detail, is_computed=True)]
    if not facts.is_pending:
        events.append(TraceEvent(KIND_NAMES[rows.DUE], facts.due_ms, is_computed=True))
    return events


def _group_events(offset: int, found: Sequence[TracedRow]) -> list[TraceEvent]:
    """Return the events of groups: those of leaders in the order of leader epochs, committed positions by time."""
    members: dict[tuple[str, int], str] = {}
    states: dict[str, tuple[int, int]] = {}
    events: list[TraceEvent] = []
    positions: list[TraceEvent] = []
    has_left = any(
        each.row.kind == rows.DUE and each.row.first <= offset < each.row.first + each.row.size
        for each in found
    )
    """Whether the record was delayed and has another offset now: positions pass an offset without a record."""
    for each in found:
        row = each.row
        if (
            row.kind in (rows.PUBLISHED, *rows.CONTROL_KINDS)
            or not row.first <= offset < row.first + row.size
        ):
            continue
        if row.kind == rows.POSITION:
            if has_left:
                continue
            detail = f"position {row.first + row.size}"
            positions.append(TraceEvent(KIND_NAMES[row.kind], row.time_ms, row.group, 0, row.who, detail))
            continue
        key = (row.group, row.attempt)
        if row.kind == rows.LOADED:
            if states.get(row.group) == (row.cause, row.attempt) or (
                row.cause == ARCHIVING and states.get(row.group, (0, 0))[0] == ARCHIVING
            ):
                continue
            detail = f"after a change of the leader: {_STATES.get(row.cause, 'done')}"
            states[row.group] = (row.cause, row.attempt)
        elif row.kind == rows.DUE:
            detail = f"delivered as the record at offset {row.extra + offset - row.first}"
        else:
            detail = DETAILS.get((row.kind, row.cause), "")
            if row.kind in (rows.RELEASED, rows.EXPIRED) and row.extra > row.time_ms:
                detail += f"; offered again after {_seconds(row.extra - row.time_ms)}"
            if row.kind in STATE_AFTER:
                states[row.group] = (STATE_AFTER[row.kind], row.attempt)
        if row.who:
            members[key] = row.who
        who = row.who or ("" if row.kind == rows.REDRIVEN else members.get(key, ""))
        events.append(TraceEvent(KIND_NAMES[row.kind], row.time_ms, row.group, row.attempt, who, detail))
    for position in sorted(positions, key=attrgetter("time_ms")):
        at = next((n for n, each in enumerate(events) if each.time_ms > position.time_ms), len(events))
        events.insert(at, position)
    return events


def _with_waits(events: Sequence[TraceEvent], begin_ms: int) -> list[TraceEvent]:
    last: dict[str, int] = {}
    result: list[TraceEvent] = []
    for each in events:
        before = last.get(each.group, begin_ms)
        waited = each.time_ms >= 0 and before >= 0 and bool(result)
        result.append(each._replace(wait_ms=max(each.time_ms - before, 0)) if waited else each)
        if each.time_ms >= 0:
            last[each.group] = each.time_ms
    return result


def _computed(facts: RecordFacts) -> list[TraceEvent]:
    """Return what the leader knows now."""
    if not facts.is_stored:
        return []
    aborted = TraceEvent(
        ABORTED, -1, detail="with its transaction; groups of committed records do not get it"
    )
    detail = f"on brokers {', '.join(map(str, facts.in_sync))}; leader {facts.leader}"
    events = [TraceEvent(REPLICATED, -1, detail=detail, is_computed=True)]
    kept = (
        "until its segment is older than retention.ms"
        if facts.kept_until_ms >= 0
        else "without a limit of age"
    )
    if facts.is_aborted:
        events.insert(0, aborted._replace(is_computed=True))
    return [*events, TraceEvent(KEPT, facts.kept_until_ms, detail=kept, is_computed=True)]


def _unknown_outcomes(events: Iterable[TraceEvent]) -> list[str]:
    unknown = KIND_NAMES[rows.UNKNOWN_OUTCOME]
    return [unknown_outcome(each.group, each.time_ms) for each in events if each.kind == unknown]


def silent_brokers(uncertainties: Iterable[str]) -> set[int]:
    """Return the brokers whose last rows are missing, according to the uncertainties of a timeline."""
    found = [_SILENT.match(each) for each in uncertainties]
    return {int(each[1] or each[2]) for each in found if each is not None}


def unknown_outcome(group: str, time_ms: int) -> str:
    """Return the uncertainty of a record of which a change may be stored, or not."""
    return f"at {_clock(time_ms)} a change of group {group!r} may be stored, or not"


# ------------------------------------------------------------------ certainty


def _gaps(
    offset: int,
    found: Sequence[TracedRow],
    coverage: Sequence[Coverage],
    facts: RecordFacts,
    published: TraceEvent | None,
    now_ms: int,
) -> list[str]:
    """Return why rows from the publication until now may be missing."""
    if published is None:
        if not facts.is_stored and facts.log_start <= offset < facts.log_end:
            return [
                "there is no record of a client at this offset: the log has a marker or a placeholder there"
            ]
        if not facts.is_stored and offset >= facts.log_end:
            return [f"there is no record yet: the log ends at {facts.log_end}"]
        return [NO_PUBLICATION]
    if facts.is_pending:
        return []
    return coverage_gaps(published.time_ms, find_leaderships(found), coverage, now_ms)


def coverage_gaps(
    begin_ms: int, leaderships: Sequence[Leadership], coverage: Iterable[Coverage], now_ms: int
) -> list[str]:
    """Return why rows about a partition from `begin_ms` until now may be missing. `leaderships`: as `find_leaderships`
    returns them."""
    processes = {(each.broker_id, each.incarnation): each for each in coverage}
    gaps: list[str] = []
    first = next((n for n, each in reversed([*enumerate(leaderships)]) if each.begin_ms <= begin_ms), None)
    if first is None:
        known = "nothing" if not leaderships else f"only what follows {_clock(leaderships[0].begin_ms)}"
        gaps.append(f"the trace has {known} of the broker that led the partition")
        first = 0
    relevant = leaderships[first:]
    for number, leadership in enumerate(relevant):
        process = processes.get(leadership.process)
        is_current = number == len(relevant) - 1
        name = f"broker {leadership.process[0]}"
        end_ms = leadership.end_ms if leadership.has_ended else now_ms
        if process is None:
            gaps.append(f"the trace of {name} from {_clock(leadership.begin_ms)} on cannot be read")
            continue
        # Its first rows may be missing, too: those from the end of the leadership before it on.
        since_ms = relevant[number - 1].end_ms if number else leadership.begin_ms
        for gap in process.gaps_between(max(since_ms, begin_ms), end_ms):
            count = "blocks are missing" if gap.dropped < 0 else f"{gap.dropped} rows were dropped"
            gaps.append(f"{count} between {_clock(gap.begin_ms)} and {_clock(gap.end_ms)} ({name})")
        if (
            leadership.was_off
            and leadership.begin_ms > begin_ms
            and not (number and relevant[number - 1].is_off)
        ):
            gaps.append(f"the trace was off until {_clock(leadership.begin_ms)}")
        if leadership.is_off:
            until = "" if is_current else f" until {_clock(relevant[number + 1].begin_ms)}"
            gaps.append(f"the trace was off from {_clock(leadership.end_ms)}{until}")
        elif not leadership.has_ended and not (is_current and process.is_live):
            gaps.append(f"{name} stopped after {_clock(process.end_ms)} without its last rows")
        elif is_current and leadership.has_ended:
            gaps.append(f"no broker is known to lead the partition since {_clock(leadership.end_ms)}")
        if not is_current:
            following = relevant[number + 1]
            if following.epoch > leadership.epoch + 1:
                gaps.append(
                    f"nothing is known of the leader epochs between {leadership.epoch} and {following.epoch}"
                )
    return gaps


def gap_changes(leaderships: Iterable[Leadership], coverage: Iterable[Coverage]) -> list[int]:
    """Return the times at which the result of `coverage_gaps` changes, in ascending order: it is the same for all
    `begin_ms` from one of them to below the next one."""
    begins = {each.begin_ms for each in leaderships}
    return sorted(begins | {gap.end_ms + 1 for each in coverage for gap in each.gaps})


def find_leaderships(found: Iterable[TracedRow]) -> list[Leadership]:
    """Return who led the partition, in the order of leader epochs, which is that of the rows."""
    leaderships: list[Leadership] = []
    for each in found:
        row = each.row
        if row.kind == rows.LED:
            leadership = Leadership(each)
            last = leaderships[-1] if leaderships else None
            if row.cause != rows.CONTINUED or (last is None) or _key(last) != _key(leadership):
                leaderships.append(leadership)
        elif row.kind == rows.ENDED:
            for leadership in reversed(leaderships):
                if (
                    leadership.process == (each.broker_id, each.incarnation)
                    and leadership.epoch == each.leader_epoch
                ):
                    leadership.end_ms, leadership.has_ended = row.time_ms, True
                    leadership.is_off = row.cause == rows.TURNED_OFF
                    break
    return leaderships


def _key(leadership: Leadership) -> tuple[tuple[int, int], int]:
    return leadership.process, leadership.epoch


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.3g} s"


def _clock(unix_ms: int) -> str:
    if unix_ms < 0:
        return "an unknown time"
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{unix_ms % 1000:03d} UTC"
