"""Options of the client that take effect, and log lines of its handlers that name the place of a failure."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client.share import handler_runner
from mansio.errors import ConfigError, TopicAlreadyExists
from mansio.node.etcd_member import executable
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 30.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[mansio.Broker]:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0") as one:
        yield one


def test_topic_that_exists_is_kept_with_exist_ok(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("orders", partitions=2, exist_ok=True)
        client.admin.create_topic("orders", partitions=5, exist_ok=True)
        assert len(client.admin.describe_topic("orders").partitions) == 2
        with pytest.raises(TopicAlreadyExists):
            client.admin.create_topic("orders", partitions=2)

    async def main() -> None:
        async with mansio.connect(broker.address) as client:
            await client.admin.create_topic("orders", exist_ok=True)
            with pytest.raises(TopicAlreadyExists):
                await client.admin.create_topic("orders")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["start", "from_"])
def test_consumer_begins_at_its_start_by_either_name(broker: mansio.Broker, name: str) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("orders", partitions=1)
        client.publish_many("orders", [b"0", b"1", b"2"])
        found = client.consume("orders", to_end=True, **dict[str, Any]({name: 1}))
        assert [each.value for each in found] == [b"1", b"2"]


def test_session_timeout_of_a_consumer_is_that_of_its_group(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("orders", partitions=1)
        client.publish("orders", b"0")

        def session_timeout() -> str | None:
            found = client.admin.describe_config("workers", kind="group")
            return found["consumer.session.timeout.ms"].value

        assert len(list(client.consume("orders", group="workers", to_end=True))) == 1
        assert session_timeout() == "45000"
        for timeout_ms in (6_000, 6_000, 7_000):
            with client.consume("orders", group="workers", session_timeout_ms=timeout_ms) as consumer:
                consumer.poll(0)
                wait_until(consumer.assignment, DEADLINE_S, "the consumer has joined")
                assert session_timeout() == str(timeout_ms)


def test_session_timeout_that_the_broker_refuses_is_reported(
    broker: mansio.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with mansio.blocking.connect(broker.address) as client, caplog.at_level(logging.WARNING):
        client.admin.create_topic("orders", partitions=1)
        with client.consume("orders", group="workers", session_timeout_ms=1) as consumer:
            consumer.poll(0)
            wait_until(consumer.assignment, DEADLINE_S, "the consumer has joined")
    assert "group workers: session_timeout_ms=1 has no effect: " in caplog.text


def test_reason_of_a_rejection_names_the_attempts_apart_from_the_deliveries() -> None:
    reason = handler_runner._reject_reason(ValueError("no such order"), 3)
    assert reason == "ValueError: no such order (3 attempts in this delivery)"


def test_missing_etcd_is_explained_to_the_user_of_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError) as refused:
        executable.find_program()
    assert "make setup" not in refused.value.message
    assert "apt install etcd-server" in refused.value.message
    assert "or set etcd_binary to the path" in refused.value.message


def test_failed_handler_is_logged_with_its_place(
    broker: mansio.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    line = 0

    async def main() -> None:
        nonlocal line
        async with mansio.connect(broker.address) as client:
            await client.admin.create_topic("orders", partitions=1)
            await client.admin.alter_group_config("workers", {"share.auto.offset.reset": "earliest"})
            await client.publish("orders", b"0")
            async with client.receive("orders", group="workers") as receiver:

                def handle(message: mansio.Leased) -> None:
                    nonlocal line
                    if message.delivery_count == 1:
                        line = 1 + handle.__code__.co_firstlineno + 3
                        raise ValueError("no such order")
                    receiver.stop()

                async with asyncio.timeout(DEADLINE_S):
                    await receiver.run(handle)

    with caplog.at_level(logging.WARNING, "mansio"):
        asyncio.run(main())
    (failed,) = [one.getMessage() for one in caplog.records if "the handler failed" in one.getMessage()]
    assert failed == (
        "the handler failed for offset 0 of orders-0 (delivery 1, attempt 1): ValueError: no such order"
        f" ({Path(__file__)}:{line} in handle)"
    )
