"""Sessions of clients of HTTP, gRPC and SQS end with their certificate, and when the broker has been cut off from its
cluster for too long to know whether their user still exists."""

from __future__ import annotations

import contextlib
import ssl
import threading
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.state.authentication.certificate_fields import read_expiry_s
from support.certificates import Authority
from support.machine import scaled
from support.secured_broker import secured_broker, set_password
from support.sqs import sqs_client
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.testing.broker import TestBroker
    from support.certificates import Certificate

TIMEOUT_S: Final = 30
STALE_S: Final = 30
"""Default of `authorization_stale_max_ms`."""
BY_CERTIFICATE: Final = {
    "http_security_protocol": "SSL",
    "grpc_security_protocol": "SSL",
    "sqs_security_protocol": "SSL",
    "ssl_client_auth": "required",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def frank(authority: Authority) -> Certificate:
    return authority.issue("frank", names=(), days=1)


def http_client(url: str, context: ssl.SSLContext, auth: tuple[str, str] | None = None) -> httpx.Client:
    return httpx.Client(base_url=url, verify=context, auth=auth, timeout=scaled(TIMEOUT_S), trust_env=False)


@contextlib.contextmanager
def channel_of(
    broker: TestBroker, authority: Authority, own: Certificate | None = None
) -> Iterator[grpc.Channel]:
    parts = () if own is None else (own.key.read_bytes(), own.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), *parts)
    port = broker.grpc_address.rpartition(":")[2]
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        yield channel


def grpc_code(channel: grpc.Channel) -> Any:
    """The status with which a call ends."""
    call = channel.unary_unary("/mansio.v1.Mansio/ListTopics", pb.ListTopicsRequest.SerializeToString)
    try:
        call(pb.ListTopicsRequest(), timeout=scaled(TIMEOUT_S))
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def sqs_status(client: httpx.Client) -> int:
    return client.post("/", data={"Action": "ListQueues", "Version": "2012-11-05"}).status_code


class Follower(threading.Thread):
    """A client that follows the event stream of a topic until it ends."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.received = ""

    def run(self) -> None:
        with self._client.stream("GET", "/v1/topics/events/events") as response:
            for text in response.iter_text():
                self.received += text

    def begin(self) -> None:
        self.start()
        wait_until(lambda: "retry" in self.received, scaled(TIMEOUT_S), "the beginning of the stream")

    def has_ended(self) -> bool:
        self.join(scaled(TIMEOUT_S))
        return not self.is_alive()


def cut_off(broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the broker be one that has lost its session in the cluster."""
    monkeypatch.setattr(broker._running().service.log_ins, "_is_available", lambda: False)


def test_requests_on_an_open_connection_are_refused_when_the_certificate_has_expired(
    authority: Authority, frank: Certificate
) -> None:
    context = client_context(authority.certificate, frank)
    with (
        secured_broker(authority, authority.issue(), **BY_CERTIFICATE) as broker,
        http_client(broker.http_url, context) as http,
        http_client(broker.sqs_url, context) as sqs,
        channel_of(broker, authority, frank) as channel,
    ):
        assert http.get("/v1/topics").status_code == 200
        assert sqs_status(sqs) == 200
        assert grpc_code(channel) is grpc.StatusCode.OK
        broker.clock.advance(days=2)
        assert http.get("/v1/topics").status_code == 401
        assert sqs_status(sqs) == 403
        assert grpc_code(channel) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.full
def test_an_event_stream_ends_when_the_certificate_of_its_client_expires(
    authority: Authority, frank: Certificate
) -> None:
    context = client_context(authority.certificate, frank)
    pem = frank.certificate.read_text()
    with (
        secured_broker(authority, authority.issue(), **BY_CERTIFICATE) as broker,
        http_client(broker.http_url, context) as client,
    ):
        assert client.post("/v1/topics", json={"name": "events"}).status_code == 201
        left_s = read_expiry_s(ssl.PEM_cert_to_DER_cert(pem)) - broker.clock.time_ms() / 1000
        broker.clock.advance(seconds=left_s - scaled(3))
        follower = Follower(client)
        follower.begin()
        assert follower.has_ended()
        assert client.get("/v1/topics").status_code == 401


def test_streams_end_and_certificates_are_refused_when_the_broker_is_cut_off_for_too_long(
    authority: Authority, frank: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = client_context(authority.certificate, frank)
    with (
        secured_broker(authority, authority.issue(), **BY_CERTIFICATE) as broker,
        http_client(broker.http_url, context) as client,
        channel_of(broker, authority, frank) as channel,
    ):
        assert client.post("/v1/topics", json={"name": "events"}).status_code == 201
        follower = Follower(client)
        follower.begin()
        cut_off(broker, monkeypatch)
        assert client.get("/v1/topics").status_code == 200
        assert grpc_code(channel) is grpc.StatusCode.OK
        assert follower.is_alive()
        broker.clock.advance(seconds=STALE_S + 1)
        assert follower.has_ended()
        assert client.get("/v1/topics").status_code == 503
        assert client.get("/health/live").json() == {"live": True}
        assert grpc_code(channel) is grpc.StatusCode.UNAVAILABLE
        assert broker._running().service.log_ins.failures["stale"] == 1
        monkeypatch.undo()
        assert client.get("/v1/topics").status_code == 200


@pytest.mark.full
def test_streams_of_users_with_passwords_end_when_the_broker_is_cut_off_for_too_long(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"http_security_protocol": "SASL_SSL", "grpc_security_protocol": "SASL_SSL"}
    context = client_context(authority.certificate)
    with (
        secured_broker(authority, authority.issue(), **settings) as broker,
        http_client(broker.http_url, context, ("alice", "secret")) as client,
        channel_of(broker, authority) as channel,
    ):
        set_password(broker, "alice", "secret")
        assert client.post("/v1/topics", json={"name": "events"}).status_code == 201
        log_ins = broker._running().service.log_ins
        follower = Follower(client)
        follower.begin()
        opening = pb.ReceiveRequest(open=pb.ReceiveOpen(group="g", topics=["events"]), credits=1)
        is_over = threading.Event()

        def requests() -> Iterator[bytes]:
            yield opening.SerializeToString()
            is_over.wait(scaled(TIMEOUT_S))

        basic = httpx.BasicAuth("alice", "secret")._auth_header
        call = channel.stream_stream("/mansio.v1.Mansio/Receive")(
            requests(), metadata=(("authorization", basic),), timeout=scaled(TIMEOUT_S)
        )
        wait_until(lambda: len(log_ins._watched.get("alice", ())) == 2, scaled(TIMEOUT_S), "both streams")
        cut_off(broker, monkeypatch)
        broker.clock.advance(seconds=STALE_S + 1)
        assert follower.has_ended()
        try:
            with pytest.raises(grpc.RpcError) as error:
                list(call)
        finally:
            is_over.set()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not log_ins._watched


@pytest.mark.full
def test_access_keys_are_refused_when_the_broker_is_cut_off_for_too_long(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("KEY secret\n")
    settings = {"sqs_security_protocol": "SSL", "sqs_access_keys_file": str(keys)}
    with secured_broker(authority, authority.issue(), **settings) as broker:
        ca = str(authority.certificate)
        client = sqs_client(broker.sqs_url, key_id="KEY", secret="secret", authority=ca)
        client.list_queues()
        broker.clock.advance(minutes=1)
        client.list_queues()
        cut_off(broker, monkeypatch)
        broker.clock.advance(seconds=STALE_S + 1)
        with pytest.raises(client.exceptions.ClientError, match="ServiceUnavailable"):
            client.list_queues()
