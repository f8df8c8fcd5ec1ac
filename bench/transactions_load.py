"""Load generator of `bench.transactions`: one run in a process of its own; the result is one JSON line.

The client is confluent-kafka (librdkafka). Requests of each kind are counted by the client's statistics, so that a
request that was sent again because of a retriable error is seen with every broker.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce as produce_api
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.codec import messages

VALUE = bytes(100)
BATCH = 100
STATISTICS_MS = 100
DEADLINE_S = 60.0
RETRY_S = 0.02
RETRIABLE = (3, 5, 6, 14, 15, 16, 51)
"""Unknown partition, no leader, not the leader, coordinator loads or is not there, concurrent transactions."""
BATCHES = {count: [{"value": VALUE}] * count for count in (1, BATCH, 20 * BATCH)}
COUNTED = ("Produce", "AddPartitionsToTxn", "EndTxn", "InitProducerId")


class CountedProducer:
    """A producer whose requests are counted."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        self.requests: Counter[str] = Counter()
        self.retries = 0
        self._statistics = 0
        shared = {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "batch.num.messages": BATCH,
            # Longer, and librdkafka waits for it after each AddPartitionsToTxn, although the batches are full.
            "linger.ms": 0,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": self._count,
            "log_level": 0,
        }
        self.producer = Producer({**shared, **options})

    def _count(self, text: str) -> None:
        brokers = json.loads(text)["brokers"].values()
        self.requests = Counter({name: sum(each["req"].get(name, 0) for each in brokers) for name in COUNTED})
        self.retries = sum(each["txretries"] for each in brokers)
        self._statistics += 1

    def produce(self, topic: str, count: int, partition: int = 0) -> None:
        self.producer.produce_batch(topic, BATCHES[count], partition)

    def counts(self) -> dict[str, int]:
        """Return the number of requests so far; waits for statistics that began after this call."""
        wanted, end = self._statistics + 2, time.monotonic() + DEADLINE_S
        while self._statistics < wanted and time.monotonic() < end:
            self.producer.poll(0.05)
        return {**self.requests, "retries": self.retries}


