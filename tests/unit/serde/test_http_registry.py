"""The schema registry's client: cached, bounded, retried, and silent about credentials."""

from __future__ import annotations

import pickle
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from mansio.errors import ConfigError
from mansio.serde import http_registry as registry_module
from mansio.serde.definition import ReferencedSchema, SchemaDefinition, SchemaType
from mansio.serde.errors import SchemaNotFound, SchemaRegistryError
from mansio.serde.http_registry import (
    ATTEMPTS_MAX,
    RegistryCredentials,
    SchemaRegistry,
)
from mansio.state.registry.schema import SchemaReference
from support.schema_registry import RegistryServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_pause_between_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "RETRY_PAUSE_S", 0.001)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


def test_schema_is_fetched_once_and_also_its_absence(server: RegistryServer) -> None:
    schema_id = server.register("s", '"int"')
    client = SchemaRegistry(server.url + "/")
    for _ in range(3):
        assert client.schema_by_id(schema_id).text == '"int"'
        with pytest.raises(SchemaNotFound, match="Schema not found"):
            client.schema_by_id(99)
    assert len(server.requests) == 2


def test_cache_is_bounded(server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "CACHE_ENTRIES_MAX", 2)
    client = SchemaRegistry(server.url)
    ids = [server.register("s", f'{{"type": "fixed", "name": "F", "size": {size}}}') for size in range(1, 5)]
    for schema_id in (*ids, ids[-1], ids[0]):
        client.schema_by_id(schema_id)
    assert len(server.requests) == 5
    for number in range(100, 105):
        with pytest.raises(SchemaNotFound):
            client.schema_by_id(number)
    assert len(client._cache) == len(client._not_found) == 2


def test_references_come_before_what_uses_them(server: RegistryServer) -> None:
    server.register("a", '"A"')
    server.register("b", '"B"', references=[("a", "a", 1)])
    schema_id = server.register("c", '"C"', references=[("b", "b", 1), ("a", "a", 1)])
    found = SchemaRegistry(server.url).schema_by_id(schema_id)
    assert ([one.text for one in found.references], found.text) == (['"A"', '"B"'], '"C"')


def test_a_schema_is_found_by_its_guid_with_the_names_of_its_references(server: RegistryServer) -> None:
    server.register("a", '"A"')
    schema_id = server.register("b", '"B"', references=[("x.A", "a", 1)])
    client = SchemaRegistry(server.url)
    found = client.schema_by_id(schema_id)
    assert found.guid is not None
    assert client.schema_by_guid(found.guid) == replace(found, schema_id=None)
    assert found.references == (ReferencedSchema("x.A", '"A"'),)
    with pytest.raises(SchemaNotFound):
        client.schema_by_guid(UUID(int=0))


def test_a_schema_is_looked_up_in_a_subject_without_registering_it(server: RegistryServer) -> None:
    reference = SchemaReference("a", "a", 1)
    server.register("a", '"A"')
    client = SchemaRegistry(server.url)
    with pytest.raises(SchemaNotFound):
        client.look_up("s", SchemaDefinition(SchemaType.JSON, "{}", (reference,)))
    found = client.register("s", "{}", SchemaType.JSON, (reference,))
    assert client.look_up("s", SchemaDefinition(SchemaType.JSON, "{}", (reference,))) == found
    with pytest.raises(SchemaNotFound):
        client.look_up("s", SchemaDefinition(SchemaType.JSON, "{}"))


def test_cyclic_references_end_with_an_error(server: RegistryServer) -> None:
    schema_id = server.register("a", '"A"', references=[("a", "a", 1)])
    with pytest.raises(SchemaRegistryError, match="refers to more than"):
        SchemaRegistry(server.url).schema_by_id(schema_id)


def test_versions_include_deleted_ones_and_latest_does_not(server: RegistryServer) -> None:
    for size in (1, 2, 3):
        server.register("a/b c", f'{{"type": "fixed", "name": "F", "size": {size}}}')
    server.delete_version("a/b c", 3)
    client = SchemaRegistry(server.url)
    assert client.versions("a/b c") == [1, 2, 3]
    assert client.version("a/b c", 3).schema_id == 3
    assert client.latest_version("a/b c").version == 2
    assert client.register("a/b c", '"long"') == 4


