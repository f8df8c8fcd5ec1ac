"""Generated tables and diagrams of docs/reference/delivery.md: states of records, and settings of share groups.

Invariant: the table has exactly the transitions of `TRANSITIONS`, each with its reason. A transition without a reason
here, or a reason for a transition that is not in the table, is an error. The diagram has the most frequent ones.
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


DIAGRAM = "share-states.svg"
"""Name of the diagram, beside the page."""

WIDTH, HEIGHT = 150, 40

PLACES = {
    WITHHELD: (20, 20),
    AVAILABLE: (20, 120),
    ACQUIRED: (360, 120),
    ACKNOWLEDGED: (360, 20),
    ARCHIVING: (360, 220),
    ARCHIVED: (20, 220),
}
"""Left upper corner of each box."""

ARROWS = (
    (WITHHELD, AVAILABLE, "one lease duration has passed", 0),
    (AVAILABLE, ACQUIRED, "a member fetches it", -10),
    (ACQUIRED, AVAILABLE, "release, lease expires", 12),
    (ACQUIRED, ACKNOWLEDGED, "accept", 0),
    (ACQUIRED, ARCHIVING, "reject, attempts used up", 0),
    (ARCHIVING, ARCHIVED, "dead letter is committed", 0),
    (ARCHIVED, AVAILABLE, "redrive", 0),
)
"""State, next state, label, and by how many pixels the arrow is moved aside."""

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 280" width="700" height="280" role="img">
<title>States of a record in a share group</title>
<style>
rect { fill: #fff; stroke: #334; stroke-width: 1.5 }
line { stroke: #334; stroke-width: 1.5 }
text { font: 14px sans-serif; fill: #112 }
.label { font-size: 12px; fill: #334 }
</style>
<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 10 5 0 10z" fill="#334"/></marker></defs>
<rect x="0" y="0" width="700" height="280" style="stroke: none"/>
PARTS
</svg>
"""


def record_states() -> str:
    """State diagram, and a table of the states with their meaning and transitions."""
    transitions = [
        (state, after) for state in STATES for after in sorted(TRANSITIONS[state], key=list(STATES).index)
    ]
    if set(transitions) != set(REASONS) or TRANSITIONS.keys() != STATES.keys():
        different = set(transitions) ^ set(REASONS)
        raise ValueError(f"tools/share_states.py differs from TRANSITIONS: {sorted(different)}")
    lines = [f"![The most frequent transitions; the table has all]({DIAGRAM})", ""]
    lines += [f"A record begins as {_initial()}.", ""]
    lines += ["| state | meaning | next state | cause |", "|---|---|---|---|"]
    for state, group in groupby(transitions, key=lambda one: one[0]):
        name, meaning = STATES[state]
        for number, (_, after) in enumerate(group):
            front = f"| {name} | {meaning} " if number == 0 else "| | "
            lines.append(f"{front}| {STATES[after][0]} | {REASONS[state, after]} |")
    lines += [
        f"| {name} | {meaning} | | |" for state, (name, meaning) in STATES.items() if not TRANSITIONS[state]
    ]
    return "\n".join(lines)


def _initial() -> str:
    return " or ".join(f"{STATES[state][0]} ({reason})" for state, reason in INITIAL.items())


def diagram() -> str:
    """The most frequent transitions, as SVG with a background of its own, for light and dark pages."""
    if not {arrow[:2] for arrow in ARROWS} <= REASONS.keys():
        raise ValueError("tools/share_states.py draws a transition that does not exist")
    parts = []
    for state, after, label, bend in ARROWS:
        (x1, y1), (x2, y2) = _edge(state, after, bend), _edge(after, state, bend)
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#end)"/>')
        anchor = "middle" if y1 == y2 else "start"
        x, y = (x1 + x2) // 2 + (0 if y1 == y2 else 8), (y1 + y2) // 2 + (-6 if y1 == y2 else 4)
        parts.append(f'<text class="label" x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>')
    for state, (x, y) in PLACES.items():
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        parts.append(
            f'<text x="{x + WIDTH // 2}" y="{y + 25}" text-anchor="middle">{STATES[state][0]}</text>'
        )
    return SVG.replace("PARTS", "\n".join(parts))


def _edge(state: int, other: int, bend: int) -> tuple[int, int]:
    """Where the arrow between two boxes in one row or column touches the first of them."""
    (x, y), (other_x, other_y) = PLACES[state], PLACES[other]
    if y == other_y:
        return (x + WIDTH if x < other_x else x), y + HEIGHT // 2 + bend
    return x + WIDTH // 2 + bend, (y + HEIGHT if y < other_y else y)


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
