"""Access keys in a file: a verified key is a user, and who signs nothing makes the broker read no body."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.sqs import sqs_client
from support.tiers import smoke_first

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S: Final = 30


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBroker]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("FIRST secret-1\nSECOND secret-2\n")
    with TestBroker(sqs_access_keys_file=str(keys)) as started:
        yield started


def recorded_users(broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The users for which requests are made from now on."""
    clients = broker._running().clients
    make, users = clients.client, set[str]()

    def recorded(caller: Any, *more: Any) -> Any:
        users.add(caller.session.user)
        return make(caller, *more)

    monkeypatch.setattr(clients, "client", recorded)
    return users


def test_a_verified_access_key_is_the_user_of_its_requests(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = recorded_users(broker, monkeypatch)
    for key, secret in (("FIRST", "secret-1"), ("SECOND", "secret-2")):
        users.clear()
        client = sqs_client(broker.sqs_url, key_id=key, secret=secret)
        queue = client.create_queue(QueueName=f"of-{key}")["QueueUrl"]
        client.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "60"})
        assert users == {key}


@pytest.mark.full
def test_an_access_key_that_is_not_verified_is_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with TestBroker() as broker:
        users = recorded_users(broker, monkeypatch)
        sqs_client(broker.sqs_url, key_id="FIRST").create_queue(QueueName="open")
        assert users == {"ANONYMOUS"}


def authorization(key: str, date: str) -> str:
    scope = f"Credential={key}/{date}/us-east-1/sqs/aws4_request"
    return f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;x-amz-date, Signature={'0' * 64}"


@pytest.mark.parametrize(
    ("key", "age", "code"),
    smoke_first(
        (None, timedelta(), "MissingAuthenticationToken"),
        ("STRANGER", timedelta(hours=1), "RequestExpired"),
        ("FIRST", timedelta(hours=1), "RequestExpired"),
    ),
)
def test_a_body_is_not_read_without_an_access_key_and_a_present_date(
    broker: TestBroker, key: str | None, age: timedelta, code: str
) -> None:
    host, _, port = broker.sqs_url.removeprefix("http://").partition(":")
    sent = (datetime.now(UTC) - age).strftime("%Y%m%dT%H%M%SZ")
    head = f"POST / HTTP/1.1\r\nhost: localhost:{port}\r\ncontent-length: 1000000\r\nx-amz-date: {sent}\r\n"
    head += "content-type: application/x-www-form-urlencoded\r\n"
    if key is not None:
        head += f"authorization: {authorization(key, sent[:8])}\r\n"
    with socket.create_connection((host, int(port)), timeout=scaled(TIMEOUT_S)) as raw:
        raw.sendall(f"{head}\r\n".encode())
        answer = raw.recv(4096)
        assert answer.startswith(b"HTTP/1.1 403 "), answer
        while code.encode() not in answer:
            more = raw.recv(4096)
            assert more, answer
            answer += more
