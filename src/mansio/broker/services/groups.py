"""Group service: membership, committed offsets, description and deletion of groups.

Validates requests, asks the authorizer, calls the group coordinator, and replaces errors of the `__consumer_offsets`
log by the errors of a coordinator, which clients handle.

Each method that takes a `caller` raises `GroupAuthorizationFailed` unless the caller may READ the group, or do what the
method names. Where topics are named, an item of a topic that the caller may not READ or DESCRIBE has the error
`TopicAuthorizationFailed`. Authorization precedes every look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.group.error_mapping import (
    NAME_BYTES_MAX,
    check_group_id,
    coordinator_errors,
)
from mansio.broker.coordinator.group.visible_topics import Viewer
from mansio.broker.routing.routes import coordinator_of
from mansio.config.item_limit import too_many_items
from mansio.config.topic_names import OFFSETS_TOPIC, TOPIC_NAME_CHARACTERS_MAX
from mansio.errors import (
    CoordinatorLoadInProgress,
    InvalidRequest,
    MansioError,
)
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
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
    from mansio.broker.coordinator.group.offset_manager import OffsetManager, OffsetToCommit
    from mansio.broker.coordinator.group.share_groups import DescribedShareGroup
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
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


class FetchedOffsets(NamedTuple):
    """Committed offsets by partition, the requested partitions whose offset a transaction that is not ended may change,
    and the requested partitions of topics that the caller may not describe."""

    committed: dict[tuple[str, int], CommittedOffset]
    unstable: frozenset[tuple[str, int]]
    refused: frozenset[tuple[str, int]]


class GroupService:
    """Membership, committed offsets and administration of groups."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        *,
        node_id: int,
        verifier: TransactionVerifier,
        authorization: Authorization,
    ) -> None:
        """Create the service. `verifier`: verifies transactional commits with the transaction coordinators."""
        self._coordinator = coordinator
        self._node_id = node_id
        self.verifier = verifier
        self._authorization = authorization

    def _check(self, caller: Caller, operation: Operation, group_id: str) -> None:
        self._authorization.check(caller, operation, ResourceType.GROUP, group_id)

    async def find_coordinator(self, group_id: str, *, caller: Caller) -> BrokerState | None:
        """Return the broker that coordinates a group, which needs DESCRIBE; None if it is this broker. Creates
        `__consumer_offsets` if it does not exist, as Kafka does, because some clients wait until it exists. Raises
        `InvalidGroupId`, `CoordinatorNotAvailable`."""
        self._check(caller, Operation.DESCRIBE, group_id)
        check_group_id(group_id)
        coordinator = self._coordinator
        await coordinator.ensure_topic_exists()
        if coordinator.lookup is None:
            return None
        broker = coordinator_of(group_id, coordinator.lookup)
        return None if broker.node_id == self._node_id else broker

    # ------------------------------------------------------------------ membership

    async def join(self, group_id: str, request: Join, *, caller: Caller) -> JoinResponse:
        """Add a member to a classic group; return at the end of the rebalance. Raises the errors of
        `GroupCoordinator.join`."""
        self._check(caller, Operation.READ, group_id)
        return await self._coordinator.join(group_id, request)

    async def sync(self, group_id: str, request: Sync, *, caller: Caller) -> SyncResponse:
        """Return the assignment of a member of a classic group, once it is known. Raises the errors of
        `GroupCoordinator.sync`."""
        self._check(caller, Operation.READ, group_id)
        return await self._coordinator.sync(group_id, request)

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, *, caller: Caller
    ) -> None:
        """Extend the session of a member of a classic group. Raises `RebalanceInProgress` if the member has to rejoin,
        and the other errors of `GroupCoordinator.heartbeat`."""
        self._check(caller, Operation.READ, group_id)
        self._coordinator.heartbeat(group_id, member_id, instance_id, generation)

    def leave_each(
        self, group_id: str, members: Iterable[LeavingMember], *, caller: Caller
    ) -> Iterator[MansioError | None]:
        """Remove members of a classic group, each when its result is taken: the error, or None. Raises errors that
        concern all members: `InvalidGroupId`, and errors of the coordinator such as `NotCoordinator`."""
        self._check(caller, Operation.READ, group_id)
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

    async def consumer_heartbeat(
        self, group_id: str, request: Heartbeat, *, caller: Caller
    ) -> HeartbeatResponse:
        """Process a heartbeat of a member of a consumer group (KIP-848); return once its changes are committed. A
        regular expression matches the topics that the caller may DESCRIBE; see `VisibleTopics`. Raises
        `TopicAuthorizationFailed` unless the caller may DESCRIBE each topic that it names, `InvalidRequest`, and the
        errors of `ConsumerGroups.heartbeat`."""
        self._check_subscription(caller, group_id, request.topic_names)
        _check_heartbeat(request)
        viewer = None
        if self._authorization.is_enabled:
            visible = partial(
                self._authorization.allowed_names, caller, Operation.DESCRIBE, ResourceType.TOPIC
            )
            viewer = Viewer(self._authorization.revision, visible)
        return await self._coordinator.consumer_heartbeat(group_id, request, viewer)

    def _check_subscription(self, caller: Caller, group_id: str, topics: Collection[str] | None) -> None:
        self._check(caller, Operation.READ, group_id)
        if topics:
            self._authorization.check_all(caller, Operation.DESCRIBE, ResourceType.TOPIC, topics)

    async def share_heartbeat(
        self, group_id: str, request: ShareHeartbeat, *, caller: Caller
    ) -> HeartbeatResponse:
        """Process a heartbeat of a member of a share group (KIP-932); return once its changes are committed. Raises
        `TopicAuthorizationFailed` unless the caller may DESCRIBE each topic that it names, `InvalidRequest`, and the
        errors of `ShareGroups.heartbeat`."""
        self._check_subscription(caller, group_id, request.topic_names)
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
        caller: Caller,
    ) -> list[MansioError | None]:
        """Commit offsets. Return the error of each offset, or None once the offset is durable. Raises the errors of
        `OffsetManager.commit`."""
        self._check(caller, Operation.READ, group_id)

        async def commit(allowed: Sequence[OffsetToCommit]) -> list[MansioError | None]:
            with coordinator_errors():
                return await self._coordinator.offsets.commit(
                    group_id, allowed, member_id=member_id, instance_id=instance_id, generation=generation
                )

        return await self._authorization.do_for_allowed(
            caller, Operation.READ, ResourceType.TOPIC, offsets, _topic_of, commit
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
        caller: Caller,
    ) -> list[MansioError | None]:
        """Commit offsets as a part of a producer's transaction. Return the error of each offset, or None once the
        offset is durable; it becomes visible when the transaction is committed.

        `adds`: the partition of `__consumer_offsets` that stores the group is added to the transaction; otherwise the
        transaction has to contain it. Raises the errors of `OffsetManager.commit_in_transaction` and of the
        verification; a verification that may succeed later raises `CoordinatorLoadInProgress`, after which clients
        retry without another look-up of the coordinator.
        """
        self._authorization.check(caller, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)
        self._check(caller, Operation.READ, group_id)
        manager = self._coordinator.offsets

        async def commit(allowed: Sequence[OffsetToCommit]) -> list[MansioError | None]:
            with coordinator_errors():
                await self._verify(
                    manager, transactional_id, group_id, producer_id, producer_epoch, adds=adds
                )
                return await manager.commit_in_transaction(
                    group_id,
                    member_id,
                    generation,
                    producer_id,
                    producer_epoch,
                    allowed,
                    instance_id=instance_id,
                )

        return await self._authorization.do_for_allowed(
            caller, Operation.READ, ResourceType.TOPIC, offsets, _topic_of, commit
        )

    async def _verify(
        self,
        manager: OffsetManager,
        transactional_id: str,
        group_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        adds: bool,
    ) -> None:
        """Verify with the transaction coordinator that the transaction is open, unless this broker knows it."""
        index, verification = await manager.begin_verification(group_id, producer_id, producer_epoch)
        if verification is None:
            return
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

    async def fetch_offsets(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
        requires_stable: bool = True,
        caller: Caller,
    ) -> FetchedOffsets:
        """Return the committed offsets of `partitions`, or of all partitions if it is None. With `requires_stable`, the
        partitions with an offset of an open transaction are separate. The caller needs DESCRIBE for the group and the
        topics; without names, other topics are left out. Raises the errors of `OffsetManager.fetch`."""
        self._check(caller, Operation.DESCRIBE, group_id)
        wanted = None if partitions is None else list(partitions)
        allowed = None if wanted is None else self._describable(caller, wanted)
        with coordinator_errors():
            committed, unstable = await self._coordinator.offsets.fetch_stable(
                group_id,
                wanted if allowed is None else [key for key in wanted or () if key[0] in allowed],
                member_id=member_id,
                member_epoch=member_epoch,
                requires_stable=requires_stable,
            )
        if allowed is None:
            allowed = self._describable(caller, [*committed, *unstable], is_named=False)
            committed = {key: found for key, found in committed.items() if key[0] in allowed}
            unstable = frozenset(key for key in unstable if key[0] in allowed)
        refused = frozenset(key for key in wanted or () if key[0] not in allowed)
        return FetchedOffsets(committed, unstable, refused)

    def _describable(
        self, caller: Caller, partitions: Iterable[tuple[str, int]], *, is_named: bool = True
    ) -> frozenset[str]:
        """Return the topics that a caller may DESCRIBE. `is_named`: the request names them."""
        topics = dict.fromkeys(topic for topic, _ in partitions)
        authorization = self._authorization
        select = authorization.allowed_of_named if is_named else authorization.allowed_names
        return frozenset(select(caller, Operation.DESCRIBE, ResourceType.TOPIC, topics))

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[tuple[str, int]], *, caller: Caller
    ) -> list[MansioError | None]:
        """Delete committed offsets, which needs DELETE for the group. Return the error of each partition, or None.
        Raises the errors of `OffsetManager.delete`."""
        self._check(caller, Operation.DELETE, group_id)

        async def delete(allowed: Sequence[tuple[str, int]]) -> list[MansioError | None]:
            with coordinator_errors():
                return await self._coordinator.offsets.delete(group_id, allowed)

        return await self._authorization.do_for_allowed(
            caller, Operation.READ, ResourceType.TOPIC, partitions, lambda key: key[0], delete
        )

    # ------------------------------------------------------------------ administration

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = (), *, caller: Caller
    ) -> list[ListedGroup]:
        """List the groups that this broker coordinates and whose state and type are in `states` and `types`; an empty
        collection does not filter. Groups that the caller may not DESCRIBE are left out, unless it may DESCRIBE the
        cluster. Raises `CoordinatorLoadInProgress`."""
        led = self._coordinator.led_partitions(self._node_id)
        listed = self._coordinator.inspection.list_groups(states, types, led_partitions=led)
        if self._authorization.allows(caller, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
            return listed
        names = [each.group_id for each in listed]
        allowed = set(
            self._authorization.allowed_names(caller, Operation.DESCRIBE, ResourceType.GROUP, names)
        )
        return [each for each in listed if each.group_id in allowed]

    def authorized_operations(self, group_id: str, *, caller: Caller) -> int:
        """Return the set of operations that the caller may do on a group (KIP-430)."""
        return self._authorization.authorized_operations(caller, ResourceType.GROUP, group_id)

    def describe(self, group_id: str, *, caller: Caller) -> DescribedGroup:
        """Describe a classic group, which needs DESCRIBE; the state of a group that does not exist is Dead. Raises
        `InvalidGroupId` and errors of the coordinator."""
        self._check(caller, Operation.DESCRIBE, group_id)
        check_group_id(group_id)
        return self._coordinator.inspection.describe(group_id)

    def describe_consumer_group(self, group_id: str, *, caller: Caller) -> DescribedConsumerGroup:
        """Describe a consumer group, which needs DESCRIBE for it and for each topic that is assigned to a member.

        Raises `TopicAuthorizationFailed`, `InvalidGroupId`, `GroupIdNotFound` and the errors of the coordinator."""
        self._check(caller, Operation.DESCRIBE, group_id)
        check_group_id(group_id)
        found = self._coordinator.inspection.describe_consumer(group_id)
        self._authorization.check_all(
            caller,
            Operation.DESCRIBE,
            ResourceType.TOPIC,
            (topic.topic for member in found.members for topic in chain(member.assigned, member.target)),
        )
        return found

    def describe_share_group(self, group_id: str, *, caller: Caller) -> DescribedShareGroup:
        """Describe a share group, which needs DESCRIBE for it and for each topic that is assigned to a member. Raises
        `TopicAuthorizationFailed`, `InvalidGroupId`, `GroupIdNotFound` and the errors of the coordinator."""
        self._check(caller, Operation.DESCRIBE, group_id)
        check_group_id(group_id)
        found = self._coordinator.share_groups.describe(group_id)
        topic_ids = {topic_id for member in found.members for topic_id, _ in member.current.assigned}
        names = (self.topic_name(topic_id) for topic_id in topic_ids)
        self._authorization.check_all(
            caller, Operation.DESCRIBE, ResourceType.TOPIC, (name for name in names if name is not None)
        )
        return found

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic that is assigned to a member; None if the topic was deleted."""
        return self._coordinator.topic_resolver.name_of(topic_id)

    async def delete(self, group_ids: Sequence[str], *, caller: Caller) -> list[MansioError | None]:
        """Delete empty groups with their offsets, which needs DELETE. Returns the error of each group, or None. Errors:
        those of `GroupCoordinator.delete`, `PolicyViolation` (too many groups)."""
        if (refused := too_many_items(len(group_ids))) is not None:
            return [refused] * len(group_ids)
        errors: list[MansioError | None] = []
        for group_id in group_ids:
            try:
                self._check(caller, Operation.DELETE, group_id)
                await self._coordinator.delete(group_id)
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return errors


def _topic_of(offset: OffsetToCommit) -> str:
    return offset.topic


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
