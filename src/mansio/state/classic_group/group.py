"""State machine of one classic consumer group: membership and generations; the leader assigns the partitions.

Members *join*. When all known members have joined, or the longest rebalance timeout has passed, the group gets a new
generation and all members receive the response to their join. One member, the leader, receives the list of members,
computes the assignment and sends it with its *sync*; the syncs of the other members are parked until then. Once the
assignment is stored, the group is stable until a member joins, leaves, or sends no heartbeat for its session timeout.

                 first join                    all joined, or timeout
        EMPTY ───────────────► PREPARING_REBALANCE ─────────────────► COMPLETING_REBALANCE
          │  ▲                   ▲     ▲     │                          │       │
          │  └───────────────────┼─────┼─────┘ no member left              │       │ assignment
          │ deleted              │     └────────────────────────────────┘       │ stored
          ▼                      │           join, leave, expiry                ▼
        DEAD                     └─────────────────────────────────────────── STABLE

(`types.TRANSITIONS` holds these transitions as a table.)

The state machine does no I/O: methods take the time (`now_ms`, milliseconds of any monotonic clock) and return effects.
An invalid request raises its typed error and changes nothing. There are no timers: `next_deadline_ms` returns when
`tick` has to be called, and a heartbeat only changes a deadline.

Invariants:
* An assignment is sent only after `handle_persisted` was called because its record is committed; after a failed write
  all members rejoin.
* A member has at most one parked request, a join or a sync. Every waiter is returned in one response.
* Generations only increase. A request of an older generation changes nothing.

Source: Kafka's GroupCoordinator; KIP-62 (rebalance timeout), 134 (initial delay), 345 (static members), 394 (member id
required), 559 (protocol checks), 814 (leader may skip the assignment).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import (
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    NonEmptyGroup,
    RebalanceInProgress,
    UnknownMember,
)
from mansio.state.classic_group.members import GroupMembers
from mansio.state.classic_group.types import (
    TRANSITIONS,
    Effect,
    GroupState,
    Join,
    JoinResponse,
    Member,
    Persist,
    Protocol,
    Response,
    Sync,
    SyncResponse,
)
from mansio.tracebacks import without_traceback
from mansio.wire.internal_records.offset_and_group_records import GroupMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.errors import MansioError

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""Time after which a new member without a generation expires. Its client may have failed, which cannot be detected."""

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = GroupState


class JoinPhase:
    """Deadline of the join phase of one group; infinity outside of a join phase.

    A rebalance ends when all known members have joined, or when the longest rebalance timeout has passed (KIP-62). The
    first rebalance of an empty group has no known members: it lasts for the initial delay, and is extended by another
    delay while members join, up to that timeout in total (KIP-134).
    """

    __slots__ = ("_has_new_member", "_initial_delay_ms", "_remaining_ms", "deadline_ms")

    def __init__(self, initial_delay_ms: float) -> None:
        self.deadline_ms = math.inf
        self._initial_delay_ms = initial_delay_ms
        self._remaining_ms: float | None = None  # in the initial delay: how much it may still be extended
        self._has_new_member = False

    def begin(self, now_ms: float, timeout_ms: int) -> None:
        """Start a join phase with known members."""
        self._remaining_ms = None
        self.deadline_ms = now_ms + timeout_ms

    def begin_from_empty(self, now_ms: float, timeout_ms: int) -> None:
        """Start the join phase of a group that was empty."""
        self._remaining_ms = max(timeout_ms - self._initial_delay_ms, 0)
        self._has_new_member = False
        self.deadline_ms = now_ms + int(self._initial_delay_ms)

    @property
    def awaits_new_members(self) -> bool:
        """Whether the phase lasts for the initial delay, and so does not end when all known members have joined."""
        return self._remaining_ms is not None

    def record_new_member(self) -> None:
        """Record that a new member has joined, so that the initial delay is extended."""
        self._has_new_member = True

    def try_extend(self, now_ms: float) -> bool:
        """At the deadline, extend the initial delay if members have joined since the last extension. Returns whether it
        was extended."""
        if not self._remaining_ms or not self._has_new_member:
            return False
        delay_ms = min(self._initial_delay_ms, self._remaining_ms)
        self._remaining_ms -= delay_ms
        self._has_new_member = False
        self.deadline_ms = now_ms + delay_ms
        return True

    def end(self) -> None:
        """End the join phase."""
        self._remaining_ms = None
        self.deadline_ms = math.inf


