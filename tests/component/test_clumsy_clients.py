"""Clients that disconnect at any moment: nothing of their connection remains.

A seed chooses many short connections to one broker in this process. Afterwards the tests check the broker's
connections, descriptors, memory accounts, parked fetches, waiting writes, group members, tasks and, with the garbage
collector off, its objects.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from mansio.api.kafka.connections.connection import Connection
from mansio.api.kafka.connections.pending_response import PendingResponse
from mansio.api.kafka.connections.socket_writer import SocketWriter
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer, batch_of, fetch_frame, produce_frame
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Moment = Callable[[RawPeer, Random], None]

LIVES = 250
SESSION_MS = 300
MIB = 1 << 20
GROUPS = ("flock", "herd", "swarm")

API_VERSIONS = messages.encode_request(ApiKey.API_VERSIONS, 3, 1, "clumsy", {})
METADATA = messages.encode_request(ApiKey.METADATA, 9, 1, "clumsy", {"topics": None})
WRITE = produce_frame([("target", None, [(0, batch_of(b"w" * 2_000))])])
LARGE_WRITE = produce_frame([("target", None, [(0, batch_of(b"W" * 900_000))])])
PARKED = fetch_frame("silent", wait_ms=30_000)
FETCH_ALL = fetch_frame("stored", max_bytes=4 * MIB)


def join_frame(group: str) -> bytes:
    fields = {
        "group_id": group,
        "session_timeout_ms": SESSION_MS,
        "rebalance_timeout_ms": SESSION_MS,
        "member_id": "",
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"\0\1\0\0\0\0\0\0\0\0"}],
    }
    return messages.encode_request(ApiKey.JOIN_GROUP, 3, 1, "clumsy", fields)


def in_the_handshake(peer: RawPeer, random: Random) -> None:
    peer.send(API_VERSIONS[: random.randrange(len(API_VERSIONS))])


def in_a_write(peer: RawPeer, random: Random) -> None:
    frame = random.choice((WRITE, LARGE_WRITE))
    peer.send(frame[: random.randrange(1, len(frame))])


def while_its_write_waits_for_the_disk(peer: RawPeer, random: Random) -> None:
    peer.send(WRITE * random.randrange(1, 20))


def while_large_writes_wait_for_their_turn(peer: RawPeer, random: Random) -> None:
    peer.send(PARKED + LARGE_WRITE * random.randrange(1, 4))


def in_a_parked_fetch(peer: RawPeer, random: Random) -> None:
    peer.send(PARKED + random.choice((b"", WRITE, METADATA, PARKED)))


def in_the_answer_of_a_fetch(peer: RawPeer, random: Random) -> None:
    peer.send(FETCH_ALL * random.randrange(1, 4))
    peer.socket.recv(random.randrange(1, 100_000))


def in_a_join(peer: RawPeer, random: Random) -> None:
    peer.send(join_frame(random.choice(GROUPS)) + random.choice((b"", METADATA)))


def after_a_join(peer: RawPeer, random: Random) -> None:
    peer.send(join_frame(random.choice(GROUPS)))
    peer.socket.settimeout(random.choice((0.01, 0.2)))
    with suppress(TimeoutError):
        peer.socket.recv(10)


def in_a_flood(peer: RawPeer, random: Random) -> None:
    peer.socket.settimeout(0.05)
    with suppress(TimeoutError):
        peer.send(METADATA * random.randrange(2000))


def with_garbage(peer: RawPeer, random: Random) -> None:
    peer.send(random.randbytes(random.randrange(1, 200)))


def half_closed(peer: RawPeer, random: Random) -> None:
    peer.send(random.choice((WRITE, PARKED, FETCH_ALL, METADATA, API_VERSIONS[:7])))
    peer.socket.shutdown(socket.SHUT_WR)
    if random.random() < 0.5:
        peer.socket.settimeout(0.05)
        with suppress(TimeoutError):
            peer.socket.recv(100)


def at_once(peer: RawPeer, random: Random) -> None:
    """Sends nothing at all."""


MOMENTS: tuple[Moment, ...] = (
    in_the_handshake,
    in_a_write,
    while_its_write_waits_for_the_disk,
    while_large_writes_wait_for_their_turn,
    in_a_parked_fetch,
    in_the_answer_of_a_fetch,
    in_a_join,
    after_a_join,
    in_a_flood,
    with_garbage,
    half_closed,
    at_once,
)


def live(port: int, random: Random, moment: Moment) -> RawPeer:
    peer = RawPeer(port, receive_buffer_bytes=random.choice((0, 0, 4096)))
    if random.random() < 0.3:
        peer.send(API_VERSIONS)
    with suppress(ConnectionError):  # the broker may be the first to hang up
        moment(peer, random)
    return peer


def end(peer: RawPeer, random: Random) -> None:
    if random.random() < 0.5:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    peer.socket.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    settings: dict[str, Any] = {
        "group_min_session_timeout_ms": 10,
        "group_initial_rebalance_delay_ms": 20,
        "fetch_wait_ms_max": 1000,
        "queued_max_request_bytes": 4 * MIB,
        "in_flight_bytes_per_connection_max": 2 * MIB,
    }
    with EmbeddedBroker(tmp_path_factory.mktemp("clumsy"), **settings) as running:
        with RawPeer(port_of(running)) as peer:
            for topic in ("target", "silent", "stored"):
                peer.create_topic(topic)
            for _ in range(4):
                peer.produce("stored", batch_of(b"s" * 900_000))
            joined = peer.call(ApiKey.FIND_COORDINATOR, 0, {"key": GROUPS[0]})
            assert joined.error_code == 0
            peer.send(join_frame(GROUPS[0]))
            assert peer.frame() is not None
        yield running


def port_of(broker: EmbeddedBroker) -> int:
    return int(broker.address.rpartition(":")[2])


def left_behind(broker: EmbeddedBroker) -> dict[str, object]:
    """What the broker still keeps for connections and their requests; empty when that is nothing."""
    service = present(broker._broker).service
    server = present(broker._broker).server
    memory = server.memory
    found: dict[str, object] = {
        "connections": server.connection_count,
        "hosts": dict(server._hosts),
        "receive memory": memory.held_bytes,
        "holders": len(memory._held) + len(memory._waiting) + len(memory._progress),
        "deadlock winner": memory._deadlock_winner,
        "unsent answers": server.unsent_bytes + len(server._unsent),
        "parked fetches": len(service.fetch.parked),
        "pending writes": len(service.produce.pending),
        "parked at partitions": sum(len(one.waits.readers) for one in service.partitions),
        "waiting for commits": sum(len(one.waits.commits) for one in service.partitions),
        "waiting for groups": len(service.group_coordinator.actions.waiting),
        "members": sum(
            len(entry.group.members) for entry in tuple(service.group_coordinator.store.entries.values())
        ),
    }
    return {name: value for name, value in found.items() if value}


def objects_of_connections(known: Sequence[object] = ()) -> list[object]:
    """Those of this process, without the `known` ones, which belong to others."""
    others = {id(one) for one in known}
    return [
        found
        for found in gc.get_objects()
        if type(found) in (Connection, PendingResponse, SocketWriter) and id(found) not in others
    ]


def described(one: object) -> str:
    """Why it is still there."""
    names = ("closed", "client_host", "busy", "received_bytes", "waiting_bytes", "_transport", "_writing")
    state = {name: getattr(one, name) for name in names if hasattr(one, name)}
    return f"{type(one).__name__} {state}, held by {[type(by).__name__ for by in gc.get_referrers(one)]}"


def open_descriptors(broker: EmbeddedBroker) -> int:
    """Those of this process that are not files of the broker's: logs come and go on their own, and the directory stays
    open once it has been synced."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, closed by now
            count += not os.readlink(f"/proc/self/fd/{name}").startswith(broker._settings.data_dir)
    return count


