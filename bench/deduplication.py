"""`python -m bench.deduplication`: cost of the deduplication window of one partition, with confluent-kafka as client.

    pairs      records per second with a window against without, in rounds that alternate; every record has the header
               of an id. The ratio is the median of the rounds. `new`: every id is new; `repeats`: none is
    memory     of the broker for so many ids
    restart    time until a broker with so many ids has started and recognizes a repeat, after a kill and after a stop

The client is a Python program on the same machine; its processor time competes with the broker's.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.servers import Server, start_mansio

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = bytes(100)
WINDOW_MS = 3_600_000
QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda _: None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000, help="records of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ids", type=int, default=1_000_000, help="ids of memory and restart")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for batch in (1, 100):
            count = arguments.records if batch > 1 else arguments.records // 4
            measure_pairs(Path(directory) / f"pairs-{batch}", batch, count, arguments.rounds)
        measure_memory(Path(directory) / "memory", arguments.ids)


def measure_pairs(data: Path, batch: int, count: int, rounds: int) -> None:
    server = start_mansio(data, None)
    create_topic(server, "plain", 0)
    create_topic(server, "window", WINDOW_MS)
    took: dict[str, list[tuple[float, float]]] = {"plain": [], "new": [], "repeats": []}
    for number in range(rounds):
        for kind, results in took.items():
            ids = (b"id-%d" % (number * count + at) for at in range(count))
            results.append(produce(server, "plain" if kind == "plain" else "window", batch, count, ids))
    for kind in ("new", "repeats"):
        ratio = statistics.median(
            with_ids[0] / without[0] for with_ids, without in zip(took[kind], took["plain"], strict=True)
        )
        cpu_us = [statistics.median(one[1] for one in took[name]) for name in (kind, "plain")]
        rate = statistics.median(one[0] for one in took[kind])
        print(
            f"pairs, batches of {batch}, {kind}: {ratio:.2f} of the rate without a window ({rate:,.0f} a second),"
            f" broker {cpu_us[0]:.1f} us of processor time a record instead of {cpu_us[1]:.1f}"
        )
    server.stop()


def measure_memory(data: Path, count: int) -> None:
    server = start_mansio(data, None)
    create_topic(server, "window", WINDOW_MS)
    produce(server, "window", 100, 1_000, (b"warm-%d" % at for at in range(1_000)))
    before = server.resident_bytes()
    rate, _ = produce(server, "window", 100, count, (b"id-%d" % at for at in range(count)))
    size = server.resident_bytes() - before
    print(f"memory: {size >> 20} MiB for {count:,} ids, {size / count:.0f} bytes each; {rate:,.0f} a second")
    for how, number in (("kill", signal.SIGKILL), ("stop", signal.SIGTERM)):
        server.end(number)
        began = time.monotonic()
        server = start_mansio(data, None)
        produce(server, "window", 1, 1, iter((b"id-0",)))  # waits until the ids are loaded
        print(f"restart: {time.monotonic() - began:.2f} s until a repeat is recognized, after a {how}")
    server.stop()


def create_topic(server: Server, name: str, window_ms: int) -> None:
    admin = AdminClient({"bootstrap.servers": address(server), **QUIET})
    config = {"mansio.dedup.ms": str(window_ms), "mansio.dedup.ids.max": "10000000"}
    admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result(30)


def produce(server: Server, topic: str, batch: int, count: int, ids: Iterator[bytes]) -> tuple[float, float]:
    """Publish records with ids; return the rate per second, and us of processor time of the broker per record."""
    options = {"batch.num.messages": batch, "linger.ms": 5, "queue.buffering.max.messages": 200_000}
    producer = Producer({"bootstrap.servers": address(server), **options, **QUIET})
    cpu_s, began = server.cpu_s(), time.monotonic()
    for number, dedup_id in enumerate(ids):
        while True:
            try:
                producer.produce(topic, VALUE, headers={"mansio-dedup-id": dedup_id})
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()
    return count / (time.monotonic() - began), (server.cpu_s() - cpu_s) / count * 1e6


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


if __name__ == "__main__":
    main()
