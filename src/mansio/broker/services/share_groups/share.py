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
* Records are leased and acknowledged only for a caller that may read in the group and read the topic at that moment. A
  receipt, or the id of a member, gives no right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share.partition_leader import LimitedKeyNames
from mansio.broker.coordinator.share.share_partition_manager import LOAD_RETRY_DELAY_MS
from mansio.broker.coordinator.share.share_partitions import merge_slices
from mansio.broker.services.groups import MEMBER_BYTES_MAX
from mansio.errors import (
    AuthorizationFailed,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupAuthorizationFailed,
    GroupIdNotFound,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    OffsetNotAvailable,
)
from mansio.host.gather_results import gather_results
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.share_partition.types import LEASE_MS_MAX, RENEW, merge_counts
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords, SharePartitionLeader
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.coordinator.share.share_partitions import LeaseRange, SharePartitions
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization, Grants
    from mansio.broker.services.quotas import QuotaService
    from mansio.config.settings import Settings
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.share_partition.types import (
        AcknowledgementBatch,
        AcquiredRange,
        RedriveResult,
        ShareCounts,
        Update,
    )
    from mansio.storage.log import LogSlice
    from mansio.wire.topic_partition import TopicIdPartition

PARTITIONS_MAX: Final = 10_000
"""Maximum number of partitions in one request without a share session."""

NO_LIMITED_KEYS: Final = LimitedKeyNames(0, 0, ())

LIMITED_KEYS_MAX: Final = 10
"""Maximum number of group keys at a limit, or isolated, that a description names."""

LEASE_RANGES_MAX: Final = 10_000
"""Maximum number of leased ranges in the description of one share partition."""

REDRIVEN_RECORDS_MAX: Final = 10_000
"""Maximum number of records that one redrive request offers again."""

REDRIVE_ID_CHARACTERS_MAX: Final = 100
"""Maximum length of a redrive id in characters."""

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

    `error`: the reason why they failed, None if they did not; final once they are stored. `leader`: a share partition
    of the partition, None if none was loaded. `updates`: the changes of share states that have to be stored, one for
    each share partition that has one of the records."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    leader: SharePartitionLeader | None = None
    updates: Sequence[tuple[SharePartitionLeader, Update]] = ()

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
class SharePartitionDescription:
    """Record counts and leases of one topic partition in a share group, or the error for which it cannot be described.

    `dead_letter_error`: the last error in writing to the dead-letter topic, "" if there is none. `by_number`: the
    counts of the share partitions that the index of the topic partition names. `isolated_count`: number of group keys
    with a backlog that a fair group has isolated, `isolated_keys`: some of them. `limited_keys`: sums over the share
    partitions, so a key counts for each in which records of it wait."""

    topic_id: bytes
    partition: int
    error: MansioError | None = None
    counts: ShareCounts | None = None
    dead_letter_error: str = ""
    ranges: Sequence[LeaseRange] = field(default=())
    by_number: Sequence[tuple[int, ShareCounts]] = field(default=())
    limited_keys: LimitedKeyNames = field(default=NO_LIMITED_KEYS)
    isolated_count: int = 0
    isolated_keys: Sequence[bytes] = field(default=())


def _limited_keys(shares: SharePartitions) -> LimitedKeyNames:
    found = [leader.limited_keys() for leader in shares.leaders if leader.state_machine.has_key_limits]
    names = dict.fromkeys(key for each in found for key in each.keys)
    return LimitedKeyNames(
        sum(each.at_lease_limit for each in found),
        sum(each.at_rate_limit for each in found),
        tuple(names)[:LIMITED_KEYS_MAX],
    )


