"""A metadata store and a topic service on an event loop of the test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mansio.broker.topics.topics import TopicService
from mansio.config.settings import Settings
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostRandom
from mansio.host.threads import BackgroundThread
from mansio.metadata.image import MetadataImage
from mansio.metadata.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import Topic

DEADLINE_SECONDS = 20


@asynccontextmanager
async def sqlite_store(path: str = ":memory:", **options: Any) -> AsyncIterator[SqliteStore]:
    """An open store, closed at the end."""
    scheduler = AsyncioScheduler(asyncio.get_running_loop())
    background = BackgroundThread(scheduler.call_from_thread)
    try:
        store = SqliteStore.open(path, background, scheduler.promise, **options)
        try:
            yield store
        finally:
            await store.close()
    finally:
        background.close()


@dataclass
class Host:
    """Stands for the broker's partitions: a dictionary of directories. `fail` raises when partitions are opened."""

    directories: dict[str, int] = field(default_factory=dict)
    fail: Exception | None = None
    gate: asyncio.Event | None = None

    async def open_partitions(self, topic: Topic) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise self.fail
        self.directories[str(topic.topic_id)] = len(topic.partitions)

    async def close_partitions(self, topic: Topic) -> None:
        self.directories.pop(str(topic.topic_id), None)


@dataclass
class Admin:
    """Everything a `TopicService` needs, running."""

    topics: TopicService
    state: MetadataImage
    store: MetadataStore
    host: Host
    scheduler: AsyncioScheduler


@asynccontextmanager
async def topic_admin(
    store: MetadataStore, *, host: Host | None = None, settings: Settings | None = None
) -> AsyncIterator[Admin]:
    """A running `TopicService` over `store`, recovered; stopped at the end."""
    scheduler = AsyncioScheduler(asyncio.get_running_loop())
    host = host or Host()
    settings = settings or Settings()
    state = await MetadataImage.load(store, settings.cluster_id, HostRandom())
    state.start(store, scheduler)
    await asyncio.sleep(0)  # a task that is cancelled before its first step leaves a coroutine that never ran
    topics = TopicService(
        store=store,
        state=state,
        settings=settings,
        scheduler=scheduler,
        random=HostRandom(),
        open_partitions=host.open_partitions,
        close_partitions=host.close_partitions,
    )
    try:
        await topics.recover()
        yield Admin(topics, state, store, host, scheduler)
    finally:
        state.stop()
        await scheduler.close()
