"""Report of the runs: medians, spreads and ratios, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.interpreter import interpreter
from bench.share_size import ALL_SIZE_CASES as SIZE_CASES
from mansio.version import __version__

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from bench.cases import Case


@dataclass(slots=True)
class Outcome:
    """The runs of one case: Mansio's and its reference's, pair by pair (results of `bench.load`)."""

    case: Case
    mansio: list[dict[str, Any]] = field(default_factory=list)
    reference: list[dict[str, Any]] = field(default_factory=list)

    def figures(self, side: str) -> list[float]:
        return [run[self.case.figure] for run in getattr(self, side)]

    def ratios(self) -> list[float]:
        """Ratio of Mansio to its reference, per pair."""
        pairs = zip(self.figures("mansio"), self.figures("reference"), strict=False)
        return [ours / theirs if theirs else 0.0 for ours, theirs in pairs]

    def missed(self) -> bool:
        ratios = self.ratios()
        return bool(ratios and self.case.ratio_min and statistics.median(ratios) < self.case.ratio_min)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{_number(statistics.median(values))}\n[dim]{_number(min(values))}-{_number(max(values))}[/dim]"


def table(outcomes: list[Outcome], extras: dict[str, Any]) -> Table:
    title = f"Mansio {__version__} against the baseline: median, minimum - maximum; requests/s unless noted"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("case", no_wrap=True)
    for column in ("baseline", "Mansio", "ratio", "required", "p50\np99, us", "load\ncpu"):
        shown.add_column(column, justify="right", overflow="fold")
    for outcome in outcomes:
        case, ratios = outcome.case, outcome.ratios()
        colour = "red" if outcome.missed() else "green" if case.ratio_min and ratios else "default"
        last = [statistics.median(run[name] for run in outcome.mansio) for name in ("p50_us", "p99_us")]
        shown.add_row(
            case.title if case.unit == "requests/s" else f"{case.title}\n[dim]{case.unit}[/dim]",
            _spread(outcome.figures("reference")),
            _spread(outcome.figures("mansio")),
            f"[{colour}]{_spread(ratios)}[/]",
            f">= {case.ratio_min}" if case.ratio_min else "",
            f"{_number(last[0])}\n{_number(last[1])}",
            f"{max(run['load_cpu'] for run in outcome.mansio + outcome.reference):.2f}",
        )
    if "memory" in extras:
        shown.add_row("idle memory, MB", "", str(extras["memory"]), "", "<= 100", "", "")
    if "embedded-start" in extras:
        shown.add_row("embedded start, ms", "", _spread(extras["embedded-start"]), "", "< 200", "", "")
    return shown


def size_table(sizes: dict[str, list[float]]) -> Table:
    """The cases of `bench.size`: median, minimum, maximum and limit of each."""
    shown = Table(title=f"Mansio {__version__}: size", title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("case", no_wrap=True)
    for column in ("median", "minimum - maximum", "unit", "limit"):
        shown.add_column(column, justify="right")
    for case in SIZE_CASES:
        if case.name in sizes:
            figures = sizes[case.name]
            colour = "red" if case.missed(figures) else "green"
            median, spread = (
                _number(statistics.median(figures)),
                f"{_number(min(figures))} - {_number(max(figures))}",
            )
            shown.add_row(case.title, f"[{colour}]{median}[/]", spread, case.unit, f"<= {case.limit:g}")
    return shown


def save(path: Path, options: argparse.Namespace, outcomes: list[Outcome], extras: dict[str, Any]) -> None:
    machine = {
        "processors": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": interpreter(),
    }
    content = {
        "mansio": __version__,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "pairs": options.pairs,
        "seconds": options.seconds,
        "cases": [{**asdict(one), "ratios": one.ratios(), "missed": one.missed()} for one in outcomes],
        **extras,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
