"""Clients of other projects log in with tokens (OAUTHBEARER) and with API keys, write and read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider as AiokafkaProvider
from confluent_kafka import Consumer, Producer
from kafka import KafkaConsumer, KafkaProducer
from kafka.net.sasl.oauth import AbstractTokenProvider as KafkaPythonProvider

from mansio.broker.routing.caller import ANONYMOUS
from support.machine import scaled
from support.sasl_broker import SaslBroker, sasl_broker
from support.tiers import smoke_first
from support.tokens import Issuer, claims, token_settings
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE: Final = Issuer()
VALUES: Final = [b"one", b"two", b"three"]
TIMEOUT_S: Final = 30
VALID_S: Final = 4
RENEWALS: Final = 3
"""In one connection or in two: one of them is renewed twice, and the first token has ended then."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    directory = tmp_path_factory.mktemp("tokens")
    (directory / "keys.json").write_bytes(ONE.jwks())
    settings = token_settings(directory / "keys.json", sasl_oauthbearer_clock_skew_seconds=0)
    with sasl_broker(directory / "data", **settings) as started:
        started.set_user("alice", "secret")
        yield started


def token(valid_s: float = 300) -> str:
    return ONE.sign(claims(time.time() - 1, exp=time.time() + valid_s))


def confluent(address: str, topic: str) -> list[bytes]:
    producer = Producer(options(address))
    for value in VALUES:
        producer.produce(topic, value)
        wait_until(lambda: not producer.flush(0.1), TIMEOUT_S)
    return consumed(options(address), topic, len(VALUES))


def options(address: str, valid_s: float = 300) -> dict[str, Any]:
    """Return settings of librdkafka with tokens that are valid for a time."""

    def issue(_: str) -> tuple[str, float]:
        return token(valid_s), time.time() + valid_s

    return {
        "bootstrap.servers": address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": issue,
        "log_level": 0,
    }


def consumed(settings: dict[str, Any], topic: str, count: int) -> list[bytes]:
    """Return the values of the first records of a topic."""
    consumer = Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    found: list[bytes] = []

    def all_found() -> bool:
        messages = consumer.consume(count - len(found), 0.1)
        found.extend(message.value() or b"" for message in messages if message.error() is None)
        return len(found) == count

    with contextlib.closing(consumer):
        consumer.subscribe([topic])
        wait_until(all_found, TIMEOUT_S)
        return found


class KafkaPythonTokens(KafkaPythonProvider):  # type: ignore[misc]
    def token(self) -> str:
        return token()


def kafka_python(address: str, topic: str) -> list[bytes]:
    settings: dict[str, Any] = {
        "bootstrap_servers": address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": KafkaPythonTokens(),
    }
    with contextlib.closing(KafkaProducer(**settings, max_block_ms=scaled(TIMEOUT_S) * 1000)) as producer:
        for value in VALUES:
            producer.send(topic, value).get(scaled(TIMEOUT_S))
    consumer = KafkaConsumer(
        topic,
        **settings,
        group_id=topic,
        auto_offset_reset="earliest",
        consumer_timeout_ms=scaled(TIMEOUT_S) * 1000,
    )
    with contextlib.closing(consumer):
        return [message.value for _, message in zip(VALUES, consumer, strict=False)]


class AiokafkaTokens(AiokafkaProvider):  # type: ignore[misc]
    async def token(self) -> str:
        return token()


def aiokafka(address: str, topic: str) -> list[bytes]:
    async def work() -> list[bytes]:
        settings: dict[str, Any] = {
            "bootstrap_servers": address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauth_token_provider": AiokafkaTokens(),
        }
        async with asyncio.timeout(scaled(TIMEOUT_S)):
            async with AIOKafkaProducer(**settings) as producer:
                for value in VALUES:
                    await producer.send_and_wait(topic, value)
            async with AIOKafkaConsumer(topic, **settings, auto_offset_reset="earliest") as consumer:
                return [(await consumer.getone()).value for _ in VALUES]

    return asyncio.run(work())


CLIENTS: Final[list[Callable[..., list[bytes]]]] = [confluent, kafka_python, aiokafka]


@pytest.mark.parametrize("client", smoke_first(*CLIENTS))
def test_a_client_logs_in_with_tokens_writes_and_reads(
    broker: SaslBroker, client: Callable[..., list[bytes]]
) -> None:
    assert client(broker.address, client.__name__) == VALUES


@pytest.mark.full
def test_librdkafka_goes_on_when_its_tokens_end(broker: SaslBroker) -> None:
    counters = broker.broker.server.counters

    def renewals() -> int:
        """The least number of log-ins in connections that had logged in before."""
        return counters.authentications - counters.connections_accepted

    before, sent = renewals(), 0
    # librdkafka gets a new token after 80 % of the lifetime of the last one, and renews a session after 90 % of that of
    # the session. If a busy machine is late with one of them, the broker closes the connection; librdkafka then opens
    # another one and sends the record again.
    settings = options(broker.address, scaled(VALID_S))
    producer = Producer({**settings, "enable.idempotence": True})

    def has_renewed() -> bool:
        nonlocal sent
        producer.produce("renewed", b"%d" % sent)
        sent += 1
        return not producer.flush(0.1) and renewals() - before >= RENEWALS

    wait_until(has_renewed, 2 * RENEWALS * VALID_S + TIMEOUT_S, "log-ins in open connections")
    found = consumed(options(broker.address), "renewed", sent)
    assert found == [b"%d" % number for number in range(sent)]


@pytest.mark.full
def test_an_api_key_is_user_and_password_of_other_clients(broker: SaslBroker) -> None:
    created = broker.run(
        broker.broker.service.api_keys.create("alice", "", None, is_confidential=True, caller=ANONYMOUS)
    )
    producer = Producer(
        {
            "bootstrap.servers": broker.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": created.api_key.key_id,
            "sasl.password": created.text,
        }
    )
    producer.produce("keys", b"x")
    wait_until(lambda: not producer.flush(0.1), scaled(TIMEOUT_S), "the record")
