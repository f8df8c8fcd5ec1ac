"""Mansio's own clients: the blocking one, and the asynchronous one on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import mansio
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
from mansio import TopicPartition
from mansio import errors as mansio_errors
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES: Final = {
    mansio_errors.UnknownTopicOrPartition: UNKNOWN_TOPIC,
    mansio_errors.MessageTooLarge: TOO_LARGE,
    mansio_errors.LeaseLost: LEASE_LOST,
    mansio_errors.TransactionalIdNotFound: UNKNOWN_ID,
    mansio_errors.InvalidTxnState: WRONG_STATE,
    mansio_errors.InvalidRequest: INVALID,
    mansio_errors.InvalidRecord: INVALID,
    ValueError: INVALID,
}
EMPTY_S: Final = 0.5


class Member:
    """A receiver of at most one record at a time, and the message that it has leased."""

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        self.leased: Any = None


class PythonBlocking(Protocol):
    name = "blocking"

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self._client = self._connect()
        self._members: dict[str, list[Member]] = {}

    def _connect(self) -> Any:
        return self.broker.client()

    def _wait(self, result: Any) -> Any:
        """Return the result of a method of the client."""
        return result

    def _enter(self, manager: Any) -> Any:
        return manager.__enter__()

    def _call(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return self._wait(call(*arguments, **more))
        except (mansio.errors.MansioError, ValueError) as error:
            raise Refused(NAMES.get(type(error), repr(error))) from error

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
        self._call(
            self._client.publish,
            topic,
            value.encode(),
            key=None if key is None else key.encode(),
            delay=None if delay_s is None else timedelta(seconds=delay_s),
            priority=priority,
            dedup_id=dedup_id,
        )

    def _poll(self, topic: str, within_s: float) -> Member | None:
        """A member that has leased a record, from those without one."""
        members = self._members.setdefault(topic, [])
        if all(each.leased is not None for each in members):
            receiver = self._call(
                self._client.receive, topic, group=self.group(topic), max_records=1, auto_extend=False
            )
            members.append(Member(self._call(self._enter, receiver)))
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            for each in members:
                if each.leased is None and (found := self._call(each.receiver.poll, 100)):
                    each.leased = found[0]
                    return each
        return None

    def receive(self, topic: str, count: int) -> list[Received]:
        found: list[Received] = []
        for _ in range(count):
            member = self._poll(topic, scaled(WAIT_S))
            assert member is not None, "no record"
            message = member.leased
            key = None if message.key is None else message.key.decode()
            found.append(Received(message.value.decode(), key, message.delivery_count, member))
        return found

    def _acknowledge(self, record: Received, method: str, *arguments: Any) -> None:
        member = record.handle
        message, member.leased = member.leased, None
        self._call(getattr(message, method), *arguments)

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        found: list[Received] = []
        for _ in range(count):
            found += self.receive(topic, 1)
            self._acknowledge(found[-1], {"accept": "ack", "release": "retry", "reject": "reject"}[then])
        return found

    def accept(self, topic: str, record: Received) -> None:
        del topic
        self._acknowledge(record, "ack")

    def retry(self, topic: str, record: Received, delay_s: int) -> None:
        del topic
        self._acknowledge(record, "retry", delay_s)

    def extend(self, topic: str, record: Received, lease_s: int) -> None:
        del topic
        self._call(record.handle.leased.extend, lease_s * 1000)

    def is_empty(self, topic: str) -> bool:
        return self._poll(topic, EMPTY_S) is None

    def redrive(self, topic: str) -> int:
        partition = TopicPartition(topic, 0)
        found = self._call(
            self._client.admin.shares.redrive, self.group(topic), partition, redrive_id="conformance"
        )
        return int(found.redriven)

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        offsets = self._call(self._client.admin.list_offsets, [TopicPartition(topic, 0)], time_ms)
        start = offsets[TopicPartition(topic, 0)].offset
        if start < 0:
            return []
        found: list[str] = []
        consumer = self._call(self._client.consume, TopicPartition(topic, 0), from_=start, to_end=True)
        self._call(self._enter, consumer)
        while not consumer.is_finished:
            found += [each.value.decode() for each in self._call(consumer.poll, 100)]
        self._call(consumer.close)
        return found

    def transactions(self, pattern: str) -> list[tuple[str, str]]:
        found = self._call(self._client.admin.transactions.list, pattern=pattern)
        return [(each.transactional_id, each.state) for each in found]

    def transaction(self, transactional_id: str) -> tuple[str, list[str]]:
        found = self._call(self._client.admin.transactions.describe, transactional_id)
        return found.state, [f"{topic}-{index}" for topic, index in found.partitions]

    def terminate(self, transactional_id: str) -> None:
        self._call(self._client.admin.transactions.terminate, transactional_id)

    def hanging(self, topic: str) -> list[int]:
        find = self._client.admin.transactions.find_hanging
        return [each.start_offset for each in self._call(find, [TopicPartition(topic, 0)], open_ms_min=0)]

    def abort(self, topic: str, start_offset: int) -> None:
        abort = self._client.admin.transactions.abort
        self._call(abort, TopicPartition(topic, 0), start_offset)

    def close(self) -> None:
        for members in self._members.values():
            for each in members:
                self._call(each.receiver.close)


class PythonAsync(PythonBlocking):
    name = "asyncio"

    def __init__(self, broker: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        super().__init__(broker)

    def _connect(self) -> Any:
        async def connect() -> Any:
            return mansio.connect(self.broker.bootstrap_servers)

        return self._wait(connect())

    def _wait(self, result: Any) -> Any:
        if not hasattr(result, "__await__"):
            return result

        async def wait() -> Any:
            return await result

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(scaled(3 * WAIT_S))

    def _enter(self, manager: Any) -> Any:
        return manager.__aenter__()

    def _call(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        async def on_loop() -> Any:
            result = call(*arguments, **more)
            return await result if hasattr(result, "__await__") else result

        try:
            return self._wait(on_loop())
        except (mansio.errors.MansioError, ValueError) as error:
            raise Refused(NAMES.get(type(error), repr(error))) from error

    def close(self) -> None:
        super().close()
        self._call(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
