"""Load generators of `bench.protocol_mix`, each a process of its own: `python -m bench.protocol_mix_load KIND JSON`.

`load` sends requests of one protocol over several connections, at full speed or at a rate. `produce` sends Produce
requests at a rate. Each prints a JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc.aio

from bench import frames
from bench.grpc_records_load import SERVICE, check_published
from bench.grpc_records_load import batch_request as grpc_batch
from bench.http_json_load import FAILED_NONE, keyed_request, single_request
from bench.http_json_load import batch_request as http_batch
from bench.http_load import Connection
from bench.sqs import BATCH as MESSAGES
from bench.sqs import BODY, UNSIGNED, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TOPIC = "produced"
OTHERS_TOPIC = "others"
QUEUE = "queue"
BATCH = 1_000
SIZE = 100
CONNECTIONS = {"http": 2, "keyed": 2, "single": 8, "grpc": 2, "sqs": 8}
RECORDS = {"http": BATCH, "keyed": BATCH, "single": 1, "grpc": BATCH, "sqs": MESSAGES}
"""Records of one step of a connection."""

PRODUCED_PER_S = 200
TIMEOUT_S = 30


async def open_steps(protocol: str, port: int) -> list[Callable[[], Awaitable[None]]]:
    """Open the connections of a protocol; return a function for each, which sends its requests once and checks the
    answers."""
    steps: list[Callable[[], Awaitable[None]]] = []
    for _ in range(CONNECTIONS[protocol]):
        if protocol == "grpc":
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
            steps.append(grpc_step(channel))
        else:
            connection = await Connection("127.0.0.1", port).open()
            steps.append(sqs_step(connection) if protocol == "sqs" else http_step(connection, protocol))
    return steps


def grpc_step(channel: Any) -> Callable[[], Awaitable[None]]:
    call, data = channel.unary_unary(SERVICE + "Publish"), grpc_batch(OTHERS_TOPIC, 0, BATCH, SIZE)

    async def step() -> None:
        check_published(await call(data), BATCH)

    return step


def http_step(connection: Connection, protocol: str) -> Callable[[], Awaitable[None]]:
    is_batch = protocol != "single"
    if is_batch:
        data = (keyed_request if protocol == "keyed" else http_batch)(OTHERS_TOPIC, 0, BATCH, SIZE)
    else:
        data = single_request(OTHERS_TOPIC, 0, SIZE)

    async def step() -> None:
        answer = await connection.send(data)
        if is_batch and FAILED_NONE not in answer:
            raise RuntimeError(f"a record failed: {answer[:500]!r}")

    return step


def sqs_step(connection: Connection) -> Callable[[], Awaitable[None]]:
    queue = {"QueueUrl": f"http://localhost/000000000000/{QUEUE}"}
    entries = [{"Id": str(number), "MessageBody": BODY} for number in range(MESSAGES)]
    create = request("CreateQueue", {"QueueName": QUEUE}, UNSIGNED)
    send = request("SendMessageBatch", {**queue, "Entries": entries}, UNSIGNED)
    receive = request("ReceiveMessage", {**queue, "MaxNumberOfMessages": MESSAGES}, UNSIGNED)
    is_created = False

    async def step() -> None:
        nonlocal is_created
        if not is_created:
            is_created = bool(await connection.send(create))
        await connection.send(send)
        found = json.loads(await connection.send(receive)).get("Messages", [])
        if found:
            handles = [
                {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]}
                for number, each in enumerate(found)
            ]
            await connection.send(request("DeleteMessageBatch", {**queue, "Entries": handles}, UNSIGNED))

    return step


async def load(spec: dict[str, Any]) -> dict[str, float]:
    """Send requests for `seconds`, `rate` steps per second, or at full speed for 0; return the steps per second."""
    steps = await open_steps(spec["protocol"], spec["port"])
    await steps[0]()
    rate, numbers, done = spec["rate"], itertools.count(), 0
    began = time.perf_counter()
    end = began + spec["seconds"]

    async def work(step: Callable[[], Awaitable[None]]) -> None:
        nonlocal done
        while time.perf_counter() < end:
            if rate:
                due = began + next(numbers) / rate
                if due >= end:
                    return
                await asyncio.sleep(due - time.perf_counter())
            await step()
            done += 1

    await asyncio.gather(*map(work, steps))
    return {"rate": done / (time.perf_counter() - began)}


def produce(spec: dict[str, Any]) -> dict[str, float]:
    """Send Produce requests for `seconds`, each when it is due, whether or not those before it are answered; return
    percentiles of the time from when each was due to its answer."""
    data = frames.produce_request(TOPIC, 0, -1, frames.batch(1, SIZE))
    count = int(spec["seconds"] * PRODUCED_PER_S)
    took_s: list[float] = []
    with socket.create_connection(("127.0.0.1", spec["port"]), timeout=TIMEOUT_S) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = line.makefile("rb")
        began = time.perf_counter() + 0.1
        dues = [began + number / PRODUCED_PER_S for number in range(count)]

        def send() -> None:
            for due in dues:
                time.sleep(max(due - time.perf_counter(), 0.0))
                line.sendall(data)

        threading.Thread(target=send, daemon=True).start()
        for due in dues:
            size = reader.read(4)
            answer = size + reader.read(int.from_bytes(size, "big"))
            took_s.append(time.perf_counter() - due)
            if error := frames.produce_error(answer, TOPIC):
                raise RuntimeError(f"the server answered with error code {error}")
    took_s.sort()
    return {
        "p50_ms": took_s[len(took_s) // 2] * 1000,
        "p99_ms": took_s[len(took_s) * 99 // 100] * 1000,
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    print(json.dumps(produce(given) if sys.argv[1] == "produce" else asyncio.run(load(given))))
