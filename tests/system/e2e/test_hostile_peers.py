"""Clients that follow the protocol but vanish, never read, never finish a request, or send a thousand at once: memory
is bounded, no descriptor leaks, and another client is not affected.

Bounded memory, no descriptor left behind, and the client next door does not notice.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.codec import messages
from mansio.wire.headers import request_header
from support.machine import scaled
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of, fetch_frame, length_prefixed, produce_frame
from support.waiting import wait_until
from system.e2e.other_client import MIB, Watched, wait_until_idle, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FLIGHT_PER_CONNECTION = 8 * MIB
IN_FLIGHT = 64 * MIB
FRAME_BYTES = 32 * MIB
SLACK = 24 * MIB
"""What an interpreter and its allocator may hold on top of a bound."""

STORED_BYTES = 4 * MIB
PIPELINED = 1000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    settings = {
        "in_flight_bytes_per_connection_max": IN_FLIGHT_PER_CONNECTION,
        "queued_max_request_bytes": IN_FLIGHT,
        "socket_request_max_bytes": FRAME_BYTES,
    }
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with served(tmp_path_factory.mktemp("peers") / "data", arguments=arguments, http=False) as running:
        with RawPeer(running.kafka_port) as peer:
            peer.create_topic("target", max_message_bytes=str(FRAME_BYTES))
            peer.create_topic("silent")
            for _ in range(STORED_BYTES // MIB):
                assert peer.produce("target", batch_of(b"x" * MIB)).error_code == 0
        wait_until_idle(running)
        yield running


@pytest.fixture
def view(broker: ServedBroker) -> Iterator[Watched]:
    with watched(broker) as found:
        yield found


def test_clients_that_vanish_in_mid_frame_leave_nothing_behind(view: Watched) -> None:
    whole = produce_frame([("target", None, [(0, batch_of(b"y" * 100_000))])])
    connections = view.connections()
    with RawPeer(view.port) as peer:
        before = peer.end_offset("target")
    for cut in (1, 3, 4, 5, 20, 70, 1000, 50_000, len(whole) - 1):
        for way in (RawPeer.vanish, lambda peer: peer.socket.close()):
            peer = RawPeer(view.port)
            peer.send(whole[:cut])
            way(peer)
    wait_until(lambda: view.connections() <= connections, 20, "every connection is closed")
    with RawPeer(view.port) as peer:
        assert peer.end_offset("target") == before
    assert view.memory.growth < SLACK


def test_clients_that_vanish_in_mid_fetch_leave_nothing_behind(view: Watched) -> None:
    connections = view.connections()
    for _ in range(20):
        parked = RawPeer(view.port)
        parked.send(fetch_frame("silent", wait_ms=30_000))
        taking = RawPeer(view.port, receive_buffer_bytes=4096)
        taking.send(fetch_frame("target", max_bytes=STORED_BYTES))
        assert taking.socket.recv(1000)
        for peer in (parked, taking):
            peer.vanish()
    wait_until(lambda: view.connections() <= connections, 20, "every connection is closed")
    with RawPeer(view.port) as peer:
        assert peer.produce("silent", batch_of(b"wake them")).error_code == 0
    assert view.memory.growth < SLACK


def test_client_that_vanishes_while_its_durable_write_waits(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.create_topic("abandoned")
        frame = produce_frame([("abandoned", None, [(0, batch_of(b"z"))])])
        for _ in range(20):
            writer = RawPeer(view.port)
            writer.send(frame)
            writer.vanish()
        written = peer.produce("abandoned", batch_of(b"last"))
        assert written.error_code == 0
        assert written.base_offset <= 20


def send_until_read_no_further(peer: RawPeer, request: bytes, at_most: int) -> bool:
    """Send the same request again and again; True when the broker stopped reading before `at_most` of
    them."""
    peer.socket.settimeout(1.0)
    try:
        for _ in range(at_most):
            peer.send(request)
    except TimeoutError:
        return True
    return False


def test_client_that_never_reads_its_answers_is_read_no_further(view: Watched) -> None:
    """Each answer is 4 MiB: a thousand unread ones would be 4 GiB."""
    with RawPeer(view.port, receive_buffer_bytes=4096) as peer:
        assert send_until_read_no_further(peer, fetch_frame("target", max_bytes=STORED_BYTES), 200_000)
        view.neighbour.wait_for_rounds(20)
        assert view.memory.growth < IN_FLIGHT_PER_CONNECTION + SLACK


def test_client_that_never_reads_small_answers_is_read_no_further(view: Watched) -> None:
    request = messages.encode_request(ApiKey.METADATA, 9, 1, "deaf", {"topics": None}) * 50
    with RawPeer(view.port, receive_buffer_bytes=4096) as peer:
        assert send_until_read_no_further(peer, request, 20_000)
        view.neighbour.wait_for_rounds(20)
        assert view.memory.growth < 2 * IN_FLIGHT_PER_CONNECTION + SLACK


@pytest.mark.row("A1")
def test_thousand_pipelined_requests_are_answered_in_order(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.create_topic("piped")
    kinds = [
        lambda number: messages.encode_request(
            ApiKey.METADATA, 9, number, "p", {"topics": [{"name": "piped"}]}
        ),
        lambda number: produce_frame(
            [("piped", None, [(0, batch_of(b"%d" % number))])], correlation_id=number
        ),
        lambda number: fetch_frame("piped", number=number, max_bytes=1000),
        lambda number: messages.encode_request(ApiKey.API_VERSIONS, 3, number, "p", {}),
    ]
    stream = b"".join(kinds[number % len(kinds)](number) for number in range(PIPELINED))
    with RawPeer(view.port) as peer:
        sender = threading.Thread(target=peer.socket.sendall, args=(stream,), daemon=True)
        sender.start()
        for number in range(PIPELINED):
            answer = peer.frame()
            assert answer is not None
            assert struct.unpack_from(">i", answer)[0] == number
        sender.join(scaled(5))
        assert peer.end_offset("piped") == PIPELINED // len(kinds)
    assert view.memory.growth < IN_FLIGHT_PER_CONNECTION + SLACK


def test_thousand_pipelined_writes_keep_their_order_and_their_answers(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.create_topic("ordered")
        for number in range(PIPELINED):
            peer.send(
                produce_frame([("ordered", None, [(0, batch_of(b"%d" % number))])], correlation_id=number)
            )
        for number in range(PIPELINED):
            answer = peer.frame()
            assert answer is not None
            assert struct.unpack_from(">i", answer)[0] == number
        assert peer.end_offset("ordered") == PIPELINED


def test_fetch_behind_a_durable_write_sees_it(view: Watched) -> None:
    """A connection's requests are answered one after the other, whatever each of them waits for."""
    with RawPeer(view.port) as peer:
        peer.create_topic("seen")
        for number in range(50):
            peer.send(
                produce_frame([("seen", None, [(0, batch_of(b"%d" % number))])])
                + fetch_frame("seen", offset=number, number=2)
                + messages.encode_request(ApiKey.API_VERSIONS, 3, 3, "p", {})
            )
            assert peer.frame() is not None
            answer = peer.frame()
            assert answer is not None
            assert fetch.decode_response(12, answer).topics[0][2][0].high_watermark == number + 1
            assert peer.frame() is not None


