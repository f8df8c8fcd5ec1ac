"""Leases on a real etcd: keys go with them, and a thread keeps them alive whatever the loop does."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import Unavailable
from mansio.metadata.etcd.channel import CALL_DEADLINE_S
from mansio.metadata.etcd.config import EtcdConfig
from mansio.metadata.etcd.lease import ThreadKeepAlive
from mansio.metadata.metadata_store import Compare, LeaseExpired, Put
from support.etcd import etcd_store
from support.fault_proxy import fault_proxy
from support.machine import scaled

if TYPE_CHECKING:
    from support.etcd import Etcd

DEADLINE_S = 60
CALL_S_MIN = 0.9 * CALL_DEADLINE_S
LONG_TTL_S = 6
numbers = itertools.count()


def fresh_key() -> str:
    return f"/leased/{next(numbers)}"


def test_key_goes_when_its_lease_ends_and_not_before(etcd: Etcd) -> None:
    async def main() -> None:
        key = fresh_key()
        async with etcd_store(etcd.url) as store:
            lease = await store.leases.grant(2)
            done = await store.transact([Compare(key, create_revision=0)], [Put(key, b"x", lease)])
            watch: Any = store.watch(key, done.revision + 1)
            begun = time.monotonic()
            (gone,) = await anext(watch)
            assert time.monotonic() - begun > 1.5
            assert gone.value is None
            await watch.aclose()
            with pytest.raises(LeaseExpired):
                await store.leases.keep_alive_once(lease)
            with pytest.raises(LeaseExpired):
                await store.transact([], [Put(key, b"x", lease)])
            assert await store.get(key) is None
            await store.leases.revoke(lease)  # harmless

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_thread_keeps_a_lease_while_the_loop_hangs(etcd: Etcd) -> None:
    """Both sides of gRPC in one process; a warning or a line from a thread would fail the test."""

    async def main() -> None:
        key = fresh_key()
        async with etcd_store(etcd.url) as store:
            lease = await store.leases.grant(2)
            await store.transact([], [Put(key, b"x", lease)])
            thread = ThreadKeepAlive(EtcdConfig.create([etcd.url]))
            answers = []

            def keep() -> None:
                for _ in range(12):
                    answers.append(thread.keep_alive_once(lease))
                    time.sleep(0.25)

            keeping = asyncio.get_running_loop().run_in_executor(None, keep)
            time.sleep(2.6)  # noqa: ASYNC251 - the loop hangs, that is the point
            await keeping
            assert answers == [2.0] * 12
            assert await store.get(key) is not None
            await store.leases.revoke(lease)
            with pytest.raises(LeaseExpired):
                await asyncio.to_thread(thread.keep_alive_once, lease)
            assert await store.get(key) is None
            thread.close()
            thread.close()

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_thread_leaves_a_silent_endpoint_within_the_lease(etcd: Etcd) -> None:
    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(etcd.url) as store:
            lease = await store.leases.grant(LONG_TTL_S)
            thread = ThreadKeepAlive(EtcdConfig.create([proxy.url, etcd.url]))
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == LONG_TTL_S
            assert proxy.connections == 1
            proxy.silence()
            begun = time.monotonic()
            with pytest.raises(Unavailable):
                await asyncio.to_thread(thread.keep_alive_once, lease)
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == LONG_TTL_S
            assert CALL_S_MIN < time.monotonic() - begun < LONG_TTL_S - 1
            await store.leases.revoke(lease)
            thread.close()

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
