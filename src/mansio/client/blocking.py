"""Blocking client: the API of the asyncio client for programs without an event loop.

    with mansio.blocking.connect("127.0.0.1:9092") as client:
        client.publish("greetings", b"hello", key=b"world")
        for message in client.consume("greetings", max_records=1):
            ...

Every client runs one event loop in one thread; its methods are derived from those of the asyncio client (see
`mansio.net.blocking`). Callbacks are called on that thread and must not call the client.

Invariants:
* Names, parameters and meanings are those of the asyncio client.
* Objects may be shared between threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, cast

from mansio.client import client as asyncio_client
from mansio.client.admin import acls as asyncio_acls
from mansio.client.admin import admin as asyncio_admin
from mansio.client.admin import cluster as asyncio_cluster
from mansio.client.admin import delays as asyncio_delays
from mansio.client.admin import quotas as asyncio_quotas
from mansio.client.admin import schedules as asyncio_schedules
from mansio.client.admin import schemas as asyncio_schemas
from mansio.client.admin import shares as asyncio_shares
from mansio.client.admin import tokens as asyncio_tokens
from mansio.client.admin import traces as asyncio_traces
from mansio.client.admin import transactions as asyncio_transactions
from mansio.client.admin import users as asyncio_users
from mansio.client.consumer import consumer as asyncio_consumer
from mansio.client.producer import producer as asyncio_producer
from mansio.client.share import receiver_blocking
from mansio.client.transactions import transaction as asyncio_transaction
from mansio.client.types import Message, Publishable
from mansio.errors import MansioError
from mansio.net.blocking import (
    BlockingProxy,
    LoopThread,
    PendingCall,
    blocking,
    blocking_function,
    blocking_iterator,
)
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Any

    from mansio.client.consumer.fetcher import PartitionState
    from mansio.client.producer.accumulator import Delivery as AsyncDelivery
    from mansio.client.share import receiver as asyncio_receive
    from mansio.client.types import HeadersLike, RecordMetadata, TopicPartition

P = ParamSpec("P")

PUBLISH_WINDOW_RECORDS = 10_000
"""Records that `publish_many` takes from its iterable at a time."""


class QuotaAdmin(BlockingProxy[asyncio_quotas.QuotaAdmin]):
    """Quotas of one cluster; available as `client.admin.quotas`."""

    list = blocking(asyncio_quotas.QuotaAdmin.list)
    set = blocking(asyncio_quotas.QuotaAdmin.set)
    delete = blocking(asyncio_quotas.QuotaAdmin.delete)


class UserAdmin(BlockingProxy[asyncio_users.UserAdmin]):
    """Users of one cluster; available as `client.admin.users`."""

    list = blocking(asyncio_users.UserAdmin.list)
    create = blocking(asyncio_users.UserAdmin.create)
    delete = blocking(asyncio_users.UserAdmin.delete)
    set_password = blocking(asyncio_users.UserAdmin.set_password)
    create_sqs_key = blocking(asyncio_users.UserAdmin.create_sqs_key)
    list_sqs_keys = blocking(asyncio_users.UserAdmin.list_sqs_keys)
    delete_sqs_key = blocking(asyncio_users.UserAdmin.delete_sqs_key)
    create_api_key = blocking(asyncio_users.UserAdmin.create_api_key)
    list_api_keys = blocking(asyncio_users.UserAdmin.list_api_keys)
    delete_api_key = blocking(asyncio_users.UserAdmin.delete_api_key)


class TokenAdmin(BlockingProxy[asyncio_tokens.TokenAdmin]):
    """Delegation tokens of one cluster; available as `client.admin.tokens`."""

    create = blocking(asyncio_tokens.TokenAdmin.create)
    renew = blocking(asyncio_tokens.TokenAdmin.renew)
    expire = blocking(asyncio_tokens.TokenAdmin.expire)
    list = blocking(asyncio_tokens.TokenAdmin.list)


class AclAdmin(BlockingProxy[asyncio_acls.AclAdmin]):
    """Access control lists of one cluster; available as `client.admin.acls`."""

    list = blocking(asyncio_acls.AclAdmin.list)
    create = blocking(asyncio_acls.AclAdmin.create)
    delete = blocking(asyncio_acls.AclAdmin.delete)
    check = blocking(asyncio_acls.AclAdmin.check)


class ShareAdmin(BlockingProxy[asyncio_shares.ShareAdmin]):
    """Share groups of one cluster; available as `client.admin.shares`."""

    describe = blocking(asyncio_shares.ShareAdmin.describe)
    offsets = blocking(asyncio_shares.ShareAdmin.offsets)
    alter_offsets = blocking(asyncio_shares.ShareAdmin.alter_offsets)
    delete_offsets = blocking(asyncio_shares.ShareAdmin.delete_offsets)
    leases = blocking(asyncio_shares.ShareAdmin.leases)
    redrive = blocking(asyncio_shares.ShareAdmin.redrive)


class SchemaAdmin(BlockingProxy[asyncio_schemas.SchemaAdmin]):
    """The schema registry of one cluster; available as `client.admin.schemas`."""

    register = blocking(asyncio_schemas.SchemaAdmin.register)
    look_up = blocking(asyncio_schemas.SchemaAdmin.look_up)
    check = blocking(asyncio_schemas.SchemaAdmin.check)
    subjects = blocking(asyncio_schemas.SchemaAdmin.subjects)
    versions = blocking(asyncio_schemas.SchemaAdmin.versions)
    version = blocking(asyncio_schemas.SchemaAdmin.version)
    by_id = blocking(asyncio_schemas.SchemaAdmin.by_id)
    by_guid = blocking(asyncio_schemas.SchemaAdmin.by_guid)
    uses = blocking(asyncio_schemas.SchemaAdmin.uses)
    delete = blocking(asyncio_schemas.SchemaAdmin.delete)
    compatibility = blocking(asyncio_schemas.SchemaAdmin.compatibility)
    set_compatibility = blocking(asyncio_schemas.SchemaAdmin.set_compatibility)
    request = blocking(asyncio_schemas.SchemaAdmin.request)


class TraceAdmin(BlockingProxy[asyncio_traces.TraceAdmin]):
    """The history of the records of one cluster; available as `client.admin.traces`."""

    record = blocking(asyncio_traces.TraceAdmin.record)
    last_failed = blocking(asyncio_traces.TraceAdmin.last_failed)
    find = blocking_iterator(asyncio_traces.TraceAdmin.find)
    search = blocking_iterator(asyncio_traces.TraceAdmin.search)


class DelayAdmin(BlockingProxy[asyncio_delays.DelayAdmin]):
    """Delayed records of one cluster that are pending; available as `client.admin.delays`."""

    counts = blocking(asyncio_delays.DelayAdmin.counts)
    list = blocking(asyncio_delays.DelayAdmin.list)
    describe = blocking(asyncio_delays.DelayAdmin.describe)
    cancel = blocking(asyncio_delays.DelayAdmin.cancel)
    reschedule = blocking(asyncio_delays.DelayAdmin.reschedule)
    deliver_now = blocking(asyncio_delays.DelayAdmin.deliver_now)


class ScheduleAdmin(BlockingProxy[asyncio_schedules.ScheduleAdmin]):
    """Recurring schedules of one cluster; available as `client.admin.schedules`."""

    create = blocking(asyncio_schedules.ScheduleAdmin.create)
    list = blocking(asyncio_schedules.ScheduleAdmin.list)
    describe = blocking(asyncio_schedules.ScheduleAdmin.describe)
    pause = blocking(asyncio_schedules.ScheduleAdmin.pause)
    resume = blocking(asyncio_schedules.ScheduleAdmin.resume)
    delete = blocking(asyncio_schedules.ScheduleAdmin.delete)


class TransactionAdmin(BlockingProxy[asyncio_transactions.TransactionAdmin]):
    """Transactions of one cluster; available as `client.admin.transactions`."""

    list = blocking(asyncio_transactions.TransactionAdmin.list)
    describe = blocking(asyncio_transactions.TransactionAdmin.describe)
    describe_producers = blocking(asyncio_transactions.TransactionAdmin.describe_producers)
    find_hanging = blocking(asyncio_transactions.TransactionAdmin.find_hanging)
    abort = blocking(asyncio_transactions.TransactionAdmin.abort)
    terminate = blocking(asyncio_transactions.TransactionAdmin.terminate)


class ClusterAdmin(BlockingProxy[asyncio_cluster.ClusterAdmin]):
    """The state of one cluster, elections and reassignments in it; available as `client.admin.cluster`."""

    status = blocking(asyncio_cluster.ClusterAdmin.status)
    health = blocking(asyncio_cluster.ClusterAdmin.health)
    features = blocking(asyncio_cluster.ClusterAdmin.features)
    host_labels = blocking(asyncio_cluster.ClusterAdmin.host_labels)
    raise_feature_level = blocking(asyncio_cluster.ClusterAdmin.raise_feature_level)
    partitions = blocking(asyncio_cluster.ClusterAdmin.partitions)
    hot_partitions = blocking(asyncio_cluster.ClusterAdmin.hot_partitions)
    elect_leaders = blocking(asyncio_cluster.ClusterAdmin.elect_leaders)
    log_dirs = blocking(asyncio_cluster.ClusterAdmin.log_dirs)
    alter_reassignments = blocking(asyncio_cluster.ClusterAdmin.alter_reassignments)
    unregister = blocking(asyncio_cluster.ClusterAdmin.unregister)
    list_reassignments = blocking(asyncio_cluster.ClusterAdmin.list_reassignments)


class Admin(BlockingProxy[asyncio_admin.Admin]):
    """Administration of one cluster; available as `client.admin`."""

    def __init__(self, thread: LoopThread, original: asyncio_admin.Admin) -> None:
        super().__init__(thread, original)
        self.quotas: QuotaAdmin = QuotaAdmin(thread, original.quotas)
        """Client quotas."""
        self.users: UserAdmin = UserAdmin(thread, original.users)
        """Users that authenticate with a password."""
        self.acls: AclAdmin = AclAdmin(thread, original.acls)
        """Access control lists: what users may do."""
        self.tokens: TokenAdmin = TokenAdmin(thread, original.tokens)
        """Delegation tokens."""
        self.cluster: ClusterAdmin = ClusterAdmin(thread, original.cluster)
        """State of the cluster, and elections."""
        self.shares: ShareAdmin = ShareAdmin(thread, original.shares)
        """Share groups."""
        self.schemas: SchemaAdmin = SchemaAdmin(thread, original.schemas)
        """The schema registry."""
        self.traces: TraceAdmin = TraceAdmin(thread, original.traces)
        """The history of records."""
        self.delays: DelayAdmin = DelayAdmin(thread, original.delays)
        """Delayed records that are pending."""
        self.schedules: ScheduleAdmin = ScheduleAdmin(thread, original.schedules)
        """Recurring schedules."""
        self.transactions: TransactionAdmin = TransactionAdmin(thread, original.transactions)
        """Transactions of producers with a transactional id."""

    describe_cluster = blocking(asyncio_admin.Admin.describe_cluster)
    list_topics = blocking(asyncio_admin.Admin.list_topics)
    describe_topic = blocking(asyncio_admin.Admin.describe_topic)
    describe_topics = blocking(asyncio_admin.Admin.describe_topics)
    create_topic = blocking(asyncio_admin.Admin.create_topic)
    delete_topic = blocking(asyncio_admin.Admin.delete_topic)
    create_partitions = blocking(asyncio_admin.Admin.create_partitions)
    delete_records = blocking(asyncio_admin.Admin.delete_records)
    describe_config = blocking(asyncio_admin.Admin.describe_config)
    alter_broker_config = blocking(asyncio_admin.Admin.alter_broker_config)
    alter_topic_config = blocking(asyncio_admin.Admin.alter_topic_config)
    alter_group_config = blocking(asyncio_admin.Admin.alter_group_config)
    list_offsets = blocking(asyncio_admin.Admin.list_offsets)
    group_offsets = blocking(asyncio_admin.Admin.group_offsets)
    group_lag = blocking(asyncio_admin.Admin.group_lag)
    reset_offsets = blocking(asyncio_admin.Admin.reset_offsets)
    delete_offsets = blocking(asyncio_admin.Admin.delete_offsets)
    list_groups = blocking(asyncio_admin.Admin.list_groups)
    describe_group = blocking(asyncio_admin.Admin.describe_group)
    explain_group = blocking(asyncio_admin.Admin.explain_group)
    delete_group = blocking(asyncio_admin.Admin.delete_group)


class Delivery(BlockingProxy["AsyncDelivery"]):
    """Future result of one published record."""

    def done(self) -> bool:
        """Whether the result is known."""
        return self._original.done()

    def result(self) -> RecordMetadata:
        """Wait for the result. Raises the record's typed error."""
        return self._thread.run(_awaited(self._original))


