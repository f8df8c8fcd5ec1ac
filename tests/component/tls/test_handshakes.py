"""Handshakes of a TLS listener over real sockets: what is refused and why, floods, slow clients, and a clean end, with
both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.net.tls.acceptor import TlsAcceptor
from mansio.net.tls.handshakes import AcceptedConnection, HandshakeRunner
from mansio.state.handshake_admission import HandshakeAdmission
from support.certificates import OPENSSL, Authority, Certificate
from support.machine import scaled
from support.tiers import smoke_first
from support.tls_broker import tls_broker
from support.tls_listener import (
    LOOPS,
    EchoProtocol,
    TlsListener,
    client_context,
    echoes,
    is_refused,
    server_context,
    tls_files,
)
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.net.tls.handshake_failures import Failure

EACH_LOOP = pytest.mark.parametrize("loop", smoke_first(*LOOPS))
ANY_CIPHER: Final = "ALL:@SECLEVEL=0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue()


@pytest.fixture(scope="module")
def trusting(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.certificate)


def fails_with(listener: TlsListener, **expected: int) -> bool:
    """Whether the listener counts these failures, and no others, in a moment."""
    return bool(wait_until(lambda: listener.failures() == expected, 20, f"failures {expected}"))


@EACH_LOOP
def test_clients_of_both_versions_are_served_and_everything_is_counted(
    authority: Authority, issued: Certificate, loop: str
) -> None:
    with TlsListener(server_context(issued, authority), loop=loop) as listener:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(authority.certificate)
            context.minimum_version = context.maximum_version = version
            with listener.connect(context) as client:
                assert echoes(client, os.urandom(300_000))
                cipher = client.cipher()
                assert cipher is not None
                assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
        wait_until(lambda: listener.acceptor.completed == 2, 20, "the handshakes to be counted")
        assert listener.acceptor.accepted == 2
        assert not listener.failures()


@EACH_LOOP
def test_what_is_sent_is_never_on_the_wire_in_plain(
    authority: Authority, issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    with TlsListener(server_context(issued), loop=loop) as listener:
        secret = b"a text that is easy to find " * 400
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
        wire = bytearray()
        with listener.connect_plain() as plain:

            def exchange(step: Any) -> Any:
                while True:
                    try:
                        result = step()
                    except ssl.SSLWantReadError:
                        result = None
                    if sent := to_server.read():
                        wire.extend(sent)
                        plain.sendall(sent)
                    if result is not None:
                        return result
                    received = plain.recv(1 << 16)
                    wire.extend(received)
                    to_client.write(received)

            exchange(lambda: client.do_handshake() or True)
            exchange(lambda: client.write(secret))
            echoed = b""
            while len(echoed) < len(secret):
                echoed += exchange(lambda: client.read(1 << 16))
        assert echoed == secret
        assert len(wire) > 2 * len(secret)
        assert b"easy to find" not in wire


@EACH_LOOP
def test_tls_1_1_is_refused(
    authority: Authority, issued: Certificate, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority.certificate)
    old.set_ciphers(ANY_CIPHER)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with TlsListener(server_context(issued), loop=loop) as listener:
        assert is_refused(listener, old)
        assert fails_with(listener, protocol_version=1)
    assert "tls_handshake_failed" in caplog.text


@pytest.mark.full
def test_cipher_suite_without_forward_secrecy_is_refused(authority: Authority, issued: Certificate) -> None:
    weak = client_context(authority.certificate)
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("ECDHE-ECDSA-AES256-SHA384")
    with TlsListener(server_context(issued)) as listener:
        assert is_refused(listener, weak)
        assert fails_with(listener, no_shared_cipher=1)


@pytest.mark.full
def test_renegotiation_is_refused(authority: Authority, issued: Certificate) -> None:
    assert OPENSSL is not None
    with TlsListener(server_context(issued)) as listener:
        command = [OPENSSL, "s_client", "-connect", f"127.0.0.1:{listener.port}", "-tls1_2"]
        client = subprocess.Popen(
            [*command, "-CAfile", str(authority.certificate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert client.stdin is not None
        wait_until(lambda: listener.acceptor.completed == 1, 20, "the handshake")
        client.stdin.write(b"R\n")  # s_client renegotiates at this line
        client.stdin.flush()
        output, _ = client.communicate(timeout=scaled(30))
        assert b"RENEGOTIATING" in output
        assert b"no renegotiation" in output
        with listener.connect(client_context(authority.certificate)) as other:
            assert echoes(other)


@EACH_LOOP
def test_plaintext_is_answered_by_a_close_and_counted(
    issued: Certificate, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    api_versions = bytes.fromhex("0000001a001200000000000100106c696272646b61666b612d74657374")
    with TlsListener(server_context(issued), loop=loop) as listener:
        for request in (api_versions, b"GET / HTTP/1.1\r\n\r\n", bytes(200)):
            with listener.connect_plain() as client:
                client.sendall(request)
                with contextlib.suppress(ConnectionResetError):
                    assert b"Kafka" not in client.recv(1000)
                    assert client.recv(1000) == b""
        assert fails_with(listener, plaintext=3)
    (line, *_) = [record for record in caplog.records if record.message == "tls_handshake_failed"]
    known = line.mansio_fields  # type: ignore[attr-defined]  # of `mansio.logs.fields`
    assert known == {"peer": "127.0.0.1", "reason": "plaintext", "detail": "the client does not use TLS"}


@EACH_LOOP
def test_required_client_certificate_is_verified(
    authority: Authority, issued: Certificate, tmp_path: Path, loop: str
) -> None:
    with TlsListener(server_context(issued, authority, "required"), loop=loop) as listener:
        good = client_context(authority.certificate, authority.issue("/O=Example/CN=alice", names=()))
        with listener.connect(good) as client:
            assert echoes(client)
            (connection,) = listener.open
            subject = connection.transport.get_extra_info("peercert")["subject"]
            assert subject == ((("organizationName", "Example"),), (("commonName", "alice"),))
        assert is_refused(listener, client_context(authority.certificate))
        assert fails_with(listener, no_certificate=1)
        stranger = Authority(tmp_path, "Stranger").issue("mallory")
        assert is_refused(listener, client_context(authority.certificate, stranger))
        assert fails_with(listener, no_certificate=1, unknown_ca=1)
        expired = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        expired.load_verify_locations(authority.certificate)
        expired.load_cert_chain(*authority.issue("late", days=-1))
        assert is_refused(listener, expired)
        assert fails_with(listener, no_certificate=1, unknown_ca=1, expired=1)


@pytest.mark.full
def test_requested_client_certificate_may_be_missing_but_not_wrong(
    authority: Authority, issued: Certificate, tmp_path: Path
) -> None:
    with TlsListener(server_context(issued, authority, "requested")) as listener:
        with listener.connect(client_context(authority.certificate)) as client:
            assert echoes(client)
        stranger = Authority(tmp_path, "Stranger").issue("mallory")
        assert is_refused(listener, client_context(authority.certificate, stranger))
        assert fails_with(listener, unknown_ca=1)


@pytest.mark.full
def test_client_that_does_not_trust_the_listener_is_named(issued: Certificate, tmp_path: Path) -> None:
    distrusting = client_context(Authority(tmp_path, "Other CA").certificate)
    with TlsListener(server_context(issued)) as listener:
        assert is_refused(listener, distrusting)
        assert fails_with(listener, refused_by_client=1)


CLIENT_HELLO_BEGIN: Final = b"\x16\x03\x01"


def quick_admission() -> HandshakeAdmission[Any]:
    return HandshakeAdmission(
        running_max=4, running_per_address_max=2, waiting_max=8, handshake_ms=600, place_ms=200
    )


def stall(client: socket.socket) -> None:
    """Begin a handshake, and send no more."""
    assert client.send(CLIENT_HELLO_BEGIN) == len(CLIENT_HELLO_BEGIN)


@EACH_LOOP
def test_slow_handshake_is_closed_after_its_time_whether_it_runs_or_waits(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    with TlsListener(server_context(issued), loop=loop, new_admission=quick_admission) as listener:
        clients = [listener.connect_plain() for _ in range(7)]
        stall(clients[0])
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
            client.close()
        assert fails_with(listener, timeout=7)
        assert not listener.handshakes.running_count
        assert not listener.handshakes.waiting_count
        with listener.connect(trusting) as client:
            assert echoes(client)


@EACH_LOOP
def test_silent_connection_gets_no_place_and_is_closed_at_once_when_its_peer_leaves(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    def patient() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(
            running_max=2, running_per_address_max=1, handshake_ms=int(scaled(60) * 1000)
        )

    with TlsListener(server_context(issued), loop=loop, new_admission=patient) as listener:
        silent = [listener.connect_plain() for _ in range(5)]
        wait_until(lambda: listener.handshakes.waiting_count == 5, 20, "the silent connections")
        with listener.connect(trusting) as client:
            assert echoes(client)
            wait_until(lambda: not listener.handshakes.running_count, 20, "the end of the handshake")
            assert listener.handshakes.waiting_count == 5
            for each in silent:
                each.close()
            assert fails_with(listener, disconnected=5)
            assert not listener.handshakes.waiting_count


@EACH_LOOP
def test_stalled_handshake_gives_way_to_a_client_of_another_address_and_no_earlier(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    def one_place() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(
            running_max=1, running_per_address_max=1, handshake_ms=int(scaled(60) * 1000), place_ms=200
        )

    with TlsListener(server_context(issued), loop=loop, new_admission=one_place) as listener:
        with listener.connect_from("127.0.0.2") as other:
            stall(other)
            wait_until(lambda: listener.handshakes.running_count == 1, 20, "the stalled handshake")
            other.settimeout(0.5)
            with pytest.raises(TimeoutError):  # nobody needs its place
                other.recv(1)
            plain = listener.connect_from("127.0.0.3")
            with trusting.wrap_socket(plain, server_hostname="localhost") as client:
                assert echoes(client)
            other.settimeout(scaled(20))
            with contextlib.suppress(ConnectionResetError):
                assert other.recv(1) == b""
        assert fails_with(listener, overloaded=1)


@EACH_LOOP
def test_handshake_whose_peer_always_sends_more_gives_way_after_one_renewal(
    issued: Certificate, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    def one_place() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(
            running_max=1, running_per_address_max=1, handshake_ms=int(scaled(60) * 1000), place_ms=200
        )

    monkeypatch.setattr(AcceptedConnection, "is_readable", property(lambda _: True))
    with TlsListener(server_context(issued), loop=loop, new_admission=one_place) as listener:
        with listener.connect_from("127.0.0.2") as other:
            stall(other)
            wait_until(lambda: listener.handshakes.running_count == 1, 20, "the handshake")
            with trusting.wrap_socket(
                listener.connect_from("127.0.0.3"), server_hostname="localhost"
            ) as client:
                assert echoes(client)
        assert fails_with(listener, overloaded=1)


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the event loop take turns until the condition is true."""
    while not condition():  # noqa: ASYNC110 - a few turns
        await asyncio.sleep(0)


