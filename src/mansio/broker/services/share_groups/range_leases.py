"""Range lease service: leases ranges of offsets to a member that reads the records by Fetch, as a Spark query does.

A range lease is stored durably before it is answered, has a limit of its own (`mansio.share.range.locks.max`), and is
acknowledged by AcknowledgeRecords. Its member has no share session: its leases end only by an acknowledgement, by
`alter`, or with their time, so that a member that was away for a while can claim them.

Invariants:
* A lease is in an answer only after it is stored. A caller that is cancelled, or whose answer is lost, finds its leases
  by the next call of `alter`, which can release those that it does not name.
* The number of ranges in an answer is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.broker.services.share_groups.share import (
    PARTITIONS_MAX,
    ReceiveOperation,
    validate_ids,
)
from mansio.errors import GroupIdNotFound, InvalidRequest, MansioError
from mansio.host.gather_results import gather_results
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.share_groups.leases import LeaseService
    from mansio.broker.services.share_groups.share import ShareService
    from mansio.ports import Clock, Scheduler
    from mansio.state.share_partition.types import AcquiredRange, RangeOperation
    from mansio.wire.topic_partition import TopicIdPartition

RANGES_MAX: Final = 4_096
"""Maximum number of leased ranges in the answer of one call."""


@dataclass(frozen=True, slots=True)
class RangesOfPartition:
    """Range leases of one partition, ascending, or the error for which there are none. `ended`: ranges that the caller
    named, and that are dead-lettered or discarded. `order`: the order of the
    group: none, key or partition; `is_committed_only`: the group reads only committed records."""

    topic_id: bytes
    partition: int
    ranges: Sequence[AcquiredRange] = field(default=())
    ended: Sequence[AcquiredRange] = field(default=())
    error: MansioError | None = None
    order: str = ""
    is_committed_only: bool = False


class RangeLeaseService:
    """Leases ranges of offsets, and keeps, claims and accepts these leases. All methods run on the broker's event
    loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_leases",
        "_scheduler",
        "_share_partition_manager",
        "_share_service",
        "_topic_name",
    )

    def __init__(
        self,
        *,
        share_service: ShareService,
        share_partition_manager: SharePartitionManager,
        leases: LeaseService,
        topic_name: Callable[[bytes], str | None],
        clock: Clock,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        """`topic_name`: returns the name of the topic with an id, None if there is none."""
        self._share_service = share_service
        self._share_partition_manager = share_partition_manager
        self._leases = leases
        self._topic_name = topic_name
        self._clock = clock
        self._scheduler = scheduler
        self._authorization = authorization

    async def lease(
        self,
        group_id: str,
        member_id: str,
        partitions: Sequence[TopicIdPartition],
        *,
        max_records: int,
        lease_ms: int,
        max_wait_ms: int,
        caller: Caller,
    ) -> list[RangesOfPartition]:
        """Lease at most `max_records` records, in at most `RANGES_MAX` ranges, of partitions that this broker leads.
        While none are available, wait for at most `max_wait_ms`. `lease_ms`: duration of the leases. The group is
        created if it does not exist. The caller needs READ for the group and the topics.

        In order by key, only the first record of each key is leased, because its member processes the records in
        parallel. The result has each partition with leases or an error.

        Raises `GroupAuthorizationFailed`, `InvalidGroupId`, `InvalidRequest`, and `GroupIdNotFound` if the id is that
        of a group of another type."""
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        group_id, member_id = validate_ids(group_id, member_id)
        self._check(partitions)
        if max_records < 1:
            raise InvalidRequest("max_records must be at least 1")
        grants = self._authorization.grants(caller)
        names = {name for topic_id, _ in partitions if (name := self._topic_name(topic_id)) is not None}
        readable = [
            name
            for name in sorted(names)
            if self._authorization.allows(caller, Operation.READ, ResourceType.TOPIC, name)
        ]
        if readable:
            await self._leases.register(group_id, readable, caller=caller)
        # Without this, a caller that does not wait would get nothing while a state is being loaded.
        loads = [self._load(group_id, place) for place in partitions]
        await gather_results(self._scheduler, loads, name="load share partitions")
        operation = ReceiveOperation(
            self._share_service,
            group_id,
            member_id,
            user=caller.session.user,
            client_id=caller.client_id,
            grants=grants,
            partitions=lambda: list(partitions),
            is_connected=lambda: True,
            is_active=lambda: True,
            max_records=max_records,
            max_bytes=self._share_service.settings.fetch_max_bytes,
            max_wait_ms=int(caller.timeout_ms(max_wait_ms, self._clock.monotonic())),
            strict=True,
            lease_ms=lease_ms,
            ranges_max=RANGES_MAX,
        )
        received = await operation.run(())
        found = []
        for (topic_id, index), part in received.items():
            order, is_committed_only = self._settings_of(group_id, (topic_id, index))
            found.append(
                RangesOfPartition(
                    topic_id,
                    index,
                    part.acquired,
                    error=part.error,
                    order=order,
                    is_committed_only=is_committed_only,
                )
            )
        return found

    async def _load(self, group_id: str, place: TopicIdPartition) -> None:
        await self._share_partition_manager.load(group_id, place)

    def _settings_of(self, group_id: str, place: TopicIdPartition) -> tuple[str, bool]:
        """Return the order of the group, and whether it reads only committed records."""
        shares = self._share_partition_manager.find_loaded(group_id, place)
        if shares is None:
            return "", False
        settings = shares.leaders[0].state_machine.settings
        order = "partition" if settings.is_ordered else "key" if settings.is_ordered_by_key else "none"
        return order, settings.is_committed_only

    async def alter(
        self,
        group_id: str,
        member_id: str,
        wanted: Mapping[TopicIdPartition, Sequence[AcquiredRange]],
        *,
        operation: RangeOperation,
        lease_ms: int,
        releases_others: bool,
        caller: Caller,
    ) -> list[RangesOfPartition]:
        """Keep, claim or accept range leases of a member; the results have the ranges for which this was done. For the
        arguments see `SharePartition.alter_range_leases`. The caller needs READ for the group and the topics.

        Raises `GroupAuthorizationFailed`, `InvalidGroupId` and `InvalidRequest`; other errors are in the results."""
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        group_id, member_id = validate_ids(group_id, member_id)
        self._check(list(wanted))
        results = [RangesOfPartition(topic_id, index) for topic_id, index in wanted]

        async def alter(position: int, place: TopicIdPartition, ranges: Sequence[AcquiredRange]) -> None:
            try:
                self._authorization.check_topic_id(caller, Operation.READ, place[0], self._topic_name)
                try:
                    shares = await self._share_partition_manager.load_existing(group_id, place)
                except GroupIdNotFound:  # a group that has read nothing has no leases
                    return
                result, updates = shares.alter_range_leases(
                    member_id,
                    ranges,
                    operation,
                    lease_ms,
                    releases_others=releases_others,
                )
                works = [leader.persist(update) for leader, update in updates]
                for error in await gather_results(self._scheduler, works, name="alter range leases"):
                    if error is not None:
                        raise copied(error)
                results[position] = RangesOfPartition(*place, result.altered, result.ended)
            except MansioError as error:
                results[position] = RangesOfPartition(*place, error=without_traceback(error))

        works = [alter(position, *each) for position, each in enumerate(wanted.items())]
        await gather_results(self._scheduler, works, name="alter range leases", has_turns=True)
        return results

    @staticmethod
    def _check(partitions: Sequence[TopicIdPartition]) -> None:
        if len(partitions) > PARTITIONS_MAX:
            raise InvalidRequest(f"{len(partitions)} partitions; at most {PARTITIONS_MAX} per request")
        if len({*partitions}) < len(partitions):
            raise InvalidRequest("a partition occurs twice in the request")
