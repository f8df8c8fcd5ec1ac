"""Group service: membership, committed offsets, description and deletion of groups.

Validates requests, calls the group coordinator, and replaces errors of the `__consumer_offsets` log by the errors of a
coordinator, which clients handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import (
    NAME_BYTES_MAX,
    check_group_id,
    coordinator_errors,
)
from mansio.broker.routing.routes import coordinator_of
from mansio.config.item_limit import too_many_items
from mansio.config.topic_names import OFFSETS_TOPIC, TOPIC_NAME_CHARACTERS_MAX
from mansio.errors import (
    CoordinatorLoadInProgress,
    InvalidRequest,
    MansioError,
)
from mansio.state.consumer_group.types import LEAVE_STATIC_EPOCH
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.group.group_inspection import (
        DescribedConsumerGroup,
        DescribedGroup,
        ListedGroup,
    )
    from mansio.broker.coordinator.group.offset_manager import OffsetToCommit, StableOffsets
    from mansio.broker.coordinator.group.share_groups import DescribedShareGroup
    from mansio.broker.services.transactions.verifier import TransactionVerifier
    from mansio.metadata.model import BrokerState
    from mansio.state.classic_group.types import Join, JoinResponse, Sync, SyncResponse
    from mansio.state.consumer_group.types import Heartbeat, HeartbeatResponse
    from mansio.state.share_group.group import ShareHeartbeat
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset

MEMBER_BYTES_MAX: Final = 255
"""Maximum length of a share group member's id in bytes. The id is stored with every leased range."""

_CONCURRENT_TRANSACTIONS: Final = 51

TOPIC_NAMES_MAX: Final = 10_000
"""Maximum number of topic names in the subscription of one member; larger subscriptions need a regular expression."""


@dataclass(frozen=True, slots=True)
class LeavingMember:
    """A member of a classic group that leaves. A static member may be identified by its instance id alone; its
    `member_id` is then empty."""

    member_id: str
    instance_id: str | None


