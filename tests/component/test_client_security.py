"""Clients over TLS and SASL: they work as without, and say in one line what is wrong where they cannot connect."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pytest

import mansio
import mansio.blocking
from mansio.errors import (
    AuthenticationFailed,
    ConfigError,
    IllegalSaslState,
    SaslAuthenticationFailed,
    TlsFailed,
    UnsupportedSaslMechanism,
)
from mansio.net import sasl
from mansio.net.connection import Connection, ConnectionOptions
from mansio.net.sasl import SaslCredentials
from mansio.net.security_settings import SecuritySettings
from mansio.state.authentication.credentials import salt_password
from mansio.wire.api_versions import ApiKey
from support.certificates import Authority, Certificate, encrypted_key
from support.machine import scaled
from support.secure_front import MECHANISMS, SecureFront, server_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER, PASSWORD = "alice", "correct horse, battery = staple"
REFUSED_S_MAX = 5.0
"""A refusal that will not change is reported at once, not when the time for connecting is over."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> Certificate:
    return authority.issue()


@pytest.fixture(scope="module")
def front(files: Certificate) -> Iterator[SecureFront]:
    with SecureFront(server_context(files), {USER: PASSWORD}) as running:
        yield running


@pytest.fixture(scope="module")
def tls_front(files: Certificate) -> Iterator[SecureFront]:
    with SecureFront(server_context(files)) as running:
        yield running


def refused(address: str, **security: Any) -> AuthenticationFailed:
    """The refusal of a client, which comes quickly and contains no password."""

    async def connect() -> None:
        async with asyncio.timeout(scaled(REFUSED_S_MAX)):
            async with mansio.connect(address, connect_timeout_ms=scaled(60.0) * 1000, **security):
                pass

    with pytest.raises(AuthenticationFailed) as caught:
        asyncio.run(connect())
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)
    assert PASSWORD not in repr(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "mechanism",
    [MECHANISMS[0], *(pytest.param(name, marks=pytest.mark.full) for name in MECHANISMS[1:])],
)
def test_all_kinds_of_requests_work_over_tls_and_sasl(
    mechanism: str, front: SecureFront, authority: Authority
) -> None:
    topic = f"orders-{mechanism.lower()}"

    async def use() -> None:
        security: dict[str, Any] = {"tls": str(authority.certificate), "user": USER, "password": PASSWORD}
        async with mansio.connect(front.address, mechanism=mechanism, **security) as client:
            await client.admin.create_topic(topic, partitions=3)
            await client.admin.alter_group_config(f"{topic}-jobs", {"share.auto.offset.reset": "earliest"})
            await client.publish_many(topic, [b"%d" % number for number in range(200)])
            read = [
                message.value
                async for message in client.consume(topic, group=f"{topic}-readers", max_records=200)
            ]
            assert set(read) == {b"%d" % number for number in range(200)}
            received: set[bytes | None] = set()
            async with client.receive(topic, group=f"{topic}-jobs") as receiver:
                async for leased in receiver:
                    received.add(leased.value)
                    await leased.ack()
                    if len(received) == 200:
                        break
            assert received == set(read)
            async with client.transaction(f"{topic}-transactions") as transaction:
                await transaction.publish(topic, b"in a transaction")
            assert (await client.admin.describe_cluster()).brokers

    asyncio.run(use())
    assert set(front.authentications) == {USER}


@pytest.mark.full
def test_a_large_record_arrives_whole(front: SecureFront, authority: Authority) -> None:
    large = bytes(range(256)) * 3_000
    with mansio.blocking.connect(
        front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
    ) as client:
        client.publish("large", large)
        assert [message.value for message in client.consume("large", max_records=1)] == [large]


def test_a_wrong_password_and_an_unknown_user_are_reported_at_once(
    front: SecureFront, authority: Authority
) -> None:
    for mechanism in MECHANISMS:
        for user in (USER, "nobody"):
            error = refused(
                front.address,
                tls=str(authority.certificate),
                user=user,
                password="wrong",
                mechanism=mechanism,
            )
            assert isinstance(error, SaslAuthenticationFailed), error
            assert user in error.message


class PlaintextCollector:
    """A port without TLS that keeps what it receives."""

    def __init__(self) -> None:
        self.received = b""
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                with connection, suppress(OSError):
                    while data := connection.recv(1 << 16):
                        self.received += data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(scaled(30.0))


