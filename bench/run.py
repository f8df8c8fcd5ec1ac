"""`make bench`: Mansio against a floor of the same machine, in turn, in pairs; medians with their spread.

Why ratios: the figures of a shared machine drift by a factor of two within minutes. A pair is measured
within seconds, the side that goes first alternates, and the ratio is taken per pair. Absolute figures are
shown beside it.

Owns: the order of measurements, the table, and the JSON under bench/results/. Always true: server and load
are processes of their own, pinned to two different processors where there are two, both kinds of server to
the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.cases import CASES, FILL, Case, Side
from bench.servers import Server, embedded_start_ms, start_floor, start_mansio, topic
from mansio.version import __version__

RESULTS = Path(__file__).parent / "results"
EXTRAS = ("memory", "embedded-start")
TOUCHED_TIMES = 6
"""How often the bytes of a run go through the page cache before anything is measured: memory that a virtual
machine uses for the first time costs ten times as much, and whoever came first would pay for it."""
LOAD_DEADLINE_S = 120


@dataclass(slots=True)
class Outcome:
    """The runs of one case: Mansio's and its reference's, pair by pair (results of `bench.load`)."""

    case: Case
    mansio: list[dict[str, Any]] = field(default_factory=list)
    reference: list[dict[str, Any]] = field(default_factory=list)

    def figures(self, side: str) -> list[float]:
        return [run[self.case.figure] for run in getattr(self, side)]

    def ratios(self) -> list[float]:
        return [
            ours / theirs
            for ours, theirs in zip(self.figures("mansio"), self.figures("reference"), strict=False)
        ]

    def missed(self) -> bool:
        ratios = self.ratios()
        return bool(ratios and self.case.ratio_min and statistics.median(ratios) < self.case.ratio_min)


class Bench:
    """Where the servers run, and how long each run lasts."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        processors = sorted(os.sched_getaffinity(0))
        pinned = len(processors) > 1 and not options.no_pin
        self.server_processor = processors[0] if pinned else None
        self.load_processor = processors[1] if pinned else None
        self.names = 0

    def data(self) -> Path:
        self.names += 1
        return self.directory / f"{self.names}"

    def load(self, server: Server, arguments: tuple[str, ...], **more: object) -> dict[str, Any]:
        """One run of `bench.load` against a server."""
        command = [sys.executable, "-m", "bench.load", *arguments, "--port", str(server.port)]
        for name, value in {"cpu": self.load_processor, **more}.items():
            command += [] if value is None else [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}\nserver: {server.text[-2000:]}")
        return dict(json.loads(done.stdout))

    def measure(self, case: Case, server: Server, partitions: int, name: str) -> dict[str, Any]:
        if case.filled:
            self.load(server, FILL, topic=name)
        seconds = self.options.seconds * (3 if case.load[0] == "deliver" else 1)
        limit = self.options.megabytes << 20
        return self.load(server, case.load, topic=name, partitions=partitions, seconds=seconds, bytes=limit)

    def on_floor(self, case: Case, side: Side) -> dict[str, Any]:
        server = start_floor(self.data(), self.server_processor, sync=side == "floor sync")
        try:
            return self.measure(case, server, case.partitions, "bench")
        finally:
            server.stop()

    def on_mansio(self, case: Case, server: Server, partitions: int) -> dict[str, Any]:
        self.names += 1
        name = f"bench-{self.names}"
        topic(server, "create", name, "--partitions", str(partitions))
        result = self.measure(case, server, partitions, name)
        topic(server, "delete", name)
        return result

    def run(self, case: Case, progress: Progress) -> Outcome:
        outcome = Outcome(case)
        task = progress.add_task(case.title, total=self.options.pairs)
        server = start_mansio(self.data(), self.server_processor)
        try:
            for number in range(self.options.pairs):
                turns = ["mansio", "reference"] if number % 2 else ["reference", "mansio"]
                for turn in turns:
                    if turn == "mansio":
                        outcome.mansio.append(self.on_mansio(case, server, case.partitions))
                    elif case.against == "mansio one partition":
                        outcome.reference.append(self.on_mansio(case, server, 1))
                    elif case.against is not None and not self.options.no_floor:
                        outcome.reference.append(self.on_floor(case, case.against))
                progress.advance(task)
        finally:
            server.stop()
        return outcome

    def idle_megabytes(self) -> float:
        server = start_mansio(self.data(), self.server_processor)
        try:
            return round(server.resident_bytes() / 1e6, 1)
        finally:
            server.stop()

    def embedded_ms(self) -> list[float]:
        return [round(embedded_start_ms(self.data()), 1) for _ in range(self.options.pairs)]

    def touch_memory(self) -> None:
        path = self.directory / "touched"
        block = bytes(1 << 20)
        with path.open("wb", buffering=0) as file:
            for _ in range(TOUCHED_TIMES * self.options.megabytes):
                file.write(block)
        path.unlink()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return (
        f"{_number(statistics.median(values))} [dim]({_number(min(values))} - {_number(max(values))})[/dim]"
    )