def check_lives(broker: EmbeddedBroker, seed: int, lives: int, moments: Sequence[Moment] = MOMENTS) -> None:
    random = Random(seed)
    port = port_of(broker)
    wait_until(lambda: not left_behind(broker), 10, "the broker is at rest")
    descriptors = open_descriptors(broker)
    scheduler: Any = present(broker._broker).service.scheduler
    tasks = len(scheduler._tasks)
    gc.collect()
    gc.disable()
    known = objects_of_connections()
    alive: list[RawPeer] = []
    try:
        for _ in range(lives):
            alive.append(live(port, random, random.choice(moments)))
            while len(alive) > random.randrange(12):
                end(alive.pop(random.randrange(len(alive))), random)
        for peer in alive:
            end(peer, random)
        wait_until(
            lambda: not left_behind(broker), 10, f"seed {seed}: nothing is left: {left_behind(broker)}"
        )
        wait_until(
            lambda: open_descriptors(broker) <= descriptors, 20, f"seed {seed}: descriptors are closed"
        )
        wait_until(
            lambda: len(scheduler._tasks) <= tasks,
            20,
            f"seed {seed}: tasks have ended",
        )
        try:
            wait_until(lambda: not objects_of_connections(known), 20)
        except AssertionError:
            left = "; ".join(described(one) for one in objects_of_connections(known))
            raise AssertionError(f"seed {seed}: objects of connections are left: {left}") from None
    finally:
        gc.enable()
    with RawPeer(port) as peer:
        assert peer.produce("target", batch_of(b"and the broker goes on")).error_code == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_client_that_disappears_in_the_middle_of_anything_leaves_nothing(
    broker: EmbeddedBroker, seed: int
) -> None:
    check_lives(broker, seed, LIVES)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_client_that_disappears_leaves_nothing(broker: EmbeddedBroker, moment: Moment) -> None:
    check_lives(broker, 3, 20, (moment,))


def test_request_that_was_about_to_begin_when_its_client_vanished_takes_no_memory(
    broker: EmbeddedBroker,
) -> None:
    """Its turn comes after the connection has given back what it held, and while others hold some."""
    server = present(broker._broker).server
    assert server is not None
    wait_until(lambda: not left_behind(broker), 10, "the broker is at rest")
    with RawPeer(port_of(broker)) as other, RawPeer(port_of(broker)) as vanishing:
        for peer in (other, vanishing):
            peer.send(PARKED + LARGE_WRITE)
        wait_until(lambda: len(server.memory._held) == 2, 10, "both hold a request that waits for its turn")
        ours = vanishing.socket.getsockname()[1]
        lost = next(
            found
            for found in tuple(server._connections)
            if found._transport is not None and found._transport.get_extra_info("peername")[1] == ours
        )
        drained = threading.Event()

        def vanish() -> None:
            lost.connection_lost(None)
            lost._drain_backlog()
            drained.set()

        server.loop.call_soon_threadsafe(vanish)
        assert drained.wait(scaled(5))
        assert lost not in server.memory._held
    wait_until(lambda: not left_behind(broker), 10, "nothing is left")
