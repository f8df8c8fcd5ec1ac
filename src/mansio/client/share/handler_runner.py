"""Handler runner of a receiver: parallel, in partition order ("fifo") or in key order ("by_key").

In the ordered modes records wait in key queues, one per partition, or per key of a partition; records without a
key, and all in mode "parallel", have no queue. Of each queue one record is handled at a time, lowest offset first.
The requested number of workers take queues and unqueued records in turn. Handled records are acknowledged together
in the next iteration of the loop; only their key queues wait for the result.

Invariants:
* The next record of a key queue starts when the broker has confirmed the acknowledgement of the one before.
* When the lease of a record is lost, the later records of its key queue are released: the lost record is delivered
  again, possibly to another member, and must be handled before them.
* Records that were not started when the runner stops are left to be released.
* The delivery order of a group that is in use is never changed here, because other members may hold records.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mansio.client.admin.shares import ShareAdmin
from mansio.client.share.leased import ACCEPT, ACKNOWLEDGED, HELD, REJECT, RELEASE, Leased, LeaseLost
from mansio.errors import GroupIdNotFound, InvalidConfig, InvalidRequest, MansioError, UnsupportedVersion
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.share.ack_sender import AckSender
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.net.cluster import Cluster


logger = logging.getLogger(__name__)

Mode = Literal["parallel", "fifo", "by_key"]

MODES: Final = ("parallel", "fifo", "by_key")

Handler = Callable[[Leased], Awaitable[object] | object]

"""Called by `Receiver.run` with each record; an awaitable result is awaited."""

DRAIN_MS: Final = 30_000

TURN_S: Final = 0.002

"""After this time in one iteration of the loop, workers yield, and their results are acknowledged."""

REASON_CHARACTERS_MAX: Final = 500

REFUSALS_MAX: Final = 20

"""After so many refusals in a row for other reasons than lost leases, the runner stops: acknowledgements would never
succeed, and records would be handled again and again."""


class _KeyQueue:
    """Records that are handled one after the other."""

    __slots__ = ("is_queued", "key", "waiting")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.waiting: list[Leased] = []
        self.is_queued = False
        """Whether it waits for a worker, has one, or waits for the acknowledgement of its last record."""


class _HandledListener:
    """Receives the results of handled records and resumes their key queues."""

    __slots__ = ("_key_queues", "_run")

    def __init__(self, run: HandlerRunner, key_queues: dict[int, _KeyQueue]) -> None:
        self._run = run
        self._key_queues = key_queues

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        if error is not None:
            self._run.not_acknowledged(messages, error)
        else:
            self._run.refusals = 0
        if self._key_queues:
            for message in messages:
                if (key_queue := self._key_queues.get(id(message))) is not None:
                    self._run.resume(key_queue)


class HandlerRunner:
    """One call of `Receiver.run`."""

    def __init__(
        self,
        handler: Handler,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        *,
        mode: Mode,
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
        self._done: list[Leased] = []
        """Handled records to be acknowledged in the next iteration of the loop."""
        self._done_key_queues: dict[int, _KeyQueue] = {}
        """Key queues by the `id` of a handled record."""
        self._first_done = 0.0
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._stopped = asyncio.Event()
        self.retry_policy = RetryPolicy()
        self.refusals = 0
        """Refused acknowledgements in a row."""
        self._last_refusal: MansioError | None = None
        self._refused: MansioError | None = None

    def stop(self) -> None:
        """Start no more records."""
        self._stopped.set()
        self._work.set()
        self._in_flight_records.record_available.set()

    async def until_stopped(self, check: Callable[[], None]) -> None:
        """Run until `stop`, and until running handlers have ended. `check` raises fatal errors."""
        self._in_flight_records.lost_listeners.append(self._lost)
        workers = [asyncio.ensure_future(self._worker()) for _ in range(self._concurrency)]
        feeding = asyncio.ensure_future(self._feed(check))
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
            self._in_flight_records.lost_listeners.remove(self._lost)
        for error in (*ended, self._refused):
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error

    # -- key queues --------

    async def _feed(self, check: Callable[[], None]) -> None:
        """Put new records into their key queues."""
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
                self._offer(key_queue)
            if self._runnable:
                self._work.set()
            check()
            await self._in_flight_records.record_available.wait()

    def _key_of(self, message: Leased) -> Any:
        if self._mode == "fifo":
            return message.topic, message.partition
        if self._mode == "by_key" and message.key is not None:
            return message.topic, message.partition, message.key
        return None

    def _offer(self, key_queue: _KeyQueue) -> None:
        if key_queue.is_queued:
            return
        if key_queue.waiting:
            key_queue.is_queued = True
            self._runnable.append(key_queue)
            self._work.set()
        else:
            self._key_queues.pop(key_queue.key, None)

    def resume(self, key_queue: _KeyQueue) -> None:
        """The last record of the queue is done."""
        key_queue.is_queued = False
        self._offer(key_queue)

    def _lost(self, message: Leased) -> None:
        """The lease of a message is lost: release the later records of its key queue."""
        key_queue = self._key_queues.get(self._key_of(message))
        if key_queue is not None:
            self._release_after(key_queue, message.offset)

    def _release_after(self, key_queue: _KeyQueue, offset: int) -> None:
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
                self._work.clear()
                await self._work.wait()
                continue
            next_one = self._runnable.popleft()
            if not isinstance(next_one, _KeyQueue):
                await self._work_on(next_one, None)
            elif not next_one.waiting or not await self._work_on(next_one.waiting.pop(0), next_one):
                self.resume(next_one)
            if self._done and self._loop.time() - self._first_done > TURN_S:
                await asyncio.sleep(0)  # a handler that never waits would block the loop

    async def _work_on(self, message: Leased, key_queue: _KeyQueue | None) -> bool:
        """Whether the key queue resumes once the record is acknowledged (True) or at once (False)."""
        in_flight_records = self._in_flight_records
        if not (
            await in_flight_records.wait_deliverable(message)
            if message._is_suspect
            else in_flight_records.deliver(message)
        ):
            return False
        if await self._handle(message):
            in_flight_records.start_acknowledging((message,))
            if not self._done:
                self._loop.call_soon(self._acknowledge)
                self._first_done = self._loop.time()
            self._done.append(message)
            if key_queue is not None:
                self._done_key_queues[id(message)] = key_queue
            return True
        if key_queue is not None:
            await in_flight_records.wait_acknowledged(message)
            if message._state == ACKNOWLEDGED and message._ack_type == RELEASE:  # by the handler itself
                self._release_after(key_queue, message.offset)
        return False

    async def _handle(self, message: Leased) -> bool:
        """Call the handler until the record is acknowledged or lost, or the runner stops.

        Returns whether it succeeded and the record is to be acknowledged.
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
                elif failures >= self.retry_policy.most:
                    await self._acknowledge_one(message, REJECT, _reason(error, failures))
                elif await self._is_stopped_within(self.retry_policy.delay_s(failures)):
                    return False
            else:
                return message._state == HELD
        return False

    def _acknowledge(self) -> None:
        """Acknowledge the handled records."""
        done, self._done = self._done, []
        key_queues, self._done_key_queues = self._done_key_queues, {}
        if done:
            done.sort(key=_POSITION)
            self._ack_sender.acknowledge_handled(done, ACCEPT, _HandledListener(self, key_queues))

    async def _acknowledge_one(self, message: Leased, kind: int, reason: str = "") -> None:
        """Acknowledge a message and wait for the result."""
        try:
            await self._ack_sender.acknowledge(message, kind, reason=reason)
        except MansioError as error:
            self.not_acknowledged((message,), error)
        else:
            self.refusals = 0

    def not_acknowledged(self, messages: Sequence[Leased], error: MansioError) -> None:
        """The acknowledgement was refused, or its outcome is unknown."""
        if isinstance(error, LeaseLost):
            logger.info("handled, but not acknowledged: %s", error)
            return
        logger.warning("handled, but not acknowledged: %s", error)
        for message in messages:
            self._in_flight_records.mark_lost(message)  # it is delivered again when its lease ends
        if error is self._last_refusal:
            return  # one request may concern many messages
        self._last_refusal = error
        self.refusals += 1
        if self.refusals >= REFUSALS_MAX and self._refused is None:
            self._refused = error
            self.stop()

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