def announce(peer: RawPeer, length: int, sent: int) -> None:
    """Begin a large produce request, and never finish it."""
    head = request_header(ApiKey.PRODUCE, 9, 1, "loris")
    peer.socket.settimeout(0.2)
    with suppress(TimeoutError):  # not being read any further is a fair answer
        peer.send(struct.pack(">i", length) + head + b"\0" * (sent - len(head)))


def test_slow_loris_with_large_announced_frames_holds_no_memory(view: Watched) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            announce(stack.enter_context(RawPeer(view.port)), FRAME_BYTES - 1, 2000)
        view.neighbour.wait_for_rounds(20)
        assert view.memory.growth < SLACK


@pytest.mark.parametrize(
    "sent",
    [pytest.param(2000, marks=pytest.mark.full), 300_000, pytest.param(3_000_000, marks=pytest.mark.full)],
)
def test_slow_loris_does_not_keep_others_from_sending_large_batches(view: Watched, sent: int) -> None:
    """They announce, together, all that all connections may hold, to the last byte; send a part, and stop."""
    with ExitStack() as stack:
        for length in [FRAME_BYTES - 1000] * 3 + [MIB] * 3 + [300_000] * 3:
            announce(stack.enter_context(RawPeer(view.port)), length, min(sent, length - 10))
        view.neighbour.wait_for_rounds()
        honest = stack.enter_context(RawPeer(view.port))
        honest.create_topic(f"large-{sent}", max_message_bytes=str(FRAME_BYTES))
        assert honest.produce(f"large-{sent}", batch_of(b"h" * 2 * MIB)).error_code == 0
        assert view.memory.growth < IN_FLIGHT + SLACK


def test_many_large_frames_at_once_stay_within_the_shared_bound(view: Watched) -> None:
    """Twelve clients send 16 MiB each at the same time: all are served, in turn."""
    with RawPeer(view.port) as peer:
        peer.create_topic("heavy", max_message_bytes=str(FRAME_BYTES))
    frame = produce_frame([("heavy", None, [(0, batch_of(b"h" * 16 * MIB))])], acks=1)
    answered = []

    def send() -> None:
        with RawPeer(view.port) as sender:
            sender.socket.settimeout(scaled(30))
            sender.send(frame)
            answered.append(sender.frame(30) is not None)

    senders = [threading.Thread(target=send, daemon=True) for _ in range(12)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(scaled(30))
    assert answered == [True] * 12
    assert view.memory.growth < IN_FLIGHT + 3 * SLACK, "all frames at once are 192 MiB"


def test_half_closed_client_still_harms_no_other(view: Watched) -> None:
    connections = view.connections()
    with RawPeer(view.port) as peer:
        peer.send(fetch_frame("silent", wait_ms=30_000, offset=1_000_000))
        peer.send(length_prefixed(b"\0\3"))
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.frame(15.0) is not None:
            pass
    wait_until(lambda: view.connections() <= connections, 20, "the connection is closed")


def test_thousand_connections_that_come_and_go_leave_nothing_behind(view: Watched) -> None:
    connections = view.connections()
    for _ in range(20):
        peers = [RawPeer(view.port) for _ in range(50)]
        for peer in peers:
            peer.vanish()
    wait_until(lambda: view.connections() <= connections, 20, "every connection is closed")
    assert view.memory.growth < SLACK


def test_fetch_of_the_impossible_gets_typed_errors(view: Watched) -> None:
    offset_out_of_range, unknown_topic = 1, 3
    with RawPeer(view.port) as peer:
        for topic, offset, code in (
            ("target", 1 << 60, offset_out_of_range),
            ("target", -5, offset_out_of_range),
            ("nobody-made-this", 0, unknown_topic),
        ):
            peer.send(fetch_frame(topic, offset=offset, max_bytes=1000))
            answer = peer.frame()
            assert answer is not None
            assert fetch.decode_response(12, answer).topics[0][2][0].error_code == code
        peer.send(fetch_frame("target", max_bytes=-1, min_bytes=-1, wait_ms=-1))
        assert peer.frame() is not None, "negative bounds are nonsense, not a reason to hang"
