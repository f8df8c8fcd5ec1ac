"""Transactions as Apache Kafka's Java producer and consumer use them: transaction version 2 (KIP-890), in which the
broker adds partitions by itself and each transaction has an epoch of its own, and groups of both protocols.

Nightly: needs a JDK and Maven. Always true: each line told to the clients has an answer within a deadline; their
process is gone when the tests end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.wire.api_versions import ApiKey
from nightly.interop.java_client import Conversation, compiled
from support.paths import free_port
from support.process import served
from support.recording_proxy import recording
from support.waiting import wait_until
from system.interop.conftest import ARGUMENTS, create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.recording_proxy import RecordingProxy

pytestmark = [pytest.mark.timeout(900), pytest.mark.row("P4")]

PARTITIONS = 2


class Clients(Conversation):
    """The Java clients, a broker's address, and what they asked of it."""

    def __init__(self, command: list[str], bootstrap_servers: str, proxy: RecordingProxy) -> None:
        settings = (
            f"bootstrap.servers={bootstrap_servers}",
            "enable.auto.commit=false",
            "retry.backoff.ms=20",
        )
        super().__init__([*command, *settings])
        self.bootstrap_servers = bootstrap_servers
        self._proxy = proxy

    def versions(self, api: ApiKey) -> set[int]:
        """The versions in which requests of this kind were made."""
        return {one.version for one in self._proxy.requests if one.api_key == api}

    def do(self, *lines: str) -> None:
        for line in lines:
            self.ask(line)

    def producer(self, name: str, **settings: object) -> None:
        """Open one; its transactional id is its name up to the dash."""
        config = {"transactional.id": name.partition("-")[0], **settings}
        words = " ".join(f"{key.replace('_', '.')}={value}" for key, value in config.items())
        self.ask(f"producer {name} {words}")

    def ended(self, transactional_id: str) -> str:
        """State and epoch of a transaction whose markers are written, which may be after the answer to the client."""

        def completed() -> str:
            state = self.ask(f"describe {transactional_id}")
            return state if state.startswith("Complete") else ""

        return wait_until(completed, 60)

    def error(self, line: str) -> str:
        """The class of the exception that a call raises."""
        word, name = self.say(line).split()[:2]
        assert word == "error", line
        return name.rstrip(":")

    def read(
        self, topic: str, isolation: str = "read_committed", begin: int = 0, fetch_bytes: int = 1 << 20
    ) -> list[str]:
        """All values up to the end that a consumer of this isolation level sees, by partition and offset."""
        found = self.ask(f"read {topic} {isolation} {begin} {fetch_bytes}").split()
        return [one.split(":")[2] for one in found]

    def reads(self, topic: str, values: list[str]) -> None:
        """Check what readers of committed records see when the markers are written, which may be after the answer to
        the producer."""
        wait_until(lambda: len(self.read(topic)) >= len(values), 60)
        assert self.read(topic) == values


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    command = compiled("JavaTransactions", tmp_path_factory.mktemp("classes"))
    port = free_port()
    arguments = [*ARGUMENTS, "--set", f"advertised_listeners=127.0.0.1:{port}"]
    with (
        served(tmp_path_factory.mktemp("java") / "data", arguments=arguments, http=False) as broker,
        recording(port, broker.kafka_port) as proxy,
    ):
        clients = Clients(command, f"127.0.0.1:{port}", proxy)
        try:
            yield clients
        finally:
            clients.kill()
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0


def test_commits_are_read_whole_and_aborts_never_with_an_epoch_for_each_transaction(java: Clients) -> None:
    create_topic(java.bootstrap_servers, "ended", PARTITIONS)
    java.producer("ended")
    java.do("begin ended", "send ended ended 0 a b", "send ended ended 1 c", "flush ended")
    assert java.read("ended") == []
    assert java.read("ended", "read_uncommitted") == ["a", "b", "c"]
    java.ask("commit ended")
    java.reads("ended", ["a", "b", "c"])
    states = [java.ended("ended")]
    java.do("begin ended", "send ended ended 0 x", "send ended ended 1 y", "flush ended", "abort ended")
    states.append(java.ended("ended"))
    java.do("begin ended", "send ended ended 1 d", "commit ended")
    states.append(java.ended("ended"))
    java.reads("ended", ["a", "b", "c", "d"])
    assert [state.split(":")[0] for state in states] == ["CompleteCommit", "CompleteAbort", "CompleteCommit"]
    epochs = [int(state.split(":")[1]) for state in states]
    assert epochs == sorted(set(epochs)), "each transaction has an epoch of its own"
    assert min(java.versions(ApiKey.END_TXN)) >= 5, "transaction version 2"
    assert not java.versions(ApiKey.ADD_PARTITIONS_TO_TXN), "the first batch adds a partition"


def test_second_producer_fences_the_first_one_and_aborts_its_transaction(java: Clients) -> None:
    create_topic(java.bootstrap_servers, "fenced", PARTITIONS)
    java.producer("fenced-1")
    java.do("begin fenced-1", "send fenced-1 fenced 0 zombie", "flush fenced-1")
    java.producer("fenced-2")
    assert java.error("commit fenced-1") in ("ProducerFencedException", "InvalidProducerEpochException")
    java.do("begin fenced-2", "send fenced-2 fenced 0 successor", "commit fenced-2")
    java.reads("fenced", ["successor"])
    java.do("close fenced-1", "close fenced-2")


