"""Limits that settings define hold over real connections; each is tested with a small value."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from mansio.api.kafka.connections.connection import Connection
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from support.machine import scaled
from support.paths import free_port, mansio_command
from support.present import present
from support.raw_peer import RawPeer, batch_of, fetch_frame, length_prefixed, produce_frame
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1024
MEBI = KIB * KIB


def port_of(broker: EmbeddedBroker) -> int:
    return int(broker.address.rpartition(":")[2])


def serves(peer: RawPeer) -> bool:
    try:
        return peer.call(ApiKey.API_VERSIONS, 3).error_code == 0
    except (OSError, AssertionError):
        return False


def connected_and_served(port: int) -> RawPeer | None:
    peer = RawPeer(port)
    if serves(peer):
        return peer
    peer.socket.close()
    return None


def test_connections_max_refuses_one_more_and_room_is_given_back(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, max_connections=3) as broker:
        peers = [RawPeer(port_of(broker)) for _ in range(3)]
        assert all(serves(peer) for peer in peers)
        with RawPeer(port_of(broker)) as refused:
            assert not serves(refused)
        peers.pop().socket.close()
        again = wait_until(lambda: connected_and_served(port_of(broker)), 20, "room for one again")
        for peer in (*peers, again):
            assert serves(peer)
            peer.socket.close()


def test_idle_connection_is_closed_and_a_busy_one_is_not(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tmp_path, connections_max_idle_ms=300) as broker,
        RawPeer(port_of(broker)) as idle,
        RawPeer(port_of(broker)) as waiting,
    ):
        waiting.create_topic("quiet")
        waiting.send(fetch_frame("quiet", wait_ms=3000))
        assert idle.closed(15.0)
        assert waiting.frame() is not None, "a parked fetch is not idle"


@pytest.mark.row("P5")
def test_frame_bytes_max_closes_at_the_announcement(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tmp_path, socket_request_max_bytes=64 * KIB) as broker,
        RawPeer(port_of(broker)) as peer,
    ):
        peer.create_topic("small")
        fitting = batch_of(b"x" * 60 * KIB)
        assert peer.produce("small", fitting).error_code == 0
        peer.send(length_prefixed(b"x" * (64 * KIB + 1))[:8])
        assert peer.closed(15.0)


def test_fetch_bytes_max_bounds_an_answer_and_one_batch_always_fits(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, fetch_max_bytes=50_000) as broker, RawPeer(port_of(broker)) as peer:
        peer.create_topic("many")
        for _ in range(20):
            peer.produce("many", batch_of(b"x" * 10_000))
        peer.produce("many", batch_of(b"y" * 200_000))

        def fetched(offset: int, max_bytes: int) -> list[int]:
            peer.send(fetch_frame("many", offset=offset, max_bytes=max_bytes))
            answer = peer.frame()
            assert answer is not None
            records = fetch.decode_response(12, answer).topics[0][2][0].records
            return [header.base_offset for _, header in iterate_batches(records)]

        assert fetched(0, MEBI) == [0, 1, 2, 3]
        assert fetched(0, 1) == [0], "a first batch larger than the bound is sent all the same"
        assert fetched(20, MEBI) == [20]


def test_fetch_wait_ms_max_ends_a_longer_wait(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, fetch_wait_ms_max=200) as broker, RawPeer(port_of(broker)) as peer:
        peer.create_topic("quiet")
        begin = time.monotonic()
        peer.send(fetch_frame("quiet", wait_ms=60_000))
        assert peer.frame() is not None
        assert 0.15 <= time.monotonic() - begin < scaled(15.0)


def test_fetch_that_names_a_partition_many_times_does_not_wait(tmp_path: Path) -> None:
    """Each append to it would cost others as many looks as it names it."""
    with EmbeddedBroker(tmp_path) as broker, RawPeer(port_of(broker)) as peer:
        peer.create_topic("quiet")
        wanted = [("quiet", None, [fetch.FetchPartition(0, -1, 0, -1, -1, MEBI)] * 500)]
        peer.send(
            fetch.encode_request(12, 1, "many", wanted, max_wait_ms=25_000, min_bytes=MEBI, max_bytes=MEBI)
        )
        answer = peer.frame(15.0)
        assert answer is not None
        assert len(fetch.decode_response(12, answer).topics[0][2]) == 500


def test_fetch_waits_for_min_bytes_and_is_woken_by_them(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tmp_path) as broker,
        RawPeer(port_of(broker)) as reader,
        RawPeer(port_of(broker)) as writer,
    ):
        writer.create_topic("drops")
        reader.send(fetch_frame("drops", wait_ms=20_000, min_bytes=1000))
        writer.produce("drops", batch_of(b"x" * 100))
        assert not reader.closed(0.2), "too little to answer yet"
        writer.produce("drops", batch_of(b"x" * 2000))
        answer = reader.frame(5.0)
        assert answer is not None
        assert fetch.decode_response(12, answer).topics[0][2][0].high_watermark == 2


@pytest.mark.row("L1")
def test_partitions_max_refuses_a_topic_with_a_typed_error(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, partitions_max=5) as broker, RawPeer(port_of(broker)) as peer:
        topic = {"name": "wide", "num_partitions": 6, "replication_factor": 1}
        refused = peer.call(ApiKey.CREATE_TOPICS, 5, {"topics": [topic], "timeout_ms": 5000}).topics[0]
        assert refused.error_code != 0
        assert refused.error_message
        peer.create_topic("narrow", 5)
        grow = {"topics": [{"name": "narrow", "count": 6}], "timeout_ms": 5000}
        assert peer.call(ApiKey.CREATE_PARTITIONS, 1, grow).results[0].error_code != 0
        assert peer.produce("narrow", batch_of(b"x"), partition=4).error_code == 0


def test_connections_per_ip_max_refuses_one_more_from_there_and_room_is_given_back(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, max_connections_per_ip=2, max_connections=100) as broker:
        server = present(broker._broker).server
        assert server is not None
        peers = [RawPeer(port_of(broker)) for _ in range(2)]
        assert all(serves(peer) for peer in peers)
        with RawPeer(port_of(broker)) as refused:
            assert not serves(refused)
        assert server.counters.rejected_by_reason["max_connections_per_ip"] == 1
        peers.pop().socket.close()
        again = wait_until(lambda: connected_and_served(port_of(broker)), 20, "room for one again")
        for peer in (*peers, again):
            assert serves(peer)
            peer.socket.close()


def test_broker_that_may_open_few_files_takes_fewer_connections_and_goes_on(tmp_path: Path) -> None:
    """With `ulimit -n 500` and the default of 4096 connections: the rest is refused, segments still roll."""
    shell = 'ulimit -n 500; exec "$0" "$@"'
    command = ["sh", "-c", shell, *mansio_command(), "serve", "--data", str(tmp_path / "data"), "--http", ""]
    port = free_port()
    output = (tmp_path / "log").open("wb")
    broker = subprocess.Popen([*command, "--kafka", f"127.0.0.1:{port}"], stdout=output, stderr=output)
    peers: list[RawPeer] = []
    try:
        wait_until(lambda: b"ready" in (tmp_path / "log").read_bytes(), 60, "the broker is ready")
        writer = connected_and_served(port)
        assert writer is not None
        writer.create_topic("rolls", segment_bytes=str(MEBI))
        served = 0
        for _ in range(8):
            # No more at a time than may wait to be accepted: the system has others try again a second later.
            some = [RawPeer(port) for _ in range(50)]
            served += sum(serves(peer) for peer in some)
            peers += some
        assert 0 < served < 300
        assert b"ulimit -n" in (tmp_path / "log").read_bytes()
        for _ in range(8):
            assert writer.produce("rolls", batch_of(b"x" * 400_000)).error_code == 0
        for peer in peers:
            peer.socket.close()
        again = wait_until(lambda: connected_and_served(port), 20, "others are taken again")
        peers = [writer, again]
    finally:
        broker.kill()
        broker.wait(scaled(10))
        output.close()
        for peer in peers:
            peer.socket.close()


def test_connection_that_is_paused_begins_nothing_and_goes_on_by_itself(tmp_path: Path) -> None:
    """What throttling (KIP-219) uses: frames that have arrived already wait too, and keep their order."""
    with EmbeddedBroker(tmp_path) as broker, RawPeer(port_of(broker)) as peer:
        assert serves(peer)
        server = present(broker._broker).server
        assert server is not None
        (connection,) = server._connections
        begin = time.monotonic()
        server.loop.call_soon_threadsafe(connection.pause_reading_ms, 1000)
        wait_until(lambda: connection.is_unread, 20, "it is paused")
        peer.send(produce_frame([("nowhere", None, [(0, batch_of(b"x"))])]) * 3)
        assert peer.frame() is not None
        assert 0.9 < time.monotonic() - begin < scaled(15.0)
        assert [peer.frame() is not None for _ in range(2)] == [True, True]
        peer.create_topic("quiet")
        wait_ms = int(scaled(800))  # long enough that the pause begins before the fetch ends
        peer.send(
            fetch_frame("quiet", wait_ms=wait_ms) + produce_frame([("quiet", None, [(0, batch_of(b"x"))])])
        )
        wait_until(lambda: connection.backlog_bytes, 20, "a request waits behind the fetch")
        server.loop.call_soon_threadsafe(connection.pause_reading_ms, 60_000)
        assert peer.frame() is not None, "answers leave all the same"
        assert connection._muted is not None
        assert connection.backlog_bytes, "what waited is not begun"
        server.loop.call_soon_threadsafe(connection.end_pause)
        assert peer.frame() is not None
        server.loop.call_soon_threadsafe(connection.pause_reading_ms, 60_000)
        wait_until(lambda: connection._muted is not None, 20, "it is paused again")
        peer.socket.close()
        begin = time.monotonic()
    assert time.monotonic() - begin < scaled(15.0), (
        "a paused connection does not hold up the end of the broker"
    )


def test_what_a_handler_keeps_of_a_request_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections read into the same memory: it is overwritten here as soon as a read has been handled."""
    handled = Connection.buffer_updated

    def then_spoil(connection: Connection, count: int) -> None:
        handled(connection, count)
        scratch = connection._server.receive_scratch
        scratch[:] = b"\xa5" * len(scratch)

    monkeypatch.setattr(Connection, "buffer_updated", then_spoil)
    with EmbeddedBroker(tmp_path) as broker:
        with blocking.connect(broker.address) as client:
            client.admin.create_topic("kept", partitions=3)
            values = [b"value %d" % number for number in range(500)]
            client.publish_many("kept", values)
            with client.consume("kept", group="keepers", to_end=True) as consumer:
                assert sorted(present(message.value) for message in consumer) == sorted(values)
        with RawPeer(port_of(broker)) as peer:
            for number in range(20):
                peer.send(
                    produce_frame([("kept", None, [(0, batch_of(b"%d" % number))])])
                    + fetch_frame("kept", offset=0, number=2)
                )
                assert peer.frame() is not None
                assert peer.frame() is not None


def test_reset_of_a_connection_that_is_not_read_is_noticed_and_a_half_closed_one_stays(
    tmp_path: Path,
) -> None:
    with EmbeddedBroker(tmp_path) as broker, RawPeer(port_of(broker)) as half_closed:
        assert serves(half_closed)
        server = present(broker._broker).server
        (staying,) = server._connections
        gone = RawPeer(port_of(broker))
        assert serves(gone)
        (vanishing,) = set(server._connections) - {staying}
        for connection in (staying, vanishing):
            server.loop.call_soon_threadsafe(connection.pause_reading_ms, 60_000)
            wait_until(lambda paused=connection: paused.is_unread, 20, "it is paused")
        half_closed.socket.shutdown(socket.SHUT_WR)
        gone.vanish()
        wait_until(lambda: vanishing.closed, 20, "the reset is noticed")
        assert not staying.closed
