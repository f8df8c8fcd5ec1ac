"""Rules about members, clients and brokers: who should read, or let read, and does not."""

from __future__ import annotations

from collections import defaultdict
from shlex import quote
from typing import TYPE_CHECKING, Final

from mansio.state.blockage.case import Case, name_of, named, share_partitions, verb
from mansio.state.blockage.facts import NO_LEADER
from mansio.state.blockage.findings import Cause, Finding, Impact, count, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.blockage.facts import (
        MemberFacts,
        PartitionFacts,
    )

_REBALANCING: Final = frozenset({"PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling"})
"""States of a group that has not agreed who reads what."""

SILENT_MS_MIN: Final = 2_000
"""Time without a heartbeat after which a member may count as stopped, whatever its session timeout."""

IDLE_MS_MIN: Final = 10_000
"""Time in which no member has asked a share partition with available records for any, after which they are stopped."""


def denied(case: Case) -> Iterator[Finding]:
    """Find clients of the group that are refused what they need. If it has no member, this is why."""
    facts = case.facts
    if case.is_going_on:
        return
    topics = {each.place.topic for each in facts.partitions}
    clients = {each.client_id for each in facts.members}
    for each in facts.refusals:
        is_group = each.resource_type == "group"
        if not is_group and each.name not in topics:
            continue
        if facts.members and (is_group or each.client_id not in clients):
            continue
        waiting = ""
        if not facts.members:
            case.mark_explained(facts.partitions)
            waiting = f"it has no member, and {count(facts.lag, 'record')} wait: "
        yield Finding(
            Cause.DENIED_ACL,
            Impact.BLOCKS,
            is_certain=is_group or bool(facts.members),
            text=(
                f"{waiting}{each.principal} (client {each.client_id or '-'}) is refused {each.operation} on "
                f"{each.resource_type} {each.name}, {count(each.count, 'time')}, last {seconds(each.ago_ms)} ago"
                f"{f': {each.denied_by}' if each.denied_by else ''}"
            ),
            advice=(
                "an ACL denies it: remove that ACL, or use another user"
                if each.denied_by
                else "allow it, if the client is meant to read in this group"
            ),
            command=each.remedy,
            records=facts.lag,
            topic="" if is_group else each.name,
            principal=each.principal,
            client_id=each.client_id,
            evidence=(("refusals", each.count), ("last_refusal_ms", each.ago_ms)),
        )


def no_leader(case: Case) -> Iterator[Finding]:
    """Find topics with partitions without a leader."""
    lost: dict[str, list[PartitionFacts]] = defaultdict(list)
    for each in case.facts.partitions:
        if each.leader == NO_LEADER:
            lost[each.place.topic].append(each)
    for topic, parts in sorted(lost.items()):
        case.mark_explained(parts)
        missing = sorted({node_id for each in parts for node_id in each.missing_brokers})
        brokers = (
            f": broker {', '.join(map(str, missing))}, which has the records, is down" if missing else ""
        )
        yield Finding(
            Cause.NO_LEADER,
            Impact.BLOCKS,
            is_certain=True,
            text=f"{named(parts)} {'has' if len(parts) == 1 else 'have'} no leader{brokers}",
            advice="start these brokers (cluster elect --unclean would give up records)",
            command=f"mansio cluster partitions --topic {quote(topic)} --only offline",
            topic=topic,
            partition=min(each.place.partition for each in parts),
            evidence=(("partitions", len(parts)),),
        )


def no_answer(case: Case) -> Iterator[Finding]:
    """Find leaders that did not answer, or could not."""
    silent: dict[tuple[int, str], list[PartitionFacts]] = defaultdict(list)
    for each in case.open_partitions():
        if each.error:
            silent[each.leader, each.place.topic].append(each)
    for (leader, topic), parts in sorted(silent.items()):
        case.mark_explained(parts)
        yield Finding(
            Cause.NO_ANSWER,
            Impact.SLOWS if case.is_going_on else Impact.BLOCKS,
            is_certain=False,
            text=f"broker {leader}, which leads {named(parts)}, did not answer: {parts[0].error}",
            advice="see whether the broker is overloaded or cut off",
            command="mansio cluster status",
            topic=topic,
            partition=min(each.place.partition for each in parts),
            evidence=(("broker", leader), ("partitions", len(parts))),
        )


