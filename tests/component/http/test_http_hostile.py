"""HTTP API and hostile requests: a typed error for each, bounded memory, and no page of another site gets through."""

from __future__ import annotations

import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zstandard

from mansio.api import request_budget
from mansio.api.asgi import bodies
from mansio.api.http.v1 import operation
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(http_host_names="Queue.example, other.example") as started:
        with started.client() as client:
            client.admin.create_topic("t", partitions=1)
        yield started


@pytest.fixture(scope="module")
def http(broker: TestBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(20)) as client:
        yield client


def refused(response: httpx.Response, *statuses: int) -> Any:
    assert response.status_code in statuses, (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/problem+json"
    return response.json()


BATCH = "/topics/t/records/batch"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b'{"records": []}', "/records"),
        (b'{"records": [{"value": 1}]}', "/records/0/value"),
        (b'{"records": [{}, {"base64": "%"}]}', "/records/1/base64"),
        (b'{"records": [{"key_base64": "a"}]}', "/records/0/key_base64"),
        (b'{"records": [{"value": "a", "json": 1}]}', "/records/0/json"),
        (b'{"records": [{"valeu": "a"}]}', "/records/0/valeu"),
        (b'{"records": [{"headers": {"a": 1}}]}', "/records/0/headers/a/str"),
        (b'{"records": [{"partition": -1}]}', "/records/0/partition"),
        (b'{"records": [{"timestamp_ms": 1e300}]}', "/records/0/timestamp_ms"),
        (b'{"records": [{"deliver_at": "tomorrow"}]}', "/records/0/deliver_at"),
        (b'{"records": [{"priority": "urgent"}]}', "/records/0/priority"),
        (b'{"records": [{"json": NaN}]}', "/records/0/json"),
        (b'{"records": [{"value": "\\ud800"}]}', ""),
        (b'{"records": [{"value": "\xff"}]}', ""),
        (b'{"records": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        (json.dumps({"records": [{}] * 10_001}).encode(), "/records"),
    ],
)
def test_wrong_json_is_refused_by_field(http: httpx.Client, body: bytes, pointer: str) -> None:
    problem = refused(http.post(BATCH, content=body, headers=JSON), 400)
    assert problem["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/topics/t/partitions/x/records", 400),
        ("GET", "/topics/t/partitions/0/records?offset=-1", 400),
        ("GET", "/topics/t/partitions/0/records?offset=1&offset=2", 400),
        ("GET", "/topics/t/partitions/0/records?limit=0", 400),
        ("GET", "/topics/t/partitions/0/records?unknown=1", 400),
        ("GET", "/topics/t/partitions/0/records?time=2026-01-01", 400),
        ("GET", "/topics/t/partitions/0/records?time=2026-01-01T00:00:00Z&offset=0", 400),
        ("GET", "/topics/t/partitions/0/records?time=9999-12-31T23:59:59-23:00", 400),
        ("GET", "/topics/t/partitions/0/records?time=0001-01-01T00:00:00%2B23:00", 400),
        ("GET", "/topics/t/offsets?at=never", 400),
        ("GET", "/topics/missing", 404),
        ("GET", "/topics/" + "x" * 300, 400),
        ("GET", "/topics/%00", 400),
        ("GET", "/topics?cursor=%25", 400),
        ("GET", "/topics/t/delayed?cursor=x", 400),
        ("GET", "/groups/missing", 404),
        ("GET", "/groups/g/leases", 400),
        ("GET", "/topics/t/schedules/missing", 404),
        ("DELETE", "/topics/missing", 404),
        ("DELETE", "/groups/missing", 404),
    ],
)
def test_wrong_parameters_are_refused(http: httpx.Client, method: str, path: str, status: int) -> None:
    refused(http.request(method, path), status)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/topics", {"name": "a/b"}),
        ("/topics", {"name": "x", "partitions": 0}),
        ("/topics", {"name": "x", "config": {"no.such.setting": "1"}}),
        ("/groups/g/receive", {"topics": []}),
        ("/groups/g/receive", {"topics": ["t"], "max_records": 0}),
        ("/groups/g/receive", {"topics": ["t"], "wait_ms": 60_000}),
        ("/groups/g/receive", {"topics": ["t"], "lease_ms": 43_200_001}),
        ("/groups/g/ack", {"receipts": ["A" * 64]}),
        ("/groups/g/ack", {"receipts": ["x"]}),
        ("/groups/g/ack", {"receipts": []}),
        ("/groups/g/retry", {"receipts": ["A" * 64], "delay_ms": -1}),
        ("/groups/g/offsets/reset", {"topics": ["t"]}),
        ("/groups/g/dead-letters/redrive", {"topic": "t", "offsets": [[2, 1]], "partition": 0}),
        ("/groups/g/dead-letters/redrive", {"topic": "t", "offsets": [[1, 2]]}),
        ("/topics/t/delayed/cancel", {"ids": ["1"]}),
        ("/topics/t/delayed/cancel", {"ids": ["9999999999:1"]}),
        ("/topics/t/delayed/reschedule", {"ids": ["0:1"]}),
    ],
)
def test_wrong_bodies_are_refused(http: httpx.Client, path: str, body: Any) -> None:
    refused(http.post(path, json=body), 400, 404, 409)


