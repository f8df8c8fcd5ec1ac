"""Kafka Streams with `exactly_once_v2`: a word count that is killed again and again, also together with the broker, has
an exact count.

Every word that is read gives a new count, so that the counts of a word are 1, 2, 3, ... in the output: a word that is
counted twice, lost, or counted on from a store that is ahead of or behind the offsets leaves a gap or a double.
Nightly: needs a JDK and Maven. Always true: an instance that does not get further in time fails the test; none is left.
"""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from mansio.client.types import OutgoingRecord
from nightly.interop.java_client import compiled
from support.machine import scaled
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.interop.conftest import ARGUMENTS, create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = [pytest.mark.timeout(1800), pytest.mark.row("P4", "L5")]

PARTITIONS = 2
KILLS = 6
LINES = 60
"""Lines that are written for each life of the word count; it is killed when it has counted a part of them."""
WORDS = ("order", "paid", "sent", "late", "back", "done", "lost")
DEADLINE_S = 180.0
"""Longer than the session timeout of the group and the timeout of a transaction that a kill leaves open."""
STREAMS = {
    "application.id": "word-count",
    "commit.interval.ms": 200,
    "num.stream.threads": 1,
    "consumer.session.timeout.ms": 6000,
    "consumer.heartbeat.interval.ms": 500,
    "consumer.auto.offset.reset": "earliest",
    "producer.transaction.timeout.ms": 5000,
    "replication.factor": 1,
    "repartition.purge.interval.ms": 1000,
}


class WordCount:
    """Instances of the word count, one at a time."""

    def __init__(self, command: list[str], broker: ServedBroker, place: Path, **more: object) -> None:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "state.dir": place / "state", **STREAMS}
        options = [f"{name}={value}" for name, value in {**settings, **more}.items()]
        self._command = [*command, "lines", "counts", *options]
        self._log = place / "streams.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def check(self) -> None:
        """Raise `AssertionError` with its output unless it runs."""
        assert self._process is not None
        assert self._process.poll() is None, self.text()

    def text(self) -> str:
        return self._log.read_text(errors="replace")[-8_000:]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(scaled(30))


@contextmanager
def counting(command: list[str], broker: ServedBroker, place: Path, **more: object) -> Iterator[WordCount]:
    one = WordCount(command, broker, place, **more)
    try:
        one.start()
        yield one
    finally:
        one.kill()


def write(broker: ServedBroker, begin: int, end: int) -> Counter[str]:
    """Write lines of words in an order of their own; the words that are in them."""
    lines = [
        [WORDS[(n * 3 + position * position) % len(WORDS)] for position in range(1 + n % 5)]
        for n in range(begin, end)
    ]
    with blocking.connect(broker.bootstrap_servers) as client:
        client.publish_many(
            "lines", [OutgoingRecord(" ".join(line).encode(), key=b"%d" % n) for n, line in enumerate(lines)]
        )
    return Counter(word for line in lines for word in line)


def counts(broker: ServedBroker) -> dict[str, list[int]]:
    """The counts of each word in the order of the output, as readers of committed records see them."""
    found = defaultdict(list)
    with blocking.connect(broker.bootstrap_servers) as client:
        for message in client.consume("counts", to_end=True):
            found[(message.key or b"").decode()].append(int(present(message.value)))
    return dict(found)


def total(broker: ServedBroker) -> int:
    return sum(map(len, counts(broker).values()))


@pytest.mark.parametrize("restarts_broker", [False, True], ids=["killed", "killed-with-the-broker"])
def test_word_count_that_is_killed_and_started_again_is_exact(tmp_path: Path, restarts_broker: bool) -> None:
    command = compiled("JavaWordCount", tmp_path / "classes", "java_streams")
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        for topic in ("lines", "counts"):
            create_topic(broker.bootstrap_servers, topic, PARTITIONS)
        words: Counter[str] = Counter()
        with counting(command, broker, tmp_path) as one:

            def further(least: int) -> None:
                def reached() -> bool:
                    one.check()
                    return total(broker) >= least

                wait_until(reached, DEADLINE_S)

            for life in range(KILLS):
                begin = sum(words.values())
                words += write(broker, life * LINES, (life + 1) * LINES)
                further(begin + life * 20 + 1)
                one.kill()
                if restarts_broker:
                    broker.kill()
                    broker.start()
                one.start()
            words += write(broker, KILLS * LINES, (KILLS + 1) * LINES)
            further(sum(words.values()))
            found = counts(broker)
            assert found == {word: list(range(1, number + 1)) for word, number in words.items()}
        assert "Traceback" not in broker.text()
