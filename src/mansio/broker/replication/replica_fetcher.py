"""Replica fetcher: replicates the partitions led by other brokers, with one fetcher per leader (Kafka
`ReplicaFetcherThread`), and a second one, with a connection of its own, for replicas that are *behind*: they fetch
below the leader's high watermark, so they are not in sync. They need many records, for which no producer waits;
producers with acks=all wait for the replicas that are in sync.

    fetch -> append unchanged -> flush -> fetch ...

One request concerns all partitions of a fetcher, and one request per fetcher is in flight. In a fetch session
(`mansio.state.fetch_session`) it names those whose position has changed, and the response has those with news: neither
side examines the others. A leader without sessions is sent all of them. The fetch offset of a
partition is this broker's flushed end offset, so the request also reports to the leader how much of the log this broker
has flushed. A fetcher therefore waits for its flushes before it fetches again; the leader flushes at the same time.

Invariants:
* A response changes a partition only if the partition still has the role that it had when the request was sent.
* A partition whose position the leader may not know is in `_changed`; one that waits for a retry is not in the session.
* A log is truncated only at the offset at which the leader reports that the logs diverge (by leader epoch), and reset
  only if the leader's log starts after this one ends.
* A partition that fails is retried after a delay and reported; the other partitions of its leader continue. A partition
  whose log has failed is not retried.
* Memory is bounded: per leader one response of `response_bytes_max`, and one of `catch_up_bytes_max`. Replicas that are
  behind are replicated at `catch_up_bytes_per_second` in total, if that is set.
* A partition is in one of the two fetchers of its leader, and changes it between two of its requests.

Uses ports only: the simulator runs this code.
"""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.partition.append_validation import awaits_flush
from mansio.errors import (
    ConcurrentChange,
    MansioError,
    OffsetOutOfRange,
    StorageError,
    UnknownTopicId,
    error_for_code,
)
from mansio.logs import fields
from mansio.ports import Backoff, complete
from mansio.state.fetch_session import FollowerFetchSession, SessionStep
from mansio.state.quota import TokenBucket
from mansio.state.replica import NO_LEADER, FollowerReplica
from mansio.tracebacks import copied, without_traceback
from mansio.wire.apis import fetch
from mansio.wire.apis.fetch import FetchPartition, decode_response, encode_request
from mansio.wire.field_values import FINAL_FETCH_SESSION_EPOCH, NO_FETCH_SESSION_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Peers, Promise, Random, Scheduler, Timer
    from mansio.wire.apis.fetch import FetchedPartition, FetchResponse

    Key = tuple[bytes, int]


logger = logging.getLogger(__name__)

FETCH_VERSION: Final = fetch.REPLICA_FETCH_VERSION
"""Version of Fetch requests between brokers."""

FOLLOWER_CLIENT_ID: Final = "mansio-follower"
FOLLOWER_CLIENT_ID_BYTES: Final = FOLLOWER_CLIENT_ID.encode()
NO_SESSION: Final = SessionStep(NO_FETCH_SESSION_ID, FINAL_FETCH_SESSION_EPOCH)
FLUSH_WAIT_MS: Final = 20
"""Delay before a partition is tried again whose log is being flushed, which a truncation or a fetch has to wait for."""

CATCH_UP_WAIT_MS: Final = 50
"""Time for which a leader may hold a request while other replicas are catching up. One that has caught up is in sync at
once, and its next fetch, for which producers wait, is in the request after this one."""

ACTIVE_TIME_S: Final = 0.5
"""Time for which a partition counts as active after records were received for it."""

IDLE_INTERVAL_PER_PARTITION_S: Final = 0.0001
"""The interval at which idle partitions are fetched from a leader without sessions while others are active, divided by
the number of partitions."""

CATCH_UP_BURST_MS: Final = 1000
"""Time whose amount of bytes may be fetched at once at `catch_up_bytes_per_second`."""

JITTER: Final = 0.2

LOGGED_ATTEMPTS_MIN: Final = 5
"""Number of failed attempts from which errors are logged, reached after about a second. Fewer failures are normal: a
new leader rejects fetches until it has applied its role."""


