"""Asyncio client: publishes, consumes and administers.

    async with mansio.connect("127.0.0.1:9092") as client:
        await client.publish("greetings", b"hello", key=b"world")
        async for message in client.consume("greetings", max_records=1):
            ...

Closing the client closes the producers, consumers and receivers that it created. `mansio.client.blocking` is the
variant for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from mansio.client.admin.admin import Admin
from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX
from mansio.client.consumer.consumer import Consumer, ConsumerOptions
from mansio.client.group.classic_member import GroupOptions
from mansio.client.producer.producer import Producer, ProducerOptions
from mansio.client.share.leased import ReceiveOptions
from mansio.client.share.receiver import Receiver
from mansio.client.transactions.processor import Processor
from mansio.client.transactions.transaction import Transaction
from mansio.client.transactions.transactional_producer import TransactionalProducer
from mansio.client.types import TopicPartition
from mansio.errors import ConfigError
from mansio.net.addresses import default_bootstrap_servers, parse_addresses
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.net.contexts import resolve_security
from mansio.telemetry.switch import client_telemetry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime, timedelta
    from types import TracebackType

    from mansio.client.consumer.consumer import RebalanceCallback, UnreadableCallback
    from mansio.client.producer.accumulator import Delivery
    from mansio.client.transactions.processor import ProcessHandler
    from mansio.client.types import HeadersLike, Publishable, RecordMetadata, StartAt
    from mansio.net.token_credentials import TokenProvider
    from mansio.telemetry.client_telemetry import ClientTelemetry


def connect(
    bootstrap_servers: str | Iterable[str] | None = None,
    *,
    client_id: str = "mansio",
    producer: ProducerOptions | None = None,
    connect_timeout_ms: float = 10_000,
    request_timeout_ms: float = 30_000,
    tls: bool | str | ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    mechanism: str | None = None,
    token: str | TokenProvider | None = None,
    token_endpoint: str | None = None,
    token_scope: str | None = None,
    api_key: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    delegation_token: bool = False,
    tracing: bool | None = None,
) -> Client:
    """Create a client of the cluster that any of the `bootstrap_servers` addresses (`host:port`) belongs to.

    None: the addresses in the environment variable MANSIO_BOOTSTRAP_SERVERS, else `127.0.0.1:9092`. Use it as
    `async with connect(...) as client`. `producer`: options of `client.publish`.
    `tls`: True encrypts the connections and verifies the brokers' certificates with the authorities of the system, the
    name of a file with those in it (PEM), a context as it says; False does not encrypt.
    `user`, `password`: log in with `mechanism`: SCRAM-SHA-256 (the default), SCRAM-SHA-512, or PLAIN, which sends the
    password itself to the broker and so needs TLS to keep it secret.
    `delegation_token`: user and password are `token_id` and `password` of a `DelegationToken`, with whose owner's
    rights the client acts.
    `token`: log in with a token of the identity provider that the broker trusts (OAUTHBEARER): the token, or a function
    (async or not) that returns one which is valid now. It is called for each connection, and again before its session
    ends. With `token_endpoint`, mechanism OAUTHBEARER, the endpoint at this URL issues tokens for `user` and
    `password`, which are the id and the secret of the client there, and for `token_scope`. `api_key`: log in with an
    API key. Tokens and API keys, like passwords of PLAIN, need TLS or a broker on this machine. `certificate`, `key`:
    files with a certificate of the client and its key (PEM). Each of these that is None is taken from the environment
    (MANSIO_TLS, MANSIO_USER, MANSIO_PASSWORD, MANSIO_MECHANISM, MANSIO_TOKEN, MANSIO_TOKEN_ENDPOINT,
    MANSIO_TOKEN_SCOPE, MANSIO_API_KEY, MANSIO_CERTIFICATE, MANSIO_KEY), else from the context of `mansio context` for
    these addresses.
    `tracing`: True makes spans and metrics of OpenTelemetry for publishing, receiving, handlers and acknowledgements
    with the providers that the program has set before, and adds the context of a sampled span to the headers of
    published records. None: if the environment variable MANSIO_TRACING is `true`.

    Raises `ConfigError` for an invalid address or setting, and `MissingExtra` if tracing is asked for and OpenTelemetry
    is not installed. Entering the client raises `ConnectionLost` if no broker
    answers in time, and `AuthenticationFailed`: `TlsFailed` says what is wrong with the certificate, its name or the
    port, `SaslAuthenticationFailed` that the user or the password is wrong.
    """
    if bootstrap_servers is None:
        bootstrap_servers = default_bootstrap_servers()
    elif not isinstance(bootstrap_servers, str):
        bootstrap_servers = list(bootstrap_servers)  # it is read twice
    own_context = tls if isinstance(tls, ssl.SSLContext) else None
    if own_context is not None and (certificate or key):
        raise ConfigError("load certificate and key into the context that is given as tls")
    security = resolve_security(
        bootstrap_servers,
        {
            "tls": tls if own_context is None else True,
            "user": user,
            "password": password,
            "mechanism": mechanism,
            "token": token if isinstance(token, str) else None,
            "token_provider": None if isinstance(token, str) else token,
            "token_endpoint": token_endpoint,
            "token_scope": token_scope,
            "api_key": api_key,
            "certificate": certificate,
            "key": key,
            "delegation_token": delegation_token or None,
        },
    )
    options = ConnectionOptions(
        client_id=client_id,
        connect_timeout_ms=connect_timeout_ms,
        request_timeout_ms=request_timeout_ms,
        tls=own_context or security.tls_context(),
        sasl=security.credentials(),
    )
    telemetry = client_telemetry(tracing, client_id=client_id, server=parse_addresses(bootstrap_servers)[0])
    return Client(Cluster(bootstrap_servers, options=options), producer=producer, telemetry=telemetry)


class Client:
    """A connected client; see `connect`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        producer: ProducerOptions | None = None,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        """`cluster` is closed with the client. `producer`: options of the producer of `publish`. `telemetry`: None if
        the client is not traced."""
        self._cluster = cluster
        self._telemetry = telemetry
        self._producer_options = producer
        self._producer: Producer | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._receivers: list[Receiver] = []
        self._transactional_producers: dict[str, TransactionalProducer] = {}
        self.admin: Admin = Admin(self._cluster)
        """Administration of the cluster."""

    async def __aenter__(self) -> Self:
        try:
            await self._cluster.start()
        except BaseException:
            await self._cluster.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(flush=error is None)

    async def close(self, *, flush: bool = True) -> None:
        """Close consumers and receivers, flush and close producers, abort open transactions, close the connections."""
        try:
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
            await asyncio.gather(*(receiver.close() for receiver in self._receivers))
            await asyncio.gather(*(producer.close(flush=flush) for producer in self._producers))
            await asyncio.gather(*(one.close() for one in self._transactional_producers.values()))
        finally:
            await self._cluster.close()

    # -- publishing --------

    async def publish(
        self,
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
        """Publish one record and wait until it is acknowledged; see `Producer.publish`."""
        producer = self._producer or self._default_producer()
        return await producer.publish(
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

    def _publish_nowait(
        self,
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
    ) -> Delivery | None:
        """`publish` for the blocking client; see `Producer._publish_nowait`."""
        return self._default_producer()._publish_nowait(
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

    async def publish_many(
        self,
        topic: str,
        records: Iterable[Publishable],
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
    ) -> list[RecordMetadata]:
        """Publish values in order and wait until all are acknowledged; see `Producer.publish_many`."""
        return await self._default_producer().publish_many(topic, records, delay=delay, at=at)

    async def flush(self) -> None:
        """Wait until everything published so far is acknowledged or has failed."""
        await asyncio.gather(*(producer.flush() for producer in self._producers))

    def producer(self, options: ProducerOptions | None = None) -> Producer:
        """Create a producer with its own acks, codec and batching. It is closed with the client, or before."""
        return self._new_producer(options, self._telemetry)

    def _new_producer(self, options: ProducerOptions | None, telemetry: ClientTelemetry | None) -> Producer:
        """Create a producer. The transport of Celery traces the one for tasks only."""
        producer = Producer(self._cluster, options, telemetry=telemetry)
        self._producers = [*(other for other in self._producers if not other.is_closed), producer]
        return producer

    def _default_producer(self) -> Producer:
        if self._producer is None:
            self._producer = self.producer(self._producer_options)
        return self._producer

    # -- transactions --------

    def transaction(self, transactional_id: str, *, timeout_ms: int = 60_000) -> Transaction:
        """Return a transaction for an `async with` block: its records, and offsets of consumers, become visible
        together when the block ends, or not at all after an exception (KIP-98).

        Records that `publish` of the client or another producer sends in the block are not part of it.
        `transactional_id`: the name of this producer through restarts. One transaction per id is open at a time. If
        another client begins a transaction with the id, it takes over: the open transaction is aborted, and this client
        gets `ProducerFenced` from then on.
        `timeout_ms`: time after which the coordinator aborts a transaction that was not ended (the broker's
        `transaction_max_timeout_ms` is the upper limit).

        Raises `InvalidRequest` for an empty id. Entering the block raises `InvalidTxnState` if another transaction of
        the id is open in this client, `InvalidTransactionTimeout`, `ProducerFenced`. Leaving it raises the first error
        of a record, `TransactionAbortable`, `TransactionTimedOut` or `ProducerFenced`, after which the transaction is
        aborted, and `TransactionOutcomeUnknown` if the coordinator did not answer within the delivery timeout: the
        transaction is then committed or aborted as a whole. The next transaction is possible after all of them except
        `ProducerFenced`. If leaving the block is cancelled, a commit that was requested already may still succeed.
        Readers see a committed transaction as soon as its markers are written, shortly after the block.
        """
        known = self._transactional_producers.get(transactional_id)
        if known is None:
            options = self._producer_options or ProducerOptions()
            known = TransactionalProducer(self._cluster, transactional_id, options, telemetry=self._telemetry)
            self._transactional_producers[transactional_id] = known
        return Transaction(known, timeout_ms)

    async def process(
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
        """Process messages exactly once: call `handler(messages)`, publish the records that it returns or yields, and
        commit the offsets of the messages in the same transaction, one for each call of the handler.

        `consumer`: has a group, `auto_commit=False` and `isolation="read_committed"`; this method alone reads it.
        `handler`: gets a list of messages in the order of each partition, and returns or yields records to publish (or
        nothing): a record for the topic `to`, or a pair (topic, record). It may be a coroutine function or a generator.
        After an abort it is called again with the same messages, so its other effects may occur more than once.
        `transactional_id`: of this worker; two workers of a group have different ones.
        `records_max`, `wait_ms_max`: a transaction takes messages until it has so many, or so much time has passed
        since the first one. It may get more by one stored batch. `timeout_ms`: see `transaction`.

        First aborts what an earlier process with the id has left open, and fences that process. If the group rebalances
        during a transaction, or a broker fails, the transaction is aborted and the consumer returns to the committed
        offsets; records of partitions that other members took over are not published. Returns the number of messages in
        committed transactions when the consumer reaches its end (`to_end`, `to_time`) or is closed; otherwise runs
        until it is cancelled. A batch that cannot be read ends it, after the messages before it were processed,
        each time it runs, unless the consumer has another `on_unreadable`. Raises what the handler raised,
        `ProducerFenced`, and errors that would come again, after an abort.
        """
        processor = Processor(
            consumer,
            handler,
            partial(self.transaction, transactional_id, timeout_ms=timeout_ms),
            to=to,
            records_max=records_max,
            wait_ms_max=wait_ms_max,
        )
        return await processor.run()

    # -- consuming --------

    def consume(
        self,
        sources: str | TopicPartition | Iterable[str | TopicPartition],
        *,
        group: str | None = None,
        start: StartAt | Mapping[TopicPartition, int] | None = None,
        from_: StartAt | Mapping[TopicPartition, int] = "earliest",
        to_time: datetime | int | None = None,
        to_end: bool = False,
        max_records: int | None = None,
        auto_commit: bool | None = None,
        auto_commit_interval_ms: float = 5_000,
        instance_id: str | None = None,
        group_protocol: Literal["consumer", "classic"] = "consumer",
        session_timeout_ms: int = 45_000,
        heartbeat_interval_ms: int = 3_000,
        rebalance_timeout_ms: int = 60_000,
        poll_interval_ms_max: int = 300_000,
        metadata_interval_ms: int = 30_000,
        revoke_timeout_ms: float = 3_000,
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        on_out_of_range: Literal["earliest", "latest", "error"] = "earliest",
        rack: str = "",
        on_unreadable: Literal["error", "skip"] | UnreadableCallback = "error",
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
        fetch_wait_ms_max: int = 500,
        prefetch_bytes_max: int = 32 << 20,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        unknown_topic_ms_max: float = 30_000,
    ) -> Consumer:
        """Read topics, or assigned partitions (`TopicPartition`). Iterate the result, or use its `poll` or `batches`.

        `sources`: in a group, a text that begins with `^` is a regular expression (RE2) that must match the whole topic
        name; topics created later are included. Raises `InvalidRegularExpression` for an invalid one,
        `UnsupportedVersion` if the broker does not support regular expressions.
        `group`: the consumer group, whose members divide the partitions and which stores the offsets. Without a group
        all partitions are read and nothing is committed. With assigned partitions the group only stores offsets.
        `group_protocol`: with "consumer" the broker assigns the partitions, and those that stay with a member are read
        without interruption during a rebalance (KIP-848); if the broker does not support it, the classic protocol is
        used. With "classic" the members compute the assignment. During a migration a group may have members of both.
        `start`: start position (in a group: of partitions without a committed offset): "earliest" (the default),
        "latest", an offset, a datetime, or a mapping of partitions to offsets. `from_` is an older name of it, which is
        ignored if `start` is given.
        `to_time` (a datetime, or ms since the Unix epoch), `to_end`, `max_records`: end the iteration before the first
        record at or after that time, at the current end, after that many records.
        `auto_commit` (None: enabled with a group): commit processed messages every `auto_commit_interval_ms`, before a
        rebalance and on close; never the current message. A consumer that reaches its end then commits and leaves the
        group; with False it keeps its partitions until it is closed, so that `commit()` works after the loop.
        `session_timeout_ms`: time without a heartbeat after which a member, such as a killed process, loses its
        partitions to others. With the protocol "consumer" it is a setting of the whole group,
        `consumer.session.timeout.ms`: another value than the default is stored there before the consumer joins.
        `heartbeat_interval_ms`: classic groups only; otherwise the group's `consumer.heartbeat.interval.ms` applies
        (`admin.alter_group_config`).
        `rebalance_timeout_ms`: time limit for revoking partitions, after which the member is removed from the group.
        `metadata_interval_ms`: interval for detecting new partitions (where the broker does not).
        `revoke_timeout_ms`: how long a revocation waits until the application has processed the current message.
        `poll_interval_ms_max`: a member whose application does not ask for messages for this long leaves the group, and
        joins it again at the next request for messages (Kafka's `max.poll.interval.ms`).
        `on_out_of_range`: where to continue if the position is below or above the log, because records were deleted or
        truncated: "earliest", "latest", or "error", which raises `OffsetOutOfRange`.
        `rack`: that of the consumer (Kafka's `client.rack`). Where brokers have `replica_selector=rack`, partitions are
        read from an in-sync replica in this rack, if there is one (KIP-392).
        `on_unreadable`: what to do with a stored batch that cannot be read, because its content is invalid or larger
        than `batch_bytes_max`. The readable records before it are returned in any case. "error": raise
        `UnreadableRecords`, which has the partition, the offsets and the reason, once; the next request for messages
        continues behind them, and `commit()` or that request counts them as processed. "skip": log a warning and
        continue. A function is called (or awaited) with the error, and reading continues.
        `instance_id`: static membership (KIP-345). `on_assigned`, `on_revoked`: called (or awaited) with the list of
        partitions that the member got, or has to give up and can still commit.
        `on_lost`: as `on_revoked`, but other members may read the partitions already, so that commits fail (None:
        `on_revoked` is called). `batch_bytes_max`: a batch that is larger than this when decompressed is
        unreadable. `unknown_topic_ms_max`: how long a topic may be unknown to the cluster, with retries, before
        the consumer raises `UnknownTopicOrPartition`. Members of a group wait without limit, as other Kafka clients do:
        the topic may be created again, and the group decides the assignment.
        """
        given = [sources] if isinstance(sources, str | TopicPartition) else list(sources)
        options = ConsumerOptions(
            group=group,
            from_=from_ if start is None else start,
            to_time=to_time,
            to_end=to_end,
            max_records=max_records,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            revoke_timeout_ms=revoke_timeout_ms,
            isolation=isolation,
            on_out_of_range=on_out_of_range,
            rack=rack,
            on_unreadable=on_unreadable,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_lost=on_lost,
            fetch_wait_ms_max=fetch_wait_ms_max,
            prefetch_bytes_max=prefetch_bytes_max,
            batch_bytes_max=batch_bytes_max,
            unknown_topic_ms_max=unknown_topic_ms_max,
            group_options=GroupOptions(
                session_timeout_ms=session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                heartbeat_interval_ms=heartbeat_interval_ms,
                poll_interval_ms_max=poll_interval_ms_max,
                metadata_interval_ms=metadata_interval_ms,
                instance_id=instance_id,
                protocol=group_protocol,
            ),
        )
        consumer = Consumer(self._cluster, given, options, telemetry=self._telemetry)
        self._consumers = [*(other for other in self._consumers if not other.is_closed), consumer]
        return consumer

    def receive(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        max_records: int = 500,
        auto_extend: bool = True,
        extend_max_ms: float = 600_000,
        fetch_wait_ms_max: int = 500,
        prefetch_bytes_max: int = 32 << 20,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        lease_ms: int | None = None,
        keeps_leases: bool = False,
        prefetch: int | None = None,
    ) -> Receiver:
        """Acquire records of topics as a member of a share group (KIP-932): each record is delivered to one member at a
        time, is acknowledged individually (`ack`, `retry`, `reject`), and is delivered again if it is not. Iterate the
        result, or use its `poll` or `run`.

        A new group starts at the end, unless its setting `share.auto.offset.reset` differs.
        `max_records`: limit on the records this member has acquired, prefetched or being processed. A member that
        acknowledges none gets no more until leases expire.
        `auto_extend`: extend leases when half of their duration (`share.record.lock.duration.ms`) has passed, both of
        prefetched records and of records being processed, each for at most `extend_max_ms`; then they expire.
        `fetch_wait_ms_max`: how long a broker holds a fetch until records are available.
        `prefetch_bytes_max`: no fetch is sent while this much is buffered. `batch_bytes_max`: a batch that is larger
        than this when decompressed is unreadable. The records of a batch that cannot be read are rejected, with the
        reason, and a warning is logged; the readable ones before them, and all other records, are delivered.
        `lease_ms`: duration of the leases, up to 12 hours, instead of the group's; only with Mansio's brokers, others
        raise `UnsupportedVersion`. Raises `ValueError` for another duration.
        `keeps_leases`: leases outlive a lost connection, so that no other member receives a record that this one is
        still processing; they are extended over the next connection. The records of a member that crashed then wait
        for the end of their leases. Kafka's brokers release them when the connection ends.
        `prefetch`: number of records that are acquired before the application asks for them, None for as many as
        `max_records` allows. With 0 a record is acquired only for a call that waits for it, or for a free place of
        `run`; other members get the others. A record for a call that was cancelled is returned by the next one. Several
        brokers are then asked one after the other: if none has records, one that comes may wait for
        `fetch_wait_ms_max`.
        """
        options = ReceiveOptions(
            group=group,
            max_records=max_records,
            auto_extend=auto_extend,
            extend_max_ms=extend_max_ms,
            fetch_wait_ms_max=fetch_wait_ms_max,
            prefetch_bytes_max=prefetch_bytes_max,
            batch_bytes_max=batch_bytes_max,
            lease_ms=lease_ms,
            keeps_leases=keeps_leases,
            prefetch=prefetch,
        )
        receiver = Receiver(self._cluster, topics, options, telemetry=self._telemetry)
        self._receivers = [*(other for other in self._receivers if not other.is_closed), receiver]
        return receiver
