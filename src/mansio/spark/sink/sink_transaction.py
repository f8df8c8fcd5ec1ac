"""Transactions of the sink: one for each task attempt, and the commit of all transactions of a batch by the driver.

A task attempt takes a *slot*: the transactional id `mansio-spark:QUERY:TASK:SLOT`. The slots of a query are used again
in each batch, with a later epoch, so the number of transactional ids does not grow. Attempt n of a task begins with
slot n. A slot with a prepared transaction is skipped, because that transaction may be part of the batch; an unfinished
transaction in a slot is one of an attempt that has ended or is repeated, and is aborted. When `SLOTS_MAX` slots have a
prepared one, drivers have died so often before they committed: an attempt then aborts those that are not decided.

Invariants:
* A task prepares its transaction when all its records are acknowledged. It is committed only by the driver's
  CommitBatch, with the transactions of all other tasks or not at all.
* Each open transaction of the query that is not in the driver's list is aborted with the commit of the batch.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import (
    ConcurrentTransactions,
    ConfigError,
    ConnectionLost,
    CoordinatorNotAvailable,
    InvalidTransactionTimeout,
    MansioError,
    NotCoordinator,
    RequestTimedOut,
    TransactionAbortable,
    UnsupportedVersion,
)
from mansio.net.cluster import TRANSACTION_KEY_TYPE, check_top_level_error
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.query_transactional_ids import task_transactional_id, transactional_id_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.spark.sync_client import SyncClient

CHANNEL: Final = "transactions spark"
SLOTS_MAX: Final = 64
"""Maximum number of slots of one task that may be prepared at the same time."""
END_TIMEOUT_MS: Final = 60_000
"""Time for which an end or a commit is retried."""
ABORTS_PER_REQUEST: Final = 10_000
"""Maximum number of transactions that one request names to abort them: it has to be carried out in `END_TIMEOUT_MS`,
and a broker accepts at most ten times as many."""
CONCURRENT_DESCRIBES_MAX: Final = 100
ABORT_TIMEOUT_MS: Final = 5_000
"""Time for which a task that fails tries to abort its transaction; later its timeout aborts it."""
ONGOING: Final = "Ongoing"
TRANSACTIONAL_ID_NOT_FOUND: Final = 105
NEEDS_MANSIO: Final = "the brokers do not support the commit of batches: set option exactlyOnce to false"


class ProducerEpoch(NamedTuple):
    """A transaction, as its producer names it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class SinkTransactionOptions:
    """What a task needs for its transaction. `query_id`: the query, or one call of `write`; `task`: the number of the
    task's partition; `attempt`: the number of the attempt, from 0 on; `timeout_ms`: time after which a transaction that
    is not prepared is aborted."""

    query_id: str
    task: int
    attempt: int
    timeout_ms: int


class SinkTransaction:
    """The transaction of one task attempt: `begin`, then `prepare` or `abort`."""

    def __init__(self, client: SyncClient, options: SinkTransactionOptions) -> None:
        self._client = client
        self._coordinator = _Coordinator(client)
        self._options = options
        self.producer: ProducerEpoch | None = None
        """The transaction, None before `begin`."""

    def begin(self) -> ProducerEpoch:
        """Take a slot. Raises the brokers' errors, and `ConfigError` for a timeout that the brokers refuse."""
        query_id = self._options.query_id
        found = self._take_slot()
        if found is None:
            left = self._coordinator.describe([self._name(slot) for slot in self._slots()])
            abort_batch(self._client, query_id, left)
            found = self._take_slot()
        if found is None:
            raise TransactionAbortable(
                f"task {self._options.task} has {SLOTS_MAX} prepared transactions of the query {query_id}"
            )
        self.producer = found
        return found

    def _take_slot(self) -> ProducerEpoch | None:
        """Return the producer of the first slot without a prepared transaction; None if all have one."""
        for slot in self._slots():
            found = self._coordinator.initialize(self._name(slot), self._options.timeout_ms)
            if found is not None:
                return found
        return None

    def _slots(self) -> range:
        return range(self._options.attempt, self._options.attempt + SLOTS_MAX)

    def _name(self, slot: int) -> str:
        return task_transactional_id(self._options.query_id, self._options.task, slot)

    def prepare(self) -> ProducerEpoch:
        """Let the transaction wait for the commit of its batch."""
        assert self.producer is not None, "begin comes first"
        self._coordinator.prepare(self.producer)
        return self.producer

    def abort(self) -> None:
        """Abort the transaction. If the brokers do not answer, its timeout aborts it."""
        if self.producer is not None:
            producer, self.producer = self.producer, None
            with suppress(MansioError):
                self._coordinator.end(producer, is_commit=False, timeout_ms=ABORT_TIMEOUT_MS)


