"""Rules about records: which of them holds back others, or is not there yet."""

from __future__ import annotations

from collections import defaultdict
from shlex import quote
from typing import TYPE_CHECKING, Final

from mansio.state.blockage.case import Case, seeing_command, share_partitions
from mansio.state.blockage.facts import ShareOrder
from mansio.state.blockage.findings import Cause, Finding, Impact, count, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.blockage.facts import (
        LogFacts,
        PartitionFacts,
    )

POISON_ATTEMPTS_MIN: Final = 3
"""Number of attempts from which on a record counts as delivered again and again."""

POISON_REBALANCES_MIN: Final = 4
"""Number of rebalances without a commit that show that members fail at the same record, in addition to two for each
member: those of a start, or of a rolling restart."""

OPEN_TRANSACTION_MS_MIN: Final = 10_000
"""Age from which on a transaction that holds readers back is named without a sample."""

KEY_HELD_MS_MIN: Final = 2_000
"""Age of a lease from which on the records behind it in order count as held back."""


def dead_letters_wait(case: Case) -> Iterator[Finding]:
    """Find dead letters whose copies fail."""
    for each, share in share_partitions(case):
        if not share.dead_letter_error or share.archiving <= 0:
            continue
        is_blocking = share.order is not ShareOrder.NONE and case.has_stopped(each)
        yield Finding(
            Cause.DEAD_LETTERS_WAIT,
            Impact.BLOCKS if is_blocking else Impact.SLOWS,
            is_certain=True,
            text=(
                f"{count(share.archiving, 'dead letter')} of {each.place} cannot be written: "
                f"{share.dead_letter_error}"
            ),
            advice="repair the dead-letter topic of the group; the records are kept meanwhile",
            command="mansio dlq list",
            records=share.archiving,
            topic=each.place.topic,
            partition=each.place.partition,
            evidence=(("archiving", share.archiving),),
        )


def poison(case: Case) -> Iterator[Finding]:
    """Find records that are delivered again and again."""
    facts = case.facts
    for each, share in share_partitions(case):
        retried = share.retried
        if retried is None or retried.attempts < POISON_ATTEMPTS_MIN:
            continue
        stands_still = case.has_stopped(each)
        if stands_still:
            case.mark_explained([each])
        when = f", next in {seconds(retried.due_ms)}" if retried.due_ms > 0 else ""
        limit = f" of at most {share.delivery_limit}" if share.delivery_limit > 0 else ""
        yield Finding(
            Cause.POISON_RECORD,
            Impact.BLOCKS if stands_still else Impact.SLOWS,
            is_certain=True,
            text=(
                f"record {each.place}@{retried.offset} is delivered again and again: {retried.attempts} attempts"
                f"{limit}{when}"
            ),
            advice="see the record, then repair the handler or let it reject the record to the dead-letter topic",
            command=seeing_command(each.place, retried.offset),
            records=max(share.lag, 1) if stands_still else 1,
            topic=each.place.topic,
            partition=each.place.partition,
            offset=retried.offset,
            evidence=(
                ("attempts", retried.attempts),
                ("limit", share.delivery_limit),
                ("due_ms", retried.due_ms),
            ),
        )
    if facts.is_share or facts.rebalances < POISON_REBALANCES_MIN + 2 * len(facts.members):
        return
    parts = [each for each in case.open_partitions() if case.stands_still(each) and each.position >= 0]
    if not parts:
        return
    # The group has joined again and again at the same positions: the next record of one of them makes members fail.
    first = max(parts, key=lambda each: (each.lag, -each.place.partition))
    case.mark_explained(parts)
    others = f", or the next one of {count(len(parts) - 1, 'other partition')}" if len(parts) > 1 else ""
    yield Finding(
        Cause.POISON_RECORD,
        Impact.BLOCKS,
        is_certain=False,
        text=(
            f"its members fail again and again before they commit: {facts.rebalances} rebalances at record "
            f"{first.place}@{first.position}{others}"
        ),
        advice=f"see the record; to skip it: mansio group reset-offsets {quote(facts.group)} --to +1",
        command=seeing_command(first.place, first.position),
        records=sum(each.lag for each in parts),
        topic=first.place.topic,
        partition=first.place.partition,
        offset=first.position,
        evidence=(("rebalances", facts.rebalances), ("committed_ms", first.committed_ms)),
    )


