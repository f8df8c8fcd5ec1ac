"""Schemas that are made to cost much: each is refused with a typed error in bounded time, the broker serves others
meanwhile, and the next schema is registered."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.machine import scaled
from support.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = [pytest.mark.full, pytest.mark.row("A7")]

REFUSED = (422, 42201)
ANSWER_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory: Path = tmp_path_factory.mktemp("schemas")
    with served(directory / "data") as running:
        yield running


def register(broker: ServedBroker, subject: str, schema: str, **more: Any) -> tuple[int, Any]:
    answer = httpx.post(
        f"{broker.http_url}/registry/subjects/{subject}/versions",
        json={"schema": schema, **more},
        timeout=scaled(ANSWER_S),
        trust_env=False,
    )
    found = answer.json()
    return answer.status_code, found.get("error_code", found.get("id"))


def nested_avro(depth: int) -> str:
    return '{"type":"array","items":' * depth + '"int"' + "}" * depth


def wide_avro(count: int) -> str:
    return json.dumps([{"type": "fixed", "name": f"F{number}", "size": 1} for number in range(count)])


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "avro nested 50,000 deep": (nested_avro(50_000), {}),
    "avro of more than 1 MB": (
        json.dumps({"type": "record", "name": "A", "doc": "x" * 1_100_000, "fields": []}),
        {},
    ),
    "avro union of 100,000 branches": (wide_avro(100_000)[:1_000_000] + "]", {}),
    "avro that is no schema": ('{"type":"rekord"}', {}),
    "json schema nested 50,000 deep": ('{"not":' * 50_000 + "{}" + "}" * 50_000, {"schemaType": "JSON"}),
    "json schema that refers to itself": ('{"$ref":"#"}', {"schemaType": "JSON"}),
    "json schema that refers to a file": ('{"$ref":"file:///etc/passwd"}', {"schemaType": "JSON"}),
    "json schema with a pattern that is none": ('{"pattern":"("}', {"schemaType": "JSON"}),
    "protobuf that imports a file": ('syntax="proto3"; import "/etc/passwd";', {"schemaType": "PROTOBUF"}),
    "protobuf that imports a parent": ('syntax="proto3"; import "../x.proto";', {"schemaType": "PROTOBUF"}),
    "protobuf nested 5,000 deep": (
        'syntax="proto3"; ' + "message M { " * 5_000 + "}" * 5_000,
        {"schemaType": "PROTOBUF"},
    ),
    "protobuf of a million bytes": ('syntax="proto3"; // ' + "x" * 1_100_000, {"schemaType": "PROTOBUF"}),
    "a reference to what does not exist": (
        '"int"',
        {"references": [{"name": "a", "subject": "none", "version": 1}]},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_while_others_are_served(broker: ServedBroker, name: str) -> None:
    schema, more = HOSTILE[name]
    is_over = threading.Event()
    failed: list[int] = []

    def keep_asking() -> None:
        with httpx.Client(base_url=broker.http_url, timeout=scaled(ANSWER_S), trust_env=False) as client:
            while not is_over.is_set():
                if client.get("/registry/subjects").status_code != 200:
                    failed.append(1)
                is_over.wait(0.05)

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        assert register(broker, "hostile", schema, **more) == REFUSED
    finally:
        is_over.set()
        thread.join()
    assert not failed
    assert register(broker, "valid", '"string"')[0] == 200
