"""The asyncio client: one object to publish, consume and administer.

    async with mansio.connect("127.0.0.1:9092") as client:
        await client.publish("greetings", b"hello", key=b"world")
        async for message in client.consume("greetings", max_records=1):
            ...

Owns the cluster connection and whatever was made from it: closing the client closes its producers and consumers.
The blocking twin is `mansio.client.blocking`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, Self

from mansio.client.admin.admin import Admin
from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX
from mansio.client.consumer.consumer import Consumer
from mansio.client.consumer.consumer_options import ConsumerOptions
from mansio.client.group.classic_member import GroupOptions
from mansio.client.producer.producer import Producer, ProducerOptions
from mansio.client.share.leased import ReceiveOptions
from mansio.client.share.receiver import Receiver
from mansio.client.types import TopicPartition
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

    from mansio.client.consumer.consumer_options import RebalanceCallback
    from mansio.client.producer.accumulator import Delivery
    from mansio.client.producer.serialization import HeadersLike, Publishable
    from mansio.client.types import RecordMetadata, StartAt

DEFAULT_ADDRESS = "127.0.0.1:9092"


def connect(
    bootstrap_servers: str | Iterable[str] = DEFAULT_ADDRESS,
    *,
    client_id: str = "mansio",
    producer: ProducerOptions | None = None,
    connect_timeout_ms: float = 10_000,
    request_timeout_ms: float = 30_000,
    tls: ssl.SSLContext | None = None,
) -> Client:
    """A client of the cluster that any of the `bootstrap_servers` addresses (`host:port`) belongs to.

    Use it as `async with connect(...) as client`. `producer` says how `client.publish` publishes. `ConfigError` for a
    text that is no address.
    """
    options = ConnectionOptions(
        client_id=client_id,
        connect_timeout_ms=connect_timeout_ms,
        request_timeout_ms=request_timeout_ms,
        tls=tls,
    )
    return Client(bootstrap_servers, options=options, producer=producer)


class Client:
    """A connected client; see `connect`."""

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str],
        *,
        options: ConnectionOptions,
        producer: ProducerOptions | None = None,
    ) -> None:
        self._cluster = Cluster(bootstrap_servers, options=options)
        self._producer_options = producer
        self._producer: Producer | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._receivers: list[Receiver] = []
        self.admin = Admin(self._cluster)

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
        """Close consumers and receivers, flush and close producers, close the connections."""
        try:
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
            await asyncio.gather(*(receiver.close() for receiver in self._receivers))
            await asyncio.gather(*(producer.close(flush=flush) for producer in self._producers))
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
    ) -> RecordMetadata:
        """Publish one record and wait until it is acknowledged; see `Producer.publish`."""
        return await self._default_producer().publish(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def publish_nowait(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
    ) -> Delivery | None:
        """`publish` for the blocking twin; see `Producer.publish_nowait`."""
        return self._default_producer().publish_nowait(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    async def publish_many(self, topic: str, records: Iterable[Publishable]) -> list[RecordMetadata]:
        """Publish values in order and wait until all are acknowledged; see `Producer.publish_many`."""
        return await self._default_producer().publish_many(topic, records)

    async def flush(self) -> None:
        """Wait until everything published so far is acknowledged or has failed."""
        await asyncio.gather(*(producer.flush() for producer in self._producers))

    def producer(self, options: ProducerOptions | None = None) -> Producer:
        """A producer of its own: another setting of acks, codec, batching. Closed with the client, or before."""
        producer = Producer(self._cluster, options)
        self._producers = [*(other for other in self._producers if not other.is_closed), producer]
        return producer

    def _default_producer(self) -> Producer:
        if self._producer is None:
            self._producer = self.producer(self._producer_options)
        return self._producer

    # -- consuming --------

    def consume(
        self,
        sources: str | TopicPartition | Iterable[str | TopicPartition],
        *,
        group: str | None = None,
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
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
        fetch_wait_ms_max: int = 500,
        prefetch_bytes_max: int = 32 << 20,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        unknown_topic_ms_max: float = 30_000,
    ) -> Consumer:
        """Read topics, or chosen partitions (`TopicPartition`). Iterate the result, or use its `poll`/`batches`.

        `sources`: in a group, a text that begins with `^` is a regular expression (RE2) which has to match the whole
        name of a topic; topics that come later are read, too. `InvalidRegularExpression` for one that is none,
        `UnsupportedVersion` where the broker cannot tell what it matches.
        `group`: share the topics' partitions with the other members, and keep offsets under this name. Without one,
        all partitions are read and nothing is committed. With chosen partitions the group only keeps the offsets.
        `group_protocol`: with "consumer" the broker assigns the partitions, and those that stay with a member are read
        without a pause while others move (KIP-848); a broker that does not offer it gets a classic member. With
        "classic" the members share the partitions out themselves. A group may have members of both for a while.
        `from_`: where to begin (in a group: where nothing was committed yet): "earliest", "latest", an offset, a
        datetime, or a mapping of partitions to offsets.
        `to_time`, `to_end`, `max_records`: end the iteration before the first record of that time, at the end as it
        is now, after so many records.
        `auto_commit` (None: yes with a group): commit what is done with, every `auto_commit_interval_ms`, before a
        rebalance and on close; never the message in hand. A consumer that comes to the end asked for then commits and
        leaves the group by itself; with False it keeps its partitions until it is closed, so that `commit()` after the
        loop works.
        `session_timeout_ms`, `heartbeat_interval_ms`: of members of a classic group. Otherwise the group's own settings
        hold, `consumer.session.timeout.ms` and `consumer.heartbeat.interval.ms` (`admin.alter_group_config`).
        `rebalance_timeout_ms`: how long this member may take to give partitions up before it is put out.
        `metadata_interval_ms`: how often to look for partitions that were added (where the broker does not).
        `instance_id`: static membership (KIP-345). `on_assigned`, `on_revoked`, `on_lost`: called (or awaited) with a
        list of partitions. `batch_bytes_max`: a batch that becomes larger than this when it is decompressed is
        refused with `InvalidRecord`.
        `unknown_topic_ms_max`: how long a topic that is being read may be unknown to the cluster, asked anew all the
        time, before the reading raises `UnknownTopicOrPartition`. A member of a group waits on, as other Kafka clients
        do: its topic may come back, and what it reads is the group's to say.
        """
        given = [sources] if isinstance(sources, str | TopicPartition) else list(sources)
        options = ConsumerOptions(
            group=group,
            from_=from_,
            to_time=to_time,
            to_end=to_end,
            max_records=max_records,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            revoke_timeout_ms=revoke_timeout_ms,
            isolation=isolation,
            on_out_of_range=on_out_of_range,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_lost=on_lost,
            fetch_wait_ms_max=fetch_wait_ms_max,
            prefetch_bytes_max=prefetch_bytes_max,
            batch_bytes_max=batch_bytes_max,
            unknown_topic_ms_max=unknown_topic_ms_max,
            membership=GroupOptions(
                session_timeout_ms=session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                heartbeat_interval_ms=heartbeat_interval_ms,
                poll_interval_ms_max=poll_interval_ms_max,
                metadata_interval_ms=metadata_interval_ms,
                instance_id=instance_id,
                protocol=group_protocol,
            ),
        )
        consumer = Consumer(self._cluster, given, options)
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
    ) -> Receiver:
        """Take records of topics on lease, as a member of a share group (KIP-932): each record goes to one member at a
        time, is settled by itself (`ack`, `retry`, `reject`), and comes again if it is not. Iterate the result, or use
        its `poll` or `run`.

        A group that is new begins at the end, unless its setting `share.auto.offset.reset` says otherwise.
        `max_records`: what this member has on lease at a time, fetched ahead or in work. Whoever settles nothing gets
        nothing more, until leases end.
        `auto_extend`: leases are extended when half of their time (`share.record.lock.duration.ms`) is over, while a
        record waits here and while the application has it, each for `extend_max_ms` at most; then they end.
        `fetch_wait_ms_max`: how long a broker waits for records before it answers that there are none.
        `prefetch_bytes_max`: nothing more is fetched while so much waits to be handed out. `batch_bytes_max`: a batch
        that becomes larger than this when it is decompressed is given back, with `InvalidRecord`.
        """
        options = ReceiveOptions(
            group=group,
            max_records=max_records,
            auto_extend=auto_extend,
            extend_max_ms=extend_max_ms,
            fetch_wait_ms_max=fetch_wait_ms_max,
            prefetch_bytes_max=prefetch_bytes_max,
            batch_bytes_max=batch_bytes_max,
        )
        receiver = Receiver(self._cluster, topics, options)
        self._receivers = [*(other for other in self._receivers if not other.is_closed), receiver]
        return receiver