class DirectTransaction:
    """Transactions of a writer without a driver, one after the other: `begin`, then `commit` or `abort`, and so on."""

    def __init__(self, client: SyncClient, transactional_id: str, timeout_ms: int) -> None:
        self._coordinator = _Coordinator(client)
        self._transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self.producer: ProducerEpoch | None = None

    def begin(self) -> ProducerEpoch:
        """Return the producer of the next transaction. The first call aborts what another process with the same
        transactional id has not committed, and fences that process.
        """
        if self.producer is None:
            self.producer = self._coordinator.initialize(
                self._transactional_id, self._timeout_ms, skips_prepared=False
            )
        assert self.producer is not None
        return self.producer

    def commit(self) -> None:
        """Commit the transaction: its records become visible together. Raises the brokers' errors."""
        assert self.producer is not None, "begin comes first"
        self.producer = self._coordinator.end(self.producer, is_commit=True)

    def abort(self) -> None:
        """As `SinkTransaction.abort`."""
        if self.producer is not None:
            producer, self.producer = self.producer, None
            with suppress(MansioError):
                self._coordinator.end(producer, is_commit=False, timeout_ms=ABORT_TIMEOUT_MS)


# -- the driver --------


def commit_batch(
    client: SyncClient,
    query_id: str,
    batch_id: int,
    transactions: Sequence[ProducerEpoch],
    abandoned: Sequence[ProducerEpoch] = (),
) -> None:
    """Commit the transactions of a batch, all or none, and abort the abandoned ones. If the batch is decided already,
    those transactions that its decision does not commit are aborted. Raises the brokers' errors."""
    if len(abandoned) > ABORTS_PER_REQUEST:
        abort_batch(client, query_id, abandoned[ABORTS_PER_REQUEST:])
        abandoned = abandoned[:ABORTS_PER_REQUEST]
    _request_batch(client, query_id, batch_id, transactions, abandoned, is_commit=True)


def last_batch(client: SyncClient, query_id: str) -> int:
    """Return the last batch of a query that the brokers have decided to commit, `NO_BATCH` for none. Raises the
    brokers' errors; those before version 0.2 refuse the request."""
    answer = _request_batch(client, query_id, 0, (), (), is_commit=False)
    return int(answer.last_batch_id)


def abort_batch(client: SyncClient, query_id: str, transactions: Sequence[ProducerEpoch]) -> None:
    """Abort transactions, except those that the brokers have decided to commit. Raises the brokers' errors."""
    for at in range(0, len(transactions), ABORTS_PER_REQUEST):
        part = transactions[at : at + ABORTS_PER_REQUEST]
        _request_batch(client, query_id, 0, part, (), is_commit=False)


def open_transactions(
    client: SyncClient, query_id: str, known: Iterable[ProducerEpoch] = ()
) -> list[ProducerEpoch]:
    """Return the transactions of a query that are open or prepared, of all tasks and attempts, except the known ones:
    so a batch without repeated attempts needs no request for each transaction.
    """
    cluster, prefix = client.cluster, transactional_id_prefix(query_id)
    request = {
        "state_filters": [ONGOING],
        "producer_id_filters": [],
        "duration_filter": -1,
        "transactional_id_pattern": f"{re.escape(prefix)}.*",
    }

    async def list_all() -> set[str]:
        await cluster.refresh_metadata(())  # a broker that has ended is no longer asked
        found: set[str] = set()
        for node_id in sorted(cluster.nodes):
            connection = await cluster.connection(node_id, CHANNEL)
            response = await connection.request(ApiKey.LIST_TRANSACTIONS, request)
            check_top_level_error(response)
            found.update(each.transactional_id for each in response.transaction_states)
        return found

    listed = client.run(cluster.retry(list_all, timeout_ms=END_TIMEOUT_MS))
    listed.difference_update(each.transactional_id for each in known)
    # Brokers without patterns list all of them.
    return _Coordinator(client).describe(sorted(each for each in listed if each.startswith(prefix)))


def _request_batch(
    client: SyncClient,
    query_id: str,
    batch_id: int,
    transactions: Iterable[ProducerEpoch],
    abandoned: Iterable[ProducerEpoch],
    *,
    is_commit: bool,
) -> Any:
    request = {
        "query_id": query_id,
        "batch_id": batch_id,
        "committed": is_commit,
        "transactions": [each._asdict() for each in transactions],
        "abandoned": [each._asdict() for each in abandoned],
    }
    return _Coordinator(client).request(query_id, ApiKey.COMMIT_BATCH, request, check=check_top_level_error)


# -- requests to coordinators --------