class ReplicaFetcherSettings(NamedTuple):
    """Settings of replication. `catch_up_bytes_per_second`: 0 means unlimited."""

    fetch_wait_ms: int = 500
    partition_bytes_max: int = 1 << 20
    response_bytes_max: int = 10 << 20
    request_timeout_ms: int = 10_000
    backoff_ms: int = 50
    backoff_ms_max: int = 2000
    catch_up_bytes_max: int = 1 << 20
    catch_up_bytes_per_second: int = 0
    all_partitions_max: int = 200
    """Number of partitions above which idle partitions are fetched less often than active ones, from a leader without
    sessions."""


class _FetchedReplica:
    """One replicated partition. It is not fetched before `retry_at_s`, in monotonic seconds."""

    __slots__ = (
        "_changed",
        "active_until_s",
        "attempts",
        "error",
        "is_behind",
        "key",
        "logged_error",
        "partition",
        "queued_retry_at_s",
        "replica",
        "retry_at_s",
        "topic_id",
    )

    def __init__(self, partition: Partition, replica: FollowerReplica) -> None:
        self.partition = partition
        self.topic_id = partition.topic_id.bytes
        self.key = (self.topic_id, partition.index)
        self.replica = replica
        self.attempts = 0
        self.retry_at_s = 0.0
        self.queued_retry_at_s = 0.0
        """The `retry_at_s` for which the fetcher waits."""
        self.active_until_s = 0.0
        self.is_behind = False
        self.error: MansioError | None = None
        self.logged_error = ""
        self._changed: dict[_FetchedReplica, None] = {}

    def join(self, changed: dict[_FetchedReplica, None]) -> None:
        """Become part of a fetcher. `changed`: its partitions whose position may have changed."""
        self._changed = changed
        self.queued_retry_at_s = 0.0
        self.partition.waits.park_follower(self.mark)
        self.mark()

    def leave(self) -> None:
        """Cease to be part of a fetcher."""
        self.partition.waits.unpark_follower(self.mark)
        self._changed.pop(self, None)
        self._changed = {}

    def mark(self) -> None:
        """Have the next request examine the position. Called after appends, when the flushed log start has moved, when
        the log fails and when the role ends."""
        self._changed[self] = None

    @property
    def is_current(self) -> bool:
        """Whether the partition still has the role for which this object was created."""
        return self.partition.replica is self.replica and not self.partition.closed