def test_a_password_is_not_sent_unencrypted_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def is_elsewhere(host: str) -> bool:
        asked.append(host)
        return False

    monkeypatch.setattr("mansio.net.connection.is_loopback_host", is_elsewhere)
    with PlaintextCollector() as collector:
        error = refused(collector.address, user=USER, password=PASSWORD, mechanism="PLAIN")
        wait_until(lambda: collector.connections)
    assert isinstance(error, TlsFailed)
    assert "PLAIN would send the password unencrypted" in error.message
    assert "tls=" in error.message
    assert "SCRAM" in error.message
    assert asked == ["127.0.0.1"]
    assert collector.received == b""


def test_a_password_may_be_sent_on_this_machine_or_hidden_by_scram(monkeypatch: pytest.MonkeyPatch) -> None:
    with SecureFront(None, {USER: PASSWORD}) as front:
        for mechanism, is_loopback in (("PLAIN", True), ("SCRAM-SHA-256", False)):
            with monkeypatch.context() as patched:
                if not is_loopback:
                    patched.setattr("mansio.net.connection.is_loopback_host", lambda _host: False)
                with mansio.blocking.connect(
                    front.address, user=USER, password=PASSWORD, mechanism=mechanism
                ) as client:
                    assert client.admin.describe_cluster().brokers


@pytest.mark.full
def test_a_listener_that_wants_a_user_is_named(files: Certificate, authority: Authority) -> None:
    trusted = str(authority.certificate)
    with SecureFront(server_context(files), {USER: PASSWORD}) as front:
        error = refused(front.address, tls=trusted)
        assert isinstance(error, IllegalSaslState)
        assert "requires a user and a password" in error.message
        front.is_silent = True
        with pytest.raises(mansio.MansioError, match="may require a user and a password"):
            mansio.blocking.connect(front.address, tls=trusted, connect_timeout_ms=scaled(1.0) * 1000)


@pytest.mark.full
def test_a_user_is_refused_by_a_listener_without_sasl(tls_front: SecureFront, authority: Authority) -> None:
    with (
        pytest.raises(mansio.MansioError, match="does not authenticate users on this listener"),
        mansio.blocking.connect(
            tls_front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
        ),
    ):
        pass


@pytest.mark.full
def test_a_mechanism_that_is_not_offered_is_refused_with_those_that_are(
    files: Certificate, authority: Authority
) -> None:
    with SecureFront(server_context(files), {USER: PASSWORD}, mechanisms=("SCRAM-SHA-512", "PLAIN")) as only:
        error = refused(only.address, tls=str(authority.certificate), user=USER, password=PASSWORD)
    assert isinstance(error, UnsupportedSaslMechanism)
    assert "SCRAM-SHA-512, PLAIN" in error.message
    assert only.authentications == []


def test_an_unknown_authority_is_named(front: SecureFront) -> None:
    error = refused(front.address, tls=True, user=USER, password=PASSWORD)
    assert isinstance(error, TlsFailed)
    assert "authority is unknown" in error.message


@pytest.mark.full
def test_a_certificate_for_another_name_is_named(authority: Authority) -> None:
    with SecureFront(server_context(authority.issue("other", names=["DNS:other.example"]))) as front:
        error = refused(front.address, tls=str(authority.certificate))
    assert isinstance(error, TlsFailed)
    assert "another name" in error.message


@pytest.mark.full
def test_an_expired_certificate_is_named(authority: Authority) -> None:
    with SecureFront(server_context(authority.issue("expired", days=-1))) as front:
        error = refused(front.address, tls=str(authority.certificate))
    assert isinstance(error, TlsFailed)
    assert "expired" in error.message


@pytest.mark.full
def test_a_broker_with_an_expired_certificate_does_not_keep_a_client_from_the_others(
    front: SecureFront, authority: Authority
) -> None:
    with SecureFront(server_context(authority.issue("expired", days=-1))) as expired:
        security: dict[str, Any] = {"tls": str(authority.certificate), "user": USER, "password": PASSWORD}
        for _ in range(8):  # the addresses are tried in random order
            with mansio.blocking.connect([expired.address, front.address], **security) as client:
                assert client.admin.list_topics() is not None
        with (
            pytest.raises(TlsFailed, match="expired"),
            mansio.blocking.connect([expired.address, "127.0.0.1:1"], **security),
        ):
            pass


