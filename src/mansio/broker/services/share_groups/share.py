"""Share groups (KIP-932): leasing records, acknowledging them, describing leases and redriving dead-lettered records.

Handlers of all protocols call this service. A protocol with share sessions calls `ShareService.apply_acknowledgements`
and then `ReceiveOperation.run`, which stores the acknowledgements and the new leases of one share partition as one
change. A protocol without share sessions calls `ShareService.acknowledge`.

Invariants:
* A lease or an acknowledgement is reported to the client only after its update of the share state is stored. Only the
  leader of the partition reports leases, and only to a member that is still connected.
* The acknowledgements of one partition are applied together, or none of them is. `apply_acknowledgements` applies the
  acknowledgements of all partitions in one iteration of the event loop; the caller starts to store them in the same
  iteration.
* An offset is leased only if the result also contains the bytes of its record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.share.prioritized_acquisition import acquire_by_priority, merge_slices
from mansio.broker.coordinator.share.share_partition_manager import LOAD_RETRY_DELAY_MS
from mansio.broker.services.groups import MEMBER_BYTES_MAX
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
    OffsetNotAvailable,
)
from mansio.state.share_partition.in_flight import NOT_PENDING
from mansio.state.share_partition.priority_shares import split_by_priority
from mansio.state.share_partition.types import (
    ACQUIRED,
    ARCHIVED,
    LEASE_MS_MAX,
    RENEW,
    RedriveResult,
    ShareKey,
    merge_counts,
)
from mansio.tracebacks import copied, without_traceback
from mansio.wire.batch.priority_header import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords, SharePartitionLeader
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.quotas import QuotaService
    from mansio.config.settings import Settings
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.state.share_partition.machine import SharePartition
    from mansio.state.share_partition.types import (
        AcknowledgementBatch,
        AcquiredRange,
        ShareCounts,
        Update,
    )
    from mansio.storage.log import LogSlice

PARTITIONS_MAX: Final = 10_000
"""Maximum number of partitions in one request without a share session."""

LEASE_RANGES_MAX: Final = 10_000
"""Maximum number of leased ranges in the description of one share partition."""

REDRIVEN_RECORDS_MAX: Final = 10_000
"""Maximum number of records that one redrive request offers again."""

REDRIVE_ID_CHARACTERS_MAX: Final = 100
"""Maximum length of a redrive id in characters."""

ARCHIVE_CHECKS_MAX: Final = 20
"""How often a redrive checks whether the state of recently archived records is stored."""

ARCHIVE_CHECK_INTERVAL_MS: Final = 250
"""Maximum time between two of these checks."""

TRANSIENT_ERRORS: Final = (
    NotCoordinator,
    CoordinatorNotAvailable,
    CoordinatorLoadInProgress,
    OffsetNotAvailable,
)
"""Errors which mean that share state is temporarily unavailable. A receive operation waits and tries again instead of
reporting them."""


@dataclass(frozen=True, slots=True)
class PartitionAcknowledgements:
    """Acknowledgements of one partition. `batches` are in ascending order of offsets and do not overlap."""

    topic_id: bytes
    partition: int
    batches: Sequence[AcknowledgementBatch]


@dataclass(slots=True)
class AcknowledgeResult:
    """Result of the acknowledgements of one partition.

    `error`: the reason why they failed, None if they did not; final once they are stored. `leader`: the share partition
    that applied them, None if none did. `updates`: the changes of share states that have to be stored; one, or, on a
    topic with priorities, one for each priority."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    leader: SharePartitionLeader | None = None
    updates: list[tuple[SharePartitionLeader, Update]] = field(default_factory=list)

    @property
    def lock_ms(self) -> int:
        """Lease duration of the group in milliseconds, 0 if unknown."""
        return 0 if self.leader is None else int(self.leader.state_machine.settings.lock_ms)


