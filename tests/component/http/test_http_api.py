"""HTTP API: everything that a program without a Kafka client does, over real sockets."""

from __future__ import annotations

import base64
import json
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def http(broker: TestBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(DEADLINE_S)) as client:
        yield client


def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json() if response.content else None


def topic_of(http: httpx.Client, name: str, **config: str) -> str:
    ok(
        http.post(
            "/topics",
            json={
                "name": name,
                "partitions": 1,
                "config": {key.replace("_", "."): value for key, value in config.items()},
            },
        ),
        201,
    )
    return name


def group_of(http: httpx.Client, name: str, **config: str) -> str:
    settings = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
    ok(http.patch(f"/groups/{name}/config", json={"config": settings | config}))
    return name


def receive(http: httpx.Client, group: str, topic: str, **more: Any) -> list[Any]:
    body = {"topics": [topic], "wait_ms": 10_000, **more}
    return list(ok(http.post(f"/groups/{group}/receive", json=body))["records"])


def refused(response: httpx.Response, status: int, title: str = "") -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert body["detail"]
    if title:
        assert body["title"] == title
    return body


@pytest.mark.row("A3")
def test_a_topic_is_created_described_altered_and_deleted(http: httpx.Client) -> None:
    name = topic_of(http, "life", retention_ms="60000")
    described = ok(http.get(f"/topics/{name}"))
    assert described["config"] == {"retention.ms": "60000"}
    assert [each["end_offset"] for each in described["partitions"]] == [0]
    changed = ok(http.patch(f"/topics/{name}", json={"partitions": 3, "config": {"retention.ms": None}}))
    assert len(changed["partitions"]) == 3
    assert changed["config"] == {}
    names = [each["name"] for each in ok(http.get("/topics"))["topics"]]
    assert name in names
    first = ok(http.get("/topics", params={"limit": 1}))
    if len(names) > 1:
        second = ok(http.get("/topics", params={"limit": 1, "cursor": first["next_cursor"]}))
        assert second["topics"][0]["name"] > first["topics"][0]["name"]
    refused(http.post("/topics", json={"name": name}), 409, "TopicAlreadyExists")
    ok(http.delete(f"/topics/{name}"), 204)
    refused(http.get(f"/topics/{name}"), 404, "UnknownTopicOrPartition")


@pytest.mark.row("A3", "L2")
def test_one_record_as_raw_body_keeps_its_bytes_and_headers(http: httpx.Client, broker: TestBroker) -> None:
    name = topic_of(http, "raw")
    value = bytes(range(256))
    headers = {
        "content-type": "image/png",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "ce-id": "7",
        "Mansio-Header-Color": "red",
    }
    stored = ok(http.post(f"/topics/{name}/records", params={"key": "ann"}, content=value, headers=headers))
    assert (stored["partition"], stored["offset"]) == (0, 0)
    (message,) = broker.client().consume(name, to_end=True)
    assert (message.key, message.value) == (b"ann", value)
    assert dict(message.headers) == {
        "content-type": b"image/png",
        "traceparent": headers["traceparent"].encode(),
        "ce-id": b"7",
        "color": b"red",
    }
    (read,) = ok(http.get(f"/topics/{name}/partitions/0/records"))["records"]
    assert base64.b64decode(read["base64"]) == value


@pytest.mark.row("A3")
def test_records_in_one_request_have_a_result_each(http: httpx.Client) -> None:
    name = topic_of(http, "batch")
    records = [
        {"value": "text", "key": "k", "headers": {"a": "b", "c": {"base64": "AP8="}, "n": None}},
        {"json": {"amount": 2.5, "items": [1, None, "ü"]}, "key_base64": "AP8="},
        {"base64": "AAEC", "timestamp_ms": 1000},
        {},
        {"value": "x", "partition": 7},
    ]
    result = ok(http.post(f"/topics/{name}/records/batch", json={"records": records}))
    assert result["failed"] == 1
    assert [each["offset"] for each in result["records"][:4]] == [0, 1, 2, 3]
    assert result["records"][4]["error"]["title"] == "UnknownTopicOrPartition"
    found = ok(http.get(f"/topics/{name}/partitions/0/records", params={"values": "json"}))
    first, second, third, fourth = found["records"]
    assert found["next_offset"] == 4
    assert first["headers"] == {"a": "b", "c": {"base64": "AP8="}, "n": None}
    assert base64.b64decode(first["base64"]) == b"text"  # it is no JSON
    assert second["json"] == {"amount": 2.5, "items": [1, None, "ü"]}
    assert second["key_base64"] == "AP8="
    assert (third["timestamp_ms"], third["base64"]) == (1000, "AAEC")
    assert (fourth["value"], fourth["key"]) == (None, None)


