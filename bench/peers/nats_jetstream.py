"""NATS JetStream: a file stream, synced before every acknowledgement or every two minutes (its default).

The server of Debian 12 (2.9) supports only the latter; `sync_interval: always` was added in 2.10. A newer server built
into .tools/nats (`tools/peer_servers.sh`) is preferred.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.peers.peer import TAKE_WAIT_S, TOOLS, Candidate, PeerUnavailableError, ServerLocation, find_program
from bench.peers.releases import of_debian, of_go_module
from bench.peers.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

try:
    import nats
    from nats.js import api
except ImportError:
    nats = None  # reported when it is measured

SYNC_ALWAYS_SINCE = (2, 10)
UNACKNOWLEDGED_MAX = 4000
PENDING_BYTES = 64 << 20
ACK_PENDING_MAX = 20_000
ACK_DEADLINE_S = 20.0


def server_program() -> str:
    return shutil.which(str(TOOLS / "nats" / "nats-server")) or find_program("nats-server")


def server_version() -> tuple[int, ...]:
    said = subprocess.run([server_program(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def released(version: str) -> date | None:
    built = TOOLS / "nats" / "module.info"
    return of_go_module(built) if built.exists() else of_debian("nats-server", version)


def serve(place: ServerLocation, *, is_synced: bool) -> Server:
    if nats is None:
        raise PeerUnavailableError("no Python package nats-py")
    version = server_version()
    if is_synced and version < SYNC_ALWAYS_SINCE:
        shown = ".".join(map(str, version))
        raise PeerUnavailableError(
            f"nats-server {shown} cannot sync before an acknowledgement, 2.10 and later can"
        )
    configuration = place.directory / "nats.conf"
    sync = "sync_interval: always" if is_synced else ""
    configuration.write_text(
        f'listen: "127.0.0.1:{place.port}"\njetstream {{ store_dir: "{place.directory}/jetstream"\n{sync}\n'
        "max_memory_store: 1GB\nmax_file_store: 20GB }\n"
    )
    server = Server(place)
    server.start([server_program(), "-c", configuration])
    server.wait_for_port()
    return server


class Driver:
    def __init__(self, port: int) -> None:
        self.address = f"nats://127.0.0.1:{port}"

    async def connect(self) -> tuple[Any, Any]:
        connection = await nats.connect(self.address, pending_size=PENDING_BYTES)
        return connection, connection.jetstream(publish_async_max_pending=UNACKNOWLEDGED_MAX)

    async def version(self) -> str:
        connection, _ = await self.connect()
        server = connection.connected_server_version
        version = f"{server.major}.{server.minor}.{server.patch}, nats-py {nats.aio.client.__version__}"
        await connection.close()
        return version

    async def create(self, queue: str) -> None:
        connection, stream = await self.connect()
        await stream.add_stream(
            name=queue,
            subjects=[queue],
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.LIMITS,
            duplicate_window=1,
        )
        await connection.close()

    async def delete(self, queue: str) -> None:
        connection, stream = await self.connect()
        await stream.delete_stream(queue)
        await connection.close()

    async def producer(self, queue: str) -> Producer:
        return Producer(*await self.connect(), queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> PullConsumer | PushConsumer:
        connection, stream = await self.connect()
        settings = api.ConsumerConfig(max_ack_pending=ACK_PENDING_MAX)
        if confirmed:
            pulled = await stream.pull_subscribe(queue, durable="consumer", stream=queue, config=settings)
            return PullConsumer(connection, pulled)
        pushed = await stream.subscribe(
            queue, durable="consumer", stream=queue, manual_ack=True, config=settings
        )
        return PushConsumer(connection, pushed)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        connection, stream = await self.connect()
        settings = api.ConsumerConfig(max_ack_pending=ACK_PENDING_MAX)
        pulled = await stream.pull_subscribe(queue, durable="consumer", stream=queue, config=settings)
        return Deliverer(connection, pulled, count)


class Producer:
    def __init__(self, connection: Any, stream: Any, queue: str) -> None:
        self.connection, self.stream, self.queue = connection, stream, queue

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            await self.stream.publish(self.queue, values[0])
            return
        await asyncio.gather(*[await self.stream.publish_async(self.queue, value) for value in values])

    async def close(self) -> None:
        await self.connection.close()


class PullConsumer:
    """Only `ack_sync` has an answer, and is a round trip; acknowledgements are handled in order, so the last of a batch
    is acknowledged in this way."""

    def __init__(self, connection: Any, subscription: Any) -> None:
        self.connection, self.subscription = connection, subscription

    async def take(self, count: int) -> list[bytes]:
        try:
            messages = await self.subscription.fetch(count, timeout=TAKE_WAIT_S)
        except nats.errors.TimeoutError:
            return []
        for message in messages[:-1]:
            await message.ack()
        await messages[-1].ack_sync()
        return [message.data for message in messages]

    async def close(self) -> None:
        await self.connection.close()


class PushConsumer:
    """Receives pushed messages, and acknowledges one by one without waiting for a response."""

    def __init__(self, connection: Any, subscription: Any) -> None:
        self.connection, self.subscription = connection, subscription

    async def take(self, count: int) -> list[bytes]:
        try:
            message = await self.subscription.next_msg(timeout=TAKE_WAIT_S)
        except nats.errors.TimeoutError:
            return []
        await message.ack()
        return [message.data]

    async def close(self) -> None:
        await self.connection.close()


class Deliverer:
    """Sends the pull of the next batch together with the acknowledgements, the last of which has a response; returns
    the next batch when both have arrived."""

    def __init__(self, connection: Any, subscription: Any, count: int) -> None:
        self.connection, self.subscription, self.count = connection, subscription, count
        self.unacknowledged: list[Any] = []

    async def next(self) -> list[bytes]:
        _, messages = await asyncio.gather(self.acknowledge(), self._fetch())
        self.unacknowledged = messages
        return [message.data for message in messages]

    async def _fetch(self) -> list[Any]:
        try:
            return await self.subscription.fetch(self.count, timeout=TAKE_WAIT_S)
        except TimeoutError:
            return []

    async def acknowledge(self) -> None:
        messages, self.unacknowledged = self.unacknowledged, []
        for message in messages[:-1]:
            await message.ack()
        if messages:
            await messages[-1].ack_sync(timeout=ACK_DEADLINE_S)

    async def close(self) -> None:
        await self.connection.close()


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name=f"nats-{name}",
            title=f"NATS JetStream, {title}",
            durability=durability,
            is_synced=is_synced,
            server=f"nats-{name}",
            serve=partial(serve, is_synced=is_synced),
            driver=Driver,
            confirmation="the answer to ack_sync (a double ack), at the same time as the pull of the next",
            released=released,
        )
        for name, is_synced, title, durability in (
            ("always", True, "sync always", "fsync before every acknowledgement"),
            ("default", False, "default", "fsync every two minutes"),
        )
    ]