class ShareService:
    """Leases, acknowledges, describes and redrives records of share groups. All methods run on the broker's event
    loop."""

    def __init__(
        self,
        *,
        share_partition_manager: SharePartitionManager,
        dead_letters: DeadLetterManager,
        quotas: QuotaService,
        authorization: Authorization,
        topic_name: Callable[[bytes], str | None],
        settings: Settings,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        """`topic_name`: returns the name of the topic with an id, None if there is none."""
        self._authorization = authorization
        self._topic_name = topic_name
        self.share_partition_manager = share_partition_manager
        self.quotas = quotas
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler
        self._dead_letters = dead_letters

    # ------------------------------------------------------------------ authorization

    def _topic_error(self, caller: Caller, operation: Operation, topic_id: bytes) -> MansioError | None:
        """Return the error of a partition of a topic on which the caller may not do an operation; None if it may, or if
        no topic has the id, which another error tells it."""
        try:
            self._authorization.check_topic_id(caller, operation, topic_id, self._topic_name)
        except AuthorizationFailed as error:
            return without_traceback(error)
        return None

    def _may_describe(self, caller: Caller, topic_id: bytes) -> bool:
        """Whether a list has a topic. What a list leaves out is no refusal."""
        name = self._topic_name(topic_id)
        return name is None or self._authorization.allows(
            caller, Operation.DESCRIBE, ResourceType.TOPIC, name
        )

    def read_error(self, grants: Grants, topic_id: bytes, api: str) -> MansioError | None:
        """As `_topic_error`, for READ, and remembers in `grants.readable` that the caller may."""
        return grants.topic_error(Operation.READ, None, topic_id, self._topic_name, api)

    # ------------------------------------------------------------------ acknowledging

    async def acknowledge(
        self,
        group_id: str | None,
        member_id: str | None,
        acknowledgements: Sequence[PartitionAcknowledgements],
        *,
        caller: Caller,
    ) -> list[AcknowledgeResult]:
        """Accept, release, reject or renew leased records without a share session; return when all changes are stored.
        The caller needs READ for the group and the topics.

        Raises `GroupAuthorizationFailed`, `InvalidGroupId`, and `InvalidRequest` if the member id is invalid, a
        partition occurs twice or there are more than `PARTITIONS_MAX` partitions. Other errors are in the results.
        """
        is_checked = self._authorization.is_enabled
        if is_checked:
            self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id or "")
        group_id, member_id = validate_ids(group_id, member_id)
        check_partitions_unique(acknowledgements)
        if len(acknowledgements) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(acknowledgements)} partitions; at most {PARTITIONS_MAX} per request")
        results = [AcknowledgeResult(part.topic_id, part.partition) for part in acknowledgements]
        allowed = list(zip(acknowledgements, results, strict=True))
        if is_checked:
            for part, result in allowed:
                result.error = self._topic_error(caller, Operation.READ, part.topic_id)
            allowed = [each for each in allowed if each[1].error is None]
        works = [self._acknowledge(group_id, member_id, part, result) for part, result in allowed]
        errors = await gather_results(self.scheduler, works, name="acknowledge records", has_turns=True)
        for (_, result), error in zip(allowed, errors, strict=True):
            result.error = result.error or error
        return results

    async def _acknowledge(
        self, group_id: str, member_id: str, part: PartitionAcknowledgements, result: AcknowledgeResult
    ) -> None:
        place = part.topic_id, part.partition
        shares = self.share_partition_manager.find_loaded(group_id, place)
        if shares is None:
            try:
                shares = await self.share_partition_manager.load_existing(group_id, place)
            except GroupIdNotFound as error:  # a group that has read nothing has no leases
                raise InvalidRecordState(error.message) from error
        result.updates = shares.acknowledge(member_id, part.batches)
        result.leader = shares.leaders[0]
        if result.updates[1:]:
            await self.store_acknowledgements([result])
        else:
            for leader, update in result.updates:  # one needs no task
                await leader.persist(update)

    async def apply_acknowledgements(
        self,
        group_id: str,
        member_id: str,
        acknowledgements: Sequence[PartitionAcknowledgements],
        *,
        allows_renewal: bool,
        grants: Grants | None,
    ) -> list[AcknowledgeResult]:
        """Apply acknowledgements to the share partitions in memory; errors are in the results. `grants`: of the member,
        which needs READ for the topics; None if it may read all of them. READ for the group was asked before.

        The caller must then pass the results to `store_acknowledgements` or to `ReceiveOperation.run`, which store
        them. If `allows_renewal` is false, a renewal fails with `InvalidRequest`.
        """
        results: list[AcknowledgeResult] = []
        loaded: list[tuple[AcknowledgeResult, SharePartitions, PartitionAcknowledgements]] = []
        for part in acknowledgements:
            result = AcknowledgeResult(part.topic_id, part.partition)
            results.append(result)
            if (
                grants is not None
                and (grants.revision != grants.rules.revision or part.topic_id not in grants.readable)
                and (refused := self.read_error(grants, part.topic_id, "SHARE_ACKNOWLEDGE")) is not None
            ):
                result.error = refused
                continue
            try:
                if not allows_renewal and any(RENEW in batch.types for batch in part.batches):
                    raise InvalidRequest("the request contains renewals without is_renew_ack")
                place = part.topic_id, part.partition
                shares = self.share_partition_manager.find(group_id, place)
                if not shares.is_loaded:
                    shares = await self.share_partition_manager.load(group_id, place)
            except MansioError as error:
                result.error = without_traceback(error)
            else:
                loaded.append((result, shares, part))
        # No await from here on: the caller starts to store the changes in the same iteration of the event loop.
        for result, shares, part in loaded:
            result.leader = shares.leaders[0]
            try:
                result.updates = shares.acknowledge(member_id, part.batches)
            except MansioError as error:
                result.error = without_traceback(error)
        return results

    async def store_acknowledgements(self, results: Iterable[AcknowledgeResult]) -> None:
        """Store the results of `apply_acknowledgements` concurrently; a failure sets `AcknowledgeResult.error`."""
        pending = [(each, *one) for each in results for one in each.updates]
        works = [leader.persist(update) for _, leader, update in pending]
        errors = await gather_results(self.scheduler, works, name="share acks")
        for (each, _, _), error in zip(pending, errors, strict=True):
            each.error = each.error or error

    # ------------------------------------------------------------------ inspecting leases

    async def describe_leases(
        self,
        group_id: str,
        partitions: Sequence[TopicIdPartition] | None,
        *,
        ranges_max: int,
        caller: Caller,
        with_states: bool = False,
        from_offset: int = 0,
    ) -> list[SharePartitionDescription]:
        """Return record counts and leases of share partitions whose partitions this broker leads. The caller needs
        DESCRIBE for the group and the topics.

        `partitions` None: all share partitions of the group whose state this broker holds in memory. For a partition in
        `partitions`, the state is loaded if necessary; it is never created. `ranges_max`: maximum number of leased
        ranges per share partition, at most `LEASE_RANGES_MAX`; for `with_states` and `from_offset` see
        `SharePartitions.leased_ranges`. Raises `GroupAuthorizationFailed`, `InvalidGroupId`, and
        `InvalidRequest` for more than `PARTITIONS_MAX` partitions; other errors are in the results.
        """
        self._authorization.check(caller, Operation.DESCRIBE, ResourceType.GROUP, group_id)
        check_group_id(group_id)
        ranges_max = min(max(ranges_max, 0), LEASE_RANGES_MAX)
        if partitions is None:
            loaded = self.share_partition_manager.loaded_of(group_id)
            return [
                self._describe(shares, ranges_max, with_states=with_states, from_offset=from_offset)
                for shares in loaded[:PARTITIONS_MAX]
                if self._may_describe(caller, shares.leaders[0].key.topic_id)
            ]
        if len(partitions) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(partitions)} partitions; at most {PARTITIONS_MAX} per request")
        found = [SharePartitionDescription(topic_id, index) for topic_id, index in partitions]

        async def describe(position: int, topic_id: bytes, index: int) -> None:
            if (refused := self._topic_error(caller, Operation.DESCRIBE, topic_id)) is not None:
                found[position] = SharePartitionDescription(topic_id, index, refused)
                return
            try:
                shares = await self.share_partition_manager.load_existing(group_id, (topic_id, index))
            except MansioError as error:
                found[position] = SharePartitionDescription(topic_id, index, without_traceback(error))
            else:
                found[position] = self._describe(
                    shares, ranges_max, with_states=with_states, from_offset=from_offset
                )

        works = [describe(position, *each) for position, each in enumerate(partitions)]
        await gather_results(self.scheduler, works, name="describe leases", has_turns=True)
        return found

    def _describe(
        self, shares: SharePartitions, ranges_max: int, *, with_states: bool, from_offset: int
    ) -> SharePartitionDescription:
        counts = [(leader.key, leader.counts()) for leader in shares.leaders]
        names = {} if shares.index is None else shares.index.names
        scan = shares.leaders[0].fair_scan
        errors = (self._dead_letters.last_error_of(key) for key, _ in counts)
        key = counts[0][0]
        return SharePartitionDescription(
            key.topic_id,
            key.partition,
            None,
            merge_counts([each for _, each in counts]),
            next(filter(None, errors), ""),
            tuple(shares.leased_ranges(ranges_max, with_states=with_states, from_offset=from_offset)),
            tuple((each.number, count) for each, count in counts if each.number in names),
            _limited_keys(shares),
            0 if scan is None else scan.index.isolated_count,
            () if scan is None else scan.index.isolated_keys(LIMITED_KEYS_MAX),
        )

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
        caller: Caller,
    ) -> tuple[RedriveResult, int]:
        """Offer at most `records_max` dead-lettered records to the share group again. The caller needs READ for the
        group and the topic.

        `offsets`: (first, last) offsets of the records to choose from, None for all. `redrive_id`: chosen by the
        client; a repeated request with the same id does not offer a record twice, and counts such records in
        `RedriveResult.repeated`.

        Returns the result and the number of dead-lettered records that remain. Raises `GroupAuthorizationFailed`,
        `TopicAuthorizationFailed`, `InvalidGroupId`, `InvalidRequest`, `GroupIdNotFound`.
        """
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        if (refused := self._topic_error(caller, Operation.READ, topic_id)) is not None:
            raise copied(refused)
        check_group_id(group_id)
        if not 0 < len(redrive_id) <= REDRIVE_ID_CHARACTERS_MAX:
            raise InvalidRequest(f"a redrive id has 1 to {REDRIVE_ID_CHARACTERS_MAX} characters")
        if not 0 < records_max <= REDRIVEN_RECORDS_MAX:
            raise InvalidRequest(f"{records_max} records; 1 to {REDRIVEN_RECORDS_MAX} per request")
        shares = await self.share_partition_manager.load_existing(group_id, (topic_id, partition))
        return await shares.redrive(redrive_id, offsets, records_max)


