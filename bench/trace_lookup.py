"""`python -m bench.trace_lookup`: how long a question about a record takes, in a partition of many records.

A broker gets batches of 100 records of 100 B from five publishers in turn, and writes its trace after five batches, as
if a second had passed. Then a client asks for the traces of random records: from the broker that has written them,
and from one that has started again, the first answer apart.

    --blocks N     blocks of the trace, of 500 records each: 20,000 by default, 10 million records
    --questions N  200 by default
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mansio
from bench.interpreter import interpreter
from bench.trace_cost import SHM, VALUE, Publisher
from mansio.wire.batch.record_batch import build_value_only_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.services.broker_services import BrokerServices

RECORDS: Final = 100
BATCHES_PER_BLOCK: Final = 5
TOPIC: Final = "asked"


async def fill(service: BrokerServices, block_count: int) -> None:
    """Append the records, with a block of the trace for each `BATCHES_PER_BLOCK` batches."""
    publishers = [Publisher() for _ in range(BATCHES_PER_BLOCK)]
    writer = service.traces.reader.writer
    batch = build_value_only_batch([round(time.time() * 1000)] * RECORDS, [VALUE] * RECORDS)
    for number in range(block_count):
        for publisher in publishers:
            service.produce.append(TOPIC, None, 0, batch, acks=1, publisher=publisher)
        writer._seal()
        if number % 100 == 0:
            await writer.flush(10_000)
        await asyncio.sleep(0)
    await writer.flush(10_000)


def ask(client: mansio.blocking.Client, offsets: Sequence[int]) -> list[float]:
    """Return the milliseconds of each question."""
    took = []
    for offset in offsets:
        began = time.perf_counter()
        found = client.admin.traces.record(TOPIC, 0, offset)
        took.append((time.perf_counter() - began) * 1000)
        assert found.events, found
    return took


def shown(took: Sequence[float]) -> str:
    ordered = sorted(took)
    p99 = ordered[len(ordered) * 99 // 100]
    return f"median {statistics.median(ordered):.1f} ms, p99 {p99:.1f}, max {ordered[-1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--questions", type=int, default=200)
    arguments = parser.parse_args()
    count = arguments.blocks * BATCHES_PER_BLOCK * RECORDS
    chance = random.Random(1)
    offsets = [chance.randrange(count) for _ in range(arguments.questions)]
    print(f"{interpreter()}; {count:,} records, {arguments.blocks:,} blocks")
    place = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        for step in ("the broker that has written them", "after a restart"):
            with (
                mansio.Broker(Path(directory)) as broker,
                mansio.blocking.connect(broker.address) as client,
            ):
                started = broker._broker
                assert started is not None
                if step != "after a restart":
                    client.admin.create_topic(TOPIC, partitions=1)
                    work = fill(started.service, arguments.blocks)
                    asyncio.run_coroutine_threadsafe(work, started.server.loop).result()
                (first,) = ask(client, offsets[:1])
                print(f"{step}: first {first:.1f} ms; then {shown(ask(client, offsets))}")


if __name__ == "__main__":
    main()
