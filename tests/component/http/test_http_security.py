"""The HTTP listener with TLS and users: no client reads, waits or follows a stream without a valid password."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from mansio.broker.routing.caller import ClientSession
from support.certificates import Authority, Certificate
from support.machine import scaled
from support.present import present
from support.secured_broker import delete_user, renew_certificates, secured_broker, set_password
from support.tiers import smoke_first
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.testing.broker import TestBroker

TIMEOUT_S: Final = 30
ALICE: Final = ("alice", "correct horse: ü")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue()


@pytest.fixture(scope="module")
def broker(authority: Authority, issued: Certificate) -> Iterator[TestBroker]:
    with secured_broker(authority, issued, http_security_protocol="SASL_SSL") as started:
        set_password(started, *ALICE)
        yield started


@pytest.fixture(autouse=True)
def wrong_passwords_are_forgotten(broker: TestBroker) -> None:
    broker._running().service.passwords._wrong._buckets.clear()


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.certificate)


def client_of(
    broker: TestBroker, context: ssl.SSLContext, auth: tuple[str, str] | None = ALICE, **more: Any
) -> httpx.Client:
    basic = None if auth is None else httpx.BasicAuth(auth[0].encode(), auth[1].encode())
    return httpx.Client(
        base_url=broker.http_url,
        verify=context,
        auth=basic,
        timeout=scaled(TIMEOUT_S),
        trust_env=False,
        **more,
    )


def test_requests_need_tls_and_the_right_password(broker: TestBroker, context: ssl.SSLContext) -> None:
    with client_of(broker, context) as client:
        created = client.post("/v1/topics", json={"name": "orders"})
        assert created.status_code in (200, 201), created.text
        assert client.get("/v1/topics").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert "disk" in client.get("/health/ready").json()
    answers = []
    paths = ("/v1/topics", "/metrics", "/v1/docs", "/no/such/path", "/health/ready/")
    for auth in (("alice", "wrong"), ("bob", "wrong"), None):
        with client_of(broker, context, auth) as client:
            for path in paths if auth is None else paths[:1]:
                refused = client.get(path)
                assert refused.status_code == 401, (auth, path)
                assert refused.headers["www-authenticate"].startswith("Basic realm=")
                assert "orders" not in refused.text
            answers.append(client.get("/v1/topics").text)
    assert answers[0] == answers[1]
    with client_of(broker, context, None) as client:
        assert client.get("/health/live").json() == {"live": True}
        assert client.get("/health/ready").json() == {"ready": True}
    with pytest.raises(httpx.TransportError):
        httpx.get(broker.http_url.replace("https", "http") + "/health/live", timeout=scaled(TIMEOUT_S))


@pytest.mark.full
@pytest.mark.parametrize(
    ("user", "expected"),
    [("alice:" + ALICE[1], 200), ("alice:wrong", 401), ("bob:wrong", 401), ("", 401)],
    ids=["right", "wrong", "unknown", "none"],
)
def test_curl_logs_in(broker: TestBroker, authority: Authority, user: str, expected: int) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    command = [curl, "-sS", "--cacert", str(authority.certificate), "-o", "/dev/null", "-w", "%{http_code}"]
    command += [*(["-u", user] if user else []), f"{broker.http_url}/v1/topics"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(TIMEOUT_S), check=True)
    assert done.stdout == str(expected)


@pytest.mark.full
@pytest.mark.parametrize(
    "value",
    [
        "",
        "Basic",
        "Basic %%%",
        "Bearer " + base64.b64encode(b"alice:correct horse").decode(),
        "Basic " + base64.b64encode(b"alice").decode(),
        "Basic " + base64.b64encode(b":x").decode(),
        "Basic " + base64.b64encode(b"alice:").decode(),
        "Basic " + base64.b64encode(b"\xff:\xfe").decode(),
        "Basic " + base64.b64encode(b"alice\0:x").decode(),
        "Basic " + "A" * 20_000,
    ],
)
def test_malformed_credentials_are_refused(broker: TestBroker, context: ssl.SSLContext, value: str) -> None:
    with client_of(broker, context, None) as client:
        for path in ("/v1/topics", "/health/ready") if value else ("/v1/topics",):
            refused = client.get(path, headers={"authorization": value})
            assert refused.status_code == 401, path


@pytest.mark.full
def test_a_body_is_not_read_before_the_client_has_authenticated(
    broker: TestBroker, context: ssl.SSLContext
) -> None:
    host, _, port = broker.http_url.removeprefix("https://").partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=scaled(TIMEOUT_S)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as raw,
    ):
        raw.sendall(b"POST /v1/topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 401 ")


@pytest.mark.full
def test_users_of_requests_reach_services(
    broker: TestBroker, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = broker._running().clients
    make, sessions = clients.client, list[ClientSession]()

    def recorded(caller: Any, *more: Any) -> Any:
        sessions.append(caller.session)
        return make(caller, *more)

    monkeypatch.setattr(clients, "client", recorded)
    with client_of(broker, context) as client:
        assert client.get("/v1/topics").status_code == 200
    assert {each.user for each in sessions} == {"alice"}
    assert all(each.credential_revision for each in sessions)


class Listener(threading.Thread):
    """A client that follows an event stream until it ends."""

    def __init__(self, client: httpx.Client, topic: str) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._path = f"/v1/topics/{topic}/events"
        self.received = ""

    def run(self) -> None:
        with self._client.stream("GET", self._path) as response:
            for text in response.iter_text():
                self.received += text


@pytest.mark.parametrize("change", smoke_first("deleted", "password changed"))
def test_an_event_stream_ends_when_the_credential_of_its_user_changes(
    broker: TestBroker, context: ssl.SSLContext, change: str
) -> None:
    with client_of(broker, context) as client:
        client.post("/v1/topics", json={"name": "events"})
    set_password(broker, "carol", "before")
    with client_of(broker, context, ("carol", "before")) as client:
        listener = Listener(client, "events")
        listener.start()
        wait_until(lambda: "retry" in listener.received, scaled(TIMEOUT_S), "the beginning of the stream")
        set_password(broker, "dave", "another user")
        assert listener.is_alive()
        if change == "deleted":
            delete_user(broker, "carol")
        else:
            set_password(broker, "carol", "after")
        listener.join(scaled(TIMEOUT_S))
        assert not listener.is_alive()
        assert client.get("/v1/topics").status_code == 401


@pytest.mark.full
def test_a_request_that_waits_ends_when_its_user_is_deleted(
    broker: TestBroker, context: ssl.SSLContext
) -> None:
    with client_of(broker, context) as client:
        client.post("/v1/topics", json={"name": "waits"})
    set_password(broker, "erin", "before")
    answers: list[httpx.Response] = []
    log_ins = broker._running().service.log_ins

    with client_of(broker, context, ("erin", "before")) as client:
        path = "/v1/topics/waits/partitions/0/records?wait_ms=30000"
        waiting = threading.Thread(target=lambda: answers.append(client.get(path)), daemon=True)
        waiting.start()
        wait_until(lambda: "erin" in log_ins._watched, scaled(TIMEOUT_S), "the request")
        delete_user(broker, "erin")
        waiting.join(scaled(TIMEOUT_S))
    assert [each.status_code for each in answers] == [401]
    wait_until(lambda: not log_ins._watched, scaled(TIMEOUT_S), "the end of all requests")


@pytest.mark.full
def test_many_wrong_passwords_from_one_address_are_refused_without_a_check(
    authority: Authority, issued: Certificate, context: ssl.SSLContext
) -> None:
    with secured_broker(authority, issued, http_security_protocol="SASL_SSL") as broker:
        set_password(broker, *ALICE)
        with client_of(broker, context) as client, client_of(broker, context, None) as other:
            assert client.get("/v1/topics").status_code == 200

            def status() -> int:
                wrong = httpx.BasicAuth("alice", "wrong")
                found = other.get("/v1/topics", auth=wrong)
                assert found.status_code in (401, 429)
                assert found.status_code == 401 or found.headers["retry-after"]
                return found.status_code

            wait_until(lambda: status() == 429, scaled(TIMEOUT_S), "a refusal")
            assert client.get("/v1/topics").status_code == 200  # its password is remembered


@pytest.mark.full
def test_renewed_certificates_reach_new_connections(
    authority: Authority, tmp_path: Path, context: ssl.SSLContext
) -> None:
    first, second = authority.issue(), authority.issue()
    files = Certificate(tmp_path / "c.pem", tmp_path / "c.key")
    for source, target in zip(first, files, strict=True):
        shutil.copy(source, target)
    settings = {"http_security_protocol": "SSL", "sqs_security_protocol": "SSL"}
    with secured_broker(authority, files, **settings) as broker:
        urls = (broker.http_url, broker.sqs_url)
        assert [served_certificate(url, context) for url in urls] == [der_of(first)] * 2
        for source, target in zip(second, files, strict=True):
            shutil.copy(source, target)
        renew_certificates(broker)
        assert [served_certificate(url, context) for url in urls] == [der_of(second)] * 2


def der_of(issued: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.certificate.read_text())


def served_certificate(url: str, context: ssl.SSLContext) -> bytes:
    host, _, port = url.removeprefix("https://").partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=scaled(TIMEOUT_S)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return present(connection.getpeercert(binary_form=True))


@pytest.mark.full
def test_the_certificate_of_a_client_is_its_user(
    authority: Authority, issued: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"http_security_protocol": "SSL", "ssl_client_auth": "required"}
    with secured_broker(authority, issued, **settings) as broker:
        clients = broker._running().clients
        make, users = clients.client, list[str]()

        def recorded(caller: Any, *more: Any) -> Any:
            users.append(caller.session.user)
            return make(caller, *more)

        monkeypatch.setattr(clients, "client", recorded)
        own = client_context(authority.certificate, authority.issue("frank", names=()))
        with client_of(broker, own, None) as client:
            assert client.get("/v1/topics").status_code == 200
        assert set(users) == {"CN=frank"}
        with (
            client_of(broker, client_context(authority.certificate), None) as client,
            pytest.raises(httpx.TransportError),
        ):
            client.get("/v1/topics")
