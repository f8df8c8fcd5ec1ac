"""A topic that does not accept delays has no cost of them: the calls that a broker makes per request are counted."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench import frames

import mansio
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.testing import TestBroker

REQUESTS = 1
"""Requests of a round. With more of them, a busy machine may leave no round without a call of something else."""
ROUNDS = 200
SOURCE = Path(mansio.__file__).parent
_SOURCE_PREFIX = f"{SOURCE}/"


class CountedBroker:
    """A connection to a broker whose event loop counts the calls that it makes in rounds of some requests."""

    requests = REQUESTS
    rounds = ROUNDS

    def __init__(self, broker: mansio.Broker | TestBroker) -> None:
        started = broker._broker
        assert started is not None
        self._loop = started.server.loop
        address = broker.address if isinstance(broker, mansio.Broker) else broker.bootstrap_servers
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=scaled(30))
        self._calls: Counter[str] = Counter()

    def calls_of(self, request: bytes) -> tuple[int, set[str]]:
        """Return how many calls the requests of a round take at least, and the functions that every round called.

        The fewest of several rounds are those without timers and flushes that other requests do not have."""
        rounds = [self._round(request) for _ in range(self.rounds)]
        return min(calls.total() for calls in rounds[1:]), set.intersection(*map(set, rounds))

    def _round(self, request: bytes) -> Counter[str]:
        self._in_loop(sys.setprofile, self._count)
        for _ in range(self.requests):
            self._ask(request)
        self._in_loop(sys.setprofile, None)
        calls, self._calls = self._calls, Counter()
        return calls

    def close(self) -> None:
        self._socket.close()

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        """Count calls of Mansio's functions, and of C functions by them. How often the event loop itself turns depends
        on when the test's thread is woken."""
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCE_PREFIX):
            return
        if event == "call":
            self._calls[f"{code.co_filename}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self._calls[argument.__name__] += 1

    def _in_loop(self, function: Any, argument: Any) -> None:
        """Call a function on the broker's event loop, and wait until it has returned."""

        async def call() -> None:
            function(argument)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(scaled(30))

    def _ask(self, request: bytes) -> None:
        self._socket.sendall(request)
        size = int.from_bytes(self._receive(4), "big")
        assert size > 0
        self._receive(size)

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            assert part, "the broker closed the connection"
            received += part
        return received


@contextmanager
def counted_broker(directory: Path, *, delays: bool) -> Iterator[CountedBroker]:
    """A broker with topic `plain`. `delays`: with records pending in topic `delayed`, too."""
    with mansio.Broker(directory) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("plain", partitions=1)
            if delays:
                client.admin.create_topic("delayed", partitions=1, config={"mansio.delay.enable": "true"})
                client.publish_many("delayed", [b"later"] * 100, delay=3600)
        counted = CountedBroker(broker)
        try:
            yield counted
        finally:
            counted.close()


def requests_for(topic: str) -> dict[str, bytes]:
    batch = frames.batch(1, 100)
    return {
        "produce": frames.produce_request(topic, 0, 1, batch),
        "produce with acks=all": frames.produce_request(topic, 0, -1, batch),
        "fetch": frames.fetch_request(topic, 0, 0, 1 << 12),
    }


def of_delays(functions: set[str]) -> set[str]:
    """Functions in modules of delayed records."""
    return {name for name in functions if name.startswith(str(SOURCE)) and "delay" in name.partition(":")[0]}


@pytest.mark.row("D6")
def test_a_topic_without_delays_takes_no_call_more(tmp_path: Path) -> None:
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for delays, fewest in found.items():
        with counted_broker(tmp_path / str(delays), delays=delays) as broker:
            for name, request in requests_for("plain").items():
                fewest[name], functions = broker.calls_of(request)
                assert not of_delays(functions), f"{name} calls {of_delays(functions)}"
            if delays:  # otherwise no call could be seen
                _, functions = broker.calls_of(requests_for("delayed")["produce"])
                assert of_delays(functions)
    assert found[True] == found[False]
    assert min(found[True].values()) > 10 * REQUESTS
