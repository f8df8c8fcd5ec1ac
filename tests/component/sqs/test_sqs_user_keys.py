"""Access keys that belong to users: who signs with one is its user, until the key or the user is deleted."""

from __future__ import annotations

import json
import re
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest
from botocore.exceptions import ClientError

from component.sqs.test_sqs_access_keys import recorded_users
from mansio.api.http.broker_stats import RunningBroker
from mansio.api.http.service_stats import ServiceStats
from mansio.errors import ConfigError, PolicyViolation, ResourceNotFound, SecurityDisabled
from mansio.testing.broker import TestBroker
from support.authorization import PEER
from support.machine import scaled
from support.secured_broker import delete_user, set_password
from support.sqs import poll_at_full_speed, sqs_client
from support.sqs_signing import send, send_signed, signed_headers
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import mansio.blocking
    from support.sqs_signing import Answer

TIMEOUT_S: Final = 30
WRONG: Final = "SignatureDoesNotMatch"


def key_file(directory: Path, content: str = "5a" * 32, name: str = "secrets.key") -> str:
    path = directory / name
    path.write_text(f"{content}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBroker]:
    with TestBroker(secrets_key_file=key_file(tmp_path_factory.mktemp("secrets"))) as started:
        yield started


@pytest.fixture(scope="module")
def client(broker: TestBroker) -> mansio.blocking.Client:
    return broker.client()


def new_user(broker: TestBroker, client: mansio.blocking.Client, name: str) -> tuple[str, str]:
    """Create a user with an access key; its id and its secret."""
    set_password(broker, name, "password")
    key = client.admin.users.create_sqs_key(name)
    assert key.secret is not None
    return key.key_id, key.secret


def refused(answer: Answer, code: str) -> bool:
    return answer.status == 403 and code in answer.body


def test_the_user_of_an_access_key_is_the_user_of_its_requests(
    broker: TestBroker, client: mansio.blocking.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = new_user(broker, client, "alice")
    users = recorded_users(broker, monkeypatch)
    sqs = sqs_client(broker.sqs_url, key_id=key, secret=secret)
    queue = sqs.create_queue(QueueName="of-alice")["QueueUrl"]
    sqs.send_message(QueueUrl=queue, MessageBody="hello")
    assert sqs.receive_message(QueueUrl=queue)["Messages"][0]["Body"] == "hello"
    assert users == {"alice"}
    (listed,) = client.admin.users.list_sqs_keys("alice")
    assert (listed.key_id, listed.user, listed.secret) == (key, "alice", None)


def test_a_deleted_key_a_deleted_user_and_a_new_user_of_the_same_name_are_refused(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    first = new_user(broker, client, "bob")
    created = client.admin.users.create_sqs_key("bob")
    second = created.key_id, str(created.secret)
    assert send_signed(broker.sqs_url, *first).status == 200
    client.admin.users.delete_sqs_key(first[0])
    assert refused(send_signed(broker.sqs_url, *first), WRONG)
    assert send_signed(broker.sqs_url, *second).status == 200
    delete_user(broker, "bob")
    assert refused(send_signed(broker.sqs_url, *second), WRONG)
    set_password(broker, "bob", "again")
    assert refused(send_signed(broker.sqs_url, *second), WRONG)
    assert not client.admin.users.list_sqs_keys("bob")
    with pytest.raises(ResourceNotFound):
        client.admin.users.delete_sqs_key(second[0])


def test_a_receive_that_waits_ends_with_its_access_key(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    key, secret = new_user(broker, client, "carol")
    sqs = sqs_client(broker.sqs_url, key_id=key, secret=secret)
    queue = sqs.create_queue(QueueName="of-carol")["QueueUrl"]
    watched = broker._running().service.log_ins._watched
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(sqs.receive_message, QueueUrl=queue, WaitTimeSeconds=20)
        wait_until(lambda: "carol" in watched, scaled(TIMEOUT_S), "the receive")
        client.admin.users.delete_sqs_key(key)
        with pytest.raises(ClientError, match=WRONG):
            waiting.result(scaled(TIMEOUT_S))
        assert time.monotonic() - began < 19
    assert "carol" not in watched


def test_a_key_that_is_deleted_while_the_body_arrives_begins_no_request(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    key, secret = new_user(broker, client, "heidi")
    host, _, port = broker.sqs_url.removeprefix("http://").partition(":")
    headers = signed_headers(broker.sqs_url, key, secret)
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    with socket.create_connection((host, int(port)), timeout=scaled(TIMEOUT_S)) as raw:
        raw.sendall(f"POST / HTTP/1.1\r\n{head}content-length: 2\r\n\r\n{{".encode())
        send_signed(broker.sqs_url, key, secret)  # the broker has read the head meanwhile
        client.admin.users.delete_sqs_key(key)
        raw.sendall(b"}")
        assert raw.recv(100).startswith(b"HTTP/1.1 403 ")


@pytest.fixture(scope="module")
def dave(broker: TestBroker, client: mansio.blocking.Client) -> tuple[str, str]:
    return new_user(broker, client, "dave")


def test_a_repeated_request_is_answered_within_the_window(broker: TestBroker, dave: tuple[str, str]) -> None:
    headers = signed_headers(broker.sqs_url, *dave)
    assert [send(broker.sqs_url, headers).status for _ in range(2)] == [200, 200]


def test_what_was_changed_on_its_way_is_refused(broker: TestBroker, dave: tuple[str, str]) -> None:
    url = broker.sqs_url
    headers = signed_headers(url, *dave)
    assert refused(send(url, headers, b'{"QueueNamePrefix":"a"}'), WRONG)
    assert refused(send(url, [*headers, ("x-amz-target", "AmazonSQS.PurgeQueue")]), WRONG)
    assert refused(send(url, [*headers, ("X-Amz-Security-Token", "t")]), WRONG)
    foreign = [(name, "evil.example" if name == "host" else value) for name, value in headers]
    assert send(url, foreign).status == 421
    other = [(name, "127.0.0.2:1" if name == "host" else value) for name, value in headers]
    assert send(url, other).status == 403
    old = signed_headers(url, *dave, age=timedelta(hours=1))
    assert refused(send(url, old), "RequestExpired")
    presigned = [("host", headers[0][1]), ("content-type", "application/x-www-form-urlencoded")]
    answer = send(f"{url}/?X-Amz-Signature=0&X-Amz-Credential=a", presigned)
    assert refused(answer, "MissingAuthenticationToken")
    assert send(url, signed_headers(url, *dave)).status == 200


def test_an_unknown_access_key_gets_the_answer_of_a_wrong_signature(
    broker: TestBroker, dave: tuple[str, str]
) -> None:
    unknown = send_signed(broker.sqs_url, "MQAKUNKNOWN", "secret")
    wrong = send_signed(broker.sqs_url, dave[0], "secret")
    assert unknown == wrong
    assert refused(unknown, WRONG)


def test_whether_a_key_exists_is_not_shown_before_the_body_has_arrived(
    broker: TestBroker, dave: tuple[str, str]
) -> None:
    host, _, port = broker.sqs_url.removeprefix("http://").partition(":")
    for key in (dave[0], "MQAKUNKNOWN"):
        headers = signed_headers(broker.sqs_url, key, "wrong")
        head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        with socket.create_connection((host, int(port)), timeout=scaled(TIMEOUT_S)) as raw:
            raw.sendall(f"POST / HTTP/1.1\r\n{head}content-length: 2\r\n\r\n{{".encode())
            send_signed(broker.sqs_url, *dave)  # the broker has had time to answer
            raw.setblocking(False)
            with pytest.raises(BlockingIOError):
                raw.recv(1)
            raw.settimeout(scaled(TIMEOUT_S))
            raw.sendall(b"}")
            assert raw.recv(100).startswith(b"HTTP/1.1 403 ")


@pytest.mark.full
def test_an_unknown_key_and_a_wrong_signature_take_the_same_time(
    broker: TestBroker, dave: tuple[str, str]
) -> None:
    times: dict[str, list[float]] = {dave[0]: [], "MQAKUNKNOWN": []}
    for _ in range(300):
        for key, found in times.items():
            headers = signed_headers(broker.sqs_url, key, "wrong")
            began = time.perf_counter()
            send(broker.sqs_url, headers)
            found.append(time.perf_counter() - began)
    first, second = (statistics.quantiles(found, n=4) for found in times.values())
    assert first[0] < second[2], "the middle halves overlap"
    assert second[0] < first[2]


def test_a_user_has_a_bounded_number_of_keys_and_no_one_else_than_a_user_has_any(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    with pytest.raises(ResourceNotFound, match="no user"):
        client.admin.users.create_sqs_key("nobody")
    set_password(broker, "erin", "password")
    for _ in range(10):
        client.admin.users.create_sqs_key("erin")
    with pytest.raises(PolicyViolation, match="at most 10"):
        client.admin.users.create_sqs_key("erin")
    delete_user(broker, "erin")


def warnings_of(broker: TestBroker) -> list[str]:
    """Reasons of the warnings that the health checks and `mansio doctor` show."""
    running = broker._running()
    view = ServiceStats(running.settings)
    view.attach(
        RunningBroker(
            running.service, running.server, running.clients, running.listener_address, lambda: True
        )
    )
    return [each.reason for each in running.service.health.report(caller=PEER).warnings]


def test_a_broker_without_the_secrets_key_neither_creates_keys_nor_checks_them(tmp_path: Path) -> None:
    with TestBroker(secrets_key_file=key_file(tmp_path)) as broker:
        client = broker.client()
        key, secret = new_user(broker, client, "alice")
        assert "secrets_key_missing" not in warnings_of(broker)
        key_file(tmp_path, "6b" * 32)
        broker.restart()
        answer = send_signed(broker.sqs_url, key, secret)
        assert answer.status == 503
        assert "secrets_key_file" in answer.body
        assert "secrets_key_missing" in warnings_of(broker)
        key_file(tmp_path, "6b" * 32 + "\n" + "5a" * 32)
        broker.restart()
        assert send_signed(broker.sqs_url, key, secret).status == 200
        assert "secrets_key_missing" not in warnings_of(broker)
        client.admin.users.create_sqs_key("alice")
        assert len({each.secrets_key_id for each in client.admin.users.list_sqs_keys()}) == 2
    with TestBroker() as broker:
        set_password(broker, "alice", "password")
        with pytest.raises(SecurityDisabled, match="secrets_key_file"):
            broker.client().admin.users.create_sqs_key("alice")


def test_no_log_line_contains_a_secret(
    broker: TestBroker, client: mansio.blocking.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "mansio")
    key, secret = new_user(broker, client, "frank")
    send_signed(broker.sqs_url, key, secret)
    send_signed(broker.sqs_url, key, "wrong")
    client.admin.users.delete_sqs_key(key)
    texts = [str(vars(record)) for record in caplog.records]
    assert any(key in text for text in texts)
    assert not any(secret in text for text in texts)
    assert not re.search(re.escape(secret), repr(client.admin.users.list_sqs_keys()))


@pytest.mark.full
def test_the_command_line_creates_lists_and_deletes_keys(broker: TestBroker) -> None:
    shell = Shell(broker.bootstrap_servers)
    set_password(broker, "grace", "password")
    (created,) = json.loads(shell("user", "sqs-key", "create", "grace", "--output", "json"))
    key = created["access_key_id"], created["secret_access_key"]
    assert send_signed(broker.sqs_url, *key).status == 200
    (listed,) = json.loads(shell("user", "sqs-key", "list", "grace", "--output", "json"))
    assert (listed["user"], listed["access_key_id"]) == ("grace", key[0])
    assert key[1] not in shell("user", "sqs-key", "list")
    shell("user", "sqs-key", "delete", key[0])
    assert refused(send_signed(broker.sqs_url, *key), WRONG)
    shell("user", "sqs-key", "delete", key[0], code=1)


def test_four_pollers_at_full_speed_get_no_refusal(broker: TestBroker, dave: tuple[str, str]) -> None:
    poll_at_full_speed(broker.sqs_url, dave, 0.5)


@pytest.mark.full
def test_four_pollers_at_full_speed_get_no_refusal_for_longer(
    broker: TestBroker, dave: tuple[str, str]
) -> None:
    poll_at_full_speed(broker.sqs_url, dave, 3.0)


@pytest.mark.parametrize(("mode", "content"), [(0o640, "5a" * 32), (0o600, "5a" * 31), (0o600, None)])
def test_a_broker_does_not_start_with_a_key_file_that_others_read_or_that_has_no_key(
    tmp_path: Path, mode: int, content: str | None
) -> None:
    path = tmp_path / "secrets.key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with (
        pytest.raises(ConfigError, match=r"^secrets_key_file: ") as refused,
        TestBroker(secrets_key_file=str(path)),
    ):
        pass
    assert "5a5a" not in str(refused.value)