_OFFSET: Final = itemgetter(2)

_POSITION: Final = itemgetter(0, 1, 2)


def _log_failure(message: Leased, error: Exception, failures: int) -> None:
    logger.warning(
        "the handler failed for offset %d of %s-%d (delivery %d, attempt %d): %s: %s",
        message.offset,
        message.topic,
        message.partition,
        message.delivery_count,
        failures,
        type(error).__name__,
        error,
    )


def _reason(error: Exception, failures: int) -> str:
    return f"{type(error).__name__}: {error} (after {failures} tries)"[:REASON_CHARACTERS_MAX]


ORDER: Final = "mansio.share.order"

IN_ORDER: Final = "partition"

TRIES: Final = "share.delivery.count.limit"

BACKOFF: Final = "mansio.retry.backoff.ms"

MULTIPLIER: Final = "mansio.retry.backoff.multiplier"

BACKOFF_MAX: Final = "mansio.retry.backoff.max.ms"

_GROUP_RESOURCE: Final = 32

_SET: Final = 0


class RetryPolicy(NamedTuple):
    """Attempts to handle a record in place, and the backoff between them in seconds."""

    most: int = 5
    backoff_s: float = 1.0
    multiplier: float = 2.0
    backoff_s_max: float = 60.0

    def delay_s(self, failures: int) -> float:
        """Backoff after so many failures, from 1."""
        return float(min(self.backoff_s * self.multiplier ** min(failures - 1, 30), self.backoff_s_max))