def table(outcomes: list[Outcome], extras: dict[str, Any]) -> Table:
    shown = Table(title=f"Mansio {__version__} against the floor: median (min - max)", title_justify="left")
    shown.add_column("case")
    for column in ("floor", "Mansio", "ratio", "asked", "p50 / p99 us", "load cpu"):
        shown.add_column(column, justify="right")
    for outcome in outcomes:
        case, ratios = outcome.case, outcome.ratios()
        colour = "red" if outcome.missed() else "green" if case.ratio_min and ratios else "default"
        last = [statistics.median(run[name] for run in outcome.mansio) for name in ("p50_us", "p99_us")]
        shown.add_row(
            f"{case.title}, {case.unit}",
            _spread(outcome.figures("reference")),
            _spread(outcome.figures("mansio")),
            f"[{colour}]{_spread(ratios)}[/]",
            f">= {case.ratio_min}" if case.ratio_min else "",
            f"{_number(last[0])} / {_number(last[1])}",
            f"{max(run['load_cpu'] for run in outcome.mansio + outcome.reference):.2f}",
        )
    if "memory" in extras:
        shown.add_row("idle memory, MB", "", str(extras["memory"]), "", "<= 100", "", "")
    if "embedded-start" in extras:
        shown.add_row("embedded start, ms", "", _spread(extras["embedded-start"]), "", "< 200", "", "")
    return shown


def save(path: Path, options: argparse.Namespace, outcomes: list[Outcome], extras: dict[str, Any]) -> None:
    machine = {
        "processors": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
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


def parse() -> argparse.Namespace:
    names = [case.name for case in CASES] + list(EXTRAS)
    parser = argparse.ArgumentParser(
        prog="bench.run", description="Measure Mansio against a floor of this machine."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--pairs", type=int, default=5, help="floor and Mansio, in turn, this often")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run")
    parser.add_argument("--megabytes", type=int, default=512, help="end a run after this many produced bytes")
    parser.add_argument("--data", help="directory for the servers' files; default: under bench/results")
    parser.add_argument("--json", type=Path, help="where the results go; default: bench/results/TIME.json")
    parser.add_argument("--no-floor", action="store_true", help="Mansio alone")
    parser.add_argument("--no-pin", action="store_true", help="leave the processors to the scheduler")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a ratio is below what is asked")
    options = parser.parse_args()
    unknown = set(options.cases) - set(names)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    options.cases = options.cases or names
    if options.list:
        for case in CASES:
            print(f"{case.name:16} {case.title}")
        print("\n".join(EXTRAS))
        sys.exit()
    return options


def main() -> None:
    options = parse()
    console = Console()
    RESULTS.mkdir(exist_ok=True)
    extras: dict[str, Any] = {}
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=options.data or RESULTS, prefix="data-") as directory,
        Progress(*columns, console=console) as progress,
    ):
        bench = Bench(options, Path(directory))
        bench.touch_memory()
        outcomes = [bench.run(case, progress) for case in CASES if case.name in options.cases]
        if "memory" in options.cases:
            extras["memory"] = bench.idle_megabytes()
        if "embedded-start" in options.cases:
            extras["embedded-start"] = bench.embedded_ms()
    path = options.json or RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    save(path, options, outcomes, extras)
    console.print(table(outcomes, extras))
    console.print(f"[dim]All runs: {os.path.relpath(path)}[/dim]")
    if options.strict and any(outcome.missed() for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
