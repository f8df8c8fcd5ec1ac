"""Metadata store of a cluster: `MetadataStore` on etcd.

Invariants:
* Reads are linearizable.
* A transaction in progress is completed even if its caller is cancelled.
* A listing is of one revision, even if it takes several responses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRequest, Unavailable
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.client import EtcdClient
from mansio.metadata.etcd.lease import EtcdLeases
from mansio.metadata.etcd.messages import RANGE, TXN, decode_entry, encode_transaction, prefix_range
from mansio.metadata.etcd.watch import EVENTS_MAX, Watch
from mansio.metadata.metadata_store import (
    Compare,
    Delete,
    Entry,
    Event,
    Listing,
    Put,
    RevisionCompacted,
    TransactionResult,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from mansio.metadata.etcd.config import EtcdConfig
    from mansio.metadata.metadata_store import BeforeCommit
    from mansio.ports import Random

OPERATIONS_MAX: Final = 128
"""etcd's default limit (`--max-txn-ops`), which applies to conditions and to operations."""
LIST_PAGE_KEYS: Final = 1000
LIST_ATTEMPTS_MAX: Final = 5


class EtcdStore:
    """`MetadataStore` on etcd. `open` creates it."""

    def __init__(self, client: EtcdClient, random: Random, watch_events_max: int) -> None:
        self.client = client
        self.leases = EtcdLeases(client)
        self._random = random
        self._watch_events_max = watch_events_max
        self._watches: set[Watch] = set()
        self._transactions: set[asyncio.Task[rpc.TxnResponse]] = set()
        self._closed = False
        self._before_commit: BeforeCommit | None = None

    @classmethod
    async def open(
        cls, config: EtcdConfig, random: Random, *, watch_events_max: int = EVENTS_MAX
    ) -> EtcdStore:
        """Connect, and check every endpoint that responds. `random` randomizes the pauses between attempts.

        `watch_events_max` is the queue size of a watch. Raises `ConfigError` if an endpoint cannot store metadata or
        denies access, `Unavailable` if no endpoint responds.
        """
        return cls(await EtcdClient.open(config, random), random, watch_events_max)

    @property
    def operations_max(self) -> int:
        return OPERATIONS_MAX

    def check_before_commit(self, check: BeforeCommit) -> None:
        """Call `check` with the operations of each transaction from now on; if it raises, nothing is changed."""
        self._before_commit = check

    async def get(self, key: str) -> Entry | None:
        answer = await self._range(rpc.RangeRequest(key=key.encode()))
        return decode_entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        for _ in range(LIST_ATTEMPTS_MAX):
            try:
                return await self._list(prefix)
            except RevisionCompacted:  # between two pages the revision of the first one was compacted
                continue
        raise Unavailable(f"etcd compacts revisions faster than {prefix} can be listed")

    async def _list(self, prefix: str) -> Listing:
        begin, end = prefix_range(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            answer = await self._range(
                rpc.RangeRequest(key=begin, range_end=end, limit=LIST_PAGE_KEYS, revision=revision)
            )
            entries += [decode_entry(found) for found in answer.kvs]
            revision = revision or answer.header.revision
            if not answer.more:
                return Listing(revision, entries)
            begin = answer.kvs[-1].key + b"\0"

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        if len({operation.key for operation in operations}) != len(operations):
            raise InvalidRequest("two operations of a transaction have the same key")
        request = encode_transaction(compares, operations)
        if max(len(request.compare), len(operations)) > OPERATIONS_MAX:
            raise InvalidRequest(f"more than {OPERATIONS_MAX} conditions or operations in a transaction")
        if self._before_commit is not None:
            self._before_commit(operations)
        self._check_open()
        work = self.client.call(TXN, request, repeatable=not operations)
        task = asyncio.create_task(work, name="etcd transaction")
        self._transactions.add(task)
        task.add_done_callback(self._on_transaction_done)
        answer = await asyncio.shield(task)
        return TransactionResult(answer.succeeded, answer.header.revision)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        if self._closed:
            return
        watch = Watch(self.client, self._random, prefix, from_revision, self._watch_events_max)
        self._watches.add(watch)
        batches = watch.batches()
        try:
            async for batch in batches:
                yield batch
        finally:
            self._watches.discard(watch)
            await batches.aclose()

    async def close(self) -> None:
        """End all watches, wait for transactions in progress, and close the connections. Idempotent."""
        self._closed = True
        for watch in self._watches:
            watch.stop()
        if self._transactions:
            await asyncio.wait(self._transactions)
        await self.client.close()

    async def _range(self, request: rpc.RangeRequest) -> rpc.RangeResponse:
        self._check_open()
        return await self.client.call(RANGE, request)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the metadata store is closed")

    def _on_transaction_done(self, task: asyncio.Task[rpc.TxnResponse]) -> None:
        self._transactions.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here in case the caller was cancelled
