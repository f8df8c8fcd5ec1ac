"""User service of a cluster without a broker, for users that have to exist before the first broker listens."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from mansio.broker.services.authorization import Authorization
from mansio.broker.services.users import UserService
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock, HostRandom
from mansio.host.threads import BackgroundThread
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.feature_level import check_operations
from mansio.metadata.image import MetadataImage
from mansio.node.etcd_settings import etcd_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mansio.config.settings import Settings


@asynccontextmanager
async def open_cluster_users(settings: Settings) -> AsyncIterator[UserService]:
    """Open etcd as a broker with `settings` does, create the cluster if etcd has none, and yield its user service.

    Raises `ConfigError`, and `Unavailable` if etcd does not respond.
    """
    random = HostRandom()
    async with AsyncExitStack() as stack:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        stack.push_async_callback(scheduler.close)
        store = await EtcdStore.open(etcd_config(settings), random)
        stack.push_async_callback(store.close)
        state = await MetadataImage.load(store, settings.cluster_id, random, has_feature_level=True)
        store.check_before_commit(lambda operations: check_operations(state.feature_level, operations))
        state.start(store, scheduler, shared=True)
        stack.callback(state.stop)
        thread = BackgroundThread(scheduler.call_from_thread, name="mansio-passwords")
        stack.callback(thread.close)
        yield UserService(
            store=store,
            state=state,
            scheduler=scheduler,
            random=random,
            clock=HostClock(),
            password_thread=thread,
            authorization=Authorization(None),
        )
