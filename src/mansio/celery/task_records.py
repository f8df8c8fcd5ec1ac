"""Conversion between messages of kombu and records.

The value of a record is the message's body, unchanged. `content-type` and `content-encoding` are headers with kombu's
values, `kombu-headers` and `kombu-properties` have kombu's headers and properties as JSON. The key is the task's id, by
which a delayed task is found.

Invariants:
* The broker delays a message with an eta, and the worker does not see the eta: it would hold the task.
* A message that is delivered twice has two delivery tags.
* A trace context that the instrumentation of Celery has written to the headers of a message is that of its record, too.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kombu.utils.json import dumps, loads

from mansio.errors import InvalidRecord
from mansio.telemetry.context_headers import CONTEXT_HEADERS, TRACEPARENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import tzinfo

    from mansio.client.types import Message

CONTENT_TYPE: Final = "content-type"
CONTENT_ENCODING: Final = "content-encoding"
HEADERS: Final = "kombu-headers"
PROPERTIES: Final = "kombu-properties"

TASK: Final = "task"
"""Header that only messages of Celery have."""

ETA: Final = "eta"
DELAYED_ETA: Final = "mansio_eta"
"""Header in which a task finds the eta by which the broker has delayed it."""

HIGH_FROM: Final = 7
NORMAL_FROM: Final = 4

_delivery_numbers = itertools.count(1)


class OutgoingTask(NamedTuple):
    """A message as a record. `at`: when the broker delivers it, None for now. `priority`: None for a normal one."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes | str | None]]
    at: datetime | None
    priority: str | None


def record_of(
    message: Mapping[str, Any],
    naive_timezone: Callable[[], tzinfo] = lambda: UTC,
    *,
    can_be_delayed: bool = True,
) -> OutgoingTask:
    """Return the record of a message. An eta without time zone is in that of `naive_timezone()`. Where the record
    cannot be delayed, the worker gets the eta and waits for it. Raises `ValueError` for an eta that is none."""
    headers = dict(message.get("headers") or {})
    properties = {**(message.get("properties") or {})}
    at = None
    if can_be_delayed and TASK in headers and (eta := headers.get(ETA)):
        at = parse_eta(eta, naive_timezone)
        headers[ETA] = None
        headers[DELAYED_ETA] = eta
        if at <= datetime.now(UTC):
            at = None
    task_id = headers.get("id") or properties.get("correlation_id")
    body = message["body"]
    return OutgoingTask(
        value=body.encode() if isinstance(body, str) else bytes(body or b""),
        key=str(task_id).encode() if task_id else None,
        headers=[
            (CONTENT_TYPE, message.get("content-type") or ""),
            (CONTENT_ENCODING, message.get("content-encoding") or ""),
            (HEADERS, dumps(headers)),
            (PROPERTIES, dumps(properties)),
        ],
        at=at,
        priority=priority_of(properties.get("priority")),
    )


def message_of(record: Message, delivery_count: int) -> dict[str, Any]:
    """Return the message of a record. Raises `InvalidRecord` if kombu did not publish it."""
    headers = _load(record, HEADERS)
    if record.header(TRACEPARENT) is not None and TRACEPARENT not in headers:
        found = {name: record.header(name) for name in CONTEXT_HEADERS}
        headers |= {
            name: value.decode(errors="replace") for name, value in found.items() if value is not None
        }
    properties = _load(record, PROPERTIES)
    tag = f"{record.topic}:{record.partition}:{record.offset}:{next(_delivery_numbers)}"
    properties["delivery_tag"] = tag
    info = properties.get("delivery_info")
    properties["delivery_info"] = {
        **(info if isinstance(info, dict) else {}),
        "redelivered": delivery_count > 1,
    }
    properties["body_encoding"] = None
    return {
        "body": record.value or b"",
        "content-type": _text(record, CONTENT_TYPE) or None,
        "content-encoding": _text(record, CONTENT_ENCODING) or None,
        "headers": headers,
        "properties": properties,
    }


def context_headers(message: Mapping[str, Any]) -> list[tuple[str, bytes | str | None]]:
    """Return the headers of the record with the trace context that the message has; without one the producer adds its
    own."""
    headers = message.get("headers") or {}
    if not isinstance(headers.get(TRACEPARENT), str):
        return []
    return [(name, text) for name in CONTEXT_HEADERS if isinstance(text := headers.get(name), str)]


def parse_eta(eta: str, naive_timezone: Callable[[], tzinfo]) -> datetime:
    """Return the moment of an eta, which Celery sends in ISO 8601. Raises `ValueError`."""
    moment = datetime.fromisoformat(eta)
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=naive_timezone())


def priority_of(priority: object) -> str | None:
    """Return the priority of a record by that of Celery, 1 to 9, the highest first; 0 is what kombu sends where none is
    given, and is normal (None), as 4 to 6 are."""
    if not isinstance(priority, int) or priority <= 0:
        return None
    if priority >= HIGH_FROM:
        return "high"
    return None if priority >= NORMAL_FROM else "low"


def _load(record: Message, name: str) -> dict[str, Any]:
    try:
        text = _text(record, name)
        found = loads(text)
    except InvalidRecord:
        raise
    except Exception as error:  # kombu's decoders of types raise what they like
        raise InvalidRecord(f"header {name}: not JSON of kombu") from error
    if not isinstance(found, dict):
        raise InvalidRecord(f"header {name}: not a JSON object")
    return found


def _text(record: Message, name: str) -> str:
    value = record.header(name)
    if value is None:
        raise InvalidRecord(f"no header {name}: not published by kombu")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"header {name}: not UTF-8") from error