def no_member(case: Case) -> Iterator[Finding]:
    """Find whether the group, or one of its topics, has no reader."""
    facts = case.facts
    waiting: dict[str, list[PartitionFacts]] = defaultdict(list)
    for each in case.open_partitions():
        share = each.share
        is_used = share is not None and (share.holders or share.waiting_receives)
        if case.stands_still(each) and each.place not in case.members and not is_used:
            waiting[each.place.topic].append(each)
    if not waiting or facts.state in _REBALANCING:
        return
    if not facts.members:
        parts = [each for parts in waiting.values() for each in parts]
        if case.is_going_on:
            return
        case.mark_explained(parts)
        lag = sum(each.lag for each in parts)
        # A finding about the group: it names no topic, so that a caller sees it whatever topics it may know.
        yield Finding(
            Cause.NO_MEMBER,
            Impact.BLOCKS,
            is_certain=True,
            text=f"it has no member; {count(lag, 'record')} wait in {count(len(parts), 'partition')}",
            advice="start its consumers",
            command=_reading_command(case, parts),
            records=lag,
            evidence=(("members", 0), ("lag", lag), ("partitions", len(parts))),
        )
        return
    for topic, parts in sorted(waiting.items()):
        case.mark_explained(parts)
        lag = sum(each.lag for each in parts)
        yield Finding(
            Cause.NO_MEMBER,
            Impact.BLOCKS,
            is_certain=True,
            text=f"no member reads {named(parts)}, where {count(lag, 'record')} wait",
            advice="let a consumer of the group subscribe to the topic",
            command=_reading_command(case, parts),
            records=lag,
            topic=topic,
            partition=parts[0].place.partition,
            evidence=(("members", len(facts.members)), ("lag", lag), ("partitions", len(parts))),
        )


def _reading_command(case: Case, parts: list[PartitionFacts]) -> str:
    """Return the command that reads the first of these topics that the caller may know."""
    group = quote(case.facts.group)
    topic = min((each.place.topic for each in parts if each.place.topic not in case.hidden), default=None)
    if topic is None:
        return f"mansio group describe {group}"
    return f"mansio consume {quote(topic)} {'--share-group' if case.facts.is_share else '--group'} {group}"


def rebalance(case: Case) -> Iterator[Finding]:
    """Find whether a rebalance waits for members."""
    facts = case.facts
    awaited = [each for each in facts.members if each.is_awaited]
    if facts.state not in _REBALANCING or not awaited or case.is_going_on:
        return
    first = awaited[0]
    others = f" and {count(len(awaited) - 1, 'other')}" if len(awaited) > 1 else ""
    left = f", for {seconds(facts.rebalance_ms)} at most" if facts.rebalance_ms >= 0 else ""
    case.stopped.update(each.member_id for each in awaited)
    case.mark_explained(each for each in facts.partitions if each.lag > 0)
    yield Finding(
        Cause.REBALANCE,
        Impact.BLOCKS,
        is_certain=True,
        text=f"a rebalance waits for {name_of(first)}{others}, which {verb(awaited)} not joined again{left}",
        advice="a member joins again when it polls: look at what its handler does, or restart it",
        command=f"mansio group describe {quote(facts.group)}",
        records=facts.lag,
        member_id=first.member_id,
        client_id=first.client_id,
        evidence=(
            ("awaited", len(awaited)),
            ("members", len(facts.members)),
            ("left_ms", facts.rebalance_ms),
        ),
    )