def _delivering(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncDelivery]],
) -> Callable[Concatenate[Any, P], Delivery]:
    send = blocking(method)

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], /, *args: P.args, **kwargs: P.kwargs) -> Delivery:
        return Delivery(self._thread, send(self, *args, **kwargs))

    return call


class _PublishWaiter:
    """Waiter of one publish call of a thread; it needs neither a task nor a future on the loop."""

    __slots__ = ("_call", "_delivery")

    def __init__(self, call: PendingCall[RecordMetadata], delivery: AsyncDelivery) -> None:
        self._call = call
        self._delivery = delivery

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._call.done()

    def set_result(self, _: None, /) -> None:
        """Handle a batch that was completed or split."""
        if not self._delivery.done():
            self._call.complete_with_task(asyncio.get_running_loop().create_task(_awaited(self._delivery)))
            return
        try:
            stored = self._delivery.result()
        except MansioError as error:
            self._call.set_exception(copied(error))
        else:
            self._call.set_result(stored)


def _publishing(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, RecordMetadata]],
    publish_nowait: Callable[Concatenate[Any, P], AsyncDelivery | None],
) -> Callable[Concatenate[Any, P], RecordMetadata]:
    """Blocking variant of `publish`. A call that has to wait for metadata or buffer space runs as a task, like every
    other method. Its parameters are written out, so that a wrong one is an error of the public method."""
    publish: Callable[..., Coroutine[Any, Any, RecordMetadata]] = method
    attempt: Callable[..., AsyncDelivery | None] = publish_nowait

    @functools.wraps(method)
    def call(
        self: BlockingProxy[Any],
        /,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        dedup_id: bytes | str | None = None,
        priority: str | None = None,
    ) -> RecordMetadata:
        def begin(outcome: PendingCall[RecordMetadata]) -> None:
            delivery = attempt(
                self._original,
                topic,
                value,
                key=key,
                headers=headers,
                partition=partition,
                timestamp_ms=timestamp_ms,
                delay=delay,
                at=at,
                dedup_id=dedup_id,
                priority=priority,
            )
            if delivery is None:
                work = publish(
                    self._original,
                    topic,
                    value,
                    key=key,
                    headers=headers,
                    partition=partition,
                    timestamp_ms=timestamp_ms,
                    delay=delay,
                    at=at,
                    dedup_id=dedup_id,
                    priority=priority,
                )
                outcome.complete_with_task(asyncio.get_running_loop().create_task(work))
                return
            publishing = _PublishWaiter(outcome, delivery)
            if delivery.done():
                publishing.set_result(None)
            else:
                delivery._add_waiter(publishing)

        return self._thread.call(begin)

    return cast("Callable[Concatenate[Any, P], RecordMetadata]", call)


