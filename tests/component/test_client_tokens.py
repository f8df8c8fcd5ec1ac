"""The project's clients log in with tokens and API keys, and go on with new tokens before the old ones end."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import pytest

import mansio.blocking
from mansio.errors import AuthenticationFailed, ConfigError, ConnectionLost, ResourceNotFound
from mansio.net.security_settings import SecuritySettings
from mansio.net.token_credentials import ANSWER_BYTES_MAX, ClientCredentials, TokenCredentials
from support.machine import scaled
from support.sasl_broker import SaslBroker, sasl_broker
from support.tokens import Issuer, KeyServer, claims, token_settings
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE: Final = Issuer()
TIMEOUT_S: Final = 30
TOPIC: Final = "greetings"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    directory = tmp_path_factory.mktemp("broker")
    (directory / "keys.json").write_bytes(ONE.jwks())
    settings = token_settings(directory / "keys.json", sasl_oauthbearer_clock_skew_seconds=0)
    with sasl_broker(directory / "data", **settings) as started:
        started.set_user("alice", "secret")
        yield started


def token(valid_s: float = 300, **more: Any) -> str:
    now_s = time.time()
    return ONE.sign(claims(now_s - 1, **{"exp": now_s + valid_s, **more}))


def use(broker: SaslBroker, **settings: Any) -> None:
    """Publish a record, and read it."""
    with mansio.blocking.connect(broker.address, **settings) as client:
        client.publish(TOPIC, b"hello")
        assert next(iter(client.consume(TOPIC, max_records=1))).value == b"hello"


def test_a_client_logs_in_with_a_token_and_with_functions_that_return_one(broker: SaslBroker) -> None:
    async def later() -> str:
        await asyncio.sleep(0)
        return token()

    use(broker, token=token())
    use(broker, token=token)
    use(broker, token=later)
    use(broker, token=lambda: later())


def test_a_refused_token_and_a_failing_function_are_reported_without_the_token(broker: SaslBroker) -> None:
    wrong = token(aud="other")
    for given in (wrong, lambda: wrong, lambda: "no token\n", lambda: 1 / 0):
        with pytest.raises(AuthenticationFailed) as error:
            use(broker, token=given)
        assert wrong not in str(error.value)


@pytest.mark.full
def test_a_connection_goes_on_with_new_tokens_of_the_function(broker: SaslBroker) -> None:
    made: list[str] = []
    valid_s = scaled(4)

    def provider() -> str:
        made.append(token(valid_s))
        return made[-1]

    with mansio.blocking.connect(broker.address, token=provider) as client:
        client.publish(TOPIC, b"first")
        first = len(made)
        expired = broker.failures["expired"]
        wait_until(lambda: len(made) > first, scaled(TIMEOUT_S), "a new token")
        end_s = time.time() + valid_s
        wait_until(lambda: client.publish(TOPIC, b"more") and time.time() > end_s, scaled(TIMEOUT_S))
        assert broker.failures["expired"] == expired


class Endpoint(KeyServer):
    """A token endpoint."""

    def issue(self, **more: Any) -> None:
        self.document = json.dumps({"access_token": token(), "expires_in": 300, **more}).encode()


def test_a_client_takes_tokens_from_an_endpoint_and_keeps_them(broker: SaslBroker) -> None:
    with Endpoint(b"") as endpoint:
        endpoint.issue()
        use(
            broker,
            mechanism="OAUTHBEARER",
            user="client/1",
            password="s:1",
            token_endpoint=endpoint.url,
            token_scope="queue",
        )
        assert [parse_qs(body.decode()) for body in endpoint.bodies] == [
            {"grant_type": ["client_credentials"], "scope": ["queue"]}
        ]


@pytest.mark.parametrize(
    ("status", "document", "error"),
    [
        (401, b"{}", AuthenticationFailed),
        (500, b"{}", ConnectionLost),
        (302, b"", ConnectionLost),
        (200, b"<html>", ConnectionLost),
        (200, b'{"expires_in": 3}', ConnectionLost),
        (200, b'"' + b"x" * ANSWER_BYTES_MAX + b'"', ConnectionLost),
        (200, b'{"access_token": 3}', AuthenticationFailed),
    ],
)
def test_what_an_endpoint_does_not_grant_is_an_error(
    status: int, document: bytes, error: type[Exception]
) -> None:
    with Endpoint(document) as endpoint:
        endpoint.status = status

        async def work() -> str:
            return await TokenCredentials(ClientCredentials(endpoint.url, "id", "secret")).new_token()

        with pytest.raises(error) as raised:
            asyncio.run(work())
        assert "secret" not in str(raised.value)


def test_an_endpoint_is_asked_again_when_most_of_the_time_has_passed() -> None:
    with Endpoint(b"") as endpoint:
        endpoint.issue()

        async def work() -> None:
            provider = ClientCredentials(endpoint.url, "id", "secret")
            first = await provider()
            endpoint.issue()
            assert await provider() == first
            provider._until_s = 0
            await provider()
            endpoint.issue(expires_in=0)
            provider._until_s = 0
            await provider()
            await provider()

        asyncio.run(work())
        assert endpoint.answers == 4


def test_a_program_creates_lists_uses_and_deletes_api_keys(broker: SaslBroker) -> None:
    with mansio.blocking.connect(broker.address, user="alice", password="secret") as client:
        users = client.admin.users
        created = users.create_api_key("alice", description="nightly", valid_for=timedelta(days=1))
        assert created.key not in repr(created)
        assert users.list_api_keys("alice") == [created.api_key]
        assert created.api_key.description == "nightly"
        use(broker, api_key=created.key)
        with mansio.blocking.connect(broker.address, api_key=created.key) as own:
            own.publish(TOPIC, b"x")
            users.delete_api_key(created.api_key.key_id)
            assert users.list_api_keys() == []
            with pytest.raises(AuthenticationFailed):
                wait_until(lambda: own.publish(TOPIC, b"x") is None, scaled(TIMEOUT_S), "the end")
        with pytest.raises(ResourceNotFound):
            users.delete_api_key(created.api_key.key_id)
        with pytest.raises(ResourceNotFound):
            users.create_api_key("nobody")


@pytest.mark.parametrize(
    "settings",
    [
        {"user": "a", "password": "p", "token": "t"},
        {"user": "a", "password": "p", "mechanism": "OAUTHBEARER"},
        {"token": "t", "api_key": "k"},
        {"token": "t", "token_endpoint": "https://issuer.example"},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        SecuritySettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "not a token"},
        {"api_key": "mansio_1"},
        {"user": "a", "password": "p", "mechanism": "OAUTHBEARER", "token_endpoint": "http://issuer.example"},
    ],
    ids=str,
)
def test_credentials_that_cannot_be_sent_or_would_be_read_by_others_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SecuritySettings(**settings).credentials()
    assert "not a token" not in str(error.value)


def test_secrets_are_hidden_in_representations() -> None:
    secret = base64.b64encode(b"secret" * 4).decode()
    settings = [SecuritySettings(token=secret), SecuritySettings(api_key=secret)]
    shown = [*map(repr, settings), repr(TokenCredentials.fixed(secret))]
    shown.append(repr(ClientCredentials("https://issuer.example", "id", secret)))
    assert not [text for text in shown if secret in text]
