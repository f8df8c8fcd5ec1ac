"""Fetch use case: read partitions for consumers and followers, at once or when there is something to read.

A fetch that finds less than `min_bytes` is parked with its partitions and repeated when one of them advances, or
completed with what there is after `max_wait_ms`. A follower's fetch (in a cluster) reads to the end of the log and
reports what the follower has flushed; parked, it is woken by appends and not by commits.

Invariants:
* No record at or above the partition's readable end is returned to a client.
* A parked fetch completes exactly once, or is cancelled.
* The first batch of a result is returned even if it is larger than the limits (KIP-74), so that a reader always makes
  progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.broker.replication.fetch_coalescing import WAIT_MS, FetchCoalescer
from mansio.errors import MansioError, OffsetOutOfRange, StaleBrokerEpoch, VerificationPending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.broker_authenticator import BrokerAuthenticator
    from mansio.broker.services.produce import ProduceService
    from mansio.broker.services.quotas import QuotaService
    from mansio.ports import Scheduler, Timer
    from mansio.state.broker_handshake import BrokerIdentity
    from mansio.storage.flush.group_commit import GroupCommit
    from mansio.storage.segment_list import LogSlice

    TopicData = tuple[str | None, bytes | None, list["PartitionData"]]

FOLLOWER_NOTIFY_DELAY_MS: Final = 50
"""Followers may receive the metadata of a new leader this much later than the leader itself."""

NO_REPLICA: Final = -1

FLUSH_WAIT_MS: Final = 500
"""Time that a fetch which wants no wait waits for the flush of records that were acknowledged before it (acks=1), or
for the verification of what is on disk."""


class PartitionFetch(Protocol):
    """What is requested of one partition. Epochs and the follower's log start offset are -1 where unknown."""

    @property
    def index(self) -> int: ...
    @property
    def current_leader_epoch(self) -> int: ...
    @property
    def fetch_offset(self) -> int: ...
    @property
    def last_fetched_epoch(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...


class FetchRequest(Protocol):
    """A fetch. `topics` are (name or None, id or None, [PartitionFetch]). Whether it is a follower's is no property of
    the request: it depends on who may send it. `is_repair_read`: the replica reads batches that are damaged in its own
    log; of a client it has no effect."""

    @property
    def max_wait_ms(self) -> int: ...
    @property
    def min_bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def isolation_level(self) -> int: ...
    @property
    def is_repair_read(self) -> bool: ...
    @property
    def topics(self) -> Sequence[tuple[str | None, bytes | None, Sequence[PartitionFetch]]]: ...


class PartitionData(NamedTuple):
    """Result for one partition. `records` is `size_bytes` long. `diverging` is (leader epoch, end offset) where a
    follower's log diverges (KIP-595)."""

    partition: int
    error: MansioError | None = None
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    size_bytes: int = 0
    records: LogSlice | bytes | None = None
    diverging: tuple[int, int] | None = None


class FetchResult(NamedTuple):
    """Result of one attempt. `is_urgent`: it contains an error, or news for a follower, and must be returned now.

    `error` rejects the whole fetch. `group_commit` flushes the logs that a follower receives copies of. `is_pending`:
    there are records that are verified or repaired first.
    """

    topics: list[TopicData]
    size_bytes: int
    is_urgent: bool
    error: MansioError | None = None
    by_replica: bool = False
    group_commit: GroupCommit | None = None
    is_pending: bool = False

    @classmethod
    def refused(cls, request: FetchRequest, error: MansioError) -> FetchResult:
        """The whole fetch is rejected. Each partition has the error, too: before version 7 (KIP-227) a response has no
        other place for it."""
        topics: list[TopicData] = [
            (name, topic_id, [PartitionData(want.index, error) for want in wanted])
            for name, topic_id, wanted in request.topics
        ]
        return cls(topics, 0, True, error)

    def without_records(self) -> FetchResult:
        """The same result for a client that is throttled first (KIP-219)."""
        topics = [
            (name, topic_id, [one._replace(size_bytes=0, records=None) for one in partitions])
            for name, topic_id, partitions in self.topics
        ]
        return FetchResult(topics, 0, self.is_urgent)


class FetchCounters:
    """Incremented per fetch, never per record."""

    __slots__ = ("fetched_bytes", "fetches")

    def __init__(self) -> None:
        self.fetches = 0
        self.fetched_bytes = 0

    def fetched(self, size_bytes: int) -> None:
        self.fetches += 1
        self.fetched_bytes += size_bytes


class FetchService:
    """Reads for consumers and followers. All methods run on the broker's event loop."""

    __slots__ = (
        "_authenticator",
        "_coalescer",
        "_follower_notification_scheduled",
        "_partitions",
        "_produce",
        "_quotas",
        "_response_bytes_max",
        "_scheduler",
        "_wait_ms_max",
        "counters",
        "parked",
    )

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        produce: ProduceService,
        quotas: QuotaService,
        scheduler: Scheduler,
        response_bytes_max: int,
        wait_ms_max: int,
        authenticator: BrokerAuthenticator,
    ) -> None:
        self._partitions = partitions
        self._produce = produce
        self._quotas = quotas
        self._scheduler = scheduler
        self._response_bytes_max = response_bytes_max
        self._wait_ms_max = wait_ms_max
        self._coalescer = FetchCoalescer(produce.pending)
        self._follower_notification_scheduled = False
        self._authenticator = authenticator
        self.counters = FetchCounters()
        self.parked: dict[ParkedFetch, None] = {}

    def begin(
        self, request: FetchRequest, client_id: str | None, follower: BrokerIdentity | None = None
    ) -> tuple[FetchResult, bool]:
        """Read every partition of a request that has just arrived. Returns the result, and whether it is final; if not,
        the request is to be parked. `follower`: the authenticated broker that replicates with it; None for a client."""
        if follower is not None:
            return self._begin_for_replica(request, follower)
        result = self.read(request, client_id)
        is_final = (
            result.size_bytes >= request.min_bytes
            or result.is_urgent
            or (
                request.max_wait_ms <= 0 and not result.is_pending and not self._awaits_flush(request, result)
            )
            or not request.topics
        )
        return result, is_final

    def _awaits_flush(self, request: FetchRequest, result: FetchResult) -> bool:
        """There is nothing to read but what was acknowledged and is not flushed yet. A producer with acks=1 expects
        that a consumer finds its record, and Kafka's brokers would return it."""
        if result.size_bytes:
            return False
        find = self._partitions.find
        return any(
            want.fetch_offset < find(name, topic_id, want.index).uncommitted_end
            for name, topic_id, wanted in request.topics
            for want in wanted
        )

    def _begin_for_replica(self, request: FetchRequest, follower: BrokerIdentity) -> tuple[FetchResult, bool]:
        """The same for a follower, whose response may be delayed to coalesce batches (`FetchCoalescer`)."""
        if request.is_repair_read:
            return self._read_for_replica(request, follower, first=False), True
        pending_before = len(self._produce.pending)
        result = self._read_for_replica(request, follower, first=True)
        self._coalescer.follower_reported(pending_before)
        if result.is_urgent or request.max_wait_ms <= 0 or not request.topics:
            return result, True
        found = result.size_bytes >= request.min_bytes
        return result, found and not self._coalescer.should_wait(result.size_bytes)

    def park(
        self,
        request: FetchRequest,
        client_id: str | None,
        first: FetchResult,
        on_done: Callable[[FetchResult], None],
        follower: BrokerIdentity | None = None,
    ) -> ParkedFetch:
        """Wait for more to read: `on_done` is called once with the final result, later. `first` is the result of
        `begin`."""
        parked = ParkedFetch(self, request, client_id, on_done, follower)
        parked.park(coalesce=follower is not None and first.size_bytes >= request.min_bytes)
        return parked

    def read(
        self, request: FetchRequest, client_id: str | None, follower: BrokerIdentity | None = None
    ) -> FetchResult:
        """Read every partition once, within the request's byte limits and the client's quota."""
        if follower is not None:
            return self._read_for_replica(request, follower, first=False)
        remaining = min(request.max_bytes, self._response_bytes_max)
        quotas = self._quotas.active
        if quotas is not None and (burst_bytes := quotas.fetch_max_bytes(client_id)) is not None:
            remaining = min(remaining, burst_bytes)
        total = 0
        has_error = is_pending = False
        isolation_level = request.isolation_level
        find = self._partitions.find
        topics: list[TopicData] = []
        for name, topic_id, wanted in request.topics:
            results: list[PartitionData] = []
            for want in wanted:
                try:
                    partition = find(name, topic_id, want.index)
                    partition.check_leader_epoch(want.current_leader_epoch)
                    records = None
                    if remaining > 0:
                        records = partition.read(
                            want.fetch_offset, min(remaining, want.max_bytes), isolation_level
                        )
                except VerificationPending:  # woken when it is done
                    records, is_pending = None, True
                except MansioError as error:
                    has_error = True
                    results.append(PartitionData(want.index, error))
                    continue
                size = 0 if records is None else records.length
                if size and total and size > remaining:
                    records, size = None, 0  # the first batch exceeds what remains of the limit
                results.append(
                    PartitionData(
                        want.index,
                        None,
                        partition.replica.high_watermark,
                        partition.readable_end(isolation_level),
                        partition.log.start_offset,
                        size,
                        records,
                    )
                )
                total += size
                remaining -= size
            topics.append((name, topic_id, results))
        return FetchResult(topics, total, has_error, is_pending=is_pending and not total)

    def _read_for_replica(
        self, request: FetchRequest, follower: BrokerIdentity, *, first: bool
    ) -> FetchResult:
        """Read for a follower. The whole fetch is rejected if its broker has another session by now, or none known
        here: two processes, and two disks, may then have its broker id. `first`: the request has just arrived."""
        node_id, broker_epoch = follower
        if not self._authenticator.is_current(follower):
            stale = StaleBrokerEpoch(f"broker {node_id} has another session than epoch {broker_epoch}")
            return FetchResult([], 0, True, stale, by_replica=True)
        remaining = min(request.max_bytes, self._response_bytes_max)
        total = 0
        group_commit = None
        is_urgent = False
        topics: list[TopicData] = []
        for name, topic_id, wanted in request.topics:
            results: list[PartitionData] = []
            for want in wanted:
                partition = None
                records: LogSlice | bytes | None
                diverging, urgent = None, False
                try:
                    partition = self._partitions.find(name, topic_id, want.index)
                    bytes_max = min(remaining, want.max_bytes)
                    if request.is_repair_read:
                        records = partition.read_for_repair(
                            want.current_leader_epoch, want.fetch_offset, bytes_max
                        )
                    else:
                        records, diverging, urgent = partition.read_for_follower(
                            node_id, broker_epoch, want, bytes_max, first=first
                        )
                except VerificationPending:
                    assert partition is not None
                    records = None
                except MansioError as error:
                    is_urgent = True
                    results.append(_replica_error(partition, want.index, error))
                    continue
                size = (
                    0 if records is None else len(records) if isinstance(records, bytes) else records.length
                )
                if total and size > remaining:
                    records, size = None, 0  # the first batch exceeds what remains of the limit
                is_urgent = is_urgent or urgent
                if size and not request.is_repair_read:
                    group_commit = partition.group_commit
                total += size
                remaining -= size
                high_watermark, start = partition.replica.high_watermark, partition.log.start_offset
                results.append(
                    PartitionData(
                        want.index, None, high_watermark, high_watermark, start, size, records, diverging
                    )
                )
            topics.append((name, topic_id, results))
        return FetchResult(topics, total, is_urgent, by_replica=True, group_commit=group_commit)

    def answer_followers(self) -> None:
        """Complete the parked fetches of followers, because this broker has become leader of a partition: their next
        fetches include it. Repeated after `FOLLOWER_NOTIFY_DELAY_MS` for followers that receive the metadata later."""
        if not self._follower_notification_scheduled:
            self._follower_notification_scheduled = True
            for delay_ms, last in ((0, False), (FOLLOWER_NOTIFY_DELAY_MS, True)):
                self._scheduler.call_later(delay_ms, self._answer_followers, last)

    def _answer_followers(self, last: bool) -> None:
        if last:
            self._follower_notification_scheduled = False
        for parked in tuple(self.parked):
            if parked.by_replica:
                parked.complete_now()

    def stop(self) -> None:
        """Complete every parked fetch with what there is: the broker stops."""
        for parked in tuple(self.parked):
            parked.complete_now()