class ReplicationThrottle:
    """Limit in bytes per second for the replication of replicas that are behind, in total over all leaders."""

    __slots__ = ("_bucket", "_bytes_per_second", "_clock", "_fetch_allowed_at_s")

    def __init__(self, bytes_per_second: int, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_second = 0
        self._bucket: TokenBucket | None = None
        self._fetch_allowed_at_s = clock.monotonic()
        self.set_rate(bytes_per_second)

    def set_rate(self, bytes_per_second: int) -> None:
        """Change the limit; 0 means unlimited."""
        if bytes_per_second == self._bytes_per_second:
            return
        now = self._clock.monotonic()
        self._bytes_per_second = bytes_per_second
        self._bucket = TokenBucket(bytes_per_second, CATCH_UP_BURST_MS, now) if bytes_per_second else None
        self._fetch_allowed_at_s = min(self._fetch_allowed_at_s, now)

    def record(self, size_bytes: int) -> None:
        """Count the size of replicated batches against the limit."""
        if self._bucket is not None and size_bytes:
            now = self._clock.monotonic()
            self._fetch_allowed_at_s = now + self._bucket.take(size_bytes, now) / 1000

    @property
    def fetch_allowed_at_s(self) -> float:
        """The monotonic time in seconds from which replicas that are behind may be fetched."""
        return self._fetch_allowed_at_s


class FetcherContext(NamedTuple):
    """Dependencies shared by all fetchers of a broker. `broker_epoch` returns the epoch of its current session.
    `change_fetcher(leader, fetched)` gives a replica to the other fetcher of its leader. `is_catching_up(leader)`
    returns whether any replica of a leader is behind."""

    node_id: int
    peers: Peers
    catch_up_peers: Peers
    scheduler: Scheduler
    clock: Clock
    random: Random
    broker_epoch: Callable[[], int]
    settings: ReplicaFetcherSettings
    throttle: ReplicationThrottle
    change_fetcher: Callable[[int, _FetchedReplica], None]
    is_catching_up: Callable[[int], bool]


class ReplicaFetcher:
    """Replica fetcher for the partitions of one leader: those that are behind, or the others."""

    def __init__(self, context: FetcherContext, leader: int, *, is_catch_up: bool) -> None:
        settings = context.settings
        self._context = context
        self._leader = leader
        self._is_catch_up = is_catch_up
        self._peers = context.catch_up_peers if is_catch_up else context.peers
        self._response_bytes_max = settings.catch_up_bytes_max if is_catch_up else settings.response_bytes_max
        self.partitions: dict[Partition, _FetchedReplica] = {}
        self._session: FollowerFetchSession[FetchPartition] = FollowerFetchSession()
        self._requested: dict[Key, _FetchedReplica] = {}
        """What the last request concerned: the partitions of the session, or those that it named."""
        self._changed: dict[_FetchedReplica, None] = {}
        self._delayed: list[tuple[float, int, _FetchedReplica]] = []
        """A heap by the time of the retry; it may have partitions more than once."""
        self._delay_numbers = count()
        self._work: Timer | None = None
        self._is_ending = False
        self._pause: Promise[None] | None = None
        self._attempts = 0
        self._logged_error: str | None = None
        self._all_due_s = 0.0

    def add(self, partition: Partition, replica: FollowerReplica) -> None:
        """Fetch the partition from the next request on."""
        known = self.partitions.get(partition)
        if known is not None and known.replica is replica:
            self._attempts = 0  # a repeated call means that a session or the leader has changed
            self.wake()
            return
        self.add_fetched(_FetchedReplica(partition, replica))

    def add_fetched(self, fetched: _FetchedReplica) -> None:
        """As `add`, of a replica that the other fetcher of the leader had."""
        self.remove(fetched.partition)
        self.partitions[fetched.partition] = fetched
        fetched.join(self._changed)
        self.wake()
        if self._work is None:
            name = f"follow broker {self._leader}"
            self._work = self._context.scheduler.spawn(self._run(), name=name)

    def remove(self, partition: Partition) -> None:
        """Stop replicating the partition; a response in flight no longer changes it."""
        fetched = self.partitions.pop(partition, None)
        if fetched is not None:
            fetched.leave()
            self._give_up(fetched)

    def _give_up(self, fetched: _FetchedReplica) -> None:
        """Remove a partition from the session; a response in flight does not concern it."""
        if self._requested.get(fetched.key) is fetched:
            del self._requested[fetched.key]
        self._session.forget(fetched.key)

    def end(self) -> None:
        """End the session, then the loop, of a fetcher without partitions."""
        self._is_ending = True
        self.wake()

    @property
    def is_running(self) -> bool:
        """Whether the loop runs."""
        return self._work is not None

    def stop(self) -> None:
        for partition in tuple(self.partitions):
            self.remove(partition)
        if self._work is not None:
            self._work.cancel()
            self._work = None

    # The loop

    async def _run(self) -> None:
        context = self._context
        settings = context.settings
        while True:
            request = self._next_request()
            if request is None and self._is_ending:
                self._work = None
                return
            if request is None:
                await self._sleep(self._wait_ms())
                continue
            sent, named = request
            try:
                frame = await self._peers.send(self._leader, sent, timeout_ms=settings.request_timeout_ms)
                response = fetch.decode_replica_response(frame) or decode_response(FETCH_VERSION, frame)
                if response.error_code:
                    raise error_for_code(response.error_code, "the leader rejected the request")
            except MansioError as error:
                self._session.on_error(error)
                self._attempts += 1
                if self._attempts >= LOGGED_ATTEMPTS_MIN:
                    self._log_error(error)
                await self._sleep(self._backoff_ms(self._attempts))
                continue
            self._attempts = 0
            self._logged_error = None
            self._session.on_response(response.session_id)
            await self._wait_until_flushed(self._apply_response(response, named))

    def _next_request(self) -> tuple[bytes, dict[Key, _FetchedReplica]] | None:
        """Return the next request frame, and the partitions that it names; None if there is none to fetch now. A
        fetcher that has no partitions any more ends its session."""
        context, session = self._context, self._session
        now = context.clock.monotonic()
        if (
            self._is_catch_up
            and now < context.throttle.fetch_allowed_at_s
            and all(
                one.is_behind for one in self._changed
            )  # a new role may be in sync, so that producers wait for it
        ):
            return None
        while self._delayed and self._delayed[0][0] <= now:
            _, _, one = heappop(self._delayed)
            if self.partitions.get(one.partition) is one:
                one.mark()
        wait_ms = context.settings.fetch_wait_ms
        if not self._is_catch_up and context.is_catching_up(self._leader):
            wait_ms = min(wait_ms, CATCH_UP_WAIT_MS)
        in_session = True
        if not session.is_full:
            due = self._take_due(tuple(self._changed), now)
            if not self.partitions and (last := session.last_step()) is not None:
                return self._encode_fetch_request({}, 0, last, 0), {}
        else:
            session.restart()
            self._requested = {}
            due = self._take_due(tuple(self.partitions.values()), now)
            if session.is_refused and (active := self._select_active(due)):
                in_session = False
                due, wait_ms = active, min(int((self._all_due_s - now) * 1000), wait_ms)
        named: dict[Key, _FetchedReplica] = {}
        positions: dict[bytes, list[FetchPartition]] = {}
        bytes_max = context.settings.partition_bytes_max
        for one in due:
            log = one.partition.log
            offset = log.durable_end_offset
            position = FetchPartition(
                one.partition.index,
                one.replica.leader_epoch,
                offset,
                log.leader_epochs.epoch_for_offset(offset - 1),
                log.durable_start_offset,
                bytes_max,
            )
            key = one.key
            if not in_session or session.name(key, position):
                named[key] = self._requested[key] = one
                positions.setdefault(one.topic_id, []).append(position)
        if not self._requested:
            return None
        step = session.next_step() if in_session else NO_SESSION
        return self._encode_fetch_request(positions, len(named), step, wait_ms), named

    def _take_due(self, replicas: Sequence[_FetchedReplica], now: float) -> list[_FetchedReplica]:
        """Return those of the partitions that are to be fetched now; give up and delay the others."""
        due = []
        for one in replicas:
            partition = one.partition
            log = partition.log
            if partition.replica is not one.replica or partition.closed:
                self.remove(partition)
                continue
            if one.retry_at_s <= now:
                if (failure := partition.failure) is not None:
                    self._delay_retry(one, failure)
                elif (
                    log.end_offset > log.durable_end_offset
                ):  # it was the leader before; its fetch position must be flushed
                    one.retry_at_s = now + FLUSH_WAIT_MS / 1000
                else:
                    due.append(one)
                    continue
            self._give_up(one)
            if one.queued_retry_at_s != one.retry_at_s < float("inf"):
                one.queued_retry_at_s = one.retry_at_s
                heappush(self._delayed, (one.retry_at_s, next(self._delay_numbers), one))
        self._changed.clear()
        return due

    def _select_active(self, due: list[_FetchedReplica]) -> list[_FetchedReplica]:
        """Return the partitions of a request to a leader without sessions if it must not name all that are due; an
        empty list if it should.

        Such a request takes both brokers time for each partition. Of many partitions usually few are active; most
        requests therefore contain active ones only.
        """
        if len(due) <= self._context.settings.all_partitions_max:
            return []
        now = self._context.clock.monotonic()
        active = [one for one in due if one.active_until_s > now]
        if active and (self._all_due_s - now) * 1000 >= 1:
            return active
        self._all_due_s = now + len(due) * IDLE_INTERVAL_PER_PARTITION_S
        return []

    def _wait_ms(self) -> float:
        """Return the time in milliseconds until a delayed or throttled partition is due."""
        context = self._context
        now = context.clock.monotonic()
        at = now + context.settings.backoff_ms_max / 1000
        if self._is_catch_up and self.partitions and now < context.throttle.fetch_allowed_at_s:
            at = context.throttle.fetch_allowed_at_s
        elif self._delayed:
            at = self._delayed[0][0]
        return max(1.0, (at - now) * 1000)

    def _encode_fetch_request(
        self, topics: dict[bytes, list[FetchPartition]], partition_count: int, step: SessionStep, wait_ms: int
    ) -> bytes:
        context = self._context
        if partition_count <= fetch.ONE_BYTE_COUNT_MAX and not step.forgotten:
            return fetch.encode_replica_request(
                FOLLOWER_CLIENT_ID_BYTES,
                topics,
                max_wait_ms=wait_ms,
                max_bytes=self._response_bytes_max,
                replica_id=context.node_id,
                replica_epoch=context.broker_epoch(),
                session_id=step.session_id,
                session_epoch=step.epoch,
            )
        forgotten: dict[bytes, list[int]] = {}
        for topic_id, index in step.forgotten:
            forgotten.setdefault(topic_id, []).append(index)
        return encode_request(
            FETCH_VERSION,
            0,
            FOLLOWER_CLIENT_ID,
            [(None, topic_id, positions) for topic_id, positions in topics.items()],
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=self._response_bytes_max,
            session_id=step.session_id,
            session_epoch=step.epoch,
            forgotten_topics=[(None, topic_id, indexes) for topic_id, indexes in forgotten.items()],
            replica_id=context.node_id,
            replica_epoch=context.broker_epoch(),
        )

    # Responses

    def _apply_response(
        self, response: FetchResponse, named: dict[Key, _FetchedReplica]
    ) -> list[_FetchedReplica]:
        """Apply the response to a request that named these partitions; return the partitions with batches that are not
        flushed yet."""
        answered, grown = [], []
        for _, topic_id, answers in response.topics:
            for answer in answers:
                key = topic_id or b"", answer.index
                named.pop(key, None)
                fetched = self._requested.get(key)
                if fetched is None:
                    self._session.disown(key)
                    continue
                if not fetched.is_current:
                    continue
                answered.append(fetched)
                self._changed[fetched] = None
                try:
                    if self._apply_partition(fetched, answer):
                        grown.append(fetched)
                except MansioError as error:
                    self._delay_retry(fetched, error)
                except Exception as error:  # noqa: BLE001 - a defect delays its partition, not the leader's others
                    self._on_defect(fetched, error)
                else:
                    fetched.attempts, fetched.error, fetched.logged_error = 0, None, ""
        for fetched in named.values():
            if fetched.is_current and self._requested.get(fetched.key) is fetched:
                self._delay_retry(
                    fetched, UnknownTopicId("the leader's response does not contain the partition")
                )
        unsynced = [
            log
            for one in answered
            if (log := one.partition.log).end_offset > log.durable_end_offset and one.is_current
        ]
        if unsynced:
            group_commit = answered[0].partition.group_commit  # one per broker
            group_commit.request_flush_of_all(unsynced, are_copied=self._is_catch_up)
        for fetched in grown:  # the others come first in the next request
            if self.partitions.pop(fetched.partition, None) is fetched:
                self.partitions[fetched.partition] = fetched
        for fetched in answered:
            if fetched.is_behind != self._is_catch_up and self.partitions.get(fetched.partition) is fetched:
                self.remove(fetched.partition)
                self._context.change_fetcher(self._leader, fetched)
        return grown

    def _apply_partition(self, fetched: _FetchedReplica, answer: FetchedPartition) -> bool:
        """Apply one partition's result. Returns True if the log has batches that are not flushed yet."""
        partition = fetched.partition
        log = partition.log
        if answer.error_code:
            error = error_for_code(answer.error_code, f"{partition.name}: its leader rejected the fetch")
            if isinstance(error, OffsetOutOfRange) and (
                log.end_offset < answer.log_start_offset
                or (answer.log_start_offset >= 0 and log.start_offset == log.end_offset)
            ):
                partition.reset_to(answer.log_start_offset)
                return False
            raise copied(error)
        if answer.diverging_epoch is not None:
            partition.truncate_diverging(answer.diverging_epoch)
            return False
        # The log ends at the offset of the request, which the leader knows. A replica that is in sync is not behind.
        fetched.is_behind = log.end_offset < answer.high_watermark
        appended = 0
        if answer.records_bytes:
            appended = partition.append_from_leader(answer.records, answer.high_watermark)
            fetched.active_until_s = self._context.clock.monotonic() + ACTIVE_TIME_S
        if fetched.is_behind:
            self._context.throttle.record(appended)
        partition.update_from_leader(answer.high_watermark, answer.log_start_offset)
        return log.end_offset > log.durable_end_offset

    def _delay_retry(self, fetched: _FetchedReplica, error: MansioError) -> None:
        """Retry a failed partition after a delay, or never if its log has failed."""
        partition = fetched.partition
        now = self._context.clock.monotonic()
        fetched.mark()
        if isinstance(error, ConcurrentChange) or awaits_flush(
            error
        ):  # its log is being flushed, or others are
            fetched.retry_at_s = now + FLUSH_WAIT_MS / 1000
            return
        fetched.attempts += 1
        lasts = fetched.attempts >= LOGGED_ATTEMPTS_MIN or isinstance(error, StorageError)
        if lasts and fetched.logged_error != str(error):
            fetched.logged_error = str(error)
            known = fields(
                topic=partition.topic, partition=partition.index, leader=self._leader, reason=error.message
            )
            logger.warning("replica_fetch_failed", extra=known)
        fetched.error = without_traceback(error)
        if partition.failure is not None:
            fetched.retry_at_s = float("inf")
        elif isinstance(error, StorageError):
            fetched.retry_at_s = now + self._context.settings.backoff_ms_max / 1000
        else:
            fetched.retry_at_s = now + self._backoff_ms(fetched.attempts) / 1000

    def _on_defect(self, fetched: _FetchedReplica, error: Exception) -> None:
        """Log the first of several consecutive unexpected exceptions with its traceback, and retry after a delay."""
        name = fetched.partition.name
        if not fetched.attempts:
            known = fields(work=f"replicate {name}", reason=repr(error))
            logger.error("background_task_failed", exc_info=error, extra=known)
        self._delay_retry(fetched, MansioError(f"{name} cannot be replicated: {error!r}"))

    async def _wait_until_flushed(self, grown: Iterable[_FetchedReplica]) -> None:
        """Wait for the flush of the appended batches, except in partitions that fail or change their role meanwhile."""
        left = 0
        promise: Promise[None] = self._context.scheduler.promise()

        def one_flushed() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                complete(promise, None)

        for fetched in grown:
            if fetched.is_current and not fetched.partition.when_flushed(
                fetched.partition.end_offset, one_flushed
            ):
                left += 1
        if left:
            await promise
        for fetched in grown:
            if fetched.is_current and (failure := fetched.partition.failure) is not None:
                self._delay_retry(fetched, failure)

    # Waiting

    def _backoff_ms(self, attempts: int) -> float:
        settings, uniform = self._context.settings, self._context.random.uniform
        backoff = Backoff(settings.backoff_ms, settings.backoff_ms_max, jitter=JITTER, uniform=uniform)
        return backoff.delay_ms(attempts)

    async def _sleep(self, wait_ms: float) -> None:
        """Wait for the time in milliseconds, or until a partition is added or the throttle changes."""
        self._pause = self._context.scheduler.promise()
        timer = self._context.scheduler.call_later(min(wait_ms, 1e6), self.wake)
        try:
            await self._pause
        finally:
            timer.cancel()
            self._pause = None

    def wake(self) -> None:
        """End the present pause of the loop."""
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def _log_error(self, error: MansioError) -> None:
        """Log the first of several consecutive errors of the same class."""
        logged_error = type(error).__name__
        if logged_error != self._logged_error:
            logger.warning("leader_unreachable", extra=fields(leader=self._leader, reason=error.message))
        self._logged_error = logged_error


__all__ = ["FailedReplica", "ReplicaFetcherManager", "ReplicaFetcherSettings"]


class FailedReplica(NamedTuple):
    """A partition that is not replicated now, and the error that is the reason."""

    partition: Partition
    error: MansioError


class ReplicaFetcherManager:
    """The replica fetchers of this broker, up to two per leader. All methods run on the broker's event loop."""

    def __init__(
        self,
        node_id: int,
        peers: Peers,
        catch_up_peers: Peers,
        *,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
        broker_epoch: Callable[[], int],
        settings: ReplicaFetcherSettings = ReplicaFetcherSettings(),  # noqa: B008 - a value
    ) -> None:
        """`broker_epoch` returns the epoch of this broker's current session."""
        throttle = ReplicationThrottle(settings.catch_up_bytes_per_second, clock)
        self._context = FetcherContext(
            node_id,
            peers,
            catch_up_peers,
            scheduler,
            clock,
            random,
            broker_epoch,
            settings,
            throttle,
            self._change_fetcher,
            self._is_catching_up,
        )
        self._fetchers: dict[tuple[int, bool], ReplicaFetcher] = {}
        """By leader, and whether it is the one for replicas that are behind."""
        self._ending: list[ReplicaFetcher] = []
        """Fetchers without partitions, which end their sessions."""
        self._stopped = False

    def set_catch_up_rate(self, bytes_per_second: int) -> None:
        """Change the limit for the replication of replicas that are behind, over all leaders; 0 means unlimited."""
        self._context.throttle.set_rate(bytes_per_second)
        for fetcher in self._fetchers.values():
            fetcher.wake()  # it may wait for the end of a long pause at the previous rate

    def become_follower(self, partition: Partition) -> None:
        """Replicate a partition from its current leader; stop replicating it if it does not follow a leader."""
        replica = partition.replica
        leader = (
            replica.leader if isinstance(replica, FollowerReplica) and not partition.closed else NO_LEADER
        )
        self._remove(partition, except_leader=leader)
        if leader == NO_LEADER or self._stopped:
            return
        assert isinstance(replica, FollowerReplica)
        behind = self._fetchers.get((leader, True))
        is_behind = behind is not None and partition in behind.partitions
        self._fetcher(leader, is_catch_up=is_behind).add(partition, replica)

    def _fetcher(self, leader: int, *, is_catch_up: bool) -> ReplicaFetcher:
        found = self._fetchers.get((leader, is_catch_up))
        if found is None:
            found = ReplicaFetcher(self._context, leader, is_catch_up=is_catch_up)
            self._fetchers[leader, is_catch_up] = found
        return found

    def _change_fetcher(self, leader: int, fetched: _FetchedReplica) -> None:
        self._fetcher(leader, is_catch_up=fetched.is_behind).add_fetched(fetched)

    def _is_catching_up(self, leader: int) -> bool:
        found = self._fetchers.get((leader, True))
        return found is not None and bool(found.partitions)

    def remove(self, partition: Partition) -> None:
        """Stop replicating a partition, because it is closed or is not a follower any more."""
        self._remove(partition, except_leader=NO_LEADER)

    def _remove(self, partition: Partition, *, except_leader: int) -> None:
        for key, fetcher in list(self._fetchers.items()):
            if key[0] == except_leader:
                continue
            fetcher.remove(partition)
            if not fetcher.partitions:
                del self._fetchers[key]
                fetcher.end()
                self._ending = [fetcher, *(one for one in self._ending if one.is_running)]

    def failed_replicas(self) -> Iterator[FailedReplica]:
        """Yield the partitions that are not replicated now because of an error."""
        for fetcher in self._fetchers.values():
            for fetched in fetcher.partitions.values():
                if fetched.error is not None:
                    yield FailedReplica(fetched.partition, fetched.error)

    def stop(self) -> None:
        """Stop all fetchers."""
        self._stopped = True
        for fetcher in (*self._fetchers.values(), *self._ending):
            fetcher.stop()
        self._fetchers.clear()
        self._ending.clear()
