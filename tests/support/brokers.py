"""Brokers of one cluster on virtual time, as far as metadata goes: the shipped view, membership, controller and topics
over one store in memory. A broker's partitions are a dictionary (`support.metadata.Host`)."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from mansio.broker.topics.topics import NewTopic, TopicService
from mansio.config.settings import Settings
from mansio.errors import ConfigError, Unavailable
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.metadata.broker_lifecycle import BrokerLifecycle
from mansio.metadata.controller.controller import Controller
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import LeaseExpired
from mansio.metadata.session import RENEW_FRACTION
from mansio.testing.metadata import InMemoryStore, InMemoryStoreClient
from support.listeners import broker_state
from support.metadata import Host
from support.virtual_time import SeededRandom, VirtualClock, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from mansio.metadata.model import PartitionState, Topic

TTL_S = 6.0
CLUSTER_ID = "cluster-under-test"


class Cluster:
    """The store, and the brokers by number. Made and used on a running `VirtualLoop`."""

    def __init__(self, *, balance_interval_ms: int = 60_000) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.scheduler = AsyncioScheduler(loop)
        self.store = InMemoryStore(self.clock, self.scheduler)
        self.balance_interval_ms = balance_interval_ms
        self.seeds = itertools.count(1)
        self.brokers: dict[int, Member] = {}
        self.racks: dict[int, str] = {}

    async def start(self, *node_ids: int) -> None:
        for node_id in node_ids:
            await self.start_one(node_id)

    async def start_one(self, node_id: int, *, lost: tuple[tuple[UUID, int], ...] = ()) -> Member:
        member = self.brokers[node_id] = Member(self, node_id, lost)
        await member.start()
        return member

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, condition: Callable[..., bool], *, within_s: float = 60) -> float:
        """How long it took until `condition` held."""
        began = self.loop.time()
        while not condition():
            assert self.loop.time() - began < within_s, "it did not happen in time"
            await self.sleep(0.05)
        return self.loop.time() - began

    def alive(self) -> list[Member]:
        return [member for member in self.brokers.values() if member.running]

    def controllers(self) -> list[int]:
        return [member.node_id for member in self.alive() if member.controller.is_active]

    async def stop(self) -> None:
        for member in self.alive():
            await member.kill()
        await self.scheduler.close()


class SlowHost(Host):
    """A disk takes its time, so that faults happen between two steps."""

    async def open_partitions(self, topic: Topic) -> None:
        await asyncio.sleep(0.2)
        await super().open_partitions(topic)

    async def close_partitions(self, topic: Topic) -> None:
        await asyncio.sleep(0.2)
        await super().close_partitions(topic)


class Member:
    """One run of one broker."""

    def __init__(self, cluster: Cluster, node_id: int, lost: tuple[tuple[UUID, int], ...]) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.running = False
        self.store_client: InMemoryStoreClient = cluster.store.store_client()
        self.scheduler = AsyncioScheduler(cluster.loop)
        self.random = SeededRandom(next(cluster.seeds))
        self.host = SlowHost()
        self.lost = lost
        self.keeps_alive = True
        self.other_session_s_max: float | None = None
        self.refused: ConfigError | None = None

    async def start(self) -> None:
        cluster, node_id = self.cluster, self.node_id
        self.state = await MetadataImage.load(
            self.store_client, CLUSTER_ID, self.random, has_feature_level=True
        )
        self.state.start(self.store_client, self.scheduler, shared=True)
        self.membership = BrokerLifecycle(
            store=self.store_client,
            leases=self.store_client,
            state=self.state,
            scheduler=self.scheduler,
            clock=cluster.clock,
            random=self.random,
            node_id=node_id,
            ttl_s=TTL_S,
            endpoints=broker_state(
                node_id, "127.0.0.1", 9000 + node_id, cluster.racks.get(node_id), 0
            ).endpoints,
            rack=cluster.racks.get(node_id),
            lost_logs=lambda: self.lost,
        )
        self.controller = Controller(
            store=self.store_client,
            state=self.state,
            scheduler=self.scheduler,
            clock=cluster.clock,
            random=self.random,
            node_id=node_id,
            session=lambda: self.membership.session,
            ttl_s=TTL_S,
            balance_interval_ms=cluster.balance_interval_ms,
        )
        self.topics = TopicService(
            store=self.store_client,
            state=self.state,
            settings=Settings(node_id=node_id, etcd_endpoints="http://127.0.0.1:2379"),
            scheduler=self.scheduler,
            random=self.random,
            open_partitions=self.host.open_partitions,
            close_partitions=self.host.close_partitions,
            broker_epoch=lambda: self.membership.epoch,
        )
        self.running = True
        self.scheduler.spawn(self._keep_alive(), name="keep alive")
        self.controller.start()
        self.scheduler.spawn(self._register(), name="register")

    async def _register(self) -> None:
        try:
            await self.membership.register(self.other_session_s_max)
        except Unavailable:
            return
        except ConfigError as error:
            self.refused = error

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(TTL_S * RENEW_FRACTION)
            session = self.membership.session_to_renew
            if session is None or not self.keeps_alive:
                continue
            sent_at = self.cluster.clock.monotonic()
            try:
                session.record_renewal(sent_at, await self.store_client.keep_alive_once(session.lease))
            except LeaseExpired:
                self.membership.end_session(session)
            except Unavailable:
                continue

    async def registered(self) -> Member:
        await self.cluster.until(lambda: self.membership.epoch != 0)
        return self

    async def kill(self) -> None:
        """As SIGKILL does: nothing more from it, and the lease runs on."""
        self.running = False
        self.state.stop()
        await self.scheduler.close()
        await self.store_client.close()

    async def terminate(self) -> int:
        """As SIGTERM does; the leaderships that could not be handed over."""
        left = await self.membership.transfer_leaderships(10_000)
        await self.membership.leave()
        self.controller.stop()
        await self.kill()
        return left

    async def create(self, name: str, partitions: int = 1, copies: int = -1) -> None:
        await self.topics.create(NewTopic(name, partitions, copies))

    def partition(self, name: str, index: int = 0) -> PartitionState:
        return self.state.topics[name].partitions[index]

    def partitions(self, name: str) -> tuple[PartitionState, ...]:
        return self.state.topics[name].partitions
