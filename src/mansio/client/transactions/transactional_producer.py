"""Producer with a transactional id: one transaction after another. A client keeps one per transactional id.

`TransactionManager` is the state machine, `TransactionRequests` sends the requests to the coordinators, and a
`Producer` of its own batches and sends the records. This class runs the steps of a transaction in order and raises the
errors of the public API.

Invariants:
* One transaction is open at a time; the next one begins when the end of the last one is known, or its delivery timeout
  has passed.
* An end that was requested goes on if its caller is cancelled.
* A commit is requested when all records are acknowledged and no error occurred. `TransactionOutcomeUnknown` is raised
  exactly if the commit may have been decided and no answer confirms it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mansio.client.producer.producer import Producer
from mansio.client.producer.transaction_manager import TransactionManager, TransactionPhase
from mansio.client.producer.transaction_requests import TransactionRequests
from mansio.errors import (
    ConnectionLost,
    IllegalGeneration,
    InvalidProducerEpoch,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    ProducerFenced,
    StaleMemberEpoch,
    TransactionAborted,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
)
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping
    from datetime import datetime
    from typing import Any

    from mansio.client.consumer.consumer import Consumer
    from mansio.client.producer.accumulator import Delivery
    from mansio.client.producer.producer_options import ProducerOptions
    from mansio.client.types import HeadersLike, Publishable, TopicPartition
    from mansio.net.cluster import Cluster
    from mansio.telemetry.client_telemetry import ClientTelemetry

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_MS_MAX: Final = 10_000
"""How long an abort is repeated. After that the next transaction, or the transaction's timeout, aborts."""