def test_numbers_that_json_cannot_express_are_returned_as_bytes(http: httpx.Client) -> None:
    name = topic_of(http, "infinite")
    for value in (b"1e999", b"[NaN]", b"1e3"):
        ok(http.post(f"/topics/{name}/records", content=value, headers={"content-type": "application/json"}))
    found = http.get(f"/topics/{name}/partitions/0/records", params={"values": "json"})
    records = json.loads(found.text, parse_constant=pytest.fail)["records"]
    assert [each.get("json") for each in records] == [None, None, 1000.0]
    assert base64.b64decode(records[0]["base64"]) == b"1e999"


def test_a_receive_of_a_missing_topic_creates_no_group(http: httpx.Client) -> None:
    refused(http.post("/groups/junk/receive", json={"topics": ["missing"]}), 404, "UnknownTopicOrPartition")
    refused(http.get("/groups/junk"), 404, "GroupIdNotFound")


@pytest.mark.row("A3", "T3")
def test_records_are_read_from_an_offset_or_a_time(http: httpx.Client) -> None:
    name = topic_of(http, "read")
    start = datetime(2026, 1, 31, tzinfo=UTC)
    records = [
        {"value": str(number), "timestamp_ms": int((start + timedelta(hours=number)).timestamp() * 1000)}
        for number in range(10)
    ]
    ok(http.post(f"/topics/{name}/records/batch", json={"records": records}))

    def values(**params: Any) -> list[str]:
        found = ok(http.get(f"/topics/{name}/partitions/0/records", params=params))
        return [each["value"] for each in found["records"]]

    assert values(offset=7) == ["7", "8", "9"]
    assert values(offset=2, limit=3) == ["2", "3", "4"]
    assert values(time="2026-01-31T07:30:00Z") == ["8", "9"]
    assert values(time="2026-01-31T08:30:00+01:00") == ["8", "9"]
    assert values(**{"from": "latest"}) == []
    assert values(max_bytes=2) == ["0", "1"]
    assert values(offset=10, wait_ms=10) == []
    at = ok(http.get(f"/topics/{name}/offsets", params={"at": "2026-01-31T03:00:00Z"}))
    assert at["partitions"][0]["offset"] == 3
    assert ok(http.get(f"/topics/{name}/offsets"))["partitions"][0]["offset"] == 10
    refused(http.get(f"/topics/{name}/partitions/0/records", params={"offset": 11}), 416, "OffsetOutOfRange")
    refused(http.get(f"/topics/{name}/partitions/1/records"), 404)

    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(values(offset=10, wait_ms=20_000)))
    thread.start()
    ok(http.post(f"/topics/{name}/records", json={"late": True}))
    thread.join(scaled(DEADLINE_S))
    assert waiting == [['{"late":true}']]


