"""Round trips of producers, counted by what waits for what and not by time.

A new client gets its first acknowledgement after four rounds of requests: ApiVersions; the brokers; the topic and,
meanwhile, the producer id and the connection for batches; the batch.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.paths import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

DEADLINE_S = 20.0


class HoldingProxy:
    """Passes requests on one at a time, and answers the one for the topic only when `released` is set."""

    def __init__(self, broker_port: int) -> None:
        self.broker_port = broker_port
        self.api_keys: list[int] = []
        self.connections = 0
        self.changed = asyncio.Condition()
        self.released = asyncio.Event()
        self.holds_produce = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self.broker_port)
        await self._note()
        requests = asyncio.create_task(self._requests(reader, to_broker))
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await read_frame(from_broker)
                if self.api_keys.count(ApiKey.METADATA) == 2 or (
                    self.holds_produce and ApiKey.PRODUCE in self.api_keys
                ):
                    await self.released.wait()
                writer.write(frame)
        requests.cancel()
        to_broker.close()
        writer.close()

    async def _requests(self, reader: asyncio.StreamReader, to_broker: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await read_frame(reader)
                self.api_keys.append(int.from_bytes(frame[4:6], "big"))
                to_broker.write(frame)
                await self._note()
        to_broker.close()

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    length = await reader.readexactly(4)
    return length + await reader.readexactly(int.from_bytes(length, "big"))


@pytest.mark.timeout(120)
def test_producer_id_and_connection_are_requested_while_the_topic_is(tmp_path: Path) -> None:
    async def main(broker_port: int, port: int) -> None:
        proxy = HoldingProxy(broker_port)
        async with (
            asyncio.timeout(scaled(DEADLINE_S)),
            await asyncio.start_server(proxy.serve, "127.0.0.1", port),
            mansio.connect(f"127.0.0.1:{port}") as client,
        ):
            assert proxy.api_keys == [ApiKey.API_VERSIONS, ApiKey.METADATA]
            publish = asyncio.create_task(client.publish("orders", b"one"))
            async with proxy.changed:
                await proxy.changed.wait_for(
                    lambda: ApiKey.INIT_PRODUCER_ID in proxy.api_keys and proxy.connections == 2
                )
            proxy.released.set()
            await publish
        assert proxy.api_keys[-1] == ApiKey.PRODUCE
        assert sorted(proxy.api_keys) == sorted(
            [
                ApiKey.API_VERSIONS,
                ApiKey.METADATA,
                ApiKey.METADATA,
                ApiKey.INIT_PRODUCER_ID,
                ApiKey.PRODUCE,
            ]
        )

    run(tmp_path, main)


@pytest.mark.timeout(120)
def test_record_does_not_wait_for_the_acknowledgement_of_an_earlier_one(tmp_path: Path) -> None:
    """Where round trips are long, callers that publish one record at a time would otherwise wait up to two."""

    async def main(broker_port: int, port: int) -> None:
        proxy = HoldingProxy(broker_port)
        async with (
            asyncio.timeout(scaled(DEADLINE_S)),
            await asyncio.start_server(proxy.serve, "127.0.0.1", port),
            mansio.connect(f"127.0.0.1:{port}") as client,
        ):
            proxy.released.set()
            await client.publish("orders", b"first")
            proxy.released.clear()
            proxy.holds_produce = True
            before = proxy.api_keys.count(ApiKey.PRODUCE)
            tasks = []
            for number in range(1, 4):
                tasks.append(asyncio.create_task(client.publish("orders", b"%d" % number)))
                sent = before + number
                async with proxy.changed:
                    await proxy.changed.wait_for(lambda: proxy.api_keys.count(ApiKey.PRODUCE) == sent)  # noqa: B023
            assert not any(task.done() for task in tasks)
            proxy.released.set()
            results = await asyncio.gather(*tasks)
            assert [result.offset for result in results] == [1, 2, 3]

    run(tmp_path, main)


def run(tmp_path: Path, main: Callable[[int, int], Coroutine[Any, Any, None]]) -> None:
    broker_port, port = free_port(), free_port()
    settings = {
        "listeners": f"127.0.0.1:{broker_port}",
        "advertised_listeners": f"127.0.0.1:{port}",
    }
    with mansio.Broker(tmp_path / "data", **settings):
        prepare(broker_port, port)
        asyncio.run(main(broker_port, port))


def prepare(broker_port: int, port: int) -> None:
    """Create the topic, through a proxy of its own, because the broker advertises that port."""

    async def main() -> None:
        proxy = HoldingProxy(broker_port)
        proxy.released.set()
        async with (
            await asyncio.start_server(proxy.serve, "127.0.0.1", port),
            mansio.connect(f"127.0.0.1:{port}") as client,
        ):
            await client.admin.create_topic("orders", partitions=1)

    asyncio.run(main())
