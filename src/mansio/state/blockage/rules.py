"""Rules: each finds one cause that keeps a group from going on.

A rule returns what it finds and may rely on what earlier ones have found: a partition that has no leader has no slow
handler. They are called in the order of `RULES`, from the origin to the consequence.

Invariants:
* A group that goes on is not accused: a rule about records that are merely waiting asks whether any were done in the
  same partition during the sample.
* What takes time is judged after a time that a healthy group does not need, a constant here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.blockage import member_rules, record_rules, speed_rules
from mansio.state.blockage.case import Case
from mansio.state.blockage.findings import conclude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.state.blockage.facts import GroupFacts
    from mansio.state.blockage.findings import Explanation, Finding

RULES: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    member_rules.denied,
    member_rules.no_leader,
    member_rules.no_answer,
    member_rules.no_member,
    member_rules.rebalance,
    member_rules.stopped_member,
    record_rules.dead_letters_wait,
    record_rules.open_transaction,
    record_rules.poison,
    member_rules.quota,
    record_rules.locks_taken,
    record_rules.key_in_flight,
    record_rules.key_limit,
    speed_rules.hot_partition,
    speed_rules.slow_handler,
    record_rules.backoff,
    record_rules.nothing_published,
)
"""The rules, from origins to consequences."""


def explain(facts: GroupFacts, *, hidden_topics: frozenset[str] = frozenset()) -> Explanation:
    """Return what keeps a group from going on. `hidden_topics`: topics that the caller may not know, by the names that
    the facts have instead; findings about them are left out."""
    case = Case(facts, hidden_topics)
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule(case)
    return conclude(facts, findings, hidden_topics=hidden_topics)
