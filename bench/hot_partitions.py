"""`python -m bench.hot_partitions`: processor time of the search for hot partitions, and of the sampling of their keys.

    window      end of a window over many partitions: nothing has changed, and all have
    sampling    rounds over 50 hot partitions, with batches of --batch records, uncompressed and with zstd

One broker in this process, on the real disk. The processor time is that of the whole process, in which nothing else
runs meanwhile. Printed are medians with the lowest and highest value, and the part of one core if a window ends every
10 s, and a round begins every second or, if it takes longer than allowed, later.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

import mansio
from bench.interpreter import interpreter
from mansio.broker.hot_partitions.key_sampler import BATCHES_PER_ROUND_MAX, ROUND_MS, WORK_SHARE_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

WINDOW_S: Final = 10.0
SETTLED_S: Final = 0.5
VALUE: Final = bytes(100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=100, help="records of a batch")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{interpreter()}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        broker = mansio.Broker(
            f"{directory}/data", listeners="127.0.0.1:0", hot_partition_window_ms=600_000, log_level="error"
        )
        with broker, mansio.blocking.connect(broker.address) as client:
            measure_windows(broker, client, options.partitions, options.rounds)
            for codec in ("none", "zstd"):
                measure_sampling(broker, client, codec, options.batch, options.rounds)


def measure_windows(
    broker: mansio.Broker, client: mansio.blocking.Client, partitions: int, rounds: int
) -> None:
    client.admin.create_topic("wide", partitions=partitions)
    monitor = broker._broker.service.hot_partitions._monitor  # type: ignore[union-attr]
    one_each = [mansio.OutgoingRecord(VALUE, partition=index) for index in range(partitions)]
    run(broker, monitor.end_window)
    for title, publishes in (("nothing changed", False), ("all changed", True)):
        times_s = []
        for _ in range(rounds):
            if publishes:
                client.publish_many("wide", one_each)
                time.sleep(SETTLED_S)  # flushes, and what follows them
            times_s.append(processor_s(broker, monitor.end_window))
        each_us = [1e6 * each / partitions for each in times_s]
        share = statistics.median(times_s) / WINDOW_S
        print(
            f"window, {partitions:,} partitions, {title}: {spread(times_s, 1e3)} ms, {spread(each_us)} us a partition,"
            f" {share:.3%} of a core"
        )


def measure_sampling(
    broker: mansio.Broker, client: mansio.blocking.Client, codec: str, batch: int, rounds: int
) -> None:
    topic = f"hot-{codec}"
    client.admin.create_topic(topic, partitions=BATCHES_PER_ROUND_MAX)
    service = broker._broker.service  # type: ignore[union-attr]
    sampler = service.hot_partitions._monitor.sampler
    partitions = service.partitions.partitions_of(topic)
    records = [
        mansio.OutgoingRecord(VALUE, key=b"customer %d" % (number % 37), partition=index)
        for index in range(BATCHES_PER_ROUND_MAX)
        for number in range(batch)
    ]
    times_s, reported_s = [], []
    options = mansio.ProducerOptions(codec=codec, linger_ms=100, batch_bytes_max=1 << 20)  # type: ignore[arg-type]

    async def follow() -> None:
        sampler.follow(partitions)
        assert sampler._work is not None
        sampler._work.cancel()  # rounds are run one by one

    with client.producer(options) as producer:
        run(broker, follow)
        for _ in range(rounds):
            for each in records:
                producer.send(topic, each.value, key=each.key, partition=each.partition)
            producer.flush()
            time.sleep(SETTLED_S)
            before = sampler.batch_count
            began = time.process_time()
            reported_s.append(run(broker, sampler.run_round))
            times_s.append(time.process_time() - began)
            assert sampler.batch_count - before == BATCHES_PER_ROUND_MAX
    shares = [
        used / max(ROUND_MS / 1000, reported / WORK_SHARE_MAX)
        for used, reported in zip(times_s, reported_s, strict=True)
    ]
    print(
        f"sampling, {BATCHES_PER_ROUND_MAX} hot partitions, batches of {batch:,} records, {codec}:"
        f" {spread(times_s, 1e3)} ms a round, {spread(shares, 100)} % of a core"
    )
    run(broker, unfollow(sampler))


def unfollow(sampler: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    async def work() -> None:
        sampler.stop()

    return work


def run(broker: mansio.Broker, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on the broker's event loop."""
    assert broker._broker is not None
    return asyncio.run_coroutine_threadsafe(work(), broker._broker.server.loop).result()


def processor_s(broker: mansio.Broker, work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    """Return the processor time that a coroutine takes on the broker's event loop."""
    began = time.process_time()
    run(broker, work)
    return time.process_time() - began


def spread(values: list[float], factor: float = 1.0) -> str:
    """Return median, lowest and highest value."""
    middle = statistics.median(values) * factor
    return f"{middle:.2f} ({min(values) * factor:.2f}-{max(values) * factor:.2f})"


if __name__ == "__main__":
    main()
