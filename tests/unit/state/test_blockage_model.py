"""What keeps a group from going on, found in facts that are made from known causes: a model that puts causes into a
healthy group is compared with what the rules find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mansio.cli.main import app
from mansio.state.blockage.facts import (
    UNKNOWN,
    GroupFacts,
    GroupType,
    HeldFacts,
    HolderFacts,
    LogFacts,
    MemberFacts,
    OpenTransactionFacts,
    PartitionFacts,
    Place,
    RefusalFacts,
    RetriedFacts,
    ShareFacts,
    ShareOrder,
    ThrottleFacts,
    TransactionFacts,
)
from mansio.state.blockage.findings import FINDINGS_MAX, Cause, Impact, Status, order
from mansio.state.blockage.rules import explain
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_MS: Final = 1_000
SHARE, ORDINARY = (GroupType.SHARE,), (GroupType.CONSUMER, GroupType.CLASSIC)


# -- a healthy group


def healthy(
    kind: GroupType, *, partitions: int = 4, members: int = 2, done: int = 10, lag: int = 20
) -> GroupFacts:
    """A group whose members have read on in each partition during the sample."""
    places = [Place(f"t{number % 2}", number // 2) for number in range(partitions)]
    return GroupFacts(
        group="g",
        group_type=kind,
        state="Stable",
        members=tuple(
            MemberFacts(f"m{number}", f"c{number}", "/h", tuple(places[number::members]), 1_000, 45_000)
            for number in range(members)
        ),
        partitions=tuple(_partition(kind, place, done=done, lag=lag) for place in places),
        settled_ms=600_000,
        sample_ms=SAMPLE_MS,
    )


def _partition(kind: GroupType, place: Place, *, done: int, lag: int) -> PartitionFacts:
    if kind is GroupType.SHARE:
        log = LogFacts(0, 1_000, 1_000, 0, 0, appended=done)
        share = ShareFacts(
            lag,
            leased=min(lag, 5),
            done=done,
            has_available=lag > 5,
            waiting_receives=int(not lag),
            idle_ms=10,
            record_locks_max=2_000,
            lock_ms=30_000,
            delivery_limit=5,
            holders=(HolderFacts("m0", min(lag, 5), 100),) if lag else (),
        )
        return PartitionFacts(place, 1, log=log, share=share)
    ahead = lag + done
    log = LogFacts(0, 1_000, 1_000, ahead, ahead, appended=done)
    return PartitionFacts(place, 1, position=1_000 - ahead, committed_ms=500, progress=done, log=log)


def standing(kind: GroupType, **more: Any) -> GroupFacts:
    """The same group, in which nothing was done during the sample, for no known reason."""
    return healthy(kind, done=0, **more)


def with_first(facts: GroupFacts, change: Callable[[PartitionFacts], PartitionFacts]) -> GroupFacts:
    return replace(facts, partitions=(change(facts.partitions[0]), *facts.partitions[1:]))


def share_of(part: PartitionFacts, **changes: Any) -> PartitionFacts:
    assert part.share is not None
    return replace(part, share=replace(part.share, **changes))


def log_of(part: PartitionFacts, **changes: Any) -> PartitionFacts:
    assert part.log is not None
    return replace(part, log=replace(part.log, **changes))


# -- causes, each put into a group that stands still


@dataclass(frozen=True)
class Injection:
    """A cause of groups of some types. `more`: arguments of the group."""

    cause: Cause
    kinds: tuple[GroupType, ...]
    put: Callable[[GroupFacts], GroupFacts]
    lag: int = 20


def _denied(facts: GroupFacts) -> GroupFacts:
    refusal = RefusalFacts(
        "User:eve", "c9", "READ", "group", "g", 500, 3, "mansio acl add User:eve --operation READ --group g"
    )
    return replace(facts, members=(), state="Empty", refusals=(refusal,))


def _stopped(facts: GroupFacts) -> GroupFacts:
    first, *others = facts.members
    return replace(facts, members=(replace(first, silent_ms=30_000), *others))


def _rebalance(facts: GroupFacts) -> GroupFacts:
    first, *others = facts.members
    members = (replace(first, is_awaited=True), *others)
    return replace(facts, state="PreparingRebalance", members=members, rebalance_ms=60_000)


def _throttled(facts: GroupFacts) -> GroupFacts:
    return replace(facts, throttles=(ThrottleFacts("ANONYMOUS", "c0", 4_000, 1_000, "--client c0"),))


def _ordinary_transaction(part: PartitionFacts) -> PartitionFacts:
    opened = OpenTransactionFacts(part.position, 7, 5_000)
    return log_of(part, stable_offset=part.position, stable_records_ahead=0, transaction=opened)


def _share_transaction(part: PartitionFacts) -> PartitionFacts:
    opened = OpenTransactionFacts(900, 7, 5_000)
    changed = share_of(part, lag=0, leased=0, has_available=False, holders=(), is_committed_only=True)
    return log_of(changed, stable_offset=900, transaction=opened)


def _hot(facts: GroupFacts) -> GroupFacts:
    def change(part: PartitionFacts) -> PartitionFacts:
        if part.share is not None:
            part = share_of(part, lag=5_000, done=1)
        else:
            part = log_of(part, records_ahead=5_001)
            part = replace(part, progress=1, position=part.position)
        return log_of(part, end_offset=90_000, appended=900)

    return with_first(healthy(facts.group_type), change)


def _nothing_left(facts: GroupFacts, **changes: Any) -> GroupFacts:
    """Everything is done, in a topic that has something to come."""
    return with_first(standing(facts.group_type, lag=0), lambda part: log_of(part, **changes))


def _each_stale(facts: GroupFacts) -> GroupFacts:
    return replace(facts, partitions=tuple(replace(each, committed_ms=60_000) for each in facts.partitions))


def _one_slow(facts: GroupFacts) -> GroupFacts:
    """The partitions of one member are all that is left, and have not moved for a while."""
    slow = facts.members[0].places
    parts = [
        replace(each, committed_ms=20_000) if each.place in slow else log_of(each, records_ahead=0)
        for each in facts.partitions
    ]
    return replace(facts, partitions=tuple(parts))


INJECTIONS: Final = (
    Injection(Cause.DENIED_ACL, SHARE + ORDINARY, _denied),
    Injection(
        Cause.NO_LEADER,
        SHARE + ORDINARY,
        lambda facts: with_first(
            facts, lambda part: replace(part, leader=-1, missing_brokers=(3,), log=None, share=None)
        ),
    ),
    Injection(
        Cause.NO_ANSWER,
        SHARE + ORDINARY,
        lambda facts: with_first(facts, lambda part: replace(part, error="no answer", log=None, share=None)),
    ),
    Injection(
        Cause.NO_MEMBER,
        ORDINARY,
        lambda facts: replace(facts, members=(), state="Empty"),
    ),
    Injection(
        Cause.NO_MEMBER,
        SHARE,
        lambda facts: replace(
            facts,
            members=(),
            state="Empty",
            partitions=tuple(share_of(each, holders=(), leased=0) for each in facts.partitions),
        ),
    ),
    Injection(Cause.REBALANCE, ORDINARY, _rebalance),
    Injection(Cause.STOPPED_MEMBER, SHARE + ORDINARY, _stopped),
    Injection(Cause.STOPPED_MEMBER, ORDINARY, _each_stale),
    Injection(
        Cause.STOPPED_MEMBER,
        SHARE,
        lambda facts: replace(
            facts,
            partitions=tuple(
                share_of(each, holders=(), leased=0, has_available=True, idle_ms=60_000)
                for each in facts.partitions
            ),
        ),
    ),
    Injection(
        Cause.DEAD_LETTERS_WAIT,
        SHARE,
        lambda facts: with_first(
            facts, lambda part: share_of(part, archiving=2, dead_letter_error="no such topic")
        ),
    ),
    Injection(
        Cause.POISON_RECORD,
        SHARE,
        lambda facts: with_first(
            facts, lambda part: share_of(part, retried=RetriedFacts(7, 4, 500), has_available=False)
        ),
    ),
    Injection(Cause.POISON_RECORD, ORDINARY, lambda facts: replace(facts, rebalances=8)),
    Injection(Cause.QUOTA, SHARE + ORDINARY, _throttled),
    Injection(Cause.OPEN_TRANSACTION, ORDINARY, lambda facts: with_first(facts, _ordinary_transaction)),
    Injection(Cause.OPEN_TRANSACTION, SHARE, lambda facts: with_first(facts, _share_transaction)),
    Injection(
        Cause.LOCKS_TAKEN,
        SHARE,
        lambda facts: with_first(facts, lambda part: share_of(part, record_locks_max=5, has_available=False)),
    ),
    Injection(
        Cause.KEY_IN_FLIGHT,
        SHARE,
        lambda facts: with_first(
            facts,
            lambda part: share_of(
                part,
                order=ShareOrder.KEY,
                held=HeldFacts(3, 15, 15, b"ann"),
                has_available=False,
                holders=(HolderFacts("m0", 5, 3_000),),
            ),
        ),
    ),
    Injection(
        Cause.KEY_LIMIT,
        SHARE,
        lambda facts: with_first(
            facts, lambda part: share_of(part, keys_at_lease_limit=2, has_available=False)
        ),
    ),
    Injection(
        Cause.SLOW_HANDLER,
        SHARE,
        lambda facts: with_first(facts, lambda part: share_of(part, holders=(HolderFacts("m0", 5, 20_000),))),
    ),
    Injection(Cause.SLOW_HANDLER, ORDINARY, _one_slow),
    Injection(Cause.HOT_PARTITION, SHARE + ORDINARY, _hot),
    Injection(
        Cause.BACKOFF,
        SHARE,
        lambda facts: with_first(
            facts,
            lambda part: share_of(
                part, leased=0, in_backoff=20, has_available=False, holders=(), waiting_receives=1
            ),
        ),
    ),
    Injection(
        Cause.DELAYED_ONLY,
        SHARE + ORDINARY,
        lambda facts: _nothing_left(facts, delayed=3, next_due_ms=9_000),
    ),
    Injection(
        Cause.PAUSED_SCHEDULE,
        SHARE + ORDINARY,
        lambda facts: _nothing_left(facts, schedules=2, paused_schedules=("nightly",)),
    ),
)

CASES: Final = [(each, kind) for each in INJECTIONS for kind in each.kinds]


def test_each_cause_is_put_into_a_group_here() -> None:
    assert {each.cause for each in INJECTIONS} == set(Cause)


@pytest.mark.parametrize(
    ("injection", "kind"), CASES, ids=[f"{each.cause}-{kind}-{at}" for at, (each, kind) in enumerate(CASES)]
)
def test_the_cause_that_was_put_into_a_group_is_found_first(injection: Injection, kind: GroupType) -> None:
    found = explain(injection.put(standing(kind)))
    assert found.findings, found.summary
    assert found.findings[0].cause is injection.cause, found.findings
    assert found.status in (Status.BLOCKED, Status.HINDERED, Status.WAITING)


@given(st.sampled_from(GroupType), st.integers(1, 8), st.integers(1, 4), st.integers(1, 500), st.data())
def test_a_group_that_goes_on_is_never_accused(
    kind: GroupType, partitions: int, members: int, done: int, data: st.DataObject
) -> None:
    """Whatever its lag, and what else is normal: leases, an attempt that failed, records that wait in order."""
    facts = healthy(
        kind, partitions=partitions, members=members, done=done, lag=data.draw(st.integers(0, 900))
    )
    if kind is GroupType.SHARE:
        ordinary = {
            "retried": data.draw(st.sampled_from([None, RetriedFacts(3, 2, 100)])),
            "held": data.draw(st.sampled_from([None, HeldFacts(3, 4, 9)])),
            "order": data.draw(st.sampled_from(ShareOrder)),
            "has_available": data.draw(st.booleans()),
            "in_backoff": data.draw(st.integers(0, 3)),
        }
        facts = replace(facts, partitions=tuple(share_of(each, **ordinary) for each in facts.partitions))
    found = explain(facts)
    assert found.findings == (), found.summary
    assert found.status is Status.PROGRESSING


@given(st.sampled_from(GroupType), st.integers(1, 8))
def test_a_group_that_has_done_everything_is_caught_up(kind: GroupType, partitions: int) -> None:
    found = explain(standing(kind, partitions=partitions, lag=0))
    assert (found.status, found.findings, found.lag) == (Status.CAUGHT_UP, (), 0)


def test_without_a_sample_nothing_is_blocked_because_it_merely_waits() -> None:
    """`has_stopped` needs a sample: leases, order and limits are normal at any moment."""
    for injection, kind in CASES:
        if injection.cause in (Cause.LOCKS_TAKEN, Cause.KEY_IN_FLIGHT, Cause.KEY_LIMIT, Cause.BACKOFF):
            found = explain(replace(injection.put(standing(kind)), sample_ms=0))
            assert found.findings == (), found.summary


# -- any facts

NUMBERS: Final = st.integers(-1, 2_000)
COUNTS: Final = st.integers(0, 2_000)
NAMES: Final = st.sampled_from(["a", "b c", "quote'd", "x" * 40])
PLACES: Final = st.builds(Place, NAMES, st.integers(0, 5))
LOGS: Final = st.builds(
    LogFacts,
    COUNTS,
    COUNTS,
    COUNTS,
    NUMBERS,
    NUMBERS,
    COUNTS,
    st.none() | st.builds(OpenTransactionFacts, COUNTS, COUNTS, st.integers(0, 100_000)),
    COUNTS,
    NUMBERS,
    COUNTS,
    st.lists(NAMES, max_size=2).map(tuple),
    st.booleans(),
)
SHARES: Final = st.builds(
    ShareFacts,
    *(COUNTS for _ in range(6)),
    st.booleans(),
    COUNTS,
    st.integers(-1, 100_000),
    COUNTS,
    COUNTS,
    COUNTS,
    st.sampled_from(ShareOrder),
    st.booleans(),
    st.lists(st.builds(HolderFacts, NAMES, COUNTS, st.integers(0, 100_000)), max_size=3).map(tuple),
    st.none() | st.builds(RetriedFacts, COUNTS, COUNTS, COUNTS),
    st.none()
    | st.builds(HeldFacts, COUNTS, COUNTS, COUNTS, st.none() | st.binary(max_size=9), st.booleans()),
    COUNTS,
    COUNTS,
    st.sampled_from(["", "the topic is full"]),
)
PARTITIONS: Final = st.builds(
    PartitionFacts,
    PLACES,
    st.integers(-1, 3),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.sampled_from(["", "no answer"]),
    NUMBERS,
    st.integers(-1, 100_000),
    COUNTS,
    st.none() | LOGS,
    st.none() | SHARES,
)
REFUSALS: Final = st.builds(
    RefusalFacts,
    NAMES,
    NAMES,
    st.just("READ"),
    st.sampled_from(["group", "topic"]),
    NAMES,
    COUNTS,
    COUNTS,
    st.just("mansio acl add User:eve --operation READ --group g"),
)
FACTS: Final = st.builds(
    GroupFacts,
    st.sampled_from(["g", "a group"]),
    st.sampled_from(GroupType),
    st.sampled_from(["Stable", "Empty", "PreparingRebalance", "Reconciling", "Dead"]),
    st.lists(
        st.builds(
            MemberFacts,
            NAMES,
            NAMES,
            NAMES,
            st.lists(PLACES, max_size=4).map(tuple),
            st.integers(-1, 100_000),
            st.integers(0, 60_000),
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    st.lists(PARTITIONS, max_size=6, unique_by=lambda each: each.place).map(tuple),
    st.lists(st.builds(TransactionFacts, NAMES, COUNTS, COUNTS), max_size=2).map(tuple),
    st.lists(
        st.builds(ThrottleFacts, NAMES, NAMES, COUNTS, st.integers(1, 900), st.just("--client c")), max_size=2
    ).map(tuple),
    st.lists(REFUSALS, max_size=2).map(tuple),
    st.integers(-1, 100_000),
    st.integers(0, 10),
    NUMBERS,
    st.sampled_from([0, SAMPLE_MS]),
    st.sampled_from([(), (2,)]),
)

COMMANDS: Final = typer.main.get_command(app)


def check_command(text: str) -> None:
    """Parse a command as the shell and `mansio` do: it exists, with these options and arguments."""
    import shlex

    words = shlex.split(text)
    assert words[0] == "mansio"
    command: Any = COMMANDS
    words, context = words[1:], None
    while hasattr(command, "commands"):
        assert words[0] in command.commands, text
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context("mansio", words)
    context.close()


@given(FACTS)
def test_any_facts_give_ordered_findings_with_commands_that_exist(facts: GroupFacts) -> None:
    found = explain(facts)
    assert list(found.findings) == order(list(found.findings))
    assert len(found.findings) <= FINDINGS_MAX
    assert found.lag >= 0
    assert "\n" not in found.summary
    for each in found.findings:
        assert each.text
        assert each.advice
        check_command(each.command)
        assert each.records >= UNKNOWN
    impacts = {each.impact for each in found.findings}
    if found.status is Status.BLOCKED:
        assert Impact.BLOCKS in impacts
        assert found.done <= 0
    if found.status in (Status.PROGRESSING, Status.CAUGHT_UP, Status.UNEXPLAINED):
        assert impacts <= {Impact.WAITS}


@given(FACTS, st.sets(NAMES))
def test_findings_about_hidden_topics_are_left_out(facts: GroupFacts, hidden: set[str]) -> None:
    everything, found = explain(facts), explain(facts, hidden_topics=frozenset(hidden))
    assert all(each.topic not in hidden for each in found.findings)
    assert found.hidden_topics == len({each.place.topic for each in facts.partitions} & hidden)
    assert (found.status, found.lag, found.done) == (everything.status, everything.lag, everything.done)


def test_the_guide_has_each_cause_in_the_order_of_the_answers() -> None:
    lines = (ROOT / "docs/how-to/why-a-group-waits.md").read_text().splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert named == [*Status, *Cause]