async def ensure_order(cluster: Cluster, group: str) -> None:
    """Ensure that records of a partition are held by one member at a time. Raises `InvalidConfig`,
    `UnsupportedVersion`."""
    found = await _settings(cluster, group)
    if ORDER not in found:
        raise UnsupportedVersion(
            f"ordered handling needs the group setting {ORDER}, which this broker does not support"
        )
    if found[ORDER] == IN_ORDER:
        return
    if not await _is_new(cluster, group):
        raise InvalidConfig(
            f"group {group} is in use with {ORDER}={found[ORDER]}: set it to {IN_ORDER} for ordered handling"
        )
    change = {"name": ORDER, "config_operation": _SET, "value": IN_ORDER}
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configs": [change]}
    fields = {"resources": [resource], "validate_only": False}
    await cluster.request_controller(ApiKey.INCREMENTAL_ALTER_CONFIGS, fields, check=_check("responses"))


async def retry_policy(cluster: Cluster, group: str) -> RetryPolicy:
    """The effective retry settings of the group."""
    found = await _settings(cluster, group)
    default = RetryPolicy()
    return RetryPolicy(
        int(found.get(TRIES, default.most)),
        float(found.get(BACKOFF, default.backoff_s * 1000)) / 1000,
        float(found.get(MULTIPLIER, default.multiplier)),
        float(found.get(BACKOFF_MAX, default.backoff_s_max * 1000)) / 1000,
    )


async def _settings(cluster: Cluster, group: str) -> dict[str, str]:
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    answer = await cluster.request(ApiKey.DESCRIBE_CONFIGS, fields, check=_check("results"))
    return {entry.name: entry.value for entry in answer.results[0].configs if entry.value is not None}


async def _is_new(cluster: Cluster, group: str) -> bool:
    """Whether the group has no member and has read nothing."""
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
            raise_for(item.error_code, item.error_message)

    return check
