"""`python -m bench.trace_cost`: what the trace of records costs an append, in one process and without a socket.

A broker appends batches to two topics, with and without `mansio.trace.enable`, in rounds that alternate: the time of
the event loop's thread, from the produce service down to the write. `one publisher`: each batch extends a run; `two
publishers`: each batch begins one. Printed are the median of the ratios of the rounds and its 95 % interval (by order
statistics), and the bytes of the trace in percent of the records' bytes.

    --appends N    appends of a round, 100,000 by default; a tenth of it for batches of 100
    --rounds N     20 by default
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mansio
from bench.interpreter import interpreter
from mansio.config.topic_names import TRACE_TOPIC
from mansio.wire.batch.record_batch import build_value_only_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.services.broker_services import BrokerServices

VALUE: Final = bytes(100)
SLICE: Final = 500
"""Appends between two iterations of the event loop."""

SHM: Final = Path("/dev/shm")
"""Memory, if there is any: the disk is not what is measured."""


class Publisher:
    """A client."""

    trace_name: Final = "bench@127.0.0.1"


async def append(
    service: BrokerServices, topic: str, batch: bytes, count: int, publishers: Sequence[Publisher]
) -> float:
    """Append a batch `count` times; return the seconds of the thread's processor time for each."""
    took = 0.0
    for _ in range(0, count, SLICE):
        began = time.thread_time()
        for number in range(SLICE):
            service.produce.append(
                topic, None, 0, batch, acks=1, publisher=publishers[number % len(publishers)]
            )
        took += time.thread_time() - began
        await asyncio.sleep(0)
    return took / count


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of 20 values, by order statistics: the 6th and the 15th of them."""
    ordered = sorted(ratios)
    return ordered[len(ordered) * 5 // 20], ordered[len(ordered) * 14 // 20]


def measure(records: int, count: int, rounds: int, publishers: Sequence[Publisher]) -> None:
    batch = build_value_only_batch([round(time.time() * 1000)] * records, [VALUE] * records)
    place = SHM if SHM.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=place) as directory,
        mansio.Broker(Path(directory)) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        started = broker._broker
        assert started is not None
        service, loop = started.service, started.server.loop
        for name, enabled in (("traced", "true"), ("plain", "false")):
            config = {"mansio.trace.enable": enabled, "retention.bytes": "0", "segment.bytes": str(64 << 20)}
            client.admin.create_topic(name, partitions=1, config=config)

        def run(topic: str) -> float:
            work = append(service, topic, batch, count, publishers)
            return asyncio.run_coroutine_threadsafe(work, loop).result(600)

        for topic in ("traced", "plain"):
            run(topic)
        times: dict[str, list[float]] = {"traced": [], "plain": []}
        for number in range(rounds):
            for topic in ("traced", "plain") if number % 2 else ("plain", "traced"):
                times[topic].append(run(topic))
            service.retention.check_now()
        ratios = [with_trace / without for with_trace, without in zip(*times.values(), strict=True)]
        low, high = interval(ratios)
        client.admin.traces.record("traced", 0, 0)
        written = service.partitions.find(TRACE_TOPIC, None, 0).log.size_bytes
        share = 100 * written / (len(batch) * count * (rounds + 1))
        print(
            f"batches of {records}, {len(publishers)} publisher(s): {statistics.median(ratios):.3f} "
            f"({low:.3f} to {high:.3f}) of {statistics.median(times['plain']) * 1e6:.2f} us; "
            f"trace {share:.2f} % of the records' bytes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--appends", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(interpreter())
    for records in (1, 100):
        count = arguments.appends if records == 1 else arguments.appends // 10
        for publishers in ([Publisher()], [Publisher(), Publisher()]):
            measure(records, count, arguments.rounds, publishers)


if __name__ == "__main__":
    main()
