"""Transaction: records and offsets that become visible together, or not at all (KIP-98)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from mansio.client.types import OutgoingRecord
from mansio.errors import InvalidRequest, InvalidTxnState
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from types import TracebackType

    from mansio.client.consumer.consumer import Consumer
    from mansio.client.producer.accumulator import Delivery
    from mansio.client.transactions.transactional_producer import TransactionalProducer
    from mansio.client.types import HeadersLike, Publishable, TopicPartition

REFUSED_HEADERS = {
    DELAY_HEADER: "a delayed record",
    DELIVER_AT_HEADER: "a delayed record",
    DEDUP_ID_HEADER: "a record with a deduplication id",
}


class Transaction:
    """One transaction, made by `Client.transaction`; use it by `async with`.

    Leaving the block commits: it waits until all records are acknowledged and raises the first error. An exception in
    the block, also a cancellation, aborts. Readers with `read_committed`, the default of `Client.consume`, see the
    records after the commit; those of an aborted transaction never.
    """

    def __init__(self, producer: TransactionalProducer, timeout_ms: int) -> None:
        self._producer = producer
        self._timeout_ms = timeout_ms
        self._is_open = False
        self._is_used = False

    async def __aenter__(self) -> Self:
        if self._is_used:
            raise InvalidTxnState("a transaction is used once; call client.transaction() again")
        await self._producer.begin(self._timeout_ms)
        self._is_open = self._is_used = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is None:
            await self._producer.commit()
        else:
            await self._producer.abort()

    async def publish(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
        priority: str | None = None,
    ) -> Delivery:
        """Publish one record in the transaction; see `Producer.send`. The call waits only for the topic's metadata or
        for buffer space; the commit waits for the acknowledgement and raises the error of a record that failed.

        Raises `InvalidRequest` for a delayed record or one with a deduplication id, `InvalidTxnState` outside the
        block, and the first error of the transaction, which can only be aborted then.
        """
        self._check_open()
        if headers is not None:
            headers = list(headers.items() if hasattr(headers, "items") else headers)
            _check_headers(headers)
        return await self._producer.send(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            priority=priority,
        )

    async def publish_many(self, topic: str, records: Iterable[Publishable]) -> None:
        """Publish values (or `OutgoingRecord`s) in order in the transaction, as `publish` does."""
        self._check_open()
        if not isinstance(records, list | tuple) or OutgoingRecord in set(map(type, records)):
            records = _checked(records)
        await self._producer.send_many(topic, records)

    async def send_offsets(
        self, consumer: Consumer, offsets: Mapping[TopicPartition, int] | None = None
    ) -> None:
        """Commit `offsets` of the consumer's group (None: the positions after all messages that the consumer has
        delivered, as `Consumer.commit` does) together with the records: both or neither (KIP-447).

        Call it once all messages of the transaction are read. Raises `InvalidRequest` if the consumer has no group or
        commits automatically, and `IllegalGeneration`, `UnknownMember` or `RebalanceInProgress` if the group has
        rebalanced and other members read the messages: the transaction can only be aborted then. After an abort call
        `Consumer.seek_to_committed` to read the messages again.
        """
        self._check_open()
        await self._producer.send_offsets(consumer, offsets)

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidTxnState("the transaction is not open: use it in its `with` block")


def _checked(records: Iterable[Publishable]) -> Iterator[Publishable]:
    """Yield the records, or raise `InvalidRequest` for one that a transaction cannot have."""
    for record in records:
        if isinstance(record, OutgoingRecord):
            if record.delay is not None or record.at is not None:
                raise _refusal("a delayed record")
            if record.dedup_id is not None:
                raise _refusal("a record with a deduplication id")
            headers = record.headers
            _check_headers(headers.items() if hasattr(headers, "items") else headers)
        yield record


def _check_headers(headers: Iterable[tuple[str, object]]) -> None:
    for pair in headers:
        if isinstance(pair, tuple | list) and pair and pair[0] in REFUSED_HEADERS:
            raise _refusal(REFUSED_HEADERS[pair[0]])


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(f"{what} cannot be part of a transaction; publish it outside of one")
