"""How many fsyncs stand behind an acknowledgement, counted: what a configuration promises is not what is compared.

Each server is started once more under strace, which stops it at nothing but fsync and its kin, and three short runs
are made; the calls that began during a run are divided by what was acknowledged in it. Without strace the
configuration is believed, and the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.peers.peer import Contestant
    from bench.peers.workloads import Run

SYNCED_FROM = 0.9
"""Fsyncs per acknowledgement from which each one is said to wait for its own."""
COUNTED_WORKLOADS = ("seq", "batch100", "consume100")
COUNTED_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Syncs:
    """Fsyncs per message acknowledged alone, per batch of 100 published, per 100 taken. None: not counted."""

    seq: float | None = None
    batch100: float | None = None
    consume100: float | None = None


def syncs_per_unit(times: list[float], run: Run, batch: int) -> float | None:
    """Of the fsyncs at these times, how many came during the run, per batch acknowledged in it."""
    during = sum(1 for moment in times if run.began <= moment <= run.ended)
    return round(during * batch / run.messages, 2) if run.messages else None


def sync_times(trace: Path) -> list[float]:
    """When each fsync in an strace output began, in seconds since the epoch; calls that failed count for nothing."""
    times = []
    for line in trace.read_text(errors="replace").splitlines():
        words = line.split(
            maxsplit=2
        )  # process, time, call; "<... fsync resumed>" is the end of one counted already
        if (
            len(words) == 3
            and "(" in words[2]
            and not words[2].startswith(("<", "+", "-"))
            and " = -1 " not in line
        ):
            times.append(float(words[1]))
    return times


def is_synced(contestant: Contestant, syncs: Syncs | None) -> bool:
    """Whether every acknowledged message, and batch, had an fsync of its own."""
    if syncs is None:
        return contestant.is_synced
    return all(count is not None and count >= SYNCED_FROM for count in (syncs.seq, syncs.batch100))
