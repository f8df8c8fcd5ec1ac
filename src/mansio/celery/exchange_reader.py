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
        """Read an exchange, whose topic exists, from its current end."""
        bindings = self._bindings.setdefault(exchange, [])
        bindings.append(binding)
        if len(bindings) > 1:
            return
        one = TopicPartition(topic_of_exchange(exchange), 0)
        end = (await self._thread.client.admin.list_offsets([one]))[one].offset
        consumer = self._thread.client.consume(
            [one], from_={one: end}, on_out_of_range="latest", prefetch_bytes_max=PREFETCH_BYTES_MAX
        )
        await consumer.start()
        self._consumers.append(consumer)
        self._pumps.append(asyncio.get_running_loop().create_task(self._pump(consumer, bindings)))

    async def _pump(self, consumer: Consumer, bindings: list[Binding]) -> None:
        while not consumer.is_closed:
            try:
                for record in await consumer.poll():
                    self._add(message_of(record, 1), bindings)
            except InvalidRecord as error:
                logger.warning("queue %s: message dropped: %s", self.source.queue, error)
            except MansioError as error:
                logger.warning("queue %s: %s", self.source.queue, error)
                await asyncio.sleep(FAILURE_PAUSE_S)

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
