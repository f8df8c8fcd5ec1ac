"""`python -m bench.delay_peers`: delayed messages of Mansio beside those of other queues, all durable.

    accept     messages per second in batches of 100, each acknowledged completely before the next, due at one moment
    drain      messages per second that a waiting consumer receives and acknowledges when that moment comes
    late       time from when a message is due until the consumer has it, with as many others pending that are due in an
               hour, while 5,000 are accepted per second and a tenth of them is due one to two seconds later

Producer, consumer and what a peer needs beside its server are processes of their own, with the peers' Python clients.
Servers are those of `bench.peers` (`make .venv/.peers`); one that is not found is left out, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.delays import address, create_topic, percentile
from bench.peers import beanstalkd, nats_jetstream, rabbitmq, redis_streams
from bench.peers.peer import TOOLS, PeerUnavailableError, ServerLocation
from bench.peers.server import Server, free_port
from bench.servers import start_mansio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

QUEUE: Final = "delayed"
VALUE_BYTES: Final = 100
BATCH: Final = 100
RATE_PER_S: Final = 5_000
TICK_RECORDS: Final = 50
DUE_EVERY: Final = 10
SECONDS: Final = 20
HOUR_MS: Final = 3_600_000
MOMENT_MS_MIN: Final = 15_000
ESTIMATED: Final = 2_000
"""Messages from whose acceptance is estimated how long that of all takes."""
QUIET_S: Final = 10.0
"""A consumer that has received nothing for so long has received everything."""

Message = tuple[bytes, int]
"""Value, whose first 13 digits are the due time, and due time in ms since the Unix epoch."""


class Publisher(Protocol):
    def publish(self, messages: Sequence[Message]) -> None:
        """Send messages and wait until all are acknowledged."""


class Peer(Protocol):
    """A server with a client. `extra`: a process beside the server; None if there is none."""

    name: str
    durability: str

    @property
    def extra(self) -> Callable[[], None] | None: ...

    def start(self, directory: Path) -> Any:
        """Start the server; the result has `stop` and `cpu_s`. Raises `PeerUnavailableError`."""

    def publisher(self) -> Publisher: ...

    def receive(self) -> Iterator[Sequence[bytes]]:
        """Yield values as they are delivered, acknowledged at the next call; nothing after a second without any."""


def message(due_ms: int, number: int) -> Message:
    return b"%013d %010d " % (due_ms, number) + bytes(VALUE_BYTES - 25), due_ms


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Mansio:
    name = "Mansio, confluent-kafka"
    durability = "fsync before each acknowledgement"
    extra = None

    def start(self, directory: Path) -> Any:
        server = start_mansio(directory / "data", None)
        create_topic(server)
        server.wait_idle()
        self.address = address(server)
        return server

    def publisher(self) -> Publisher:
        return _MansioPublisher(self.address)

    def receive(self) -> Iterator[Sequence[bytes]]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "bench",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(QUEUE, 0, 0)])
        while True:
            first = consumer.poll(1.0)
            found = [first, *consumer.consume(500, 0)] if first is not None else []
            found = [one for one in found if one.error() is None]
            yield [one.value() or b"" for one in found]
            if found:
                consumer.commit(asynchronous=True)


class _MansioPublisher:
    def __init__(self, servers: str) -> None:
        self.producer = Producer(
            {"bootstrap.servers": servers, "batch.num.messages": BATCH, "linger.ms": 1, "log_level": 0}
        )

    def publish(self, messages: Sequence[Message]) -> None:
        self.send(messages)
        self.producer.flush()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, without waiting for their acknowledgements."""
        for value, due_ms in messages:
            self.producer.produce(QUEUE, value, headers={"mansio-deliver-at-ms": b"%d" % due_ms})
        self.producer.poll(0)


class Redis:
    """A sorted set by due time, and a process that moves what is due to a stream every 10 ms, atomically."""

    name = "Redis, sorted set and poller"
    durability = "appendfsync always: fsync before each reply"
    SCRIPT = """
        local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 500)
        if #due > 0 then
            redis.call('ZREM', KEYS[1], unpack(due))
            for _, value in ipairs(due) do redis.call('XADD', KEYS[2], '*', 'v', value) end
        end
        return #due"""
    POLL_S = 0.01

    def start(self, directory: Path) -> Any:
        self.port = free_port()
        server = redis_streams.serve(ServerLocation(directory, self.port), "always")
        redis_streams.redis.Redis(port=self.port).xgroup_create("out", "g", id="0", mkstream=True)
        return server

    def extra(self) -> None:
        client = redis_streams.redis.Redis(port=self.port, protocol=2)
        move = client.register_script(self.SCRIPT)
        while True:
            if not move(keys=[QUEUE, "out"], args=[now_ms()]):
                time.sleep(self.POLL_S)

    def publisher(self) -> Publisher:
        return _RedisPublisher(self.port)

    def receive(self) -> Iterator[Sequence[bytes]]:
        client = redis_streams.redis.Redis(port=self.port, protocol=2)
        while True:
            found = client.xreadgroup("g", "m", {"out": ">"}, count=500, block=1000)
            records = found[0][1] if found else []
            yield [fields[b"v"] for _, fields in records]
            if records:
                client.xack("out", "g", *[identity for identity, _ in records])


