"""`python -m bench.schema_validation`: what the check of schemas at publish costs.

Batches of 100 framed records go to two topics, with and without `mansio.value.schema.validation`, in rounds that
alternate. All schema ids are in the cache of the registry.

    append     from the produce service down to the write, in one process and without a socket
    publish    Produce requests over a socket, one in flight, with their responses
    client     records per second of confluent-kafka, with a broker in another process

Of `append` and `publish`, the processor time of the event loop's thread is compared, because wall time on a busy
machine depends on other processes. `equal`: values of one length; `varied`: keys and values of different lengths;
`headers`: the ids are in headers. Printed are the median of the ratios of the rounds, the part of the rate without
validation that is left, with the smallest and the largest.

    --batches N    batches of a round, 1,000 by default
    --rounds N     15 by default
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer

import mansio
from bench.frames import produce_request
from bench.interpreter import interpreter
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.node import broker_runtime
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mansio.broker.features.feature_ports import SchemaUse
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.batch.record_reader import Record

RECORDS: Final = 100
FRAME: Final = b"\0\0\0\0\7"
SHM: Final = Path("/dev/shm")
"""Memory, if there is any: the disk is not what is measured."""
TOPICS: Final = {
    name: {"mansio.trace.enable": "false", "mansio.value.schema.validation": text, "retention.bytes": "0"}
    for name, text in (("plain", "false"), ("checked", "true"))
}


class KnownIds:
    """A registry whose answers are all in the cache, as a dictionary."""

    def __init__(self) -> None:
        self._known: dict[SchemaUse, bool] = {}

    def known(self, use: SchemaUse) -> bool | None:
        return self._known.get(use)

    async def resolve(self, uses: Collection[SchemaUse]) -> None:
        self._known.update(dict.fromkeys(uses, True))


def batches() -> dict[str, bytes]:
    """The batch of each layout."""
    now_ms = round(time.time() * 1000)
    headers = (("__value_schema_id", FRAME),)
    layouts: dict[str, list[Any]] = {
        "equal": [(now_ms, None, FRAME + bytes(95), ()) for _ in range(RECORDS)],
        "varied": [(now_ms + n // 10, b"key-%d" % n, FRAME + bytes(45 + n % 97), ()) for n in range(RECORDS)],
        "headers": [(now_ms, b"key-%d" % n, bytes(50 + n % 97), headers) for n in range(RECORDS)],
    }
    return {name: build_batch(records) for name, records in layouts.items()}


async def append(service: BrokerServices, topic: str, batch: bytes, count: int) -> float:
    """Append a batch `count` times; return the seconds of the thread's processor time for each."""
    await asyncio.sleep(0)
    began = time.thread_time()
    for _ in range(count):
        service.produce.append(topic, None, 0, batch, acks=1)
    return (time.thread_time() - began) / count


async def thread_time() -> float:
    """The processor time of the event loop's thread, in seconds."""
    return time.thread_time()


def publish(
    connection: socket.socket, on_loop: Callable[[Any], float], topic: str, batch: bytes, count: int
) -> float:
    """Publish a batch `count` times; return the seconds of the broker's processor time for each."""
    frame = produce_request(topic, 0, 1, batch)
    answers = connection.makefile("rb")
    began = on_loop(thread_time())
    for _ in range(count):
        connection.sendall(frame)
        answers.read(int.from_bytes(answers.read(4)))
    return (on_loop(thread_time()) - began) / count


def produce(address: str, topic: str, records: list[Record], count: int) -> float:
    """Publish the records of a batch `count` times with confluent-kafka; return the seconds for each time."""
    options = {"batch.num.messages": RECORDS, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({"bootstrap.servers": address, "log_level": 0, **options})
    began = time.monotonic()
    for _ in range(count):
        for record in records:
            producer.produce(topic, record.value, record.key, headers=list(record.headers))
        producer.poll(0)
    assert producer.flush(600) == 0
    return (time.monotonic() - began) / count


def use_known_ids() -> None:
    """Let the brokers of this process have the registry `KnownIds`."""
    ids = KnownIds()

    def ports(*parts: Any, **named: Any) -> FeaturePorts:
        return FeaturePorts(*parts, **{**named, "schema_ids": ids})

    vars(broker_runtime)["FeaturePorts"] = ports


def serve(directory: str) -> None:
    """Run a broker in this process until its standard input ends."""
    use_known_ids()
    with mansio.Broker(directory) as broker:
        print(broker.address, flush=True)
        sys.stdin.read()


def measure_client(directory: Path, batches_count: int, rounds: int) -> None:
    """Measure confluent-kafka with a broker in another process."""
    command = [sys.executable, "-m", "bench.schema_validation", "--serve", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        with mansio.blocking.connect(address) as client:
            for name, config in TOPICS.items():
                client.admin.create_topic(name, partitions=1, config=config)
        for layout, batch in batches().items():
            records = read_records(batch)

            def took(topic: str, records: list[Record] = records) -> float:
                return produce(address, topic, records, batches_count)

            report(f"client, {layout}", took, rounds)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def measure(directory: Path, batches_count: int, rounds: int) -> None:
    """Measure all layouts in this process."""
    use_known_ids()
    with mansio.Broker(directory) as broker, mansio.blocking.connect(broker.address) as client:
        started = broker._broker
        assert started is not None
        service, loop = started.service, started.server.loop
        for name, config in TOPICS.items():
            client.admin.create_topic(name, partitions=1, config=config)
        client.publish("checked", FRAME)  # the id is known from here on
        host, _, port = broker.address.rpartition(":")

        def on_loop(work: Any) -> float:
            return float(asyncio.run_coroutine_threadsafe(work, loop).result())

        with socket.create_connection((host, int(port))) as connection:
            for layout, batch in batches().items():
                for kind in ("append", "publish"):

                    def took(topic: str, kind: str = kind, batch: bytes = batch) -> float:
                        if kind == "append":
                            return on_loop(append(service, topic, batch, batches_count))
                        return publish(connection, on_loop, topic, batch, batches_count)

                    report(f"{kind}, {layout}", took, rounds)


def report(case: str, took: Callable[[str], float], rounds: int) -> None:
    """Measure rounds of one case, and print a line."""
    pairs = []
    for number in range(rounds + 1):
        order = ("plain", "checked") if number % 2 else ("checked", "plain")
        times = {topic: took(topic) for topic in order}
        if number:  # the first round warms up
            pairs.append((times["plain"], times["checked"]))
    ratios = [plain / checked for plain, checked in pairs]
    plain_us, checked_us = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    print(
        f"{case}: {statistics.median(ratios):.2f} of the rate ({min(ratios):.2f} to {max(ratios):.2f}),"
        f" {checked_us:.0f} us a batch instead of {plain_us:.0f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(interpreter())
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as directory:
        measure_client(Path(directory, "client"), arguments.batches, arguments.rounds)
        measure(Path(directory, "broker"), arguments.batches, arguments.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
