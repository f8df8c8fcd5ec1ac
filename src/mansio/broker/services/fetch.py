"""Fetch service: reads partitions for consumers and followers.

A fetch that finds less than `min_bytes` is parked: it is repeated when one of its partitions gets more readable
records, and completed with the records that it then finds after `max_wait_ms`. A follower's fetch (in a cluster) reads
to the end of the log, and its offset reports what the follower has flushed. While it is parked, appends wake it; a
consumer's fetch is woken by commits. A consumer may read from a follower in its rack (`FollowerReads`).

Invariants:
* A client gets only records below the readable end of the partition: the high watermark or last stable offset.
* A parked fetch completes exactly once, or is cancelled.
* Records are returned to a client only if it may read the topic at the time of the answer.
* The first batch of a result is returned even if it is larger than the byte limits (KIP-74), so that a reader always
  makes progress.
* A follower's fetch in a session (`mansio.state.fetch_session`) reads the partitions that have changed; its response
  has those with news. What the follower is sent is recorded only with the result that is sent.
* A response has records of at most `FileCache.cached_files_max` partitions, whose files stay open until the records are
  sent; it is returned at once then. A reader asks for those of the other partitions first in its next fetch, as after a
  response that has reached its byte limit. While responses that are being sent keep too many files open
  (`FileCache.is_limited`), further ones have at most `COPIED_BYTES_MAX` of copied records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from mansio.broker.replication.fetch_coalescing import WAIT_MS_MAX, FetchCoalescer
from mansio.broker.services.follower_reads import READ_HERE
from mansio.errors import MansioError, OffsetOutOfRange, StaleBrokerEpoch, VerificationPending
from mansio.state.authorization.acls import Operation
from mansio.state.fetch_session import FetchSessions
from mansio.tracebacks import without_traceback
from mansio.wire.field_values import FINAL_FETCH_SESSION_EPOCH, NO_FETCH_SESSION_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.broker_authenticator import BrokerAuthenticator
    from mansio.broker.services.follower_reads import FollowerReads
    from mansio.broker.services.produce import ProduceService
    from mansio.broker.services.quotas import QuotaService
    from mansio.ports import Clock, Scheduler, Timer
    from mansio.state.broker_handshake import BrokerIdentity
    from mansio.state.fetch_session import FetchSession
    from mansio.storage.file_cache import FileCache
    from mansio.storage.group_commit import GroupCommit
    from mansio.storage.segment_list import LogSlice

    TopicData = tuple[str | None, bytes | None, list["PartitionData"]]
    WantedTopics = Sequence[tuple[str | None, bytes | None, Sequence["PartitionFetch"]]]

FOLLOWER_NOTIFY_DELAY_MS: Final = 50
"""Delay after which the parked fetches of followers are completed once more when this broker has become leader:
followers may receive the metadata of the election later than this broker."""

NO_REPLICA: Final = -1
"""Replica id in the fetch of a client."""

FIRST_SESSION_ID_MAX: Final = 1 << 30

FLUSH_WAIT_MS: Final = 500
"""Maximum time for which even a fetch with `max_wait_ms` 0 waits: for the flush of records that were acknowledged
before it (acks=1), or for the verification of batches on disk."""


COPIED_BYTES_MAX: Final = 64 << 10
"""Maximum size of the records in a response that must not keep files open; more only if the first batch is larger."""


class PartitionFetch(Protocol):
    """The part of a fetch request that concerns one partition. Epochs, and the log start offset of a follower, are -1
    if they are unknown."""

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
    """A fetch request. `topics`: (name or None, topic id or None, [PartitionFetch]). `is_repair_read`: a replica reads
    batches that are damaged in its own log; without effect in the request of a client. The request itself does not tell
    whether a follower sent it; this depends on the authenticated identity of the connection. `session_id`,
    `session_epoch`, `forgotten_topics`: of the fetch session, without effect in the request of a client."""

    @property
    def max_wait_ms(self) -> int: ...
    @property
    def min_bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def isolation_level(self) -> int: ...
    @property
    def rack_id(self) -> str: ...
    @property
    def is_repair_read(self) -> bool: ...
    @property
    def topics(self) -> WantedTopics: ...
    @property
    def session_id(self) -> int: ...
    @property
    def session_epoch(self) -> int: ...
    @property
    def forgotten_topics(self) -> Sequence[tuple[str | None, bytes | None, Sequence[int]]]: ...


class PartitionData(NamedTuple):
    """Result of a fetch for one partition. `records` has `size_bytes` bytes. `diverging`: (leader epoch, end offset)
    from which the follower's log diverges from this one (KIP-595), None if it does not. `aborted`: (producer id, first
    offset) of the aborted transactions with records in `records`, for a reader of committed records.
    `preferred_replica`: node id of the follower from which the client has to read instead, -1 if there is none."""

    partition: int
    error: MansioError | None = None
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    size_bytes: int = 0
    records: LogSlice | bytes | None = None
    diverging: tuple[int, int] | None = None
    aborted: Sequence[tuple[int, int]] | None = None
    preferred_replica: int = READ_HERE


class FetchResult(NamedTuple):
    """Result of reading all partitions of a fetch once.

    `is_urgent`: the result must be returned now, because it contains an error, a preferred replica, or what the
    follower does not know yet: a log start offset, a divergence, or a high watermark that its readers wait for.
    `error`: rejects the whole fetch. `group_commit`: flushes the logs of the returned batches, for a follower.
    `is_pending`: records exist that can be returned only after they are verified or repaired.
    `is_full`: the result has records of as many partitions as it may have. `session`: of the follower, None if it has
    none.
    """

    topics: list[TopicData]
    size_bytes: int
    is_urgent: bool
    error: MansioError | None = None
    is_by_follower: bool = False
    group_commit: GroupCommit | None = None
    is_pending: bool = False
    is_full: bool = False
    session: FetchSession | None = None

    @classmethod
    def for_rejected_request(cls, request: FetchRequest, error: MansioError) -> FetchResult:
        """Return the result of a fetch that is rejected as a whole. Each partition also has the error, because a
        response has no other field for it before version 7 (KIP-227)."""
        topics: list[TopicData] = [
            (name, topic_id, [PartitionData(want.index, without_traceback(error)) for want in wanted])
            for name, topic_id, wanted in request.topics
        ]
        return cls(topics, 0, True, error)

    def without_records(self) -> FetchResult:
        """Return a copy of the result without records, for a client that must pause first (KIP-219)."""
        topics = [
            (name, topic_id, [one._replace(size_bytes=0, records=None, aborted=None) for one in partitions])
            for name, topic_id, partitions in self.topics
        ]
        return FetchResult(topics, 0, self.is_urgent)


class FetchCounters:
    """Counters of fetches and of fetched bytes; incremented per fetch, never per record."""

    __slots__ = ("fetched_bytes", "fetches")

    def __init__(self) -> None:
        self.fetches = 0
        self.fetched_bytes = 0

    def count_fetch(self, size_bytes: int) -> None:
        """Count one fetch that returned `size_bytes` bytes of records."""
        self.fetches += 1
        self.fetched_bytes += size_bytes


class FetchService:
    """Reads for consumers and followers. All methods run on the broker's event loop."""

    __slots__ = (
        "_authenticator",
        "_clock",
        "_coalescer",
        "_files",
        "_follower_notification_scheduled",
        "_follower_reads",
        "_partitions",
        "_produce",
        "_quotas",
        "_response_bytes_max",
        "_scheduler",
        "_wait_ms_max",
        "counters",
        "parked",
        "sessions",
    )

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        produce: ProduceService,
        quotas: QuotaService,
        clock: Clock,
        scheduler: Scheduler,
        response_bytes_max: int,
        wait_ms_max: int,
        authenticator: BrokerAuthenticator,
        files: FileCache,
        follower_reads: FollowerReads | None = None,
    ) -> None:
        """`follower_reads`: None on a single node."""
        self._files = files
        self._partitions = partitions
        self._produce = produce
        self._quotas = quotas
        self._clock = clock
        self._scheduler = scheduler
        self._response_bytes_max = response_bytes_max
        self._wait_ms_max = wait_ms_max
        self._coalescer = FetchCoalescer(produce.pending)
        self._follower_notification_scheduled = False
        self._authenticator = authenticator
        self._follower_reads = follower_reads
        self.counters = FetchCounters()
        self.parked: dict[ParkedFetch, None] = {}
        self.sessions = FetchSessions(clock.wall_ms() % FIRST_SESSION_ID_MAX + 1)
        """The fetch sessions of followers."""

    def begin_fetch(
        self,
        request: FetchRequest,
        user: str,
        client_id: str | None,
        grants: Grants | None,
        follower: BrokerIdentity | None = None,
    ) -> tuple[FetchResult, bool]:
        """Read all partitions of a request that has just arrived. Return the result and whether it is final; if it is
        not, the caller must `park` the request.

        `grants`: of the client, which needs READ for each topic; None if it may read all of them. `follower`: the
        authenticated broker that sent the request, None for a client."""
        if follower is not None:
            return self._begin_follower_fetch(request, follower)
        result = self.read(request, user, client_id, grants)
        is_final = (
            result.size_bytes >= request.min_bytes
            or result.is_urgent
            or result.is_full
            or (
                request.max_wait_ms <= 0 and not result.is_pending and not self._awaits_flush(request, result)
            )
            or not request.topics
        )
        return result, is_final

    def _awaits_flush(self, request: FetchRequest, result: FetchResult) -> bool:
        """Return whether the result is empty although records at the requested offsets are acknowledged (acks=1) and
        not flushed yet. A producer with acks=1 expects that a consumer finds its record; Kafka's brokers would return
        it."""
        if result.size_bytes:
            return False
        find = self._partitions.find
        return any(
            want.fetch_offset < find(name, topic_id, want.index).uncommitted_end
            for name, topic_id, wanted in request.topics
            for want in wanted
        )

    def _begin_follower_fetch(
        self, request: FetchRequest, follower: BrokerIdentity
    ) -> tuple[FetchResult, bool]:
        """Like `begin_fetch`, for a follower, whose response may be delayed so that it carries more batches
        (`FetchCoalescer`)."""
        if request.is_repair_read:
            return self._read_for_follower(request, follower, None, first=False), True
        session = None
        if request.session_epoch != FINAL_FETCH_SESSION_EPOCH or request.session_id != NO_FETCH_SESSION_ID:
            try:
                session = self.sessions.begin(
                    request.session_id,
                    request.session_epoch,
                    follower,
                    request.topics,
                    request.forgotten_topics,
                    self._clock.monotonic() * 1000,
                )
            except MansioError as error:
                return FetchResult([], 0, True, without_traceback(error), is_by_follower=True), True
        pending_before = len(self._produce.pending)
        result = self._read_for_follower(request, follower, session, first=True)
        self._coalescer.record_follower_fetch(pending_before)
        is_final = not request.topics if session is None else session.is_new
        if not (is_final or result.is_urgent or result.is_full or request.max_wait_ms <= 0):
            found = result.size_bytes >= request.min_bytes
            if not found or self._coalescer.should_wait(result.size_bytes):
                return result, False
        return self.select_news(result, follower), True

    def select_news(self, result: FetchResult, follower: BrokerIdentity) -> FetchResult:
        """Return a final result for a follower with the partitions that its session has to answer, and record what the
        follower is sent."""
        session = result.session
        if session is None or result.error is not None:
            return result
        find = self._partitions.find
        topics: list[TopicData] = []
        left_out = 0
        for name, topic_id, results in result.topics:
            news = []
            for data in results:
                entry = session.partitions[topic_id or b"", data.partition]
                if entry.record_answer(data):
                    news.append(data)
                if data.size_bytes or data.error is not None or data.diverging is not None:
                    continue
                partition = find(name, topic_id, data.partition)
                progress = partition.leader_progress
                if progress is not None and entry.fetch_offset >= partition.log.end_offset:
                    entry.record_agreement(progress.followers().get(follower.node_id))
            left_out += len(results) - len(news)
            if news:
                topics.append((name, topic_id, news))
        return result._replace(topics=topics) if left_out else result

    def park(
        self,
        request: FetchRequest,
        user: str,
        client_id: str | None,
        grants: Grants | None,
        first: FetchResult,
        on_done: Callable[[FetchResult], None],
        follower: BrokerIdentity | None = None,
    ) -> ParkedFetch:
        """Park a request until more can be read; `on_done` is called once, later, with the final result. `first`: the
        result of `begin_fetch`."""
        parked = ParkedFetch(self, request, user, client_id, grants, on_done, follower, first.session)
        parked.park(coalesce=follower is not None and first.size_bytes >= request.min_bytes)
        return parked

    def read(
        self,
        request: FetchRequest,
        user: str,
        client_id: str | None,
        grants: Grants | None,
        follower: BrokerIdentity | None = None,
        session: FetchSession | None = None,
    ) -> FetchResult:
        """Read all partitions once, within the byte limits of the request and the client's quota. `session`: of the
        follower."""
        if follower is not None:
            return self._read_for_follower(request, follower, session, first=False)
        remaining = min(request.max_bytes, self._response_bytes_max)
        quotas = self._quotas.active
        if quotas is not None and (burst_bytes := quotas.fetch_max_bytes(user, client_id)) is not None:
            remaining = min(remaining, burst_bytes)
        total = 0
        files = self._files
        sent_files, files_left = files.sent_files, files.cached_files_max
        is_limited = False
        is_urgent = is_pending = False
        isolation_level = request.isolation_level
        find = self._partitions.find
        follower_reads = self._follower_reads if request.rack_id else None
        readable = None
        if grants is not None:
            if grants.revision != grants.rules.revision:
                grants.renew()
            readable = grants.readable
        topics: list[TopicData] = []
        for name, topic_id, wanted in request.topics:
            results: list[PartitionData] = []
            if (
                readable is not None
                and (topic_id if name is None else name) not in readable
                and (refused := self._refusal(grants, name, topic_id)) is not None
            ):
                is_urgent = True
                topics.append((name, topic_id, [PartitionData(want.index, refused) for want in wanted]))
                continue
            for want in wanted:
                try:
                    partition = find(name, topic_id, want.index)
                    if follower_reads is None:
                        partition.check_leader_epoch(want.current_leader_epoch)
                    else:
                        preferred = follower_reads.check(
                            partition, request.rack_id, want.current_leader_epoch, want.fetch_offset
                        )
                        if preferred != READ_HERE:
                            is_urgent = True
                            results.append(_redirection(partition, preferred, isolation_level))
                            continue
                    records = None
                    found: LogSlice | bytes | None = None
                    if remaining > 0:
                        records = found = partition.read(
                            want.fetch_offset, min(remaining, want.max_bytes), isolation_level
                        )
                        if sent_files and records is not None and files.is_limited:
                            is_limited, remaining = True, min(remaining, COPIED_BYTES_MAX)
                            records = partition.read(
                                want.fetch_offset, min(remaining, want.max_bytes), isolation_level
                            )
                            found = None if records is None else records.read()
                except VerificationPending:  # the end of the verification wakes the parked fetch
                    records, found, is_pending = None, None, True
                except MansioError as error:
                    is_urgent = True
                    results.append(PartitionData(want.index, without_traceback(error)))
                    continue
                size = 0 if records is None else records.length
                if size and total and size > remaining:
                    records, found, size = None, None, 0  # the first batch exceeds what remains of the limit
                aborted = None
                if isolation_level and records is not None:
                    aborted = _aborted(partition, want.fetch_offset, records.next_offset)
                results.append(
                    PartitionData(
                        want.index,
                        None,
                        partition.replica.high_watermark,
                        partition.readable_end(isolation_level),
                        partition.log.start_offset,
                        size,
                        found,
                        None,
                        aborted,
                    )
                )
                if size:
                    files_left -= 1
                    total += size
                    remaining = remaining - size if files_left else 0
            topics.append((name, topic_id, results))
        return FetchResult(
            topics,
            total,
            is_urgent,
            is_pending=is_pending and not total,
            is_full=not files_left or (is_limited and total > 0),
        )

    def _refusal(
        self, grants: Grants | None, topic: str | None, topic_id: bytes | None
    ) -> MansioError | None:
        if grants is None:
            return None
        return grants.topic_error(Operation.READ, topic, topic_id, self._partitions.name_of, "FETCH")

    def _read_for_follower(
        self, request: FetchRequest, follower: BrokerIdentity, session: FetchSession | None, *, first: bool
    ) -> FetchResult:
        """Read for a follower, in a session the partitions that have changed. The whole fetch is rejected unless
        `follower` is a current session according to the metadata: otherwise two processes with two disks may have its
        broker id. `first`: the request has just arrived."""
        node_id, broker_epoch = follower
        if not self._authenticator.is_current_session(follower):
            stale = StaleBrokerEpoch(f"broker {node_id} has another session than epoch {broker_epoch}")
            return FetchResult([], 0, True, stale, is_by_follower=True)
        remaining = min(request.max_bytes, self._response_bytes_max)
        total = 0
        files = self._files
        sent_files, files_left = files.sent_files, files.cached_files_max
        is_limited = False
        group_commit = None
        is_urgent = False
        topics: list[TopicData] = []
        asked: Any = request.topics if session is None else session.wanted()
        for name, topic_id, wanted in asked:
            results: list[PartitionData] = []
            for want in wanted:
                partition = None
                records: LogSlice | bytes | None
                diverging, urgent = None, False
                try:
                    partition = self._partitions.find(name, topic_id, want.index)
                    if session is not None and want.watched is not partition.waits:  # or it was opened again
                        want.watch(partition.waits)
                    bytes_max = min(remaining, want.max_bytes)
                    if request.is_repair_read:
                        records = partition.read_for_repair(
                            want.current_leader_epoch, want.fetch_offset, bytes_max
                        )
                    else:
                        records, diverging, urgent = partition.read_for_follower(
                            node_id, broker_epoch, want, bytes_max, first=first
                        )
                    if sent_files and not isinstance(records, bytes | None) and files.is_limited:
                        is_limited, remaining = True, min(remaining, COPIED_BYTES_MAX)
                        records = records.read()
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
                if size:
                    files_left -= 1
                    total += size
                    remaining = remaining - size if files_left else 0
                high_watermark, start = partition.replica.high_watermark, partition.log.start_offset
                results.append(
                    PartitionData(
                        want.index, None, high_watermark, high_watermark, start, size, records, diverging
                    )
                )
            topics.append((name, topic_id, results))
        return FetchResult(
            topics,
            total,
            is_urgent,
            is_by_follower=True,
            group_commit=group_commit,
            is_full=not files_left or (is_limited and total > 0),
            session=session,
        )

    def complete_follower_fetches(self) -> None:
        """Complete the parked fetches of followers, because this broker has become leader of a partition, which the
        next fetches of the followers include. This is repeated after `FOLLOWER_NOTIFY_DELAY_MS` for followers that
        receive the metadata later."""
        if not self._follower_notification_scheduled:
            self._follower_notification_scheduled = True
            for delay_ms, last in ((0, False), (FOLLOWER_NOTIFY_DELAY_MS, True)):
                self._scheduler.call_later(delay_ms, self._complete_follower_fetches, last)

    def _complete_follower_fetches(self, last: bool) -> None:
        if last:
            self._follower_notification_scheduled = False
        for parked in tuple(self.parked):
            if parked.is_by_follower:
                parked.complete_now()

    def stop(self) -> None:
        """Complete all parked fetches with the records that are available, because the broker stops."""
        for parked in tuple(self.parked):
            parked.complete_now()


