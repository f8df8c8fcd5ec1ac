"""`mansio consume --schema-registry` prints decoded keys and values, and what cannot be decoded as it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.serde import BlockingSerde, SchemaDefinition, SchemaType
from support.schema_registry import RegistryServer
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDER = SchemaDefinition(
    SchemaType.AVRO,
    '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, {"name": "raw", "type": "bytes"}]}',
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mansio.Broker(tmp_path_factory.mktemp("data")) as broker:
        yield broker.address


def test_decoded_records_are_printed_and_others_as_they_are(address: str) -> None:
    shell = Shell(address)
    with RegistryServer() as server, BlockingSerde(server.url) as serde:
        value = {"id": 7, "raw": b"\xff"}
        framed = serde.encode("orders", value, schema=ORDER)
        key = serde.encode("orders", value, schema=ORDER, is_key=True)
        in_header = serde.encode_with_headers("orders", value, schema=ORDER)
        with mansio.blocking.connect(address) as client:
            client.publish("orders", framed, key=b"plain")
            client.publish("orders", in_header.data, key=key, headers=in_header.headers)
            client.publish("orders", None, key=b"tombstone")
        options = ("consume", "orders", "--exit-at-end", "--schema-registry", server.url)
        shown = {"id": 7, "raw": "/w=="}
        lines = [json.loads(one) for one in shell(*options, "-o", "json").splitlines()]
        assert [(one["key"], one["value"]) for one in lines] == [
            ("plain", shown),
            (shown, shown),
            ("tombstone", None),
        ]
        assert not any("value_encoding" in one for one in lines)
        assert shell(*options, "--max", "2") == '{"id":7,"raw":"/w=="}\n' * 2

        with mansio.blocking.connect(address) as client:
            client.publish("orders", b"text")
            client.publish("orders", b"\0\0\0\0\x63rest")
        printed: Any = shell(*options, "-o", "json", code=1)
        last = [json.loads(one) for one in printed.splitlines() if one.startswith("{")][-2:]
        assert [one["value"] for one in last] == ["text", "\0\0\0\0crest"]


@pytest.mark.full
def test_members_of_a_share_group_print_decoded_records(address: str) -> None:
    shell = Shell(address)
    with RegistryServer() as server, BlockingSerde(server.url) as serde:
        with mansio.blocking.connect(address) as client:
            client.publish("shared", serde.encode("shared", {"id": 1, "raw": b""}, schema=ORDER))
        shell("group", "alter", "decoders", "share.auto.offset.reset=earliest")
        options = ("consume", "shared", "--share-group", "decoders", "--max", "1")
        assert shell(*options, "--schema-registry", server.url) == '{"id":1,"raw":""}\n'


def test_a_registry_that_is_not_there_ends_the_command(address: str) -> None:
    shell = Shell(address)
    with mansio.blocking.connect(address) as client:
        client.publish("lost", b"\0\0\0\0\1\2")
    with RegistryServer() as server:
        gone = server.url
    shell("consume", "lost", "--exit-at-end", "--schema-registry", gone, code=1)
    shell("consume", "lost", "--schema-registry", "nonsense", code=1)
