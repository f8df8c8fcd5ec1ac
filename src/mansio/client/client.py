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

from mansio.link.cluster import Cluster
from mansio.link.connection import ConnectionOptions

from .admin import Admin
from .consumer import Consumer
from .consumer_options import ConsumerOptions
from .decode import BATCH_BYTES_MAX
from .membership import GroupOptions
from .producer import Producer, ProducerOptions
from .types import TopicPartition

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

    from .accumulator import Delivery
    from .consumer_options import RebalanceCallback
    from .outgoing import HeadersLike, Publishable
    from .types import RecordMetadata, StartAt

DEFAULT_ADDRESS = "127.0.0.1:9092"


def connect(
    bootstrap: str | Iterable[str] = DEFAULT_ADDRESS,
    *,
    client_id: str = "mansio",
    producer: ProducerOptions | None = None,
    connect_timeout_ms: float = 10_000,
    request_timeout_ms: float = 30_000,
    tls: ssl.SSLContext | None = None,
) -> Client:
    """A client of the cluster that any of the `bootstrap` addresses (`host:port`) belongs to.

    Use it as `async with connect(...) as client`. `producer` says how `client.publish` publishes. `ConfigError` for a
    text that is no address.
    """
    options = ConnectionOptions(
        client_id=client_id,
        connect_timeout_ms=connect_timeout_ms,
        request_timeout_ms=request_timeout_ms,
        tls=tls,
    )
    return Client(bootstrap, options=options, producer=producer)


class Client:
    """A connected client; see `connect`."""

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        options: ConnectionOptions,
        producer: ProducerOptions | None = None,
    ) -> None:
        self._cluster = Cluster(bootstrap, options=options)
        self._producer_options = producer
        self._producer: Producer | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
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
        """Close consumers, flush and close producers, close the connections."""
        try:
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
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

    def hand_over(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
    ) -> Delivery | None:
        """`publish` for the blocking twin; see `Producer.hand_over`."""
        return self._default_producer().hand_over(
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
        settle_ms_max: float = 3_000,
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
            settle_ms_max=settle_ms_max,
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
