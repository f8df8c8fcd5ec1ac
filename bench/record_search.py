"""`python -m bench.record_search`: a search by key through a log in the page cache, and what others pay meanwhile.

A broker in a process of its own has `--megabytes` of records (before compression) in batches of 128 KiB, of records of
about 1 kB: JSON-like values, keys in turns. A key that no record has is searched, so everything is read: seconds of
each search, and the processor time of the process that searches. Then another client produces one record after the
other with acks=1 to another topic, alternately without and with searches: the ratio of the 99th percentiles of the
pairs, median and extremes.

    --megabytes N  1024 by default; the data is removed at the end
    --rounds N     searches per codec, and pairs: 5 by default
    --seconds S    of each half of a pair: 4 by default
    --data DIR     where the logs are: /dev/shm if there is one
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mansio
from bench.interpreter import interpreter
from bench.servers import start_mansio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.servers import Server

RECORDS: Final = 1_000
VALUE_BYTES: Final = 1_000
TEMPLATES: Final = 50
ABSENT: Final = b"no record has this key"
SHM: Final = Path("/dev/shm")
WARM_UP: Final = 50


def values(chance: random.Random) -> list[bytes]:
    """Values that zstd compresses about threefold."""
    found = []
    for _ in range(RECORDS):
        fields = [f'"field{number}":"{chance.randbytes(10).hex()}"' for number in range(VALUE_BYTES // 32)]
        found.append(("{" + ",".join(fields) + "}").encode())
    return found


def fill(client: mansio.blocking.Client, topic: str, codec: str, megabytes: int) -> None:
    options = mansio.ProducerOptions(acks=1, codec=codec)  # type: ignore[arg-type]
    chance = random.Random(1)
    batches = [
        [
            mansio.OutgoingRecord(value, b"key-%d" % (number * RECORDS + index), partition=0)
            for index, value in enumerate(values(chance))
        ]
        for number in range(TEMPLATES)
    ]
    size = sum(len(each.value or b"") for each in batches[0])
    with client.producer(options) as producer:
        for number in range((megabytes << 20) // size):
            producer.publish_many(topic, batches[number % TEMPLATES])


def worker_cpu_s(server: Server) -> float:
    """Processor time of the process that searches; 0 if there is none."""
    children = [
        child
        for path in Path(f"/proc/{server.process.pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    times = [Path(f"/proc/{child}/schedstat").read_text().split()[0] for child in children]
    return sum(map(int, times)) / 1e9


def search(client: mansio.blocking.Client, topic: str) -> tuple[float, int]:
    """Return the seconds of a search, and the bytes that it has read."""
    progress: list[mansio.SearchProgress] = []
    began = time.perf_counter()
    found = list(client.admin.traces.find(topic, key=ABSENT, on_progress=progress.append))
    assert not found
    return time.perf_counter() - began, progress[-1].searched_bytes


def p99_ms(client: mansio.blocking.Client, seconds: float) -> float:
    """The 99th percentile of the times of single records."""
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        client.publish("others", b"v" * 100)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(times[WARM_UP:], n=100)[98]


def meanwhile(address: str, topic: str, seconds: float) -> tuple[float, float]:
    """Return the 99th percentiles without and with searches, one after the other."""
    options = mansio.ProducerOptions(acks=1)
    with (
        mansio.blocking.connect(address, producer=options) as other,
        mansio.blocking.connect(address) as searcher,
    ):
        alone = p99_ms(other, seconds)
        is_over = threading.Event()

        def keep_searching() -> None:
            while not is_over.is_set():
                search(searcher, topic)

        thread = threading.Thread(target=keep_searching)
        thread.start()
        try:
            return alone, p99_ms(other, seconds)
        finally:
            is_over.set()
            thread.join()


def spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--data", type=Path, default=SHM if SHM.is_dir() else None)
    arguments = parser.parse_args()
    print(f"{interpreter()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=arguments.data) as directory:
        server = start_mansio(Path(directory) / "data", None)
        try:
            address = f"127.0.0.1:{server.port}"
            with mansio.blocking.connect(address) as client:
                client.admin.create_topic("others", partitions=1)
                for codec in ("none", "zstd"):
                    client.admin.create_topic(codec, partitions=1)
                    fill(client, codec, codec, arguments.megabytes)
                    search(client, codec)
                    cpu_s = worker_cpu_s(server)
                    runs = [search(client, codec) for _ in range(arguments.rounds)]
                    cpu_s = (worker_cpu_s(server) - cpu_s) / arguments.rounds
                    stored = runs[0][1] / (1 << 30)
                    gib = arguments.megabytes / 1024
                    print(
                        f"{codec}: {spread([seconds / gib for seconds, _ in runs])} s per GiB of records, "
                        f"{cpu_s / gib:.2f} s of processor time, {stored:.2f} GiB stored"
                    )
            for codec in ("none", "zstd"):
                pairs = [meanwhile(address, codec, arguments.seconds) for _ in range(arguments.rounds)]
                print(
                    f"{codec}: p99 of others alone {spread([alone for alone, _ in pairs])} ms, "
                    f"during searches {spread([during / alone for alone, during in pairs])} times that"
                )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