class Producer(BlockingProxy[asyncio_producer.Producer]):
    """Publishes to any topic of one cluster. Use as `with`, or call `close()`."""

    publish = _publishing(asyncio_producer.Producer.publish, asyncio_producer.Producer._publish_nowait)
    send = _delivering(asyncio_producer.Producer.send)
    flush = blocking(asyncio_producer.Producer.flush)
    close = blocking(asyncio_producer.Producer.close)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._original.is_closed

    @property
    def buffered_bytes(self) -> int:
        """Approximate size of the records that are not acknowledged yet, in bytes."""
        return self._original.buffered_bytes

    def publish_many(
        self,
        topic: str,
        records: Iterable[Publishable],
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
    ) -> list[RecordMetadata]:
        """Publish values in order and wait until all are acknowledged; see the asyncio client."""
        publish = functools.partial(self._original.publish_many, delay=delay, at=at)
        return _publish_windows(self._thread, publish, topic, records)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(flush=error is None)


class Consumer(BlockingProxy[asyncio_consumer.Consumer]):
    """Made by `Client.consume`. Iterate it, or use `poll`/`batches`; close it by `with` or `close()`."""

    def __init__(self, thread: LoopThread, original: asyncio_consumer.Consumer) -> None:
        super().__init__(thread, original)
        self._messages: list[Message] = []
        self._index = 0
        self._state: PartitionState | None = None
        original._set_delivered_counter(lambda: self._index)

    start = blocking(asyncio_consumer.Consumer.start)
    close = blocking(asyncio_consumer.Consumer.close)
    commit = blocking(asyncio_consumer.Consumer.commit)
    positions = blocking_function(asyncio_consumer.Consumer.positions)
    assignment = blocking_function(asyncio_consumer.Consumer.assignment)
    lag = blocking_function(asyncio_consumer.Consumer.lag)
    pause = blocking_function(asyncio_consumer.Consumer.pause)
    resume = blocking_function(asyncio_consumer.Consumer.resume)

    @functools.wraps(asyncio_consumer.Consumer.seek_to_committed)
    def seek_to_committed(self) -> None:
        self._thread.run(self._original.seek_to_committed())
        self._drop_inactive()

    @contextlib.contextmanager
    def _lent_to_loop(self) -> Iterator[None]:
        """Let the loop read the messages of the consumer, within the block."""
        self._messages, self._index = [], 0
        self._original._set_delivered_counter(None)
        try:
            yield
        finally:
            self._original._set_delivered_counter(lambda: self._index)

    @functools.wraps(asyncio_consumer.Consumer.seek)
    def seek(self, *args: Any, **kwargs: Any) -> None:  # wraps
        self._thread.run(self._original.seek(*args, **kwargs))
        self._drop_inactive()

    def _drop_inactive(self) -> None:
        if self._state is not None and not self._state.is_active:
            self._messages, self._index = [], 0

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed: by `close`, or with `auto_commit` by itself at the requested end."""
        return self._original.is_closed

    @property
    def is_finished(self) -> bool:
        """Whether the requested end was reached."""
        return self._original.is_finished

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        index = self._index
        if index < len(self._messages) and (self._state is None or self._state.is_active):
            self._index = index + 1
            return self._messages[index]
        if not self._take(None):
            raise StopIteration
        self._index = 1
        return self._messages[0]

    def poll(self, timeout_ms: float | None = None) -> list[Message]:
        """The next batch of messages; empty if none arrived within the time or the end was reached."""
        messages = self._messages[self._index :]
        if not messages or (self._state is not None and not self._state.is_active):
            messages = self._take(timeout_ms)
        self._index = len(self._messages)
        return messages

    def batches(self) -> Iterator[list[Message]]:
        """Messages in their stored batches."""
        while batch := self.poll():
            yield batch

    def _take(self, timeout_ms: float | None) -> list[Message]:
        messages, state = self._thread.run(self._original._poll_with_state(timeout_ms))
        self._messages, self._index, self._state = messages, 0, state
        return messages

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._original.__aexit__(kind, error, trace))


def _consuming(
    method: Callable[Concatenate[asyncio_client.Client, P], asyncio_consumer.Consumer],
) -> Callable[Concatenate[Any, P], Consumer]:
    make = blocking_function(method)

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Consumer:
        return Consumer(self._thread, make(self, *args, **kwargs))

    return call


def _producing(
    method: Callable[Concatenate[asyncio_client.Client, P], asyncio_producer.Producer],
) -> Callable[Concatenate[Any, P], Producer]:
    make = blocking_function(method)

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Producer:
        return Producer(self._thread, make(self, *args, **kwargs))

    return call


def _receiving(
    method: Callable[Concatenate[asyncio_client.Client, P], asyncio_receive.Receiver],
) -> Callable[Concatenate[Any, P], receiver_blocking.Receiver]:
    make = blocking_function(method)

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> receiver_blocking.Receiver:
        return receiver_blocking.Receiver(self._thread, make(self, *args, **kwargs))

    return call


class Transaction(BlockingProxy[asyncio_transaction.Transaction]):
    """One transaction, made by `Client.transaction`; use it by `with`. See `mansio.Transaction`."""

    publish = _delivering(asyncio_transaction.Transaction.publish)

    def publish_many(self, topic: str, records: Iterable[Publishable]) -> None:
        """Publish values (or `OutgoingRecord`s) in order in the transaction, as `publish` does."""
        given = iter(records)
        while window := list(islice(given, PUBLISH_WINDOW_RECORDS)):
            self._thread.run(self._original.publish_many(topic, window))

    def send_offsets(self, consumer: Consumer, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit offsets of the consumer's group together with the records; see the asyncio client."""
        self._thread.run(self._original.send_offsets(consumer._original, offsets))

    def __enter__(self) -> Self:
        self._thread.run(self._original.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._original.__aexit__(kind, error, trace))


