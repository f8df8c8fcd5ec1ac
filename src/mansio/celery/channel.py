"""Channel of kombu: queues as topics with share groups, exchanges as topics that each process reads from their end.

A message goes to the queues that the publishing process has declared for its exchange and routing key, as with other
virtual transports of kombu; Celery sends tasks directly to a queue. A message for which there is none, and every
message of an exchange of type fanout, goes to the topic of its exchange, which is read by the queues of single
processes: exclusive ones, those of remote control (kombu before 5.5 does not declare them as exclusive), and those
with auto_delete that are bound to an exchange of type fanout or topic. They belong to the connection, not the channel.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.json import loads
from kombu.utils.uuid import uuid

from mansio.celery import queue_admin
from mansio.celery.exchange_reader import Binding
from mansio.celery.kept_readers import keep_reader, running_tags, take_reader
from mansio.celery.names import topic_of_exchange, topic_of_queue
from mansio.celery.queue_reader import QueueReader
from mansio.celery.task_records import context_headers, record_of
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import tzinfo

    from mansio.celery.client_thread import ClientThread
    from mansio.celery.exchange_reader import ExchangeReader, ProcessQueues
    from mansio.celery.inbox import Delivery
    from mansio.celery.task_records import OutgoingTask
    from mansio.client.share.leased import Leased

logger = logging.getLogger(__name__)

ADMIN_S_MAX: Final = 60.0
"""Time limit of creations, purges and searches for delayed tasks."""

PUBLISH_S_MAX: Final = 20.0
CLOSE_S_MAX: Final = 15.0

GET_S_MAX: Final = 2.0
"""How long `basic_get` waits for a record: the first one needs a membership of the group."""

CONTROL_SUFFIX: Final = ".pidbox"
REPLY_PREFIX: Final = "reply."

TRANSIENT_DELIVERY_MODE: Final = 1
"""Of messages that may be lost, such as Celery's events; 2, for the others, is what kombu sends by default."""

KNOWN_QUEUES_MAX: Final = 10_000


