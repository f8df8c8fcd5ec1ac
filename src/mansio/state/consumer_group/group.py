"""State machine of one consumer group (KIP-848): the broker assigns the partitions.

The *group epoch* increases when a member joins, leaves or changes its subscription, and when a subscribed topic is
created, deleted or gets more partitions. An assignor then computes a *target* assignment for all members at once; the
target has the group epoch for which it was computed. Each member moves to its target independently. The response to its
next heartbeat contains the partitions that the member may keep. The heartbeat that confirms the revocation of its other
partitions moves the member to the epoch of the target, and assigns all partitions of the target that no other member
owns. The remaining partitions follow as their owners release them (see the diagram in `reconciliation`). A member that
has nothing to revoke is never interrupted, and a member waits for its own new partitions only.

             first join (the target is computed at once)         every member has its target
        EMPTY ──────────────────────────────────► RECONCILING ◄──────────────────────────────────► STABLE
         │ ▲                                           │     member or subscription or topic changed   │
         │ └───────────────────────────────────────────┴─────────── no member left ────────────────────┘
         │ deleted
         ▼                           (ASSIGNING, a group epoch without its target, occurs only in the records of
        DEAD                          another broker: the next heartbeat computes the target. See `TRANSITIONS`.)

The state machine does no I/O: methods take the time (`now_ms`, milliseconds of any monotonic clock) and return a
response and records. There are no timers: `next_deadline_ms` returns when `tick` has to be called, and a heartbeat only
changes a deadline.

Members of the classic protocol can belong to the group, too, so that clients can be replaced one at a time. The broker
assigns partitions to all members. A classic member sees an ordinary rebalance: a heartbeat returns
REBALANCE_IN_PROGRESS, the join contains the partitions that the member still owns (the broker responds at once, because
there is no leader), and the sync returns the assignment. A classic member revokes partitions by a join without them.
Its generation is its member epoch.

Invariants:
* All state that influences assignments is stored: a group restored from the records behaves like this one.
* A partition is owned (assigned, or pending revocation) by at most one member.
* A new target is stored together with the group epoch from which it was computed.
* Epochs only increase (except that a static member that left has -2). A member with an older epoch is fenced, unless it
  sends the previous epoch and owns only partitions that are assigned to it: then it has missed the last response.
* A heartbeat that changes nothing, from a member that waits for no partition, returns no records.
* A member that does not revoke a partition within its own rebalance timeout is removed, even if it sends heartbeats.
* A classic member has to rejoin only if its target differs from its assignment and the missing partitions are unowned,
  or if the group was converted from a classic group that was about to rebalance or whose assignment contained
  partitions of a deleted topic. The member then has its rebalance timeout to join, and the same time again to sync.
* Conversion of a classic group keeps the assignment of every member.
* The classic group that replaces a consumer group has a generation that no member has, so all members rejoin, even
  after a crash. Until a member has rejoined, it continues in its own generation.

Source: KIP-848; Apache Kafka's GroupMetadataManager. Deviations: the short heartbeat interval during reconciliation; a
static member that left keeps only partitions of its target; a classic member whose assignment does not change need not
rejoin because of a newer epoch.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    CoordinatorNotAvailable,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequest,
    NonEmptyGroup,
    RebalanceInProgress,
    StaleMemberEpoch,
    UnknownMember,
    UnsupportedAssignor,
)
from mansio.state.assignors import MemberSpec
from mansio.state.assignors.partition_sets import all_partitions
from mansio.state.classic_group.group import PREPARING, ClassicGroup
from mansio.state.classic_group.types import JoinResponse, Response, SyncResponse
from mansio.state.consumer_group import classic_bridge
from mansio.state.consumer_group.reconciliation import next_assignment
from mansio.state.consumer_group.stored_state import ConsumerMember, StoredGroup
from mansio.state.consumer_group.types import (
    ASSIGNING,
    CLASSIC_PROTOCOL_TYPE,
    DEAD,
    EMPTY,
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEAVE_STATIC_EPOCH,
    NO_PARTITIONS,
    RECONCILING,
    RECONCILING_HEARTBEAT_INTERVAL_MS,
    STABLE,
    HeartbeatResponse,
    MemberState,
)
from mansio.wire.internal_records.consumer_group_records import CurrentAssignment, MemberMetadata
from mansio.wire.internal_records.offset_and_group_records import (
    GroupKey,
    GroupMetadata,
    encode_group_key,
    encode_group_value,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from mansio.state.assignors import Assignor
    from mansio.state.classic_group.types import Join, Sync
    from mansio.state.consumer_group.types import (
        ClassicCodec,
        ClassicSubscription,
        ConsumerGroupSettings,
        ConsumerGroupState,
        Heartbeat,
        Records,
        Topics,
    )
    from mansio.wire.internal_records.consumer_group_records import GroupRecordKey
    from mansio.wire.topic_partition import TopicIdPartition

    Subscriptions = Mapping[str, frozenset[bytes]]
    """Topic ids by member id."""

EMPTY_METADATA: Final = MemberMetadata(None, None, "", "", (), None, -1, None)
"""Metadata of a new member, before its first heartbeat is applied."""


class ConsumerGroup:
    """State machine of one consumer group. Callers may read the attributes; only methods change them (`settings` may be
    replaced).

    Every method that returns `Records` has changed the group already. The caller appends the records at once, in one
    batch, and responds when they are committed. If that fails, or if a method raises any exception but a `MansioError`,
    the caller drops the object and builds a new one from the stored records by `apply` and `finish_restore`. A method
    that raises a `MansioError` has changed nothing.
    """

    def __init__(
        self,
        group_id: str,
        *,
        assignors: Mapping[str, Assignor],
        default_assignor: str,
        settings: ConsumerGroupSettings,
        codec: ClassicCodec,
    ) -> None:
        self.group_id = group_id
        self.settings = settings
        self.stored = StoredGroup(group_id)
        self._assignors = assignors
        self._default_assignor = default_assignor
        self._codec = codec
        self.topics: Topics | None = None  # of the last target; not stored
        self._is_deleted = False  # its deletion is being written; not stored

    @property
    def members(self) -> Mapping[str, ConsumerMember]:
        """Members by member id."""
        return self.stored.members

    @property
    def group_epoch(self) -> int:
        """Epoch that increases with each change of members, subscriptions or subscribed topics."""
        return self.stored.group_epoch

    @property
    def assignment_epoch(self) -> int:
        """Group epoch for which the target assignment was computed."""
        return self.stored.assignment_epoch

    @property
    def assignor(self) -> str:
        """Name of the assignor that most members request; the default if none requests one."""
        return self.stored.preferred_assignor(self._default_assignor)

    @property
    def state(self) -> ConsumerGroupState:
        """State of the group, computed from its members and epochs."""
        if self._is_deleted:
            return DEAD
        if not self.stored.members:
            return EMPTY
        if self.stored.group_epoch > self.stored.assignment_epoch:
            return ASSIGNING
        epoch = self.stored.assignment_epoch
        is_stable = all(each.is_reconciled(epoch) for each in self.stored.members.values())
        return STABLE if is_stable else RECONCILING

    # ------------------------------------------------------------------ events: members of the consumer protocol

    def heartbeat(
        self, request: Heartbeat, topics: Topics, now_ms: float
    ) -> tuple[HeartbeatResponse, Records]:
        """Handle the heartbeat of a member. Epoch 0: the member joins; -1: it leaves; -2: a static member leaves and
        will return.

        Raises `CoordinatorNotAvailable` (the group is being deleted), `InvalidRequest`, `UnsupportedAssignor`,
        `GroupMaxSizeReached`, `UnknownMember`, `FencedMemberEpoch`, `FencedInstanceId`, `UnreleasedInstanceId`.
        """
        self._check_alive()
        if request.member_epoch == JOIN_EPOCH:
            return self._join(request, topics, now_ms)
        if request.member_epoch < 0:
            return self._leave(request, topics, now_ms)
        member = self.stored.find_valid(request.member_id, request.instance_id)
        current = member.current
        is_up_to_date = member.reconciled_version == self.stored.version and self.topics is topics
        if is_up_to_date and request.member_epoch == current.epoch and _is_keep_alive(request):
            member.extend_session(self.settings, now_ms)
            return self._heartbeat_response(member, with_assignment=False), []
        _check_epoch(member, request)
        self._check_assignor(request)
        member.extend_session(self.settings, now_ms)
        self._update_metadata(member, _merge_metadata(member.metadata, request), topics)
        self._reconcile(member, request.owned, topics, now_ms)
        has_missed = request.member_epoch != current.epoch
        has_changed = member.current.assigned != current.assigned
        with_assignment = has_missed or has_changed or _is_full_request(request)
        return self._heartbeat_response(member, with_assignment=with_assignment), self.stored.take_changes()

    def _join(self, request: Heartbeat, topics: Topics, now_ms: float) -> tuple[HeartbeatResponse, Records]:
        """Handle a join. A known member that joins again loses its partitions; a static member replaces its
        predecessor."""
        _check_join(request)
        self._check_assignor(request)
        existing = self.stored.find_member_or_static(request.member_id, request.instance_id)
        self._check_capacity(existing)
        metadata = _merge_metadata(EMPTY_METADATA if existing is None else existing.metadata, request)
        metadata = metadata._replace(
            client_id=request.client_id, client_host=request.client_host, classic=None
        )
        member = self._add_or_replace_member(existing, request.member_id, metadata, topics)
        if member is existing:
            self.stored.release_all(member)
        member.revoke_deadline_ms = math.inf
        member.rejoin_deadline_ms = math.inf
        member.is_awaiting_sync = False
        member.extend_session(self.settings, now_ms)
        self._reconcile(member, NO_PARTITIONS, topics, now_ms)
        return self._heartbeat_response(member, with_assignment=True), self.stored.take_changes()

    def _leave(self, request: Heartbeat, topics: Topics, now_ms: float) -> tuple[HeartbeatResponse, Records]:
        member = self.stored.find_valid(request.member_id, request.instance_id)
        if request.member_epoch == LEAVE_EPOCH:
            self._remove_members([member], topics)
        elif request.member_epoch == LEAVE_STATIC_EPOCH and member.metadata.instance_id is not None:
            member.extend_session(self.settings, now_ms)
            member.revoke_deadline_ms = math.inf
            if not member.is_static_offline:
                offline = member.current._replace(
                    epoch=LEAVE_STATIC_EPOCH,
                    previous_epoch=member.current.epoch,
                    state=MemberState.STABLE,
                    assigned=member.current.assigned & member.target,
                    pending=NO_PARTITIONS,
                )
                self.stored.set_current(member, offline)
        else:
            raise InvalidRequest(f"epoch {request.member_epoch} requires an instance id")
        response = HeartbeatResponse(
            request.member_id, request.member_epoch, self.settings.heartbeat_interval_ms, None
        )
        return response, self.stored.take_changes()

    def check_commit(self, member_id: str, instance_id: str | None, member_epoch: int, now_ms: float) -> None:
        """Check that a member may commit offsets now. Without an epoch (-1), commits are accepted only while the group
        has no members. Raises `UnknownMember`, `FencedInstanceId`, and `StaleMemberEpoch` (for a classic member
        `IllegalGeneration`)."""
        self._check_alive()
        if member_epoch < 0 and not self.stored.members:
            return
        member = self.stored.find_valid(member_id, instance_id)
        if member_epoch != member.current.epoch:
            message = f"member {member_id} is at epoch {member.current.epoch}, not {member_epoch}"
            raise IllegalGeneration(message) if member.is_classic else StaleMemberEpoch(message)
        if member.is_classic:
            member.extend_session(self.settings, now_ms)

    def check_transactional_commit(self, member_id: str, instance_id: str | None, member_epoch: int) -> None:
        """Check that a producer may commit offsets in a transaction for a member of this group (KIP-447). A producer
        that names neither member nor epoch is not checked, because old clients do not send them. Raises
        `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`."""
        self._check_alive()
        if member_epoch < 0 and (not self.stored.members or (not member_id and instance_id is None)):
            return
        member = self.stored.find_valid(member_id, instance_id)
        if member_epoch != member.current.epoch:
            raise IllegalGeneration(
                f"member {member_id} is at epoch {member.current.epoch}, not {member_epoch}"
            )

    def check_fetch(self, member_id: str, member_epoch: int) -> None:
        """Check that a client may read committed offsets. A client that is no member passes "" and -1 and may. Raises
        `UnknownMember`, `StaleMemberEpoch`."""
        if not member_id and member_epoch < 0:
            return
        if member_epoch != self.stored.find_valid(member_id, None).current.epoch:
            raise StaleMemberEpoch(f"member {member_id} is not at epoch {member_epoch}")

    # ------------------------------------------------------------------ events: members of the classic protocol

    def join(
        self, request: Join, new_member_id: str, topics: Topics, now_ms: float
    ) -> tuple[JoinResponse, Records]:
        """Handle the JoinGroup of a classic member; the caller responds once the records are committed. If the response
        has `must_rejoin`, the member has to join again with the id in the response.

        Raises `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `FencedInstanceId`, `UnknownMember`,
        `UnreleasedInstanceId`.
        """
        self._check_alive()
        subscription = self._check_classic_join(request)
        if request.member_id and request.instance_id is not None:
            self.stored.find_valid(request.member_id, request.instance_id)
        member_id = request.member_id or new_member_id
        existing = self.stored.find_member_or_static(member_id, request.instance_id)
        self._check_capacity(existing)
        if not request.member_id and request.instance_id is None and request.requires_member_id:
            return JoinResponse(new_member_id, must_rejoin=True), []
        metadata = classic_bridge.metadata_of_join(request, subscription)
        member = self._add_or_replace_member(existing, member_id, metadata, topics)
        member.extend_session(self.settings, now_ms)
        owned = classic_bridge.partitions_by_id(subscription.owned, topics)
        self._reconcile(member, owned, topics, now_ms)
        member.rejoin_deadline_ms = now_ms + request.rebalance_timeout_ms
        member.is_awaiting_sync = True
        protocol = classic_bridge.common_protocol(member, self.members.values())
        response = JoinResponse(member_id, member.current.epoch, CLASSIC_PROTOCOL_TYPE, protocol)
        return response, self.stored.take_changes()

    def sync(self, request: Sync, topics: Topics, now_ms: float) -> SyncResponse:
        """Return the assignment of a classic member. Nothing has to be stored; the caller responds once earlier records
        are committed.

        Raises `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`, `InconsistentGroupProtocol`,
        `RebalanceInProgress`.
        """
        self._check_alive()
        member = self._classic_member(request.member_id, request.instance_id, request.generation)
        classic = member.metadata.classic
        names = () if classic is None else [name for name, _ in classic.protocols]
        if request.protocol_type not in (None, CLASSIC_PROTOCOL_TYPE):
            raise InconsistentGroupProtocol(f"the protocol type of the group is {CLASSIC_PROTOCOL_TYPE}")
        if request.protocol is not None and request.protocol not in names:
            raise InconsistentGroupProtocol(f"the member has not joined with {request.protocol}")
        if member.current.state != MemberState.UNREVOKED and self._must_rejoin(member):
            raise RebalanceInProgress
        member.extend_session(self.settings, now_ms)
        member.rejoin_deadline_ms = math.inf
        member.is_awaiting_sync = False
        assignment = classic_bridge.encode_assignment(self._codec, member.current.assigned, topics)
        protocol = classic_bridge.common_protocol(member, self.members.values())
        return SyncResponse(assignment, CLASSIC_PROTOCOL_TYPE, protocol)

    def classic_heartbeat(
        self, member_id: str, instance_id: str | None, generation: int, now_ms: float
    ) -> None:
        """Handle the Heartbeat of a classic member. Raises `RebalanceInProgress` if the member has to rejoin, and
        `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`."""
        self._check_alive()
        member = self._classic_member(member_id, instance_id, generation)
        member.extend_session(self.settings, now_ms)
        if self._must_rejoin(member):
            if member.rejoin_deadline_ms == math.inf:
                member.rejoin_deadline_ms = now_ms + member.metadata.rebalance_timeout_ms
            raise RebalanceInProgress
        if not member.is_awaiting_sync:
            member.rejoin_deadline_ms = math.inf

    def leave(self, member_id: str, instance_id: str | None, topics: Topics, now_ms: float) -> Records:  # noqa: ARG002 - the signature of all events
        """Remove a classic member; a static one may be identified by its instance id alone. Raises `UnknownMember`,
        `FencedInstanceId`."""
        self._check_alive()
        if not member_id and instance_id is not None:
            member_id = self.stored.static_members.get(instance_id, "")
        member = self.stored.find_valid(member_id, instance_id)
        if not member.is_classic:
            raise UnknownMember(f"member {member_id} uses the consumer protocol and leaves by its heartbeat")
        self._remove_members([member], topics)
        return self.stored.take_changes()

    # ------------------------------------------------------------------ events: topics, time, administration

    def handle_topic_change(self, topics: Topics, now_ms: float) -> Records:  # noqa: ARG002 - the signature of all events
        """Handle topics that were created, deleted or got more partitions, and regular expressions whose matches have
        changed."""
        if self.stored.members and not self._is_deleted:
            self._update_target_assignment(topics)
        return self.stored.take_changes()

    def next_deadline_ms(self) -> float:
        """Return the time at which `tick` has to be called next; infinity if there is no deadline."""
        return min((each.deadline_ms() for each in self.stored.members.values()), default=math.inf)

    def tick(self, topics: Topics, now_ms: float) -> Records:
        """Remove members whose session has ended, or that did not revoke partitions or rejoin in time."""
        if overdue := [each for each in self.stored if each.deadline_ms() <= now_ms]:
            self._remove_members(overdue, topics)
        return self.stored.take_changes()

    def subscribed_regexes(self) -> list[str]:
        """Return the regular expressions to which members subscribe."""
        found = {each.metadata.topic_regex: None for each in self.stored if each.metadata.topic_regex}
        return list(found)

    def subscribed_topic_names(self) -> Iterator[str]:
        """Yield the names of the topics to which members subscribe; a name may occur several times."""
        for member in self.members.values():
            yield from member.metadata.topic_names
            regex = self.stored.resolved_regexes.get(member.metadata.topic_regex or "")
            if regex is not None:
                yield from regex.topics

    def is_idle(self) -> bool:
        """Whether the group has no members."""
        return not self.stored.members

    def delete(self) -> Records:
        """Delete the group, which must have no members; returns the records that delete all of its state. Raises
        `NonEmptyGroup`."""
        self._check_alive()
        if self.stored.members:
            raise NonEmptyGroup(f"group {self.group_id} has {len(self.stored.members)} members")
        self._is_deleted = True
        return self.stored.tombstones()

    def undelete(self) -> None:
        """Cancel the deletion of the group, because it could not be written."""
        self._is_deleted = False

    # ------------------------------------------------------------------ records

    def apply(self, key: GroupRecordKey, value: bytes | None) -> None:
        """Apply a stored record (kinds 3 to 8 and 16). Of several records with the same key the last one counts."""
        self.stored.apply(key, value)

    def finish_restore(self, now_ms: float) -> None:
        """Create the members after all stored records were applied; session and rebalance timeouts start again. Raises
        `CorruptLog`."""
        self.stored.finish_restore(self.settings, now_ms)

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Return the records of the group, each key once."""
        return self.stored.snapshot()

    # ------------------------------------------------------------------ conversion from and to a classic group

    @classmethod
    def from_classic(
        cls,
        classic: ClassicGroup,
        *,
        assignors: Mapping[str, Assignor],
        default_assignor: str,
        settings: ConsumerGroupSettings,
        codec: ClassicCodec,
        topics: Topics,
        now_ms: float,
    ) -> tuple[ConsumerGroup, Records, list[Response]]:
        """Create the consumer group that replaces a classic group with members, when a member of the consumer protocol
        joins. Returns the group, its records, and the responses to parked requests of the classic members.

        Does not change `classic`. After the new member's heartbeat has succeeded, the caller appends these records
        (including the deletion of the classic group) followed by those of the heartbeat, performs the responses, after
        which the members rejoin, and replaces the state machine. Raises `InconsistentGroupProtocol` if the metadata of
        a member cannot be decoded.
        """
        if classic.protocol_type != CLASSIC_PROTOCOL_TYPE:
            raise InconsistentGroupProtocol(
                f"group {classic.group_id} has the protocol type {classic.protocol_type}"
            )
        group = cls(
            classic.group_id,
            assignors=assignors,
            default_assignor=default_assignor,
            settings=settings,
            codec=codec,
        )
        stored = group.stored
        responses: list[Response] = []
        for each in classic.members:
            protocol = classic.protocol or each.protocols[0].name
            subscription = classic_bridge.read_subscription(codec, each.metadata_for(protocol))
            metadata = classic_bridge.metadata_of_member(each, subscription)
            member = ConsumerMember(each.member_id, metadata)
            stored.set_metadata(member, metadata)
            named = classic_bridge.read_assignment(codec, each.assignment)
            assigned = classic_bridge.partitions_by_id(named, topics).difference(stored.owners)
            stored.set_target(member, assigned)
            epoch = classic.generation_of(each)
            # A partition of a deleted topic has no topic id under which it could be pending, and a group that was
            # converted back has dropped it: without a rejoin the member would also read that partition of a new topic
            # with the same name.
            is_complete = len(assigned) == len(named) and classic.state is not PREPARING
            state = MemberState.STABLE if is_complete else MemberState.UNREVOKED
            stored.set_current(member, CurrentAssignment(epoch, epoch, state, assigned))
            member.extend_session(settings, now_ms)
            waiters = (each.join_waiter, each.sync_waiter)
            responses += [Response(waiter, RebalanceInProgress()) for waiter in waiters if waiter is not None]
        stored.set_epoch(classic.generation, _metadata_hash(stored.all_subscribed_topic_ids(topics), topics))
        stored.set_assignment_epoch(classic.generation)
        tombstone = (encode_group_key(GroupKey(classic.group_id)), None)
        return group, [tombstone, *stored.take_changes()], responses

    def to_classic(
        self, *, initial_delay_ms: float, size_max: int, topics: Topics, now_ms: float, wall_ms: int
    ) -> tuple[ClassicGroup, Records] | None:
        """Create the classic group that replaces this group if only classic members are left, otherwise return None.
        The classic group is about to rebalance. Returns it with the records to append after those of the preceding
        call.

        The caller calls this after each `heartbeat`, `leave` and `tick` that returned records.
        """
        members = list(self.members.values())
        if not members or not all(each.is_classic for each in members):
            return None
        protocol = classic_bridge.common_protocol(members[0], members)
        records = [
            classic_bridge.to_classic_member_record(
                each,
                protocol,
                classic_bridge.encode_assignment(self._codec, each.current.assigned, topics),
            )
            for each in members
        ]
        metadata = GroupMetadata(
            CLASSIC_PROTOCOL_TYPE,
            self.group_epoch + 1,  # no member has it
            protocol,
            members[0].member_id,
            wall_ms,
            tuple(records),
        )
        classic = ClassicGroup(self.group_id, initial_delay_ms=initial_delay_ms, size_max=size_max)
        classic.restore_converted(metadata, {each.member_id: each.current.epoch for each in members}, now_ms)
        record = (encode_group_key(GroupKey(self.group_id)), encode_group_value(metadata))
        return classic, [*self.stored.tombstones(), record]

    # ------------------------------------------------------------------ checks

    def _check_alive(self) -> None:
        if self._is_deleted:
            raise CoordinatorNotAvailable(f"group {self.group_id} is being deleted")

    def _check_capacity(self, existing: ConsumerMember | None) -> None:
        if existing is None and len(self.stored.members) >= self.settings.size_max:
            raise GroupMaxSizeReached(
                f"group {self.group_id} has the maximum of {self.settings.size_max} members"
            )

    def _check_assignor(self, request: Heartbeat) -> None:
        if request.assignor is not None and request.assignor not in self._assignors:
            known = ", ".join(self._assignors)
            raise UnsupportedAssignor(f"unknown assignor {request.assignor!r}; available: {known}")

    def _check_classic_join(self, request: Join) -> ClassicSubscription:
        """Return the subscription of a joining classic member. Raises `InconsistentGroupProtocol` unless all classic
        members have a common protocol, which they need if the group becomes classic again."""
        if request.protocol_type != CLASSIC_PROTOCOL_TYPE or not request.protocols:
            raise InconsistentGroupProtocol(
                f"group {self.group_id} has the protocol type {CLASSIC_PROTOCOL_TYPE}"
            )
        common = {each.name for each in request.protocols}
        for member in self.members.values():
            if member.metadata.classic is not None and member.member_id != request.member_id:
                common &= {name for name, _ in member.metadata.classic.protocols}
        if not common:
            raise InconsistentGroupProtocol(f"no protocol is common to all members of {self.group_id}")
        return classic_bridge.read_subscription(self._codec, request.protocols[0].metadata)

    def _classic_member(self, member_id: str, instance_id: str | None, generation: int) -> ConsumerMember:
        member = self.stored.find_valid(member_id, instance_id)
        if not member.is_classic:
            raise UnknownMember(f"member {member_id} does not use the classic protocol")
        if generation != member.current.epoch:
            raise IllegalGeneration(
                f"member {member_id} is at generation {member.current.epoch}, not {generation}"
            )
        return member

    def _must_rejoin(self, member: ConsumerMember) -> bool:
        """Whether a classic member has to revoke partitions, or all partitions that it misses are unowned."""
        current, target = member.current, member.target
        if current.state == MemberState.UNREVOKED or not current.assigned <= target:
            return True
        missing = target - current.assigned
        return bool(missing) and self.stored.all_unowned(missing)

    # ------------------------------------------------------------------ steps, after all checks

    def _add_or_replace_member(
        self, existing: ConsumerMember | None, member_id: str, metadata: MemberMetadata, topics: Topics
    ) -> ConsumerMember:
        """Add a new member, update a known one (`existing`), or replace a static member under a new member id."""
        if existing is None:
            member = ConsumerMember(member_id, metadata)
            self.stored.set_metadata(member, metadata)
            self.stored.set_target(member, NO_PARTITIONS)
            self._update_target_assignment(topics, changed=True)
        elif existing.member_id != member_id:
            member = self.stored.replace_static_member(existing, member_id, existing.metadata)
            self._update_metadata(member, metadata, topics)
        else:
            member = existing
            self._update_metadata(member, metadata, topics)
        return member

    def _remove_members(self, members: list[ConsumerMember], topics: Topics) -> None:
        """Remove members and release their partitions."""
        for member in members:
            self.stored.remove(member)
        self._update_target_assignment(topics, changed=True)

    def _update_metadata(self, member: ConsumerMember, metadata: MemberMetadata, topics: Topics) -> None:
        """Store changed metadata of a member, and compute a new target if it affects the assignment."""
        before = member.metadata
        changed = False
        if metadata != before:
            assignor = self.assignor
            self.stored.set_metadata(member, metadata)
            subscription = (metadata.topic_names, metadata.topic_regex, metadata.instance_id)
            changed = subscription != (before.topic_names, before.topic_regex, before.instance_id)
            changed |= assignor != self.assignor
        self._update_target_assignment(topics, changed=changed)

    def _update_target_assignment(self, topics: Topics, *, changed: bool = False) -> None:
        """Start a new group epoch with a new target assignment if members or subscriptions (`changed`), or the topics,
        have changed."""
        stored = self.stored
        if not changed and topics is self.topics and stored.group_epoch == stored.assignment_epoch:
            return
        self.topics = topics
        stored.resolve_regexes(topics)
        subscriptions = stored.all_subscribed_topic_ids(topics)
        metadata_hash = _metadata_hash(subscriptions, topics)
        if changed or metadata_hash != stored.metadata_hash:
            stored.set_epoch(stored.group_epoch + 1, metadata_hash)
        if stored.group_epoch > stored.assignment_epoch:
            self._compute_target(subscriptions, topics)

    def _compute_target(self, subscriptions: Subscriptions, topics: Topics) -> None:
        """Compute the target assignment of the current group epoch and store the targets that have changed."""
        stored = self.stored
        assignor = self._assignors.get(self.assignor, self._assignors[self._default_assignor])
        sorted_topics = {each: tuple(sorted(each)) for each in dict.fromkeys(subscriptions.values())}
        specs = [
            MemberSpec(
                each.member_id,
                each.metadata.instance_id,
                sorted_topics[subscriptions[each.member_id]],
                each.target,
            )
            for each in stored.members.values()
        ]
        assignment = assignor.assign(specs, topics.partitions) if specs else {}
        targets = _validate_targets(self.group_id, assignor.name, subscriptions, assignment, topics)
        for member in stored.members.values():
            target = targets[member.member_id]
            if (
                target is not member.target and target != member.target
            ):  # comparing equal sets visits every element
                stored.set_target(member, target)
            if member.is_static_offline and not member.current.assigned <= target:
                # its client reads nothing, so the partitions are free at once
                stored.set_current(member, member.current._replace(assigned=member.current.assigned & target))
        stored.set_assignment_epoch(stored.group_epoch)

    def _reconcile(
        self, member: ConsumerMember, owned: frozenset[TopicIdPartition] | None, topics: Topics, now_ms: float
    ) -> None:
        """Change the current assignment of a member towards its target, as far as its owned partitions allow."""
        stored, before = self.stored, member.current
        is_unrevoked = before.state == MemberState.UNREVOKED
        current = next_assignment(
            before,
            member.target,
            stored.assignment_epoch,
            stored.subscribed_topic_ids(member.metadata, topics) if is_unrevoked else frozenset(),
            owned,
            stored.owners.__contains__,
        )
        if current is not before:
            stored.set_current(member, current)
            if current.state != MemberState.UNREVOKED:
                member.revoke_deadline_ms = math.inf
            elif not is_unrevoked or not before.pending <= current.pending:
                member.revoke_deadline_ms = now_ms + member.metadata.rebalance_timeout_ms
        member.reconciled_version = stored.version

    def _heartbeat_response(self, member: ConsumerMember, *, with_assignment: bool) -> HeartbeatResponse:
        interval_ms = self.settings.heartbeat_interval_ms
        if member.current.state != MemberState.STABLE:
            interval_ms = min(interval_ms, RECONCILING_HEARTBEAT_INTERVAL_MS)
        assignment = tuple(sorted(member.current.assigned)) if with_assignment else None
        return HeartbeatResponse(member.member_id, member.current.epoch, interval_ms, assignment)


# ---------------------------------------------------------------------- requests
# The order of the checks and their errors are those of Apache Kafka's GroupMetadataManager.


def _merge_metadata(metadata: MemberMetadata, request: Heartbeat) -> MemberMetadata:
    """Return the metadata with the fields of a request; fields that are None in the request are unchanged."""
    names, regex = request.topic_names, request.topic_regex
    return metadata._replace(
        instance_id=metadata.instance_id if request.instance_id is None else request.instance_id,
        rack_id=metadata.rack_id if request.rack_id is None else request.rack_id,
        topic_names=metadata.topic_names if names is None else tuple(sorted(set(names))),
        topic_regex=metadata.topic_regex if regex is None else regex or None,
        rebalance_timeout_ms=(
            metadata.rebalance_timeout_ms
            if request.rebalance_timeout_ms < 0
            else request.rebalance_timeout_ms
        ),
        assignor=metadata.assignor if request.assignor is None else request.assignor,
    )


def _is_keep_alive(request: Heartbeat) -> bool:
    """Whether the request has no optional fields."""
    optional = request.topic_names, request.topic_regex, request.owned, request.assignor, request.rack_id
    return request.rebalance_timeout_ms < 0 and optional == (None, None, None, None, None)


def _is_full_request(request: Heartbeat) -> bool:
    """Whether the request has all fields, as a member sends it when it may have missed a response."""
    subscribes = request.topic_names is not None or request.topic_regex is not None
    return request.rebalance_timeout_ms >= 0 and subscribes and request.owned is not None


def _check_join(request: Heartbeat) -> None:
    """Check that a joining member sends all fields and owns no partitions. Raises `InvalidRequest`."""
    if request.rebalance_timeout_ms <= 0 or request.owned is None or request.owned:
        raise InvalidRequest("a member joins with a rebalance timeout and without partitions")
    if request.topic_names is None and request.topic_regex is None:
        raise InvalidRequest("a member joins with a subscription")


def _check_epoch(member: ConsumerMember, request: Heartbeat) -> None:
    """Raise `FencedMemberEpoch` unless the request has the member's epoch, or the previous one from a member that owns
    assigned partitions only, which may have missed the last response."""
    current, epoch = member.current, request.member_epoch
    if member.is_classic:
        raise FencedMemberEpoch(f"member {member.member_id} uses the classic protocol")
    if epoch == current.epoch:
        return
    has_missed = epoch == current.previous_epoch and epoch < current.epoch
    if not has_missed or request.owned is None or not request.owned <= current.assigned:
        raise FencedMemberEpoch(f"member {member.member_id} is at epoch {current.epoch}, not {epoch}")


# ---------------------------------------------------------------------- targets


def _metadata_hash(subscriptions: Subscriptions, topics: Topics) -> int:
    """Return a 64-bit hash that changes when a subscribed topic is created, deleted, recreated or gets partitions; 0
    without topics."""
    topic_ids = _all_topic_ids(subscriptions)
    if not topic_ids:
        return 0
    digest = blake2b(digest_size=8)
    for topic_id in sorted(topic_ids):
        digest.update(topic_id + topics.partitions.get(topic_id, 0).to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)


def _all_topic_ids(subscriptions: Subscriptions) -> frozenset[bytes]:
    return frozenset().union(*dict.fromkeys(subscriptions.values()))


def _validate_targets(
    group_id: str,
    assignor: str,
    subscriptions: Subscriptions,
    assignment: Mapping[str, Collection[TopicIdPartition]],
    topics: Topics,
) -> dict[str, frozenset[TopicIdPartition]]:
    """Return the target assignments of an assignor after validation, because an assignor may be third-party code.
    Raises `AssertionError` for invalid ones."""
    topic_ids = _all_topic_ids(subscriptions)
    unassigned = set(all_partitions(topic_ids, topics.partitions))
    targets = {}
    for member_id, subscription in subscriptions.items():
        target = targets[member_id] = frozenset(assignment.get(member_id, ()))
        is_valid = (
            member_id in assignment and len(target) == len(assignment[member_id]) and target <= unassigned
        )
        is_subscribed = subscription == topic_ids or all(each[0] in subscription for each in target)
        if not is_valid or not is_subscribed:
            message = (
                f"assignor {assignor} returned an invalid target for member {member_id} of group {group_id}"
            )
            raise AssertionError(message)
        unassigned -= target
    return targets