class ReceiveOperation:
    """One request of a member for records: leases records, stores the leases, and waits while no records are available.

    `partitions` returns the partitions in the order in which they are searched for records. `is_connected` returns
    whether the client's connection is still open. `is_active` returns whether the member still wants records.
    """

    __slots__ = (
        "_candidates",
        "_client_id",
        "_deadline_ms",
        "_grants",
        "_group_id",
        "_is_active",
        "_is_connected",
        "_is_over",
        "_lease_ms",
        "_max_bytes",
        "_max_records",
        "_member_id",
        "_partitions",
        "_ranges_max",
        "_service",
        "_strict",
        "_user",
        "_waiting",
        "lock_ms",
    )

    def __init__(
        self,
        service: ShareService,
        group_id: str,
        member_id: str,
        *,
        user: str,
        client_id: str | None,
        grants: Grants | None,
        partitions: Callable[[], list[TopicIdPartition]],
        is_connected: Callable[[], bool],
        is_active: Callable[[], bool],
        max_records: int,
        max_bytes: int,
        max_wait_ms: int,
        strict: bool,
        lease_ms: int = -1,
        ranges_max: int = 0,
    ) -> None:
        """`strict`: lease at most `max_records` records. If false, all records of the batch that contains the last
        leased record are leased as well, even above `max_records` (KIP-1206). `lease_ms`: duration of the leases, -1
        for the group's. `ranges_max`: above 0, lease by range leases, at most so many ranges, without reading their
        records. `grants`: of the member, which needs READ for the group and the topics; None if it may read
        everything. Raises `InvalidRequest`."""
        if not -1 <= lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"a lease of {lease_ms} ms; 0 to {LEASE_MS_MAX}")
        self._service = service
        self._group_id = group_id
        self._member_id = member_id
        self._user = user
        self._client_id = client_id
        self._grants = grants
        self._partitions = partitions
        self._is_connected = is_connected
        self._is_active = is_active
        self._max_records = max_records
        self._max_bytes = min(max_bytes, service.settings.fetch_max_bytes)
        self._strict = strict
        self._lease_ms = lease_ms
        self._ranges_max = ranges_max
        self._deadline_ms = self._now_ms() + max(0, min(max_wait_ms, service.settings.fetch_wait_ms_max))
        self._candidates: list[TopicIdPartition] = []
        self._waiting: Promise[None] | None = None
        self._is_over = False
        self.lock_ms = 0
        """Duration of the leases of this operation in milliseconds, 0 as long as there are none."""

    def _now_ms(self) -> float:
        return self._service.clock.monotonic() * 1000

    async def run(
        self, acknowledged: Sequence[AcknowledgeResult]
    ) -> dict[TopicIdPartition, ReceivedPartition]:
        """Lease records; store the leases together with `acknowledged`, results of `apply_acknowledgements`.

        Waits until records are available if there are none, but not if the request has acknowledgements, so that the
        client learns at once that they are stored. Errors are in the results. Raises `GroupAuthorizationFailed` if the
        member may not read in the group any more, and leases nothing then.
        """
        received: dict[TopicIdPartition, ReceivedPartition] = {}
        to_store = acknowledged
        grants = self._grants
        while True:
            may_receive = self._is_connected()
            if grants is not None and (
                grants.revision != grants.rules.revision or self._group_id not in grants.groups
            ):
                try:
                    grants.check_group(self._group_id, "SHARE_FETCH")
                except GroupAuthorizationFailed:
                    if not to_store:
                        raise
                    may_receive = False  # the acknowledgements are applied, so they have to be stored
            # Do not lease to a closed connection: the member may have a new session on another connection, which would
            # not know of these leases.
            found, is_unavailable = self._acquire(received) if may_receive else ([], False)
            await self._store_changes(to_store, found, received)
            to_store = ()
            if self._is_over or acknowledged or received or not self._is_connected():
                return received
            # An update without leases has raised the lease bound, so that records can be leased now: do not wait.
            if not any(each.update is not None for each in found):
                left_ms = self._deadline_ms - self._now_ms()
                if left_ms <= 0:
                    return received
                await self._wait(min(left_ms, LOAD_RETRY_DELAY_MS) if is_unavailable else left_ms)
                if not self._is_active():
                    # Leases would be released again, and their records would count as delivered.
                    return received

    def _acquire(
        self, received: dict[TopicIdPartition, ReceivedPartition]
    ) -> tuple[list[AcquiredRecords], bool]:
        """Lease available records of the partitions. Also return whether the share state of any partition was
        unavailable. Other errors are added to `received`."""
        space = self._max_bytes
        quotas = self._service.quotas.active
        if quotas is not None:
            if quotas.is_throttled(self._user, self._client_id):
                return [], False
            if (burst_bytes := quotas.fetch_max_bytes(self._user, self._client_id)) is not None:
                space = min(space, burst_bytes)
        left, is_unavailable = self._max_records, False
        is_range, ranges_left = self._ranges_max > 0, self._ranges_max
        found: list[AcquiredRecords] = []
        self._candidates = self._partitions()
        grants, readable = self._grants, None
        if grants is not None:
            if grants.revision != grants.rules.revision:
                grants.renew()
            readable = grants.readable
        places = self._candidates
        if is_range:
            places = [*places]  # a partition that gives all of its part is asked once more
        for position, place in enumerate(places):
            if left <= 0 or space <= 0 or (is_range and ranges_left <= 0):
                break
            if (
                readable is not None
                and grants is not None
                and place[0] not in readable
                and (refused := self._service.read_error(grants, place[0], "SHARE_FETCH")) is not None
            ):
                received[place] = ReceivedPartition(refused)
                continue
            wanted = left
            if is_range:  # an equal part of each, so that the member can process the partitions in parallel
                wanted = -(-left // max(len(self._candidates) - position, 1))
            try:
                parts = self._service.share_partition_manager.find(self._group_id, place).acquire(
                    self._member_id,
                    wanted,
                    space,
                    strict=self._strict,
                    is_first=not found,
                    lease_ms=self._lease_ms,
                    ranges_max=ranges_left,
                )
            except TRANSIENT_ERRORS:
                is_unavailable = True
                continue
            except MansioError as error:
                received[place] = ReceivedPartition(without_traceback(error))
                continue
            found += parts
            for acquired in parts:
                left -= acquired.record_count
                space -= acquired.size_bytes
                ranges_left -= len(acquired.acquired) if is_range else 0
                wanted -= acquired.record_count
            if is_range and wanted <= 0 and position < len(self._candidates):
                places.append(place)
        return found, is_unavailable

    async def _store_changes(
        self,
        acknowledged: Sequence[AcknowledgeResult],
        found: list[AcquiredRecords],
        received: dict[TopicIdPartition, ReceivedPartition],
    ) -> None:
        """Store leases and acknowledgements; those of one share partition are stored as one change."""
        changes: dict[SharePartitionLeader, _Change] = {}
        for result in acknowledged:
            for leader, update in result.updates:
                changes[leader] = _Change(leader, [update], result)
        for acquired in found:
            leader = acquired.leader
            if (change := changes.get(leader)) is None:
                change = changes[leader] = _Change(leader, [])
            change.acquired += (acquired,)
            if acquired.update is not None:
                change.updates.append(acquired.update)
        works, stored = [], []
        for change in changes.values():
            if change.updates:
                works.append(change.leader.persist(*change.updates))
                stored.append(change)
        errors = await gather_results(self._service.scheduler, works, name="share leases")
        for change, error in zip(stored, errors, strict=True):
            if change.result is not None:
                change.result.error = change.result.error or error
            for acquired in change.acquired:
                # A member without a connection has no share session, and its leases are released, or end.
                if acquired.acquired and self._is_connected():
                    self._add_result(acquired, error, received)

    def _add_result(
        self,
        acquired: AcquiredRecords,
        error: MansioError | None,
        received: dict[TopicIdPartition, ReceivedPartition],
    ) -> None:
        """Add the leases of one share partition to `received`, or the error if they could not be stored."""
        leader = acquired.leader
        key = leader.key.topic_id, leader.key.partition
        before = received.get(key)  # records of another share partition
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
        manager = self._service.share_partition_manager
        self._candidates = self._partitions()
        while not self._is_over:
            is_unavailable = False
            for place in self._candidates:
                try:
                    shares = manager.find(self._group_id, place)
                    if not (shares.is_loaded or shares.check_loaded()):
                        is_unavailable = True
                    elif shares.has_available(self._member_id, is_range=self._ranges_max > 0):
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
        scheduler, manager = self._service.scheduler, self._service.share_partition_manager
        self._waiting = scheduler.promise()
        unpark: list[Callable[[Callable[[], None]], None]] = []
        for place in self._candidates:
            try:
                shares = manager.find(self._group_id, place)
            except MansioError:
                continue  # `run` tries this share partition again after the timeout
            shares.partition.park(self._wake)
            unpark.append(shares.partition.waits.unpark)
            for leader in shares.leaders:
                leader.park(self._wake)
                unpark.append(leader.unpark)
        timer = scheduler.call_later(timeout_ms, self._wake)
        manager.parked[self] = None
        try:
            await self._waiting
        finally:
            del manager.parked[self]
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
    acquired: tuple[AcquiredRecords, ...] = ()


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
