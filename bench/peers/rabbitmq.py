"""RabbitMQ: durable classic and quorum queues, persistent messages, publisher confirms.

Single messages wait for their confirm; of a batch all confirms are outstanding at once, which needs the asynchronous
channel below pika's blocking connection. A consumer's acknowledgements have no response in AMQP.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.peer import TAKE_WAIT_S, TOOLS, Candidate, PeerUnavailableError, ServerLocation
from bench.peers.releases import of_debian
from bench.peers.server import Server, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    import pika
except ImportError:
    pika = None  # reported when it is measured

PERSISTENT = 2
CLASSIC = "classic"
PREFETCH = 1000
WRAPPER = """#!/bin/sh
export ROOTDIR="{erlang}" BINDIR="{runtime}/bin" EMU=beam PROGNAME=erl
export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$BINDIR/erlexec" "$@"
"""
"""Debian's `erl` has the place it was built for written into it; this one has the place where it was found."""


def serve(place: ServerLocation) -> Server:
    if pika is None:
        raise PeerUnavailableError("no Python package pika")
    program = _found("lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
    runtime = _found("lib/erlang/erts-*")
    libraries = ":".join(sorted({str(path.parent) for path in (TOOLS / "root").glob("**/*.so.*")}))
    binaries = place.directory / "bin"
    binaries.mkdir()
    erl = binaries / "erl"
    erl.write_text(WRAPPER.format(erlang=runtime.parent, runtime=runtime, libraries=libraries))
    erl.chmod(0o755)
    (place.directory / "plugins").write_text("[].\n")
    (place.directory / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{place.port}\n")
    names_port = free_port()
    environment = {
        "PATH": f"{binaries}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(place.directory),
        "RABBITMQ_MNESIA_BASE": str(place.directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(place.directory / "log"),
        "RABBITMQ_NODENAME": f"peer{place.port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(place.directory / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(place.directory / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
    }
    server = Server(place)
    # Erlang's name service would otherwise be started as a daemon, and outlive its node.
    names: list[str | Path | int] = [runtime / "bin" / "epmd", "-port", names_port, "-address", "127.0.0.1"]
    server.start(names, environment=environment, is_traced=False)
    server.wait_for_port(names_port)
    server.start([program], environment=environment)
    server.wait_for_port()
    return server


def _found(pattern: str) -> Path:
    for root in (TOOLS / "root/usr", Path("/usr")):
        for path in sorted(root.glob(pattern), reverse=True):
            return path
    raise PeerUnavailableError(f"no {pattern} in .tools/root/usr or /usr")


class Driver:
    def __init__(self, port: int, kind: str) -> None:
        self.port, self.kind = port, kind

    def connect(self) -> Any:
        return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port, heartbeat=0))

    async def version(self) -> str:
        connection = self.connect()
        version = connection._impl.server_properties["version"]
        connection.close()
        return f"{version}, pika {pika.__version__}"

    async def create(self, queue: str) -> None:
        connection = self.connect()
        connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": self.kind})
        connection.close()

    async def delete(self, queue: str) -> None:
        connection = self.connect()
        connection.channel().queue_delete(queue)
        connection.close()

    async def producer(self, queue: str) -> Producer:
        return Producer(self.connect(), queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        return Consumer(self.connect(), queue)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        consumer = Consumer(self.connect(), queue, PREFETCH if count > 1 else 1)
        return Deliverer(consumer, queue, count, asks=self.kind == CLASSIC)


class Producer:
    def __init__(self, connection: Any, queue: str) -> None:
        self.connection, self.queue = connection, queue
        self.properties = pika.BasicProperties(delivery_mode=PERSISTENT)
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.batching = connection.channel()._impl
        self.batching.confirm_delivery(ack_nack_callback=self.confirmed)
        self.sent = self.acknowledged = 0

    def confirmed(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, pika.spec.Basic.Ack):
            raise TypeError(f"RabbitMQ refused a message: {method}")
        self.acknowledged = method.delivery_tag if method.multiple else self.acknowledged + 1

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            self.channel.basic_publish("", self.queue, values[0], self.properties)
            return
        for value in values:
            self.batching.basic_publish("", self.queue, value, self.properties)
        self.sent += len(values)
        self.connection._flush_output(lambda: self.acknowledged >= self.sent)

    async def close(self) -> None:
        self.connection.close()


class Consumer:
    """Messages are pushed, up to a prefetch; what is taken together is acknowledged together."""

    def __init__(self, connection: Any, queue: str, prefetch: int = PREFETCH) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.channel.basic_qos(prefetch_count=prefetch)
        self.messages = self.channel.consume(queue, inactivity_timeout=TAKE_WAIT_S)

    async def take(self, count: int) -> list[bytes]:
        bodies, tag = self.get(count)
        if bodies:
            self.channel.basic_ack(tag, multiple=True)
        return bodies

    def get(self, count: int) -> tuple[list[bytes], int]:
        """What is there, at most so many, and the tag of the last."""
        method, _, body = next(self.messages)
        if method is None:
            return [], 0
        bodies = [body]
        while len(bodies) < count and self.channel.get_waiting_message_count():
            method, _, body = next(self.messages)
            bodies.append(body)
        return bodies, method.delivery_tag

    async def close(self) -> None:
        self.connection.close()


class Deliverer:
    """AMQP has no answer to an acknowledgement. One message at a time has a prefetch of one: a quorum queue sends the
    next one when the command of the acknowledgement has been written to its log and applied. A classic queue is sent
    one by the connection's channel, which does not wait for the queue; `asks`: a request that the queue itself answers
    follows the acknowledgement."""

    def __init__(self, consumer: Consumer, queue: str, count: int, *, asks: bool) -> None:
        self.consumer, self.queue, self.count, self.tag = consumer, queue, count, 0
        self.asks = asks and count == 1

    async def next(self) -> list[bytes]:
        is_due = self.asks and bool(self.tag)
        self._acknowledge()
        if is_due:
            self.consumer.channel.queue_declare(self.queue, passive=True)
        bodies, self.tag = self.consumer.get(self.count)
        return bodies

    def _acknowledge(self) -> None:
        if self.tag:
            self.consumer.channel.basic_ack(self.tag, multiple=True)
            self.tag = 0

    async def acknowledge(self) -> None:
        self._acknowledge()
        self.consumer.channel.basic_qos(
            prefetch_count=PREFETCH if self.count > 1 else 1
        )  # an answer: a round trip

    async def close(self) -> None:
        await self.consumer.close()


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name=f"rabbitmq-{kind}",
            title=f"RabbitMQ, {kind} queue",
            durability=durability,
            is_synced=True,
            server="rabbitmq",
            serve=serve,
            driver=partial(Driver, kind=kind),
            confirmation=confirmation,
            released=partial(of_debian, "rabbitmq-server"),
        )
        for kind, durability, confirmation in (
            (
                CLASSIC,
                "persistent messages, publisher confirms after fsync",
                "the answer to a passive queue.declare, which the queue gives after the acknowledgement",
            ),
            (
                "quorum",
                "Raft log of one member, fdatasync before the confirm",
                "the next message: the queue sends it when its log has the acknowledgement (prefetch of one)",
            ),
        )
    ]