@pytest.mark.row("A3", "D1", "D2")
def test_records_are_received_acknowledged_retried_rejected_and_extended(http: httpx.Client) -> None:
    topic, group = topic_of(http, "leases"), group_of(http, "leases")
    records = [{"value": name, "key": name} for name in ("done", "again", "bad", "long")]
    ok(http.post(f"/topics/{topic}/records/batch", json={"records": records}))
    found = {each["value"]: each for each in receive(http, group, topic, max_records=10, lease_ms=60_000)}
    assert set(found) == {"done", "again", "bad", "long"}
    assert {each["delivery_count"] for each in found.values()} == {1}

    def send(name: str, value: str, **more: Any) -> httpx.Response:
        return http.post(f"/groups/{group}/{name}", json={"receipts": [found[value]["receipt"]], **more})

    assert ok(send("ack", "done")) == {"acknowledged": 1, "errors": []}
    refused(send("ack", "done"), 409, "InvalidRecordState")
    ok(send("retry", "again", delay_ms=0))
    ok(send("reject", "bad", reason="no amount"))
    ok(send("extend", "long", lease_ms=3_600_000))
    (again,) = receive(http, group, topic, max_records=10)
    assert (again["value"], again["delivery_count"]) == ("again", 2)
    leases = ok(http.get(f"/groups/{group}/leases", params={"topic": topic, "ranges": 10}))
    state = leases["partitions"][0]["state"]
    assert state["leased"] == 2
    assert max(each["lease_ms"] for each in state["ranges"]) == 3_600_000
    receipts = [found["long"]["receipt"], "no receipt", again["receipt"]]
    result = ok(http.post(f"/groups/{group}/ack", json={"receipts": receipts}))
    assert result["acknowledged"] == 2
    assert [(each["position"], each["title"]) for each in result["errors"]] == [(1, "InvalidReceipt")]

    wait_until(
        lambda: (
            ok(http.get(f"/groups/{group}/leases", params={"topic": topic}))["partitions"][0]["state"]["dead"]
            == 1
        )
    )
    redrive = {"topic": topic, "redrive_id": "r1"}
    assert ok(http.post(f"/groups/{group}/dead-letters/redrive", json=redrive))["redriven"] == 1
    assert ok(http.post(f"/groups/{group}/dead-letters/redrive", json=redrive))["redriven"] == 0
    (bad,) = receive(http, group, topic)
    assert bad["value"] == "bad"
    assert ok(http.post(f"/groups/{group}/ack", json={"receipts": [bad["receipt"]]}))["acknowledged"] == 1


@pytest.mark.row("A3", "G4")
def test_a_share_group_of_http_is_listed_reset_and_deleted(http: httpx.Client) -> None:
    topic, group = topic_of(http, "registered"), group_of(http, "registered")
    records = {"records": [{"value": str(number)} for number in range(3)]}
    ok(http.post(f"/topics/{topic}/records/batch", json=records))
    found = receive(http, group, topic, max_records=10)
    ok(http.post(f"/groups/{group}/ack", json={"receipts": [each["receipt"] for each in found]}))
    assert ok(http.get(f"/groups/{group}"))["type"] == "share"
    wait_until(lambda: ok(http.get(f"/groups/{group}/offsets"))["offsets"][0]["lag"] == 0)
    reset = ok(http.post(f"/groups/{group}/offsets/reset", json={"topics": [topic], "offset": 1}))
    assert reset["offsets"] == [{"topic": topic, "partition": 0, "offset": 1, "lag": None}]
    assert [each["value"] for each in receive(http, group, topic, max_records=10)] == ["1", "2"]
    ok(http.delete(f"/groups/{group}"), 204)
    refused(http.get(f"/groups/{group}"), 404, "GroupIdNotFound")


def test_a_connection_that_ends_while_it_waits_leases_nothing(http: httpx.Client, broker: TestBroker) -> None:
    topic, group = topic_of(http, "gone"), group_of(http, "gone")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{broker.http_url}/v1/groups/{group}/receive",
            json={"topics": [topic], "wait_ms": 30_000},
            timeout=0.3,
        )
    ok(http.post(f"/topics/{topic}/records", json={}))
    (record,) = receive(http, group, topic)
    assert record["delivery_count"] == 1