class GroupService:
    """Membership, committed offsets and administration of groups."""

    def __init__(self, coordinator: GroupCoordinator, *, node_id: int, verifier: TransactionVerifier) -> None:
        """Create the service. `verifier`: verifies transactional commits with the transaction coordinators."""
        self._coordinator = coordinator
        self._node_id = node_id
        self.verifier = verifier

    async def find_coordinator(self, group_id: str) -> BrokerState | None:
        """Return the broker that coordinates a group; None if it is this broker. Creates `__consumer_offsets` if it
        does not exist, as Kafka does, because some clients wait until it exists. Raises `InvalidGroupId`,
        `CoordinatorNotAvailable`."""
        check_group_id(group_id)
        coordinator = self._coordinator
        await coordinator.ensure_topic_exists()
        if coordinator.lookup is None:
            return None
        broker = coordinator_of(group_id, coordinator.lookup)
        return None if broker.node_id == self._node_id else broker

    # ------------------------------------------------------------------ membership

    async def join(self, group_id: str, request: Join) -> JoinResponse:
        """Add a member to a classic group; return at the end of the rebalance. Raises the errors of
        `GroupCoordinator.join`."""
        return await self._coordinator.join(group_id, request)

    async def sync(self, group_id: str, request: Sync) -> SyncResponse:
        """Return the assignment of a member of a classic group, once it is known. Raises the errors of
        `GroupCoordinator.sync`."""
        return await self._coordinator.sync(group_id, request)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        """Extend the session of a member of a classic group. Raises `RebalanceInProgress` if the member has to rejoin,
        and the other errors of `GroupCoordinator.heartbeat`."""
        self._coordinator.heartbeat(group_id, member_id, instance_id, generation)

    def leave_each(self, group_id: str, members: Iterable[LeavingMember]) -> Iterator[MansioError | None]:
        """Remove members of a classic group, each when its result is taken: the error, or None. Raises errors that
        concern all members: `InvalidGroupId`, and errors of the coordinator such as `NotCoordinator`."""
        check_group_id(group_id)
        self._coordinator.store.find(group_id)
        for member in members:
            try:
                self._coordinator.leave(group_id, member.member_id, member.instance_id)
            except MansioError as error:
                yield without_traceback(error)
            else:
                yield None

    def new_member_id(self) -> str:
        """Generate an id for a new member of a consumer group."""
        return self._coordinator.new_member_id()

    async def consumer_heartbeat(self, group_id: str, request: Heartbeat) -> HeartbeatResponse:
        """Process a heartbeat of a member of a consumer group (KIP-848); return once its changes are committed. Raises
        `InvalidRequest`, and the errors of `ConsumerGroups.heartbeat`."""
        _check_heartbeat(request)
        return await self._coordinator.consumer_heartbeat(group_id, request)

    async def share_heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResponse:
        """Process a heartbeat of a member of a share group (KIP-932); return once its changes are committed. Raises
        `InvalidRequest`, and the errors of `ShareGroups.heartbeat`."""
        if len(request.member_id.encode()) > MEMBER_BYTES_MAX:
            raise InvalidRequest(f"a member id has at most {MEMBER_BYTES_MAX} bytes")
        if request.rack_id == "" or len((request.rack_id or "").encode()) > NAME_BYTES_MAX:
            raise InvalidRequest(f"a rack id must be null or have 1 to {NAME_BYTES_MAX} bytes")
        if request.topic_names is not None and len(request.topic_names) > TOPIC_NAMES_MAX:
            raise InvalidRequest(f"a member may subscribe to at most {TOPIC_NAMES_MAX} topics")
        return await self._coordinator.share_heartbeat(group_id, request)

    # ------------------------------------------------------------------ offsets

    async def commit_offsets(
        self,
        group_id: str,
        offsets: Sequence[OffsetToCommit],
        *,
        member_id: str = "",
        instance_id: str | None = None,
        generation: int = -1,
    ) -> list[MansioError | None]:
        """Commit offsets. Return the error of each offset, or None once the offset is durable. Raises the errors of
        `OffsetManager.commit`."""
        with coordinator_errors():
            return await self._coordinator.offsets.commit(
                group_id, offsets, member_id=member_id, instance_id=instance_id, generation=generation
            )

    async def commit_offsets_in_transaction(
        self,
        transactional_id: str,
        group_id: str,
        producer_id: int,
        producer_epoch: int,
        offsets: Sequence[OffsetToCommit],
        *,
        member_id: str = "",
        instance_id: str | None = None,
        generation: int = -1,
        adds: bool,
    ) -> list[MansioError | None]:
        """Commit offsets as a part of a producer's transaction. Return the error of each offset, or None once the
        offset is durable; it becomes visible when the transaction is committed.

        `adds`: the partition of `__consumer_offsets` that stores the group is added to the transaction; otherwise the
        transaction has to contain it. Raises the errors of `OffsetManager.commit_in_transaction` and of the
        verification; a verification that may succeed later raises `CoordinatorLoadInProgress`, after which clients
        retry without another look-up of the coordinator.
        """
        manager = self._coordinator.offsets
        with coordinator_errors():
            index, verification = await manager.begin_verification(group_id, producer_id, producer_epoch)
            if verification is not None:
                error: MansioError | None
                try:
                    [error] = await self.verifier.verify(
                        transactional_id, producer_id, producer_epoch, [(OFFSETS_TOPIC, index)], adds=adds
                    )
                except MansioError as failure:
                    error = without_traceback(failure)
                finally:
                    manager.end_verification(verification)
                if error is not None:
                    raise _as_verification_error(error, adds=adds)
                if verification.is_outdated:
                    raise CoordinatorLoadInProgress("the transaction ended during its verification")
            return await manager.commit_in_transaction(
                group_id,
                member_id,
                generation,
                producer_id,
                producer_epoch,
                offsets,
                instance_id=instance_id,
            )

    async def fetch_stable_offsets(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
        requires_stable: bool = True,
    ) -> StableOffsets:
        """Return the committed offsets as `fetch_offsets` does and, with `requires_stable`, separately the partitions
        with an offset of an open transaction. Raises the errors of `OffsetManager.fetch`."""
        with coordinator_errors():
            return await self._coordinator.offsets.fetch_stable(
                group_id,
                partitions,
                member_id=member_id,
                member_epoch=member_epoch,
                requires_stable=requires_stable,
            )

    async def fetch_offsets(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
    ) -> dict[tuple[str, int], CommittedOffset]:
        """Return the committed offsets of `partitions`, or of all partitions if it is None. Raises the errors of
        `OffsetManager.fetch`."""
        with coordinator_errors():
            return await self._coordinator.offsets.fetch(
                group_id, partitions, member_id=member_id, member_epoch=member_epoch
            )

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[tuple[str, int]]
    ) -> list[MansioError | None]:
        """Delete committed offsets. Return the error of each partition, or None. Raises the errors of
        `OffsetManager.delete`."""
        with coordinator_errors():
            return await self._coordinator.offsets.delete(group_id, partitions)

    # ------------------------------------------------------------------ administration

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[ListedGroup]:
        """List the groups that this broker coordinates and whose state and type are in `states` and `types`; an empty
        collection does not filter. Raises `CoordinatorLoadInProgress`."""
        led = self._coordinator.led_partitions(self._node_id)
        return self._coordinator.inspection.list_groups(states, types, led_partitions=led)

    def describe(self, group_id: str) -> DescribedGroup:
        """Describe a classic group; the state of a group that does not exist is Dead. Raises `InvalidGroupId` and
        errors of the coordinator."""
        check_group_id(group_id)
        return self._coordinator.inspection.describe(group_id)

    def describe_consumer_group(self, group_id: str) -> DescribedConsumerGroup:
        """Describe a consumer group. Raises `InvalidGroupId`, `GroupIdNotFound` and the errors of the coordinator."""
        check_group_id(group_id)
        return self._coordinator.inspection.describe_consumer(group_id)

    def describe_share_group(self, group_id: str) -> DescribedShareGroup:
        """Describe a share group. Raises `InvalidGroupId`, `GroupIdNotFound` and the errors of the coordinator."""
        check_group_id(group_id)
        return self._coordinator.share_groups.describe(group_id)

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic that is assigned to a member; None if the topic was deleted."""
        return self._coordinator.topic_resolver.name_of(topic_id)

    async def delete(self, group_ids: Sequence[str]) -> list[MansioError | None]:
        """Delete empty groups with their offsets. Returns the error of each group, or None. Errors: those of
        `GroupCoordinator.delete`, `PolicyViolation` (too many groups)."""
        if (refused := too_many_items(len(group_ids))) is not None:
            return [refused] * len(group_ids)
        errors: list[MansioError | None] = []
        for group_id in group_ids:
            try:
                await self._coordinator.delete(group_id)
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return errors


def _check_heartbeat(request: Heartbeat) -> None:
    """Raise `InvalidRequest` if the heartbeat has a value that is invalid in every group."""
    names = (request.instance_id, request.rack_id, request.assignor, request.topic_regex)
    if any(len(name.encode()) > NAME_BYTES_MAX for name in (request.member_id, *names) if name):
        raise InvalidRequest("a name is too long")
    if "" in (request.instance_id, request.rack_id, request.assignor):
        raise InvalidRequest("instance id, rack and assignor must be null or not empty")
    if request.member_epoch < LEAVE_STATIC_EPOCH:
        raise InvalidRequest(f"{request.member_epoch} is not an epoch")
    if request.topic_names is not None and len(request.topic_names) > TOPIC_NAMES_MAX:
        raise InvalidRequest(f"a member may subscribe to at most {TOPIC_NAMES_MAX} topics by name")
    if any(len(name) > TOPIC_NAME_CHARACTERS_MAX for name in request.topic_names or ()):
        raise InvalidRequest(f"a topic name has at most {TOPIC_NAME_CHARACTERS_MAX} characters")


def _as_verification_error(error: MansioError, *, adds: bool) -> MansioError:
    """Return the error of a group coordinator for a failed verification. Clients must not look up the group's
    coordinator because of an error of the transaction coordinator. Clients that use `adds` handle
    CONCURRENT_TRANSACTIONS."""
    if error.retriable and not (adds and error.kafka_code == _CONCURRENT_TRANSACTIONS):
        return CoordinatorLoadInProgress(f"the transaction cannot be verified now: {error.message}")
    return copied(error)
