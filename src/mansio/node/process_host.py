"""Host of a broker process: the implementations of `mansio.ports` on the operating system, and the metadata file.

`BrokerHost` is what `Broker` needs of a host; a test broker has another one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from mansio.broker.maintenance.data_dir_mode import SINGLE_NODE_FILE_NAME
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock, HostRandom, boot_id, processor_s
from mansio.host.disk import HostDisk
from mansio.host.host_ports import HostPorts
from mansio.host.threads import BackgroundThread
from mansio.host.worker_process import WorkerProcess
from mansio.metadata.sqlite.store import SqliteStore
from mansio.node import schema_process, search_process
from mansio.ports import complete_from
from mansio.tracebacks import result_of

if TYPE_CHECKING:
    import asyncio
    from contextlib import AsyncExitStack

    from mansio.config.settings import Settings
    from mansio.metadata.metadata_store import BeforeCommit, MetadataStore


class BrokerHost(Protocol):
    """The host of one broker."""

    @property
    def ports(self) -> HostPorts: ...

    async def open_store(self, settings: Settings, before_commit: BeforeCommit) -> MetadataStore:
        """Open the metadata store of a single node. `before_commit` is called with the operations of each transaction
        before it is committed, on the thread that commits; with its `OSError` the transaction fails."""

    async def close_scheduler(self) -> None:
        """Cancel the coroutines of `ports.scheduler` that still run, and wait until they have ended."""


class ProcessHost:
    """Host of a broker on the operating system; `stack` closes its disk and its threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stack: AsyncExitStack) -> None:
        self._scheduler = AsyncioScheduler(loop)
        disk = HostDisk()
        stack.callback(disk.close)
        searches = WorkerProcess(search_process.COMMAND, "search")
        stack.push_async_callback(searches.close)
        schemas = WorkerProcess(schema_process.COMMAND, "schema")
        stack.push_async_callback(schemas.close)
        self.ports = HostPorts(
            disk,
            HostClock(),
            HostRandom(),
            self._scheduler,
            sync_thread=self._start_thread(stack, "mansio-sync"),
            file_thread=self._start_thread(stack, "mansio-files"),
            compaction_thread=self._start_thread(stack, "mansio-compaction"),
            verification_thread=self._start_thread(stack, "mansio-verify"),
            batch_thread=self._start_thread(stack, "mansio-batches"),
            request_thread=self._start_thread(stack, "mansio-requests"),
            password_thread=self._start_thread(stack, "mansio-passwords"),
            boot_id=boot_id(),
            file_worker=searches,
            schema_worker=schemas,
            processor_s=processor_s,
        )

    async def open_store(self, settings: Settings, before_commit: BeforeCommit) -> MetadataStore:
        """Open the metadata file on a thread, because flushes of a new file, or reading an existing one, take time."""
        scheduler, thread = self._scheduler, self.ports.file_thread
        promise = scheduler.promise()

        path = f"{settings.data_dir}/{SINGLE_NODE_FILE_NAME}"
        thread.submit(
            partial(SqliteStore.open, path, thread, scheduler.promise, before_commit=before_commit),
            partial(complete_from, promise),
        )
        store: SqliteStore = await result_of(promise)
        return store

    async def close_scheduler(self) -> None:
        await self._scheduler.close()

    def _start_thread(self, stack: AsyncExitStack, name: str) -> BackgroundThread:
        thread = BackgroundThread(self._scheduler.call_from_thread, name=name)
        stack.callback(thread.close)
        return thread