def stopped_member(case: Case) -> Iterator[Finding]:
    """Find members that have stopped: they send no heartbeats, or do not ask for records."""
    facts = case.facts
    facts_of = {each.place: each for each in facts.partitions}
    for member in facts.members:
        if member.silent_ms < SILENT_MS_MIN or member.silent_ms * 2 < member.session_ms:
            continue
        parts = [facts_of[each] for each in member.places if each in facts_of]
        held = case.held.get(member.member_id, 0)
        waiting = [each for each in parts if case.stands_still(each)]
        if not waiting and not held:
            continue
        case.stopped.add(member.member_id)
        if not facts.is_share:
            case.mark_explained(parts)
        lag = sum(each.lag for each in waiting)
        left_ms = max(member.session_ms - member.silent_ms, 0)
        yield Finding(
            Cause.STOPPED_MEMBER,
            Impact.BLOCKS,
            is_certain=True,
            text=(
                f"{name_of(member)} has sent no heartbeat for {seconds(member.silent_ms)}; "
                f"{count(held, 'leased record') if held else count(lag, 'record')} wait for it"
            ),
            advice=f"restart it; without it, others take over when its session ends, in {seconds(left_ms)}",
            command=f"mansio group describe {quote(facts.group)}",
            records=held or lag,
            member_id=member.member_id,
            client_id=member.client_id,
            evidence=(("silent_ms", member.silent_ms), ("session_ms", member.session_ms), ("leased", held)),
        )
    if facts.is_share:
        yield from _unasked(case)


def _unasked(case: Case) -> Iterator[Finding]:
    """Find share partitions with available records for which no member asks, although it is not busy with others."""
    found: dict[str, list[PartitionFacts]] = defaultdict(list)
    members = {each.member_id: each for each in case.facts.members}
    for each, share in share_partitions(case):
        if (
            not case.stands_still(each)
            or not share.has_available
            or share.waiting_receives
            or share.idle_ms < IDLE_MS_MIN
        ):
            continue
        readers = (one.member_id for one in case.members.get(each.place, ()))
        idle = (one for one in readers if one not in case.held and one not in case.stopped)
        if (member_id := next(idle, None)) is not None:
            found[member_id].append(each)
    for member_id, parts in sorted(found.items()):
        case.mark_explained(parts)
        case.stopped.add(member_id)
        member = members[member_id]
        idle_ms = min(each.share.idle_ms for each in parts if each.share is not None)
        lag = sum(each.lag for each in parts)
        yield Finding(
            Cause.STOPPED_MEMBER,
            Impact.BLOCKS,
            is_certain=False,
            text=(
                f"{name_of(member)} sends heartbeats but has asked for no record of {named(parts)} for "
                f"{seconds(idle_ms)}; {count(lag, 'record')} wait"
            ),
            advice="its program has stopped polling: look at what it does, or restart it",
            command=f"mansio group describe {quote(case.facts.group)}",
            records=lag,
            topic=parts[0].place.topic,
            partition=parts[0].place.partition,
            member_id=member_id,
            client_id=member.client_id,
            evidence=(("idle_ms", idle_ms), ("lag", lag)),
        )


def quota(case: Case) -> Iterator[Finding]:
    """Find clients of the group that pause, because they have exceeded a quota."""
    facts = case.facts
    if facts.lag <= 0:
        return
    clients: dict[str, MemberFacts] = {each.client_id: each for each in facts.members}
    for each in facts.throttles:
        member = clients.get(each.client_id)
        if member is None or each.pause_ms <= 0:
            continue
        stands_still = not case.is_going_on
        if stands_still:
            case.mark_explained(part for part in facts.partitions if part.place in member.places)
        yield Finding(
            Cause.QUOTA,
            Impact.BLOCKS if stands_still else Impact.SLOWS,
            is_certain=True,
            text=(
                f"client {each.client_id} of {each.user} is throttled for {seconds(each.pause_ms)} more: it may read "
                f"{each.rate:,} bytes/s"
            ),
            advice="raise the quota, if the broker can afford it",
            command=f"mansio quota set {each.quota} --consumer-byte-rate {each.rate * 2}",
            records=facts.lag,
            member_id=member.member_id,
            client_id=each.client_id,
            principal=f"User:{each.user}",
            evidence=(("pause_ms", each.pause_ms), ("bytes_per_second", each.rate)),
        )
