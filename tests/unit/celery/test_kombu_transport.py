"""Options and control commands of the transport, and deliveries that wait."""

from __future__ import annotations

import select
import ssl
from types import SimpleNamespace

import kombu
import pytest
from kombu.transport import get_transport_cls
from kombu.utils.json import dumps

import mansio.celery
from mansio.celery.channel import revoked_task_ids
from mansio.celery.client_thread import ClientOptions, acquire_client
from mansio.celery.inbox import Delivery, Inbox, Source
from mansio.celery.kombu_transport import client_options, transport_options
from mansio.errors import ConfigError, ConnectionLost, InvalidRequest
from mansio.net.security_settings import SecuritySettings


def test_the_transport_is_found_by_its_scheme_and_by_its_path() -> None:
    assert get_transport_cls("mansio") is mansio.celery.Transport
    assert get_transport_cls("mansio.celery:Transport") is mansio.celery.Transport
    assert get_transport_cls("mansio.celery.transport") is mansio.celery.Transport


@pytest.mark.parametrize(
    "options",
    [
        {"visibility_timeout": 0},
        {"visibility_timeout": 10**6},
        {"extend_seconds_max": -1},
        {"topic_config": "x"},
    ],
)
def test_invalid_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        transport_options(options)


def test_options_of_others_are_ignored() -> None:
    found = transport_options({"max_retries": 3, "visibility_timeout": 2})
    assert found.lease_options.lease_ms == 2000


def connection(**values: object) -> SimpleNamespace:
    defaults = {
        "hostname": None,
        "port": None,
        "userid": None,
        "password": None,
        "ssl": False,
        "login_method": None,
        "connect_timeout": 0,
    }
    return SimpleNamespace(**{**defaults, **values})


def test_the_address_is_that_of_the_broker_url() -> None:
    options = transport_options({})
    assert client_options(connection(), options).bootstrap_servers == "127.0.0.1:9092"
    assert client_options(connection(hostname="::1", port=1), options).bootstrap_servers == "[::1]:1"


def test_connections_with_the_same_security_share_a_client() -> None:
    options = transport_options({"mechanism": "PLAIN"})
    values = {"ssl": True, "userid": "me", "password": "secret"}
    assert client_options(connection(**values), options) == client_options(connection(**values), options)
    other = {**values, "password": "other"}
    assert client_options(connection(**values), options) != client_options(connection(**other), options)
    assert "secret" not in repr(client_options(connection(**values), options))


@pytest.mark.parametrize(
    ("url", "transport", "security"),
    [
        ("mansio://h", {}, SecuritySettings()),
        ("mansio://me:p%40ss@h", {}, SecuritySettings(user="me", password="p@ss")),
        ("mansio://me:p@h/?ssl=true", {}, SecuritySettings(True, "me", "p")),
        ("mansio://h/?ssl=/etc/ca.pem", {}, SecuritySettings("/etc/ca.pem")),
        (
            "mansio://me:p@h/?ssl_ca_certs=ca&ssl_certfile=c&ssl_keyfile=k&login_method=PLAIN",
            {},
            SecuritySettings("ca", "me", "p", "PLAIN", "c", "k"),
        ),
        (
            "mansio://me:p@h",
            {"tls": "ca", "mechanism": "SCRAM-SHA-512", "certificate": "c", "key": "k"},
            SecuritySettings("ca", "me", "p", "SCRAM-SHA-512", "c", "k"),
        ),
    ],
)
def test_address_and_options_state_how_to_connect(
    url: str, transport: dict[str, object], security: SecuritySettings
) -> None:
    found = client_options(kombu.Connection(url), transport_options(transport))
    assert found.security == security
    assert found.bootstrap_servers == "h:9092"


def test_a_context_of_the_application_is_used_as_it_is() -> None:
    context = ssl.create_default_context()
    found = client_options(connection(ssl=context), transport_options({}))
    assert found.tls is context
    with pytest.raises(ConfigError):
        client_options(connection(ssl=context), transport_options({"certificate": "c"}))


def test_a_user_without_a_password_is_refused() -> None:
    with pytest.raises(ConfigError):
        client_options(connection(userid="me"), transport_options({}))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (dumps({"method": "revoke", "arguments": {"task_id": "a"}}), ["a"]),
        (dumps({"method": "revoke", "arguments": {"task_id": ["a", "b", 1]}}), ["a", "b"]),
        (dumps({"method": "revoke", "arguments": {"task_id": None}}), []),
        (dumps({"method": "ping", "arguments": {"task_id": "a"}}), []),
        (dumps([1]), []),
        (b"\x80pickle", []),
        ("[" * 100_000, []),
    ],
)
def test_revoked_tasks_are_found_in_control_commands(body: object, expected: list[str]) -> None:
    assert revoked_task_ids({"body": body}) == expected


def test_a_waiting_delivery_makes_the_file_descriptor_readable_and_clear_ends_that() -> None:
    inbox = Inbox()
    try:
        taken: list[int] = []
        source = Source(inbox, "celery", lambda: taken.append(1))
        descriptor = inbox.fileno()
        for _ in range(100_000):
            inbox.wake()  # more than the socket holds
        inbox.clear()
        source.add(Delivery({}, None))
        assert select.select([descriptor], [], [], 0)[0]
        assert source.take() is not None
        assert taken == [1]
        assert source.take() is None
    finally:
        inbox.close()
    inbox.wake()  # after closing: no effect


def test_the_error_that_ended_the_connection_is_raised_each_time() -> None:
    inbox = Inbox()
    inbox.fail(InvalidRequest("first"))
    inbox.fail(InvalidRequest("second"))
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="first"):
            inbox.raise_error()


def test_without_a_broker_a_client_is_not_kept() -> None:
    options = ClientOptions("127.0.0.1:1", connect_timeout_ms=50)
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            acquire_client(options)
