"""The gRPC listener with TLS and users: no method is called without a valid password, and no stream outlives it."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from mansio.api.grpc import mansio_pb2 as pb
from support.certificates import Authority, Certificate
from support.machine import scaled
from support.present import present
from support.secured_broker import delete_user, renew_certificates, secured_broker, set_password
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.testing.broker import TestBroker

TIMEOUT_S: Final = 30
ALICE: Final = ("alice", "correct horse")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[TestBroker]:
    with secured_broker(authority, authority.issue(), grpc_security_protocol="SASL_SSL") as started:
        set_password(started, *ALICE)
        yield started


def metadata(user: tuple[str, str] | None) -> tuple[tuple[str, str], ...]:
    if user is None:
        return ()
    return (("authorization", "Basic " + base64.b64encode(":".join(user).encode()).decode()),)


class Client:
    """Calls of methods over one channel."""

    def __init__(self, address: str, authority: Authority, own: Certificate | None = None) -> None:
        key = None if own is None else own.key.read_bytes()
        chain = None if own is None else own.certificate.read_bytes()
        credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), key, chain)
        options = [("grpc.use_local_subchannel_pool", 1)]
        port = address.rpartition(":")[2]
        self.channel = grpc.secure_channel(f"localhost:{port}", credentials, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def unary(self, method: str, request: Any, answer: Any, user: tuple[str, str] | None) -> Any:
        path = method if method.startswith("/") else f"/mansio.v1.Mansio/{method}"
        call = self.channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
        return call(request, metadata=metadata(user), timeout=scaled(TIMEOUT_S))

    def topics(self, user: tuple[str, str] | None = ALICE) -> list[str]:
        return list(self.unary("ListTopics", pb.ListTopicsRequest(), pb.ListTopicsResponse, user).names)

    def refusal(self, user: tuple[str, str] | None) -> tuple[Any, str]:
        with pytest.raises(grpc.RpcError) as error:
            self.topics(user)
        return error.value.code(), error.value.details()


def test_calls_need_tls_and_the_right_password(broker: TestBroker, authority: Authority) -> None:
    with Client(broker.grpc_address, authority) as client:
        client.unary("CreateTopic", pb.CreateTopicRequest(name="orders"), pb.Topic, ALICE)
        assert "orders" in client.topics()
        assert client.refusal(None)[0] is grpc.StatusCode.UNAUTHENTICATED
        wrong, unknown = client.refusal(("alice", "wrong")), client.refusal(("bob", "wrong"))
        assert wrong == unknown
        assert wrong[0] is grpc.StatusCode.UNAUTHENTICATED
        probe = client.unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest(),
            health_pb2.HealthCheckResponse,
            None,
        )
        assert probe.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(broker.grpc_address) as plain:
        call = plain.unary_unary("/mansio.v1.Mansio/ListTopics")
        with pytest.raises(grpc.RpcError) as error:
            call(b"", metadata=metadata(ALICE), timeout=scaled(TIMEOUT_S))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.full
def test_reflection_and_streams_need_a_user(broker: TestBroker, authority: Authority) -> None:
    paths = {
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (
            reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        ),
        "/mansio.v1.Mansio/PublishStream": b"",
        "/mansio.v1.Mansio/Receive": b"",
        "/grpc.health.v1.Health/Watch": b"",
    }
    with Client(broker.grpc_address, authority) as client:
        for path, request in paths.items():
            call = client.channel.stream_stream(path)
            with pytest.raises(grpc.RpcError) as error:
                next(call(iter([request]), timeout=scaled(TIMEOUT_S)))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, path
        path = next(iter(paths))
        call = client.channel.stream_stream(path)
        found = next(call(iter([paths[path]]), metadata=metadata(ALICE), timeout=scaled(TIMEOUT_S)))
        assert b"mansio.v1.Mansio" in found


@pytest.mark.full
def test_a_stream_ends_when_its_user_is_deleted(broker: TestBroker, authority: Authority) -> None:
    log_ins = broker._running().service.log_ins
    set_password(broker, "carol", "before")
    with Client(broker.grpc_address, authority) as client, ThreadPoolExecutor(1) as thread:
        client.unary("CreateTopic", pb.CreateTopicRequest(name="streams"), pb.Topic, ALICE)
        opening = pb.ReceiveRequest(open=pb.ReceiveOpen(group="g", topics=["streams"]), credits=1)
        call = client.channel.stream_stream("/mansio.v1.Mansio/Receive")

        def requests() -> Iterator[bytes]:
            yield opening.SerializeToString()
            wait_until(lambda: "carol" in log_ins._watched, scaled(TIMEOUT_S), "the beginning of the stream")
            wait_until(lambda: "carol" not in log_ins._watched, scaled(TIMEOUT_S), "the end of the stream")

        def follow() -> Any:
            with pytest.raises(grpc.RpcError) as error:
                list(call(requests(), metadata=metadata(("carol", "before")), timeout=scaled(TIMEOUT_S)))
            return error.value.code()

        following = thread.submit(follow)
        wait_until(lambda: "carol" in log_ins._watched, scaled(TIMEOUT_S), "the stream")
        delete_user(broker, "carol")
        assert following.result(scaled(TIMEOUT_S)) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.full
def test_renewed_certificates_reach_new_connections(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.issue(), authority.issue()
    files = Certificate(tmp_path / "c.pem", tmp_path / "c.key")
    for source, target in zip(first, files, strict=True):
        shutil.copy(source, target)
    with secured_broker(authority, files, grpc_security_protocol="SSL") as broker:
        port = int(broker.grpc_address.rpartition(":")[2])
        assert served_certificate(port, authority) == der_of(first)
        for source, target in zip(second, files, strict=True):
            shutil.copy(source, target)
        renew_certificates(broker)
        assert served_certificate(port, authority) == der_of(second)
        with Client(broker.grpc_address, authority) as client:
            assert client.topics(None) == []


@pytest.mark.full
def test_a_certificate_can_be_required(authority: Authority) -> None:
    settings = {"grpc_security_protocol": "SSL", "ssl_client_auth": "required"}
    with secured_broker(authority, authority.issue(), **settings) as broker:
        with Client(broker.grpc_address, authority, authority.issue("frank", names=())) as client:
            assert client.topics(None) == []
        with Client(broker.grpc_address, authority) as client:
            assert client.refusal(None)[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.full
def test_clients_that_log_in_are_not_asked_for_a_certificate(authority: Authority) -> None:
    settings = {"grpc_security_protocol": "SASL_SSL", "ssl_client_auth": "required"}
    with secured_broker(authority, authority.issue(), **settings) as broker:
        set_password(broker, *ALICE)
        with Client(broker.grpc_address, authority) as client:
            assert client.topics() == []
            assert client.refusal(None)[0] is grpc.StatusCode.UNAUTHENTICATED


def der_of(issued: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.certificate.read_text())


def served_certificate(port: int, authority: Authority) -> bytes:
    context = client_context(authority.certificate)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=scaled(TIMEOUT_S)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return present(connection.getpeercert(binary_form=True))
