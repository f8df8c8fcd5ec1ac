"""What keeps a group from going on: the types of the answer, and how it is made of what the rules have found.

Findings are ordered: what blocks the group before what slows it, what is certain before what is likely, and causes
before their consequences, in the order of `Cause`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.state.blockage.facts import GroupFacts

FINDINGS_MAX: Final = 20
"""Maximum number of findings in an answer; the others are counted."""

RECENT_COMMIT_MS: Final = 15_000
"""Age of a commit that still counts as progress: three intervals of automatic commits in Kafka's clients."""


class Cause(StrEnum):
    """Why a group does not go on. Of two causes with the same effect, the first one here is the origin."""

    DENIED_ACL = "denied-acl"
    NO_LEADER = "no-leader"
    NO_ANSWER = "no-answer"
    NO_MEMBER = "no-member"
    REBALANCE = "rebalance"
    STOPPED_MEMBER = "stopped-member"
    DEAD_LETTERS_WAIT = "dead-letters-wait"
    OPEN_TRANSACTION = "open-transaction"
    POISON_RECORD = "poison-record"
    QUOTA = "quota"
    LOCKS_TAKEN = "locks-taken"
    KEY_IN_FLIGHT = "key-in-flight"
    KEY_LIMIT = "key-limit"
    SLOW_HANDLER = "slow-handler"
    HOT_PARTITION = "hot-partition"
    BACKOFF = "backoff"
    DELAYED_ONLY = "delayed-only"
    PAUSED_SCHEDULE = "paused-schedule"


_RANK: Final = {cause: rank for rank, cause in enumerate(Cause)}


class Impact(IntEnum):
    """What a cause does to the records that it concerns."""

    BLOCKS = 0
    """None of them is processed before it ends."""
    SLOWS = 1
    """They are processed, but later than they could be."""
    WAITS = 2
    """There is nothing to process: what is missing has not been published yet."""


