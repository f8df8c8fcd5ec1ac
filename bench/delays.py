"""`python -m bench.delays`: delayed records of one partition, with confluent-kafka as client.

    accept     records per second that are accepted, in batches of 100, all due at one moment
    drain      records per second that are delivered when that moment comes; publishing meanwhile, on another topic
    late       time from when a record is due until a waiting consumer has it, with a million others pending, while
               5,000 records are accepted per second and 500 are due
    restart    time until a broker that was killed with a million pending records is ready

The client is a Python program on the same machine; its processor time competes with the broker's.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench.servers import Server, start_mansio
from mansio import blocking

TOPIC = "delayed"
VALUE = bytes(100)
RATE_PER_S = 5_000
DUE_EVERY = 10
SECONDS = 20
HOUR_MS = 3_600_000
QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda _: None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=300_000, help="records of accept and drain")
    parser.add_argument("--pending", type=int, default=1_000_000, help="pending records of late and restart")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure_burst(Path(directory) / "burst", arguments.records)
        measure_lateness(Path(directory) / "late", arguments.pending)


def measure_burst(data: Path, count: int) -> None:
    server = start_mansio(data, None)
    create_topic(server)
    due_ms = round(time.time() * 1000) + (count // 20_000 + 10) * 1000
    cpu_s, began = server.cpu_s(), time.monotonic()
    produce(server, count, lambda _: b"%d" % due_ms)
    took = time.monotonic() - began
    used = server.cpu_s() - cpu_s
    print(
        f"accept: {count / took:,.0f} a second, broker {used / count * 1e6:.1f} us of processor time a record"
    )
    latencies: list[tuple[float, float]] = []
    stop = threading.Event()
    prober = threading.Thread(target=publish_repeatedly, args=(server, latencies, stop))
    prober.start()
    time.sleep(max(0.0, due_ms / 1000 - time.time()))
    consumer = new_consumer(server)
    cpu_s, began = server.cpu_s(), time.monotonic()
    while consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), 10)[1] < 2 * count:
        time.sleep(0.05)
    ended = time.monotonic()
    used = server.cpu_s() - cpu_s
    stop.set()
    prober.join()
    print(
        f"drain: {count / (ended - began):,.0f} a second, broker {used / count * 1e6:.1f} us of processor time a record"
    )
    before = [took_ms for moment, took_ms in latencies if moment < began]
    during = [took_ms for moment, took_ms in latencies if began <= moment < ended]
    server.stop()
    print(
        f"publish: p99 {percentile(before, 99):.1f} ms before, {percentile(during, 99):.1f} ms during the drain"
    )


def measure_lateness(data: Path, pending: int) -> None:
    server = start_mansio(data, None)
    create_topic(server)
    before = server.resident_bytes()
    now_ms = round(time.time() * 1000)
    chance = random.Random(1)
    produce(server, pending, lambda _: b"%d" % (now_ms + HOUR_MS + chance.randrange(10**9)))
    print(f"memory: {(server.resident_bytes() - before) >> 20} MiB for {pending:,} pending records")
    server.end(signal.SIGKILL)
    server = start_mansio(data, None)
    print(f"restart: {server.ready_s:.2f} s after a kill with {pending:,} pending records")
    server.wait_idle()
    consumer = new_consumer(server)
    end = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), 10)[1]
    consumer.assign([TopicPartition(TOPIC, 0, end)])
    late_ms: list[float] = []
    stop = threading.Event()
    reader = threading.Thread(target=read_late, args=(consumer, late_ms, stop))
    reader.start()
    producer = Producer({"bootstrap.servers": address(server), "linger.ms": 5, **QUIET})
    began = time.monotonic()
    for number in range(RATE_PER_S * SECONDS):
        delay_ms = HOUR_MS if number % DUE_EVERY else chance.randrange(1000, 2000)
        producer.produce(TOPIC, VALUE, headers={"mansio-delay-ms": b"%d" % delay_ms})
        if number % 50 == 0:
            producer.poll(0)
            time.sleep(max(0.0, began + number / RATE_PER_S - time.monotonic()))
    producer.flush()
    time.sleep(3)
    stop.set()
    reader.join()
    server.stop()
    print(
        f"late: {len(late_ms):,} records, median {statistics.median(late_ms):.1f} ms, p99 {percentile(late_ms, 99):.1f}"
        f" ms, maximum {max(late_ms):.1f} ms, minimum {min(late_ms):.1f} ms"
    )


def create_topic(server: Server) -> None:
    admin = AdminClient({"bootstrap.servers": address(server), **QUIET})
    topic = NewTopic(TOPIC, 1, 1, config={"mansio.delay.enable": "true"})
    admin.create_topics([topic])[TOPIC].result(30)


def produce(server: Server, count: int, due: Any) -> None:
    """Publish records that are due at `due(number)`, ms since the Unix epoch in decimal, in batches of 100."""
    options = {"batch.num.messages": 100, "linger.ms": 5, "queue.buffering.max.messages": 200_000}
    producer = Producer({"bootstrap.servers": address(server), **options, **QUIET})
    for number in range(count):
        headers = {"mansio-deliver-at-ms": due(number)}
        while True:
            try:
                producer.produce(TOPIC, VALUE, headers=headers)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def publish_repeatedly(server: Server, latencies: list[tuple[float, float]], stop: threading.Event) -> None:
    """Publish to another topic; note when each call began (monotonic seconds) and how many ms it took."""
    with blocking.connect(address(server)) as client:
        client.admin.create_topic("others", partitions=1)
        while not stop.wait(0.005):
            began = time.monotonic()
            client.publish("others", VALUE)
            latencies.append((began, (time.monotonic() - began) * 1000))


def read_late(consumer: Consumer, late_ms: list[float], stop: threading.Event) -> None:
    """Note how many ms after its due time each delivered record is received."""
    while not stop.is_set():
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            due = dict(message.headers() or ()).get("mansio-due-at-ms")
            if due is not None:
                late_ms.append(time.time() * 1000 - int(due))
    consumer.close()


def new_consumer(server: Server) -> Consumer:
    return Consumer({"bootstrap.servers": address(server), "group.id": "bench", **QUIET})


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


if __name__ == "__main__":
    main()