ProcessHandler = Callable[[list[Message]], Iterable[Publishable | tuple[str, Publishable]] | None]
"""Function that `Client.process` calls with messages, on a thread of its own; it returns or yields the records to
publish."""


def _beginning(
    method: Callable[Concatenate[asyncio_client.Client, P], asyncio_transaction.Transaction],
) -> Callable[Concatenate[Any, P], Transaction]:
    make = blocking_function(method)

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Transaction:
        return Transaction(self._thread, make(self, *args, **kwargs))

    return call


class Client(BlockingProxy[asyncio_client.Client]):
    """A connected client; see `connect`."""

    def __init__(self, thread: LoopThread, original: asyncio_client.Client) -> None:
        super().__init__(thread, original)
        self.admin: Admin = Admin(thread, original.admin)
        """Administration of the cluster."""

    publish = _publishing(asyncio_client.Client.publish, asyncio_client.Client._publish_nowait)
    flush = blocking(asyncio_client.Client.flush)
    producer = _producing(asyncio_client.Client.producer)
    consume = _consuming(asyncio_client.Client.consume)
    receive = _receiving(asyncio_client.Client.receive)
    transaction = _beginning(asyncio_client.Client.transaction)

    def process(
        self,
        consumer: Consumer,
        handler: ProcessHandler,
        *,
        transactional_id: str,
        to: str | None = None,
        records_max: int = 500,
        wait_ms_max: float = 100,
        timeout_ms: int = 60_000,
    ) -> int:
        """Process messages exactly once: call `handler(messages)` and publish the records that it returns or yields;
        see the asyncio client. The handler is called on another thread."""
        with_thread = ThreadPoolExecutor(1, thread_name_prefix="mansio-handler")

        async def call(messages: list[Message]) -> list[Publishable | tuple[str, Publishable]]:
            return await asyncio.get_running_loop().run_in_executor(
                with_thread, lambda: list(handler(messages) or ())
            )

        try:
            with consumer._lent_to_loop():
                return self._thread.run(
                    self._original.process(
                        consumer._original,
                        call,
                        transactional_id=transactional_id,
                        to=to,
                        records_max=records_max,
                        wait_ms_max=wait_ms_max,
                        timeout_ms=timeout_ms,
                    )
                )
        finally:
            with_thread.shutdown(wait=False, cancel_futures=True)

    def publish_many(
        self,
        topic: str,
        records: Iterable[Publishable],
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
    ) -> list[RecordMetadata]:
        """Publish values in order and wait until all are acknowledged; see the asyncio client."""
        publish = functools.partial(self._original.publish_many, delay=delay, at=at)
        return _publish_windows(self._thread, publish, topic, records)

    def close(self, *, flush: bool = True) -> None:
        """Close consumers, flush and close producers, close the connections, end the thread. A second call has no
        effect."""
        if self._thread.is_closed:
            return
        try:
            self._thread.run(self._original.close(flush=flush))
        finally:
            self._thread.close()

    def _close_when_dropped(self) -> Callable[[], None]:
        """Close this client when nothing refers to it or to an object that it made. Returns a function that closes it
        now."""
        return self._thread.close_when_dropped(self._original.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(flush=error is None)


def _connecting(make: Callable[P, asyncio_client.Client]) -> Callable[P, Client]:
    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Client:
        thread = LoopThread()
        try:
            return Client(thread, thread.run(_connected(make, *args, **kwargs)))
        except BaseException:
            thread.close()
            raise

    return call


async def _connected(
    make: Callable[P, asyncio_client.Client], *args: P.args, **kwargs: P.kwargs
) -> asyncio_client.Client:
    return await make(*args, **kwargs).__aenter__()


async def _awaited(delivery: AsyncDelivery) -> RecordMetadata:
    return await delivery


def _publish_windows(
    thread: LoopThread,
    publish_many: Callable[[str, Iterable[Publishable]], Coroutine[Any, Any, list[RecordMetadata]]],
    topic: str,
    records: Iterable[Publishable],
) -> list[RecordMetadata]:
    """Iterates on the caller's thread: the iterable may block, and must not block the loop."""
    given = iter(records)
    stored: list[RecordMetadata] = []
    while window := list(islice(given, PUBLISH_WINDOW_RECORDS)):
        stored += thread.run(publish_many(topic, window))
    return stored


connect = _connecting(asyncio_client.connect)
"""Blocking variant of `mansio.connect`; connected when it returns."""