class _RedisPublisher:
    def __init__(self, port: int) -> None:
        self.client = redis_streams.redis.Redis(port=port, protocol=2)

    def publish(self, messages: Sequence[Message]) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for value, due_ms in messages:
            pipeline.zadd(QUEUE, {value: due_ms})
        pipeline.execute()


class Beanstalkd:
    """`put` with a delay in whole seconds; the due time of a message is rounded up to them."""

    name = "beanstalkd -f0"
    durability = "fsync before each reply"
    extra = None

    def start(self, directory: Path) -> Any:
        self.port = free_port()
        return beanstalkd.serve(ServerLocation(directory, self.port))

    def publisher(self) -> Publisher:
        return _BeanstalkdPublisher(self.port)

    def receive(self) -> Iterator[Sequence[bytes]]:
        consumer = beanstalkd.Consumer(self.port, QUEUE, confirmed=False)
        while True:
            yield [b"%013d" % (int(value[:13]),) + value[13:] for value in consumer.reserve(100)]


class _BeanstalkdPublisher:
    def __init__(self, port: int) -> None:
        self.pipelined = beanstalkd.Pipelined(port)
        self.pipelined.ask(f"use {QUEUE}\r\n".encode(), 1, b"USING")

    def publish(self, messages: Sequence[Message]) -> None:
        begun_ms = now_ms()
        commands = []
        for value, due_ms in messages:
            delay_s = max(0, -(-(due_ms - begun_ms) // 1000))
            rounded = b"%013d" % (begun_ms + 1000 * delay_s) + value[13:]
            commands.append(b"put 1024 %d 600 %d\r\n%b\r\n" % (delay_s, len(rounded), rounded))
        self.pipelined.ask(b"".join(commands), len(commands), b"INSERTED")


class RabbitMQ:
    """A time to live per message and a dead-letter exchange. Messages expire only at the head of a queue, so messages
    that are due in an hour have a queue of their own, and the others have all the same time to live."""

    name = "RabbitMQ, TTL and dead letters"
    durability = "publisher confirms; dead letters of classic queues are moved without"
    extra = None
    FIXED_MS = 1500

    def start(self, directory: Path) -> Any:
        self.port = free_port()
        server = rabbitmq.serve(ServerLocation(directory, self.port))
        connection = rabbitmq.Driver(self.port, "classic").connect()
        channel = connection.channel()
        channel.queue_declare("out", durable=True)
        for queue in (QUEUE, "far"):
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "out"}
            channel.queue_declare(queue, durable=True, arguments=arguments)
        connection.close()
        return server

    def publisher(self) -> Publisher:
        return _RabbitPublisher(self.port)

    def receive(self) -> Iterator[Sequence[bytes]]:
        consumer = rabbitmq.Consumer(rabbitmq.Driver(self.port, "classic").connect(), "out")
        while True:
            bodies, tag = consumer.get(500)
            yield bodies
            if bodies:
                consumer.channel.basic_ack(tag, multiple=True)


class _RabbitPublisher(rabbitmq.Producer):
    def __init__(self, port: int) -> None:
        super().__init__(rabbitmq.Driver(port, "classic").connect(), QUEUE)
        self.unconfirmed: set[int] = set()

    def confirmed(self, frame: Any) -> None:
        """Confirms of two queues come in any order."""
        method = frame.method
        if not isinstance(method, rabbitmq.pika.spec.Basic.Ack):
            raise TypeError(f"RabbitMQ refused a message: {method}")
        if method.multiple:
            self.unconfirmed = {tag for tag in self.unconfirmed if tag > method.delivery_tag}
        else:
            self.unconfirmed.discard(method.delivery_tag)

    def publish(self, messages: Sequence[Message]) -> None:  # type: ignore[override]  # not a coroutine here
        begun_ms = now_ms()
        for value, due_ms in messages:
            delay_ms, queue, body = max(0, due_ms - begun_ms), QUEUE, value
            if delay_ms > HOUR_MS // 2:
                queue = "far"
            elif delay_ms <= 2 * RabbitMQ.FIXED_MS:
                delay_ms = RabbitMQ.FIXED_MS
                body = b"%013d" % (begun_ms + delay_ms) + value[13:]
            properties = rabbitmq.pika.BasicProperties(
                delivery_mode=rabbitmq.PERSISTENT, expiration=str(delay_ms)
            )
            self.batching.basic_publish("", queue, body, properties)
            self.sent += 1
            self.unconfirmed.add(self.sent)
        self.connection._flush_output(lambda: not self.unconfirmed)


class Nats:
    """Scheduled messages of a stream (`@at`, ADR 51): one per subject, so each message has its own subject."""

    name = "NATS JetStream, scheduled messages"
    durability = "sync_interval always: fsync before each acknowledgement"
    extra = None

    def start(self, directory: Path) -> Any:
        program = TOOLS / "nats" / "nats-server"
        if nats_jetstream.nats is None or not program.exists():
            raise PeerUnavailableError("no nats-server of version 2.12 or later in .tools/nats")
        self.port = free_port()
        configuration = directory / "nats.conf"
        configuration.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{directory}/jetstream"\n'
            "sync_interval: always\nmax_memory_store: 1GB\nmax_file_store: 20GB }\n"
        )
        server = Server(ServerLocation(directory, self.port))
        server.start([program, "-c", configuration])
        server.wait_for_port()
        asyncio.run(self._create())
        return server

    async def _create(self) -> None:
        connection = await nats_jetstream.nats.connect(f"nats://127.0.0.1:{self.port}")
        settings = {
            "name": QUEUE,
            "subjects": ["later.>", "out"],
            "storage": "file",
            "allow_msg_schedules": True,
            "allow_msg_ttl": True,
        }
        answer = await connection.request(f"$JS.API.STREAM.CREATE.{QUEUE}", json.dumps(settings).encode(), 10)
        created = json.loads(answer.data)
        if "error" in created:
            raise PeerUnavailableError(str(created["error"]))
        await connection.close()

    def publisher(self) -> Publisher:
        return _NatsPublisher(self.port)

    def receive(self) -> Iterator[Sequence[bytes]]:
        loop = asyncio.new_event_loop()
        connection, stream = loop.run_until_complete(nats_jetstream.Driver(self.port).connect())
        settings = nats_jetstream.api.ConsumerConfig(max_ack_pending=nats_jetstream.ACK_PENDING_MAX)
        subscribe = stream.pull_subscribe("out", durable="consumer", stream=QUEUE, config=settings)
        deliverer = nats_jetstream.Deliverer(connection, loop.run_until_complete(subscribe), 100)
        while True:
            yield loop.run_until_complete(deliverer.next())


