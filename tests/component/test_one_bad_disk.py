"""A disk failure in one partition: its clients get errors, other partitions are not affected."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.api.kafka.connections.connection import Connection
from mansio.host.disk import HostDisk, HostFile
from mansio.wire.apis import produce
from support.present import present
from support.raw_peer import RawPeer, batch_of, fetch_frame, produce_frame
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KAFKA_STORAGE_ERROR = 56


class BadDisk:
    """Makes calls on files of chosen paths fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: set[str] = set()
        self.syncs: set[str] = set()
        for name, bad in (("read_at", self.reads), ("sync", self.syncs)):
            monkeypatch.setattr(HostFile, name, self._failing(getattr(HostFile, name), bad))
        # one file system, so that files are synced one by one
        monkeypatch.setattr("mansio.host.disk.HostDisk.sync_all", lambda self, path: False)

    @staticmethod
    def _failing(true: Callable[..., Any], bad: set[str]) -> Callable[..., Any]:
        def call(self: HostFile, *arguments: Any) -> Any:
            if any(part in self.path for part in bad):
                raise OSError(errno.EIO, "Input/output error", self.path)
            return true(self, *arguments)

        return call


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    return BadDisk(monkeypatch)


def port_of(broker: mansio.Broker) -> int:
    return int(broker.address.rpartition(":")[2])


def test_reader_whose_disk_fails_is_cut_off_and_the_reader_beside_it_is_served(
    tmp_path: Path, bad_disk: BadDisk
) -> None:
    with mansio.Broker(tmp_path) as broker, RawPeer(port_of(broker)) as writer:
        for topic in ("bad", "good"):
            writer.create_topic(topic)
            assert writer.produce(topic, batch_of(b"first")).error_code == 0
        with RawPeer(port_of(broker)) as unlucky, RawPeer(port_of(broker)) as lucky:
            for peer, topic in ((unlucky, "bad"), (lucky, "good")):
                peer.send(fetch_frame(topic, offset=0))
                assert peer.frame() is not None
                peer.send(fetch_frame(topic, offset=1, wait_ms=5000))
            bad_disk.reads.add("/bad.")
            both = [(topic, None, [(0, memoryview(batch_of(b"second")))]) for topic in ("bad", "good")]
            writer.send(produce_frame(both))
            assert writer.frame() is not None
            answer = lucky.frame()
            assert answer is not None
            assert b"second" in answer
            last = unlucky.frame()  # raises when there is neither an answer nor an end
            assert last is None or b"second" not in last
            lucky.send(fetch_frame("good", offset=0))
            assert lucky.frame() is not None


@pytest.mark.row("P5")
def test_failed_sync_is_reported_to_its_own_producer_and_the_other_partition_of_the_request_is_unharmed(
    tmp_path: Path, bad_disk: BadDisk
) -> None:
    with mansio.Broker(tmp_path) as broker, RawPeer(port_of(broker)) as writer:
        for topic in ("bad", "good"):
            writer.create_topic(topic)
        bad_disk.syncs.add("/bad.")
        both = [(topic, None, [(0, memoryview(batch_of(b"value")))]) for topic in ("bad", "good")]
        writer.send(produce_frame(both))
        answer = writer.frame()
        assert answer is not None
        results = {name: entries[0] for name, _, entries in produce.decode_response(9, answer).topics}
        assert results["bad"].error_code == KAFKA_STORAGE_ERROR
        assert results["good"].error_code == 0
        bad_disk.syncs.clear()
        assert writer.produce("bad", batch_of(b"again")).error_code == KAFKA_STORAGE_ERROR, "not retried"
        assert writer.produce("good", batch_of(b"again")).error_code == 0
        assert list(present(broker._broker).service.partitions.failures()) == ["bad-0"]


def test_many_pipelined_fetches_hold_no_more_answers_than_allowed(tmp_path: Path) -> None:
    import psutil

    with mansio.Broker(tmp_path, in_flight_bytes_per_connection_max=1 << 20) as broker:
        with RawPeer(port_of(broker)) as writer:
            writer.create_topic("t")
            assert writer.produce("t", batch_of(b"x" * 60_000)).error_code == 0
        with RawPeer(port_of(broker), receive_buffer_bytes=4096) as deaf:
            before = psutil.Process().memory_info().rss
            frame = fetch_frame("t", offset=0, wait_ms=0)
            deaf.send(frame * 1000)  # 60 MB of answers
            with RawPeer(port_of(broker)) as other:
                for _ in range(20):
                    other.end_offset("t")
            assert psutil.Process().memory_info().rss - before < 40 << 20


def test_a_refused_batch_with_acks_0_ends_the_connection_so_that_the_client_looks_again(
    tmp_path: Path,
) -> None:
    with mansio.Broker(tmp_path) as broker, RawPeer(port_of(broker)) as writer:
        writer.create_topic("t")
        writer.send(produce_frame([("t", None, [(0, memoryview(batch_of(b"fine")))])], acks=0))
        writer.send(produce_frame([("gone", None, [(0, memoryview(batch_of(b"lost")))])], acks=0))
        assert writer.closed()


def test_no_disk_is_waited_for_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating topics, the first commit of a group, producing: every sync belongs to another thread."""
    where: dict[str, set[str]] = {"sync": set(), "sync_directory": set(), "sync_all": set()}
    for owner, name in ((HostFile, "sync"), (HostDisk, "sync_directory"), (HostDisk, "sync_all")):
        true = getattr(owner, name)

        def spied(self: Any, *arguments: Any, true: Any = true, name: str = name) -> Any:
            where[name].add(threading.current_thread().name)
            return true(self, *arguments)

        monkeypatch.setattr(owner, name, spied)
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        for threads in where.values():
            threads.clear()
        client.admin.create_topic("t", partitions=3, config={"segment.bytes": "2048"})
        for number in range(20):
            client.publish("t", b"x" * 1000, partition=number % 3)
        client.admin.reset_offsets("g", ["t"], to="latest")
        client.admin.create_partitions("t", 6)
        client.admin.delete_topic("t")
        assert where["sync"]
        assert "mansio-broker" not in set().union(*where.values())


def test_frames_behind_a_parked_fetch_cost_nothing_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[int] = []
    true = Connection._drain_backlog

    def counted(self: Connection) -> None:
        drains.append(1)
        true(self)

    monkeypatch.setattr(Connection, "_drain_backlog", counted)
    with mansio.Broker(tmp_path) as broker, RawPeer(port_of(broker)) as peer:
        peer.create_topic("t")
        drains.clear()
        peer.send(fetch_frame("t", wait_ms=200) * 3)
        for _ in range(3):
            assert peer.frame() is not None
        assert len(drains) <= 6


@pytest.mark.row("P5")
def test_with_acks_0_the_other_batches_of_a_request_are_written_before_the_connection_ends(
    tmp_path: Path,
) -> None:
    with mansio.Broker(tmp_path) as broker, RawPeer(port_of(broker)) as writer:
        writer.create_topic("t")
        both = [(topic, None, [(0, memoryview(batch_of(b"value")))]) for topic in ("gone", "t")]
        writer.send(produce_frame(both, acks=0))
        assert writer.closed()
        with RawPeer(port_of(broker)) as reader:
            wait_until(lambda: reader.end_offset("t") == 1, 20, "the sound batch is there")