class Reader(threading.Thread):
    """Reads a new topic with `read_committed`, and notes when each record arrived."""

    def __init__(self, port: int, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._consumer = Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{port}",
                "group.id": "unused",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        starts = [TopicPartition(topic, index, 0) for index in range(partitions)]
        self._consumer.assign(starts)
        self._arrived = threading.Condition()
        self._times: list[float] = []
        self._ends = False

    def run(self) -> None:
        while not self._ends:
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                now = time.perf_counter()
                with self._arrived:
                    self._times.append(now)
                    self._arrived.notify_all()
        self._consumer.close()

    def wait_for(self, count: int) -> float:
        """Wait until `count` records have arrived in total; return when the last of them did."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._times) >= count, DEADLINE_S):
                raise TimeoutError(f"{len(self._times)} records of {count} arrived")
            return self._times[count - 1]

    def close(self) -> None:
        self._ends = True
        self.join(DEADLINE_S)


def produce(spec: dict[str, Any]) -> dict[str, Any]:
    """Produce batches. `per_transaction`: batches in a transaction; `per_flush`: batches until the producer waits for
    their acknowledgements; 0 for none, which is one stream of batches."""
    batches, per_transaction, per_flush = spec["batches"], spec["per_transaction"], spec["per_flush"]
    counted = CountedProducer(spec["port"], {"transactional.id": spec["topic"]} if per_transaction else {})
    producer = counted.producer
    per_round = per_transaction or per_flush or batches
    if per_transaction:
        producer.init_transactions()

    def run(rounds: int) -> None:
        for _ in range(rounds):
            if per_transaction:
                producer.begin_transaction()
            for _ in range(per_round):
                counted.produce(spec["topic"], BATCH)
                producer.poll(0)
            if per_transaction:
                producer.commit_transaction()
            elif per_flush:
                producer.flush()
        producer.flush()

    if per_transaction or per_flush:
        run(max(1, 20 // per_round))
    else:
        counted.produce(spec["topic"], 20 * BATCH)
        producer.flush()
    before, begun, began, cpu = counted.counts(), time.time(), time.perf_counter(), time.process_time()
    run(batches // per_round)
    seconds, cpu, ended = time.perf_counter() - began, time.process_time() - cpu, time.time()
    after = counted.counts()
    return {
        "began": begun,
        "ended": ended,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "records": batches * BATCH,
        "transactions": batches // per_transaction if per_transaction else 0,
        "requests": {name: after[name] - before[name] for name in after},
    }


def commit(spec: dict[str, Any]) -> dict[str, Any]:
    """Commit transactions with one record in each partition, one after the other; the records are acknowledged before
    the commit. With `reads`, a reader waits for the records of each transaction."""
    partitions, count = spec["partitions"], spec["transactions"]
    counted = CountedProducer(spec["port"], {"transactional.id": spec["topic"], "linger.ms": 0})
    producer = counted.producer
    producer.init_transactions()
    reader = Reader(spec["port"], spec["topic"], partitions) if spec["reads"] else None
    if reader is not None:
        reader.start()
    warm_up = min(20, count)
    commits, readable = [], []
    before: dict[str, int] = {}
    begun = 0.0
    for number in range(warm_up + count):
        if number == warm_up:
            before, begun = counted.counts(), time.time()
        producer.begin_transaction()
        for index in range(partitions):
            counted.produce(spec["topic"], 1, index)
        producer.flush()
        began = time.perf_counter()
        producer.commit_transaction()
        ended = time.perf_counter()
        if reader is not None:
            arrived = reader.wait_for((number + 1) * partitions)
            readable.append(arrived - began)
        commits.append(ended - began)
    finished = time.time()
    after = counted.counts()
    if reader is not None:
        reader.close()
    return {
        "began": begun,
        "ended": finished,
        "commit_s": commits[warm_up:],
        "readable_s": readable[warm_up:],
        "transactions": count,
        "requests": {name: after[name] - before[name] for name in after},
    }


class Line:
    """A connection without a client library: one request at a time. It speaks the protocol of KIP-890, in which a batch
    adds its partition, and the end returns the epoch of the next transaction."""

    def __init__(self, port: int, transactional_id: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._transactional_id = transactional_id
        self.retries = 0
        wanted = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000, "producer_id": -1}
        self._ask(ApiKey.FIND_COORDINATOR, 4, {"key_type": 1, "coordinator_keys": [transactional_id]})
        answer = self._ask(ApiKey.INIT_PRODUCER_ID, 5, {**wanted, "producer_epoch": -1})
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch

    def _ask(self, api_key: int, version: int, fields: dict[str, Any]) -> Any:
        """Send a request until its answer has no retriable error."""
        request = messages.encode_request(api_key, version, 1, "bench", fields)
        while True:
            self._socket.sendall(request)
            _, answer = messages.decode_response_frame(api_key, version, self._frame())
            code = getattr(answer, "error_code", 0)
            if code not in RETRIABLE:
                break
            self._pause()
        if code:
            raise RuntimeError(f"error {code} of request {api_key}")
        return answer

    def _frame(self) -> bytes:
        return self._file.read(int.from_bytes(self._file.read(4), "big"))

    def _pause(self) -> None:
        self.retries += 1
        time.sleep(RETRY_S)

    def produce(self, topic: str) -> None:
        """Produce one record as the first batch of a transaction."""
        now_ms = time.time_ns() // 1_000_000
        batch = build_batch(
            [(now_ms, None, VALUE, ())],
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=0,
            transactional=True,
        )
        topics = [(topic, None, [(0, batch)])]
        request = b"".join(
            map(bytes, produce_api.encode_request(12, 1, "bench", -1, 30_000, topics, self._transactional_id))
        )
        while True:
            self._socket.sendall(request)
            code = produce_api.decode_response(12, self._frame()).topics[0][2][0].error_code
            if code not in RETRIABLE:
                break
            self._pause()
        if code:
            raise RuntimeError(f"error {code} of a batch")

    def end(self) -> float:
        """Commit; return the seconds until the answer."""
        fields = {
            "transactional_id": self._transactional_id,
            "producer_id": self._producer_id,
            "producer_epoch": self._epoch,
            "committed": True,
        }
        began = time.perf_counter()
        answer = self._ask(ApiKey.END_TXN, 5, fields)
        seconds = time.perf_counter() - began
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
        return seconds


def end(spec: dict[str, Any]) -> dict[str, Any]:
    """As `commit` in one partition, on a connection without a client library: the time of EndTxn alone."""
    line = Line(spec["port"], spec["topic"])
    warm_up = min(20, spec["transactions"])
    ends = []
    retries = 0
    for number in range(warm_up + spec["transactions"]):
        if number == warm_up:
            retries = line.retries
        line.produce(spec["topic"])
        ends.append(line.end())
    return {
        "commit_s": ends[warm_up:],
        "transactions": spec["transactions"],
        "requests": {"retries": line.retries - retries},
    }


def behind(spec: dict[str, Any]) -> dict[str, Any]:
    """Produce records without a transaction, behind an open transaction of the same partition if `open`, while a reader
    with `read_committed` waits. Two rounds; the process prints a line after each, and goes on when it reads one."""
    topic, count = spec["topic"], spec["records"]
    transactional = CountedProducer(
        spec["port"], {"transactional.id": topic, "transaction.timeout.ms": 600_000}
    )
    transactional.producer.init_transactions()
    if spec["open"]:
        transactional.producer.begin_transaction()
        transactional.produce(topic, 1)
        transactional.producer.flush()
    reader = Reader(spec["port"], topic, 1)
    reader.start()
    plain = CountedProducer(spec["port"], {"batch.num.messages": 100})
    for _ in range(2):
        for _ in range(count // BATCH):
            plain.produce(topic, BATCH)
            plain.producer.poll(0)
            while len(plain.producer) > 50_000:
                plain.producer.poll(0.05)
        plain.producer.flush()
        print("stored", flush=True)
        sys.stdin.readline()
    if spec["open"]:
        transactional.producer.commit_transaction()
    reader.close()
    return {}


KINDS = {"produce": produce, "commit": commit, "end": end, "behind": behind}


def main() -> None:
    spec = json.loads(sys.argv[1])
    print(json.dumps(KINDS[spec["kind"]](spec)), flush=True)


if __name__ == "__main__":
    main()