class ParkedFetch:
    """A fetch that waits for more to read, for its timeout, or for the broker to stop."""

    __slots__ = (
        "_client_id",
        "_coalesces",
        "_follower",
        "_on_done",
        "_partitions",
        "_request",
        "_service",
        "_timer",
        "_woken",
        "by_replica",
    )

    def __init__(
        self,
        service: FetchService,
        request: FetchRequest,
        client_id: str | None,
        on_done: Callable[[FetchResult], None],
        follower: BrokerIdentity | None,
    ) -> None:
        self._service = service
        self._request = request
        self._client_id = client_id
        self._on_done = on_done
        self._partitions: dict[Partition, None] = {}
        self._timer: Timer | None = None
        self._woken = False
        self._coalesces = False
        self._follower = follower
        self.by_replica = follower is not None

    def park(self, *, coalesce: bool = False) -> None:
        """Start to wait. `coalesce`: a follower's fetch that has found something and is only delayed.

        A request that names a partition several times does not wait: each append would repeat the whole fetch for each.
        """
        service = self._service
        named = 0
        for name, topic_id, wanted in self._request.topics:
            for want in wanted:
                partition = service._partitions.find(name, topic_id, want.index)
                if self.by_replica:
                    partition.park_follower(self.wake)
                else:
                    partition.park(self.wake)
                self._partitions[partition] = None
            named += len(wanted)
        wait_ms = 0
        if named == len(self._partitions):
            wait_ms = min(self._request.max_wait_ms, service._wait_ms_max)
            if wait_ms <= 0:
                wait_ms = FLUSH_WAIT_MS
        self._timer = service._scheduler.call_later(wait_ms, self.complete_now)
        if coalesce:
            self._coalesce()
        service.parked[self] = None

    def wake(self) -> None:
        """A partition has advanced. Everything that advances in this iteration of the loop is read once, at its end."""
        if not self._woken:
            self._woken = True
            self._service._scheduler.call_soon(self._retry)

    def complete_now(self) -> None:
        """Complete with what there is."""
        if self._timer is not None:
            self._complete(self._service.read(self._request, self._client_id, self._follower))

    def cancel(self) -> None:
        """Stop waiting; `on_done` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for partition in self._partitions:
            if self.by_replica:
                partition.unpark_follower(self.wake)
            else:
                partition.unpark(self.wake)
        self._partitions.clear()
        self._service.parked.pop(self, None)

    def _retry(self) -> None:
        self._woken = False
        if self._timer is None:
            return
        coalescer = self._service._coalescer
        if self._coalesces:
            if coalescer.full:
                self._coalesced()
            return
        result = self._service.read(self._request, self._client_id, self._follower)
        if result.is_urgent:
            self._complete(result)
        elif result.size_bytes >= self._request.min_bytes:
            if self.by_replica and coalescer.should_wait(result.size_bytes):
                self._coalesce()
            else:
                self._complete(result)
        elif result.size_bytes and self._request.max_wait_ms <= 0:  # it waited for a flush only
            self._complete(result)

    def _coalesce(self) -> None:
        """There is something for a follower; complete when the round is full, after `WAIT_MS` at the latest."""
        assert self._timer is not None
        self._coalesces = True
        self._timer.cancel()
        self._timer = self._service._scheduler.call_later(WAIT_MS, self._coalesced)

    def _coalesced(self) -> None:
        self._service._coalescer.waited()
        self.complete_now()

    def _complete(self, result: FetchResult) -> None:
        self.cancel()
        self._on_done(result)


def _replica_error(partition: Partition | None, index: int, error: MansioError) -> PartitionData:
    """A follower whose offset is out of range is sent the start of this log."""
    if partition is None or not isinstance(error, OffsetOutOfRange):
        return PartitionData(index, error)
    return PartitionData(
        index, error, high_watermark=partition.high_watermark, log_start_offset=partition.start_offset
    )
