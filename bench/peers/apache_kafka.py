"""Apache Kafka: one node that is broker and controller, from the jars that tools/peer_servers.sh downloads.

By default its acknowledgements do not wait for the disk. With `flush.messages=1` they do, which makes it a candidate of
equal durability; topics with the default are listed as weaker. Committed offsets are synced in both cases.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from bench.peers import kafka_client
from bench.peers.peer import TOOLS, Candidate, PeerUnavailableError, ServerLocation
from bench.peers.releases import of_jar
from bench.peers.server import Server, free_port, run_quietly

if TYPE_CHECKING:
    from pathlib import Path

JARS = TOOLS / "kafka"
HEAP = "-Xmx768m"
NEVER = str(2**63 - 1)
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory}/data
log.flush.interval.messages=1
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


SAME = frozenset({"consume100", "deliver100", "deliver1", "deliver100x4", "deliver1x4"})
"""What does not depend on when a topic is flushed."""


def serve(place: ServerLocation) -> Server:
    java = shutil.which("java")
    if java is None:
        raise PeerUnavailableError("no java on the PATH")
    if not list(JARS.glob("kafka_*.jar")):
        raise PeerUnavailableError(
            "no jars in .tools/kafka: tools/peer_servers.sh fetches them where mvn can reach its repository"
        )
    properties = place.directory / "server.properties"
    properties.write_text(
        PROPERTIES.format(port=place.port, controller_port=free_port(), directory=place.directory)
    )
    run = [java, HEAP, "-cp", f"{JARS}/*"]
    identity = uuid4().hex[:22]
    run_quietly(
        [*run, "kafka.tools.StorageTool", "format", "-t", identity, "-c", properties], cwd=place.directory
    )
    server = Server(place)
    server.start([*run, "kafka.Kafka", properties])
    server.wait_for_port()
    return server


def _jar(name: str) -> Path:
    (jar, *_) = JARS.glob(f"{name}-*.jar")
    return jar


class Driver(kafka_client.Driver):
    async def version(self) -> str:
        jar = _jar("kafka-clients")
        return f"{jar.stem.removeprefix('kafka-clients-')}, {await super().version()}"


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name=f"kafka-{name}",
            title=f"Apache Kafka, {title}",
            durability=durability,
            is_synced=is_synced,
            server="kafka",
            serve=serve,
            driver=partial(Driver, config={"flush.messages": flush}),
            confirmation=kafka_client.CONFIRMATION,
            released=lambda version: of_jar(_jar("kafka-clients")),
            skips=frozenset() if is_synced else SAME,
        )
        for name, is_synced, title, flush, durability in (
            ("flush1", True, "flush.messages=1", "1", "acks=all, flushed before the answer"),
            ("default", False, "default", NEVER, "acks=all: in the page cache of every replica in sync"),
        )
    ]