class ClassicGroup:
    """State machine of one classic group. Callers may read the attributes; only methods change them."""

    __slots__ = (
        "_assignment_write",
        "_converted_generations",
        "_last_token",
        "_static_writes",
        "_unsynced",
        "generation",
        "group_id",
        "join_phase",
        "members",
        "pending_joins",
        "protocol",
        "protocol_type",
        "size_max",
        "state",
        "sync_deadline_ms",
    )

    def __init__(self, group_id: str, *, initial_delay_ms: float, size_max: int) -> None:
        self.group_id = group_id
        self.size_max = size_max
        self.state: GroupState = EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members = GroupMembers()
        self.pending_joins: dict[str, float] = {}  # generated member ids (KIP-394) -> expiry time
        self.join_phase = JoinPhase(initial_delay_ms)
        self.sync_deadline_ms = math.inf
        self._converted_generations: dict[
            str, int
        ] = {}  # of members that have yet to join since `restore_converted`
        self._unsynced: set[str] = set()  # members that have not sent a sync yet
        self._last_token = 0
        self._assignment_write: tuple[int, dict[str, bytes]] | None = None
        self._static_writes: dict[int, tuple[str, Any, JoinResponse]] = {}

    # ------------------------------------------------------------------ events: requests

    def join(self, request: Join, waiter: Any, new_member_id: str, now_ms: float) -> list[Effect]:
        """Handle a JoinGroup. The response is an effect of this call, or of a later one at the end of the rebalance.
        `waiter` identifies the request in that effect; `new_member_id` is used if the request has no member id.

        Raises `CoordinatorNotAvailable`, `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `UnknownMember`,
        `FencedInstanceId`.
        """
        self._check_alive()
        self._check_capacity(request)
        self._check_protocols(request)
        if not request.member_id:
            return self._join_without_id(request, waiter, new_member_id, now_ms)
        if request.member_id in self.pending_joins and request.instance_id is None:
            return self._add_member(request, waiter, request.member_id, now_ms)
        member = self.members.find_valid(request.member_id, request.instance_id)
        was_answered = self.state is COMPLETING or (
            self.state is STABLE and member.member_id != self.members.leader
        )
        if was_answered and member.protocols == request.protocols:
            # The response was lost, or a member of a stable group reconnected: repeat it, without a rebalance.
            member.extend_session(now_ms)
            return [Response(waiter, self._join_response(member))]
        self.members.update(member, request)
        return [*self.members.park_join(member, waiter), *self._rebalance(now_ms)]

    def sync(self, request: Sync, waiter: Any, now_ms: float) -> list[Effect]:
        """Handle a SyncGroup, which requests the member's assignment; the leader's request contains the assignments of
        all members.

        Raises `CoordinatorNotAvailable`, `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`,
        `InconsistentGroupProtocol`, `RebalanceInProgress`.
        """
        self._check_alive()
        member = self.members.find_valid(request.member_id, request.instance_id)
        self._check_generation(member, request.generation)
        if request.protocol_type not in (None, self.protocol_type):
            raise InconsistentGroupProtocol(f"the protocol type of the group is {self.protocol_type}")
        if request.protocol not in (None, self.protocol):
            raise InconsistentGroupProtocol(f"the protocol of the group is {self.protocol}")
        if self.state is PREPARING:
            raise RebalanceInProgress
        self._unsynced.discard(member.member_id)
        if self.state is STABLE:
            member.extend_session(now_ms)
            return [Response(waiter, self._sync_response(member))]
        effects: list[Effect] = [*member.park_sync(waiter)]
        if member.member_id == self.members.leader and self._assignment_write is None:
            assignments = {each: request.assignments.get(each, b"") for each in self.members.by_id}
            persist = self._persist(assignments)
            self._assignment_write = (persist.token, assignments)
            effects.append(persist)
        return effects

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, now_ms: float) -> None:
        """Handle a Heartbeat. Raises `RebalanceInProgress` if the member has to rejoin, and `CoordinatorNotAvailable`,
        `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`."""
        self._check_alive()
        member = self.members.find_valid(member_id, instance_id)
        self._check_generation(member, generation)
        member.extend_session(now_ms)
        if self.state is PREPARING:
            raise RebalanceInProgress

    def leave(self, member_id: str, instance_id: str | None, now_ms: float) -> list[Effect]:
        """Remove a member; a static one may be identified by its instance id alone (KIP-345). Raises `UnknownMember`,
        `FencedInstanceId`."""
        self._check_alive()
        if not member_id and instance_id is not None:
            member_id = self.members.static_members.get(instance_id, "")
        elif member_id in self.pending_joins and instance_id is None:
            del self.pending_joins[member_id]
            return self._try_complete_join(now_ms)
        return self._remove_member(self.members.find_valid(member_id, instance_id), now_ms)

    def check_commit(self, member_id: str, instance_id: str | None, generation: int, now_ms: float) -> None:
        """Check that a client may commit offsets now. Without a generation (-1), commits are accepted only while the
        group has no members. Raises `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`, `RebalanceInProgress`."""
        self._check_alive()
        if generation < 0 and self.state is EMPTY:
            return
        if generation < 0 and not member_id and instance_id is None:
            raise UnknownMember(f"group {self.group_id} has members, and only they may commit")
        member = self.members.find_valid(member_id, instance_id)
        self._check_generation(member, generation)
        if self.state is COMPLETING:
            raise RebalanceInProgress
        member.extend_session(now_ms)

    def check_transactional_commit(self, member_id: str, instance_id: str | None, generation: int) -> None:
        """Check that a producer may commit offsets in a transaction for a member of this group (KIP-447). A producer
        that names neither member nor generation is not checked, because old clients do not send them. Raises
        `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`."""
        self._check_alive()
        if generation < 0 and (self.state is EMPTY or (not member_id and instance_id is None)):
            return
        self._check_generation(self.members.find_valid(member_id, instance_id), generation)

    # ------------------------------------------------------------------ events: time, storage, administration

    def next_deadline_ms(self) -> float:
        """Return the time at which `tick` has to be called next; infinity if there is no deadline."""
        return min(
            self.join_phase.deadline_ms,
            self.sync_deadline_ms,
            min(self.pending_joins.values(), default=math.inf),
            min((each.deadline_ms for each in self.members if each.may_expire()), default=math.inf),
        )

    def tick(self, now_ms: float) -> list[Effect]:
        """Handle due deadlines: end sessions, expire generated member ids, end the join phase and the sync phase."""
        effects: list[Effect] = []
        for member_id in [each for each, expiry_ms in self.pending_joins.items() if expiry_ms <= now_ms]:
            del self.pending_joins[member_id]
        for member in self.members:
            is_member = self.members.by_id.get(member.member_id) is member
            if is_member and member.deadline_ms <= now_ms and member.may_expire():
                effects += self._remove_member(member, now_ms)
        effects += self._try_complete_join(now_ms)
        if self.join_phase.deadline_ms <= now_ms and not self.join_phase.try_extend(now_ms):
            effects += self._complete_join(now_ms)
        if self.sync_deadline_ms <= now_ms:
            effects += self._end_sync_phase(now_ms)
        return effects

    def handle_persisted(self, token: int, error: MansioError | None, now_ms: float) -> list[Effect]:
        """Handle the outcome of the `Persist` effect with this token: the record is committed, or could not be written
        (`error`)."""
        if self._assignment_write is not None and self._assignment_write[0] == token:
            assignments = self._assignment_write[1]
            self._assignment_write = None
            if error is not None:
                return [*self.members.fail_syncs(error, now_ms), *self._rebalance(now_ms)]
            return self._become_stable(assignments, now_ms)
        if token in self._static_writes:
            member_id, waiter, answer = self._static_writes.pop(token)
            member = self.members.by_id.get(member_id)
            if member is not None and member.join_waiter is waiter and self.state is STABLE:
                self.members.take_join_waiter(member)
                member.extend_session(now_ms)
                return [Response(waiter, answer if error is None else without_traceback(error))]
        return []

    def delete(self) -> None:
        """Delete the group, which must have no members. Raises `NonEmptyGroup`."""
        self._check_alive()
        if self.state is not EMPTY:
            raise NonEmptyGroup(f"group {self.group_id} has {len(self.members)} members")
        self._transition(DEAD)

    def undelete(self) -> None:
        """Cancel the deletion of the group, because it could not be written."""
        self._transition(EMPTY)

    def restore(self, metadata: GroupMetadata, now_ms: float) -> None:
        """Restore the group from its record. The sessions of its members start again."""
        self.generation = metadata.generation
        self.protocol_type = metadata.protocol_type or None
        self.protocol = metadata.protocol
        for stored in metadata.members:
            member = Member(
                stored.member_id,
                stored.instance_id,
                stored.client_id,
                stored.client_host,
                stored.session_timeout_ms,
                stored.rebalance_timeout_ms,
                (Protocol(metadata.protocol or "", stored.subscription),),
                now_ms + stored.session_timeout_ms,
                stored.assignment,
                is_new=False,
            )
            self.members.add(member)
        if metadata.leader in self.members.by_id:
            self.members.leader = metadata.leader
        if self.members.by_id:
            self.state = STABLE

    def restore_converted(
        self, metadata: GroupMetadata, generations: Mapping[str, int], now_ms: float
    ) -> None:
        """Restore the group that replaces a consumer group with these remaining members, all of which have to rejoin.

        `generations`: generation of each member, older than that of `metadata`. Until the rebalance ends, a member may
        commit in its own generation, so that its progress is not lost, and its heartbeats return REBALANCE_IN_PROGRESS.
        The generations are kept in memory only: after a change of the coordinator, such a member receives
        ILLEGAL_GENERATION.
        """
        self.restore(metadata, now_ms)
        self._converted_generations = dict(generations)
        self._rebalance(now_ms)

    def generation_of(self, member: Member) -> int:
        """Return the generation of a member: that of the group, or until the member rejoins the one from
        `restore_converted`."""
        return self._converted_generations.get(member.member_id, self.generation)

    def is_idle(self) -> bool:
        """Whether the group has no members and no generated member id with which a client may still join."""
        return self.state is EMPTY and not self.pending_joins

    # ------------------------------------------------------------------ checks

    def _check_alive(self) -> None:
        if self.state is DEAD:
            raise CoordinatorNotAvailable(f"group {self.group_id} is being deleted")

    def _check_generation(self, member: Member, generation: int) -> None:
        current = self.generation_of(member)
        if generation != current:
            raise IllegalGeneration(f"group {self.group_id} is at generation {current}, not {generation}")

    def _check_capacity(self, request: Join) -> None:
        """Raise `GroupMaxSizeReached` if the group is full and the request adds a member. During a rebalance the
        members that have joined count, and the static members that may still return; those that joined first stay."""
        member_id = request.member_id or self.members.static_members.get(request.instance_id or "", "")
        member = self.members.by_id.get(member_id)
        if self.state is PREPARING:
            survives = member is not None and self.members.survives_join_phase(member)
            full = not survives and self.members.surviving_count() >= self.size_max
        else:
            full = member is None and len(self.members) >= self.size_max
        if not request.member_id and request.requires_member_id and request.instance_id is None:
            full = full or len(self.pending_joins) >= self.size_max
        if full:
            self.pending_joins.pop(request.member_id, None)
            raise GroupMaxSizeReached(f"group {self.group_id} has the maximum of {self.size_max} members")

    def _check_protocols(self, request: Join) -> None:
        """Raise `InconsistentGroupProtocol` unless the member has the protocol type of the group, and all members
        support one of its protocols."""
        is_compatible = bool(request.protocol_type and request.protocols)
        if self.members.by_id:
            is_compatible = request.protocol_type == self.protocol_type and self.members.has_common_protocol(
                request.protocols
            )
        if not is_compatible:
            raise InconsistentGroupProtocol(f"no protocol is common to all members of {self.group_id}")

    # ------------------------------------------------------------------ members join and leave

    def _join_without_id(self, request: Join, waiter: Any, new_member_id: str, now_ms: float) -> list[Effect]:
        previous = self.members.static_members.get(request.instance_id or "")
        if previous is not None:
            return self._replace_static(self.members.by_id[previous], request, waiter, new_member_id, now_ms)
        if request.instance_id is None and request.requires_member_id:
            self.pending_joins[new_member_id] = now_ms + request.session_timeout_ms
            return [Response(waiter, JoinResponse(new_member_id, must_rejoin=True))]
        return self._add_member(request, waiter, new_member_id, now_ms)

    def _add_member(self, request: Join, waiter: Any, member_id: str, now_ms: float) -> list[Effect]:
        self.pending_joins.pop(member_id, None)
        if not self.members.by_id:
            self.protocol_type = request.protocol_type
        if self.state is PREPARING and self.generation == 0:
            self.join_phase.record_new_member()
        member = _new_member(request, member_id, now_ms + NEW_MEMBER_JOIN_TIMEOUT_MS)
        self.members.add(member)
        return [*self.members.park_join(member, waiter), *self._rebalance(now_ms)]

    def _replace_static(
        self, old: Member, request: Join, waiter: Any, member_id: str, now_ms: float
    ) -> list[Effect]:
        """Replace a static member by one with the same instance id and a new member id (KIP-345)."""
        leader_before = self.members.leader or ""
        fenced = FencedInstanceId(f"instance id {request.instance_id} joined again")
        effects: list[Effect] = [*self.members.remove(old, fenced)]
        self._unsynced.discard(old.member_id)
        timeout_ms = NEW_MEMBER_JOIN_TIMEOUT_MS if old.is_new else request.session_timeout_ms
        member = _new_member(request, member_id, now_ms + timeout_ms)
        member.assignment = old.assignment
        member.is_new = old.is_new
        self.members.add(member)
        if leader_before == old.member_id:
            self.members.leader = member_id
        effects += self.members.park_join(member, waiter)
        if self.state is not STABLE or self.members.select_protocol() != self.protocol:
            return effects + self._rebalance(now_ms)
        persist = self._persist({each.member_id: each.assignment for each in self.members})
        answer = self._unchanged_response(member, request, leader_before)
        self._static_writes[persist.token] = (member_id, waiter, answer)
        return [*effects, persist]

    def _unchanged_response(self, member: Member, request: Join, leader_before: str) -> JoinResponse:
        """Return the response to a static member that was replaced in a stable group, whose assignment is not computed
        again. A leader's client with KIP-814 learns that it is the leader and skips the assignment; an older client
        receives the old id of the leader, so that it does not act as the leader."""
        answer = self._join_response(member)
        if member.member_id != self.members.leader:
            return answer
        if request.can_skip_assignment:
            return replace(answer, skip_assignment=True)
        return replace(answer, leader=leader_before, members=())

    def _remove_member(self, member: Member, now_ms: float) -> list[Effect]:
        removed = UnknownMember(f"member {member.member_id} was removed from group {self.group_id}")
        self._unsynced.discard(member.member_id)
        return [*self.members.remove(member, removed), *self._rebalance(now_ms)]

    # ------------------------------------------------------------------ the join phase

    def _rebalance(self, now_ms: float) -> list[Effect]:
        """Start a rebalance if none is in progress, and end it if all members have joined."""
        effects: list[Effect] = []
        if self.state is not PREPARING:
            effects += self.members.fail_syncs(RebalanceInProgress(), now_ms)
            self._assignment_write = None
            self._unsynced.clear()
            self.sync_deadline_ms = math.inf
            begin = self.join_phase.begin_from_empty if self.state is EMPTY else self.join_phase.begin
            begin(now_ms, self.members.rebalance_timeout_ms())
            self._transition(PREPARING)
        return effects + self._try_complete_join(now_ms)

    def _try_complete_join(self, now_ms: float) -> list[Effect]:
        if self.state is not PREPARING or self.join_phase.awaits_new_members or self.pending_joins:
            return []
        return self._complete_join(now_ms) if self.members.all_joined() else []

    def _complete_join(self, now_ms: float) -> list[Effect]:
        for member in self.members:
            if member.join_waiter is None and member.instance_id is None:
                self.members.remove(member, UnknownMember())
        if self.members.by_id and not self.members.elect_joined_leader():
            # Only static members, none of which has returned: wait until one does, or its session ends.
            self.join_phase.begin(now_ms, self.members.rebalance_timeout_ms())
            return []
        self.generation += 1
        self._converted_generations.clear()
        self.join_phase.end()
        if not self.members.by_id:
            self.protocol = None
            self._transition(EMPTY)
            return [self._persist({})]
        self.protocol = self.members.select_protocol()
        self._transition(COMPLETING)
        self.sync_deadline_ms = now_ms + self.members.rebalance_timeout_ms()
        self._unsynced = set(self.members.by_id)
        effects: list[Effect] = []
        for member in self.members:
            member.extend_session(now_ms)
            member.is_new = False
            if (waiter := self.members.take_join_waiter(member)) is not None:
                effects.append(Response(waiter, self._join_response(member)))
        return effects

    # ------------------------------------------------------------------ the sync phase

    def _become_stable(self, assignments: dict[str, bytes], now_ms: float) -> list[Effect]:
        self._transition(STABLE)
        effects: list[Effect] = []
        for member in self.members:
            member.assignment = assignments.get(member.member_id, b"")
            if (waiter := member.take_sync_waiter()) is not None:
                member.extend_session(now_ms)
                effects.append(Response(waiter, self._sync_response(member)))
        return effects

    def _end_sync_phase(self, now_ms: float) -> list[Effect]:
        """Remove members that did not sync within the rebalance timeout, and start a rebalance if there are any."""
        self.sync_deadline_ms = math.inf
        if not self._unsynced:
            return []
        for member_id in self._unsynced:
            self.members.remove(self.members.by_id[member_id], UnknownMember())
        return self._rebalance(now_ms)

    # ------------------------------------------------------------------ responses and records

    def _join_response(self, member: Member) -> JoinResponse:
        leader = self.members.leader or ""
        listed = self.members.members_for_leader(self.protocol) if member.member_id == leader else ()
        return JoinResponse(
            member.member_id, self.generation, self.protocol_type, self.protocol, leader, listed
        )

    def _sync_response(self, member: Member) -> SyncResponse:
        return SyncResponse(member.assignment, self.protocol_type, self.protocol)

    def _persist(self, assignments: dict[str, bytes]) -> Persist:
        self._last_token += 1
        members = self.members.to_records(self.protocol, assignments)
        return Persist(
            self._last_token,
            GroupMetadata(
                self.protocol_type or "", self.generation, self.protocol, self.members.leader, -1, members
            ),
        )

    def _transition(self, state: GroupState) -> None:
        if state not in TRANSITIONS[self.state]:
            message = f"group {self.group_id}: no transition from {self.state} to {state}"
            raise AssertionError(message)
        self.state = state


def _new_member(request: Join, member_id: str, deadline_ms: float) -> Member:
    return Member(
        member_id,
        request.instance_id,
        request.client_id,
        request.client_host,
        request.session_timeout_ms,
        request.rebalance_timeout_ms,
        request.protocols,
        deadline_ms,
    )
