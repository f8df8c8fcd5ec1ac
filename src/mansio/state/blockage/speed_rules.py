"""Rules about speed: which partition or member is slower than the others."""

from __future__ import annotations

from collections import defaultdict
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Final

from mansio.state.blockage.case import Case, name_of, named, share_partitions
from mansio.state.blockage.findings import RECENT_COMMIT_MS, Cause, Finding, Impact, count, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.blockage.facts import (
        GroupFacts,
        PartitionFacts,
    )

STALE_COMMIT_MS: Final = 30_000
"""Time without a commit, with records to process, after which a member that sends heartbeats counts as stopped."""

SLOW_LEASE_MS_MIN: Final = 5_000
"""Age of a lease from which on its holder may count as slow; it also has to be half of the duration of the lease."""

LAG_MIN: Final = 1_000
"""Lag of a partition from which on it is compared with others."""

CONCENTRATION_MIN: Final = 0.8
"""Fraction of the lag of a topic, or of the records of at most three partitions, that counts as concentrated."""

HOT_FACTOR: Final = 3
"""A partition is hot if it has so many times the records of the median of its topic."""

FEW_PARTITIONS: Final = 3
"""Number of partitions up to which a factor over the median says nothing."""

APPENDED_MIN: Final = 100
"""Number of records that a topic got during the sample from which on they are compared, instead of all records."""


def hot_partition(case: Case) -> Iterator[Finding]:
    """Find partitions that get most records of their topic, and have most of its lag."""
    by_topic: dict[str, list[PartitionFacts]] = defaultdict(list)
    for each in case.facts.partitions:
        by_topic[each.place.topic].append(each)
    for topic, parts in sorted(by_topic.items()):
        known = [each for each in parts if each.lag >= 0 and each.log is not None]
        worst = max(known, key=lambda each: each.lag, default=None)
        if worst is None or worst.place in case.explained or worst.lag < LAG_MIN:
            continue
        lag = sum(each.lag for each in known)
        is_hot = worst.log is not None and worst.log.is_hot
        if is_hot or (worst.lag >= CONCENTRATION_MIN * lag and _has_most_records(worst, known)):
            case.mark_explained([worst])
            yield Finding(
                Cause.HOT_PARTITION,
                Impact.SLOWS,
                is_certain=is_hot,
                text=(
                    f"{worst.place} is hot: it gets most records of its topic, and {worst.lag * 100 // max(lag, 1)} % "
                    f"of the lag ({worst.lag:,} of {lag:,}) is there"
                ),
                advice="find the keys, and process them in parallel (share group, by key) before you add partitions",
                command="mansio cluster hot",
                records=worst.lag,
                topic=topic,
                partition=worst.place.partition,
                evidence=(("lag", worst.lag), ("lag_of_topic", lag)),
            )


def _has_most_records(part: PartitionFacts, parts: list[PartitionFacts]) -> bool:
    """Whether a partition gets far more records than others of its topic: those of the sample count if they are
    enough, otherwise those in the logs."""
    if len(parts) < 2:
        return False
    sizes = {each.place: each.log.appended for each in parts if each.log is not None}
    if sum(sizes.values()) < APPENDED_MIN:
        sizes = {
            each.place: each.log.end_offset - each.log.start_offset for each in parts if each.log is not None
        }
    size = sizes[part.place]
    if len(parts) <= FEW_PARTITIONS:
        return size >= CONCENTRATION_MIN * sum(sizes.values())
    return size >= HOT_FACTOR * max(median(sizes.values()), 1)


def slow_handler(case: Case) -> Iterator[Finding]:
    """Find members that are slower than their records arrive."""
    yield from _slow_leases(case) if case.facts.is_share else _slow_commits(case)


