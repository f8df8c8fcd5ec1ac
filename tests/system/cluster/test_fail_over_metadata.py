"""Broker lifecycle and controller with a real etcd and real time: a broker dies, a broker stops, leaderships move."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from mansio.broker.topics.topics import NewTopic, TopicService
from mansio.config.settings import Settings
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata.broker_lifecycle import BrokerLifecycle
from mansio.metadata.controller.controller import Controller
from mansio.metadata.etcd.config import EtcdConfig
from mansio.metadata.etcd.lease import ThreadKeepAlive
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.image import MetadataImage
from mansio.node.lease_keep_alive import LeaseKeepAlive
from support.etcd import one_etcd
from support.listeners import broker_state
from support.machine import scaled
from support.metadata import Host

if TYPE_CHECKING:
    from collections.abc import Callable

TTL_S = 4
DEADLINE_S = 60


class Member:
    """One broker, as far as metadata goes."""

    def __init__(self, node_id: int, config: EtcdConfig) -> None:
        self.node_id = node_id
        self.config = config
        self.scheduler = AsyncioScheduler(asyncio.get_running_loop())

    async def start(self) -> Member:
        random, clock = HostRandom(), HostClock()
        self.store = await EtcdStore.open(self.config, random)
        self.state = await MetadataImage.load(self.store, "", random)
        self.state.start(self.store, self.scheduler, shared=True)
        shared: dict[str, Any] = {
            "store": self.store,
            "state": self.state,
            "scheduler": self.scheduler,
            "random": random,
        }
        self.membership = BrokerLifecycle(
            **shared,
            leases=self.store.leases,
            clock=clock,
            node_id=self.node_id,
            ttl_s=TTL_S,
            endpoints=broker_state(self.node_id, "127.0.0.1", 9000 + self.node_id, None, 0).endpoints,
            rack=None,
        )
        self.controller = Controller(
            **shared,
            clock=clock,
            node_id=self.node_id,
            session=lambda: self.membership.session,
            ttl_s=TTL_S,
        )
        self.host = Host()
        self.topics = TopicService(
            **shared,
            settings=Settings(node_id=self.node_id, etcd_endpoints=self.config.endpoints[0]),
            open_partitions=self.host.open_partitions,
            close_partitions=self.host.close_partitions,
            broker_epoch=lambda: self.membership.epoch,
        )
        self.keep_alive = LeaseKeepAlive(
            keep_alive_once=ThreadKeepAlive(self.config).keep_alive_once,
            current_session=lambda: self.membership.session_to_renew,
            on_session_end=self.membership.end_session,
            clock=clock,
            scheduler=self.scheduler,
            ttl_s=TTL_S,
        )
        self.keep_alive.start()
        self.controller.start()
        await self.membership.register()
        return self

    async def kill(self) -> None:
        """Nothing is sent to any client."""
        self.controller.stop()
        self.keep_alive.stop()
        self.state.stop()
        await self.scheduler.close()
        await self.store.close()


async def until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    async with asyncio.timeout(scaled(DEADLINE_S)):
        while not condition():  # noqa: ASYNC110 - etcd makes it true
            await asyncio.sleep(0.01)
    return time.monotonic() - began


def test_leaderships_of_a_dead_broker_and_of_one_that_stops_move_on() -> None:
    async def main(url: str) -> None:
        config = EtcdConfig.create([url])
        async with AsyncExitStack() as stack:
            members = await asyncio.gather(*(Member(node_id, config).start() for node_id in (1, 2, 3)))
            for member in members:
                stack.push_async_callback(member.kill)
            assert len({member.state.cluster_id for member in members}) == 1, "they began together"
            first, second, third = members
            await until(lambda: all(len(member.state.brokers) == 3 for member in members))
            await first.topics.create(NewTopic("t", 300, 3))
            await until(lambda: "t" in second.state.topics)
            await asyncio.sleep(TTL_S)
            assert all(member.membership.is_session_valid() for member in members), "the thread keeps them"
            partitions = second.state.topics["t"].partitions
            assert {one.leader for one in partitions} == {1, 2, 3}

            await third.kill()
            await until(lambda: 3 not in second.state.brokers)
            moved_s = await until(
                lambda: all(
                    3 not in one.isr and one.leader != 3 for one in second.state.topics["t"].partitions
                )
            )
            assert moved_s < scaled(15)

            assert await first.membership.transfer_leaderships(5000) == 0
            assert all(one.leader == 2 for one in first.state.topics["t"].partitions)
            await first.membership.leave()
            gone_s = await until(lambda: 1 not in second.state.brokers)
            assert gone_s < TTL_S, "a session that is given back is not waited for"
            await until(lambda: second.controller.is_active)
            await until(lambda: all(one.isr == (2,) for one in second.state.topics["t"].partitions))

    with one_etcd() as etcd:
        asyncio.run(main(etcd.url))
