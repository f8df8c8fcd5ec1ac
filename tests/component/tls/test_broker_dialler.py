"""A broker that connects to another one with TLS verifies authority and name, and its log names what is wrong."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.config.settings import Settings
from mansio.errors import ConfigError, ConnectionLost
from mansio.logs import FIELDS
from mansio.net.broker_dialler import BrokerDialler
from mansio.net.connection import ConnectionOptions
from mansio.net.tls.contexts import load_dialler_context
from mansio.node.security import BrokerSecurity
from support.certificates import Authority, Certificate
from support.machine import scaled
from support.tls_listener import TlsListener, echoes, server_context, tls_files
from unit.net.stub_broker import StubBroker

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue("broker")


def failure(
    context: ssl.SSLContext | None, port: int, caplog: pytest.LogCaptureFixture
) -> tuple[str, str, str]:
    """What is wrong, the reason and the remedy, of which there is one log line however often the broker tries."""
    dialler = BrokerDialler(tls_context=None if context is None else lambda: context)
    options = ConnectionOptions(connect_timeout_ms=scaled(5) * 1000)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="broker 7: "):
                await dialler.connect(7, (HOST, port), options)

    caplog.clear()
    with caplog.at_level(logging.WARNING, "mansio.net.broker_dialler"):
        asyncio.run(run())
    (record,) = [one for one in caplog.records if one.message == "broker_tls_failed"]
    known = vars(record)[FIELDS]
    assert (known["broker"], known["address"]) == (7, f"{HOST}:{port}")
    return known["wrong"], known["reason"], known["remedy"]


def test_the_wrong_part_of_the_other_broker_is_named_once(
    authority: Authority, issued: Certificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = load_dialler_context(tls_files(issued, authority))
    for certificate, wrong, reason, remedy in (
        (Authority(tmp_path).issue(), "certificate", "authority is unknown", "ssl_ca_location"),
        (
            authority.issue(names=("DNS:b.example",)),
            "name",
            "for another name",
            "host that the broker advertises",
        ),
    ):
        with TlsListener(server_context(certificate)) as listener:
            found = failure(context, listener.port, caplog)
        assert found[0] == wrong
        assert reason in found[1]
        assert remedy in found[2]
        assert "tls=" not in found[1], "that is for clients"


def test_a_broker_with_tls_and_one_without_are_distinguished(
    authority: Authority, issued: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    with TlsListener(server_context(issued)) as listener:
        wrong, reason, remedy = failure(None, listener.port, caplog)
    assert wrong == "protocol"
    assert "accepts TLS only" in reason
    assert "same security protocol" in remedy

    async def to_plaintext() -> None:
        async with StubBroker() as broker:
            dialler = BrokerDialler(tls_context=lambda: load_dialler_context(tls_files(issued, authority)))
            options = ConnectionOptions(connect_timeout_ms=500)  # what has no TLS does not answer
            with pytest.raises(ConnectionLost, match="does not speak TLS"):
                await dialler.connect(7, (HOST, broker.port), options)

    asyncio.run(to_plaintext())


@pytest.mark.parametrize("how", ["none", "requested", "required"])
def test_the_certificate_of_the_broker_is_presented_where_listeners_ask_for_certificates(
    authority: Authority, issued: Certificate, how: str
) -> None:
    subjects: list[object] = []

    async def run(port: int) -> None:
        loop = asyncio.get_running_loop()
        context = load_dialler_context(tls_files(issued, authority, how))
        transport, _ = await loop.create_connection(asyncio.Protocol, HOST, port, ssl=context)
        transport.abort()

    with TlsListener(server_context(issued, authority, how)) as listener:
        made = listener.acceptor.new_protocol

        def new_protocol() -> asyncio.BaseProtocol:
            protocol = made()
            connection_made = protocol.connection_made

            def noted(transport: asyncio.BaseTransport) -> None:
                subjects.append(transport.get_extra_info("peercert"))
                connection_made(transport)

            protocol.connection_made = noted
            return protocol

        listener.acceptor.new_protocol = new_protocol
        asyncio.run(run(listener.port))
    assert ["broker" in str(one) for one in subjects] == [how != "none"]


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL"])
def test_certificate_has_to_be_for_clients_only_where_the_listener_between_brokers_asks_for_it(
    authority: Authority, protocol: str
) -> None:
    served = authority.issue("broker", purposes=("serverAuth",))
    settings = Settings(
        listeners="CLIENTS://127.0.0.1:9092,BROKERS://127.0.0.1:9093",
        listener_security_protocol_map=f"CLIENTS:SSL,BROKERS:{protocol}",
        inter_broker_listener_name="BROKERS",
        ssl_certificate_location=str(served.certificate),
        ssl_key_location=str(served.key),
        ssl_ca_location=str(authority.certificate),
        ssl_client_auth="required",
        http_listener="",
        etcd_endpoints="http://127.0.0.1:2379",
    )
    host = cast("Any", SimpleNamespace(scheduler=None, file_thread=None, random=SimpleNamespace(bytes=None)))
    if protocol == "SSL":
        with pytest.raises(ConfigError, match=f"a certificate in {served.certificate} is not valid"):
            BrokerSecurity(settings, host)
        return
    security = BrokerSecurity(settings, host)
    listener_context = security.listeners["BROKERS"].context
    assert listener_context is not None
    assert security.dialler_context is not None
    with (
        TlsListener(listener_context()) as listener,
        listener.connect(security.dialler_context()) as client,
    ):
        assert echoes(client)
