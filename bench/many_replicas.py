"""Three brokers with many replicas each, as processes: creation, memory, idle time, fail-over, start.

    python -m bench.many_replicas [--partitions N] [--topics N] [--runs N] [--directory DIR]

Each partition has three replicas, so each broker has one of every partition. The brokers and etcd run on this machine,
brokers with 1,024 open files. After the topics are created, one broker is killed, and a record is produced with
acks=all to each partition that it led; then it starts again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mansio
from bench.interpreter import interpreter
from bench.servers import Server, free_port
from mansio.client.producer.producer import ProducerOptions
from mansio.config.settings import Settings
from mansio.node.etcd_member.executable import find_program
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.client import Client
    from mansio.client.producer.producer import Producer

BROKERS: Final = 3
OPEN_FILES: Final = 1024
IDLE_S: Final = 20.0
SETTLED_S_MAX: Final = 600.0
SESSION_S: Final = Settings().broker_session_timeout_ms / 1000


@dataclass
class Figures:
    """What one run measured. Processor times are those of all brokers together."""

    partitions: int
    created_s: float = 0.0
    created_processor_s: float = 0.0
    replica_kb: float = 0.0
    """Resident memory of a broker for each of its replicas."""
    idle_share: float = 0.0
    """Share of a processor that a broker uses without any client."""
    moved: int = 0
    """Partitions that the killed broker led."""
    produced_s: float = 0.0
    """Time from the kill until a record was acknowledged by the new leader of each of them."""
    start_s: float = 0.0
    """Time until the killed broker is ready again."""
    start_processor_s: float = 0.0
    in_sync_s: float = 0.0
    """Time from its start until its replicas are in sync."""


class Cluster:
    """Three brokers and etcd."""

    def __init__(self, directory: Path, partitions: int, stack: ExitStack) -> None:
        self._directory = directory
        self._partitions = partitions
        self._stack = stack
        self._etcd_url = f"http://127.0.0.1:{free_port()}"
        peer_url = f"http://127.0.0.1:{free_port()}"
        command = [find_program().path, "--name", "one", "--data-dir", str(directory / "etcd" / "data")]
        command += ["--listen-client-urls", self._etcd_url, "--advertise-client-urls", self._etcd_url]
        command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        command += ["--initial-cluster", f"one={peer_url}"]
        stack.callback(Server(command, 0, directory / "etcd", None, b"ready to serve client requests").stop)
        self._ports = {node_id: free_port() for node_id in range(1, BROKERS + 1)}
        self.brokers: dict[int, Server] = {}
        for node_id in self._ports:
            self.start(node_id)

    @property
    def bootstrap_servers(self) -> str:
        """Addresses of all brokers."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def start(self, node_id: int) -> Server:
        """Start a broker with the data that it has."""
        data, port = self._directory / f"broker-{node_id}", self._ports[node_id]
        command = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh"]
        command += [
            shutil.which("mansio") or "mansio",
            "serve",
            "--node-id",
            str(node_id),
            "--data",
            str(data),
        ]
        command += ["--kafka", f"127.0.0.1:{port}", "--http", "", "--etcd", self._etcd_url]
        for setting in (f"partitions_max={2 * self._partitions}", f"default_replication_factor={BROKERS}"):
            command += ["--set", setting]
        broker = self.brokers[node_id] = Server(command, port, data, None, b" ready kafka=")
        self._stack.callback(broker.stop)
        return broker

    def processor_s(self) -> float:
        """Processor time of all brokers that run."""
        return sum(broker.cpu_s() for broker in self.brokers.values() if broker.process.poll() is None)

    def resident_bytes(self) -> int:
        """Resident memory of the largest broker."""
        return max(broker.resident_bytes() for broker in self.brokers.values())


async def _wait_in_sync(client: Client, partitions: int) -> None:
    end = time.monotonic() + SETTLED_S_MAX
    while True:
        found = [one for one in await client.admin.cluster.partitions() if not one.is_internal]
        if len(found) == partitions and all(len(one.in_sync_replicas) == BROKERS for one in found):
            return
        if time.monotonic() > end:
            raise TimeoutError("the replicas are not in sync")
        await asyncio.sleep(1)


async def _produce(producer: Producer, places: Sequence[tuple[str, int]]) -> None:
    """Produce a record to each place, and return when all are acknowledged."""
    for delivery in [await producer.send(topic, b"x", partition=index) for topic, index in places]:
        await delivery


async def measure(cluster: Cluster, partitions: int, topics: int) -> Figures:
    """Run all steps."""
    figures = Figures(partitions)
    for broker in cluster.brokers.values():
        broker.wait_idle()
    empty_bytes = cluster.resident_bytes()
    async with mansio.connect(cluster.bootstrap_servers) as client:
        began, used = time.monotonic(), cluster.processor_s()
        for number in range(topics):
            await client.admin.create_topic(f"topic-{number}", partitions=partitions // topics)
        await _wait_in_sync(client, partitions)
        figures.created_s = time.monotonic() - began
        figures.created_processor_s = cluster.processor_s() - used
        await asyncio.sleep(IDLE_S / 4)  # until the first heartbeats and checkpoints are over
    figures.replica_kb = (cluster.resident_bytes() - empty_bytes) / 1000 / partitions
    used = cluster.processor_s()
    await asyncio.sleep(IDLE_S)
    figures.idle_share = (cluster.processor_s() - used) / IDLE_S / BROKERS
    async with (
        mansio.connect(cluster.bootstrap_servers) as client,
        client.producer(ProducerOptions(acks="all")) as producer,
    ):
        status = await client.admin.cluster.status()
        victim = next(node_id for node_id in cluster.brokers if node_id != status.controller_id)
        places = [
            (one.topic, one.partition)
            for one in await client.admin.cluster.partitions()
            if one.leader == victim and not one.is_internal
        ]
        figures.moved = len(places)
        await _produce(producer, places)
        began = time.monotonic()
        cluster.brokers[victim].process.kill()
        cluster.brokers[victim].process.wait()
        await _produce(producer, places)
        figures.produced_s = time.monotonic() - began
        await asyncio.sleep(SESSION_S)
        began = time.monotonic()
        broker = await asyncio.to_thread(cluster.start, victim)
        figures.start_s, figures.start_processor_s = broker.ready_s, broker.cpu_s()
        await _wait_in_sync(client, partitions)
        figures.in_sync_s = time.monotonic() - began
    return figures


def run(directory: Path, partitions: int, topics: int) -> Figures:
    """Start a cluster in `directory`, and measure it."""
    with ExitStack() as stack:
        return asyncio.run(measure(Cluster(directory, partitions, stack), partitions, topics))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--topics", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--directory", help="parent of the temporary data directory")
    chosen = parser.parse_args()
    print(f"Mansio {__version__}, Python {interpreter()}, {len(os.sched_getaffinity(0))} processors")
    for _ in range(chosen.runs):
        with tempfile.TemporaryDirectory(prefix="mansio-replicas-", dir=chosen.directory) as directory:
            load = os.getloadavg()[0]
            figures = run(Path(directory), chosen.partitions, chosen.topics)
        rounded = {name: round(value, 3) for name, value in dataclasses.asdict(figures).items()}
        print(f"load {load:.1f} to {os.getloadavg()[0]:.1f}: {rounded}", flush=True)


if __name__ == "__main__":
    main()
