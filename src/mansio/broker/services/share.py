"""Share groups (KIP-932): receiving records, acknowledging them, inspecting leases and redriving dead records.

The use cases of every protocol. A protocol with sessions calls `prepare` and `Receive`, so that acknowledgements
and new leases of one share partition are stored as one change; a protocol without sessions calls `acknowledge`.

Invariants:
* No lease and no acknowledgement is reported before it is stored as it has to be. Leases are reported only by the
  leader, and only to a member that is still connected.
* The acknowledgements of one partition are applied as a whole, or not at all. The state machines apply all of `prepare`
  in one iteration of the event loop, together with the start of whatever stores it.
* An offset is leased only with its bytes in the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.share.share_partition_manager import RETRY_MS
from mansio.broker.services.groups import MEMBER_BYTES_MAX
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    OffsetNotAvailable,
)
from mansio.state.share_partition.in_flight import NOT_PENDING
from mansio.state.share_partition.types import ACQUIRED, ARCHIVED, RENEW, ShareKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords, SharePartitionLeader
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.quotas import QuotaService
    from mansio.config.settings import Settings
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.state.share_partition.types import (
        AcknowledgementBatch,
        AcquiredRange,
        RedriveResult,
        ShareCounts,
        Update,
    )
    from mansio.storage.log import LogSlice

PARTITIONS_MAX: Final = 10_000
"""Partitions of one request without a session."""

RANGES_MAX: Final = 10_000
"""Leased ranges in the description of one share partition."""

REDRIVEN_MAX: Final = 10_000
"""Records offered again by one request."""

REDRIVE_ID_CHARACTERS_MAX: Final = 100
PENDING_CHECKS_MAX: Final = 20
PENDING_CHECK_MS: Final = 250

TRANSIENT: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress, OffsetNotAvailable)
"""Errors of a state that is not available now: a receive waits for it, and they are not reported."""


@dataclass(frozen=True, slots=True)
class PartitionAcknowledgements:
    """Acknowledgements of one partition, ascending and disjoint."""

    topic_id: bytes
    partition: int
    batches: Sequence[AcknowledgementBatch]


@dataclass(slots=True)
class AcknowledgeResult:
    """Result of one partition's acknowledgements; `error` is final once they are stored."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    leader: SharePartitionLeader | None = None
    update: Update | None = None

    @property
    def lock_ms(self) -> int:
        """Duration of a lease of the group, 0 if unknown."""
        return 0 if self.leader is None else int(self.leader.state_machine.settings.lock_ms)


