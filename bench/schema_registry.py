"""`python -m bench.schema_registry`: the schema registry with many schemas.

A broker in a process of its own gets `--schemas` Avro schemas in as many subjects, and is started again. Then a client
looks schemas up by their ids over HTTP, on one connection, alternately alone and while another client publishes.

    register       schemas per second, eight requests at a time
    restart        seconds until the broker is ready, and until it answers the first look-up
    look-up        50th and 99th percentile in ms, alone, and while others publish: median of the rounds, extremes

    --schemas N    10,000 by default
    --rounds N     pairs: 5 by default
    --seconds S    of each half of a pair: 4 by default
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mansio
from bench.interpreter import interpreter
from bench.servers import Server, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_A_TIME: Final = 8
SHM: Final = Path("/dev/shm")


def text(number: int) -> str:
    fields = [
        {"name": f"field_{number}_{each}", "type": ["null", "string"], "default": None} for each in range(20)
    ]
    return json.dumps({"type": "record", "name": f"Record{number}", "namespace": "bench", "fields": fields})


def start(data: Path) -> tuple[Server, int]:
    """A broker on `data`, and the port of HTTP."""
    port, http_port = free_port(), free_port()
    serve = ["serve", "--data", str(data), "--kafka", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{http_port}"]
    return Server([sys.executable, "-m", "mansio.cli.main", *serve], port, data, None, b"ready"), http_port


def register(address: str, count: int) -> float:
    """Register the schemas; return how many a second."""
    numbers = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        with mansio.blocking.connect(address) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                client.admin.schemas.register(f"subject-{number}", text(number))

    began = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for each in [threads.submit(work) for _ in range(AT_A_TIME)]:
            each.result()
    return count / (time.perf_counter() - began)


def look_up(connection: http.client.HTTPConnection, schema_id: int) -> None:
    connection.request("GET", f"/registry/schemas/ids/{schema_id}")
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body


def percentiles(port: int, count: int, seconds: float) -> tuple[float, float]:
    """The 50th and the 99th percentile of look-ups, in ms."""
    times = []
    connection = http.client.HTTPConnection("127.0.0.1", port)
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        look_up(connection, random.randint(1, count))
        times.append((time.perf_counter() - began) * 1000)
    connection.close()
    found = statistics.quantiles(times, n=100)
    return found[49], found[98]


def meanwhile(address: str, port: int, count: int, seconds: float) -> tuple[float, float]:
    """Percentiles of look-ups while another client publishes."""
    is_over = threading.Event()

    def publish() -> None:
        with mansio.blocking.connect(address, producer=mansio.ProducerOptions(acks=1)) as client:
            records = [mansio.OutgoingRecord(b"v" * 1_000) for _ in range(100)]
            while not is_over.is_set():
                client.publish_many("others", records)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        return percentiles(port, count, seconds)
    finally:
        is_over.set()
        thread.join()


def spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    arguments = parser.parse_args()
    print(f"{interpreter()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as directory:
        data = Path(directory) / "data"
        server, _ = start(data)
        try:
            server.wait_idle()
            rate = register(f"127.0.0.1:{server.port}", arguments.schemas)
            print(f"register: {rate:.0f} schemas per second")
        finally:
            server.end()
        restarts = []
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            server, http_port = start(data)
            ready_s = time.perf_counter() - began
            connection = http.client.HTTPConnection("127.0.0.1", http_port)
            look_up(connection, 1)
            connection.close()
            restarts.append((ready_s, time.perf_counter() - began))
            server.end()
        print(
            f"restart: ready after {spread([one for one, _ in restarts])} s, first look-up after "
            f"{spread([both for _, both in restarts])} s"
        )
        server, http_port = start(data)
        try:
            server.wait_idle()
            address = f"127.0.0.1:{server.port}"
            with mansio.blocking.connect(address) as client:
                client.admin.create_topic("others", partitions=1)
            alone, during = [], []
            for _ in range(arguments.rounds):
                alone.append(percentiles(http_port, arguments.schemas, arguments.seconds))
                during.append(meanwhile(address, http_port, arguments.schemas, arguments.seconds))
            for name, found in (("alone", alone), ("while others publish", during)):
                print(
                    f"look-up, {name}: p50 {spread([each[0] for each in found])} ms, "
                    f"p99 {spread([each[1] for each in found])} ms"
                )
        finally:
            server.end()


if __name__ == "__main__":
    main()