@pytest.mark.row("A3", "D6")
def test_delayed_records_are_listed_rescheduled_cancelled_and_delivered(
    http: httpx.Client, broker: TestBroker
) -> None:
    topic, group = topic_of(http, "delayed", mansio_delay_enable="true"), group_of(http, "delayed")
    url = f"/topics/{topic}/records"
    for value, headers in (
        ("a", {"Mansio-Delay": "2h"}),
        ("b", {"Mansio-Delay": "90m"}),
        ("c", {"Mansio-Deliver-At": "2126-01-01T00:00:00Z"}),
    ):
        response = http.post(url, content=value, headers={"content-type": "text/x", **headers})
        if value == "c":
            refused(response, 400)  # more than a year away
        else:
            ok(response)
    listed = ok(http.get(f"/topics/{topic}/delayed"))["records"]
    assert [each["value"] for each in listed] == ["b", "a"]
    one, other = (each["id"] for each in listed)
    page = ok(http.get(f"/topics/{topic}/delayed", params={"limit": 1}))
    rest = ok(http.get(f"/topics/{topic}/delayed", params={"cursor": page["next_cursor"]}))
    assert [each["value"] for each in rest["records"]] == ["a"]
    changed = ok(
        http.post(f"/topics/{topic}/delayed/reschedule", json={"ids": [one], "delay_ms": 10_800_000})
    )
    assert changed["changed"]
    moved = ok(http.get(f"/topics/{topic}/delayed"))["records"]
    assert [each["value"] for each in moved] == ["a", "b"]
    assert ok(http.post(f"/topics/{topic}/delayed/cancel", json={"ids": [other]}))["changed"] == [other]
    ids = [each["id"] for each in ok(http.get(f"/topics/{topic}/delayed"))["records"]]
    ok(http.post(f"/topics/{topic}/delayed/deliver-now", json={"ids": ids}))
    (record,) = receive(http, group, topic)
    assert record["value"] == "b"
    ok(http.post(f"/groups/{group}/ack", json={"receipts": [record["receipt"]]}))
    ok(http.post(url, content=b"late", headers={"Mansio-Delay": "1h", "content-type": "text/x"}))
    broker.clock.advance(hours=1, seconds=1)
    (record,) = receive(http, group, topic)
    assert record["value"] == "late"
    plain = topic_of(http, "undelayed")
    body = refused(
        http.post(f"/topics/{plain}/records", json={}, headers={"Mansio-Delay": "1h"}),
        400,
        "DelaysNotEnabled",
    )
    assert f"mansio topic alter {plain}" in body["detail"]


@pytest.mark.row("A3", "D6")
def test_schedules_are_created_paused_resumed_and_deleted(http: httpx.Client) -> None:
    topic = topic_of(http, "scheduled", mansio_delay_enable="true")
    url = f"/topics/{topic}/schedules/nightly"
    created = ok(http.put(url, json={"cron": "0 3 * * *", "timezone": "Europe/Vienna", "json": {"a": 1}}))
    assert (created["cron"], created["is_paused"], len(created["next_times"])) == ("0 3 * * *", False, 5)
    ok(http.post(f"{url}/pause", headers=FORM), 204)
    assert ok(http.get(url))["is_paused"] is True
    ok(http.post(f"{url}/resume", headers=FORM), 204)
    assert [each["name"] for each in ok(http.get(f"/topics/{topic}/schedules"))["schedules"]] == ["nightly"]
    refused(http.put(f"/topics/{topic}/schedules/x", json={"cron": "61 * * * *", "value": ""}), 400)
    refused(http.put(f"/topics/{topic}/schedules/x", json={"value": ""}), 400)
    ok(http.delete(url), 204)
    refused(http.get(url), 404, "ScheduleNotFound")


FORM = {"X-Mansio-Request": "1"}


