"""Generated tables and diagrams of docs/reference/delivery.md: states of records, and settings of share groups.

Invariant: the diagram has exactly the transitions of `TRANSITIONS`, each with its reason. A transition without a reason
here, or a reason for a transition that is not in the table, is an error.
"""

from __future__ import annotations

from itertools import groupby

from mansio.config import share_group_config
from mansio.state.share_partition.in_flight import TRANSITIONS
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    WITHHELD,
)

STATES = {
    AVAILABLE: (
        "AVAILABLE",
        "available to members; a record in backoff becomes available when the backoff ends",
    ),
    ACQUIRED: ("ACQUIRED", "acquired: leased to one member"),
    ACKNOWLEDGED: ("ACKNOWLEDGED", "accepted; terminal"),
    ARCHIVING: ("ARCHIVING", "dead-lettered; the copy in the dead-letter topic is not committed yet"),
    ARCHIVED: (
        "ARCHIVED",
        "dead-lettered and the copy is committed; or dropped, absent or deleted from the log",
    ),
    WITHHELD: (
        "WITHHELD",
        "possibly leased before a loss of state; delivered to no member until such a lease has ended",
    ),
}
"""Name and meaning, in the order of Kafka's numbers. The last state is an extension and is never stored."""

INITIAL = {AVAILABLE: "record is appended", WITHHELD: "possibly leased before a loss"}

_DELETED = "retention deletes it from the log"

REASONS = {
    (AVAILABLE, ACQUIRED): "a member fetches it",
    (AVAILABLE, ACKNOWLEDGED): "it has another priority and is passed",
    (AVAILABLE, ARCHIVED): _DELETED,
    (ACQUIRED, ACQUIRED): "renew",
    (ACQUIRED, ACKNOWLEDGED): "accept",
    (ACQUIRED, AVAILABLE): "release, or the lease expires",
    (ACQUIRED, ARCHIVING): "reject, or attempts used up",
    (
        ACQUIRED,
        ARCHIVED,
    ): f"the same without a dead-letter topic; the offset has no record (compaction); {_DELETED}",
    (ARCHIVING, ARCHIVING): "the copy's producer, epoch and sequence are reserved",
    (ARCHIVING, ARCHIVED): "the copy is committed",
    (ARCHIVED, AVAILABLE): "redrive",
    (WITHHELD, AVAILABLE): "one lease duration has passed; release",
    (WITHHELD, ACKNOWLEDGED): "accept",
    (WITHHELD, ARCHIVING): "reject",
    (WITHHELD, ARCHIVED): f"the same without a dead-letter topic; {_DELETED}",
}
"""Cause of each transition."""


def record_states() -> str:
    """State diagram, and a table of the states with their meaning and transitions."""
    transitions = [
        (state, after) for state in STATES for after in sorted(TRANSITIONS[state], key=list(STATES).index)
    ]
    if set(transitions) != set(REASONS) or TRANSITIONS.keys() != STATES.keys():
        different = set(transitions) ^ set(REASONS)
        raise ValueError(f"tools/share_states.py differs from TRANSITIONS: {sorted(different)}")
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {STATES[state][0]}: {reason}" for state, reason in INITIAL.items()]
    lines += [_arrow(*one) for one in transitions]
    lines += ["```", "", "| state | meaning | next state | cause |", "|---|---|---|---|"]
    for state, group in groupby(transitions, key=lambda one: one[0]):
        name, meaning = STATES[state]
        for number, (_, after) in enumerate(group):
            front = f"| {name} | {meaning} " if number == 0 else "| | "
            lines.append(f"{front}| {STATES[after][0]} | {REASONS[state, after]} |")
    lines += [
        f"| {name} | {meaning} | | |" for state, (name, meaning) in STATES.items() if not TRANSITIONS[state]
    ]
    return "\n".join(lines)


def _arrow(state: int, after: int) -> str:
    reason = REASONS[state, after].replace(";", " /")  # which would end the statement
    return f"    {STATES[state][0]} --> {STATES[after][0]}: {reason}"


def group_settings() -> str:
    """Table of the settings of a share group."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for row in share_group_config.SHARE_CONFIG_KEYS:
        default = f"`{row.default}`" if row.default else "none"
        if row.broker_setting:
            default += f" (`{row.broker_setting}`)"
        meaning = row.meaning.replace("<", "&lt;")  # Markdown is HTML, too
        lines.append(f"| `{row.name}` | {default} | {meaning} |")
    return "\n".join(lines)
