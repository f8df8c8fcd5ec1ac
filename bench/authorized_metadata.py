"""Metadata of 10,000 topics for users with 10,000 ACLs: how long it holds the broker, and what other clients notice.

    python -m bench.authorized_metadata [--seconds N] [--rounds N]

One broker in this process; the topics are in its metadata only, because Metadata needs no more. In processes of their
own, 200 connections ask for one topic ten times a second each, one asks for all topics ten times a second, and one asks
for one topic every 5 ms, whose latency is printed. In some rounds, an ACL is added ten times a second. All connections
have the same user, and the ACLs name it: LITERAL ones, or PREFIXED ones.

Printed for each kind of round are, as medians with minimum and maximum over the rounds: the longest step of a request
on the event loop, in processor time, and the 99th percentile of the latency.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import mansio
from mansio.broker.routing.caller import BROKER_SESSION, Caller
from mansio.broker.services import statistics as broker_statistics
from mansio.metadata.model import TOPIC_LIVE, PartitionState, Topic
from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission, ResourceType
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable

TOPICS: Final = 10_000
SESSIONS: Final = 200
PERIOD_S: Final = 0.1
PROBE_PERIOD_S: Final = 0.005
VERSION: Final = 12
NODE_ID: Final = 1
NAMES: Final = [f"team{number % 100}.topic-{number}" for number in range(TOPICS)]
BROKER: Final = Caller(BROKER_SESSION)
GARBAGE_THRESHOLDS: Final = (50_000, 20, 50)
"""As in `mansio serve`."""


class Kind(NamedTuple):
    """A kind of round. `pattern_type`: of the ACLs, None without an authorizer."""

    title: str
    pattern_type: PatternType | None
    has_changes: bool = False


KINDS: Final = (
    Kind("no authorizer", None),
    Kind("LITERAL ACLs", PatternType.LITERAL),
    Kind("LITERAL ACLs, 10 changes/s", PatternType.LITERAL, has_changes=True),
    Kind("PREFIXED ACLs", PatternType.PREFIXED),
    Kind("PREFIXED ACLs, 10 changes/s", PatternType.PREFIXED, has_changes=True),
)


def acl(pattern_type: PatternType, name: str) -> Acl:
    kind, operation, permission = ResourceType.TOPIC, Operation.READ, Permission.ALLOW
    return Acl(kind, pattern_type, name, "User:ANONYMOUS", WILDCARD, operation, permission)


def request(*names: str) -> bytes:
    topics = [{"name": name, "topic_id": None} for name in names] or None
    return messages.encode_request(ApiKey.METADATA, VERSION, 1, "bench", {"topics": topics})


class Connection:
    """One connection that sends one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self) -> bytes:
        return self._file.read(int.from_bytes(self._file.read(4)))

    def ask(self, frame: bytes) -> bytes:
        self.send(frame)
        return self.receive()


def repeat(work: Callable[[], None], period_s: float, seconds: float) -> None:
    """Call `work` once in each period, or as often as it can be."""
    end_s = time.monotonic() + seconds
    while (began := time.monotonic()) < end_s:
        work()
        time.sleep(max(period_s - (time.monotonic() - began), 0))


def list_all(port: int, seconds: float) -> None:
    connection, frame = Connection(port), request()

    def work() -> None:
        assert len(connection.ask(frame)) > 50 * TOPICS

    repeat(work, PERIOD_S, seconds)


def ask_in_sessions(port: int, seconds: float) -> None:
    connections, frame = [Connection(port) for _ in range(SESSIONS)], request(NAMES[0])

    def work() -> None:
        for each in connections:
            each.send(frame)
        for each in connections:
            each.receive()

    repeat(work, PERIOD_S, seconds)


def probe(port: int, seconds: float) -> None:
    """Print the latencies of requests, in ms."""
    connection, frame = Connection(port), request(NAMES[1])
    latencies: list[float] = []

    def work() -> None:
        began = time.monotonic()
        connection.ask(frame)
        latencies.append((time.monotonic() - began) * 1000)

    repeat(work, PROBE_PERIOD_S, seconds)
    print(json.dumps(latencies))


LOADS: Final = {each.__name__: each for each in (list_all, ask_in_sessions, probe)}
"""What clients do, each kind in a process of its own."""


class Bench:
    """A broker with the topics, and with the ACLs of a kind of round."""

    def __init__(self, broker: mansio.Broker) -> None:
        started: Any = broker._broker
        self._loop: asyncio.AbstractEventLoop = started.server.loop
        self._services = started.service
        self.port = int(broker.address.rpartition(":")[2])
        self._holds = self._services.statistics.holds
        self._run(self._prepare())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _prepare(self) -> None:
        state = self._services.topics.state
        partitions = (PartitionState((NODE_ID,), NODE_ID, 0, (NODE_ID,)),)
        for name in NAMES:
            topic = Topic(name, uuid4(), partitions, 1, {}, False, TOPIC_LIVE, 1)
            state.topics[name] = state.topics_by_id[topic.topic_id] = topic
        self._holds.now = time.thread_time

    def allow(self, pattern_type: PatternType) -> None:
        """Add an ACL for each topic."""
        acls = [acl(pattern_type, name) for name in NAMES]
        for start in range(0, len(acls), 1000):
            part = acls[start : start + 1000]
            errors = self._run(self._services.acls.create_each(part, caller=BROKER))
            assert set(errors) == {None}

    def measure(self, seconds: float, *, has_changes: bool) -> tuple[float, float]:
        """Return the longest step and the 99th percentile of the latency, in ms."""
        warm_up = Connection(self.port)
        for _ in range(2):
            warm_up.ask(request())
        gc.collect()
        gc.freeze()
        self._holds.longest_s.update(dict.fromkeys(broker_statistics.PROTOCOLS, 0.0))
        with ExitStack() as stack:
            processes = {}
            for name in LOADS:
                command = [sys.executable, "-m", "bench.authorized_metadata", "--load", name]
                command += ["--port", str(self.port), "--seconds", str(seconds)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                processes[name] = stack.enter_context(process)
            number = 0
            while has_changes and processes["probe"].poll() is None:
                changed = acl(PatternType.LITERAL, f"changed-{number}")
                number += 1
                assert self._run(self._services.acls.create_each([changed], caller=BROKER)) == [None]
                time.sleep(PERIOD_S)
            printed = processes["probe"].communicate()[0]
        assert not any(each.returncode for each in processes.values())
        latencies = json.loads(printed)
        return self._holds.hold_ms_max, statistics.quantiles(latencies, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.load is not None:
        LOADS[chosen.load](chosen.port, chosen.seconds)
        return
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    broker_statistics.HOLD_S_MIN = 0.0  # type: ignore[misc]  # the steps of every request
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(chosen.rounds):
        for kind in KINDS:
            authorizer = "none" if kind.pattern_type is None else "acl"
            with (
                tempfile.TemporaryDirectory() as directory,
                mansio.Broker(Path(directory), authorizer=authorizer) as broker,
            ):
                bench = Bench(broker)
                if kind.pattern_type is not None:
                    bench.allow(kind.pattern_type)
                found[kind.title].append(bench.measure(chosen.seconds, has_changes=kind.has_changes))
    for title, measured in found.items():
        steps, latencies = zip(*measured, strict=True)
        print(f"{title}: longest step {spread(steps)} ms, p99 of others {spread(latencies)} ms")


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
