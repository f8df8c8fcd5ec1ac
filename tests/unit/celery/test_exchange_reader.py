"""Messages that a queue of a process cannot read: they are dropped, and no other one with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mansio.celery.exchange_reader import Binding, ExchangeReader
from mansio.celery.inbox import Inbox
from mansio.celery.task_records import message_of
from mansio.errors import InvalidRecord

GOOD_HEADERS = {"kombu-headers": b"{}", "kombu-properties": b'{"delivery_info": {"routing_key": "k"}}'}
UNKNOWN_DECIMAL = b'{"a": {"__type__": "decimal", "__value__": "x"}}'


class Record:
    """A message of a topic. `headers`: None raises an error of its own."""

    topic, partition, value = "t", 0, b"x"

    def __init__(self, offset: int, headers: dict[str, bytes] | None = GOOD_HEADERS) -> None:
        self.offset = offset
        self._headers = headers

    def header(self, name: str) -> bytes | None:
        if self._headers is None:
            raise RuntimeError("unexpected")
        return self._headers.get(name, None if name in GOOD_HEADERS else b"")


class Consumer:
    """Returns these lists of messages, then is closed."""

    def __init__(self, *polled: list[Record]) -> None:
        self._polled = list(polled)

    @property
    def is_closed(self) -> bool:
        return not self._polled

    async def poll(self) -> list[Record]:
        return self._polled.pop(0)


@pytest.mark.parametrize(
    "headers",
    [{}, {**GOOD_HEADERS, "kombu-headers": UNKNOWN_DECIMAL}, None],
    ids=["without headers", "a value that kombu cannot decode", "an unexpected error"],
)
def test_a_message_that_cannot_be_read_takes_no_other_one_with_it(headers: dict[str, bytes] | None) -> None:
    reader = ExchangeReader(None, "q", Inbox())  # type: ignore[arg-type]  # it asks its client for nothing here
    consumer: Any = Consumer([Record(0), Record(1, headers), Record(2)], [Record(3)])
    asyncio.run(reader._pump(consumer, [Binding("topic", "k", "k")]))
    assert len(reader.source) == 3


def test_a_header_that_kombu_cannot_decode_is_an_invalid_record() -> None:
    record: Any = Record(0, {**GOOD_HEADERS, "kombu-headers": UNKNOWN_DECIMAL})
    with pytest.raises(InvalidRecord, match="not JSON of kombu"):
        message_of(record, 1)