@dataclass(frozen=True, slots=True)
class ReceivedPartition:
    """Leased records of one partition, or why there are none."""

    error: MansioError | None = None
    acquired: Sequence[AcquiredRange] = ()
    slices: Sequence[LogSlice] = ()
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRange:
    """Offsets leased to one member, with one delivery count. `age_ms`: since delivery or the last renewal."""

    first: int
    last: int
    member_id: str
    deliveries: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class SharePartitionDescription:
    """One share partition, or why it cannot be described. `dead_letter_error`: why dead letters wait, "" for none."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    counts: ShareCounts | None = None
    dead_letter_error: str = ""
    ranges: Sequence[LeaseRange] = field(default=())


class ShareService:
    """All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        shares: SharePartitionManager,
        partitions: PartitionSet,
        dead_letters: DeadLetterManager,
        quotas: QuotaService,
        settings: Settings,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self.shares = shares
        self.quotas = quotas
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler
        self._partitions = partitions
        self._dead_letters = dead_letters

    # ------------------------------------------------------------------ acknowledging

    async def acknowledge(
        self, group_id: str | None, member_id: str | None, parts: Sequence[PartitionAcknowledgements]
    ) -> list[AcknowledgeResult]:
        """Accept, release, reject or renew leased records without a session; returns when all of it is stored.

        Raises `InvalidGroupId`, and `InvalidRequest` for an invalid member id, for too many or duplicate partitions;
        other errors are in the results.
        """
        group_id, member_id = checked_ids(group_id, member_id)
        check_unique(parts)
        if len(parts) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(parts)} partitions; at most {PARTITIONS_MAX} per request")
        results = [AcknowledgeResult(part.topic_id, part.partition) for part in parts]
        works = [
            self._acknowledge(group_id, member_id, part, result)
            for part, result in zip(parts, results, strict=True)
        ]
        errors = await gather_results(self.scheduler, works, name="acknowledge records")
        for result, error in zip(results, errors, strict=True):
            result.error = error
        return results

    async def _acknowledge(
        self, group_id: str, member_id: str, part: PartitionAcknowledgements, result: AcknowledgeResult
    ) -> None:
        leader = self.shares.peek(ShareKey(group_id, part.topic_id, part.partition))
        if leader is None:
            try:
                leader = await self._existing(group_id, part.topic_id, part.partition)
            except GroupIdNotFound as error:  # a group that has read nothing has no leases
                raise InvalidRecordState(error.message) from error
        update = leader.acknowledge(member_id, part.batches)
        result.leader = leader
        if update is not None:
            await leader.persist(update)

    async def prepare(
        self,
        group_id: str,
        member_id: str,
        parts: Sequence[PartitionAcknowledgements],
        *,
        allows_renewal: bool,
    ) -> list[AcknowledgeResult]:
        """Apply acknowledgements to the state machines; `store`, or a `Receive`, has to store them.

        `allows_renewal`: otherwise a renewal is an `InvalidRequest`.
        """
        results: list[AcknowledgeResult] = []
        loaded: list[tuple[AcknowledgeResult, SharePartitionLeader, PartitionAcknowledgements]] = []
        for part in parts:
            result = AcknowledgeResult(part.topic_id, part.partition)
            results.append(result)
            try:
                if not allows_renewal and any(RENEW in batch.types for batch in part.batches):
                    raise InvalidRequest("the request contains renewals without is_renew_ack")
                leader = self.shares.find(group_id, part.topic_id, part.partition)
                await leader.loaded()
            except MansioError as error:
                result.error = error
            else:
                loaded.append((result, leader, part))
        for (
            result,
            leader,
            part,
        ) in loaded:  # in one iteration of the loop with the start of whatever stores it
            result.leader = leader
            try:
                result.update = leader.call(leader.acknowledge, member_id, part.batches)
            except MansioError as error:
                result.error = error
        return results

    async def store(self, results: Iterable[AcknowledgeResult]) -> None:
        """Store prepared acknowledgements concurrently; failures are set as `error`."""
        pending = [each for each in results if each.update is not None]
        works = [each.leader.persist(each.update) for each in pending if each.leader and each.update]
        errors = await gather_results(self.scheduler, works, name="share acks")
        for each, error in zip(pending, errors, strict=True):
            each.error = each.error or error

    # ------------------------------------------------------------------ inspecting leases

    async def describe(
        self, group_id: str, partitions: Sequence[TopicPartition] | None, *, ranges_max: int
    ) -> list[SharePartitionDescription]:
        """Counts and leases of share partitions led here. `partitions` None: those of the group that are in use.

        Loads the state of a share partition that is not in use, and never creates one. Raises `InvalidRequest`.
        """
        check_group_id(group_id)
        ranges_max = min(max(ranges_max, 0), RANGES_MAX)
        if partitions is None:
            leaders = [
                each
                for each in self.shares.share_partitions()
                if each.key.group == group_id and each.is_ready
            ]
            return [self._described(each, ranges_max) for each in leaders[:PARTITIONS_MAX]]
        if len(partitions) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(partitions)} partitions; at most {PARTITIONS_MAX} per request")
        found = [SharePartitionDescription(topic_id, index) for topic_id, index in partitions]

        async def describe(number: int, topic_id: bytes, index: int) -> None:
            try:
                leader = await self._existing(group_id, topic_id, index)
            except MansioError as error:
                found[number] = SharePartitionDescription(topic_id, index, error)
            else:
                found[number] = self._described(leader, ranges_max)

        works = [describe(number, *each) for number, each in enumerate(partitions)]
        await gather_results(self.scheduler, works, name="describe leases")
        return found

    def _described(self, leader: SharePartitionLeader, ranges_max: int) -> SharePartitionDescription:
        machine = leader.ready_state_machine() or leader.state_machine
        now_ms, lock_ms = leader.now_ms(), machine.settings.lock_ms
        machine.high_watermark = max(machine.high_watermark, leader.partition.high_watermark)
        ranges: list[LeaseRange] = []
        for batch in machine.ranges:
            if len(ranges) >= ranges_max:
                break
            if batch.state == ACQUIRED:
                age_ms = max(round(now_ms - batch.deadline_ms + lock_ms), 0)
                ranges.append(LeaseRange(batch.first, batch.last, batch.holder, batch.deliveries, age_ms))
        error = self._dead_letters.last_error_of(leader.key)
        counts = machine.counts(now_ms)
        return SharePartitionDescription(
            leader.key.topic_id, leader.key.partition, None, counts, error, tuple(ranges)
        )

    async def _existing(self, group_id: str, topic_id: bytes, index: int) -> SharePartitionLeader:
        """The leader of a share partition that has a state, loaded. Raises `GroupIdNotFound` if it has none."""
        partition = self._partitions.find(None, topic_id, index)
        partition.ensure_leader()
        key = ShareKey(group_id, topic_id, index)
        if self.shares.peek(key) is None and await self.shares.persister.summary(key) is None:
            raise GroupIdNotFound(f"group {group_id} has read nothing of {partition.name}")
        leader = self.shares.find(group_id, topic_id, index)
        await leader.loaded()
        return leader

    # ------------------------------------------------------------------ redrive

    async def redrive(
        self,
        group_id: str,
        topic_id: bytes,
        index: int,
        *,
        redrive_id: str,
        offsets: Sequence[tuple[int, int]] | None,
        most: int,
    ) -> tuple[RedriveResult, int]:
        """Offer at most `most` dead records again: those among `offsets`, or any (None). A repeated request with the
        same id reports offsets that were offered before.

        Returns the result and the number of records that are dead after it. Raises `InvalidRequest`,
        `GroupIdNotFound`.
        """
        check_group_id(group_id)
        if not 0 < len(redrive_id) <= REDRIVE_ID_CHARACTERS_MAX:
            raise InvalidRequest(f"a redrive id has 1 to {REDRIVE_ID_CHARACTERS_MAX} characters")
        if not 0 < most <= REDRIVEN_MAX:
            raise InvalidRequest(f"{most} records; 1 to {REDRIVEN_MAX} per request")
        leader = await self._existing(group_id, topic_id, index)
        await self._wait_archived(leader)
        leader.ready_state_machine()
        leader.ensure_leader()
        machine = leader.state_machine
        update, result = leader.call_and_rearm(machine.redrive, redrive_id, offsets, most, leader.now_ms())
        if update is not None:
            await leader.persist(update)
        return result, leader.state_machine.counts(leader.now_ms()).dead

    async def _wait_archived(self, leader: SharePartitionLeader) -> None:
        """Wait for a limited time until records that just died are stored: before that they cannot be offered."""
        for _ in range(PENDING_CHECKS_MAX):
            ranges = leader.state_machine.ranges
            if leader.ended is not None or all(
                each.pending_token == NOT_PENDING for each in ranges if each.state == ARCHIVED
            ):
                return
            await leader.wait_change(PENDING_CHECK_MS)