@dataclass(frozen=True, slots=True)
class ReceivedPartition:
    """Leased records of one partition, or the error for which no records were leased.

    `slices`: the parts of the log that contain the records of the ranges in `acquired`, `size_bytes` in total."""

    error: MansioError | None = None
    acquired: Sequence[AcquiredRange] = ()
    slices: Sequence[LogSlice] = ()
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRange:
    """Range of offsets leased to one member, with one delivery count. `age_ms`: time since the records were leased or
    the lease was renewed; `lease_ms`: duration of the lease."""

    first_offset: int
    last_offset: int
    member_id: str
    delivery_count: int
    age_ms: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class SharePartitionDescription:
    """Record counts and leases of one topic partition in a share group, or the error for which it cannot be described.

    `dead_letter_error`: the last error in writing to the dead-letter topic, "" if there is none. `priorities`: the
    counts of each priority, on a topic with priorities."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    counts: ShareCounts | None = None
    dead_letter_error: str = ""
    ranges: Sequence[LeaseRange] = field(default=())
    priorities: Sequence[tuple[Priority, ShareCounts]] = field(default=())


class ShareService:
    """Leases, acknowledges, describes and redrives records of share groups. All methods run on the broker's event
    loop."""

    def __init__(
        self,
        *,
        share_partition_manager: SharePartitionManager,
        partitions: PartitionSet,
        dead_letters: DeadLetterManager,
        quotas: QuotaService,
        settings: Settings,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self.share_partition_manager = share_partition_manager
        self.quotas = quotas
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler
        self._partitions = partitions
        self._dead_letters = dead_letters

    # ------------------------------------------------------------------ acknowledging

    async def acknowledge(
        self,
        group_id: str | None,
        member_id: str | None,
        acknowledgements: Sequence[PartitionAcknowledgements],
    ) -> list[AcknowledgeResult]:
        """Accept, release, reject or renew leased records without a share session; return when all changes are stored.

        Raises `InvalidGroupId`, and `InvalidRequest` if the member id is invalid, a partition occurs twice or there are
        more than `PARTITIONS_MAX` partitions. Other errors are in the results.
        """
        group_id, member_id = validate_ids(group_id, member_id)
        check_partitions_unique(acknowledgements)
        if len(acknowledgements) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(acknowledgements)} partitions; at most {PARTITIONS_MAX} per request")
        results = [AcknowledgeResult(part.topic_id, part.partition) for part in acknowledgements]
        works = [
            self._acknowledge(group_id, member_id, part, result)
            for part, result in zip(acknowledgements, results, strict=True)
        ]
        errors = await gather_results(self.scheduler, works, name="acknowledge records", has_turns=True)
        for result, error in zip(results, errors, strict=True):
            result.error = error
        return results

    async def _acknowledge(
        self, group_id: str, member_id: str, part: PartitionAcknowledgements, result: AcknowledgeResult
    ) -> None:
        leader = self.share_partition_manager.find_ready(ShareKey(group_id, part.topic_id, part.partition))
        if leader is None:
            try:
                leader = await self._load_existing(group_id, part.topic_id, part.partition)
            except GroupIdNotFound as error:  # a group that has read nothing has no leases
                raise InvalidRecordState(error.message) from error
        if leader.partition.priorities is not None:
            leaders = await self._load_priorities(leader)
            self._apply_by_priority(leaders, member_id, part, result)
            await self.store_acknowledgements([result])
            if result.error is not None:
                raise copied(result.error)
            return
        update = leader.acknowledge(member_id, part.batches)
        result.leader = leader
        if update is not None:
            await leader.persist(update)

    async def apply_acknowledgements(
        self,
        group_id: str,
        member_id: str,
        acknowledgements: Sequence[PartitionAcknowledgements],
        *,
        allows_renewal: bool,
    ) -> list[AcknowledgeResult]:
        """Apply acknowledgements to the share partitions in memory; errors are in the results.

        The caller must then pass the results to `store_acknowledgements` or to `ReceiveOperation.run`, which store
        them. If `allows_renewal` is false, a renewal fails with `InvalidRequest`.
        """
        results: list[AcknowledgeResult] = []
        loaded: list[tuple[AcknowledgeResult, SharePartitionLeader, PartitionAcknowledgements]] = []
        for part in acknowledgements:
            result = AcknowledgeResult(part.topic_id, part.partition)
            results.append(result)
            try:
                if not allows_renewal and any(RENEW in batch.types for batch in part.batches):
                    raise InvalidRequest("the request contains renewals without is_renew_ack")
                leader = self.share_partition_manager.find(group_id, part.topic_id, part.partition)
                await leader.wait_until_loaded()
                if leader.partition.priorities is not None:
                    await self._load_priorities(leader)
            except MansioError as error:
                result.error = without_traceback(error)
            else:
                loaded.append((result, leader, part))
        # No await from here on: the caller starts to store the changes in the same iteration of the event loop.
        for result, leader, part in loaded:
            result.leader = leader
            try:
                if leader.partition.priorities is not None:
                    leaders = self.share_partition_manager.find_all(leader)
                    self._apply_by_priority(leaders, member_id, part, result)
                    continue
                update = leader.call_machine(leader.acknowledge, member_id, part.batches)
                if update is not None:
                    result.updates.append((leader, update))
            except MansioError as error:
                result.error = without_traceback(error)
        return results

    async def _load_priorities(self, normal: SharePartitionLeader) -> Mapping[Priority, SharePartitionLeader]:
        """Return the share partitions of all priorities of a topic partition after their states are loaded, given that
        of normal priority."""
        leaders = self.share_partition_manager.find_all(normal)
        for each in leaders.values():
            await each.wait_until_loaded()
        return leaders

    def _apply_by_priority(
        self,
        leaders: Mapping[Priority, SharePartitionLeader],
        member_id: str,
        part: PartitionAcknowledgements,
        result: AcknowledgeResult,
    ) -> None:
        """Apply the acknowledgements of a partition of a topic with priorities, all or none."""
        normal = result.leader = leaders[Priority.NORMAL]
        priorities = normal.partition.priorities
        if priorities is None:
            raise NotLeaderOrFollower(f"{normal.partition.name} was closed on this broker")
        batches = split_by_priority(part.batches, priorities.index)
        if len(batches) > 1:
            for priority, each in batches.items():
                leaders[priority].check_acknowledgements(member_id, each)
        for priority, each in batches.items():
            leader = leaders[priority]
            update = leader.call_machine(leader.acknowledge, member_id, each)
            if update is not None:
                result.updates.append((leader, update))

    async def store_acknowledgements(self, results: Iterable[AcknowledgeResult]) -> None:
        """Store the results of `apply_acknowledgements` concurrently; a failure sets `AcknowledgeResult.error`."""
        pending = [(each, *one) for each in results for one in each.updates]
        works = [leader.persist(update) for _, leader, update in pending]
        errors = await gather_results(self.scheduler, works, name="share acks")
        for (each, _, _), error in zip(pending, errors, strict=True):
            each.error = each.error or error

    # ------------------------------------------------------------------ inspecting leases

    async def describe_leases(
        self, group_id: str, partitions: Sequence[TopicPartition] | None, *, ranges_max: int
    ) -> list[SharePartitionDescription]:
        """Return record counts and leases of share partitions whose partitions this broker leads.

        `partitions` None: all share partitions of the group whose state this broker holds in memory. For a partition in
        `partitions`, the state is loaded if necessary; it is never created. `ranges_max`: maximum number of leased
        ranges per share partition, at most `LEASE_RANGES_MAX`. Raises `InvalidGroupId`, and `InvalidRequest` for more
        than `PARTITIONS_MAX` partitions; other errors are in the results.
        """
        check_group_id(group_id)
        ranges_max = min(max(ranges_max, 0), LEASE_RANGES_MAX)
        if partitions is None:
            loaded: dict[ShareKey, list[SharePartitionLeader]] = {}
            for each in self.share_partition_manager.share_partitions():
                if each.key.group == group_id and each.is_ready:
                    loaded.setdefault(each.key._replace(priority=Priority.NORMAL), []).append(each)
            return [
                self._describe_share_partition(leaders, ranges_max)
                for leaders in [*loaded.values()][:PARTITIONS_MAX]
            ]
        if len(partitions) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(partitions)} partitions; at most {PARTITIONS_MAX} per request")
        found = [SharePartitionDescription(topic_id, index) for topic_id, index in partitions]

        async def describe(position: int, topic_id: bytes, index: int) -> None:
            try:
                leader = await self._load_existing(group_id, topic_id, index)
                leaders = [leader]
                if leader.partition.priorities is not None:
                    leaders = [*(await self._load_priorities(leader)).values()]
            except MansioError as error:
                found[position] = SharePartitionDescription(topic_id, index, without_traceback(error))
            else:
                found[position] = self._describe_share_partition(leaders, ranges_max)

        works = [describe(position, *each) for position, each in enumerate(partitions)]
        await gather_results(self.scheduler, works, name="describe leases", has_turns=True)
        return found

    def _describe_share_partition(
        self, leaders: Sequence[SharePartitionLeader], ranges_max: int
    ) -> SharePartitionDescription:
        """Describe the share partitions of a topic partition: one, or those of all priorities."""
        ranges: list[LeaseRange] = []
        counts: list[tuple[Priority, ShareCounts]] = []
        for leader in leaders:
            machine = leader.ready_state_machine() or leader.state_machine
            counts.append((leader.key.priority, leader.counts()))
            ranges += _leased_ranges(machine, leader.now_ms(), ranges_max)
        key = leaders[0].key
        errors = (self._dead_letters.last_error_of(leader.key) for leader in leaders)
        has_priorities = leaders[0].partition.priorities is not None
        return SharePartitionDescription(
            key.topic_id,
            key.partition,
            None,
            merge_counts([each for _, each in counts]),
            next(filter(None, errors), ""),
            tuple(sorted(ranges, key=lambda each: each.first_offset)[:ranges_max]),
            tuple(counts) if has_priorities else (),
        )

    async def _load_existing(self, group_id: str, topic_id: bytes, index: int) -> SharePartitionLeader:
        """Return a share partition after its state is loaded. Raises `GroupIdNotFound` if it has no state."""
        partition = self._partitions.find(None, topic_id, index)
        partition.ensure_leader()
        key = ShareKey(group_id, topic_id, index)
        if (
            self.share_partition_manager.find_ready(key) is None
            and await self.share_partition_manager.persister.summary(key) is None
        ):
            raise GroupIdNotFound(f"group {group_id} has read nothing of {partition.name}")
        leader = self.share_partition_manager.find(group_id, topic_id, index)
        await leader.wait_until_loaded()
        return leader

    # ------------------------------------------------------------------ redrive

    async def redrive(
        self,
        group_id: str,
        topic_id: bytes,
        partition: int,
        *,
        redrive_id: str,
        offsets: Sequence[tuple[int, int]] | None,
        records_max: int,
    ) -> tuple[RedriveResult, int]:
        """Offer at most `records_max` dead-lettered records to the share group again.

        `offsets`: (first, last) offsets of the records to choose from, None for all. `redrive_id`: chosen by the
        client; a repeated request with the same id does not offer a record twice, and counts such records in
        `RedriveResult.repeated`.

        Returns the result and the number of dead-lettered records that remain. Raises `InvalidGroupId`,
        `InvalidRequest`, `GroupIdNotFound`.
        """
        check_group_id(group_id)
        if not 0 < len(redrive_id) <= REDRIVE_ID_CHARACTERS_MAX:
            raise InvalidRequest(f"a redrive id has 1 to {REDRIVE_ID_CHARACTERS_MAX} characters")
        if not 0 < records_max <= REDRIVEN_RECORDS_MAX:
            raise InvalidRequest(f"{records_max} records; 1 to {REDRIVEN_RECORDS_MAX} per request")
        normal = await self._load_existing(group_id, topic_id, partition)
        leaders = [normal]
        if normal.partition.priorities is not None:
            leaders = [*(await self._load_priorities(normal)).values()]
        total, dead = RedriveResult(0, 0, 0), 0
        for leader in leaders:
            await self._wait_until_archived(leader)
            leader.ready_state_machine()
            leader.ensure_leader()
            left = records_max - total.redriven
            if left > 0:
                update, result = leader.call_machine_and_set_timer(
                    leader.state_machine.redrive, redrive_id, offsets, left, leader.now_ms()
                )
                if update is not None:
                    await leader.persist(update)
                total = RedriveResult(*map(sum, zip(total, result, strict=True)))
            dead += leader.state_machine.counts(leader.now_ms()).dead
        return total, dead

    async def _wait_until_archived(self, leader: SharePartitionLeader) -> None:
        """Wait until the state of recently archived records is stored, for a limited time. Records can be redriven only
        afterwards."""
        for _ in range(ARCHIVE_CHECKS_MAX):
            ranges = leader.state_machine.ranges
            if leader.end_error is not None or all(
                each.pending_token == NOT_PENDING for each in ranges if each.state == ARCHIVED
            ):
                return
            await leader.wait_for_change(ARCHIVE_CHECK_INTERVAL_MS)


class ReceiveOperation:
    """One request of a member for records: leases records, stores the leases, and waits while no records are available.

    `partitions` returns the partitions in the order in which they are searched for records. `is_connected` returns
    whether the client's connection is still open. `is_active` returns whether the member still wants records.
    """

    __slots__ = (
        "_candidates",
        "_client_id",
        "_deadline_ms",
        "_group_id",
        "_is_active",
        "_is_connected",
        "_is_over",
        "_lease_ms",
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
        lease_ms: int = -1,
    ) -> None:
        """`strict`: lease at most `max_records` records. If false, all records of the batch that contains the last
        leased record are leased as well, even above `max_records` (KIP-1206). `lease_ms`: duration of the leases, -1
        for the group's. Raises `InvalidRequest`."""
        if not -1 <= lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"a lease of {lease_ms} ms; 0 to {LEASE_MS_MAX}")
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
        self._lease_ms = lease_ms
        self._deadline_ms = self._now_ms() + max(0, min(max_wait_ms, service.settings.fetch_wait_ms_max))
        self._candidates: list[TopicPartition] = []
        self._waiting: Promise[None] | None = None
        self._is_over = False
        self.lock_ms = 0
        """Duration of the leases of this operation in milliseconds, 0 as long as there are none."""

    def _now_ms(self) -> float:
        return self._service.clock.monotonic() * 1000

    async def run(self, acknowledged: Sequence[AcknowledgeResult]) -> dict[TopicPartition, ReceivedPartition]:
        """Lease records; store the leases together with `acknowledged`, results of `apply_acknowledgements`.

        Waits until records are available if there are none, but not if the request has acknowledgements, so that the
        client learns at once that they are stored. Errors are in the results.
        """
        received: dict[TopicPartition, ReceivedPartition] = {}
        to_store = acknowledged
        while True:
            # Do not lease to a closed connection: the member may have a new session on another connection, which would
            # not know of these leases.
            found, is_unavailable = self._acquire(received) if self._is_connected() else ([], False)
            await self._store_changes(to_store, found, received)
            to_store = ()
            if self._is_over or acknowledged or received or not self._is_connected():
                return received
            # An update without leases has raised the lease bound, so that records can be leased now: do not wait.
            if not any(each.update is not None for _, each in found):
                left_ms = self._deadline_ms - self._now_ms()
                if left_ms <= 0:
                    return received
                await self._wait(min(left_ms, LOAD_RETRY_DELAY_MS) if is_unavailable else left_ms)
                if not self._is_active():
                    # Leases would be released again, and their records would count as delivered.
                    return received

    def _acquire(
        self, received: dict[TopicPartition, ReceivedPartition]
    ) -> tuple[list[tuple[SharePartitionLeader, AcquiredRecords]], bool]:
        """Lease available records of the partitions. Also return whether the share state of any partition was
        unavailable. Other errors are added to `received`."""
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
                leader = self._service.share_partition_manager.find(self._group_id, topic_id, index)
                if leader.partition.priorities is not None:
                    parts = acquire_by_priority(
                        self._service.share_partition_manager.find_all(leader),
                        self._member_id,
                        left,
                        space,
                        strict=self._strict,
                        is_first=not found,
                        lease_ms=self._lease_ms,
                    )
                    found += parts
                    left -= sum(each.record_count for _, each in parts)
                    space -= sum(each.size_bytes for _, each in parts)
                    continue
                # An unexpected error ends the leader; otherwise its changed records would stay pending for ever.
                acquired = leader.call_machine(
                    leader.acquire,
                    self._member_id,
                    left,
                    space,
                    strict=self._strict,
                    is_first=not found,
                    lease_ms=self._lease_ms,
                )
            except TRANSIENT_ERRORS:
                is_unavailable = True
                continue
            except MansioError as error:
                received[topic_id, index] = ReceivedPartition(without_traceback(error))
                continue
            if acquired is not None:
                found.append((leader, acquired))
                left -= acquired.record_count
                space -= acquired.size_bytes
        return found, is_unavailable

    async def _store_changes(
        self,
        acknowledged: Sequence[AcknowledgeResult],
        found: list[tuple[SharePartitionLeader, AcquiredRecords]],
        received: dict[TopicPartition, ReceivedPartition],
    ) -> None:
        """Store leases and acknowledgements; those of one share partition are stored as one change."""
        changes: dict[int, _Change] = {}
        for result in acknowledged:
            for leader, update in result.updates:
                changes[id(leader)] = _Change(leader, [update], result)
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
            acquired_records = change.acquired
            if acquired_records is not None and acquired_records.acquired and self._is_connected():
                self._add_result(change.leader, acquired_records, error, received)
            # else: a member without a connection has no share session, and its leases are released, or end

    def _add_result(
        self,
        leader: SharePartitionLeader,
        acquired: AcquiredRecords,
        error: MansioError | None,
        received: dict[TopicPartition, ReceivedPartition],
    ) -> None:
        """Add the leases of one share partition to `received`, or the error if they could not be stored."""
        key = leader.key.topic_id, leader.key.partition
        before = received.get(key)  # records of another priority
        try:
            if error is not None:
                raise copied(error)
            leader.ensure_leader()
        except MansioError as refused:
            if not isinstance(refused, TRANSIENT_ERRORS) and before is None:
                received[key] = ReceivedPartition(without_traceback(refused))
            return
        if self._lease_ms >= 0:
            self.lock_ms = self._lease_ms
        else:
            self.lock_ms = self.lock_ms or leader.state_machine.settings.lock_ms
        if before is None or before.error is not None:
            received[key] = ReceivedPartition(None, acquired.acquired, acquired.slices, acquired.size_bytes)
        else:
            slices = merge_slices((*before.slices, *acquired.slices))
            ranges = sorted((*before.acquired, *acquired.acquired))
            received[key] = ReceivedPartition(None, ranges, slices, sum(each.length for each in slices))

    async def wait_until_available(self) -> bool:
        """Wait until the member may be able to lease a record or to learn of an error; lease none. Return false after
        the time of the request."""
        shares = self._service.share_partition_manager
        self._candidates = self._partitions()
        while not self._is_over:
            is_unavailable = False
            for topic_id, index in self._candidates:
                try:
                    leader = shares.find(self._group_id, topic_id, index)
                    leaders = (
                        (leader,) if leader.partition.priorities is None else shares.find_all(leader).values()
                    )
                    for each in leaders:
                        is_unavailable |= not each.is_ready
                        if each.count_available(self._member_id, 1):
                            return True
                except TRANSIENT_ERRORS:
                    is_unavailable = True
                except MansioError:
                    return True
            left_ms = self._deadline_ms - self._now_ms()
            if left_ms <= 0:
                return False
            await self._wait(min(left_ms, LOAD_RETRY_DELAY_MS) if is_unavailable else left_ms)
        return False

    async def _wait(self, timeout_ms: float) -> None:
        """Wait until a partition or share partition may have records, the timeout expires or `finish` is called."""
        scheduler, shares = self._service.scheduler, self._service.share_partition_manager
        self._waiting = scheduler.promise()
        unpark: list[Callable[[Callable[[], None]], None]] = []
        for topic_id, index in self._candidates:
            try:
                leader = shares.find(self._group_id, topic_id, index)
                leaders = () if leader.partition.priorities is None else shares.find_all(leader).values()
            except MansioError:
                continue  # `run` tries this share partition again after the timeout
            for each in (leader.partition, *(leaders or (leader,))):
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

    def continue_with(self, max_records: int, *, waits: bool) -> None:
        """Set how many more records the next call of `run` leases, and whether it waits for them."""
        self._max_records = max_records
        if not waits:
            self._deadline_ms = 0

    def finish(self) -> None:
        """Make `run` return the records that it has leased so far, without further waiting."""
        self._is_over = True
        self._wake()