class _NatsPublisher:
    def __init__(self, port: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.connection, self.stream = self.loop.run_until_complete(nats_jetstream.Driver(port).connect())
        self.number = 0

    def publish(self, messages: Sequence[Message]) -> None:
        self.loop.run_until_complete(self._publish(messages))

    async def _publish(self, messages: Sequence[Message]) -> None:
        sent = []
        for value, due_ms in messages:
            self.number += 1
            at = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec="milliseconds")
            headers = {"Nats-Schedule": f"@at {at.replace('+00:00', 'Z')}", "Nats-Schedule-Target": "out"}
            subject = f"later.{value[:24].decode().replace(' ', '-')}.{self.number}"
            sent.append(await self.stream.publish_async(subject, value, headers=headers))
        await asyncio.gather(*sent)


PEERS: Final[dict[str, Callable[[], Peer]]] = {
    "mansio": Mansio,
    "redis": Redis,
    "beanstalkd": Beanstalkd,
    "rabbitmq": RabbitMQ,
    "nats": Nats,
}


class _Process:
    """A function in a process of its own, whose results arrive by a pipe."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._results, results = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_send_result, args=(results, work, arguments), daemon=True
        )
        self._process.start()

    def result(self, timeout_s: float = 900) -> Any:
        if not self._results.poll(timeout_s):
            raise TimeoutError("a process of the benchmark has no result")
        found = self._results.recv()
        self._process.join()
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def _send_result(results: Any, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        results.send(work(*arguments))
    except Exception as error:  # noqa: BLE001  # reported by the other process
        results.send(error)


def fill(peer: Peer, count: int, due_ms: int) -> float:
    """Publish messages that are due at one moment; returns how many were accepted per second."""
    publisher = peer.publisher()
    began = time.monotonic()
    for first in range(0, count, BATCH):
        publisher.publish([message(due_ms, number) for number in range(first, first + BATCH)])
    return count / (time.monotonic() - began)


def publish_steadily(peer: Peer) -> tuple[int, float]:
    """Publish `RATE_PER_S`; returns how many are due soon, and the rate that was reached."""
    publisher = peer.publisher()
    send = getattr(publisher, "send", publisher.publish)
    began, number, due_count = time.monotonic(), 0, 0
    while number < RATE_PER_S * SECONDS and time.monotonic() < began + 2 * SECONDS:
        batch = []
        for _ in range(TICK_RECORDS):
            number += 1
            is_soon = number % DUE_EVERY == 0
            due_count += is_soon
            batch.append(message(now_ms() + (1000 + number % 1000 if is_soon else HOUR_MS), 10**9 + number))
        send(batch)
        time.sleep(max(0.0, began + number / RATE_PER_S - time.monotonic()))
    publisher.publish([message(now_ms() + HOUR_MS, 10**9)])
    return due_count, number / (time.monotonic() - began)


def receive(peer: Peer, wanted: int, wait_s: float) -> list[tuple[int, int]]:
    """Receive until `wanted` messages have come, or none for a time: when each was due, and when it came, in ms."""
    found: list[tuple[int, int]] = []
    until = time.monotonic() + wait_s
    for values in peer.receive():
        came_ms = now_ms()
        found += [(int(value[:13]), came_ms) for value in values]
        if values:
            until = max(until, time.monotonic() + QUIET_S)
        if len(found) >= wanted or time.monotonic() > until:
            return found
    return found


def measure(peer: Peer, count: int, directory: Path) -> dict[str, float]:
    directory.mkdir()
    result: dict[str, float] = {}
    (directory / "burst").mkdir()
    server = peer.start(directory / "burst")
    extra = None if peer.extra is None else _Process(peer.extra)
    try:
        estimated = _Process(fill, peer, ESTIMATED, now_ms() + 2 * HOUR_MS).result()
        wait_ms = MOMENT_MS_MIN + round(2_000 * count / estimated)
        due_ms = now_ms() + wait_ms
        consumer = _Process(receive, peer, count, wait_ms / 1000 + QUIET_S)
        result["accept"] = _Process(fill, peer, count, due_ms).result()
        if now_ms() > due_ms:
            raise RuntimeError(f"{peer.name} did not accept the messages before they were due")
        found = consumer.result()
        latest_ms = max(came_ms for _, came_ms in found)
        result["received"] = len(found)
        result["drain"] = len(found) * 1000 / (latest_ms - max(due_ms, min(due for due, _ in found)))
    finally:
        if extra is not None:
            extra.stop()
        server.stop()
    (directory / "late").mkdir()
    server = peer.start(directory / "late")
    extra = None if peer.extra is None else _Process(peer.extra)
    try:
        _Process(fill, peer, count, now_ms() + HOUR_MS + 600_000).result()
        cpu_s = server.cpu_s()
        consumer = _Process(receive, peer, RATE_PER_S * SECONDS // DUE_EVERY, SECONDS + QUIET_S)
        due_count, result["rate"] = _Process(publish_steadily, peer).result()
        late_ms = [came_ms - due_ms for due_ms, came_ms in consumer.result()]
        result["cpu_s"] = server.cpu_s() - cpu_s
        result["missing"] = due_count - len(late_ms)
        result |= {
            "late_p50": statistics.median(late_ms),
            "late_p99": percentile(late_ms, 99),
            "late_max": max(late_ms),
            "late_min": min(late_ms),
        }
    finally:
        if extra is not None:
            extra.stop()
        server.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000, help="pending messages")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, in this order")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for repetition in range(arguments.repetitions):
            for name in arguments.peers.split(","):
                peer = PEERS[name]()
                try:
                    one = measure(peer, arguments.records, Path(directory) / f"{name}-{repetition}")
                except (PeerUnavailableError, RuntimeError, TimeoutError) as error:
                    print(f"{peer.name}: {error}", flush=True)
                    continue
                print(
                    f"{peer.name}: {json.dumps({key: round(value, 1) for key, value in one.items()})}",
                    flush=True,
                )
                found.setdefault(name, []).append(one)
    for name, results in found.items():
        peer = PEERS[name]()
        shown = [
            f"{key} {statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
            for key in results[0]
            for values in [[one[key] for one in results]]
        ]
        print(f"{peer.name} ({peer.durability}): {', '.join(shown)}")


if __name__ == "__main__":
    main()
