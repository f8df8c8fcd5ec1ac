"""Listeners of one broker over sockets: clients of each listener only get its advertised address, as behind NAT."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.config.addresses import WILDCARD_IPV4
from mansio.errors import MansioError
from mansio.host.listening_sockets import ListenError
from mansio.node.broker import Broker
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from support.listeners import AskedListeners
from support.machine import scaled
from support.paths import free_port, required_tool
from support.raw_peer import RawPeer
from support.recording_proxy import recording
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.recording_proxy import RecordingProxy

PROTOCOLS = "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT"
TIMEOUT_S = 20


class Site:
    """A broker with the listener INSIDE, which is reached directly, and OUTSIDE behind a proxy with another name and
    another port. `asked`: the listeners through which clients made requests."""

    def __init__(
        self, broker: mansio.Broker, proxy: RecordingProxy, asked: AskedListeners, outside_port: int
    ) -> None:
        self.broker = broker
        self.asked = asked
        self.inside = broker.address
        self.outside = f"localhost:{proxy.port}"
        self.outside_port = outside_port


@contextmanager
def site(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    asked, inside, outside, proxied = AskedListeners(), free_port(), free_port(), free_port()
    monkeypatch.setattr("mansio.node.embedded.Broker", partial(Broker, intercept=asked.intercept))
    settings: dict[str, Any] = {
        "listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://127.0.0.1:{outside}",
        "advertised_listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://localhost:{proxied}",
        "listener_security_protocol_map": PROTOCOLS,
    }
    with recording(proxied, outside) as proxy, mansio.Broker(directory, **settings) as broker:
        yield Site(broker, proxy, asked, outside)


def use_mansio(address: str, client_id: str) -> list[bytes | None]:
    with mansio.blocking.connect(address, client_id=client_id) as client:
        client.publish(client_id, b"1")
        with client.receive(client_id, group=f"{client_id}-share") as receiver:

            def is_received() -> bool:
                client.publish(client_id, b"1")  # again, because the group begins at the end of the log
                return bool(receiver.poll(200))

            wait_until(is_received, TIMEOUT_S, "a record for the share group")
        return [each.value for each in client.consume(client_id, group=client_id, max_records=1)]


def use_confluent_kafka(address: str, client_id: str) -> list[bytes | None]:
    from confluent_kafka import Consumer, Producer

    common = {"bootstrap.servers": address, "client.id": client_id, "broker.address.family": "v4"}
    producer = Producer(common)
    producer.produce(client_id, b"1")
    assert producer.flush(scaled(TIMEOUT_S)) == 0
    consumer = Consumer({**common, "group.id": client_id, "auto.offset.reset": "earliest"})
    consumer.subscribe([client_id])
    try:
        message = consumer.poll(scaled(TIMEOUT_S))
        assert message is not None
        return [message.value()]
    finally:
        consumer.close()


def use_kafka_python(address: str, client_id: str) -> list[bytes | None]:
    from kafka import KafkaConsumer, KafkaProducer

    producer = KafkaProducer(bootstrap_servers=address, client_id=client_id)
    producer.send(client_id, b"1").get(scaled(TIMEOUT_S))
    producer.close()
    consumer = KafkaConsumer(
        client_id,
        bootstrap_servers=address,
        client_id=client_id,
        group_id=client_id,
        auto_offset_reset="earliest",
        consumer_timeout_ms=1000 * scaled(TIMEOUT_S),
    )
    try:
        return [next(consumer).value]
    finally:
        consumer.close()


def use_aiokafka(address: str, client_id: str) -> list[bytes | None]:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    async def use() -> list[bytes | None]:
        async with AIOKafkaProducer(bootstrap_servers=address, client_id=client_id) as producer:
            await producer.send_and_wait(client_id, b"1")
        async with AIOKafkaConsumer(
            client_id,
            bootstrap_servers=address,
            client_id=client_id,
            group_id=client_id,
            auto_offset_reset="earliest",
        ) as consumer:
            return [(await asyncio.wait_for(consumer.getone(), scaled(TIMEOUT_S))).value]

    return asyncio.run(use())


def use_kcat(address: str, client_id: str) -> list[bytes | None]:
    kcat = [
        str(required_tool("kcat")),
        "-q",
        "-X",
        f"client.id={client_id}",
        "-X",
        "broker.address.family=v4",
    ]
    with_deadline: Any = partial(subprocess.run, check=True, timeout=scaled(TIMEOUT_S))
    with_deadline([*kcat, "-b", address, "-t", client_id, "-P"], input=b"1")
    arguments = ["-b", address, "-t", client_id, "-C", "-e", "-c", "1"]
    found: bytes = with_deadline([*kcat, *arguments], stdout=subprocess.PIPE).stdout
    return [found.strip()]


CLIENTS: dict[str, Callable[[str, str], list[bytes | None]]] = {
    "mansio": use_mansio,
    "confluent-kafka": use_confluent_kafka,
    "kafka-python": use_kafka_python,
    "aiokafka": use_aiokafka,
    "kcat": use_kcat,
}


def test_each_client_makes_all_its_requests_through_the_listener_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site(tmp_path, monkeypatch) as place:
        for name, use in CLIENTS.items():
            for listener, address in (("INSIDE", place.inside), ("OUTSIDE", place.outside)):
                client_id = f"{name}-{listener.lower()}"
                assert use(address, client_id) == [b"1"], client_id
                assert place.asked.by_client[client_id] == {listener}, client_id
        assert {ApiKey.FIND_COORDINATOR, ApiKey.SHARE_FETCH} <= place.asked.requests["mansio-outside"]


def test_every_api_that_names_brokers_names_the_listeners_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site(tmp_path, monkeypatch) as place:
        for address in (place.inside, place.outside):
            host, _, port = address.partition(":")
            expected = [(1, host, int(port))]
            bound_port = int(port) if address == place.inside else place.outside_port
            with RawPeer(bound_port) as peer:  # no matter by which address it is reached
                found = peer.call(ApiKey.METADATA, 12, {"topics": []})
                assert [(each.node_id, each.host, each.port) for each in found.brokers] == expected
                found = peer.call(ApiKey.DESCRIBE_CLUSTER, 2, {"endpoint_type": 1})
                assert [(each.broker_id, each.host, each.port) for each in found.brokers] == expected
                keys = {"key_type": 0, "coordinator_keys": ["g"]}
                found = peer.call(ApiKey.FIND_COORDINATOR, 4, keys)
                assert [(each.node_id, each.host, each.port) for each in found.coordinators] == expected


def test_http_clients_are_served_whatever_the_names_of_the_listeners_are() -> None:
    import httpx

    with TestBroker(
        listeners="INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:0", listener_security_protocol_map=PROTOCOLS
    ) as broker:
        with broker.client() as client:
            client.admin.create_topic("t")
        sent = httpx.post(f"{broker.http_url}/v1/topics/t/records", json={"value": "1"}, timeout=scaled(20))
        assert sent.status_code == 200, sent.text
        with broker.client() as client:
            assert len(list(client.consume("t", to_end=True))) == 1
        before = broker.bootstrap_servers
        broker.restart()
        assert broker.bootstrap_servers == before


def test_a_listener_that_is_not_advertised_leads_to_no_broker_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    settings: dict[str, Any] = {
        "listeners": f"INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:{port}",
        "advertised_listeners": "INSIDE://127.0.0.1:9092",
        "listener_security_protocol_map": PROTOCOLS,
    }
    with caplog.at_level(logging.WARNING), mansio.Broker(tmp_path, **settings), RawPeer(port) as peer:
        assert list(peer.call(ApiKey.METADATA, 12, {"topics": []}).brokers) == []
        keys = {"key_type": 0, "coordinator_keys": ["g"]}
        (found,) = peer.call(ApiKey.FIND_COORDINATOR, 4, keys).coordinators
        assert (found.error_code, found.node_id) == (15, -1)
        assert "no listener OUTSIDE" in found.error_message
    assert "listener_is_not_advertised" in caplog.messages


def test_if_one_listener_cannot_be_opened_none_is(tmp_path: Path) -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listeners = f"INSIDE://127.0.0.1:{free},OUTSIDE://127.0.0.1:{port}"
        broker = mansio.Broker(tmp_path, listeners=listeners, listener_security_protocol_map=PROTOCOLS)
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}: ") as caught:
            broker.start()
        assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", free)):
        pass


needs_ipv6 = pytest.mark.skipif(not socket.has_ipv6, reason="Python is built without IPv6")


@pytest.fixture
def ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")


@needs_ipv6
@pytest.mark.usefixtures("ipv6_loopback")
def test_a_broker_on_ipv6_is_reached_through_its_address(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path, listeners="[::1]:0") as broker:
        assert broker.address.startswith("[::1]:")
        assert use_mansio(broker.address, "six") == [b"1"]
        assert use_kafka_python(broker.address, "six-too") == [b"1"]


@needs_ipv6
@pytest.mark.usefixtures("ipv6_loopback")
def test_an_empty_host_accepts_ipv4_and_ipv6_on_one_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        mansio.Broker(tmp_path, listeners="PLAINTEXT://:0", insecure_listen=True) as broker,
    ):
        port = int(broker.address.rpartition(":")[2])
        for host in ("127.0.0.1", "::1"):
            with RawPeer(port, host=host) as peer:
                found = peer.call(ApiKey.METADATA, 12, {"topics": []})
                assert [(each.host, each.port) for each in found.brokers] == [(WILDCARD_IPV4, port)]
    assert "advertised_listener_is_wildcard" in caplog.messages


@needs_ipv6
@pytest.mark.usefixtures("ipv6_loopback")
def test_an_ipv4_and_an_ipv6_listener_share_a_port(tmp_path: Path) -> None:
    port = free_port()
    listeners = f"INSIDE://127.0.0.1:{port},OUTSIDE://[::1]:{port}"
    with mansio.Broker(tmp_path, listeners=listeners, listener_security_protocol_map=PROTOCOLS):
        for host, address in (("127.0.0.1", f"127.0.0.1:{port}"), ("::1", f"[::1]:{port}")):
            with mansio.blocking.connect(address) as client:
                assert [each.host for each in client.admin.describe_cluster().brokers] == [host]


def test_a_broker_whose_only_listener_has_a_name_works_as_one_without(tmp_path: Path) -> None:
    protocols = "MINE:PLAINTEXT"
    with mansio.Broker(
        tmp_path, listeners="mine://127.0.0.1:0", listener_security_protocol_map=protocols
    ) as broker:
        assert use_mansio(broker.address, "named") == [b"1"]
    with pytest.raises(MansioError, match="listener_security_protocol_map"):
        mansio.Broker(tmp_path, listeners="mine://127.0.0.1:0")
