"""Results table: medians and spreads, the ratio of Mansio to each peer, and whether it reaches the required ratio.

Ratios are taken per repetition, between runs that are seconds apart; their median and spread are shown.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.peers import releases
from bench.peers.syncs import Syncs, is_synced, is_synced_consuming, is_synced_delivering

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import date

    from bench.peers.peer import Candidate
    from bench.peers.workloads import Run, Workload

LOWER_IS_BETTER = ("p50_us", "p99_us")


@dataclass(slots=True)
class Entry:
    """Results of one candidate. `runs`: by workload and value size, in order; None for a failed run."""

    candidate: Candidate
    version: str = ""
    released: date | None = None
    not_run: str = ""
    syncs: Syncs | None = None
    runs: dict[tuple[str, int], list[Run | None]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def is_synced(self) -> bool:
        return is_synced(self.candidate, self.syncs)

    def is_equal(self, workload: Workload) -> bool:
        """Whether acknowledged messages and acknowledgements are on the disk by then."""
        return is_synced_delivering(self.candidate, self.syncs) if workload.consumers else self.is_synced

    def claims_sync(self, workload: Workload) -> bool:
        """Whether what confirms a batch of this workload says that it is on the disk."""
        if workload.name == "consume100":
            return is_synced_consuming(self.syncs)
        return self.is_equal(workload)

    def figures(self, workload: str, size: int, figure: str) -> list[float | None]:
        runs = self.runs.get((workload, size), [])
        return [None if run is None else getattr(run, figure) for run in runs]

    def median(self, workload: str, size: int, figure: str) -> float | None:
        known = [one for one in self.figures(workload, size, figure) if one is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class Lead:
    """Ratios of Mansio to one peer in one figure, per repetition; below 1 Mansio is slower."""

    ours: Entry
    theirs: Entry
    figure: str
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


def ahead(ours: Entry, theirs: Entry, workload: str, size: int, figure: str) -> Lead | None:
    """The ratios of one entry to another over their common repetitions; None without any."""
    pairs = zip(ours.figures(workload, size, figure), theirs.figures(workload, size, figure), strict=False)
    ratios = [
        (their / our if figure in LOWER_IS_BETTER else our / their) for our, their in pairs if our and their
    ]
    return Lead(ours, theirs, figure, tuple(ratios)) if ratios else None


def yardstick(entries: Iterable[Entry], workload: str, size: int, figure: str) -> Entry | None:
    """Mansio with its better client for this figure; a peer has one client, its best."""
    known = [
        (median, entry)
        for entry in entries
        if entry.candidate.is_mansio
        and not entry.candidate.is_raw
        and (median := entry.median(workload, size, figure)) is not None
    ]
    if not known:
        return None
    best = min if figure in LOWER_IS_BETTER else max
    return best(known, key=lambda one: one[0])[1]


def leads(entries: list[Entry], workload: Workload, size: int, figure: str) -> list[Lead]:
    """Ratios of Mansio to every measured peer."""
    ours = yardstick(entries, workload.name, size, figure)
    if ours is None:
        return []
    others = [entry for entry in entries if not entry.candidate.is_mansio]
    found = [ahead(ours, theirs, workload.name, size, figure) for theirs in others]
    return [lead for lead in found if lead is not None]


def closest(entries: list[Entry], workload: Workload, size: int, figure: str) -> Lead | None:
    """The ratio to the best peer whose acknowledgements are synced like Mansio's."""
    equal = [
        lead
        for lead in leads(entries, workload, size, figure)
        if lead.theirs.is_equal(workload)
        and lead.theirs.candidate.name.startswith(workload.lead_required_over)
    ]
    return min(equal, key=lambda lead: lead.median, default=None)


def missed(entries: list[Entry], workloads: Iterable[Workload], sizes: Iterable[int]) -> list[Lead]:
    """Ratios to peers of equal durability that are below the required ones."""
    found = []
    for workload in workloads:
        for size in sizes:
            for figure in workload.figures:
                lead = closest(entries, workload, size, figure)
                if lead is not None and workload.lead_min is not None and lead.median < workload.lead_min:
                    found.append(lead)
    return found


# -- for people --------


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{number(statistics.median(values))}\n[dim]{number(min(values))}-{number(max(values))}[/dim]"


