"""The tables and drawings of docs/DELIVERY.md that are made from the code: record states, and settings of share groups.

Always true: every step of `TRANSITIONS` is drawn with its reason, and nothing else is; a step without a reason here, or
a reason for a step that is not in the table, is an error.
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
    AVAILABLE: ("AVAILABLE", "to be had; while it rests after a try (parked), when its rest is over"),
    ACQUIRED: ("ACQUIRED", "leased to one member"),
    ACKNOWLEDGED: ("ACKNOWLEDGED", "done"),
    ARCHIVING: ("ARCHIVING", "given up; its copy is on its way to the dead-letter topic"),
    ARCHIVED: ("ARCHIVED", "given up, and its copy is there; or skipped, or gone from the log"),
    WITHHELD: (
        "WITHHELD",
        "after a loss: perhaps in somebody's hands, so nobody gets it while that may be",
    ),
}
"""Name and meaning, in the order of Kafka's numbers; the last one is ours, and is never stored."""

BEGINNINGS = {AVAILABLE: "written", WITHHELD: "nobody knows, after a loss"}

_AGED = "retention takes it from the log"

REASONS = {
    (AVAILABLE, ACQUIRED): "a member fetches it",
    (AVAILABLE, ARCHIVED): _AGED,
    (ACQUIRED, ACQUIRED): "renew",
    (ACQUIRED, ACKNOWLEDGED): "accept",
    (ACQUIRED, AVAILABLE): "release, or the lease ends",
    (ACQUIRED, ARCHIVING): "reject, or tried too often",
    (ACQUIRED, ARCHIVED): f"the same without a dead-letter topic; no record is there (compaction); {_AGED}",
    (ARCHIVING, ARCHIVING): "its place in the topic is reserved",
    (ARCHIVING, ARCHIVED): "the copy is there",
    (ARCHIVED, AVAILABLE): "redrive",
    (WITHHELD, AVAILABLE): "one lease has passed; release",
    (WITHHELD, ACKNOWLEDGED): "accept",
    (WITHHELD, ARCHIVING): "reject",
    (WITHHELD, ARCHIVED): f"the same without a dead-letter topic; {_AGED}",
}
"""Why a record goes from one state to another."""


def record_states() -> str:
    """The states and the steps between them: a drawing, and what each means."""
    steps = [
        (state, after) for state in STATES for after in sorted(TRANSITIONS[state], key=list(STATES).index)
    ]
    if set(steps) != set(REASONS) or TRANSITIONS.keys() != STATES.keys():
        odd = set(steps) ^ set(REASONS)
        raise ValueError(f"tools/share_states.py does not say what TRANSITIONS says: {sorted(odd)}")
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {STATES[state][0]}: {reason}" for state, reason in BEGINNINGS.items()]
    lines += [_arrow(*step) for step in steps]
    lines += ["```", "", "| state | a record in it is | then | when |", "|---|---|---|---|"]
    for state, group in groupby(steps, key=lambda step: step[0]):
        name, meaning = STATES[state]
        for number, (_, after) in enumerate(group):
            front = f"| {name} | {meaning} " if number == 0 else "| | "
            lines.append(f"{front}| {STATES[after][0]} | {REASONS[state, after]} |")
    lines += [
        f"| {name} | {meaning} | | for ever |"
        for state, (name, meaning) in STATES.items()
        if not TRANSITIONS[state]
    ]
    return "\n".join(lines)


def _arrow(state: int, after: int) -> str:
    reason = REASONS[state, after].replace(";", " /")  # which would end the statement
    return f"    {STATES[state][0]} --> {STATES[after][0]}: {reason}"


def group_settings() -> str:
    """Every setting that a share group can have of its own."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for row in share_group_config.KEYS:
        default = f"`{row.default}`" if row.default else "none"
        if row.broker_setting:
            default += f" (`{row.broker_setting}`)"
        meaning = row.meaning.replace("<", "&lt;")  # Markdown is HTML, too
        lines.append(f"| `{row.name}` | {default} | {meaning} |")
    return "\n".join(lines)