class EndingRunner(HandshakeRunner):
    """Its first handshake has closed the socket, as uvloop does before it reports the end, and ends at `end`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            loop, admission=HandshakeAdmission(running_max=1, running_per_address_max=1, place_ms=0)
        )
        self.begun: list[AcceptedConnection] = []
        self.end = asyncio.Event()

    async def _run_handshake(self, connection: AcceptedConnection) -> None:
        self.begun.append(connection)
        if len(self.begun) == 1:
            connection.socket.close()
            await self.end.wait()
            raise ConnectionResetError


class QuietListener:
    """A listener that notes how handshakes end."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def new_protocol(self) -> asyncio.BaseProtocol:
        return asyncio.Protocol()

    def context(self) -> ssl.SSLContext:
        raise AssertionError("no handshake takes a context")

    def on_completed(self) -> None:
        self.ends.append("completed")

    def on_failed(self, peer: str, failure: Failure) -> None:
        self.ends.append(f"{peer} {failure.reason}")


@EACH_LOOP
def test_handshake_that_ends_by_itself_is_not_ended_for_another(loop: str) -> None:
    async def connect() -> None:
        here = asyncio.get_running_loop()
        errors: list[dict[str, Any]] = []
        here.set_exception_handler(lambda _, context: errors.append(context))
        runner, listener = EndingRunner(here), QuietListener()
        pairs = [socket.socketpair() for _ in range(2)]
        for number, (accepted, client) in enumerate(pairs):
            accepted.setblocking(False)
            client.send(CLIENT_HELLO_BEGIN)
            runner.add(accepted, f"192.0.2.{number}", listener)
            await turns_until(lambda: bool(runner.begun))
        await turns_until(lambda: runner._admission.next_to_give_way() is not None)
        for _ in range(10):  # turns in which the other one looks for a place
            await asyncio.sleep(0)
        assert not errors
        assert listener.ends == []
        runner.end.set()
        await turns_until(lambda: len(listener.ends) == 2)
        assert listener.ends == ["192.0.2.0 disconnected", "completed"]
        assert not errors
        for accepted, client in pairs:
            accepted.close()
            client.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.wait_for(connect(), scaled(20)))


