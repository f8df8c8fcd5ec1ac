"""A well-behaved client and the broker's memory, both observed while other clients misbehave.

Owns: one thread that produces and reads back all the time, one that samples resident memory. Always true:
what went wrong for the neighbour, an answer that took too long included, is raised when the `with` block
ends.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mansio.wire.apis import fetch
from mansio.wire.batch.record_reader import read_records
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, fetch_frame
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.process import ServedBroker

ANSWER_S_MAX = 2.0
"""A neighbour that waits longer has noticed. Generous: two shared cores, and the disk is synced each time. What the
machine did not let this process or the broker run does not count."""

ROUNDS_MIN = 3
STEADY_SAMPLES = 12
"""Samples that must be alike; `wait_until` takes them 50 ms apart."""

MIB = 1 << 20
_names = itertools.count(1)


class Neighbour:
    """Produces one durable record after the other and reads each back."""

    def __init__(self, port: int, pid: int) -> None:
        """`pid`: the broker's. What the machine kept its threads waiting for a processor is not in `slowest_s`."""
        self.rounds = 0
        self.slowest_s = 0.0
        self.failure: BaseException | None = None
        self._port = port
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.wait_for_rounds()

    def wait_for_rounds(self, rounds: int = ROUNDS_MIN) -> None:
        """Return when it has gone on for so many rounds more; raise when it could not."""
        target = self.rounds + rounds
        wait_until(lambda: self.failure or self.rounds >= target, 30, "the neighbour goes on")
        if self.failure is not None:
            raise AssertionError(f"the neighbour noticed: {self.failure!r}") from self.failure

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(scaled(15))

    def _kept_waiting_s(self) -> float:
        """How long the broker's threads were ready to run while the machine ran others; 0 where it does not say."""
        waited_ns = 0
        for path in Path(f"/proc/{self._pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread has ended
                waited_ns += int(path.read_text().split()[1])
        return waited_ns / 1e9

    def _run(self) -> None:
        try:
            with RawPeer(self._port) as peer:
                self._work(peer, f"neighbour-{next(_names)}")
        except (OSError, AssertionError, IndexError) as error:
            self.failure = error

    def _work(self, peer: RawPeer, topic: str) -> None:
        peer.create_topic(topic)
        while not self._stop.wait(0.005):
            value = b"round %d" % self.rounds
            begin, kept_s = time.monotonic(), self._kept_waiting_s()
            written = peer.produce(topic, batch_of(value))
            assert (written.error_code, written.base_offset) == (0, self.rounds), written
            peer.send(fetch_frame(topic, offset=self.rounds, wait_ms=1000))
            answer = peer.frame()
            assert answer is not None, "the fetch was not answered"
            found = fetch.decode_response(12, answer).topics[0][2][0]
            assert found.error_code == 0, found
            assert read_records(bytes(found.records), output_bytes_max=MIB)[0].value == value
            kept_s = self._kept_waiting_s() - kept_s
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin - kept_s)
            self.rounds += 1


class Memory:
    """Resident memory of a process, now and at its highest since the start of the watch. Bytes. `late_s`: how late the
    latest look at it was."""

    def __init__(self, pid: int) -> None:
        self.late_s = 0.0
        self._process = psutil.Process(pid)
        self.before = self.highest = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self._thread.start()

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    @property
    def growth(self) -> int:
        """The highest it went above where it began."""
        self.highest = max(self.highest, self.now())
        return self.highest - self.before

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(scaled(5))

    def _sample(self) -> None:
        due = time.monotonic() + 0.01
        while not self._stop.wait(0.01):
            self.late_s = max(self.late_s, time.monotonic() - due)
            due = time.monotonic() + 0.01
            try:
                self.highest = max(self.highest, self.now())
            except psutil.NoSuchProcess:
                return


def wait_until_idle(broker: ServedBroker) -> None:
    """Return when the broker rests and its memory stands still: message schemas are imported while it runs already."""
    process = psutil.Process(broker.pid)
    steady: list[int] = []

    def stands_still() -> bool:
        if works(broker.pid):
            steady.clear()
        steady.append(int(process.memory_info().rss))
        return (
            len(steady) > STEADY_SAMPLES
            and max(steady[-STEADY_SAMPLES:]) - min(steady[-STEADY_SAMPLES:]) < MIB
        )

    wait_until(stands_still, 30, "memory stands still")


def works(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a processor; on a busy machine that may be all it does."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return "R" in states


class Watched:
    """What a hostile test looks at: its broker, the neighbour, the memory, and the log since the test
    began."""

    def __init__(self, broker: ServedBroker, neighbour: Neighbour, memory: Memory) -> None:
        self.broker = broker
        self.port = broker.kafka_port
        self.neighbour = neighbour
        self.memory = memory
        self._begin = len(broker.text())

    @property
    def lines(self) -> list[str]:
        """Log lines since the test began."""
        return self.broker.text()[self._begin :].splitlines()

    def connections(self) -> int:
        """Open sockets of the broker. Files do not count: the broker opens logs when it likes, as that of the trace."""
        opened = f"/proc/{self.broker.pid}/fd"
        return sum(_is_socket(f"{opened}/{number}") for number in os.listdir(opened))


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # closed since it was listed
        return False


@contextmanager
def watched(broker: ServedBroker) -> Iterator[Watched]:
    """Watch for the length of a `with` block; raise at its end when the neighbour noticed anything."""
    neighbour = Neighbour(broker.kafka_port, broker.pid)
    neighbour.start()
    memory = Memory(broker.pid)
    view = Watched(broker, neighbour, memory)
    try:
        yield view
        neighbour.wait_for_rounds()
        waited_s = neighbour.slowest_s - memory.late_s
        assert waited_s <= scaled(ANSWER_S_MAX), f"the neighbour waited {neighbour.slowest_s:.2f} s"
        assert "Traceback" not in "\n".join(view.lines)
    finally:
        memory.stop()
        neighbour.stop()
