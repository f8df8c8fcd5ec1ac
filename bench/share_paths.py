"""`python -m bench.share_paths`: how many of the requests of a share group take the short path of the broker.

Consumers receive records of 100 B one at a time and acknowledge each one, as in the workload `deliver1` of
`bench.peers`: with Mansio's client, with confluent-kafka, and without a client library. The broker runs in a process of
its own, in which the two functions that choose the path of a request are wrapped by ones that count; the product has no
such counter. All requests count, from the one that opens a session to the one that ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.handlers.share import share_fetch
from mansio.cli.main import main as run_mansio

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers.peer import Candidate

CONSUMERS = (1, 4, 16)
REQUIRED = 0.9
VALUE_BYTES = 100
PLANS = ("_plan_exchange", "_plan_acknowledgement")
"""The functions of `share_fetch` that return None for a request which has to take the general path."""


class PathCounts:
    """Requests on each path."""

    def __init__(self) -> None:
        self.short = self.general = 0

    def counted(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its results counted."""

        def counting(*arguments: Any) -> Any:
            exchange = plan(*arguments)
            if exchange is None:
                self.general += 1
            else:
                self.short += 1
            return exchange

        return counting


def serve(output: Path, arguments: list[str]) -> None:
    """Run a broker that counts, in this process, and write the counts when it has stopped."""
    counts = PathCounts()
    for name in PLANS:
        setattr(share_fetch, name, counts.counted(getattr(share_fetch, name)))
    try:
        run_mansio(arguments)
    finally:
        output.write_text(json.dumps(vars(counts)))


def measured(candidate: Candidate, consumers: int, seconds: float, directory: Path) -> dict[str, int]:
    """Requests by path of one run, on a broker of its own."""
    # The broker's process needs nothing of the measurement.
    from bench.peers import mansio_broker, workloads
    from bench.peers.peer import ServerLocation
    from bench.peers.server import free_port

    place = ServerLocation(directory / f"{candidate.name}-{consumers}", free_port())
    place.directory.mkdir()
    output = directory / f"{candidate.name}-{consumers}.json"
    server = mansio_broker.serve(place, ("-m", "bench.share_paths", "serve", output))
    try:
        workload = workloads.Workload("paths", "", consumers=consumers)
        workloads.measure(candidate, server, workload, queue="queue", size=VALUE_BYTES, seconds=seconds)
    finally:
        server.stop()
    return dict(json.loads(output.read_text()))


def main() -> None:
    from bench.peers import mansio_broker

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each run")
    parser.add_argument("--consumers", type=int, nargs="+", default=CONSUMERS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        take = partial(measured, seconds=arguments.seconds, directory=Path(directory))
        for candidate in mansio_broker.candidates():
            for consumers in arguments.consumers:
                counts = take(candidate, consumers)
                total = counts["short"] + counts["general"]
                share = counts["short"] / total
                print(
                    f"{candidate.title}: {consumers:2} consumers: {share:.3f} of {total:,} requests on the short path"
                    + ("" if share >= REQUIRED else f" (required: {REQUIRED})")
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
