"""Stub broker with scripted responses, on real sockets.

`answers[api key]` is a function from the decoded request to the response's fields, or to one of the words below;
it may be a coroutine function. Produce and Fetch go to `produce` and `fetch`, which get the decoded request.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Self

from mansio.wire import headers
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, advertised_versions
from mansio.wire.apis import fetch, produce
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_UP = "hang up"
SAY_NOTHING = "say nothing"
TOPIC_ID = bytes(15) + b"\x07"


class StubBroker:
    """Use as `async with`. Knows ApiVersions and Metadata (of `topics`: name -> number of partitions)."""

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        self.topics = topics or {}
        self.requests: list[tuple[int, int, Any]] = []
        """(API key, version, decoded request) in order of arrival."""
        self.answers: dict[int, Callable[[Any], Any]] = {
            ApiKey.API_VERSIONS: self.api_versions,
            ApiKey.METADATA: self.metadata,
        }
        self.offered = {key: (lowest, highest) for key, lowest, highest in advertised_versions()}
        self.produce: Callable[[produce.ProduceRequest], Any] | None = None
        self.fetch: Callable[[fetch.FetchRequest], Any] | None = None
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.hang_up()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        """Close every connection, as a crash would."""
        for writer in list(self._writers):
            writer.transport.abort()

    def asked(self, api_key: int) -> list[Any]:
        """The requests of one kind, so far."""
        return [request for key, _, request in self.requests if key == api_key]

    def api_versions(self, _request: Any) -> dict[str, Any]:
        return {
            "error_code": 0,
            "api_keys": [
                {"api_key": key, "min_version": lowest, "max_version": highest}
                for key, (lowest, highest) in self.offered.items()
            ],
        }

    def metadata(self, request: Any) -> dict[str, Any]:
        wanted = list(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        return {
            "brokers": [{"node_id": 1, "host": "127.0.0.1", "port": self.port, "rack": None}],
            "cluster_id": "stub",
            "controller_id": 1,
            "topics": [self._topic(name) for name in wanted],
        }

    def _topic(self, name: str) -> dict[str, Any]:
        if name not in self.topics:
            return {"error_code": 3, "name": name, "topic_id": None, "partitions": []}
        partitions = [
            {
                "partition_index": index,
                "leader_id": 1,
                "leader_epoch": 0,
                "replica_nodes": [1],
                "isr_nodes": [1],
            }
            for index in range(self.topics[name])
        ]
        return {"error_code": 0, "name": name, "topic_id": TOPIC_ID, "partitions": partitions}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "big")
                answered = await self._answer(await reader.readexactly(length))
                if answered == HANG_UP:
                    writer.transport.abort()
                    return
                if isinstance(answered, bytes):
                    writer.write(answered)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, frame: bytes) -> bytes | str:
        header = headers.read_request_header(frame)
        key, version, correlation_id = header.api_key, header.api_version, header.correlation_id
        lowest, highest = self.offered[key]
        if not lowest <= version <= highest:
            return messages.encode_response(
                ApiKey.API_VERSIONS, 0, correlation_id, {**self.api_versions(None), "error_code": 35}
            )
        if key == ApiKey.PRODUCE:
            decoded: Any = produce.decode_request(version, memoryview(frame), header.body_position)
            answer: Callable[..., Any] | None = self.produce
        elif key == ApiKey.FETCH:
            decoded = fetch.decode_request(version, memoryview(frame), header.body_position)
            answer = self.fetch
        else:
            decoded = messages.decode_request(key, version, frame[header.body_position :])
            answer = self.answers[key]
        self.requests.append((key, version, decoded))
        assert answer is not None, f"nothing scripted for {SUPPORTED_APIS[ApiKey(key)].key.name}"
        reported = answer(decoded)
        if inspect.isawaitable(reported):
            reported = await reported
        if isinstance(reported, str):
            return reported
        if key == ApiKey.PRODUCE:
            return produce.encode_response(version, correlation_id, reported)
        if key == ApiKey.FETCH:
            return b"".join(
                bytes(piece) for piece in fetch.encode_response(version, correlation_id, reported)
            )
        return messages.encode_response(key, version, correlation_id, reported)