class TransactionalProducer:
    """Transactions of one transactional id in one client."""

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        options: ProducerOptions,
        *,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        """Create a producer that is not started. Raises `InvalidRequest` for an invalid id or options."""
        if not isinstance(transactional_id, str) or not transactional_id:
            raise InvalidRequest("a transactional id must be a text that is not empty")
        if not options.is_idempotent:
            raise InvalidRequest("a transaction needs a producer with acks='all' and idempotence")
        self.options = options
        self._loop = asyncio.get_running_loop()
        self._manager = TransactionManager(transactional_id)
        self._requests = TransactionRequests(
            cluster, self._manager, retry_timeout_ms=options.delivery_timeout_ms
        )
        self._producer = Producer(cluster, options, transaction=self._requests, telemetry=telemetry)
        self._timeout_ms = 0
        self._begun_s = 0.0
        self._is_taken = False
        """Whether a transaction is open or being ended by its block."""
        self._ending: asyncio.Task[None] | None = None
        """The end of the last transaction, which may still be running."""
        self._calls = 0
        """Number of calls that are adding records or offsets to the current transaction."""
        self._calls_over = asyncio.Event()
        self._consumers: dict[Consumer, set[TopicPartition]] = {}
        """Consumers whose offsets are in the current transaction."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._producer.is_closed

    # -- begin and end --------

    async def begin(self, timeout_ms: int) -> None:
        """Begin a transaction, after the end of the last one. `timeout_ms`: after which the coordinator aborts it.

        Raises `InvalidTxnState` if one is open, `ProducerFenced`, `InvalidTransactionTimeout`."""
        name = self._manager.transactional_id
        await self._wait_for_end()
        if self._is_taken:
            raise InvalidTxnState(
                f"transactional id {name!r} has an open transaction in this client; "
                "end it first, or use another transactional id"
            )
        self._is_taken = True
        try:
            if self.is_closed:
                raise ConnectionLost("the client is closed")
            manager = self._manager
            if manager.phase is TransactionPhase.READY and timeout_ms != self._timeout_ms:
                manager.require_initialization()
            if manager.phase is TransactionPhase.UNINITIALIZED:
                await self._initialize(timeout_ms)
            manager.begin()
            self._producer._start_identity(manager.identity)
        except BaseException:
            self._is_taken = False
            raise
        self._begun_s = self._loop.time()
        self._consumers = {}

    async def _initialize(self, timeout_ms: int) -> None:
        try:
            await self._requests.initialize(timeout_ms)
        except (ProducerFenced, InvalidProducerEpoch):
            self._manager.fence()
            raise await self._current_error() from None
        self._timeout_ms = timeout_ms

    async def commit(self) -> None:
        """Wait until all records are acknowledged and commit. If a record failed or the wait is cancelled, abort and
        raise that error.

        Raises `TransactionOutcomeUnknown`, `ProducerFenced`, `TransactionTimedOut`, `TransactionAbortable`, and errors
        of records."""
        try:
            deadline_s = self._loop.time() + self.options.delivery_timeout_ms / 1000
            await self._wait_for_calls()
            await self._producer.flush()
            self._manager.check_open()
        except MansioError:
            error = await self._current_error()
            await self.abort()
            raise copied(error) from None
        except BaseException:
            await self.abort()
            raise
        if not self._manager.prepare_end(is_commit=True):
            self._is_taken = False
            return
        left_ms = max(1_000.0, (deadline_s - self._loop.time()) * 1000)
        await self._run_end(self._commit(left_ms))

    async def abort(self) -> None:
        """Abort the transaction. Errors are logged: the next transaction, or the timeout of this one, aborts it."""
        if not self._is_taken:
            return
        if self._ending is not None and not self._ending.done():
            return  # a commit that was requested goes on
        await self._run_end(self._abort())

    async def _run_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the end of the transaction as a task, which goes on if the caller is cancelled."""
        self._ending = self._loop.create_task(work)
        self._ending.add_done_callback(self._on_end)
        await asyncio.shield(self._ending)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._is_taken = False
        if not task.cancelled():
            task.exception()  # raised to the caller, unless it was cancelled

    async def _wait_for_calls(self) -> None:
        """Wait for calls of other tasks that are adding records or offsets: these must not get into the next
        transaction, nor be missing in this one."""
        while self._calls:
            self._calls_over.clear()
            await self._calls_over.wait()

    async def _wait_for_end(self) -> None:
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _commit(self, timeout_ms: float) -> None:
        manager, name = self._manager, self._manager.transactional_id
        try:
            ended = await self._requests.end(is_commit=True, retry_timeout_ms=timeout_ms)
        except MansioError as error:
            may_be_ended = self._requests.may_be_ended
            if isinstance(error, ProducerFenced | InvalidProducerEpoch):
                manager.fence()
                refusal = await self._current_error()
                self._end_consumers(is_commit=False)
                if not may_be_ended or isinstance(refusal, TransactionTimedOut):
                    raise copied(refusal) from None
            elif may_be_ended:
                self._end_consumers(is_commit=False)
                manager.abandon()
            else:
                manager.cancel_commit()
                await self._abort()
                raise
            raise TransactionOutcomeUnknown(
                f"whether the transaction of {name!r} is committed is unknown: {error.message}"
            ) from error
        manager.on_ended(*ended)
        self._end_consumers(is_commit=True)

    async def _abort(self) -> None:
        manager, error = self._manager, TransactionAborted()
        self._end_consumers(is_commit=False)
        if manager.phase is TransactionPhase.FENCED:
            await self._current_error()  # the next transaction is possible after a timeout
        needs_request = manager.is_in_transaction and manager.prepare_end(is_commit=False)
        if manager.bumps_epoch or not needs_request:
            self._producer._fail_all(error)  # the end bumps the epoch, so that late batches are refused
        else:
            await self._producer._fail_unsent(error)
        await self._wait_for_calls()
        self._producer._fail_all(error)
        if not needs_request:
            return
        timeout_ms = min(self.options.delivery_timeout_ms, ABORT_TIMEOUT_MS_MAX)
        try:
            ended = await self._requests.end(is_commit=False, retry_timeout_ms=timeout_ms)
        except (ProducerFenced, InvalidProducerEpoch):
            manager.fence()
            await self._current_error()
        except MansioError as failure:
            logger.warning("transactional id %s: the abort failed: %s", manager.transactional_id, failure)
            manager.abandon()
        else:
            manager.on_ended(*ended)

    async def _current_error(self) -> MansioError:
        """Return the error of the current transaction. Where the producer is fenced because the transaction was open
        for too long, this is `TransactionTimedOut`, and the next transaction is possible."""
        manager = self._manager
        error = manager.error or InvalidTxnState("there is no open transaction")
        age_ms = (self._loop.time() - self._begun_s) * 1000
        is_late = 0 < self._timeout_ms <= age_ms
        identity = manager.identity
        if manager.phase is TransactionPhase.FENCED and is_late and await self._requests.is_timed_out():
            # Otherwise another call has found it out meanwhile, and the next transaction may be open.
            if manager.identity is identity:
                manager.forget_identity()
            return TransactionTimedOut(
                f"the transaction of {manager.transactional_id!r} was open for {age_ms:.0f} ms, longer than its "
                f"timeout of {self._timeout_ms} ms, so the coordinator aborted it"
            )
        return type(error)(error.message)

    def _end_consumers(self, *, is_commit: bool) -> None:
        for consumer, partitions in self._consumers.items():
            consumer._on_transaction_end(partitions, is_commit=is_commit)
        self._consumers = {}

    async def close(self) -> None:
        """Abort an open transaction, wait for the end of the last one, and stop."""
        try:
            await self.abort()
            await self._wait_for_end()
        finally:
            await self._producer.close(flush=False)

    # -- records and offsets --------

    async def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None,
        headers: HeadersLike | None,
        partition: int | None,
        timestamp_ms: int | datetime | None,
        priority: str | None,
    ) -> Delivery:
        """Queue a record for publishing in the open transaction."""
        await self._begin_call()
        try:
            return await self._producer.send(
                topic,
                value,
                key=key,
                headers=headers,
                partition=partition,
                timestamp_ms=timestamp_ms,
                priority=priority,
            )
        finally:
            self._end_call()

    async def send_many(self, topic: str, records: Iterable[Publishable]) -> None:
        """Queue records for publishing in the open transaction."""
        await self._begin_call()
        try:
            await self._producer._queue_many(topic, records)
        finally:
            self._end_call()

    async def _begin_call(self) -> None:
        if self._manager.error is not None:
            raise await self._current_error()
        self._manager.check_open()
        self._calls += 1

    def _end_call(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._calls_over.set()

    async def send_offsets(self, consumer: Consumer, offsets: Mapping[TopicPartition, int] | None) -> None:
        """Commit offsets of a consumer as a part of the open transaction."""
        await self._begin_call()
        try:
            await self._send_offsets(consumer, offsets)
        finally:
            self._end_call()

    async def _send_offsets(self, consumer: Consumer, offsets: Mapping[TopicPartition, int] | None) -> None:
        while True:
            # Offsets and generation are read together: a group that rebalances after that refuses the generation.
            changed, member = consumer._offsets_of_transaction(offsets)
            if not changed:
                return
            self._consumers.setdefault(consumer, set()).update(changed)
            try:
                await self._requests.commit_offsets(member, changed)
            except (StaleMemberEpoch, IllegalGeneration) as error:
                try:
                    if await consumer._refresh_generation(member.generation):
                        continue
                except MansioError as failure:
                    logger.info("group %s: %s", member.group, failure)
                self._manager.fail(error)
                raise
            except MansioError as error:
                self._manager.fail(error)
                raise await self._current_error() from None
            consumer._on_offsets_in_transaction(changed)
            return
