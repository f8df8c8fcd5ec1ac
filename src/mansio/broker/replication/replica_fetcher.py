"""Replica fetcher: replicates the partitions led by other brokers, with one fetcher per leader (Kafka
`ReplicaFetcherThread`), and a second one, with a connection of its own, for replicas that are *behind*: they fetch
below the leader's high watermark, so they are not in sync. They need many records, for which no producer waits;
producers with acks=all wait for the replicas that are in sync.

    fetch -> append unchanged -> flush -> fetch ...

One request contains all partitions of a leader, and one request per fetcher is in flight. The fetch offset of a
partition is this broker's flushed end offset, so the request also reports to the leader how much of the log this broker
has flushed. A fetcher therefore waits for its flushes before it fetches again; the leader flushes at the same time.

Invariants:
* A response changes a partition only if the partition still has the role that it had when the request was sent.
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
from mansio.state.quota import TokenBucket
from mansio.state.replica import NO_LEADER, FollowerReplica
from mansio.tracebacks import copied, without_traceback
from mansio.wire.apis import fetch
from mansio.wire.apis.fetch import FetchPartition, decode_response, encode_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Peers, Promise, Random, Scheduler, Timer
    from mansio.wire.apis.fetch import FetchedPartition, FetchResponse


logger = logging.getLogger(__name__)

FETCH_VERSION: Final = fetch.REPLICA_FETCH_VERSION
"""Version of Fetch requests between brokers."""

FOLLOWER_CLIENT_ID: Final = "mansio-follower"
FOLLOWER_CLIENT_ID_BYTES: Final = FOLLOWER_CLIENT_ID.encode()
FLUSH_WAIT_MS: Final = 20
"""Delay before a partition is tried again whose log is being flushed, which a truncation or a fetch has to wait for."""

CATCH_UP_WAIT_MS: Final = 50
"""Time for which a leader may hold a request while other replicas are catching up. One that has caught up is in sync at
once, and its next fetch, for which producers wait, is in the request after this one."""

ACTIVE_TIME_S: Final = 0.5
"""Time for which a partition counts as active after records were received for it."""

IDLE_INTERVAL_PER_PARTITION_S: Final = 0.0001
"""The interval at which idle partitions are fetched while others are active, divided by the number of partitions."""

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
    """Number of partitions above which idle partitions are fetched less often than active ones."""


class _FetchedReplica:
    """One replicated partition. It is not fetched before `retry_at_s`, in monotonic seconds."""

    __slots__ = (
        "active_until_s",
        "attempts",
        "error",
        "is_behind",
        "key",
        "logged_error",
        "partition",
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
        self.active_until_s = 0.0
        self.is_behind = False
        self.error: MansioError | None = None
        self.logged_error = ""

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
        self._work: Timer | None = None
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
        self.partitions[fetched.partition] = fetched
        self.wake()
        if self._work is None:
            name = f"follow broker {self._leader}"
            self._work = self._context.scheduler.spawn(self._run(), name=name)

    def remove(self, partition: Partition) -> None:
        """Stop replicating the partition; a response in flight no longer changes it."""
        self.partitions.pop(partition, None)

    def stop(self) -> None:
        self.partitions.clear()
        if self._work is not None:
            self._work.cancel()
            self._work = None

    # The loop

    async def _run(self) -> None:
        context = self._context
        settings = context.settings
        while True:
            requested, wait_ms = self._select_partitions(self._due_partitions())
            if not requested:
                await self._sleep(self._wait_ms())
                continue
            try:
                frame = await self._peers.send(
                    self._leader,
                    self._encode_fetch_request(requested, wait_ms),
                    timeout_ms=settings.request_timeout_ms,
                )
                response = fetch.decode_replica_response(frame) or decode_response(FETCH_VERSION, frame)
                if response.error_code:
                    raise error_for_code(response.error_code, "the leader rejected the request")
            except MansioError as error:
                self._attempts += 1
                if self._attempts >= LOGGED_ATTEMPTS_MIN:
                    self._log_error(error)
                await self._sleep(self._backoff_ms(self._attempts))
                continue
            self._attempts = 0
            self._logged_error = None
            await self._wait_until_flushed(self._apply_response(requested, response))

    def _due_partitions(self) -> list[_FetchedReplica]:
        """Return the partitions to fetch now, in order of the time since records were last received for them."""
        now = self._context.clock.monotonic()
        throttled = now < self._context.throttle.fetch_allowed_at_s
        due = []
        for one in tuple(self.partitions.values()):
            partition = one.partition
            log = partition.log
            if partition.replica is not one.replica or partition.closed:
                del self.partitions[partition]
                continue
            if one.retry_at_s > now or (throttled and one.is_behind):
                continue
            if (failure := partition.failure) is not None:
                self._delay_retry(one, failure)
            elif (
                log.end_offset > log.durable_end_offset
            ):  # it was the leader before; its fetch position must be flushed
                one.retry_at_s = now + FLUSH_WAIT_MS / 1000
            else:
                due.append(one)
        return due

    def _select_partitions(self, due: list[_FetchedReplica]) -> tuple[list[_FetchedReplica], int]:
        """Return the partitions of the next request, and the milliseconds that the leader may wait for records.

        A request takes both brokers time for each partition. Of many partitions usually few are active; most requests
        therefore contain active ones only.
        """
        settings = self._context.settings
        wait_ms = settings.fetch_wait_ms
        if not self._is_catch_up and self._context.is_catching_up(self._leader):
            wait_ms = min(wait_ms, CATCH_UP_WAIT_MS)
        if len(due) <= settings.all_partitions_max:
            return due, wait_ms
        now = self._context.clock.monotonic()
        active = [one for one in due if one.active_until_s > now]
        left_ms = (self._all_due_s - now) * 1000
        if active and left_ms >= 1:
            return active, min(int(left_ms), wait_ms)
        self._all_due_s = now + len(due) * IDLE_INTERVAL_PER_PARTITION_S
        return due, wait_ms

    def _wait_ms(self) -> float:
        """Return the time in milliseconds until a delayed or throttled partition is due."""
        now = self._context.clock.monotonic()
        due = [
            max(one.retry_at_s, self._context.throttle.fetch_allowed_at_s if one.is_behind else 0.0)
            for one in self.partitions.values()
        ]
        at = min(due, default=now + self._context.settings.backoff_ms_max / 1000)
        return max(1.0, (at - now) * 1000)

    def _encode_fetch_request(self, requested: Sequence[_FetchedReplica], wait_ms: int) -> bytes:
        settings = self._context.settings
        topics: dict[bytes, list[FetchPartition]] = {}
        for fetched in requested:
            partition = fetched.partition
            log = partition.log
            offset = log.durable_end_offset
            topics.setdefault(fetched.topic_id, []).append(
                FetchPartition(
                    partition.index,
                    fetched.replica.leader_epoch,
                    offset,
                    log.leader_epochs.epoch_for_offset(offset - 1),
                    log.durable_start_offset,
                    settings.partition_bytes_max,
                )
            )
        if len(requested) <= fetch.ONE_BYTE_COUNT_MAX:
            return fetch.encode_replica_request(
                FOLLOWER_CLIENT_ID_BYTES,
                topics,
                max_wait_ms=wait_ms,
                max_bytes=self._response_bytes_max,
                replica_id=self._context.node_id,
                replica_epoch=self._context.broker_epoch(),
            )
        return encode_request(
            FETCH_VERSION,
            0,
            FOLLOWER_CLIENT_ID,
            [(None, topic_id, partitions) for topic_id, partitions in topics.items()],
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=self._response_bytes_max,
            replica_id=self._context.node_id,
            replica_epoch=self._context.broker_epoch(),
        )

    # Responses

    def _apply_response(
        self, requested: Sequence[_FetchedReplica], response: FetchResponse
    ) -> list[_FetchedReplica]:
        """Apply a response; return the partitions with batches that are not flushed yet."""
        by_key = {one.key: one for one in requested}
        grown = []
        for _, topic_id, answers in response.topics:
            for answer in answers:
                fetched = by_key.pop((topic_id or b"", answer.index), None)
                if fetched is None or not fetched.is_current:
                    continue
                try:
                    if self._apply_partition(fetched, answer):
                        grown.append(fetched)
                except MansioError as error:
                    self._delay_retry(fetched, error)
                except Exception as error:  # noqa: BLE001 - a defect delays its partition, not the leader's others
                    self._on_defect(fetched, error)
                else:
                    fetched.attempts, fetched.error, fetched.logged_error = 0, None, ""
        for fetched in by_key.values():
            if fetched.is_current:
                self._delay_retry(
                    fetched, UnknownTopicId("the leader's response does not contain the partition")
                )
        unsynced = [
            log
            for one in requested
            if (log := one.partition.log).end_offset > log.durable_end_offset and one.is_current
        ]
        if unsynced:
            group_commit = requested[0].partition.group_commit  # one per broker
            group_commit.request_flush_of_all(unsynced, are_copied=self._is_catch_up)
        for fetched in grown:  # the others come first in the next request
            if self.partitions.pop(fetched.partition, None) is fetched:
                self.partitions[fetched.partition] = fetched
        for fetched in requested:
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
                fetcher.stop()
                del self._fetchers[key]

    def failed_replicas(self) -> Iterator[FailedReplica]:
        """Yield the partitions that are not replicated now because of an error."""
        for fetcher in self._fetchers.values():
            for fetched in fetcher.partitions.values():
                if fetched.error is not None:
                    yield FailedReplica(fetched.partition, fetched.error)

    def stop(self) -> None:
        """Stop all fetchers."""
        self._stopped = True
        for fetcher in self._fetchers.values():
            fetcher.stop()
        self._fetchers.clear()
