"""`make bench`: Mansio compared with a baseline on the same machine, in alternating pairs; medians with their spread.

Ratios, because absolute figures of a shared machine drift by a factor of two within minutes. A pair is measured within
seconds, the first side alternates, and the ratio is taken per pair. Absolute figures are shown as well.

Determines the order of measurements and writes the table and the JSON under bench/results/.

Invariant: server and load generator are separate processes, pinned to two different processors if there are two; both
kinds of server use the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.cases import CASES, Case, Side
from bench.interpreter import interpreter
from bench.report import Outcome, save, size_table, table
from bench.servers import Server, create_topic, delete_topic, embedded_start_ms, start_baseline, start_mansio
from bench.share_size import ALL_SIZE_CASES as SIZE_CASES
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = Path(__file__).parent / "results"
EXTRAS = ("memory", "embedded-start")
TOUCHED_TIMES = 3
"""How often the bytes of a run go through the page cache before anything is measured: memory that a virtual
machine uses for the first time costs ten times as much, and whoever came first would pay for it."""
LOAD_DEADLINE_S = 120
SIZE_TIMES_MAX = 3
"""Repetitions of a size case, which takes long and has little spread."""
WIDTH = 120
"""Output width in columns if the output is not a terminal."""


class Bench:
    """Environment of the runs: options, directories, processors."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        processors = sorted(os.sched_getaffinity(0))
        pinned = len(processors) > 1 and not options.no_pin
        self.server_processor = processors[0] if pinned else None
        self.load_processor = processors[1] if pinned else None
        self.names = 0
        self.notes: list[str] = []
        """Remarks of cases, printed after the tables."""

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
        if case.fill is not None:
            self.load(server, case.fill, topic=name)
        seconds = self.options.seconds * (3 if case.load[0] == "deliver" else 1)
        limit = self.options.megabytes << 20
        return self.load(server, case.load, topic=name, partitions=partitions, seconds=seconds, bytes=limit)

    def on_baseline(self, case: Case, side: Side) -> dict[str, Any]:
        server = start_baseline(self.data(), self.server_processor, sync=side == "baseline sync")
        try:
            return self.measure(case, server, case.partitions, "bench")
        finally:
            server.stop()

    def on_mansio(self, case: Case, server: Server, partitions: int) -> dict[str, Any]:
        self.names += 1
        name = f"bench-{self.names}"
        create_topic(server, name, partitions)
        result = self.measure(case, server, partitions, name)
        delete_topic(server, name)
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
                    elif case.against is not None and not self.options.no_baseline:
                        outcome.reference.append(self.on_baseline(case, case.against))
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


def parse() -> argparse.Namespace:
    names = [case.name for case in CASES] + list(EXTRAS) + [case.name for case in SIZE_CASES]
    on_request = {case.name for case in SIZE_CASES if case.on_request}
    parser = argparse.ArgumentParser(
        prog="bench.run", description="Measure Mansio against a baseline of this machine."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs of baseline and Mansio runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each run")
    parser.add_argument("--megabytes", type=int, default=512, help="end a run after this many MiB produced")
    parser.add_argument("--data", help="directory for the servers' files; default: under bench/results")
    parser.add_argument("--json", type=Path, help="output file; default: bench/results/TIME.json")
    parser.add_argument("--no-baseline", action="store_true", help="measure only Mansio")
    parser.add_argument("--no-pin", action="store_true", help="do not pin processes to processors")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a ratio is below the required one")
    options = parser.parse_args()
    unknown = set(options.cases) - set(names)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    options.cases = options.cases or [name for name in names if name not in on_request]
    if options.list:
        for case in CASES:
            print(f"{case.name:16} {case.title}")
        print("\n".join(EXTRAS))
        for one in SIZE_CASES:
            print(f"{one.name:22} {one.title}{' (only when named)' if one.on_request else ''}")
        sys.exit()
    return options


def main() -> None:
    options = parse()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    RESULTS.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    extras: dict[str, Any] = {}
    sizes: dict[str, list[float]] = {}
    failures: list[str] = []

    @contextlib.contextmanager
    def failing(name: str) -> Iterator[None]:
        """Record the failure of a case; the others are still measured."""
        try:
            yield
        except (MansioError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")

    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=options.data or RESULTS, prefix="data-") as directory,
        Progress(*columns, console=console) as progress,
    ):
        bench = Bench(options, Path(directory))
        bench.touch_memory()
        for case in CASES:
            if case.name in options.cases:
                with failing(case.name):
                    outcomes.append(bench.run(case, progress))
        for name, measure in (("memory", bench.idle_megabytes), ("embedded-start", bench.embedded_ms)):
            if name in options.cases:
                with failing(name):
                    extras[name] = measure()
        for one in SIZE_CASES:
            if one.name in options.cases:
                task = progress.add_task(one.title, total=1)
                with failing(one.name):
                    sizes[one.name] = one.measure(bench, min(options.pairs, SIZE_TIMES_MAX))
                progress.advance(task)
    path = options.json or RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    save(path, options, outcomes, {**extras, "size": sizes, "notes": bench.notes})
    if outcomes or extras:
        console.print(table(outcomes, extras))
    if sizes:
        console.print(size_table(sizes))
    for note in bench.notes:
        console.print(note, highlight=False)
    console.print(f"[dim]Python {interpreter()}. All runs: {os.path.relpath(path)}[/dim]")
    for failure in failures:
        console.print(f"[red]failed:[/red] {failure}", markup=True, highlight=False)
    missed = [outcome.missed() for outcome in outcomes]
    missed += [one.missed(sizes[one.name]) for one in SIZE_CASES if one.name in sizes]
    if failures or (options.strict and any(missed)):
        sys.exit(1)


if __name__ == "__main__":
    main()