class Receive:
    """One request for records, from its arrival to its result: acquires, stores, and waits while there is nothing.

    `partitions` returns the partitions in the order to look at them; `is_connected` whether the result can still be
    delivered; `is_active` whether the member's session still exists.
    """

    __slots__ = (
        "_candidates",
        "_client_id",
        "_deadline_ms",
        "_group_id",
        "_is_active",
        "_is_connected",
        "_is_over",
        "_max_bytes",
        "_max_records",
        "_member_id",
        "_partitions",
        "_service",
        "_strict",
        "_waiting",
        "lock_ms",
    )

    def __init__(
        self,
        service: ShareService,
        group_id: str,
        member_id: str,
        *,
        client_id: str | None,
        partitions: Callable[[], list[TopicPartition]],
        is_connected: Callable[[], bool],
        is_active: Callable[[], bool],
        max_records: int,
        max_bytes: int,
        max_wait_ms: int,
        strict: bool,
    ) -> None:
        """`strict`: exactly at most `max_records`; otherwise the last batch is completed (KIP-1206)."""
        self._service = service
        self._group_id = group_id
        self._member_id = member_id
        self._client_id = client_id
        self._partitions = partitions
        self._is_connected = is_connected
        self._is_active = is_active
        self._max_records = max_records
        self._max_bytes = min(max_bytes, service.settings.fetch_max_bytes)
        self._strict = strict
        self._deadline_ms = self._now_ms() + max(0, min(max_wait_ms, service.settings.fetch_wait_ms_max))
        self._candidates: list[TopicPartition] = []
        self._waiting: Promise[None] | None = None
        self._is_over = False
        self.lock_ms = 0
        """Duration of the leases granted, 0 for none."""

    def _now_ms(self) -> float:
        return self._service.clock.monotonic() * 1000

    async def run(self, acknowledged: Sequence[AcknowledgeResult]) -> dict[TopicPartition, ReceivedPartition]:
        """Acquire records and store prepared acknowledgements with them; waits if there is nothing to return.

        A request with acknowledgements does not wait, so that they are confirmed at once.
        """
        received: dict[TopicPartition, ReceivedPartition] = {}
        to_store = acknowledged
        while True:
            # Nothing is leased to a closed connection: a session of the member on another one would not know of it.
            found, is_unavailable = self._acquire(received) if self._is_connected() else ([], False)
            await self._store(to_store, found, received)
            to_store = ()
            if self._is_over or acknowledged or received or not self._is_connected():
                return received
            if not any(
                each.update is not None for _, each in found
            ):  # else the lease bound advanced: try again
                left_ms = self._deadline_ms - self._now_ms()
                if left_ms <= 0:
                    return received
                await self._wait(min(left_ms, RETRY_MS) if is_unavailable else left_ms)
                if not self._is_active():
                    return received  # leases granted now would be released again, and count as delivered

    def _acquire(
        self, received: dict[TopicPartition, ReceivedPartition]
    ) -> tuple[list[tuple[SharePartitionLeader, AcquiredRecords]], bool]:
        """Acquire what is available; also returns whether a state was unavailable. Errors go to `received`."""
        space = self._max_bytes
        quotas = self._service.quotas.active
        if quotas is not None:
            if quotas.is_throttled(self._client_id):
                return [], False
            if (burst_bytes := quotas.fetch_max_bytes(self._client_id)) is not None:
                space = min(space, burst_bytes)
        left, is_unavailable = self._max_records, False
        found: list[tuple[SharePartitionLeader, AcquiredRecords]] = []
        self._candidates = self._partitions()
        for topic_id, index in self._candidates:
            if left <= 0 or space <= 0:
                break
            try:
                leader = self._service.shares.find(self._group_id, topic_id, index)
                # A defect ends the leader: its acknowledged or acquired records would stay pending for ever.
                acquired = leader.call(
                    leader.acquire, self._member_id, left, space, strict=self._strict, is_first=not found
                )
            except TRANSIENT:
                is_unavailable = True
                continue
            except MansioError as error:
                received[topic_id, index] = ReceivedPartition(error)
                continue
            if acquired is not None:
                found.append((leader, acquired))
                left -= acquired.records
                space -= acquired.size_bytes
        return found, is_unavailable

    async def _store(
        self,
        acknowledged: Sequence[AcknowledgeResult],
        found: list[tuple[SharePartitionLeader, AcquiredRecords]],
        received: dict[TopicPartition, ReceivedPartition],
    ) -> None:
        """Store leases and acknowledgements, those of one share partition as one change."""
        changes: dict[int, _Change] = {}
        for result in acknowledged:
            if result.leader is not None and result.update is not None:
                changes[id(result.leader)] = _Change(result.leader, [result.update], result)
        for leader, acquired in found:
            change = changes.setdefault(id(leader), _Change(leader, []))
            change.acquired = acquired
            if acquired.update is not None:
                change.updates.append(acquired.update)
        stored = [each for each in changes.values() if each.updates]
        works = [each.leader.persist(*each.updates) for each in stored]
        errors = await gather_results(self._service.scheduler, works, name="share leases")
        for change, error in zip(stored, errors, strict=True):
            if change.result is not None:
                change.result.error = change.result.error or error
            given = change.acquired
            if given is not None and given.acquired and self._is_connected():
                self._add(change.leader, given, error, received)
            # else: a member without connection has no session, and its leases are released

    def _add(
        self,
        leader: SharePartitionLeader,
        acquired: AcquiredRecords,
        error: MansioError | None,
        received: dict[TopicPartition, ReceivedPartition],
    ) -> None:
        """The result of leases that were stored, or failed to be."""
        key = leader.key.topic_id, leader.key.partition
        try:
            if error is not None:
                raise error
            leader.ensure_leader()
        except MansioError as refused:
            if not isinstance(refused, TRANSIENT):
                received[key] = ReceivedPartition(refused)
            return
        self.lock_ms = self.lock_ms or leader.state_machine.settings.lock_ms
        received[key] = ReceivedPartition(None, acquired.acquired, acquired.slices, acquired.size_bytes)

    async def _wait(self, timeout_ms: float) -> None:
        """Wait until a partition or share partition may have records, for the timeout, or for `finish`."""
        scheduler, shares = self._service.scheduler, self._service.shares
        self._waiting = scheduler.promise()
        unpark: list[Callable[[Callable[[], None]], None]] = []
        for topic_id, index in self._candidates:
            try:
                leader = shares.find(self._group_id, topic_id, index)
            except MansioError:
                continue  # it is tried again after the timeout
            for each in (leader.partition, leader):
                each.park(self._wake)
                unpark.append(each.unpark)
        timer = scheduler.call_later(timeout_ms, self._wake)
        shares.parked[self] = None
        try:
            await self._waiting
        finally:
            del shares.parked[self]
            timer.cancel()
            for remove in unpark:
                remove(self._wake)
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def finish(self) -> None:
        """Stop waiting and return what there is."""
        self._is_over = True
        self._wake()


@dataclass(slots=True)
class _Change:
    """The updates of one share partition that are stored as one."""

    leader: SharePartitionLeader
    updates: list[Update]
    result: AcknowledgeResult | None = None
    acquired: AcquiredRecords | None = None


def checked_ids(group_id: str | None, member_id: str | None) -> tuple[str, str]:
    """Group id and member id. Raises `InvalidGroupId`, `InvalidRequest`."""
    check_group_id(group_id)
    if not member_id or len(member_id.encode()) > MEMBER_BYTES_MAX:
        raise InvalidRequest(f"a member id has 1 to {MEMBER_BYTES_MAX} bytes")
    return group_id or "", member_id


def lock_ms_of(results: Iterable[AcknowledgeResult]) -> int:
    """Duration of a lease of any share partition that is ready, 0 if there is none."""
    for result in results:
        if result.leader is not None and result.leader.is_ready:
            return result.lock_ms
    return 0


def check_unique(parts: Sequence[PartitionAcknowledgements]) -> None:
    """Raise `InvalidRequest` if a partition occurs twice."""
    if len(parts) > 1 and len({(part.topic_id, part.partition) for part in parts}) < len(parts):
        raise InvalidRequest("a partition occurs twice in the request")