@pytest.mark.row("A3", "D7", "P3")
def test_priorities_and_deduplication(http: httpx.Client) -> None:
    topic = topic_of(http, "urgent", mansio_priority_enable="true", mansio_dedup_ms="60000")
    group = group_of(http, "urgent")
    url = f"/topics/{topic}/records"
    first = ok(http.post(url, json="low", headers={"Mansio-Priority": "low", "Idempotency-Key": "1"}))
    again = ok(http.post(url, json="low", headers={"Mansio-Priority": "low", "Idempotency-Key": "1"}))
    assert first["offset"] == again["offset"]
    records = [{"value": "high", "priority": "high", "dedup_id": "2"}, {"value": "normal"}]
    for _ in range(2):
        ok(http.post(f"{url}/batch", json={"records": records[:1]}))
    ok(http.post(f"{url}/batch", json={"records": records[1:]}))
    assert [each["value"] for each in receive(http, group, topic)] == ["high"]
    assert [each["value"] for each in receive(http, group, topic)] == ["normal"]
    assert [each["value"] for each in receive(http, group, topic)] == ['"low"']
    body = {"records": [{"value": "x", "priority": "urgent"}]}
    assert refused(http.post(f"{url}/batch", json=body), 400)["errors"][0]["pointer"] == "/records/0/priority"
    plain = topic_of(http, "plain")
    for header, title in (
        ("Mansio-Priority", "PrioritiesNotEnabled"),
        ("Idempotency-Key", "DeduplicationNotEnabled"),
    ):
        refused(http.post(f"/topics/{plain}/records", json={}, headers={header: "high"}), 400, title)


@pytest.mark.row("A3")
def test_events_follow_a_topic_and_resume_after_the_last_one(http: httpx.Client) -> None:
    topic = topic_of(http, "tail")
    ok(http.patch(f"/topics/{topic}", json={"partitions": 2}))
    for number in range(4):
        ok(http.post(f"/topics/{topic}/records?partition={number % 2}", json=number))

    def events(count: int, **headers: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        last_id = ""
        with http.stream(
            "GET", f"/topics/{topic}/events", params={"from": "earliest", "values": "json"}, headers=headers
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("id: "):
                    last_id = line[4:]
                if line.startswith("data: "):
                    found.append((last_id, json.loads(line[6:])))
                    if len(found) == count:
                        break
        return found

    seen = events(4)
    assert sorted(one["json"] for _, one in seen) == [0, 1, 2, 3]
    rest = events(2, **{"Last-Event-ID": seen[1][0]})
    assert sorted(one["json"] for _, one in [*seen[:2], *rest]) == [0, 1, 2, 3]
    refused(http.get(f"/topics/{topic}/events", headers={"Last-Event-ID": "x"}), 400)


@pytest.mark.row("A3", "G4")
def test_offsets_of_a_group_are_shown_and_reset(http: httpx.Client, broker: TestBroker) -> None:
    topic = topic_of(http, "offsets")
    records = {"records": [{"value": str(number)} for number in range(5)]}
    ok(http.post(f"/topics/{topic}/records/batch", json=records))
    with broker.client() as client, client.consume(topic, group="readers", max_records=3) as consumer:
        assert len(list(consumer)) == 3
    shown = ok(http.get("/groups/readers/offsets"))["offsets"]
    assert shown == [{"topic": topic, "partition": 0, "offset": 3, "lag": 2}]
    reset = {"topics": [topic], "to": "earliest"}
    assert ok(http.post("/groups/readers/offsets/reset", json=reset))["offsets"][0]["offset"] == 0
    refused(http.post("/groups/readers/offsets/reset", json={**reset, "offset": 1}), 400)
    assert "readers" in [each["group"] for each in ok(http.get("/groups"))["groups"]]
    assert ok(http.get("/groups/readers"))["members"] == []
    ok(http.delete("/groups/readers"), 204)
    refused(http.get("/groups/readers"), 404, "GroupIdNotFound")


@pytest.mark.row("A3")
def test_the_api_describes_itself(http: httpx.Client) -> None:
    described = ok(http.get("/openapi.json"))
    assert described["openapi"] == "3.1.0"
    assert "/v1/topics/{topic}/records" in described["paths"]
    operations = [each for path in described["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    references = set(_references(described))
    assert {each.rpartition("/")[2] for each in references} <= set(described["components"]["schemas"])
    page = http.get("/docs")
    assert "/v1/groups/{group}/receive" in page.text
    assert "http://" not in page.text
    assert ok(http.get("/cluster"))["brokers"][0]["is_fenced"] is False


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name == "$ref":
                yield each
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)
