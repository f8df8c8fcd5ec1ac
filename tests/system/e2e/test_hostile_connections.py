"""Many connections at once: thousands of idle ones, bursts of new ones, all not reading, all stopped within a frame.
Their total memory is bounded, and another client is not affected."""

from __future__ import annotations

import resource
import socket
import struct
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from mansio.api.kafka.connections.connection import ANSWERS_PER_SEND, CONGESTED_BYTES_MAX
from mansio.api.kafka.connections.request_memory_pool import SMALL_FRAME_BYTES
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import request_header
from support.machine import scaled
from support.present import present
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of, fetch_frame, produce_frame
from support.waiting import wait_until
from system.e2e.other_client import MIB, wait_until_idle, watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from system.e2e.other_client import Watched

pytestmark = pytest.mark.full

IDLE_CONNECTIONS = 5_000
IDLE_BYTES_EACH = 8 * 1024
"""Two descriptors' worth of objects, a transport, a protocol, a way out: 4.6 KiB when this was written."""

STORM_CONNECTIONS = 5_000
SLACK = 24 * MIB
IN_FLIGHT = 32 * MIB
FRAME_BYTES = 16 * MIB
BEGUN_FRAMES = 400
TOPICS = 300

METADATA = messages.encode_request(ApiKey.METADATA, 9, 1, "deaf", {"topics": None})
API_VERSIONS = messages.encode_request(ApiKey.API_VERSIONS, 0, 1, "crowd", {})


@pytest.fixture(scope="module", autouse=True)
def descriptors() -> Iterator[int]:
    """This process may have as many open files as it is allowed; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    settings = {
        "max_connections": 6000,
        "in_flight_bytes_per_connection_max": IN_FLIGHT,
        "queued_max_request_bytes": IN_FLIGHT,
        "socket_request_max_bytes": FRAME_BYTES,
    }
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with served(tmp_path_factory.mktemp("crowds") / "data", arguments=arguments, http=False) as running:
        with RawPeer(running.kafka_port) as peer:
            peer.create_topic("silent")
            peer.create_topic("wide", TOPICS, max_message_bytes=str(FRAME_BYTES))
        wait_until_idle(running)
        yield running


@pytest.fixture
def view(broker: ServedBroker) -> Iterator[Watched]:
    with watched(broker) as found:
        yield found


def closed_again(view: Watched, before: int) -> None:
    wait_until(lambda: view.connections() <= before, 10, "every connection is closed")


def test_five_thousand_idle_connections_cost_little_and_leave_nothing(
    view: Watched, descriptors: int
) -> None:
    count = min(
        IDLE_CONNECTIONS, (descriptors - 1000) // 5
    )  # the broker keeps a half for files, two for each
    before = view.connections()
    with ExitStack() as stack:
        for _ in range(count):
            peer = stack.enter_context(RawPeer(view.port))
            peer.send(API_VERSIONS)
            assert peer.frame() is not None
        growth = view.memory.now() - view.memory.before
        print(f"{count} idle connections: {growth / MIB:.1f} MiB, {growth // count} bytes each")
        assert growth < count * IDLE_BYTES_EACH + SLACK
        view.neighbour.wait_for_rounds(20)
    closed_again(view, before)


def test_storm_of_connections_stalls_no_client(view: Watched) -> None:
    """Connect without waiting for an answer, vanish or say a word first; as fast as one process can."""
    before = view.connections()
    address = ("127.0.0.1", view.port)
    for number in range(STORM_CONNECTIONS):
        with socket.socket() as peer:
            peer.settimeout(scaled(60.0))
            peer.connect(address)
            if number % 3 == 0:
                peer.send(API_VERSIONS)
            elif number % 3 == 1:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    closed_again(view, before)
    view.neighbour.wait_for_rounds(20)
    print(f"slowest answer next door: {view.neighbour.slowest_s * 1000:.0f} ms")
    assert view.memory.growth < SLACK


def answer_to(peer: RawPeer, request: bytes) -> bytes:
    peer.send(request)
    answer = peer.frame()
    assert answer is not None
    return answer


def push(peer: RawPeer, data: bytes) -> None:
    """Send until the broker does not take any more for a moment."""
    peer.socket.settimeout(0.05)
    with suppress(TimeoutError, OSError):
        peer.send(data)


def test_many_clients_that_never_read_share_one_bound(tmp_path: Path) -> None:
    """Twelve deaf clients, each of which may hold all there is, if it were alone."""
    with (
        EmbeddedBroker(
            tmp_path, queued_max_request_bytes=MIB, in_flight_bytes_per_connection_max=MIB
        ) as broker,
        ExitStack() as stack,
    ):
        port = int(broker.address.rpartition(":")[2])
        with RawPeer(port) as peer:
            peer.create_topic("wide", TOPICS)
            answer_bytes = len(answer_to(peer, METADATA))
        server = present(broker._broker).server
        assert server is not None
        for _ in range(12):
            push(stack.enter_context(RawPeer(port, receive_buffer_bytes=4096)), METADATA * 2000)
        wait_until(
            lambda: server.has_unsent_pressure, 20, "the peers together do not take what they asked for"
        )
        rounds = 0
        with RawPeer(port) as honest:
            while rounds < 200:
                rounds += len(answer_to(honest, METADATA)) > 0
                assert server.unsent_bytes < MIB + 12 * (
                    CONGESTED_BYTES_MAX + ANSWERS_PER_SEND * answer_bytes
                )
        stack.close()
        wait_until(lambda: server.unsent_bytes == 0, 20, "what waited for the peers is forgotten")


def test_many_clients_whose_requests_wait_share_one_bound(view: Watched) -> None:
    """Behind a fetch that waits, thirty clients pile up large requests that cannot begin."""
    before = view.connections()
    large = produce_frame([("wide", None, [(0, batch_of(b"w" * 12 * MIB))])])
    with ExitStack() as stack:
        for _ in range(30):
            peer = stack.enter_context(RawPeer(view.port))
            push(peer, fetch_frame("silent", offset=0, wait_ms=8_000) + large)
        view.neighbour.wait_for_rounds(20)
        print(f"growth {view.memory.growth / MIB:.0f} MiB")
        assert view.memory.growth < IN_FLIGHT + 2 * FRAME_BYTES + SLACK
    closed_again(view, before)


def test_many_begun_frames_share_one_bound(view: Watched) -> None:
    """Four hundred clients stop in the middle of a middling frame, which each of them may hold."""
    before = view.connections()
    head = request_header(ApiKey.PRODUCE, 9, 1, "begun")
    begun = struct.pack(">i", 505_000) + head + b"\0" * (500_000 - len(head))
    with ExitStack() as stack:
        for _ in range(BEGUN_FRAMES):
            push(stack.enter_context(RawPeer(view.port)), begun)
        view.neighbour.wait_for_rounds(20)
        honest = stack.enter_context(RawPeer(view.port))
        assert honest.produce("wide", batch_of(b"h" * 2 * MIB)).error_code == 0
        print(f"growth {view.memory.growth / MIB:.0f} MiB")
        free = BEGUN_FRAMES * 2 * SMALL_FRAME_BYTES  # the beginning of each, in a buffer that was to grow
        assert view.memory.growth < IN_FLIGHT + FRAME_BYTES + free + SLACK < BEGUN_FRAMES * len(begun)
    closed_again(view, before)
