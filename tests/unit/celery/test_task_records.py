"""Messages of kombu as records: what the broker delays, prefers and rejects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from kombu.utils.json import dumps, loads

from mansio.celery.exchange_reader import Binding
from mansio.celery.names import topic_of_exchange, topic_of_queue
from mansio.celery.task_records import message_of, parse_eta, priority_of, record_of
from mansio.client.types import Message
from mansio.errors import InvalidRecord
from mansio.wire.batch.delay_headers import DELIVER_AT_HEADER


def message(**headers: object) -> dict[str, object]:
    return {
        "body": '[[1, 2], {}, {"chain": null}]',
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"id": "4711", "task": "add", "eta": None, **headers},
        "properties": {"priority": 0, "delivery_info": {"exchange": "", "routing_key": "celery"}},
    }


def stored(given: dict[str, object], offset: int = 3) -> Message:
    task = record_of(given)
    headers = tuple(
        (name, value.encode() if isinstance(value, str) else value) for name, value in task.headers
    )
    return Message("celery", 0, offset, 0, task.key, task.value, headers)


def test_a_message_comes_back_as_it_was_published() -> None:
    given = message(origin="é", stamps={"a": [1, 2]})
    found = message_of(stored(given), 1)
    assert found["body"] == str(given["body"]).encode()
    assert found["headers"] == {**given["headers"]}  # type: ignore[dict-item]
    assert (found["content-type"], found["content-encoding"]) == ("application/json", "utf-8")
    assert found["properties"]["delivery_info"] == {
        "exchange": "",
        "routing_key": "celery",
        "redelivered": False,
    }


def test_a_binary_body_is_stored_unchanged() -> None:
    body = bytes(range(256))
    assert message_of(stored({**message(), "body": body, "content-encoding": "binary"}), 1)["body"] == body


def test_each_delivery_has_a_delivery_tag_of_its_own_and_later_ones_are_redelivered() -> None:
    record = stored(message())
    first, second = message_of(record, 1), message_of(record, 2)
    assert first["properties"]["delivery_tag"] != second["properties"]["delivery_tag"]
    assert second["properties"]["delivery_info"]["redelivered"] is True


def test_the_worker_does_not_see_the_eta_that_the_broker_waits_for() -> None:
    due = datetime.now(UTC) + timedelta(days=14)
    task = record_of(message(eta=due.isoformat()))
    assert task.at == due
    assert DELIVER_AT_HEADER not in dict(task.headers)  # the client adds it, after it has checked the topic
    seen = message_of(stored(message(eta=due.isoformat())), 1)["headers"]
    assert seen["eta"] is None
    assert seen["mansio_eta"] == due.isoformat()


def test_the_worker_waits_for_an_eta_where_the_broker_does_not() -> None:
    eta = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    task = record_of(message(eta=eta), can_be_delayed=False)
    assert task.at is None
    assert loads(str(dict(task.headers)["kombu-headers"]))["eta"] == eta


def test_a_header_of_another_program_is_no_eta() -> None:
    given = {**message(), "headers": {"eta": "soon"}}
    assert record_of(given).at is None
    assert message_of(stored(given), 1)["headers"] == {"eta": "soon"}


def test_an_eta_in_the_past_is_no_delay() -> None:
    assert record_of(message(eta=(datetime.now(UTC) - timedelta(seconds=1)).isoformat())).at is None


def test_an_eta_without_time_zone_is_in_that_of_the_application() -> None:
    east = timezone(timedelta(hours=5))
    assert parse_eta("2026-01-01T05:00:00", lambda: east) == datetime(2026, 1, 1, tzinfo=UTC)
    assert parse_eta("2026-01-01T05:00:00+02:00", lambda: east) == datetime(2026, 1, 1, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (None, None),
        (0, None),
        (1, "low"),
        (3, "low"),
        (4, None),
        (6, None),
        (7, "high"),
        (9, "high"),
        (255, "high"),
    ],
)
def test_priorities_of_celery_are_high_normal_and_low(priority: int | None, expected: str | None) -> None:
    assert priority_of(priority) == expected


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("kombu-headers", b"{}"),),
        (("kombu-headers", b"{}"), ("kombu-properties", b"[]")),
        (("kombu-headers", b"{"), ("kombu-properties", b"{}")),
        (("kombu-headers", b"\xff"), ("kombu-properties", b"{}")),
        (("kombu-headers", None), ("kombu-properties", b"{}")),
        (("kombu-headers", b"[" * 100_000), ("kombu-properties", b"{}")),
    ],
)
def test_a_record_that_kombu_did_not_publish_is_an_invalid_record(
    headers: tuple[tuple[str, bytes], ...],
) -> None:
    with pytest.raises(InvalidRecord):
        message_of(Message("celery", 0, 0, 0, None, b"", headers), 1)


def test_properties_of_unexpected_types_are_replaced() -> None:
    headers = (
        ("kombu-headers", b"{}"),
        ("kombu-properties", dumps({"delivery_info": 1, "delivery_tag": []}).encode()),
        ("content-type", b""),
        ("content-encoding", b""),
    )
    found = message_of(Message("celery", 0, 0, 0, None, None, headers), 1)
    assert found["properties"]["delivery_info"] == {"redelivered": False}
    assert isinstance(found["properties"]["delivery_tag"], str)


def test_names_of_queues_are_topics_and_no_two_names_share_one() -> None:
    assert topic_of_queue("celery") == "celery"
    names = ["a@b", "a-b", "a b", "dlq.a", "__a", "exchange.a", ".", "..", "x" * 300, "x" * 301, "ä"]
    topics = [topic_of_queue(name) for name in names] + [topic_of_exchange(name) for name in names]
    assert len(set(topics)) == len(topics)
    assert all(len(f"dlq.{topic}") <= 249 for topic in topics)
    assert not any(topic_of_queue(name).startswith(("exchange.", "dlq.", "__")) for name in names)
    assert topic_of_queue("a@b") == "a-b-3b5d0329a7e8e270"


@pytest.mark.parametrize(
    ("binding", "key", "expected"),
    [
        (Binding("fanout", "", None), "anything", True),
        (Binding("direct", "me", None), "me", True),
        (Binding("direct", "me", None), "you", False),
        (Binding("topic", "task.#", r"^task\..*?$"), "task.sent", True),
        (Binding("topic", "task.#", r"^task\..*?$"), "worker.online", False),
    ],
)
def test_a_queue_of_one_process_gets_what_its_binding_selects(
    binding: Binding, key: str, expected: bool
) -> None:
    assert binding.matches(key) is expected
