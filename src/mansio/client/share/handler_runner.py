"""Handler runner of a receiver: calls the handler in parallel, in partition order ("fifo") or in key order ("by_key").

In mode "fifo" records wait in one key queue per partition, in mode "by_key" in one key queue per key of a partition.
Records without a key, and all records in mode "parallel", are in no key queue. One record of a key queue is handled at
a time, lowest offset first. `concurrency` workers take key queues and unqueued records in the order of their arrival.
The runner acknowledges handled records together in the next iteration of the event loop; workers do not wait for the
result, but key queues do.

Invariants:
* The handler is called with the next record of a key queue only after the broker has confirmed the acknowledgement of
  the previous record.
* When the lease of a record is lost, the later records of its key queue are released: the lost record is delivered
  again, possibly to another member, and must be handled before them.
* The runner does not acknowledge records that it had not started to handle when it stopped; closing the receiver
  releases them.
* `ensure_order` does not change the delivery order of a group that is in use, because other members may hold
  records.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mansio.backoff import grown_delay
from mansio.client.admin.shares import ShareAdmin
from mansio.client.share.leased import ACCEPT, ACKNOWLEDGED, HELD, REJECT, RELEASE, Leased
from mansio.config.config_def import Operation, ResourceType
from mansio.errors import (
    GroupIdNotFound,
    InvalidConfig,
    InvalidRequest,
    LeaseLost,
    MansioError,
    UnsupportedVersion,
)
from mansio.net.retry import raise_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.share.ack_sender import AckSender
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.net.cluster import Cluster


logger = logging.getLogger(__name__)

HandlerMode = Literal["parallel", "fifo", "by_key"]
"""Order in which records are handled: any order, by partition, or by key."""

MODES: Final = ("parallel", "fifo", "by_key")

Handler = Callable[[Leased], Awaitable[object] | object]
"""Function that `Receiver.run` calls with each record; if it returns an awaitable, the runner awaits that."""

DEFAULT_DRAIN_MS: Final = 30_000
"""Default time, in milliseconds, for which running handlers may continue after `stop`."""

WORKER_S_MAX: Final = 0.002
"""Maximum time, in seconds, for which workers handle records in one iteration of the event loop. Then they yield, so
that the handled records are acknowledged."""

REASON_CHARACTERS_MAX: Final = 500
"""Maximum length of the reason with which a record is rejected."""

CONSECUTIVE_REFUSALS_MAX: Final = 20
"""Number of consecutive refused acknowledgements after which the runner stops, apart from refusals because of a lost
lease. Otherwise the same records would be delivered and handled forever."""


class _KeyQueue:
    """Queue of records that are handled one after the other: those of a partition or of a key of a partition."""

    __slots__ = ("is_queued", "key", "waiting")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.waiting: list[Leased] = []
        self.is_queued = False
        """Whether the key queue waits for a worker, a worker handles its record, or it waits for the acknowledgement of
        that record."""


class _HandledListener:
    """Receives the results of the acknowledgements of handled records and resumes the key queues of these records."""

    __slots__ = ("_key_queues", "_run")

    def __init__(self, run: HandlerRunner, key_queues: dict[int, _KeyQueue]) -> None:
        self._run = run
        self._key_queues = key_queues

    def on_completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        if error is not None:
            self._run.on_not_acknowledged(messages, error)
        else:
            self._run.refusal_count = 0
        if self._key_queues:
            for message in messages:
                if (key_queue := self._key_queues.get(id(message))) is not None:
                    self._run.resume(key_queue)


class HandlerRunner:
    """Calls the handler for one call of `Receiver.run`, which `run_until_stopped` implements."""

    def __init__(
        self,
        handler: Handler,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        *,
        mode: HandlerMode,
        concurrency: int,
        drain_ms: float,
    ) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if concurrency < 1:
            raise InvalidRequest("concurrency must be at least 1")
        self._handler = handler
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._mode = mode
        self._concurrency = concurrency
        self._drain_s = drain_ms / 1000
        self._key_queues: dict[Any, _KeyQueue] = {}
        self._runnable: deque[_KeyQueue | Leased] = deque()
        self._handled: list[Leased] = []
        """Handled records to be acknowledged in the next iteration of the event loop."""
        self._handled_key_queues: dict[int, _KeyQueue] = {}
        """Key queues of the handled records, by `id(record)`."""
        self._first_handled_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._work_available = asyncio.Event()
        self._stopped = asyncio.Event()
        self.retry_policy = RetryPolicy()
        self.refusal_count = 0
        """Number of consecutive refused acknowledgements, apart from refusals because of a lost lease."""
        self._last_refusal: MansioError | None = None
        self._final_refusal: MansioError | None = None

    def stop(self) -> None:
        """Call the handler with no further record; running handlers continue."""
        self._stopped.set()
        self._work_available.set()
        self._in_flight_records.record_available.set()

    async def run_until_stopped(self, check: Callable[[], None]) -> None:
        """Handle records until `stop` is called, then wait at most `drain_ms` for running handlers. `check` is called
        regularly; it raises errors that end the run. Raises the error of repeatedly refused acknowledgements."""
        self._in_flight_records.lost_listeners.append(self._on_lost)
        workers = [asyncio.ensure_future(self._worker()) for _ in range(self._concurrency)]
        feeding = asyncio.ensure_future(self._queue_new_records(check))
        try:
            await asyncio.wait([feeding, *workers], return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                await asyncio.wait(workers, timeout=self._drain_s)
        finally:
            self._stopped.set()
            for task in (feeding, *workers):
                task.cancel()
            ended = await asyncio.gather(feeding, *workers, return_exceptions=True)
            self._acknowledge()
            self._in_flight_records.lost_listeners.remove(self._on_lost)
        for error in (*ended, self._final_refusal):
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise copied(error)

    # -- key queues --------

    async def _queue_new_records(self, check: Callable[[], None]) -> None:
        """Append new records to their key queues, or directly to the runnable records."""
        while not self._stopped.is_set():
            self._in_flight_records.record_available.clear()
            for message in self._in_flight_records.pop_undelivered():
                key = self._key_of(message)
                if key is None:
                    self._runnable.append(message)
                    continue
                if (key_queue := self._key_queues.get(key)) is None:
                    key_queue = self._key_queues[key] = _KeyQueue(key)
                insort(key_queue.waiting, message, key=_OFFSET)
                self._make_runnable(key_queue)
            if self._runnable:
                self._work_available.set()
            check()
            await self._in_flight_records.record_available.wait()

    def _key_of(self, message: Leased) -> Any:
        if self._mode == "fifo":
            return message.topic, message.partition
        if self._mode == "by_key" and message.key is not None:
            return message.topic, message.partition, message.key
        return None

    def _make_runnable(self, key_queue: _KeyQueue) -> None:
        if key_queue.is_queued:
            return
        if key_queue.waiting:
            key_queue.is_queued = True
            self._runnable.append(key_queue)
            self._work_available.set()
        else:
            self._key_queues.pop(key_queue.key, None)

    def resume(self, key_queue: _KeyQueue) -> None:
        """Make the next record of the queue runnable, because its previous record is acknowledged or lost."""
        key_queue.is_queued = False
        self._make_runnable(key_queue)

    def _on_lost(self, message: Leased) -> None:
        """Release the later records of the key queue of a message whose lease is lost."""
        key_queue = self._key_queues.get(self._key_of(message))
        if key_queue is not None:
            self._release_after(key_queue, message.offset)

    def _release_after(self, key_queue: _KeyQueue, offset: int) -> None:
        if self._mode == "fifo":
            # The broker may lease further records of the partition to this member before it handles the releases.
            topic, partition = key_queue.key
            self._in_flight_records.release_after((topic, partition), offset)
            return
        kept: list[Leased] = []
        released: list[Leased] = []
        for each in key_queue.waiting:
            (kept if each.offset <= offset else released).append(each)
        key_queue.waiting = kept
        for each in released:
            self._ack_sender.release(each)

    # -- workers --------

    async def _worker(self) -> None:
        while not self._stopped.is_set():
            if not self._runnable:
                self._work_available.clear()
                await self._work_available.wait()
                continue
            next_one = self._runnable.popleft()
            if not isinstance(next_one, _KeyQueue):
                await self._handle_in_turn(next_one, None)
            elif not next_one.waiting or not await self._handle_in_turn(next_one.waiting.pop(0), next_one):
                self.resume(next_one)
            if self._handled and self._loop.time() - self._first_handled_s > WORKER_S_MAX:
                await asyncio.sleep(0)  # a handler that never waits would block the loop

    async def _handle_in_turn(self, message: Leased, key_queue: _KeyQueue | None) -> bool:
        """Handle one record. Returns whether its key queue must wait for the acknowledgement of the record (True) or
        resumes at once (False)."""
        in_flight_records = self._in_flight_records
        if not (
            await in_flight_records.deliver_when_verified(message)
            if message._is_suspect
            else in_flight_records.deliver(message)
        ):
            return False
        if await self._handle(message):
            in_flight_records.start_acknowledging((message,))
            if not self._handled:
                self._loop.call_soon(self._acknowledge)
                self._first_handled_s = self._loop.time()
            self._handled.append(message)
            if key_queue is not None:
                self._handled_key_queues[id(message)] = key_queue
            return True
        if key_queue is not None:
            await in_flight_records.wait_acknowledged(message)
            if message._state == ACKNOWLEDGED and message._ack_type == RELEASE:  # by the handler itself
                self._release_after(key_queue, message.offset)
        return False

    async def _handle(self, message: Leased) -> bool:
        """Call the handler until it succeeds, the record is acknowledged or lost, or the runner stops.

        Returns whether the handler succeeded and the runner has to acknowledge the record.
        """
        failures = 0
        while message._state == HELD:
            try:
                outcome = self._handler(message)
                if outcome is not None and inspect.isawaitable(outcome):
                    await outcome
            except Exception as error:  # noqa: BLE001  # any error of the handler counts as a failed attempt
                failures += 1
                if message._state != HELD:
                    return False
                _log_failure(message, error, failures)
                if self._mode == "parallel":
                    await self._acknowledge_one(message, RELEASE)
                elif failures >= self.retry_policy.attempts_max:
                    await self._acknowledge_one(message, REJECT, _reject_reason(error, failures))
                elif await self._wait_until_stopped(self.retry_policy.delay_s(failures)):
                    return False
            else:
                return message._state == HELD
        return False

    def _acknowledge(self) -> None:
        """Send the acknowledgements of the handled records."""
        done, self._handled = self._handled, []
        key_queues, self._handled_key_queues = self._handled_key_queues, {}
        if done:
            done.sort(key=_POSITION)
            self._ack_sender.send_acknowledgements(done, ACCEPT, _HandledListener(self, key_queues))

    async def _acknowledge_one(self, message: Leased, ack_type: int, reason: str = "") -> None:
        """Acknowledge a message and wait for the result; errors go to `on_not_acknowledged`."""
        try:
            await self._ack_sender.acknowledge(message, ack_type, reason=reason)
        except MansioError as error:
            self.on_not_acknowledged((message,), error)
        else:
            self.refusal_count = 0

    def on_not_acknowledged(self, messages: Sequence[Leased], error: MansioError) -> None:
        """Log that the acknowledgement of handled records was refused or has an unknown outcome, and mark the records
        as lost. Stops the runner after `CONSECUTIVE_REFUSALS_MAX` consecutive refusals."""
        if isinstance(error, LeaseLost):
            logger.info("handled, but not acknowledged: %s", error)
            return
        logger.warning("handled, but not acknowledged: %s", error)
        for message in messages:
            self._in_flight_records.mark_lost(message)  # it is delivered again when its lease ends
        if error is self._last_refusal:
            return  # one request may concern many messages
        self._last_refusal = without_traceback(error)
        self.refusal_count += 1
        if self.refusal_count >= CONSECUTIVE_REFUSALS_MAX and self._final_refusal is None:
            self._final_refusal = without_traceback(error)
            self.stop()

    async def _wait_until_stopped(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


_OFFSET: Final = itemgetter(2)

_POSITION: Final = itemgetter(0, 1, 2)


def _log_failure(message: Leased, error: Exception, failures: int) -> None:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    logger.warning(
        "the handler failed for offset %d of %s-%d (delivery %d, attempt %d): %s: %s (%s)",
        message.offset,
        message.topic,
        message.partition,
        message.delivery_count,
        failures,
        type(error).__name__,
        error,
        ", ".join(f"{each.filename}:{each.lineno} in {each.name}" for each in frames),
    )


def _reject_reason(error: Exception, failures: int) -> str:
    return f"{type(error).__name__}: {error} ({failures} attempts in this delivery)"[:REASON_CHARACTERS_MAX]


SHARE_ORDER_CONFIG: Final = "mansio.share.order"
"""Group setting for the order of delivery."""
SHARE_ORDERS: Final[dict[HandlerMode, tuple[str, ...]]] = {
    "fifo": ("partition",),
    "by_key": ("key", "partition"),
}
"""Values of `mansio.share.order` with which records are handled in order, by mode; the first is set for a new group.
With `partition` only one member at a time holds records of a partition, with `key` records of a key."""
DELIVERY_COUNT_LIMIT_CONFIG: Final = "share.delivery.count.limit"
RETRY_BACKOFF_MS_CONFIG: Final = "mansio.retry.backoff.ms"
RETRY_BACKOFF_MULTIPLIER_CONFIG: Final = "mansio.retry.backoff.multiplier"
RETRY_BACKOFF_MAX_MS_CONFIG: Final = "mansio.retry.backoff.max.ms"


class RetryPolicy(NamedTuple):
    """Retries of a handler that fails, in the modes "fifo" and "by_key": number of attempts, and backoff in seconds."""

    attempts_max: int = 5
    backoff_s: float = 1.0
    multiplier: float = 2.0
    backoff_s_max: float = 60.0

    def delay_s(self, failures: int) -> float:
        """Return the backoff after the given number of failures (at least 1), in seconds."""
        return grown_delay(failures, self.backoff_s, self.backoff_s_max, self.multiplier)


async def ensure_order(cluster: Cluster, group: str, mode: HandlerMode) -> None:
    """Ensure that only one member of the group at a time holds records of a partition or key: sets `mansio.share.order`
    of a new group. Raises `InvalidConfig` if the group is in use without the setting, `UnsupportedVersion` if the
    broker does not support it."""
    orders = SHARE_ORDERS[mode]
    found = await _group_settings(cluster, group)
    if SHARE_ORDER_CONFIG not in found:
        raise UnsupportedVersion(
            f"ordered handling needs the group setting {SHARE_ORDER_CONFIG}, which this broker does not support"
        )
    if found[SHARE_ORDER_CONFIG] in orders:
        return
    if not await _is_unused_group(cluster, group):
        raise InvalidConfig(
            f"group {group} is in use with {SHARE_ORDER_CONFIG}={found[SHARE_ORDER_CONFIG]}: "
            f"set it to {orders[0]} for ordered handling"
        )
    change = {"name": SHARE_ORDER_CONFIG, "config_operation": Operation.SET, "value": orders[0]}
    resource = {"resource_type": ResourceType.GROUP, "resource_name": group, "configs": [change]}
    fields = {"resources": [resource], "validate_only": False}
    await cluster.request_controller(ApiKey.INCREMENTAL_ALTER_CONFIGS, fields, check=_check("responses"))


async def has_group_order(cluster: Cluster, group: str) -> bool:
    """Return whether the broker leases the records of a group in an order, of keys or of partitions."""
    return (await _group_settings(cluster, group)).get(SHARE_ORDER_CONFIG, "none") != "none"


async def fetch_retry_policy(cluster: Cluster, group: str) -> RetryPolicy:
    """Return the retry settings of a group, with defaults for those that the broker does not support."""
    found = await _group_settings(cluster, group)
    default = RetryPolicy()
    return RetryPolicy(
        int(found.get(DELIVERY_COUNT_LIMIT_CONFIG, default.attempts_max)),
        float(found.get(RETRY_BACKOFF_MS_CONFIG, default.backoff_s * 1000)) / 1000,
        float(found.get(RETRY_BACKOFF_MULTIPLIER_CONFIG, default.multiplier)),
        float(found.get(RETRY_BACKOFF_MAX_MS_CONFIG, default.backoff_s_max * 1000)) / 1000,
    )


async def _group_settings(cluster: Cluster, group: str) -> dict[str, str]:
    resource = {"resource_type": ResourceType.GROUP, "resource_name": group, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    answer = await cluster.request(ApiKey.DESCRIBE_CONFIGS, fields, check=_check("results"))
    return {entry.name: entry.value for entry in answer.results[0].configs if entry.value is not None}


async def _is_unused_group(cluster: Cluster, group: str) -> bool:
    """Whether the group has no members and no stored offsets."""
    admin = ShareAdmin(cluster)
    try:
        if (await admin.describe(group)).members:
            return False
        return not await admin.offsets(group)
    except GroupIdNotFound:
        return True


def _check(field_name: str) -> Any:
    def check(answer: Any) -> None:
        for item in getattr(answer, field_name):
            raise_for_code(item.error_code, item.error_message)

    return check