class ParkedFetch:
    """A fetch that waits until more can be read, its timeout expires, or the broker stops."""

    __slots__ = (
        "_client_id",
        "_coalesces",
        "_follower",
        "_grants",
        "_on_done",
        "_partitions",
        "_request",
        "_service",
        "_session",
        "_timer",
        "_user",
        "_woken",
        "is_by_follower",
    )

    def __init__(
        self,
        service: FetchService,
        request: FetchRequest,
        user: str,
        client_id: str | None,
        grants: Grants | None,
        on_done: Callable[[FetchResult], None],
        follower: BrokerIdentity | None,
        session: FetchSession | None,
    ) -> None:
        self._service = service
        self._request = request
        self._user = user
        self._client_id = client_id
        self._grants = grants
        self._on_done = on_done
        self._partitions: dict[Partition, None] = {}
        self._timer: Timer | None = None
        self._woken = False
        self._coalesces = False
        self._follower = follower
        self._session = session
        self.is_by_follower = follower is not None

    def park(self, *, coalesce: bool = False) -> None:
        """Start to wait. `coalesce`: the fetch of a follower has found batches, and waits only for more of them.

        A request that names a partition more than once does not wait: otherwise an append would wake it once for each
        time the partition is named.
        """
        service = self._service
        named = 0
        if self._session is not None:
            self._session.wait(self)  # which watches its partitions
        else:
            named = self._park_at_partitions()
        wait_ms = 0
        if named == len(self._partitions):
            wait_ms = min(self._request.max_wait_ms, service._wait_ms_max)
            if wait_ms <= 0:
                wait_ms = FLUSH_WAIT_MS
        self._timer = service._scheduler.call_later(wait_ms, self.complete_now)
        if coalesce:
            self._coalesce()
        service.parked[self] = None

    def _park_at_partitions(self) -> int:
        """Wait at each partition that the request names; return their number, repeated ones included."""
        service = self._service
        named = 0
        for name, topic_id, wanted in self._request.topics:
            for want in wanted:
                partition = service._partitions.find(name, topic_id, want.index)
                if self.is_by_follower:
                    partition.waits.park_follower(self.wake)
                else:
                    partition.park(self.wake, self._request.isolation_level)
                self._partitions[partition] = None
            named += len(wanted)
        return named

    def wake(self) -> None:
        """Repeat the fetch at the end of this iteration of the event loop, because a partition has advanced. Several
        calls in one iteration repeat it once."""
        if not self._woken:
            self._woken = True
            self._service._scheduler.call_soon(self._retry)

    def complete_now(self) -> None:
        """Complete the fetch with the records that are available now."""
        if self._timer is not None:
            self._complete(
                self._service.read(
                    self._request, self._user, self._client_id, self._grants, self._follower, self._session
                )
            )

    def reject(self, error: MansioError) -> None:
        """Complete the fetch with an error, because its session has ended or has a newer request."""
        if self._timer is not None:
            self._complete(
                FetchResult([], 0, True, without_traceback(error), is_by_follower=self.is_by_follower)
            )

    def cancel(self) -> None:
        """Stop waiting; `on_done` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for partition in self._partitions:
            if self.is_by_follower:
                partition.waits.unpark_follower(self.wake)
            else:
                partition.waits.unpark(self.wake)
        self._partitions.clear()
        if self._session is not None and self._session.waiter is self:
            self._session.wait(None)
        self._service.parked.pop(self, None)

    def _retry(self) -> None:
        self._woken = False
        if self._timer is None:
            return
        coalescer = self._service._coalescer
        if self._coalesces:
            if coalescer.is_full:
                self._on_coalescing_end()
            return
        result = self._service.read(
            self._request, self._user, self._client_id, self._grants, self._follower, self._session
        )
        if result.is_urgent or result.is_full:
            self._complete(result)
        elif result.size_bytes >= self._request.min_bytes:
            if self.is_by_follower and coalescer.should_wait(result.size_bytes):
                self._coalesce()
            else:
                self._complete(result)
        elif result.size_bytes and self._request.max_wait_ms <= 0:  # the fetch waited only for a flush
            self._complete(result)

    def _coalesce(self) -> None:
        """Wait for more batches for the follower: until the coalescer is full, `WAIT_MS_MAX` at most."""
        assert self._timer is not None
        self._coalesces = True
        self._timer.cancel()
        self._timer = self._service._scheduler.call_later(WAIT_MS_MAX, self._on_coalescing_end)

    def _on_coalescing_end(self) -> None:
        self._service._coalescer.record_wait()
        self.complete_now()

    def _complete(self, result: FetchResult) -> None:
        self.cancel()
        if self._follower is not None:
            result = self._service.select_news(result, self._follower)
        self._on_done(result)


def _aborted(partition: Partition, from_offset: int, end_offset: int) -> list[tuple[int, int]] | None:
    """Return the aborted transactions with records in [from_offset, end_offset); None if there are none."""
    producers = partition.producers
    if producers is None or not producers.transactions.aborted_count:
        return None
    found = producers.aborted_between(from_offset, end_offset)
    return [(one.producer_id, one.first_offset) for one in found] or None


def _redirection(partition: Partition, preferred_replica: int, isolation_level: int) -> PartitionData:
    """Return the result of a partition that the client has to read from a follower."""
    return PartitionData(
        partition.index,
        None,
        partition.replica.high_watermark,
        partition.readable_end(isolation_level),
        partition.log.start_offset,
        preferred_replica=preferred_replica,
    )


def _replica_error(partition: Partition | None, index: int, error: MansioError) -> PartitionData:
    """Return the result of a partition with an error. If the follower's offset is out of range, the result also has the
    high watermark and the start offset of this log."""
    if partition is None or not isinstance(error, OffsetOutOfRange):
        return PartitionData(index, without_traceback(error))
    return PartitionData(
        index,
        without_traceback(error),
        high_watermark=partition.high_watermark,
        log_start_offset=partition.start_offset,
    )
