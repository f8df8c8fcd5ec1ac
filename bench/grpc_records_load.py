"""Load generator of `bench.grpc_records`, a process of its own: `python -m bench.grpc_records_load JSON`.

Requests to publish are serialized before the time begins, and answers are decoded by protobuf's library in C. Of each
channel or stream, `window` requests are open at a time. It prints a JSON object with the seconds and what was answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc.aio

from bench.http_json_load import value_of
from mansio.api.grpc import mansio_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SERVICE = "/mansio.v1.Mansio/"
IDLE_S_MAX = 20.0
"""Time without a response after which a Receive stream ends the run."""


def batch_request(topic: str, first: int, count: int, size: int) -> bytes:
    """Return a serialized `PublishRequest`."""
    records = [pb.NewRecord(value=value_of(number, size).encode()) for number in range(first, first + count)]
    return bytes(pb.PublishRequest(topic=topic, records=records).SerializeToString())


def check_published(answer: bytes, count: int) -> None:
    """Raise `RuntimeError` unless a `PublishResponse` has `count` records without an error."""
    ranges = pb.PublishResponse.FromString(answer).ranges
    if sum(each.count for each in ranges if not each.HasField("error")) != count:
        raise RuntimeError(f"a record failed: {ranges}")


async def publish(channels: list[Any], requests: list[bytes], per_request: int, window: int) -> list[float]:
    """Send the requests as unary calls; return the seconds of each."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def work(call: Callable[[bytes], Awaitable[bytes]]) -> None:
        for request in waiting:
            began = time.perf_counter()
            answer = await call(request)
            seconds.append(time.perf_counter() - began)
            check_published(answer, per_request)

    calls = [channel.unary_unary(SERVICE + "Publish") for channel in channels]
    await asyncio.gather(*(work(call) for call in calls for _ in range(window)))
    return seconds


async def publish_stream(
    channels: list[Any], requests: list[bytes], per_request: int, window: int
) -> list[float]:
    """Send the requests on one stream per channel; return the seconds of each from the write to the answer."""
    waiting = iter(requests)
    seconds: list[float] = []

    async def work(channel: Any) -> None:
        stream = channel.stream_stream(SERVICE + "PublishStream")()
        began: asyncio.Queue[float | None] = asyncio.Queue()
        free = asyncio.Semaphore(window)

        async def write() -> None:
            for request in waiting:
                await free.acquire()
                began.put_nowait(time.perf_counter())
                await stream.write(request)
            await stream.done_writing()
            began.put_nowait(None)

        writing = asyncio.ensure_future(write())
        while (at := await began.get()) is not None:
            answer = await stream.read()
            if answer is grpc.aio.EOF:
                raise RuntimeError(f"the stream ended: {await stream.details()}")
            seconds.append(time.perf_counter() - at)
            free.release()
            check_published(answer, per_request)
        await writing

    await asyncio.gather(*map(work, channels))
    return seconds


async def receive(channels: list[Any], topic: str, count: int, per_request: int, window: int) -> int:
    """Receive and acknowledge until `count` records are acknowledged; return how many are.

    Each response is acknowledged by one request, which gives credits for as many records."""
    acknowledged = 0
    is_done = asyncio.Event()

    async def work(channel: Any) -> None:
        nonlocal acknowledged
        stream = channel.stream_stream(
            SERVICE + "Receive",
            request_serializer=pb.ReceiveRequest.SerializeToString,
            response_deserializer=pb.ReceiveResponse.FromString,
        )()
        opening = pb.ReceiveOpen(group=topic, topics=[topic], max_records=per_request)
        await stream.write(pb.ReceiveRequest(open=opening, credits=per_request * window))
        while True:
            found = await asyncio.wait_for(stream.read(), IDLE_S_MAX)
            if found is grpc.aio.EOF:
                raise RuntimeError(f"the stream ended: {await stream.details()}")
            if found.failed:
                raise RuntimeError(f"an acknowledgement failed: {found.failed[0]}")
            acknowledged += found.acknowledged
            if acknowledged >= count:
                is_done.set()
            if found.records:
                receipts = [each.receipt for each in found.records]
                await stream.write(pb.ReceiveRequest(ack=receipts, credits=len(receipts)))

    streams = [asyncio.ensure_future(work(channel)) for channel in channels]
    done = asyncio.ensure_future(is_done.wait())
    await asyncio.wait([*streams, done], return_when=asyncio.FIRST_COMPLETED)
    for task in streams:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return acknowledged


async def run(spec: dict[str, Any]) -> dict[str, Any]:
    topic, count, case = spec["topic"], spec["count"], spec["case"]
    per_request, window = spec["per_request"], spec["window"]
    requests: list[bytes] = []
    if case != "receive":
        requests = [
            batch_request(topic, first, per_request, spec["size"]) for first in range(0, count, per_request)
        ]
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 32 << 20)]
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{spec['port']}", options=options)
        for _ in range(spec["channels"])
    ]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    began, used = time.perf_counter(), time.process_time()
    done, seconds = count, [0.0]
    if case == "receive":
        done = await receive(channels, topic, count, per_request, window)
    else:
        call = publish if case == "publish" else publish_stream
        seconds = sorted(await call(channels, requests, per_request, window))
    spent, used = time.perf_counter() - began, time.process_time() - used
    for channel in channels:
        await channel.close()
    return {
        "seconds": spent,
        "done": done,
        "cpu_seconds": used,
        "p50_ms": seconds[len(seconds) // 2] * 1000,
        "p99_ms": seconds[len(seconds) * 99 // 100] * 1000,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
