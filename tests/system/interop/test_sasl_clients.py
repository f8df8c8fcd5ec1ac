"""Clients of other projects log in with each mechanism, write and read; a wrong password is reported; tools manage
users as in Kafka (KIP-554)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from confluent_kafka.admin import ScramMechanism as ConfluentMechanism
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import UserScramCredentialDeletion as KafkaPythonDeletion
from kafka.admin import UserScramCredentialUpsertion as KafkaPythonUpsertion
from kafka.errors import KafkaError as KafkaPythonError

from mansio.config.security import SASL_MECHANISMS
from support.certificates import Authority
from support.machine import scaled
from support.paths import required_tool
from support.sasl_broker import SaslBroker, sasl_broker
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USER, PASSWORD = "alice", "größe=,"
VALUES = [b"one", b"two", b"three"]
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    with sasl_broker(tmp_path_factory.mktemp("clients") / "data") as started:
        started.set_user(USER, PASSWORD)
        yield started


def confluent_settings(address: str, mechanism: str, password: str, ca: str = "") -> dict[str, Any]:
    return {
        "bootstrap.servers": address,
        "security.protocol": "SASL_SSL" if ca else "SASL_PLAINTEXT",
        **({"ssl.ca.location": ca} if ca else {}),
        "sasl.mechanism": mechanism,
        "sasl.username": USER,
        "sasl.password": password,
        "log_level": 0,
    }


def confluent(
    address: str, mechanism: str, topic: str, password: str = PASSWORD, ca: str = ""
) -> list[bytes]:
    settings = confluent_settings(address, mechanism, password, ca)
    errors: list[Any] = []
    producer = Producer({**settings, "error_cb": errors.append})
    for value in VALUES:
        producer.produce(topic, value)
    wait_until(lambda: not producer.flush(0.1) or any(map(is_refusal, errors)), TIMEOUT_S)
    if any(map(is_refusal, errors)):
        raise KafkaException(next(filter(is_refusal, errors)))
    consumer = Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        found: list[bytes] = []

        def all_found() -> bool:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.append(message.value() or b"")
            return len(found) == len(VALUES)

        wait_until(all_found, TIMEOUT_S)
        return found
    finally:
        consumer.close()


def is_refusal(error: Any) -> bool:
    return error.name() == "_AUTHENTICATION"


def kafka_python(
    address: str, mechanism: str, topic: str, password: str = PASSWORD, ca: str = ""
) -> list[bytes]:
    settings: dict[str, Any] = {
        "bootstrap_servers": address,
        "security_protocol": "SASL_SSL" if ca else "SASL_PLAINTEXT",
        "ssl_cafile": ca or None,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": USER,
        "sasl_plain_password": password,
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


def aiokafka(address: str, mechanism: str, topic: str, password: str = PASSWORD, ca: str = "") -> list[bytes]:
    settings: dict[str, Any] = {
        "bootstrap_servers": address,
        "security_protocol": "SASL_SSL" if ca else "SASL_PLAINTEXT",
        "ssl_context": ssl.create_default_context(cafile=ca) if ca else None,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": USER,
        "sasl_plain_password": password,
    }

    async def work() -> list[bytes]:
        async with asyncio.timeout(scaled(TIMEOUT_S)):
            producer = AIOKafkaProducer(**settings)
            try:
                await producer.start()
                for value in VALUES:
                    await producer.send_and_wait(topic, value)
            finally:
                await producer.stop()
            consumer = AIOKafkaConsumer(topic, **settings, auto_offset_reset="earliest")
            try:
                await consumer.start()
                return [(await consumer.getone()).value for _ in VALUES]
            finally:
                await consumer.stop()

    return asyncio.run(work())


CLIENTS: list[Callable[..., list[bytes]]] = [confluent, kafka_python, aiokafka]
REFUSALS = (KafkaException, KafkaPythonError, AiokafkaError, TimeoutError)


@pytest.mark.parametrize("mechanism", smoke_first(*SASL_MECHANISMS))
@pytest.mark.parametrize("client", smoke_first(*CLIENTS))
def test_a_client_logs_in_writes_and_reads(
    broker: SaslBroker, client: Callable[..., list[bytes]], mechanism: str
) -> None:
    topic = f"{client.__name__}-{mechanism}"
    assert client(broker.address, mechanism, topic) == VALUES


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
@pytest.mark.parametrize("client", [confluent, aiokafka], ids=lambda client: client.__name__)
def test_a_client_reports_a_wrong_password(
    broker: SaslBroker, client: Callable[..., list[bytes]], mechanism: str
) -> None:
    before = broker.failures["credentials"]
    with pytest.raises(REFUSALS):
        client(broker.address, mechanism, "never", "wrong")
    assert broker.failures["credentials"] > before
    assert "never" not in broker.broker.service.topics.state.topics


@pytest.mark.full
def test_confluents_tool_manages_users(broker: SaslBroker) -> None:
    admin = AdminClient(confluent_settings(broker.address, "SCRAM-SHA-512", PASSWORD))
    info = ScramCredentialInfo(ConfluentMechanism.SCRAM_SHA_256, 8_192)

    def alter(*alterations: Any) -> None:
        for future in admin.alter_user_scram_credentials(list(alterations)).values():
            future.result(scaled(TIMEOUT_S))

    alter(UserScramCredentialUpsertion("carol", info, b"secret"))
    described: Any = admin.describe_user_scram_credentials(["carol"])
    (found,) = described["carol"].result(scaled(TIMEOUT_S)).scram_credential_infos
    assert (found.mechanism, found.iterations) == (ConfluentMechanism.SCRAM_SHA_256, 8_192)
    assert login(broker, "carol", "secret")
    for wrong in (
        UserScramCredentialUpsertion("few", ScramCredentialInfo(ConfluentMechanism.SCRAM_SHA_256, 1), b"p"),
        UserScramCredentialDeletion("nobody", ConfluentMechanism.SCRAM_SHA_256),
    ):
        with pytest.raises(KafkaException):
            alter(wrong)
    alter(UserScramCredentialDeletion("carol", ConfluentMechanism.SCRAM_SHA_256))
    assert not login(broker, "carol", "secret", timeout_s=2)


def login(broker: SaslBroker, user: str, password: str, timeout_s: float = TIMEOUT_S) -> bool:
    settings = confluent_settings(broker.address, "PLAIN", password) | {"sasl.username": user}
    errors: list[Any] = []
    options: dict[str, Any] = {**settings, "error_cb": errors.append}
    admin = AdminClient(options)
    with contextlib.suppress(KafkaException):
        return bool(admin.list_topics(timeout=scaled(timeout_s)).brokers)
    return False


@pytest.mark.full
def test_kafka_python_manages_users(broker: SaslBroker) -> None:
    admin = KafkaAdminClient(
        bootstrap_servers=broker.address,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_plain_username=USER,
        sasl_plain_password=PASSWORD,
    )
    with contextlib.closing(admin):
        upsertion = KafkaPythonUpsertion("dave", "SCRAM_SHA_512", "secret", iterations=4_096)
        assert admin.alter_user_scram_credentials([upsertion]) == {"dave": None}
        assert "dave" in admin.describe_user_scram_credentials()
        assert login(broker, "dave", "secret")
        assert admin.alter_user_scram_credentials([KafkaPythonDeletion("dave", "SCRAM_SHA_512")]) == {
            "dave": None
        }
        assert "dave" not in admin.describe_user_scram_credentials()


@pytest.mark.full
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_librdkafka_authenticates_again_before_its_session_ends(
    tmp_path_factory: pytest.TempPathFactory, mechanism: str
) -> None:
    directory = tmp_path_factory.mktemp("again") / "data"
    with sasl_broker(directory, connections_max_reauth_ms=1_500) as broker:
        broker.set_user(USER, PASSWORD)
        producer = Producer(confluent_settings(broker.address, mechanism, PASSWORD))
        delivered: list[Any] = []

        def produce_again() -> bool:
            producer.produce("t", b"v", on_delivery=lambda error, _message: delivered.append(error))
            producer.flush(1)
            return broker.broker.server.counters.authentications >= 4

        wait_until(produce_again, TIMEOUT_S)
        assert producer.flush(scaled(TIMEOUT_S)) == 0
        assert set(delivered) == {None}
        assert broker.failures["expired"] == 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure_broker(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[SaslBroker]:
    with sasl_broker(
        tmp_path_factory.mktemp("secure") / "data",
        listeners="SASL_SSL://127.0.0.1:0",
        **file_settings(authority),
    ) as started:
        started.set_user(USER, PASSWORD)
        yield started


def file_settings(authority: Authority) -> dict[str, str]:
    issued = authority.issue()
    return {
        "ssl_certificate_location": str(issued.certificate),
        "ssl_key_location": str(issued.key),
        "ssl_ca_location": str(authority.certificate),
    }


@pytest.mark.parametrize("mechanism", smoke_first(*SASL_MECHANISMS))
@pytest.mark.parametrize("client", smoke_first(*CLIENTS))
def test_a_client_logs_in_over_tls_writes_and_reads(
    secure_broker: SaslBroker, authority: Authority, client: Callable[..., list[bytes]], mechanism: str
) -> None:
    topic = f"{client.__name__}-{mechanism}"
    ca = str(authority.certificate)
    assert client(secure_broker.address, mechanism, topic, ca=ca) == VALUES


@pytest.mark.full
def test_kcat_logs_in_over_tls_writes_and_reads(secure_broker: SaslBroker, authority: Authority) -> None:
    """With PLAIN: the nonce that librdkafka before 2.6.1 sends for SCRAM is refused, as by Kafka 4 (CVE-2024-56128)."""
    settings = confluent_settings(secure_broker.address, "PLAIN", PASSWORD, str(authority.certificate))
    command = [str(required_tool("kcat")), "-b", settings.pop("bootstrap.servers")]
    for name, value in settings.items():
        command += ["-X", f"{name}={value}"]
    deadline_s = scaled(TIMEOUT_S)
    subprocess.run([*command, "-P", "-t", "kcat"], input=b"\n".join(VALUES), check=True, timeout=deadline_s)
    read = [*command, "-C", "-t", "kcat", "-o", "beginning", "-e", "-q"]
    shown = subprocess.run(read, capture_output=True, check=True, timeout=deadline_s).stdout
    assert shown.split() == VALUES


@pytest.mark.full
def test_the_certificate_of_a_client_is_its_user(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> None:
    directory = tmp_path_factory.mktemp("certificates") / "data"
    mapping = {"ssl_client_auth": "required", "ssl_principal_mapping_rules": "RULE:^CN=(.*?),O=shop$/$1/"}
    listener = {"listeners": "SSL://127.0.0.1:0", **file_settings(authority), **mapping}
    with sasl_broker(directory, **listener) as broker:
        settings: dict[str, Any] = {
            "bootstrap.servers": broker.address,
            "security.protocol": "ssl",
            "ssl.ca.location": str(authority.certificate),
        }

        def producer_of(subject: str) -> Producer:
            issued = authority.issue(subject, names=())
            own = {
                "ssl.certificate.location": str(issued.certificate),
                "ssl.key.location": str(issued.key),
            }
            return Producer({**settings, **own})

        producer = producer_of("/O=shop/CN=alice")
        producer.produce("t", b"v")
        assert producer.flush(scaled(TIMEOUT_S)) == 0
        assert set(broker.broker.service.topics.state.topics) == {"t"}
        users = broker.call(lambda: {each.session.user for each in broker.broker.server._connections})
        assert users == {"alice"}

        stranger = producer_of("/CN=alice")  # no rule makes a user of it
        rejected = broker.broker.server.counters.rejected_by_reason
        wait_until(lambda: stranger.poll(0.1) == 0 and rejected["certificate"] > 0, TIMEOUT_S)
