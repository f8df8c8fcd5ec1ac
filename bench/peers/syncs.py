"""Fsyncs per acknowledgement, counted: durability is compared as measured, not as configured.

Each server is started once more under strace, which stops only at fsync and similar calls, for a few short runs; the
calls that started during a run are divided by the acknowledgements in it. Without strace the configuration is trusted,
which the table mentions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.peers.peer import Candidate
    from bench.peers.workloads import Run

SYNCED_FROM = 0.9
"""Fsyncs per acknowledgement from which acknowledgements count as individually synced."""
COUNTED_WORKLOADS = ("seq", "batch100", "consume100", "deliver1", "deliver100")
COUNTED_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Syncs:
    """Fsyncs per single acknowledged message, per batch of 100 published, per 100 consumed, per single delivered
    record, per 100 delivered. None: not counted."""

    seq: float | None = None
    batch100: float | None = None
    consume100: float | None = None
    deliver1: float | None = None
    deliver100: float | None = None


def syncs_per_unit(times: list[float], run: Run, batch: int) -> float | None:
    """Number of these fsyncs that started during the run, per batch acknowledged in it."""
    during = sum(1 for moment in times if run.began <= moment <= run.ended)
    return round(during * batch / run.messages, 2) if run.messages else None


def sync_times(trace: Path) -> list[float]:
    """Start of each successful fsync in an strace output, in seconds since the epoch."""
    times = []
    for line in trace.read_text(errors="replace").splitlines():
        words = line.split(
            maxsplit=2
        )  # process, time, call; "<... fsync resumed>" is the end of a call that is already counted
        if (
            len(words) == 3
            and "(" in words[2]
            and not words[2].startswith(("<", "+", "-"))
            and " = -1 " not in line
        ):
            times.append(float(words[1]))
    return times


def is_synced(candidate: Candidate, syncs: Syncs | None) -> bool:
    """Whether every acknowledged message, and batch, had its own fsync."""
    if syncs is None:
        return candidate.is_synced
    return all(count is not None and count >= SYNCED_FROM for count in (syncs.seq, syncs.batch100))


def is_synced_consuming(syncs: Syncs | None) -> bool:
    """Whether an fsync was counted for every acknowledged batch that was consumed."""
    return syncs is not None and syncs.consume100 is not None and syncs.consume100 >= SYNCED_FROM


def is_synced_delivering(candidate: Candidate, syncs: Syncs | None) -> bool:
    """Whether every single acknowledged record had an fsync before the next was delivered. Batches may share one,
    because their acknowledgements are in flight together."""
    if syncs is None:
        return candidate.is_synced
    return syncs.deliver1 is not None and syncs.deliver1 >= SYNCED_FROM
