"""HTTP: `/v1` with httpx."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import httpx

from component.conformance.protocol import (
    INVALID,
    LEASE_LOST,
    TOO_LARGE,
    UNKNOWN_ID,
    UNKNOWN_TOPIC,
    WAIT_S,
    WRONG_STATE,
    Protocol,
    Received,
    Refused,
)
from support.machine import scaled

NAMES: Final = {
    ("UnknownTopicOrPartition", 404): UNKNOWN_TOPIC,
    ("MessageTooLarge", 413): TOO_LARGE,
    ("InvalidRecordState", 409): LEASE_LOST,
    ("TransactionalIdNotFound", 404): UNKNOWN_ID,
    ("InvalidTxnState", 409): WRONG_STATE,
    ("InvalidRequest", 400): INVALID,
    ("InvalidRecord", 400): INVALID,
    ("ValidationError", 422): INVALID,
}
OPERATION: Final = {"accept": "ack", "release": "retry", "reject": "reject"}


class Http(Protocol):
    name = "http"

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self._http = httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(2 * WAIT_S))

    def _call(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        response = self._http.request(method, path, json=body, **more)
        answer = response.json() if response.content else None
        if response.status_code >= 400:
            assert answer is not None
            known = (answer["title"], response.status_code)
            raise Refused(NAMES.get(known, f"{known} {answer}"))
        return answer

    def publish(
        self,
        topic: str,
        value: str,
        *,
        key: str | None = None,
        delay_s: int | None = None,
        priority: str | None = None,
        dedup_id: str | None = None,
    ) -> None:
        record = {
            "value": value,
            "key": key,
            "delay_ms": None if delay_s is None else delay_s * 1000,
            "priority": priority,
            "dedup_id": dedup_id,
        }
        given = {name: each for name, each in record.items() if each is not None}
        self._call("POST", f"/topics/{topic}/records/batch", {"records": [given]})

    def receive(self, topic: str, count: int) -> list[Received]:
        return self._receive(topic, count, WAIT_S * 1000)

    def _receive(self, topic: str, count: int, wait_ms: int) -> list[Received]:
        found: list[Received] = []
        while len(found) < count:
            body = {"topics": [topic], "max_records": count - len(found), "wait_ms": wait_ms}
            answer = self._call("POST", f"/groups/{self.group(topic)}/receive", body)
            if not answer["records"]:
                break
            found += [
                Received(each["value"], each["key"], each["delivery_count"], each["receipt"])
                for each in answer["records"]
            ]
        return found

    def _acknowledge(self, topic: str, operation: str, record: Received, **more: Any) -> None:
        body = {"receipts": [record.handle], **more}
        self._call("POST", f"/groups/{self.group(topic)}/{operation}", body)

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        found = self.receive(topic, count)
        for record in found:
            self._acknowledge(topic, OPERATION[then], record)
        return found

    def accept(self, topic: str, record: Received) -> None:
        self._acknowledge(topic, "ack", record)

    def retry(self, topic: str, record: Received, delay_s: int) -> None:
        self._acknowledge(topic, "retry", record, delay_ms=delay_s * 1000)

    def extend(self, topic: str, record: Received, lease_s: int) -> None:
        self._acknowledge(topic, "extend", record, lease_ms=lease_s * 1000)

    def is_empty(self, topic: str) -> bool:
        return not self._receive(topic, 1, 200)

    def redrive(self, topic: str) -> int:
        answer = self._call("POST", f"/groups/{self.group(topic)}/dead-letters/redrive", {"topic": topic})
        return int(answer["redriven"])

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        at = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
        answer = self._call("GET", f"/topics/{topic}/partitions/0/records", params={"time": at})
        return [each["value"] for each in answer["records"]]

    def transactions(self, pattern: str) -> list[tuple[str, str]]:
        answer = self._call("GET", "/transactions", params={"pattern": pattern})
        assert answer["is_complete"]
        return [(each["transactional_id"], each["state"]) for each in answer["transactions"]]

    def transaction(self, transactional_id: str) -> tuple[str, list[str]]:
        found = self._call("GET", f"/transactions/{transactional_id}")
        return found["state"], [f"{each['topic']}-{each['partition']}" for each in found["partitions"]]

    def terminate(self, transactional_id: str) -> None:
        self._call("POST", f"/transactions/{transactional_id}/terminate", headers={"X-Mansio-Request": "1"})

    def hanging(self, topic: str) -> list[int]:
        answer = self._call(
            "GET", "/hanging-transactions", params={"topic": topic, "partition": 0, "open_ms_min": 0}
        )
        return [each["start_offset"] for each in answer["transactions"]]

    def abort(self, topic: str, start_offset: int) -> None:
        path = f"/topics/{topic}/partitions/0"
        self._call("POST", f"{path}/transactions/abort", {"start_offset": start_offset})
        producers = self._call("GET", f"{path}/producers")["producers"]
        assert start_offset not in [each["transaction_start_offset"] for each in producers]

    def close(self) -> None:
        self._http.close()