def open_transaction(case: Case) -> Iterator[Finding]:
    """Find records that wait behind a transaction that is not ended."""
    facts = case.facts
    known = {each.producer_id: each for each in facts.transactions}
    for each in case.open_partitions():
        log = each.log
        if log is None or log.transaction is None or not _waits_for_stable(each, log):
            continue
        transaction, coordinated = log.transaction, known.get(log.transaction.producer_id)
        open_ms = transaction.open_ms if coordinated is None else coordinated.open_ms
        if open_ms < (facts.sample_ms or OPEN_TRANSACTION_MS_MIN):
            continue
        case.mark_explained([each])
        waiting = log.end_offset - log.stable_offset
        transactional_id = "" if coordinated is None else coordinated.transactional_id
        place = f"--topic {quote(each.place.topic)} --partition {each.place.partition}"
        yield Finding(
            Cause.OPEN_TRANSACTION,
            Impact.BLOCKS,
            is_certain=True,
            text=(
                f"{each.place} has an open transaction at offset {transaction.first_offset}, of "
                f"{transactional_id or f'producer {transaction.producer_id}'} for {seconds(open_ms)}; "
                f"{count(waiting, 'record')} behind it wait"
            ),
            advice="let the producer end it; if it has gone, end the transaction for it",
            command=(
                f"mansio txn terminate {quote(transactional_id)}"
                if transactional_id
                else f"mansio txn abort {place} --start-offset {transaction.first_offset}"
            ),
            records=waiting,
            topic=each.place.topic,
            partition=each.place.partition,
            offset=transaction.first_offset,
            transactional_id=transactional_id,
            producer_id=transaction.producer_id,
            evidence=(
                ("open_ms", open_ms),
                ("stable_offset", log.stable_offset),
                ("end_offset", log.end_offset),
            ),
        )


def _waits_for_stable(part: PartitionFacts, log: LogFacts) -> bool:
    """Whether a group has done everything below the last stable offset, and there are records above it."""
    if log.stable_offset >= log.end_offset or part.done > 0:
        return False
    if part.share is not None:
        # The lag of such a group ends at the last stable offset.
        return part.share.is_committed_only and part.share.lag <= 0
    if log.records_ahead == 0 or part.position < 0:
        return False
    return log.stable_records_ahead == 0 or part.position >= log.stable_offset


def locks_taken(case: Case) -> Iterator[Finding]:
    """Find partitions of which as many records are leased as may be."""
    for each, share in share_partitions(case):
        if (
            not 0 < share.record_locks_max <= share.leased
            or share.lag <= share.leased
            or not case.has_stopped(each)
        ):
            continue
        case.mark_explained([each])
        holder = max(share.holders, key=lambda one: one.leased, default=None)
        held = f", {holder.leased} of them by {holder.member_id}" if holder is not None else ""
        yield Finding(
            Cause.LOCKS_TAKEN,
            Impact.BLOCKS,
            is_certain=True,
            text=(
                f"all {share.record_locks_max} record locks of {each.place} are taken{held}; "
                f"{count(share.lag - share.leased, 'record')} wait"
            ),
            advice="acknowledge faster, fetch less at once, or allow more locks",
            command=(
                f"mansio group alter {quote(case.facts.group)} "
                f"share.partition.max.record.locks={share.record_locks_max * 2}"
            ),
            records=share.lag - share.leased,
            topic=each.place.topic,
            partition=each.place.partition,
            member_id="" if holder is None else holder.member_id,
            evidence=(("leased", share.leased), ("locks", share.record_locks_max), ("lag", share.lag)),
        )


def key_in_flight(case: Case) -> Iterator[Finding]:
    """Find records that wait for an earlier one of their key, or partition, while nothing else is available."""
    for each, share in share_partitions(case):
        held = share.held
        if held is None or held.waiting <= 0 or share.has_available or not case.has_stopped(each):
            continue
        if 0 < max((one.oldest_ms for one in share.holders), default=0) < KEY_HELD_MS_MIN:
            continue
        case.mark_explained([each])
        of_key = "" if held.key is None else of_key_text(held.key)
        total = f"{'' if held.is_complete else 'at least '}{count(held.total, 'record')}"
        holder = max(share.holders, key=lambda one: one.oldest_ms, default=None)
        by = f", leased for {seconds(holder.oldest_ms)}" if holder is not None else ""
        what = "its key" if share.order is ShareOrder.KEY else "its partition"
        yield Finding(
            Cause.KEY_IN_FLIGHT,
            Impact.BLOCKS,
            is_certain=True,
            text=(
                f"record {each.place}@{held.offset}{of_key} is in flight{by} and holds back {held.waiting:,} later "
                f"ones of {what}; in all {total} wait in order"
            ),
            advice="let its member acknowledge or release it: it is offered again when its lease ends",
            command=seeing_command(each.place, held.offset),
            records=held.total,
            topic=each.place.topic,
            partition=each.place.partition,
            offset=held.offset,
            key=held.key,
            member_id="" if holder is None else holder.member_id,
            evidence=(("waiting", held.waiting), ("total", held.total), ("leased", share.leased)),
        )