def size_table(entries: list[Entry], workloads: list[Workload], size: int) -> Table:
    """One row per contestant: those whose acknowledgements are synced first, then the weaker ones. The workloads are
    all of publishing and consuming, or all of delivering."""
    is_delivery = bool(workloads[0].consumers)
    what = "records delivered and acknowledged/s" if is_delivery else "messages/s, latency in us"
    cost = "; processor time of server + clients for each, us" if is_delivery else ""
    shown = Table(
        title=f"{size} B values: {what}; median, lowest-highest, how many times Mansio is ahead{cost}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    shown.add_column("", min_width=16)
    shown.add_column("fsyncs\nper ack", justify="right")
    columns = [(workload, figure) for workload in workloads for figure in workload.figures]
    for workload, figure in columns:
        title = f"deliver\n{figure.removesuffix('_us')}" if workload.name == "latency" else workload.title
        shown.add_column(title, justify="right")
    names = {workload.name for workload in workloads}
    measured = [entry for entry in entries if any(key[1] == size and key[0] in names for key in entry.runs)]
    found = {
        (figure, lead.theirs.candidate.name, workload.name): lead
        for workload, figure in columns
        for lead in leads(entries, workload, size, figure)
    }
    for is_equal in (True, False):
        group = [entry for entry in measured if entry.is_equal(workloads[0]) == is_equal]
        if group and not is_equal:
            shown.add_section()
            shown.add_row("[bold]weaker: no fsync before the acknowledgement[/bold]")
        for entry in group:
            name = entry.candidate.name
            cells = [
                _cell(entry, workload, size, figure, found.get((figure, name, workload.name)))
                for workload, figure in columns
            ]
            shown.add_row(entry.candidate.title, _syncs(entry, is_delivery=is_delivery), *cells)
    return shown


def _cell(entry: Entry, workload: Workload, size: int, figure: str, lead: Lead | None) -> str:
    runs = entry.runs.get((workload.name, size))
    if runs is None:
        return "-"
    values = [value for value in entry.figures(workload.name, size, figure) if value is not None]
    if not values:
        return "failed"
    mark = "~" if any(run is not None and run.is_disturbed for run in runs) else ""
    shown = mark + spread(values) + (f"\n[bold]{number(lead.median)}x[/bold]" if lead is not None else "")
    if workload.consumers:
        costs = [entry.median(workload.name, size, name) for name in ("server_us", "client_us")]
        shown += "\n[dim]" + " + ".join(number(cost or 0) for cost in costs) + " us[/dim]"
    return shown


def _syncs(entry: Entry, *, is_delivery: bool) -> str:
    syncs = entry.syncs
    if syncs is None:
        return "[dim]not\ncounted[/dim]"
    counts = (
        (syncs.deliver1, syncs.deliver100) if is_delivery else (syncs.seq, syncs.batch100, syncs.consume100)
    )
    return "\n".join("-" if count is None else f"{count:.2f}" for count in counts)


def required_table(entries: list[Entry], workloads: list[Workload], sizes: Iterable[int]) -> Table:
    """The required ratios of Mansio to the best peer of equal durability."""
    shown = Table(
        title="Mansio's lead over the best peer of equal durability", title_justify="left", box=SIMPLE_HEAD
    )
    for column in ("workload", "best equal peer", "Mansio over", "lead", "asked"):
        shown.add_column(column, justify="right" if column in ("lead", "asked") else "left")
    for size in sizes:
        for workload in workloads:
            for figure in workload.figures:
                lead = closest(entries, workload, size, figure)
                if lead is None:
                    continue
                asked = workload.lead_min
                colour = "default" if asked is None else "green" if lead.median >= asked else "red"
                what = f"{workload.title}, {size} B" + (
                    f", {figure[:3]}" if len(workload.figures) > 1 else ""
                )
                shown.add_row(
                    what,
                    lead.theirs.candidate.title,
                    lead.ours.candidate.title.removeprefix("Mansio, "),
                    f"[{colour}]{spread(lead.ratios)}[/]".replace("\n", " "),
                    "" if asked is None else f">= {asked:.2f}",
                )
    return shown


def servers_table(entries: list[Entry], today: date) -> Table:
    """What was measured: versions of server and client, the server's age, and what its answers mean."""
    shown = Table(title="What was measured", title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "server, client", "released", "acknowledged when", "delivery of one confirmed by"):
        shown.add_column(column)
    for entry in entries:
        if not entry.not_run:
            candidate = entry.candidate
            released = "this version" if candidate.is_mansio else releases.age(entry.released, today)
            shown.add_row(
                candidate.title, entry.version, released, candidate.durability, candidate.confirmation
            )
    return shown