@pytest.mark.full
def test_a_protocol_that_is_too_old_is_named(files: Certificate, authority: Authority) -> None:
    context = server_context(files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse_all() -> None:
            """End each handshake as OpenSSL does, with an alert."""
            with suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    with accepted, suppress(OSError), context.wrap_socket(accepted, server_side=True):
                        pass

        thread = threading.Thread(target=refuse_all)
        thread.start()
        try:
            error = refused(f"localhost:{listener.getsockname()[1]}", tls=str(authority.certificate))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert isinstance(error, TlsFailed)
    assert "version of TLS" in error.message


def test_a_client_without_tls_at_a_port_with_tls_is_refused_with_the_reason(tls_front: SecureFront) -> None:
    error = refused(tls_front.address)
    assert isinstance(error, TlsFailed)
    assert "accepts TLS only" in error.message


def test_a_client_with_tls_at_a_port_without_is_refused_with_the_reason(
    tls_front: SecureFront, authority: Authority
) -> None:
    error = refused(tls_front.broker.bootstrap_servers, tls=str(authority.certificate))
    assert isinstance(error, TlsFailed)
    assert "does not speak TLS" in error.message


@pytest.mark.full
def test_a_certificate_of_the_client_opens_what_is_closed_without(
    files: Certificate, authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue("client", names=())
    stranger = Authority(tmp_path / "stranger").issue("client", names=())
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = server_context(files, client_authority=str(authority.certificate), version_max=version)
        with SecureFront(context) as front:
            with mansio.blocking.connect(
                front.address,
                tls=str(authority.certificate),
                certificate=str(own.certificate),
                key=str(own.key),
            ) as client:
                assert client.publish("topic", b"value").offset == 0
            wrong: list[dict[str, Any]] = [
                {},
                {"certificate": str(stranger.certificate), "key": str(stranger.key)},
            ]
            for certificate in wrong:
                # TLS 1.3 refuses after the client's handshake, and the reason may be lost with the connection
                with (
                    pytest.raises(mansio.MansioError, match="certificate"),
                    mansio.blocking.connect(
                        front.address,
                        tls=str(authority.certificate),
                        connect_timeout_ms=scaled(1.0) * 1000,
                        **certificate,
                    ),
                ):
                    pass


@pytest.mark.full
def test_a_context_of_ssl_is_used_as_it_is(tls_front: SecureFront, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    with mansio.blocking.connect(iter([tls_front.address]), tls=context) as client:
        assert client.admin.describe_cluster().brokers
    with pytest.raises(ConfigError):
        mansio.connect(tls_front.address, tls=context, certificate="certificate.pem")


@pytest.mark.full
def test_a_client_connects_as_the_environment_states(
    front: SecureFront, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", front.address)
    monkeypatch.setenv("MANSIO_TLS", str(authority.certificate))
    monkeypatch.setenv("MANSIO_USER", USER)
    monkeypatch.setenv("MANSIO_PASSWORD", PASSWORD)
    with mansio.blocking.connect() as client:
        assert client.admin.describe_cluster().brokers


@pytest.mark.full
def test_a_client_logs_in_again_before_its_time_is_over_and_loses_nothing(
    files: Certificate, authority: Authority
) -> None:
    """Many requests are in flight all the time; the front closes a connection that comes too late, and counts what is
    not allowed during a log-in."""
    with SecureFront(server_context(files), {USER: PASSWORD}, session_ms=1_500) as front:
        stop = threading.Event()
        published: list[bytes] = []
        connect = mansio.blocking.connect(
            front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
        )
        with connect as client:
            client.admin.create_topic("orders", partitions=1)
            logins = len(front.authentications)

            def publish() -> None:
                while not stop.is_set():
                    values = [b"%d" % (len(published) + number) for number in range(20)]
                    client.publish_many("orders", values)
                    published.extend(values)

            thread = threading.Thread(target=publish)
            thread.start()
            try:
                wait_until(lambda: len(front.authentications) >= logins + 6, what="re-authentications")
            finally:
                stop.set()
                thread.join()
            read = [message.value for message in client.consume("orders", max_records=len(published))]
        assert read == published
        assert front.refusals == []


@pytest.mark.full
def test_a_password_that_was_changed_ends_the_client_with_the_reason(
    files: Certificate, authority: Authority
) -> None:
    with (
        SecureFront(server_context(files), {USER: PASSWORD}) as front,
        mansio.blocking.connect(
            front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
        ) as client,
    ):
        client.publish("topic", b"value")
        front.set_users({USER: "another"})
        front.cut()
        with pytest.raises(SaslAuthenticationFailed):
            client.publish("topic", b"value")


@pytest.mark.full
def test_the_password_is_salted_once_for_all_connections(
    front: SecureFront, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    salted: list[str] = []
    salt = salt_password
    monkeypatch.setattr(
        sasl, "salt_password", lambda *args: salted.append(threading.current_thread().name) or salt(*args)
    )
    logins = len(front.authentications)
    with mansio.blocking.connect(
        front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
    ) as client:
        for _ in range(3):
            client.publish("topic", b"value")
            front.cut()
        client.publish("topic", b"value")
    assert len(front.authentications) >= logins + 4
    assert len(salted) == 1
    assert "mansio-client" not in salted[0]


@pytest.mark.full
@pytest.mark.parametrize("reader", ["consumer", "group", "receiver"])
def test_a_reader_whose_password_was_changed_ends_with_the_reason(
    reader: str, files: Certificate, authority: Authority
) -> None:
    async def read(front: SecureFront) -> None:
        connect = mansio.connect(front.address, tls=str(authority.certificate), user=USER, password=PASSWORD)
        async with connect as client, asyncio.timeout(scaled(30.0)):
            await client.admin.create_topic("topic", partitions=1)
            await client.admin.alter_group_config("jobs", {"share.auto.offset.reset": "earliest"})
            await client.publish("topic", b"value")
            if reader == "receiver":
                found: Any = client.receive("topic", group="jobs")
            else:
                found = client.consume("topic", group="readers" if reader == "group" else None)
            messages = aiter(found)
            assert (await anext(messages)).value == b"value"
            front.set_users({USER: "another"})
            front.cut()
            await anext(messages)

    with (
        SecureFront(server_context(files), {USER: PASSWORD}) as front,
        pytest.raises(SaslAuthenticationFailed),
    ):
        asyncio.run(read(front))


@pytest.mark.full
def test_nothing_readable_passes_the_network(front: SecureFront, authority: Authority) -> None:
    passed = bytearray()

    async def use() -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while piece := await reader.read(1 << 16):
                    passed.extend(piece)
                    writer.write(piece)
            except OSError:
                pass
            finally:
                writer.transport.abort()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_front, to_front = await asyncio.open_connection("127.0.0.1", front.port)
            await asyncio.gather(relay(reader, to_front), relay(from_front, writer))

        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            options = ConnectionOptions(
                tls=ssl.create_default_context(cafile=str(authority.certificate)),
                sasl=SaslCredentials(USER, PASSWORD, "PLAIN"),
            )
            connection = await Connection.open("localhost", server.sockets[0].getsockname()[1], options)
            described = await connection.request(ApiKey.DESCRIBE_CLUSTER, {})
            assert described.cluster_id
            await connection.close()
            for secret in (PASSWORD, USER, described.cluster_id, "SCRAM", "mansio"):
                assert secret.encode() not in passed

    asyncio.run(use())
    assert len(passed) > 1_000


@pytest.mark.full
def test_a_port_without_tls_that_waits_for_more_is_named(authority: Authority) -> None:
    """It takes the start of the handshake for a long request."""

    async def connect() -> None:
        async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                length = int.from_bytes(await reader.readexactly(4))
                frame = await reader.readexactly(length)
                writer.write((8).to_bytes(4) + frame[4:8] + bytes(4))
                await reader.read()
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:
                writer.transport.abort()

        async with await asyncio.start_server(patient, "127.0.0.1", 0) as server:
            options = ConnectionOptions(
                connect_timeout_ms=300, tls=ssl.create_default_context(cafile=str(authority.certificate))
            )
            await Connection.open("localhost", server.sockets[0].getsockname()[1], options)

    with pytest.raises(TlsFailed, match="does not speak TLS"):
        asyncio.run(connect())


@pytest.mark.full
def test_keys_may_be_encrypted_or_in_the_file_of_the_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue("client", names=())
    encrypted = encrypted_key(own.key, tmp_path / "encrypted.key", "secret")
    both = tmp_path / "both.pem"
    both.write_bytes(own.certificate.read_bytes() + own.key.read_bytes())
    right = SecuritySettings(
        tls=True, certificate=str(own.certificate), key=str(encrypted), key_password="secret"
    )
    for settings in (right, SecuritySettings(tls=True, certificate=str(both))):
        context = settings.tls_context()
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
    other = authority.issue("other", names=())
    for wrong, named in (
        (replace(right, key_password=""), "has a passphrase"),
        (replace(right, key_password="another"), "passphrase of the private key"),
        (replace(right, key=str(other.key)), "does not fit"),
        (replace(right, certificate=str(encrypted)), "PEM"),
    ):
        with pytest.raises(ConfigError, match=named):
            wrong.tls_context()