def of_key_text(key: bytes) -> str:
    """Return the part of the text of a finding that shows the key, so that it can be left out."""
    text = key[:64].decode("utf-8", "backslashreplace")
    return f" of key {text if text.isprintable() else repr(text)}"


def key_limit(case: Case) -> Iterator[Finding]:
    """Find limits by key that hold records back, while nothing else is available."""
    for each, share in share_partitions(case):
        limited = share.keys_at_lease_limit + share.keys_at_rate_limit
        if limited <= 0 or share.has_available or not case.has_stopped(each):
            continue
        case.mark_explained([each])
        is_rate = share.keys_at_rate_limit >= share.keys_at_lease_limit
        setting = "mansio.share.key.rate" if is_rate else "mansio.share.key.leases.max"
        yield Finding(
            Cause.KEY_LIMIT,
            Impact.BLOCKS,
            is_certain=True,
            text=f"{count(limited, 'key')} of {each.place} are at the limit by key; {count(share.lag, 'record')} wait",
            advice=f"raise {setting} of the group, if the system behind it can take more of one key",
            command=f"mansio group describe {quote(case.facts.group)}",
            records=share.lag,
            topic=each.place.topic,
            partition=each.place.partition,
            evidence=(
                ("at_lease_limit", share.keys_at_lease_limit),
                ("at_rate_limit", share.keys_at_rate_limit),
            ),
        )


def backoff(case: Case) -> Iterator[Finding]:
    """Find partitions of which all that is left waits for its next attempt."""
    for each in case.open_partitions():
        share = each.share
        if share is None or share.in_backoff <= 0 or share.has_available or not case.has_stopped(each):
            continue
        due_ms = 0 if share.retried is None else share.retried.due_ms
        when = f", the next in {seconds(due_ms)}" if due_ms > 0 else ""
        yield Finding(
            Cause.BACKOFF,
            Impact.SLOWS,
            is_certain=True,
            text=f"{count(share.in_backoff, 'record')} of {each.place} failed and wait for the next attempt{when}",
            advice="look at why the handler gives them back; settings of the group set the pauses",
            command=f"mansio group describe {quote(case.facts.group)}",
            records=share.in_backoff,
            topic=each.place.topic,
            partition=each.place.partition,
            evidence=(("in_backoff", share.in_backoff), ("due_ms", due_ms)),
        )


def nothing_published(case: Case) -> Iterator[Finding]:
    """Find what a group that has processed everything waits for: delayed records, paused schedules."""
    facts = case.facts
    if facts.lag > 0 or case.is_going_on:
        return
    by_topic: dict[str, list[PartitionFacts]] = defaultdict(list)
    for each in case.open_partitions():
        by_topic[each.place.topic].append(each)
    for topic, parts in sorted(by_topic.items()):
        logs = [(each, each.log) for each in parts if each.log is not None]
        delayed = sum(log.delayed for _, log in logs)
        if delayed:
            due_ms = min((log.next_due_ms for _, log in logs if log.next_due_ms >= 0), default=0)
            first = next(each for each, log in logs if log.delayed)
            yield Finding(
                Cause.DELAYED_ONLY,
                Impact.WAITS,
                is_certain=True,
                text=f"{topic} has delayed records only: {delayed:,}, the first is due in {seconds(due_ms)}",
                advice="wait, or deliver them now (mansio delayed deliver-now)",
                command=f"mansio delayed list {quote(topic)}",
                records=delayed,
                topic=topic,
                partition=first.place.partition,
                evidence=(("delayed", delayed), ("next_due_ms", due_ms)),
            )
        for each, log in logs:
            for name in log.paused_schedules:
                yield Finding(
                    Cause.PAUSED_SCHEDULE,
                    Impact.WAITS,
                    is_certain=True,
                    text=f"schedule {name} of {topic} is paused: it publishes nothing",
                    advice="resume it",
                    command=f"mansio schedule resume {quote(name)} --topic {quote(topic)}",
                    records=0,
                    topic=topic,
                    partition=each.place.partition,
                    schedule=name,
                    evidence=(("schedules", log.schedules),),
                )