class _Coordinator:
    """Requests to the coordinators of transactional ids, with retries."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def initialize(
        self, transactional_id: str, timeout_ms: int, *, skips_prepared: bool = True
    ) -> ProducerEpoch | None:
        """Initialize a producer; aborts an open transaction of another producer. With `skips_prepared`, None if there
        is a prepared one."""
        request = {
            "transactional_id": transactional_id,
            "transaction_timeout_ms": timeout_ms,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        is_prepared = False

        async def attempt() -> Any:
            nonlocal is_prepared
            try:
                return await self._ask(
                    transactional_id, ApiKey.INIT_PRODUCER_ID, request, check_top_level_error
                )
            except ConcurrentTransactions:
                # A transaction is being completed, or it waits for a decision, which no retry ends.
                is_prepared = skips_prepared and await self._describe(transactional_id) is not None
                if not is_prepared:
                    raise
                return None

        try:
            response = self._client.run(self._client.cluster.retry(attempt, timeout_ms=END_TIMEOUT_MS))
        except InvalidTransactionTimeout as error:
            raise ConfigError(
                f"option transactionTimeout is {timeout_ms} ms, and the brokers allow less"
                " (transaction_max_timeout_ms)"
            ) from error
        if response is None:
            return None
        return ProducerEpoch(transactional_id, response.producer_id, response.producer_epoch)

    def describe(self, transactional_ids: Sequence[str]) -> list[ProducerEpoch]:
        """Return the transactions of these transactional ids that are open or prepared."""
        cluster = self._client.cluster

        async def describe_all(names: Sequence[str]) -> list[ProducerEpoch | None]:
            attempts = (partial(self._describe, name) for name in names)
            return await asyncio.gather(
                *(cluster.retry(attempt, timeout_ms=END_TIMEOUT_MS) for attempt in attempts)
            )

        found: list[ProducerEpoch | None] = []
        for at in range(0, len(transactional_ids), CONCURRENT_DESCRIBES_MAX):
            found += self._client.run(describe_all(transactional_ids[at : at + CONCURRENT_DESCRIBES_MAX]))
        return [producer for producer in found if producer is not None]

    async def _describe(self, transactional_id: str) -> ProducerEpoch | None:
        def check(response: Any) -> None:
            for one in response.transaction_states:
                if one.error_code != TRANSACTIONAL_ID_NOT_FOUND:
                    raise_for_code(one.error_code)

        request = {"transactional_ids": [transactional_id]}
        response = await self._ask(transactional_id, ApiKey.DESCRIBE_TRANSACTIONS, request, check)
        for one in response.transaction_states:
            if not one.error_code and one.transaction_state == ONGOING:
                return ProducerEpoch(transactional_id, one.producer_id, one.producer_epoch)
        return None

    def prepare(self, producer: ProducerEpoch) -> None:
        self.request(
            producer.transactional_id,
            ApiKey.PREPARE_TRANSACTION,
            producer._asdict(),
            check=check_top_level_error,
        )

    def end(
        self, producer: ProducerEpoch, *, is_commit: bool, timeout_ms: float = END_TIMEOUT_MS
    ) -> ProducerEpoch:
        """End a transaction; returns the producer of the next one."""
        request = {**producer._asdict(), "committed": is_commit}
        response = self.request(
            producer.transactional_id,
            ApiKey.END_TXN,
            request,
            check=check_top_level_error,
            timeout_ms=timeout_ms,
        )
        return ProducerEpoch(producer.transactional_id, response.producer_id, response.producer_epoch)

    def request(
        self,
        key: str,
        api_key: ApiKey,
        fields: Mapping[str, Any],
        *,
        check: Callable[[Any], None],
        timeout_ms: float = END_TIMEOUT_MS,
    ) -> Any:
        """Send a request to the coordinator of `key`, with retries."""
        cluster = self._client.cluster
        return self._client.run(
            cluster.retry(lambda: self._ask(key, api_key, fields, check), timeout_ms=timeout_ms)
        )

    async def _ask(
        self, key: str, api_key: ApiKey, fields: Mapping[str, Any], check: Callable[[Any], None]
    ) -> Any:
        cluster = self._client.cluster
        try:
            connection = await cluster.coordinator(key, CHANNEL, key_type=TRANSACTION_KEY_TYPE)
            try:
                response = await connection.request(api_key, fields)
            except UnsupportedVersion as error:
                raise UnsupportedVersion(NEEDS_MANSIO) from error
            check(response)
            return response
        except (NotCoordinator, CoordinatorNotAvailable, ConnectionLost, RequestTimedOut):
            cluster.forget_coordinator(key, key_type=TRANSACTION_KEY_TYPE)
            raise