def test_compressed_bodies_are_accepted_and_bombs_are_not(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"records": [{"value": "x" * 1000}] * 3}).encode()
    for encoding, packed in (("gzip", gzip.compress(body)), ("zstd", zstandard.compress(body))):
        headers = {**JSON, "content-encoding": encoding}
        assert http.post(BATCH, content=packed, headers=headers).json()["failed"] == 0
        refused(http.post(BATCH, content=packed[:-5], headers=headers), 400)
        refused(http.post(BATCH, content=b"plain", headers=headers), 400)
    refused(http.post(BATCH, content=body, headers={**JSON, "content-encoding": "br"}), 415)
    refused(http.post(BATCH, content=body, headers={"content-type": "application/xml"}), 415)
    monkeypatch.setattr(bodies, "DECODED_BYTES_MAX", 100_000)
    bomb = bytes(1_000_000)
    streamed = zstandard.ZstdCompressor().compressobj()  # does not state its size
    for encoding, packed in (
        ("gzip", gzip.compress(bomb)),
        ("zstd", zstandard.compress(bomb)),
        ("zstd", streamed.compress(bomb) + streamed.flush()),
    ):
        refused(http.post(BATCH, content=packed, headers={**JSON, "content-encoding": encoding}), 413)


def test_bodies_are_bounded_one_by_one_and_together(
    http: httpx.Client, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_BYTES_MAX", 100_000)
    refused(http.post("/topics/t/records", content=bytes(200_000), headers=JSON), 413)
    monkeypatch.setattr(request_budget, "BUDGET_BYTES", 50_000)
    for _ in range(2):  # what was taken is given back
        refused(http.post("/topics/t/records", content=bytes(60_000), headers=JSON), 429)
        assert http.post("/topics/t/records", content=bytes(40_000), headers=JSON).status_code == 200


def test_event_streams_are_bounded_and_end_with_their_connection(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "STREAMS_MAX", 1)
    with http.stream("GET", "/topics/t/events") as stream:
        assert stream.status_code == 200
        refused(http.get("/topics/t/events"), 429)

    def is_free() -> bool:
        with http.stream("GET", "/topics/t/events") as stream:
            return stream.status_code == 200

    wait_until(is_free)


def test_large_headers_end_the_connection(broker: TestBroker) -> None:
    host, _, port = broker.http_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as connection:
        try:
            connection.sendall(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nX: ")
            for _ in range(40):
                connection.sendall(b"x" * 65_536)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 421),
        ({"Host": "localhost.attacker.example"}, 421),
        ({"Host": "127.0.0.1.attacker.example"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "localhost:9080"}, 200),
        ({"Host": "[::1]:9080"}, 200),
        ({"Host": "queue.example"}, 200),
        ({"Host": "OTHER.example:80"}, 200),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    for response in (
        http.get("/topics", headers=headers),
        http.post("/topics/t/records", content=b"{}", headers={**JSON, **headers}),
    ):
        assert response.status_code == status, response.text


def test_pages_of_this_site_are_accepted(http: httpx.Client, broker: TestBroker) -> None:
    assert http.get("/topics", headers={"Origin": broker.http_url}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded; charset=utf-8", "multipart/form-data"]
)
def test_bodies_that_a_form_can_send_need_a_header(http: httpx.Client, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    refused(http.post("/topics/t/records", content=b"x", headers=headers), 403)
    marked = {**headers, "X-Mansio-Request": "1"}
    assert http.post("/topics/t/records", content=b"x", headers=marked).status_code == 200