@dataclass(slots=True)
class _Change:
    """The updates of one share partition that are stored as one change, with the results that depend on them."""

    leader: SharePartitionLeader
    updates: list[Update]
    result: AcknowledgeResult | None = None
    acquired: AcquiredRecords | None = None


def _leased_ranges(machine: SharePartition, now_ms: float, ranges_max: int) -> list[LeaseRange]:
    """Return the first leased ranges of a share partition."""
    ranges: list[LeaseRange] = []
    lock_ms = machine.settings.lock_ms
    for batch in machine.ranges:
        if len(ranges) >= ranges_max:
            break
        if batch.state == ACQUIRED:
            lease_ms = batch.duration_ms(lock_ms)
            age_ms = max(round(now_ms - batch.deadline_ms + lease_ms), 0)
            ranges.append(
                LeaseRange(batch.first, batch.last, batch.holder, batch.deliveries, age_ms, lease_ms)
            )
    return ranges


def validate_ids(group_id: str | None, member_id: str | None) -> tuple[str, str]:
    """Return both ids if they are valid. Raises `InvalidGroupId`, and `InvalidRequest` for an invalid member id."""
    check_group_id(group_id)
    if not member_id or len(member_id.encode()) > MEMBER_BYTES_MAX:
        raise InvalidRequest(f"a member id has 1 to {MEMBER_BYTES_MAX} bytes")
    return group_id or "", member_id


def find_lock_ms(results: Iterable[AcknowledgeResult]) -> int:
    """Return the lease duration in milliseconds of the first result whose share partition is ready, 0 if none is."""
    for result in results:
        if result.leader is not None and result.leader.is_ready:
            return result.lock_ms
    return 0


def check_partitions_unique(acknowledgements: Sequence[PartitionAcknowledgements]) -> None:
    """Raise `InvalidRequest` if a partition occurs twice."""
    partitions = {(part.topic_id, part.partition) for part in acknowledgements}
    if len(partitions) < len(acknowledgements):
        raise InvalidRequest("a partition occurs twice in the request")
