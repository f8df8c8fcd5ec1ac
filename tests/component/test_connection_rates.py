"""An address that connects more often than its quota allows is slowed down, on every listener, and others are not
(KIP-612)."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import mansio
from mansio.client.admin.quotas import DEFAULT_ENTITY, Quota
from mansio.net.connection_throttle import HELD_MAX
from mansio.testing.broker import TestBroker
from support.certificates import Authority, Certificate
from support.machine import scaled
from support.tiers import smoke_first
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.net.connection_throttle import ConnectionThrottle

LIMITED, OTHER = "127.0.0.5", "127.0.0.6"
API_VERSIONS = bytes.fromhex("00000011001200000000000100076c696272646b61")

HTTP_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
REQUESTS = {"kafka": API_VERSIONS, "http": HTTP_REQUEST, "sqs": HTTP_REQUEST}


class World:
    """A broker, whose listeners have TLS or do not, with a quota of one connection per second for `LIMITED`."""

    def __init__(self, broker: TestBroker, ca: Path | None) -> None:
        self.broker = broker
        self.context = None if ca is None else client_context(ca)
        tls = None if ca is None else str(ca)
        with mansio.blocking.connect(broker.bootstrap_servers, tls=tls) as client:
            client.admin.quotas.set(ip=LIMITED, values={"connection_creation_rate": 1})

    @property
    def throttle(self) -> ConnectionThrottle:
        return self.broker._running().throttle

    def port(self, protocol: str) -> int:
        addresses = {
            "kafka": lambda: self.broker.bootstrap_servers,
            "http": lambda: self.broker.http_url,
            "sqs": lambda: self.broker.sqs_url,
        }
        return int(addresses[protocol]().rpartition(":")[2])

    def connect(self, port: int, host: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=scaled(20), source_address=(host, 0))

    def is_served(self, protocol: str, host: str) -> bool:
        """Whether a new connection from `host` is answered, not closed."""
        plain = self.connect(self.port(protocol), host)
        try:
            client = (
                plain
                if self.context is None
                else self.context.wrap_socket(plain, server_hostname="localhost")
            )
        except (ssl.SSLError, ConnectionError):
            plain.close()
            return False
        with client, contextlib.suppress(ConnectionError):
            client.sendall(
                API_VERSIONS if protocol == "kafka" else b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            return client.recv(1) != b""
        return False


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue()


@pytest.fixture(params=smoke_first("PLAINTEXT", "SSL"))
def world(request: pytest.FixtureRequest, authority: Authority, issued: Certificate) -> Iterator[World]:
    settings: dict[str, Any] = {"quota_burst_ms": 1000}
    if request.param == "SSL":
        settings |= {
            "listeners": "SSL://localhost:0",
            "inter_broker_listener_name": "SSL",
            "http_security_protocol": "SSL",
            "sqs_security_protocol": "SSL",
            "ssl_certificate_location": str(issued.certificate),
            "ssl_key_location": str(issued.key),
        }
    with TestBroker(**settings) as broker:
        yield World(broker, authority.certificate if request.param == "SSL" else None)


@pytest.mark.parametrize("protocol", ["kafka", "http", "sqs"])
def test_address_over_its_rate_is_slowed_down_on_every_listener_and_others_are_not(
    world: World, protocol: str
) -> None:
    throttled = world.throttle.throttled
    wait_until(lambda: not world.is_served(protocol, LIMITED), 30, "a connection over the rate")
    assert world.throttle.throttled > throttled
    for _ in range(10):
        assert world.is_served(protocol, OTHER)
    wait_until(lambda: world.is_served(protocol, LIMITED), 30, "a connection within the rate")
    wait_until(lambda: not world.throttle.held_count, 20, "the end of throttled connections")


def test_throttled_connections_are_bounded_and_end_with_the_broker(world: World) -> None:
    throttle = world.throttle
    clients = [world.connect(world.port("kafka"), LIMITED) for _ in range(HELD_MAX + 20)]
    wait_until(lambda: throttle.throttled >= HELD_MAX, 20, "the throttled connections")
    assert throttle.held_count <= HELD_MAX
    world.broker.close()
    for client in clients:
        with contextlib.suppress(ConnectionError):
            while client.recv(1000):
                pass
        client.close()
    assert not throttle.held_count


def test_quota_is_described_as_it_was_set_and_can_be_removed() -> None:
    with TestBroker(quota_burst_ms=1000) as broker:
        quotas = broker.client().admin.quotas
        assert broker._running().service.quotas.connection_rates is None
        quotas.set(ip=DEFAULT_ENTITY, values={"connection_creation_rate": 1000})
        quotas.set(ip="2001:db8::1", values={"connection_creation_rate": 5})
        values = {"connection_creation_rate": 1000.0}
        assert sorted(quotas.list(), key=str) == sorted(
            [
                Quota(None, None, values, DEFAULT_ENTITY),
                Quota(None, None, {"connection_creation_rate": 5.0}, "2001:db8::1"),
            ],
            key=str,
        )
        assert broker._running().service.quotas.active is None, "produce and fetch are not limited"
        quotas.delete(ip=DEFAULT_ENTITY)
        quotas.delete(ip="2001:db8::1")
        assert quotas.list() == []
        assert broker._running().service.quotas.connection_rates is None
        metrics = httpx.get(f"{broker.http_url}/metrics").text
        assert "mansio_connections_throttled_total 0" in metrics
