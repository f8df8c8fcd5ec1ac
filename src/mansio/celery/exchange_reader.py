"""Reader of the queue of a single process: the messages of exchanges that are bound to it, from the time of binding.

Such queues carry control commands, replies and events. All messages of an exchange are in one topic; each process reads
it from its end and keeps what the bindings of its queue select, as it would get copies from an exchange of AMQP.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.celery.inbox import Delivery, Source
from mansio.celery.names import topic_of_exchange
from mansio.celery.task_records import message_of
from mansio.client.types import TopicPartition
from mansio.errors import InvalidRecord, MansioError

if TYPE_CHECKING:
    from mansio.celery.client_thread import ClientThread
    from mansio.celery.inbox import Inbox
    from mansio.client.consumer.consumer import Consumer

logger = logging.getLogger(__name__)

WAITING_MESSAGES_MAX: Final = 10_000
"""Messages of one queue that wait for its process; later ones are dropped."""

PREFETCH_BYTES_MAX: Final = 1 << 20
FAILURE_PAUSE_S: Final = 0.5


class Binding(NamedTuple):
    """What a queue gets from an exchange. `kind`: type of the exchange; `pattern`: regular expression of the routing
    keys, for an exchange of type topic."""

    kind: str
    routing_key: str
    pattern: str | None

    def matches(self, routing_key: str) -> bool:
        """Whether the queue gets messages with this routing key."""
        if self.kind == "fanout":
            return True
        if self.pattern is not None:
            return re.match(self.pattern, routing_key) is not None
        return routing_key == self.routing_key


class ExchangeReader:
    """Reads the topics of the exchanges to which one queue is bound. Coroutines run on the client's thread."""

    def __init__(self, thread: ClientThread, queue: str, inbox: Inbox) -> None:
        self.source = Source(inbox, queue)
        self._thread = thread
        self._bindings: dict[str, list[Binding]] = {}
        self._pumps: list[asyncio.Task[None]] = []
        self._consumers: list[Consumer] = []
        self._dropped_count = 0

    async def bind(self, exchange: str, binding: Binding) -> None:
        """Start to read an exchange, whose topic exists, from its current end: every message that is published after
        this returns is read."""
        bindings = self._bindings.get(exchange)
        if bindings is not None:
            if binding not in bindings:
                bindings.append(binding)
            return
        one = TopicPartition(topic_of_exchange(exchange), 0)
        end = (await self._thread.client.admin.list_offsets([one]))[one].offset
        consumer = self._thread.client.consume(
            [one],
            from_={one: end},
            on_out_of_range="latest",
            on_unreadable="skip",
            prefetch_bytes_max=PREFETCH_BYTES_MAX,
        )
        try:
            await consumer.start()
        except BaseException:
            await consumer.close()
            raise
        # Only now: after an error above, the next call starts a new consumer.
        bindings = self._bindings[exchange] = [binding]
        self._consumers.append(consumer)
        self._pumps.append(asyncio.get_running_loop().create_task(self._pump(consumer, bindings)))

    async def _pump(self, consumer: Consumer, bindings: list[Binding]) -> None:
        while not consumer.is_closed:
            try:
                records = await consumer.poll()
            except MansioError as error:
                logger.warning("queue %s: %s", self.source.queue, error)
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            for record in records:
                try:
                    self._add(message_of(record, 1), bindings)
                except InvalidRecord as error:
                    logger.warning("queue %s: message dropped: %s", self.source.queue, error)
                except Exception:
                    logger.exception("queue %s: message dropped", self.source.queue)

    def _add(self, payload: dict[str, object], bindings: list[Binding]) -> None:
        properties = payload["properties"]
        assert isinstance(properties, dict)
        routing_key = str(properties["delivery_info"].get("routing_key") or "")
        if not any(binding.matches(routing_key) for binding in bindings):
            return
        if len(self.source) < WAITING_MESSAGES_MAX:
            self.source.add(Delivery(payload, None))
            return
        self._dropped_count += 1
        if self._dropped_count & (self._dropped_count - 1) == 0:
            logger.warning(
                "queue %s: %d messages dropped: nothing reads it", self.source.queue, self._dropped_count
            )

    async def close(self) -> None:
        """Stop reading."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.gather(*(consumer.close() for consumer in self._consumers), return_exceptions=True)


class ProcessQueues:
    """The queues of this process, with their readers. All channels of a connection of kombu share them, as they share
    its bindings: a queue may be declared on one channel, read on another and get messages that a third publishes.

    A queue exists until it is deleted or the connection ends, one with auto_delete until the channels that consumed it
    are closed."""

    def __init__(self) -> None:
        self._readers: dict[str, ExchangeReader] = {}
        self._consuming: dict[str, set[int]] = {}
        """Numbers of the open channels that have consumed a queue of this process."""
        self.auto_delete: set[str] = set()
        """Queues that were declared with auto_delete, of this process or not."""

    def __contains__(self, queue: str) -> bool:
        return queue in self._readers

    def get(self, queue: str) -> ExchangeReader | None:
        """Return the reader of a queue, None if the queue is not one of this process."""
        return self._readers.get(queue)

    def add(self, queue: str, thread: ClientThread, inbox: Inbox) -> ExchangeReader:
        """Return the reader of a queue; a new one, without bindings, if there is none."""
        if queue not in self._readers:
            self._readers[queue] = ExchangeReader(thread, queue, inbox)
        return self._readers[queue]

    def consume(self, queue: str, channel_id: int) -> None:
        """Note that a channel consumes a queue."""
        self._consuming.setdefault(queue, set()).add(channel_id)

    def leave(self, channel_id: int) -> list[str]:
        """Note that a channel is closed, and return the queues that end with it, which the caller removes."""
        consumed = [queue for queue, channels in self._consuming.items() if channel_id in channels]
        for queue in consumed:
            self._consuming[queue].discard(channel_id)
        return [queue for queue in consumed if queue in self.auto_delete and not self._consuming[queue]]

    def remove(self, queue: str) -> ExchangeReader | None:
        """Forget a queue, and return its reader, which the caller closes."""
        self.auto_delete.discard(queue)
        self._consuming.pop(queue, None)
        return self._readers.pop(queue, None)

    def remove_all(self) -> list[ExchangeReader]:
        """Forget all queues, and return their readers, which the caller closes."""
        return [reader for queue in list(self._readers) if (reader := self.remove(queue)) is not None]
