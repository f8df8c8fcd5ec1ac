"""Load generator of `bench.http_json`, a process of its own: `python -m bench.http_json_load JSON`.

It speaks HTTP/1.1 over plain sockets: each connection sends a request, waits for its whole answer, and sends the next
one. Its bodies are encoded before the time begins. It prints a JSON object with the seconds and what was answered.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

HEADERS_END = b"\r\n\r\n"
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)")
RECEIPT = re.compile(rb'"receipt":"([^"]+)"')
FAILED_NONE = b'"failed":0'
IDLE_ANSWERS_MAX = 50
"""Empty answers after which a connection considers the topic empty."""


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._body_at = self._end = 0
        self._answer: asyncio.Future[bytes]
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._end:
            at = received.find(HEADERS_END)
            if at < 0:
                return
            length = LENGTH.search(received, 0, at)
            assert length is not None, bytes(received[:at])
            self._body_at = at + len(HEADERS_END)
            self._end = self._body_at + int(length[1])
        if len(received) >= self._end:
            answer = bytes(received)
            received.clear()
            if answer[9:10] != b"2":
                self._answer.set_exception(RuntimeError(answer[:500].decode(errors="replace")))
            else:
                self._answer.set_result(answer[self._body_at :])
            self._end = 0

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    async def send(self, request: bytes) -> bytes:
        """Send an encoded request; return the body of its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._transport.close()


def encode_request(path: str, body: bytes, kind: str) -> bytes:
    """Return an HTTP/1.1 request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def value_of(number: int, size: int) -> str:
    """Return the value of a record, which names its number."""
    return f"{number:08d}".ljust(size, "x")


def batch_request(topic: str, first: int, count: int, size: int) -> bytes:
    records = [{"value": value_of(number, size)} for number in range(first, first + count)]
    body = json.dumps({"records": records}, separators=(",", ":")).encode()
    return encode_request(f"/v1/topics/{topic}/records/batch", body, "application/json")


def keyed_request(topic: str, first: int, count: int, size: int) -> bytes:
    """Return a batch whose records have a key and a header, too."""
    records = [
        {
            "value": value_of(number, size),
            "key": f"key-{number % 100}",
            "headers": {"trace": f"{number:016d}"},
        }
        for number in range(first, first + count)
    ]
    body = json.dumps({"records": records}, separators=(",", ":")).encode()
    return encode_request(f"/v1/topics/{topic}/records/batch", body, "application/json")


def single_request(topic: str, number: int, size: int) -> bytes:
    body = value_of(number, size).encode()
    return encode_request(f"/v1/topics/{topic}/records", body, "application/octet-stream")


async def publish(connections: list[Connection], requests: list[bytes], is_batch: bool) -> list[float]:
    """Send the requests over all connections; return the seconds of each."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def work(connection: Connection) -> None:
        for request in waiting:
            began = time.perf_counter()
            answer = await connection.send(request)
            seconds.append(time.perf_counter() - began)
            if is_batch and FAILED_NONE not in answer:
                raise RuntimeError(f"a record failed: {answer[:500]!r}")

    await asyncio.gather(*map(work, connections))
    return seconds


async def receive(connections: list[Connection], topic: str, count: int, per_request: int) -> int:
    """Receive and acknowledge until `count` records are acknowledged; return how many are."""
    body = json.dumps({"topics": [topic], "max_records": per_request, "wait_ms": 100}).encode()
    request = encode_request(f"/v1/groups/{topic}/receive", body, "application/json")
    acknowledged = 0

    async def work(connection: Connection) -> None:
        nonlocal acknowledged
        idle = 0
        while acknowledged < count and idle < IDLE_ANSWERS_MAX:
            receipts = RECEIPT.findall(await connection.send(request))
            if not receipts:
                idle += 1
                continue
            idle = 0
            acknowledgement = b'{"receipts":["' + b'","'.join(receipts) + b'"]}'
            answer = await connection.send(
                encode_request(f"/v1/groups/{topic}/ack", acknowledgement, "application/json")
            )
            acknowledged += int(json.loads(answer)["acknowledged"])

    await asyncio.gather(*map(work, connections))
    return acknowledged


async def run(spec: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    topic, count, size, case = spec["topic"], spec["count"], spec["size"], spec["case"]
    requests: list[bytes] = []
    if case == "batch":
        per_request = spec["per_request"]
        requests = [batch_request(topic, first, per_request, size) for first in range(0, count, per_request)]
    elif case == "single":
        requests = [single_request(topic, number, size) for number in range(count)]
    connections = [
        (await loop.create_connection(Connection, "127.0.0.1", spec["port"]))[1]
        for _ in range(spec["connections"])
    ]
    began, used = time.perf_counter(), time.process_time()
    done, seconds = count, [0.0]
    if case == "receive":
        done = await receive(connections, topic, count, spec["per_request"])
    else:
        seconds = sorted(await publish(connections, requests, case == "batch"))
    spent = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return {
        "seconds": spent,
        "done": done,
        "cpu_seconds": time.process_time() - used,
        "p50_ms": seconds[len(seconds) // 2] * 1000,
        "p99_ms": seconds[len(seconds) * 99 // 100] * 1000,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