@EACH_LOOP
def test_client_is_served_beside_silent_connections_of_hundreds_of_addresses(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    """Each of the addresses would have a place if silence were enough for one."""

    def patient() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(handshake_ms=int(scaled(60) * 1000), place_ms=int(scaled(30) * 1000))

    with TlsListener(server_context(issued), loop=loop, new_admission=patient) as listener:
        silent = [listener.connect_from(f"127.1.{number}.1") for number in range(200)]
        wait_until(lambda: listener.handshakes.waiting_count == 200, 20, "the silent connections")
        for _ in range(3):
            with listener.connect(trusting) as client:
                assert echoes(client)
        assert not listener.failures()
        for each in silent:
            each.close()


@EACH_LOOP
def test_listeners_share_the_places_and_stop_alone(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    def one_place() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(
            running_max=1, running_per_address_max=1, handshake_ms=int(scaled(60) * 1000), place_ms=200
        )

    with TlsListener(server_context(issued), loop=loop, new_admission=one_place) as listener:
        second = TlsAcceptor(
            listener.loop,
            lambda: EchoProtocol(listener),
            lambda: listener.context,
            handshakes=listener.handshakes,
        )
        listening = socket.create_server(("127.0.0.1", 0))
        address = listening.getsockname()
        listener.loop.call_soon_threadsafe(second.listen, [listening])
        with listener.connect_from("127.0.0.2") as stalled, listener.connect_from("127.0.0.3") as silent:
            stall(stalled)
            wait_until(lambda: listener.handshakes.running_count == 1, 20, "the stalled handshake")
            wait_until(lambda: listener.handshakes.waiting_count == 1, 20, "the silent connection")
            plain = socket.create_connection(address, timeout=scaled(30))
            with trusting.wrap_socket(plain, server_hostname="localhost") as client:
                assert echoes(client)
            assert fails_with(listener, overloaded=1)
            wait_until(lambda: second.completed == 1, 20, "the handshake to be counted")
            listener.run(second.stop())
            assert listener.handshakes.waiting_count == 1
            with trusting.wrap_socket(silent, server_hostname="localhost") as client:
                assert echoes(client)


class UnevenAdmission(HandshakeAdmission[Any]):
    """Two places, and more time for the third connection than for those before it."""

    def __init__(self) -> None:
        super().__init__(running_max=2, running_per_address_max=1, handshake_ms=500, place_ms=0)
        self.calls = 0

    def deadline_of(self, accepted_at: float) -> float:
        self.calls += 1
        return super().deadline_of(accepted_at) + (scaled(60) if self.calls > 1 else 0)


@EACH_LOOP
def test_waiting_connection_is_closed_at_its_time_while_the_handshake_of_another_goes_on(
    issued: Certificate, loop: str
) -> None:
    with TlsListener(server_context(issued), loop=loop, new_admission=UnevenAdmission) as listener:
        waiting = listener.connect_plain()
        wait_until(lambda: listener.acceptor.accepted == 1, 20, "the connection")
        with listener.connect_from("127.0.0.2") as running:
            stall(running)
            assert waiting.recv(1) == b""
            assert fails_with(listener, timeout=1)
            assert (listener.handshakes.running_count, listener.handshakes.waiting_count) == (1, 0)
        waiting.close()


@pytest.mark.full
def test_client_that_goes_away_in_its_handshake_leaves_nothing(issued: Certificate) -> None:
    with TlsListener(server_context(issued)) as listener:
        for _ in range(20):
            listener.connect_plain().close()
        assert fails_with(listener, disconnected=20)
        assert not listener.open


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_honest_client_is_served_beside_a_flood_of_handshakes_that_do_not_go_on(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    def admission() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(
            waiting_max=100, handshake_ms=int(scaled(120) * 1000), place_ms=int(scaled(60) * 1000)
        )

    with (
        TlsListener(server_context(issued), loop=loop, new_admission=admission) as listener,
        contextlib.ExitStack() as flood,
    ):
        for _ in range(250):
            peer = flood.enter_context(contextlib.closing(listener.connect_plain()))
            with contextlib.suppress(ConnectionError):
                stall(peer)
        wait_until(lambda: listener.acceptor.accepted == 250, 20, "the flood")
        wait_until(
            lambda: listener.handshakes.running_count == 48, 20, "an address alone leaves places for others"
        )
        assert fails_with(listener, overloaded=250 - 48 - 100)
        honest = listener.connect_from("127.0.0.2")
        with trusting.wrap_socket(honest, server_hostname="localhost") as client:
            assert echoes(client)
        wait_until(lambda: listener.acceptor.completed == 1, 20, "the handshake to be counted")


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_hundreds_of_clients_of_one_address_connect_at_once(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    with TlsListener(server_context(issued), loop=loop) as listener:
        plain = [listener.connect_plain() for _ in range(200)]
        clients = []
        for each in plain:
            each.setblocking(False)
            clients.append(
                trusting.wrap_socket(each, server_hostname="localhost", do_handshake_on_connect=False)
            )
        left = dict.fromkeys(clients)
        end = time.monotonic() + scaled(30)
        while left and time.monotonic() < end:
            for client in tuple(left):
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    del left[client]
            select.select(list(left), [], [], 0.01)
        assert not left
        wait_until(lambda: listener.acceptor.completed == 200, 20, "all handshakes")
        for client in clients:
            client.close()


@EACH_LOOP
def test_reload_drops_no_open_connection_and_new_ones_get_the_new_certificate(
    authority: Authority, issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    with TlsListener(server_context(issued), loop=loop) as listener:
        before = [listener.connect(trusting) for _ in range(100)]
        listener.context = server_context(authority.issue())
        after = listener.connect(trusting)
        numbers = {(present["serialNumber"]) for each in before if (present := each.getpeercert())}
        new = after.getpeercert()
        assert len(numbers) == 1
        assert new is not None
        assert new["serialNumber"] not in numbers
        for client in (*before, after):
            assert echoes(client)
            client.close()


@pytest.mark.parametrize("loop", smoke_first(*LOOPS))
def test_stop_closes_waiting_and_running_handshakes(
    issued: Certificate, trusting: ssl.SSLContext, loop: str
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    def patient() -> HandshakeAdmission[Any]:
        return HandshakeAdmission(handshake_ms=int(scaled(60) * 1000))

    with TlsListener(server_context(issued), loop=loop, new_admission=patient) as listener:
        with listener.connect(trusting) as client:  # libuv opens a descriptor for its first connection
            assert echoes(client)
        wait_until(lambda: not listener.open, 20, "the end of the connection")
        before = descriptors()
        silent = [listener.connect_plain() for _ in range(5)]
        stall(silent[0])
        wait_until(lambda: listener.handshakes.running_count == 1, 20, "the handshake that stalls")
        wait_until(lambda: listener.handshakes.waiting_count == 4, 20, "the silent connections")
        listener.run(listener.acceptor.stop())
        for each in silent:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
            each.close()
        wait_until(
            lambda: descriptors() == before - 1, 20, "all descriptors closed, and that of the listener"
        )
        with pytest.raises(OSError, match="refused"):
            listener.connect_plain()


@EACH_LOOP
def test_accepting_pauses_without_descriptors_and_goes_on(
    issued: Certificate,
    trusting: ssl.SSLContext,
    loop: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TlsListener(server_context(issued), loop=loop) as listener:
        failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), OSError(errno.ECONNABORTED, "aborted")]
        accept = socket.socket.accept

        def accept_or_fail(listening: socket.socket) -> Any:
            if failures:
                raise failures.pop(0)
            return accept(listening)

        monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
        with listener.connect(trusting) as client:
            assert echoes(client)
    lines = [record for record in caplog.records if record.message == "accept_paused"]
    assert len(lines) == 1
    assert lines[0].mansio_fields["reason"] == "Too many open files"  # type: ignore[attr-defined]


@pytest.mark.full
def test_as_many_clients_of_one_address_as_the_broker_serves_connect_at_once(
    tmp_path: Path,
    authority: Authority,
    issued: Certificate,
    trusting: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them wait before the first one goes on; 1,024 descriptors are enough for them."""
    patient = partial(
        HandshakeAdmission, handshake_ms=int(scaled(60) * 1000), place_ms=int(scaled(30) * 1000)
    )
    monkeypatch.setattr("mansio.node.broker.HandshakeAdmission", patient)
    with tls_broker(tmp_path, tls_files(issued, authority), max_connections=120) as broker:
        plain = [socket.create_connection(("127.0.0.1", broker.port), scaled(30)) for _ in range(120)]
        wait_until(lambda: broker.server.waiting_handshake_count == 120, 20, "all connections to wait")
        clients = [trusting.wrap_socket(each, server_hostname="localhost") for each in plain]
        wait_until(lambda: broker.server.connection_count == 120, 20, "all clients")
        assert not any(broker.acceptor.failed.values())
        for client in clients:
            client.close()