def test_reader_leaves_out_aborted_ranges_of_interleaved_transactions_in_fetches_of_any_size(
    java: Clients,
) -> None:
    create_topic(java.bootstrap_servers, "ranges", 1)
    names = ("ranges0", "ranges1", "ranges2")
    for name in names:
        java.producer(name)
    committed = []
    for turn in range(12):
        java.do(*(f"begin {name}" for name in names))
        for part in range(2):  # batches of the three transactions follow one another
            for name in names:
                java.do(
                    f"send {name} ranges 0 " + " ".join(f"{name}.{turn}.{part}.{n}" for n in range(3)),
                    f"flush {name}",
                )
        for number, name in enumerate(names):
            java.ask(f"{'abort' if (turn + number) % 3 else 'commit'} {name}")
        kept = names[-turn % 3]
        committed += [f"{kept}.{turn}.{part}.{n}" for part in range(2) for n in range(3)]
    everything = java.read("ranges", "read_uncommitted")
    assert len(everything) == 12 * 3 * 6
    java.reads("ranges", committed)
    for fetch_bytes in (1, 700, 1 << 20):
        assert java.read("ranges", fetch_bytes=fetch_bytes) == committed
    places = [place.split(":")[1:] for place in java.ask("read ranges read_committed 0 1000000").split()]
    for begin in (1, 4, 7, 20, 50, 101, 180):  # also in the middle of aborted transactions
        assert java.read("ranges", begin=begin) == [value for offset, value in places if int(offset) >= begin]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_offsets_of_a_group_are_committed_with_the_records_and_dropped_with_an_abort(
    java: Clients, protocol: str
) -> None:
    source, target, mover = f"source_{protocol}", f"target_{protocol}", f"mover_{protocol}"
    create_topic(java.bootstrap_servers, source, PARTITIONS)
    create_topic(java.bootstrap_servers, target, PARTITIONS)
    java.producer(f"filler_{protocol}")
    java.do(
        f"begin filler_{protocol}",
        f"send filler_{protocol} {source} 0 a b c",
        f"send filler_{protocol} {source} 1 d",
    )
    java.ask(f"commit filler_{protocol}")
    group = f"group.id={mover} group.protocol={protocol} auto.offset.reset=earliest isolation.level=read_committed"
    java.ask(f"consumer {mover} {source} {group}")
    assert sorted(java.ask(f"poll {mover} 4").split()) == ["a", "b", "c", "d"]
    java.producer(mover)
    move = (f"begin {mover}", f"send {mover} {target} 0 a b c d", f"offsets {mover} {mover}")
    java.do(*move, f"abort {mover}")
    assert java.ask(f"committed {mover}") == "0:-1 1:-1"
    java.do(*move, f"commit {mover}")
    # the control record that ends the transaction of the filler is behind each partition's records
    assert java.ask(f"committed {mover}") == "0:4 1:2"
    java.reads(target, ["a", "b", "c", "d"])
    java.do(f"close {mover}")  # the producer
    java.do(f"close {mover}")  # the consumer
    assert not java.versions(ApiKey.ADD_OFFSETS_TO_TXN), "the first commit of offsets adds the group"
    assert max(java.versions(ApiKey.TXN_OFFSET_COMMIT)) >= 5


def test_member_that_left_its_group_cannot_commit_offsets_in_a_transaction(java: Clients) -> None:
    create_topic(java.bootstrap_servers, "left", 1)
    java.producer("left")
    java.do("begin left", "send left left 0 a", "commit left")
    group = "group.id=left auto.offset.reset=earliest session.timeout.ms=6000 group.protocol=classic"
    java.do(f"consumer left-1 left {group} group.instance.id=one", "poll left-1 1")
    java.do(f"consumer left-2 left {group} group.instance.id=one", "poll left-2 1")  # takes its place
    java.do("begin left", "send left left 0 b")
    assert java.error("offsets left left-1") in ("FencedInstanceIdException", "CommitFailedException")
    java.do("abort left", "begin left", "send left left 0 c", "offsets left left-2", "commit left")
    java.reads("left", ["a", "c"])


def test_transaction_that_exceeds_its_timeout_is_aborted_and_its_producer_gets_the_error(
    java: Clients,
) -> None:
    create_topic(java.bootstrap_servers, "late", 1)
    java.producer("late-1", transaction_timeout_ms=1_000)
    java.do("begin late-1", "send late-1 late 0 never", "flush late-1")
    wait_until(lambda: java.ask("describe late").startswith("CompleteAbort"), 60)
    assert "Exception" in java.error("commit late-1")
    java.do("close late-1")
    java.producer("late-2")
    java.do("begin late-2", "send late-2 late 0 after", "commit late-2")
    java.reads("late", ["after"])


def test_records_behind_an_open_transaction_wait_for_its_end(java: Clients) -> None:
    create_topic(java.bootstrap_servers, "open", 1)
    for name in ("open0", "open1"):
        java.producer(name)
    java.do("begin open0", "send open0 open 0 first", "flush open0")
    java.do("begin open1", "send open1 open 0 second", "commit open1")
    assert java.read("open") == []
    java.ask("commit open0")
    java.reads("open", ["first", "second"])