@pytest.mark.parametrize("code", [429, 500, 503])
def test_temporary_error_is_retried(server: RegistryServer, code: int) -> None:
    server.register("s", '"int"')
    server.failures += [code] * (ATTEMPTS_MAX - 1)
    assert SchemaRegistry(server.url).versions("s") == [1]


def test_registry_that_stays_unavailable_is_an_error_after_a_few_attempts(server: RegistryServer) -> None:
    server.failures += [503] * 100
    with pytest.raises(SchemaRegistryError, match="after 4 attempts: 503 injected") as failed:
        SchemaRegistry(server.url).versions("s")
    assert not isinstance(failed.value, SchemaNotFound)
    assert len(server.requests) == ATTEMPTS_MAX


def test_registry_that_is_not_there_is_named(server: RegistryServer) -> None:
    url = server.url
    with RegistryServer() as other:
        gone = other.url
    with pytest.raises(SchemaRegistryError, match=f"{gone} does not answer.*ConnectionRefused"):
        SchemaRegistry(gone).versions("s")
    assert url != gone


def test_redirect_is_not_followed(server: RegistryServer) -> None:
    server.failures.append(302)
    with pytest.raises(SchemaRegistryError, match="refuses"):
        SchemaRegistry(server.url).versions("s")
    assert len(server.requests) == 1


def test_response_above_the_limit_is_not_read(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "RESPONSE_BYTES_MAX", 100)
    schema_id = server.register("s", '"' + "x" * 200 + '"')
    with pytest.raises(SchemaRegistryError, match="more than 100 bytes"):
        SchemaRegistry(server.url).schema_by_id(schema_id)


def test_credentials_are_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANSIO_SCHEMA_REGISTRY_USER", "reader")
    monkeypatch.setenv("MANSIO_SCHEMA_REGISTRY_PASSWORD", "s3cret")
    with RegistryServer("reader:s3cret") as server:
        server.register("s", '"int"')
        client = pickle.loads(pickle.dumps(SchemaRegistry(server.url)))
        assert client.versions("s") == [1]
        shown = [repr(client), repr(RegistryCredentials.from_environment())]
        wrong = SchemaRegistry(server.url, RegistryCredentials("reader", "wr0ng"))
        with pytest.raises(SchemaRegistryError, match="MANSIO_SCHEMA_REGISTRY_PASSWORD") as failed:
            wrong.versions("s")
    shown.append(str(failed.value))
    assert not any(word in text for text in shown for word in ("s3cret", "wr0ng"))


@pytest.mark.parametrize("host", ["registry.example", "10.0.0.1", "127.evil.example", "[2001:db8::1]"])
def test_credentials_are_not_sent_unencrypted_to_another_machine(host: str) -> None:
    secret = RegistryCredentials("reader", "s3cret")
    with pytest.raises(ConfigError, match="use https") as refused:
        SchemaRegistry(f"http://{host}:8081", secret)
    assert "s3cret" not in str(refused.value)
    SchemaRegistry(f"https://{host}:8081", secret)
    SchemaRegistry(f"http://{host}:8081")


@pytest.mark.parametrize("url", ["", "registry:8081", "ftp://h", "http://", "http://h/?a=b"])
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http\(s\)://host:port"):
        SchemaRegistry(url)


def test_address_with_credentials_is_refused_without_showing_them() -> None:
    with pytest.raises(ConfigError, match="must not contain credentials") as refused:
        SchemaRegistry("http://user:s3cret@h:1")
    assert "s3cret" not in str(refused.value)


def test_test_server_answers_as_a_registry_does(server: RegistryServer) -> None:
    server.register("s", '"int"')
    with urllib.request.urlopen(f"{server.url}/subjects/s/versions/1") as response:
        assert response.headers["Content-Type"] == "application/vnd.schemaregistry.v1+json"
