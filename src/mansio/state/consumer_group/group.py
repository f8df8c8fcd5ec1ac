"""One consumer group of the new protocol as a state machine: the broker says who reads what, heartbeat by heartbeat.

How it moves. The *group epoch* grows when a member joins, leaves, subscribes to something else, or when a topic that
somebody reads comes, goes or grows. With it an assignor computes a *target* for every member, at once; the target has
the epoch it was made of. Then each member walks to its target by itself: its next heartbeat tells it what it may keep,
the one that says it has given up the rest takes it to the target's epoch, with everything of it that is free; what
others still hold follows as they let go of it (`reconciliation` has the drawing of one member). Nobody stops who has
nothing to give up, and nobody waits but for the partitions that it is to get.

             first join (the target is made at once)             everybody has what the target says
        EMPTY ──────────────────────────────────► RECONCILING ◄──────────────────────────────────► STABLE
         │ ▲                                           │     member or subscription or topic changed   │
         │ └───────────────────────────────────────────┴─────────── nobody left ───────────────────────┘
         │ deleted
         ▼                           (ASSIGNING, a group epoch without its target, is only ever seen in what another
        DEAD                          broker has stored: the next heartbeat makes the target. `TRANSITIONS` has it all.)

Pure: methods take the time (`now_ms`, any monotonic milliseconds) and return an answer and records. There are no
timers in here: `next_deadline_ms` says when `tick` is due, and a heartbeat only moves a number.

Always true: * What decides is stored: a group built from the records so far goes on as this one would.
* A partition is held (assigned, or told to be given up and not known to be) by one member at most.
* Epochs only grow (but a static member that is away has -2). A member that comes with an older one is fenced, unless it
is the epoch before and the member has nothing that is not assigned to it: then it has missed the answer.
* A heartbeat that says nothing new, of a member that waits for nothing, returns no records.
* Who does not let go of a partition within its own rebalance timeout is removed, whatever else it says.

Members of the classic protocol can be in the group as well: `consumer_classic`.

Source: KIP-848; Apache Kafka's GroupMetadataManager. Ours: the short interval for members in a hurry, and that a
static member that is away keeps nothing beyond its target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mansio.errors import (
    InvalidRequest,
    NonEmptyGroup,
    StaleMemberEpoch,
    UnknownMember,
)
from mansio.state.consumer_group import classic_bridge
from mansio.state.consumer_group.core import ConsumerCore
from mansio.state.consumer_group.requests import (
    EMPTY_METADATA,
    check_commit_epoch,
    check_epoch,
    check_join,
    find_member_or_static,
    is_full_request,
    is_keep_alive,
    updated_metadata,
)
from mansio.state.consumer_group.types import (
    ASSIGNING,
    DEAD,
    EMPTY,
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEAVE_STATIC_EPOCH,
    NO_PARTITIONS,
    RECONCILING,
    STABLE,
    HeartbeatResponse,
    MemberState,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mansio.state.assignors import Assignor
    from mansio.state.classic_group.group import ClassicGroup
    from mansio.state.classic_group.types import Join, JoinResponse, Response, Sync, SyncResponse
    from mansio.state.consumer_group.records import GroupRecordKey
    from mansio.state.consumer_group.types import (
        ClassicCodec,
        ConsumerGroupSettings,
        ConsumerGroupState,
        Heartbeat,
        Records,
        Topics,
    )


class ConsumerGroup(ConsumerCore):
    """The machine. Read its attributes freely; change them only through its methods (`settings` may be replaced).

    Every method that returns `Records` has changed the machine already: append them at once, all in one batch, and
    answer when they are committed. If that fails, or a method raises anything but a `MansioError`, drop the machine and
    build a new one from the records that are stored: construct, `apply` each, `restored`. A `MansioError` of a method
    means that nothing has changed.
    """

    @property
    def group_epoch(self) -> int:
        return self.stored.group_epoch

    @property
    def assignment_epoch(self) -> int:
        return self.stored.assignment_epoch

    @property
    def state(self) -> ConsumerGroupState:
        if self.deleted:
            return DEAD
        if not self.stored.members:
            return EMPTY
        if self.stored.group_epoch > self.stored.assignment_epoch:
            return ASSIGNING
        epoch = self.stored.assignment_epoch
        settled = all(each.is_reconciled(epoch) for each in self.stored.members.values())
        return STABLE if settled else RECONCILING

    # ------------------------------------------------------------------ events: members

    def heartbeat(
        self, request: Heartbeat, topics: Topics, now_ms: float
    ) -> tuple[HeartbeatResponse, Records]:
        """A member joins (epoch 0), is alive, or leaves (-1; -2 for a static one that comes back).

        Raises `CoordinatorNotAvailable` (deleted), `InvalidRequest`, `UnsupportedAssignor`, `GroupMaxSizeReached`,
        `UnknownMember`, `FencedMemberEpoch`, `FencedInstanceId`, `UnreleasedInstanceId`.
        """
        self.check_alive()
        if request.member_epoch == JOIN_EPOCH:
            return self._join(request, topics, now_ms)
        if request.member_epoch < 0:
            return self._leave(request, topics, now_ms)
        member = self.stored.validated(request.member_id, request.instance_id)
        current = member.current
        nothing_to_do = member.reconciled_version == self.stored.version and self.topics is topics
        if nothing_to_do and request.member_epoch == current.epoch and is_keep_alive(request):
            member.extend_session(self.settings, now_ms)
            return self.answer(member, assigned=False), []
        check_epoch(member, request)
        self.check_assignor(request)
        member.extend_session(self.settings, now_ms)
        self.update(member, updated_metadata(member.metadata, request), topics)
        self.reconcile(member, request.owned, topics, now_ms)
        missed = request.member_epoch != current.epoch
        changed = member.current.assigned != current.assigned
        return self.answer(
            member, assigned=missed or changed or is_full_request(request)
        ), self.stored.take_changes()

    def _join(self, request: Heartbeat, topics: Topics, now_ms: float) -> tuple[HeartbeatResponse, Records]:
        """A member joins, anew if it is known: then it has nothing any more. A static one may take its place."""
        check_join(request)
        self.check_assignor(request)
        existing = find_member_or_static(self.stored, request.member_id, request.instance_id)
        self.check_capacity(existing)
        metadata = updated_metadata(EMPTY_METADATA if existing is None else existing.metadata, request)
        metadata = metadata._replace(
            client_id=request.client_id, client_host=request.client_host, classic=None
        )
        member = self.add_or_replace_member(existing, request.member_id, metadata, topics)
        if member is existing:
            self.stored.release_all(member)
        member.revoke_deadline_ms = math.inf
        member.rejoin_deadline_ms = math.inf
        member.is_awaiting_sync = False
        member.extend_session(self.settings, now_ms)
        self.reconcile(member, NO_PARTITIONS, topics, now_ms)
        return self.answer(member, assigned=True), self.stored.take_changes()

    def _leave(self, request: Heartbeat, topics: Topics, now_ms: float) -> tuple[HeartbeatResponse, Records]:
        member = self.stored.validated(request.member_id, request.instance_id)
        if request.member_epoch == LEAVE_EPOCH:
            self.remove([member], topics)
        elif request.member_epoch == LEAVE_STATIC_EPOCH and member.metadata.instance_id is not None:
            member.extend_session(self.settings, now_ms)
            member.revoke_deadline_ms = math.inf
            if not member.is_static_offline:
                away = member.current._replace(
                    epoch=LEAVE_STATIC_EPOCH,
                    previous_epoch=member.current.epoch,
                    state=MemberState.STABLE,
                    assigned=member.current.assigned & member.target,
                    pending=NO_PARTITIONS,
                )
                self.stored.set_current(member, away)
        else:
            raise InvalidRequest(f"a member without an instance id has no epoch {request.member_epoch}")
        answer = HeartbeatResponse(
            request.member_id, request.member_epoch, self.settings.heartbeat_interval_ms, None
        )
        return answer, self.stored.take_changes()

    def check_commit(self, member_id: str, instance_id: str | None, member_epoch: int, now_ms: float) -> None:
        """Whether this sender may commit offsets now. Without an epoch (-1), only to a group that has no members.
        Raises `UnknownMember`, `FencedInstanceId`, `StaleMemberEpoch` (a classic member: `IllegalGeneration`)."""
        self.check_alive()
        if member_epoch < 0 and not self.stored.members:
            return
        member = self.stored.validated(member_id, instance_id)
        check_commit_epoch(member, member_epoch)
        if member.is_classic:
            member.extend_session(self.settings, now_ms)

    def check_fetch(self, member_id: str, member_epoch: int) -> None:
        """Whether this sender may read committed offsets as a member; "" and -1 is no member, and may.
        Raises `UnknownMember`, `StaleMemberEpoch`."""
        if not member_id and member_epoch < 0:
            return
        if member_epoch != self.stored.validated(member_id, None).current.epoch:
            raise StaleMemberEpoch(f"member {member_id} is not at epoch {member_epoch}")

    # ------------------------------------------------------------------ events: classic members

    def join(
        self, request: Join, new_member_id: str, topics: Topics, now_ms: float
    ) -> tuple[JoinResponse, Records]:
        """A classic member joins; it is answered at once (after commit). `must_rejoin`: with the id it is given.
        Raises `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `FencedInstanceId`, `UnknownMember`,
        `UnreleasedInstanceId`."""
        return classic_bridge.join(self, request, new_member_id, topics, now_ms)

    def sync(self, request: Sync, topics: Topics, now_ms: float) -> SyncResponse:
        """A classic member asks for its assignment. Raises `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`,
        `InconsistentGroupProtocol`, `RebalanceInProgress`. Writes nothing; answer once what was written is committed.
        """
        return classic_bridge.sync(self, request, topics, now_ms)

    def classic_heartbeat(
        self, member_id: str, instance_id: str | None, generation: int, now_ms: float
    ) -> None:
        """A classic member is alive. Raises `RebalanceInProgress` when it has to join again, and as `sync` does."""
        classic_bridge.heartbeat(self, member_id, instance_id, generation, now_ms)

    def leave(self, member_id: str, instance_id: str | None, topics: Topics, now_ms: float) -> Records:  # noqa: ARG002 - the signature of all events
        """A classic member goes (a static one may be named by its instance id alone). Raises `UnknownMember`,
        `FencedInstanceId`."""
        self.check_alive()
        if not member_id and instance_id is not None:
            member_id = self.stored.static_members.get(instance_id, "")
        member = self.stored.validated(member_id, instance_id)
        if not member.is_classic:
            raise UnknownMember(f"member {member_id} leaves by its heartbeat")
        self.remove([member], topics)
        return self.stored.take_changes()

    # ------------------------------------------------------------------ events: topics, time, administration

    def topics_changed(self, topics: Topics, now_ms: float) -> Records:  # noqa: ARG002 - the signature of all events
        """Topics came, went or grew, or a regular expression matches others now."""
        if self.stored.members and not self.deleted:
            self.update_target_assignment(topics)
        return self.stored.take_changes()

    def next_deadline_ms(self) -> float:
        """When `tick` has something to do, unless something happens before; infinity for never."""
        return min((each.deadline_ms() for each in self.stored.members.values()), default=math.inf)

    def tick(self, topics: Topics, now_ms: float) -> Records:
        """Remove members whose session ended, or who did not give partitions up, or join again, in time."""
        if overdue := [each for each in self.stored if each.deadline_ms() <= now_ms]:
            self.remove(overdue, topics)
        return self.stored.take_changes()

    def resolved_regexes(self) -> list[str]:
        """The regular expressions that members subscribe by."""
        found = {each.metadata.topic_regex: None for each in self.stored if each.metadata.topic_regex}
        return list(found)

    def is_idle(self) -> bool:
        """Nobody is in it."""
        return not self.stored.members

    def delete(self) -> Records:
        """Close the group for good: only an empty one; the records delete all it has. Raises `NonEmptyGroup`."""
        self.check_alive()
        if self.stored.members:
            raise NonEmptyGroup(f"group {self.group_id} has {len(self.stored.members)} members")
        self.deleted = True
        return self.stored.tombstones()

    def undelete(self) -> None:
        """The deletion could not be written: the group is what it was."""
        self.deleted = False

    # ------------------------------------------------------------------ from and to the log, and the classic protocol

    def apply(self, key: GroupRecordKey, value: bytes | None) -> None:
        """Take in a stored record (kinds 3 to 8 and 16), in any order; the last of each key counts."""
        self.stored.apply(key, value)

    def restored(self, now_ms: float) -> None:
        """All stored records were applied: members carry on, their sessions and rebalance timeouts begin anew.
        Raises `CorruptLog`."""
        self.stored.restored(self.settings, now_ms)

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """The records that make up the group."""
        return self.stored.snapshot()

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
        """The group that takes over from a classic one with members, so that the caller's heartbeat can join it.

        Changes nothing in `classic`. When the heartbeat succeeded: append these records (the classic one's tombstone
        among them) with the heartbeat's behind them, perform the answers (whoever waited in the classic group joins
        again), and swap the machines. Raises `InconsistentGroupProtocol` if a member's metadata cannot be read.
        """
        group = cls(
            classic.group_id,
            assignors=assignors,
            default_assignor=default_assignor,
            settings=settings,
            codec=codec,
        )
        return group, *classic_bridge.convert_from_classic(group, classic, topics, now_ms)

    def to_classic(
        self, *, initial_delay_ms: float, size_max: int, topics: Topics, now_ms: float, wall_ms: int
    ) -> tuple[ClassicGroup, Records] | None:
        """When only classic members are left: the classic group that takes over, about to rebalance, and the records
        (to be appended behind those of the call that led here). None otherwise. Ask after each `heartbeat`, `leave`
        and `tick` that returned records."""
        return classic_bridge.convert_to_classic_group(
            self,
            topics,
            now_ms,
            wall_ms=wall_ms,
            initial_delay_ms=initial_delay_ms,
            size_max=size_max,
        )
