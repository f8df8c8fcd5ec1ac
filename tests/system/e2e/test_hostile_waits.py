"""Hostile bodies of every protocol, as another client sees them: what one durable record waits for meanwhile.

The client publishes a record with acks=all every few milliseconds. Its longest wait with a hostile body is compared
with its own waits without one. Time for which the machine did not run the broker or the client is not counted, and a
case that fails is tried again, because nothing else can be blamed on a neighbour on the same machine.
"""

from __future__ import annotations

import select
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import pytest

from support.hostile_bodies import ALL, Addresses
from support.hostile_sender import Sender
from support.machine import scaled
from support.paths import free_port
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until
from system.e2e.other_client import MIB, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_S: Final = 0.015
ROUNDS: Final = 100
"""Records without a hostile body whose 99th percentile is the usual wait."""
EXTRA_S_MAX: Final = 0.05
TRIES: Final = 3
GROWTH_BYTES_MAX: Final = 50 * MIB


class Publisher:
    """The other client."""

    def __init__(self, broker: ServedBroker) -> None:
        self._pid = broker.pid
        self._peer = RawPeer(broker.kafka_port)
        self._topic = "waits"
        self._peer.create_topic(self._topic)

    def close(self) -> None:
        self._peer.socket.close()

    def publish(self) -> float:
        """Publish a record; return the seconds until it was durable, without those for which the machine ran others."""
        begin, kept_s = time.monotonic(), self._kept_waiting_s()
        assert self._peer.produce(self._topic, batch_of(b"v")).error_code == 0
        took_s = time.monotonic() - begin
        return max(took_s - (self._kept_waiting_s() - kept_s), 0.0)

    def _kept_waiting_s(self) -> float:
        """How long this thread and the broker's event loop were ready to run while the machine ran others."""
        waited_ns = 0
        for path in ("/proc/thread-self/schedstat", f"/proc/{self._pid}/task/{self._pid}/schedstat"):
            with suppress(OSError):  # no Linux
                waited_ns += int(Path(path).read_text().split()[1])
        return waited_ns / 1e9


class Scene:
    """A broker, the other client with its usual wait, and senders."""

    def __init__(
        self, broker: ServedBroker, at: Addresses, publisher: Publisher, senders: list[Sender]
    ) -> None:
        self.broker = broker
        self.at = at
        self.publisher = publisher
        self.senders = senders
        for _ in range(ROUNDS):
            publisher.publish()
        waits = []
        for _ in range(ROUNDS):
            waits.append(publisher.publish())
            time.sleep(PAUSE_S / 5)
        self.usual_s = sorted(waits)[ROUNDS * 99 // 100 - 1]

    def longest_wait_s(self, *indexes: int) -> float:
        """Send bodies, one by each sender, and publish meanwhile; return the longest wait."""
        try:
            return self._longest_wait_s(self.senders[: len(indexes)], *indexes)
        except AssertionError:  # the next case must not read the answers of this one
            for sender in self.senders:
                sender.close()
            self.senders = [Sender(self.at) for _ in self.senders]
            raise

    def _longest_wait_s(self, used: list[Sender], *indexes: int) -> float:
        for sender, index in zip(used, indexes, strict=True):
            sender.make(index)
        for sender in used:
            sender.send()
        waits = [self.publisher.publish()]
        end = time.monotonic() + scaled(60)
        pending = [sender.answers for sender in used]
        while pending:
            ready, _, _ = select.select(pending, [], [], PAUSE_S)
            for each in ready:
                assert each.readline(), "the sender has ended"
                pending.remove(each)
            waits.append(self.publisher.publish())
            assert time.monotonic() < end, "no answer"
        return max(waits)

    def check(self, extra_s: float, *indexes: int) -> None:
        for _ in range(TRIES):
            waited_s = self.longest_wait_s(*indexes)
            if waited_s <= self.usual_s + scaled(extra_s):
                break
        assert waited_s <= self.usual_s + scaled(extra_s), f"{waited_s:.3f} s, usually {self.usual_s:.3f} s"


@contextmanager
def scene(data: Path) -> Iterator[Scene]:
    sqs, rpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with served(data, arguments=["--grpc", rpc, "--sqs", sqs]) as broker, ExitStack() as stack:
        at = Addresses(broker.bootstrap_servers, broker.http_url.removeprefix("http://"), sqs, rpc)
        publisher = Publisher(broker)
        stack.callback(publisher.close)
        wait_until_idle(broker)
        found = Scene(broker, at, publisher, [Sender(at) for _ in range(4)])
        stack.callback(lambda: [sender.close() for sender in found.senders])
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("waits") / "data") as found:
        yield found


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(ALL)), ids=lambda each: f"{ALL[each].protocol} {ALL[each].name}")
def test_no_hostile_body_delays_the_records_of_another_client(shared: Scene, index: int) -> None:
    shared.check(EXTRA_S_MAX, index)


@pytest.mark.full
def test_hostile_bodies_of_all_protocols_together_leave_no_delay_and_no_memory(shared: Scene) -> None:
    process = psutil.Process(shared.broker.pid)
    before = process.memory_info().rss
    for names in (
        ("empty records in gzip", "empty entries", "many empty records", "unknown tagged fields"),
        ("empty receipts", "parameters", "headers of a record", "partitions of a fetch"),
    ):
        # Four take turns: the record waits for one turn of each.
        shared.check(
            4 * EXTRA_S_MAX, *(next(i for i, each in enumerate(ALL) if each.name == n) for n in names)
        )
    wait_until(lambda: process.memory_info().rss < before + GROWTH_BYTES_MAX, 20, "memory returns")