class QoS(virtual.QoS):  # type: ignore[misc]  # kombu has no types
    """Messages that the worker has not acknowledged, with their leases, and the limit on their number."""

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._leases: dict[str, tuple[QueueReader, Leased]] = {}

    def add(self, tag: str, reader: QueueReader, leased: Leased) -> None:
        """Keep the lease of a message that is about to be given to the worker."""
        self._leases[tag] = reader, leased

    def can_consume(self) -> bool:
        """Whether the worker may get one more message."""
        return not self.prefetch_count or len(self._leases) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        """How many messages the worker may get, None without a limit."""
        return max(0, self.prefetch_count - len(self._leases)) if self.prefetch_count else None

    def append(self, message: Any, delivery_tag: str) -> None:
        """Do nothing: kombu calls it for a message that will be acknowledged, and `add` has kept its lease."""

    def get(self, delivery_tag: str) -> Leased:
        """Return the leased record of a message."""
        return self._leases[delivery_tag][1]

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message as done."""
        if (found := self._leases.pop(delivery_tag, None)) is not None:
            found[0].accept(found[1])
            self.channel.wake()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Release a message to any worker, or send it to the dead-letter topic."""
        if (found := self._leases.pop(delivery_tag, None)) is not None:
            (found[0].requeue if requeue else found[0].reject)(found[1])
            self.channel.wake()

    def take_all_but(self, tags: set[str]) -> dict[QueueReader, list[Leased]]:
        """Remove and return the leases of all messages that have none of these delivery tags."""
        found: dict[QueueReader, list[Leased]] = {}
        for tag in [tag for tag in self._leases if tag not in tags]:
            reader, leased = self._leases.pop(tag)
            found.setdefault(reader, []).append(leased)
        return found

    def restore_unacked(self) -> list[Any]:
        """Release all messages; nothing is published again, as by other virtual transports."""
        for tag in list(self._leases):
            self.reject(tag, requeue=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Nothing: the reader of the queue releases what is not acknowledged when the channel is closed."""


class Channel(virtual.Channel):  # type: ignore[misc]
    """Channel of kombu over the client of its transport."""

    QoS = QoS
    supports_fanout = True
    do_restore = False
    body_encoding = None
    from_transport_options = ("deadletter_queue",)

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._options = connection.options
        self._inbox = connection.inbox
        self._readers: dict[str, QueueReader] = {}
        """Readers of the queues of tasks that are consumed."""
        self._stopped_readers: list[QueueReader] = []
        self._process_queues: ProcessQueues = connection.process_queues
        self._unacknowledged_tags: set[str] = set()
        """Consumers whose messages are acknowledged when they are delivered."""
        self._turn = 0

    @property
    def thread(self) -> ClientThread:
        """The client of the transport. Raises `ConnectionLost` if it is closed."""
        found: ClientThread = self.connection.thread
        return found

    def wake(self) -> None:
        """Make the worker look for messages again: it may take more than before."""
        self._inbox.wake()

    # Queues and exchanges

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Create the queue if it does not exist. Only with `passive` the number of messages is counted."""
        queue = queue or f"amq.gen-{uuid()}"
        count = 0
        if auto_delete and not passive:
            self._process_queues.auto_delete.add(queue)
        if exclusive or queue.endswith(CONTROL_SUFFIX) or queue in self._process_queues:
            self._process_queues.add(queue, self.thread, self._inbox)
        elif passive:
            if not self._has_queue(queue):
                raise ChannelError(
                    f"NOT_FOUND - no queue {queue!r}", (50, 10), "Channel.queue_declare", "404"
                )
            count = self._size(queue)
        elif not auto_delete:  # otherwise its binding decides whether it is one of this process
            self._new_queue(queue)
        return queue_declare_ok_t(queue, count, 0)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Bind a queue to an exchange. The queue receives every message that is published after this returns."""
        try:
            super().queue_bind(queue, exchange, routing_key, arguments, **kwargs)
        except Exception:
            # kombu has noted the binding already, and would not make it when the program tries again.
            self.queue_unbind(queue, exchange or "amq.direct", routing_key, arguments)
            raise

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        kind = self.typeof(exchange).type
        reader = self._process_queues.get(queue)
        if reader is None and queue in self._process_queues.auto_delete and kind in ("fanout", "topic"):
            reader = self._process_queues.add(queue, self.thread, self._inbox)
        if reader is None:
            self._new_queue(queue)
            return
        self._new_exchange(exchange)
        binding = Binding(kind, routing_key or "", pattern)
        self.thread.run(reader.bind(exchange, binding))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete a queue and its bindings."""
        if queue not in self._process_queues:
            super().queue_delete(queue, if_unused, if_empty, **kwargs)
        elif not if_empty or not self._size(queue):
            reader = self._remove_process_queue(queue)
            if reader is not None:
                self.thread.run(reader.close(), CLOSE_S_MAX)

    def _remove_process_queue(self, queue: str) -> ExchangeReader | None:
        """Forget a queue with its bindings, so that declaring it again makes them again."""
        for binding in self.state.queue_bindings(queue):
            self._remove_routes(binding.exchange, queue)
        self.state.queue_bindings_delete(queue)
        return self._process_queues.remove(queue)

    def _remove_routes(self, exchange: str, queue: str) -> None:
        """Let the exchange send nothing to a queue that is deleted: it would be created again."""
        table = self.state.exchanges.get(exchange, {}).get("table", [])
        table[:] = [route for route in table if route[2] != queue]

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        known = self.thread.known_queues
        if queue in known:
            return
        options = self._options
        work = queue_admin.create_queue(
            self.thread.client,
            topic_of_queue(queue),
            partitions=options.partitions,
            replication_factor=options.replication_factor,
            topic_config=options.topic_config,
            group_config=options.group_config,
        )
        self.thread.run(work, ADMIN_S_MAX)
        if len(known) >= KNOWN_QUEUES_MAX:
            known.clear()
        known.add(queue)

    def _new_exchange(self, exchange: str) -> None:
        known = self.thread.known_exchanges
        if exchange in known:
            return
        work = queue_admin.create_exchange(
            self.thread.client,
            topic_of_exchange(exchange),
            replication_factor=self._options.replication_factor,
        )
        self.thread.run(work, ADMIN_S_MAX)
        if len(known) >= KNOWN_QUEUES_MAX:
            known.clear()
        known.add(exchange)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        if queue in self._process_queues:
            return True
        return self.thread.run(queue_admin.has_queue(self.thread.client, topic_of_queue(queue)), ADMIN_S_MAX)

    def _size(self, queue: str) -> int:
        if (reader := self._process_queues.get(queue)) is not None:
            return len(reader.source)
        return self.thread.run(queue_admin.size(self.thread.client, topic_of_queue(queue)), ADMIN_S_MAX)

    def _purge(self, queue: str) -> int:
        if queue in self._process_queues:
            return 0
        return self.thread.run(queue_admin.purge(self.thread.client, topic_of_queue(queue)), ADMIN_S_MAX)

    def _delete(self, queue: str, exchange: str, *args: Any, **kwargs: Any) -> None:
        self._remove_routes(exchange, queue)
        self.thread.run(queue_admin.delete_queue(self.thread.client, topic_of_queue(queue)), ADMIN_S_MAX)
        self.thread.known_queues.discard(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """Nothing: kombu declares a queue of replies once per connection, and its reader must not miss a reply."""

    # Publishing

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish a message, and wait until it is stored."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        found = self._lookup(exchange, routing_key)
        queues = {queue for queue in found if queue and queue not in self._process_queues}
        for queue in queues:
            self._put(queue, message)
        if not queues or len(queues) < len(found) or self.typeof(exchange).type == "fanout":
            self._put_exchange(exchange, message)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self._new_queue(queue)
        task = record_of(message, _naive_timezone)
        publish = self.thread.task_producer.publish(
            topic_of_queue(queue),
            task.value,
            key=task.key,
            headers=self._record_headers(task, message),
            at=task.at,
            priority=task.priority,
        )
        self.thread.run(publish, PUBLISH_S_MAX)

    def _put_exchange(self, exchange: str, message: dict[str, Any]) -> None:
        is_control = exchange.endswith(CONTROL_SUFFIX)
        if is_control and not exchange.startswith(REPLY_PREFIX):
            self._cancel_revoked(message)
        self._new_exchange(exchange)
        task = record_of(message, can_be_delayed=False)
        topic = topic_of_exchange(exchange)
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT_DELIVERY_MODE
        if is_transient and not is_control:
            self.thread.publish_event(topic, task.value, task.headers)
            return
        producer = self.thread.exchange_producer if is_control else self.thread.task_producer
        publish = producer.publish(topic, task.value, headers=self._record_headers(task, message))
        self.thread.run(publish, PUBLISH_S_MAX)

    def _record_headers(
        self, task: OutgoingTask, message: dict[str, Any]
    ) -> list[tuple[str, bytes | str | None]]:
        """Return the headers of a record. If publishing is traced, a context that Celery's instrumentation has written
        to the message is among them."""
        return task.headers + context_headers(message) if self.thread.is_traced else task.headers

    def _cancel_revoked(self, message: dict[str, Any]) -> None:
        """Cancel the delayed tasks that a control command revokes: workers forget which tasks are revoked."""
        if not self._options.cancel_revoked or (task_ids := revoked_task_ids(message)) == []:
            return
        work = queue_admin.cancel_delayed(self.thread.client, task_ids, list(self.thread.known_queues))
        count = self.thread.run(work, ADMIN_S_MAX)
        if count:
            logger.info("cancelled %d delayed tasks, which were revoked", count)

    # Consuming

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Limit the messages that the worker has, and the records that are leased for each queue."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        for reader in self._readers.values():
            self.thread.run(reader.prefetch(prefetch_count))
        self.wake()

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        """Start delivering the messages of a queue to `callback`."""
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if no_ack:
            self._unacknowledged_tags.add(queue)
        if queue in self._process_queues:
            self._process_queues.consume(queue, self.channel_id)
        else:
            self._reader(queue)

    def _reader(self, queue: str) -> QueueReader:
        reader = self._readers.get(queue)
        if reader is None:
            self._new_queue(queue)
            reader = self._kept_reader(queue)
            if reader is None:
                options = self._options.lease_options
                reader = QueueReader(self.thread, queue, topic_of_queue(queue), options, self._inbox)
            self.thread.run(reader.prefetch(self.qos.prefetch_count))
            self._readers[queue] = reader
        return reader

    def _kept_reader(self, queue: str) -> QueueReader | None:
        """Return the reader of an earlier connection of this process that failed, None if there is none that works."""
        reader = take_reader(self.connection.client_options, queue)
        if reader is None:
            return None
        if not reader.can_receive:
            reader.end()
            return None
        reader.use(self._inbox)
        return reader

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop delivering the messages of a queue. Its tasks that the worker has can still be acknowledged."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        self._unacknowledged_tags.discard(queue)
        reader = self._readers.pop(queue, None)
        if reader is None:
            return
        self._stopped_readers = [*(other for other in self._stopped_readers if not other.is_closed), reader]
        if not self.closed:
            self.thread.run(reader.stop())

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return the next message of a queue, None if there is none now."""
        exchange_reader = self._process_queues.get(queue)
        source = exchange_reader.source if exchange_reader is not None else self._reader(queue).source
        deadline = time.monotonic() + GET_S_MAX
        while (delivery := source.take()) is None and (left := deadline - time.monotonic()) > 0:
            self._inbox.raise_error()
            self._inbox.clear()
            if not len(source):
                self._inbox.wait(left)
        if delivery is None:
            return None
        self._keep_lease(queue, delivery, no_ack=no_ack)
        return self.Message(delivery.payload, channel=self)

    def deliver_next(self) -> bool:
        """Give the worker one message, of the queues in turn. Returns False if there is none that it may get."""
        queues = self._active_queues
        for step in range(len(queues)):
            index = (self._turn + step) % len(queues)
            queue = queues[index]
            delivery = self._take(queue)
            if delivery is not None:
                self._turn = index + 1
                self._keep_lease(queue, delivery, no_ack=queue in self._unacknowledged_tags)
                self.connection._deliver(delivery.payload, queue)
                return True
        return False

    def _take(self, queue: str) -> Delivery | None:
        exchange_reader = self._process_queues.get(queue)
        if exchange_reader is not None:
            return exchange_reader.source.take()
        reader = self._readers.get(queue)
        return reader.source.take() if reader is not None and self.qos.can_consume() else None

    def _keep_lease(self, queue: str, delivery: Delivery, *, no_ack: bool) -> None:
        if delivery.leased is None:
            return
        reader = self._readers[queue]
        if no_ack:
            reader.accept(delivery.leased)
        else:
            self.qos.add(delivery.payload["properties"]["delivery_tag"], reader, delivery.leased)

    def close(self) -> None:
        """Send acknowledgements, release the other tasks, stop reading."""
        if self.closed:
            return
        thread: ClientThread | None = self.connection.thread_or_none
        options, has_failed = self.connection.client_options, self.connection.has_failed
        ended = [self._remove_process_queue(queue) for queue in self._process_queues.leave(self.channel_id)]
        consumed, stopped = list(self._readers.values()), self._stopped_readers
        self._readers, self._stopped_readers = {}, []
        super().close()
        readers: list[QueueReader | ExchangeReader] = [reader for reader in ended if reader is not None]
        if has_failed and thread is not None and thread.is_of_this_process:
            self._keep_leases(thread)
            for reader in consumed:
                keep_reader(options, reader)
            for reader in stopped:
                reader.end()
        else:
            readers += [*consumed, *stopped]
        if thread is not None:
            close_readers(thread, readers)

    def _keep_leases(self, thread: ClientThread) -> None:
        """Give the readers back what the worker has not started; it can still acknowledge the other tasks."""
        for reader, messages in self.qos.take_all_but(running_tags()).items():
            thread.run(reader.put_back(messages))


def close_readers(thread: ClientThread, readers: Iterable[QueueReader | ExchangeReader]) -> None:
    """Close readers, unless they are those of a parent process."""
    if not thread.is_of_this_process:
        return
    for reader in readers:
        try:
            thread.run(reader.close(), CLOSE_S_MAX)
        except MansioError as error:
            logger.warning("closed before everything was acknowledged: %s", error)


def revoked_task_ids(message: dict[str, Any]) -> list[str]:
    """Return the tasks that a control command revokes; empty for other commands."""
    try:
        command = loads(message["body"])
        if command["method"] != "revoke":
            return []
        given = command["arguments"]["task_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    found = [given] if isinstance(given, str) else given
    return [one for one in found if isinstance(one, str)] if isinstance(found, list | tuple) else []


def _naive_timezone() -> tzinfo:
    """Return the time zone of an eta without one: that of the application, if the publisher has one."""
    from celery import current_app  # takes a moment to import, and few messages have an eta

    found: tzinfo = current_app.timezone
    return found