def _slow_leases(case: Case) -> Iterator[Finding]:
    slow: dict[str, list[tuple[PartitionFacts, int, int]]] = defaultdict(list)
    for each, share in share_partitions(case):
        for holder in share.holders:
            limit_ms = max(SLOW_LEASE_MS_MIN, share.lock_ms // 2)
            if holder.oldest_ms >= limit_ms and holder.member_id not in case.stopped:
                slow[holder.member_id].append((each, holder.leased, holder.oldest_ms))
    members = {each.member_id: each for each in case.facts.members}
    for member_id, held in sorted(slow.items()):
        leased, oldest_ms = sum(one[1] for one in held), max(one[2] for one in held)
        worst = max(held, key=lambda one: one[2])[0]
        stands_still = any(
            case.has_stopped(each) and each.share is not None and not each.share.has_available
            for each, _, _ in held
        )
        member = members.get(member_id)
        name = f"member {member_id}" if member is None else name_of(member)
        yield Finding(
            Cause.SLOW_HANDLER,
            Impact.BLOCKS if stands_still else Impact.SLOWS,
            is_certain=False,
            text=f"{name} has held {count(leased, 'record')} for up to {seconds(oldest_ms)}: its handler is slow",
            advice="let it fetch fewer records at once, or process them in parallel; see its leases",
            command=f"mansio group describe {quote(case.facts.group)}",
            records=leased,
            topic=worst.place.topic,
            partition=worst.place.partition,
            member_id=member_id,
            client_id="" if member is None else member.client_id,
            evidence=(("leased", leased), ("oldest_ms", oldest_ms)),
        )


def _slow_commits(case: Case) -> Iterator[Finding]:
    facts = case.facts
    lags: dict[str, list[PartitionFacts]] = defaultdict(list)
    for each in facts.partitions:
        for member in case.members.get(each.place, ()) if each.lag > 0 else ():
            if member.member_id not in case.stopped:
                lags[member.member_id].append(each)
    total = sum(each.lag for parts in lags.values() for each in parts)
    stale: dict[str, list[PartitionFacts]] = {}
    for member_id, parts in lags.items():
        unexplained = [each for each in parts if each.place not in case.explained]
        if not unexplained:
            continue
        age_ms = min(_stale_ms(facts, each) for each in unexplained)
        lag = sum(each.lag for each in unexplained)
        # The others show that records can be processed: less time is enough to call one of them slow.
        is_alone = len(lags) < len(facts.members) and lag >= CONCENTRATION_MIN * total
        is_behind = is_alone and lag >= LAG_MIN
        if age_ms >= STALE_COMMIT_MS or is_behind or (is_alone and age_ms > RECENT_COMMIT_MS):
            stale[member_id] = unexplained
    members = {each.member_id: each for each in facts.members}
    is_everyone = len(stale) >= len(facts.members)
    for member_id, parts in sorted(stale.items()):
        member, lag = members[member_id], sum(each.lag for each in parts)
        worst = max(parts, key=lambda each: each.lag)
        age_ms = min(_stale_ms(facts, each) for each in parts)
        case.mark_explained(parts)
        if is_everyone:
            text = (
                f"{name_of(member)} sends heartbeats, but has committed nothing of {named(parts)} for "
                f"{seconds(age_ms)}; {count(lag, 'record')} wait"
            )
            advice = "it has stopped polling, or its handler hangs: look at what it does, or restart it"
        else:
            text = (
                f"{name_of(member)} is slow: {lag * 100 // max(total, 1)} % of the lag ({lag:,} of {total:,}) "
                f"is in its {count(len(parts), 'partition')}, last commit {seconds(age_ms)} ago"
            )
            advice = "look at what its handler waits for, or process records in parallel"
        yield Finding(
            Cause.STOPPED_MEMBER if is_everyone else Cause.SLOW_HANDLER,
            Impact.BLOCKS if all(case.stands_still(each) for each in parts) and is_everyone else Impact.SLOWS,
            is_certain=False,
            text=text,
            advice=advice,
            command=f"mansio group describe {quote(facts.group)}",
            records=lag,
            topic=worst.place.topic,
            partition=worst.place.partition,
            member_id=member_id,
            client_id=member.client_id,
            evidence=(("lag", lag), ("lag_of_group", total), ("committed_ms", age_ms)),
        )


def _stale_ms(facts: GroupFacts, part: PartitionFacts) -> int:
    """Return the time in which a member could have committed a position of a partition and did not; 0 if unknown."""
    if part.done > 0 or part.committed_ms < 0 or facts.settled_ms < 0:
        return 0
    return min(part.committed_ms, facts.settled_ms)
