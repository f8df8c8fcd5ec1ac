"""Kafka clients over TLS: they produce and consume as over plaintext, and the certificate of a client is known."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
import struct
from typing import TYPE_CHECKING, Any

import aiokafka
import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.certificates import Authority, Certificate
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer, batch_of, fetch_frame
from support.tls_broker import TlsBroker, tls_broker
from support.tls_listener import client_context, tls_files
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = 400
VALUE_BYTES = 5_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue()


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, issued: Certificate
) -> Iterator[TlsBroker]:
    files = tls_files(issued, authority, "requested")
    with tls_broker(tmp_path_factory.mktemp("data"), files) as started:
        yield started


def settings_of(broker: TlsBroker, authority: Authority, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.address,
        "security.protocol": "ssl",
        "ssl.ca.location": str(authority.certificate),
        **more,
    }


class TlsPeer(RawPeer):
    """`RawPeer` over TLS."""

    def __init__(self, port: int, context: ssl.SSLContext, *, receive_buffer_bytes: int = 0) -> None:
        super().__init__(port, receive_buffer_bytes=receive_buffer_bytes)
        self.socket = context.wrap_socket(self.socket, server_hostname="localhost")


def values(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(VALUE_BYTES)) for _ in range(RECORDS)]


def test_librdkafka_produces_and_consumes_over_tls(broker: TlsBroker, authority: Authority) -> None:
    admin = AdminClient(settings_of(broker, authority))
    admin.create_topics([NewTopic("librdkafka", 1, 1)])["librdkafka"].result(scaled(30))
    producer = confluent_kafka.Producer(settings_of(broker, authority, **{"enable.idempotence": True}))
    sent = values(1)
    for value in sent:
        producer.produce("librdkafka", value)
    assert producer.flush(scaled(30)) == 0
    consumer = confluent_kafka.Consumer(
        settings_of(broker, authority, **{"group.id": "readers", "auto.offset.reset": "earliest"})
    )
    consumer.subscribe(["librdkafka"])
    received: list[bytes] = []

    def has_all() -> bool:
        for message in consumer.consume(RECORDS, 0.2):
            assert message.error() is None
            received.append(present(message.value()))
        return len(received) >= RECORDS

    wait_until(has_all, 60, "all records")
    consumer.close()
    assert received == sent


def test_aiokafka_produces_and_consumes_over_tls_with_a_client_certificate(
    broker: TlsBroker, authority: Authority
) -> None:
    context = client_context(authority.certificate, authority.issue("/O=Example/CN=alice", names=()))
    options: dict[str, Any] = {
        "bootstrap_servers": broker.address,
        "security_protocol": "SSL",
        "ssl_context": context,
    }
    sent = values(2)

    async def scenario() -> None:
        producer = aiokafka.AIOKafkaProducer(**options)
        await producer.start()
        for value in sent:
            await producer.send("aiokafka", value)
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer("aiokafka", auto_offset_reset="earliest", **options)
        await consumer.start()
        try:
            received = [(await consumer.getone()).value for _ in sent]
            certificates = {each.client_certificate for each in tuple(broker.server._connections)}
            known = [ssl.DER_cert_to_PEM_cert(each) for each in certificates if each is not None]
            assert len(known) == 1
        finally:
            await consumer.stop()
        assert received == sent

    async def in_time() -> None:
        async with asyncio.timeout(scaled(60)):
            await scenario()

    asyncio.run(in_time())


def stored_batches(broker: TlsBroker, topic: str, count: int, value_bytes: int) -> None:
    with RawPeer(broker.plaintext_port) as peer:
        peer.create_topic(topic)
        chance = random.Random(3)
        for _ in range(count):
            result = peer.produce(topic, batch_of(chance.randbytes(value_bytes)))
            assert result.error_code == 0


def fetched(peer: RawPeer, topic: str) -> bytes:
    peer.send(fetch_frame(topic, max_bytes=1 << 24))
    answer = peer.frame()
    assert answer is not None
    return answer


def test_a_slow_reader_gets_the_same_bytes_over_tls_as_over_plaintext(
    broker: TlsBroker, authority: Authority
) -> None:
    stored_batches(broker, "slow", 12, 700_000)
    context = client_context(authority.certificate)
    with (
        RawPeer(broker.plaintext_port) as plain,
        TlsPeer(broker.port, context, receive_buffer_bytes=16 * 1024) as encrypted,
    ):
        expected = [fetched(plain, "slow") for _ in range(3)]
        assert len(expected[0]) > 5_000_000
        for _ in range(3):
            encrypted.send(fetch_frame("slow", max_bytes=1 << 24))
        connection = wait_until(
            lambda: next(
                (each for each in tuple(broker.server._connections) if each.is_unread or each.is_busy), None
            ),
            20,
            "a connection that waits for its reader",
        )
        assert broker.server.unsent_bytes < 1_000_000
        for answer in expected:
            assert digest(encrypted.frame()) == digest(answer)
        wait_until(lambda: not connection.is_busy, 20, "nothing waits")
        assert broker.server.unsent_bytes == 0


def digest(data: bytes | None) -> str:
    assert data is not None
    return hashlib.sha256(data).hexdigest()


def test_requests_that_arrive_in_pieces_and_together_are_answered_in_order(
    broker: TlsBroker, authority: Authority
) -> None:
    request = messages.encode_request(ApiKey.API_VERSIONS, 3, 7, "raw", {})
    requests = b"".join(
        messages.encode_request(ApiKey.API_VERSIONS, 3, number, "raw", {}) for number in range(50)
    )
    with TlsPeer(broker.port, client_context(authority.certificate)) as peer:
        for position in range(len(request)):
            peer.send(request[position : position + 1])
        answer = peer.frame()
        assert answer is not None
        assert struct.unpack_from(">i", answer)[0] == 7
        peer.send(requests)
        for number in range(50):
            answer = peer.frame()
            assert answer is not None
            assert struct.unpack_from(">i", answer)[0] == number


def test_tls_on_the_plaintext_port_ends_in_a_close(broker: TlsBroker, authority: Authority) -> None:
    with pytest.raises(OSError, match=r"(?i)eof|reset|closed"), RawPeer(broker.plaintext_port) as peer:
        client_context(authority.certificate).wrap_socket(peer.socket, server_hostname="localhost")


def test_what_a_client_sends_after_its_handshake_cannot_end_another_connection(
    broker: TlsBroker, authority: Authority
) -> None:
    context = client_context(authority.certificate)
    with TlsPeer(broker.port, context) as good, TlsPeer(broker.port, context) as bad:
        bad.send(b"\xff" * 1000)
        assert bad.closed()
        assert good.call(ApiKey.API_VERSIONS, 3).error_code == 0


@pytest.mark.full
def test_a_renewed_certificate_reaches_new_connections_of_a_broker(
    broker: TlsBroker, authority: Authority, issued: Certificate
) -> None:
    context = client_context(authority.certificate)
    with TlsPeer(broker.port, context) as before:
        for old, new in zip(issued, authority.issue(), strict=True):
            old.write_bytes(new.read_bytes())
        broker.renew()
        with TlsPeer(broker.port, context) as after:
            assert before.socket.getpeercert() != after.socket.getpeercert()  # type: ignore[attr-defined]
            for peer in (before, after):
                assert peer.call(ApiKey.API_VERSIONS, 3).error_code == 0
