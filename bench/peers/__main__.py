"""`make bench-peers`: all peers that can run on this machine, including Mansio, with the same workloads in the same
run.

All servers run for the whole time, idle except for the measured one. A workload is measured on all candidates before
the next workload starts, so that compared runs are seconds apart; each repetition starts with another candidate. A peer
that cannot run is skipped and listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.interpreter import interpreter
from bench.peers import (
    apache_kafka,
    beanstalkd,
    mansio_broker,
    nats_jetstream,
    postgresql,
    rabbitmq,
    redis_streams,
    syncs,
    table,
)
from bench.peers.clients import alone
from bench.peers.peer import Candidate, PeerUnavailableError, ServerLocation
from bench.peers.round_trips import RoundTrips, refuse
from bench.peers.server import free_port
from bench.peers.syncs import is_synced_delivering
from bench.peers.table import Entry
from bench.peers.workloads import STARTED_WAIT_S, WORKLOADS, as_json, measure, wait_until_quiet

if TYPE_CHECKING:
    from bench.peers.server import Server
    from bench.peers.workloads import Run, Workload

RESULTS = Path(__file__).resolve().parents[1] / "results"
PEERS = (mansio_broker, redis_streams, postgresql, beanstalkd, nats_jetstream, rabbitmq, apache_kafka)
SIZES = (100, 1024)
WIDTH = 150
"""Output width in columns if the output is not a terminal."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class Peers:
    """Servers and candidates of one run."""

    def __init__(self, options: argparse.Namespace, candidates: list[Candidate], directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.entries = [Entry(candidate) for candidate in candidates]
        self.servers: dict[str, Server] = {}
        self.queues = 0
        self.trips = RoundTrips()

    def start(self, candidate: Candidate, *, trace: Path | None = None) -> Server:
        name = f"{candidate.server}{'-traced' if trace else ''}"
        place = ServerLocation(self.directory / name, free_port(), trace)
        place.directory.mkdir()
        return candidate.serve(place)

    def start_all(self) -> None:
        reasons: dict[str, str] = {}
        for entry in self.entries:
            candidate = entry.candidate
            try:
                if candidate.server not in self.servers and candidate.server not in reasons:
                    self.servers[candidate.server] = self.start(candidate)
                if candidate.server in self.servers:
                    driver = candidate.driver(self.servers[candidate.server].place.port)
                    entry.version = alone(driver.version)
                    entry.released = candidate.released(server_version(entry.version))
            except (PeerUnavailableError, OSError, RuntimeError) as error:
                reasons[candidate.server] = str(error)
            entry.not_run = reasons.get(candidate.server, "")
        wait_until_quiet(STARTED_WAIT_S)

    def stop_all(self) -> None:
        for server in self.servers.values():
            server.stop()

    def running(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.not_run]

    def measured(
        self, entry: Entry, server: Server, workload: Workload, size: int, seconds: float
    ) -> Run | None:
        """One run; a failure is recorded."""
        self.queues += 1
        try:
            return measure(
                entry.candidate, server, workload, queue=f"queue{self.queues}", size=size, seconds=seconds
            )
        except (OSError, RuntimeError) as error:
            entry.failures.append(f"{workload.name}, {size} B: {error}")
            return None

    def is_due(self, entry: Entry, workload: Workload, size: int) -> bool:
        """What is weaker is there to be seen, not to be compared, and latency and delivery hardly depend on the size:
        they are measured with the first size only."""
        is_first = size == self.options.sizes[0]
        is_measured_once = workload.name == "latency" or workload.consumers
        return workload.name not in entry.candidate.skips and (
            is_first or (entry.is_synced and not is_measured_once)
        )

    def jobs(self) -> list[tuple[Entry, Workload, int]]:
        """All runs of all repetitions, in order."""
        found = []
        entries = self.running()
        for repetition in range(self.options.repetitions):
            turn = repetition % max(1, len(entries))
            for size in self.options.sizes:
                for workload in self.options.workloads:
                    turned = entries[turn:] + entries[:turn]
                    found += [
                        (entry, workload, size) for entry in turned if self.is_due(entry, workload, size)
                    ]
        return found

    def run(self, progress: Progress) -> None:
        jobs = self.jobs()
        task = progress.add_task("measuring", total=len(jobs))
        probed: tuple[Workload, int] | None = None
        for entry, workload, size in jobs:
            if probed != (workload, size):
                self.trips.probe(self.directory)
                probed = workload, size
            progress.update(
                task, description=f"{entry.candidate.name}, {workload.title}, {size} B", refresh=True
            )
            server = self.servers[entry.candidate.server]
            run = self.measured(entry, server, workload, size, self.options.seconds)
            entry.runs.setdefault((workload.name, size), []).append(run)
            progress.update(task, advance=1, refresh=True)

    def count_syncs(self, progress: Progress) -> None:
        """Count the fsyncs of each server, on separate server processes."""
        servers = list(dict.fromkeys(entry.candidate.server for entry in self.running()))
        task = progress.add_task("counting fsyncs", total=len(servers))
        for name in servers:
            progress.update(task, description=f"counting fsyncs of {name}", refresh=True)
            entries = [e for e in self.running() if e.candidate.server == name and not e.candidate.is_raw]
            try:
                self._count_syncs_of(entries)
            except (PeerUnavailableError, OSError, RuntimeError) as error:
                entries[0].failures.append(f"fsyncs were not counted: {error}")
            progress.update(task, advance=1, refresh=True)

    def _count_syncs_of(self, entries: list[Entry]) -> None:
        trace = self.directory / f"{entries[0].candidate.server}.trace"
        server = self.start(entries[0].candidate, trace=trace)
        found: list[tuple[Entry, Workload, Run]] = []
        size = min(self.options.sizes)
        try:
            for entry in entries:
                for workload in WORKLOADS:
                    counted = workload.name in syncs.COUNTED_WORKLOADS
                    if counted and workload.name not in entry.candidate.skips:
                        run = self.measured(entry, server, workload, size, syncs.COUNTED_SECONDS)
                        found += [] if run is None else [(entry, workload, run)]
        finally:
            server.stop()
        times = syncs.sync_times(trace)
        for entry in entries:
            counts = {
                workload.name: syncs.syncs_per_unit(times, run, workload.batch)
                for owner, workload, run in found
                if owner is entry
            }
            entry.syncs = syncs.Syncs(**counts)


def server_version(version: str) -> str:
    """The server's version of what `Driver.version` returns."""
    return version.partition(",")[0]


def file_system_of(path: Path) -> str:
    """The file system type of a directory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    over = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(over)[1] if over else "unknown"


def parse(candidates: list[Candidate]) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(prog="bench.peers", description="Measure Mansio beside other queues.")
    parser.add_argument("--list", action="store_true", help="list candidates and workloads, and exit")
    parser.add_argument(
        "--peers", help="name prefixes, separated by commas; Mansio is always included; default: all"
    )
    parser.add_argument("--workloads", help=f"separated by commas; default: {','.join(names)}")
    parser.add_argument(
        "--sizes", help=f"value sizes in bytes, by comma; default: {','.join(map(str, SIZES))}"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="duration of each run; latency runs take three times as long",
    )
    parser.add_argument("--quick", action="store_true", help="one repetition, 100 B, 0.3 s")
    parser.add_argument(
        "--no-syncs", action="store_true", help="do not count fsyncs, trust the configurations"
    )
    parser.add_argument(
        "--data", type=Path, help="directory for the servers' files; default: under bench/results"
    )
    parser.add_argument("--json", type=Path, help="output file; default: bench/results/peers-TIME.json")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a ratio is below the required one")
    options = parser.parse_args()
    chosen = options.workloads.split(",") if options.workloads else names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    options.workloads = [workload for workload in WORKLOADS if workload.name in chosen]
    options.sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else list(SIZES)
    if options.quick:
        options.repetitions, options.seconds, options.sizes = 1, 0.3, options.sizes[:1]
    starts = tuple(options.peers.split(",")) if options.peers else ("",)
    if unmatched := [start for start in starts if not any(one.name.startswith(start) for one in candidates)]:
        parser.error(f"no such peer: {', '.join(unmatched)}")
    options.candidates = [one for one in candidates if one.is_mansio or one.name.startswith(starts)]
    return options


def save(path: Path, options: argparse.Namespace, entries: list[Entry], trips: RoundTrips) -> None:
    content = {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processors": os.cpu_count(),
            "system": platform.platform(),
            "python": interpreter(),
        },
        "round_trip_us": {
            name: {"fastest": trips.fastest_us(synced=synced), "median": trips.median_us(synced=synced)}
            for name, synced in (("plain", False), ("synced", True))
        },
        "repetitions": options.repetitions,
        "seconds": options.seconds,
        "candidates": [
            {
                "name": entry.candidate.name,
                "title": entry.candidate.title,
                "version": entry.version,
                "released": None if entry.released is None else entry.released.isoformat(),
                "durability": entry.candidate.durability,
                "confirmation": entry.candidate.confirmation,
                "not_run": entry.not_run,
                "fsyncs_per_acknowledgement": None if entry.syncs is None else asdict(entry.syncs),
                "is_synced": entry.is_synced,
                "is_synced_delivering": is_synced_delivering(entry.candidate, entry.syncs),
                "failures": entry.failures,
                "runs": [
                    {"workload": name, "size": size, "runs": [run and as_json(run) for run in runs]}
                    for (name, size), runs in entry.runs.items()
                ],
            }
            for entry in entries
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def show(console: Console, options: argparse.Namespace, entries: list[Entry], trips: RoundTrips) -> None:
    for size in options.sizes:
        for is_delivery in (False, True):
            workloads = [one for one in options.workloads if bool(one.consumers) == is_delivery]
            if workloads and not (is_delivery and size != options.sizes[0]):
                console.print(table.size_table(entries, workloads, size))
    console.print(table.required_table(entries, options.workloads, options.sizes))
    console.print(table.servers_table(entries, datetime.now(UTC).date()))
    console.print(
        "fsyncs per acknowledgement: of one message, of a batch of 100, of 100 taken; of one record delivered, of 100 "
        "delivered; counted by strace. "
        "~ disturbed: another process was busy in one of the runs.\n"
        "The raw row is the broker's own speed without a client; nothing is compared with it."
    )
    bounds = [
        f"{trips.fastest_us(synced=synced) or 0:.0f} us {what} (median {trips.median_us(synced=synced) or 0:.0f})"
        for synced, what in ((False, "over loopback"), (True, "with a sync"))
    ]
    console.print(
        f"fastest round trip of this machine: {', '.join(bounds)}; a row that is better is an error.",
        highlight=False,
    )
    for entry in entries:
        if entry.not_run:
            console.print(
                f"[yellow]not run:[/yellow] {entry.candidate.title}: {entry.not_run}", highlight=False
            )
    runs = [run for entry in entries for several in entry.runs.values() for run in several if run is not None]
    disturbed = sum(run.is_disturbed for run in runs)
    if disturbed:
        console.print(f"[yellow]{disturbed} of {len(runs)} runs were disturbed by other processes.[/yellow]")
    for entry in entries:
        for failure in entry.failures:
            console.print(f"[red]failed:[/red] {entry.candidate.title}: {failure}", highlight=False)


def main() -> None:
    candidates = [one for peer in PEERS for one in peer.candidates()]
    options = parse(candidates)
    if options.list:
        for one in options.candidates:
            print(f"{one.name:16} {one.title}: {one.durability}")
        for workload in WORKLOADS:
            print(f"{workload.name:16} {workload.title}")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    RESULTS.mkdir(exist_ok=True)
    kind = file_system_of(options.data or RESULTS)
    if kind in MEMORY_FILE_SYSTEMS:
        sys.exit(
            f"{options.data or RESULTS} is in memory ({kind}), where an fsync costs nothing: give --data another"
        )
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(dir=options.data or RESULTS, prefix="peers-") as directory:
        peers = Peers(options, options.candidates, Path(directory))
        Path(directory).chmod(0o755)  # a server that refuses to run as root has another user
        # A progress bar that refreshes itself has a thread, but client processes are forked from here.
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            try:
                peers.start_all()
                if not options.no_syncs:
                    peers.count_syncs(progress)
                peers.run(progress)
            finally:
                peers.stop_all()
    path = options.json or RESULTS / f"peers-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    refused = refuse(peers.entries, options.workloads, peers.trips)
    save(path, options, peers.entries, peers.trips)
    show(console, options, peers.entries, peers.trips)
    console.print(f"[dim]Python {interpreter()}. All runs: {os.path.relpath(path)}[/dim]")
    if refused:
        sys.exit("a row is better than one round trip of this machine allows: see what failed")
    if options.strict and table.missed(peers.entries, options.workloads, options.sizes):
        sys.exit(1)


if __name__ == "__main__":
    main()