class Status(StrEnum):
    """State of a group in one word."""

    BLOCKED = "blocked"
    """It does nothing because of the first finding."""
    HINDERED = "hindered"
    """It goes on, but not with all of its records, or slower than it could."""
    PROGRESSING = "progressing"
    CAUGHT_UP = "caught-up"
    WAITING = "waiting"
    """It has processed everything, and the first finding says what it waits for."""
    UNEXPLAINED = "unexplained"
    """It has a lag, nothing was done during the sample, and no cause was found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. The fields from `topic` to `schedule` are what it is about, as far as they apply; -1, "" or None if
    not. `records`: number of records that wait for it, -1 if unknown. `text`: the cause in one line, with numbers;
    `advice`: what to do, in words; `command`: the command for it. `evidence`: the numbers behind the finding by
    name."""

    cause: Cause
    impact: Impact
    is_certain: bool
    text: str
    advice: str
    command: str
    records: int = -1
    topic: str = ""
    partition: int = -1
    offset: int = -1
    member_id: str = ""
    client_id: str = ""
    principal: str = ""
    key: bytes | None = None
    transactional_id: str = ""
    producer_id: int = -1
    schedule: str = ""
    evidence: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What keeps a group from going on. `findings`: ordered, the first one is the answer; `more_findings`: how many
    were left out. `lag`: number of records that are not done; `done`: number of those that were done during the sample
    of `sample_ms`. `hidden_topics`: number of topics that the caller may not know and that findings were left out for;
    `silent_brokers`: brokers that did not answer, so that something may be missing. `summary`: all in one line."""

    group: str
    group_type: str
    state: str
    status: Status
    summary: str
    lag: int
    done: int
    sample_ms: int
    members: int
    findings: tuple[Finding, ...] = ()
    more_findings: int = 0
    hidden_topics: int = 0
    silent_brokers: tuple[int, ...] = ()

    @property
    def rate(self) -> float | None:
        """Records done per second; None without a sample."""
        return self.done * 1000 / self.sample_ms if self.sample_ms > 0 else None


def order(findings: list[Finding]) -> list[Finding]:
    """Return findings in the order in which a person should read them."""
    return sorted(
        findings,
        key=lambda each: (
            each.impact,
            not each.is_certain,
            _RANK[each.cause],
            -each.records,
            each.topic,
            each.partition,
            each.member_id,
        ),
    )


def conclude(facts: GroupFacts, findings: list[Finding], *, hidden_topics: frozenset[str]) -> Explanation:
    """Return the answer for these facts and findings. `hidden_topics`: topics of the group that the caller may not
    know; findings about them are left out, and the topics are counted."""
    visible = [each for each in order(findings) if each.topic not in hidden_topics]
    concerned = {each.place.topic for each in facts.partitions} & hidden_topics
    status = _status(facts, [each.impact for each in findings])
    return Explanation(
        group=facts.group,
        group_type=facts.group_type,
        state=facts.state,
        status=status,
        summary=_summary(facts, status, visible, len(concerned)),
        lag=facts.lag,
        done=facts.done,
        sample_ms=facts.sample_ms,
        members=len(facts.members),
        findings=tuple(visible[:FINDINGS_MAX]),
        more_findings=max(len(visible) - FINDINGS_MAX, 0),
        hidden_topics=len(concerned),
        silent_brokers=facts.silent_brokers,
    )


def _status(facts: GroupFacts, impacts: list[Impact]) -> Status:
    if Impact.BLOCKS in impacts:
        return Status.HINDERED if facts.done > 0 else Status.BLOCKED
    if Impact.SLOWS in impacts:
        return Status.HINDERED
    if facts.lag == 0:
        if Impact.WAITS in impacts:
            return Status.WAITING
        if facts.done > 0:
            return Status.PROGRESSING
        return Status.UNEXPLAINED if _unknown(facts) else Status.CAUGHT_UP
    if facts.done > 0 or not facts.sample_ms:
        return Status.PROGRESSING
    # Members commit every few seconds: a recent commit is progress, too.
    if any(0 <= each.committed_ms <= RECENT_COMMIT_MS for each in facts.partitions if each.lag > 0):
        return Status.PROGRESSING
    return Status.UNEXPLAINED


def _unknown(facts: GroupFacts) -> int:
    """Return the number of partitions whose lag is not known."""
    return sum(each.lag < 0 for each in facts.partitions)


def _summary(facts: GroupFacts, status: Status, findings: list[Finding], hidden: int) -> str:
    name = f"group {facts.group}"
    lag = f"lag {facts.lag:,}"
    if findings and status in (Status.BLOCKED, Status.HINDERED, Status.WAITING):
        what = {Status.BLOCKED: "is blocked", Status.HINDERED: "is hindered", Status.WAITING: "waits"}[status]
        text = f"{name} {what}: {findings[0].text}"
        if len(findings) > 1:
            text += f" (and {count(len(findings) - 1, 'other finding')})"
    elif status in (Status.BLOCKED, Status.HINDERED, Status.WAITING):
        text = f"{name}: {status}, by something in a topic that you may not describe ({lag})"
    elif status is Status.CAUGHT_UP:
        text = f"{name} is caught up: nothing waits, {count(len(facts.members), 'member')}"
    elif status is Status.PROGRESSING:
        speed = ""
        if facts.sample_ms and facts.done:
            speed = f" at {facts.done * 1000 / facts.sample_ms:,.0f} records/s"
        text = f"{name}: nothing blocks it; progressing{speed} with {lag}"
    elif facts.lag == 0:
        text = (
            f"{name}: nothing found that blocks it; its lag is not known, because it has no position in "
            f"{count(_unknown(facts), 'partition')}"
        )
    else:
        text = f"{name}: nothing found that blocks it, but no record was done in {seconds(facts.sample_ms)}, {lag}"
    if hidden:
        text += f"; {count(hidden, 'topic')} not shown"
    if facts.silent_brokers:
        text += f"; no answer from broker {', '.join(map(str, facts.silent_brokers))}"
    return text


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 record`, `1,200 records`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(duration_ms: float) -> str:
    """Return a duration in words: `0.5 s`, `12 s`, `3 min`, `2 h`, `4 d`."""
    value = duration_ms / 1000
    if value < 10:
        return f"{max(value, 0):.1f} s"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if value < limit:
            return f"{value / size:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


by_place: Final = attrgetter("place.topic", "place.partition")
