"""One classic consumer group as a state machine: who is a member, and who reads what.

How it moves. Members *join*; when all known members have joined, or the slowest one's rebalance timeout has
passed, the group gets a new generation and everyone an answer. One member, the leader, is told about all of
them, computes the assignment and sends it with its *sync*; the others' syncs wait for it. Once the assignment
is stored the group is stable, until a member joins, leaves, or is not heard of for its session timeout.

                 first join                    all joined, or timeout
        EMPTY ───────────────► PREPARING_REBALANCE ─────────────────► COMPLETING_REBALANCE
          │  ▲                   ▲     ▲     │                          │       │
          │  └───────────────────┼─────┼─────┘ nobody left              │       │ assignment
          │ deleted              │     └────────────────────────────────┘       │ stored
          ▼                      │           join, leave, expiry                ▼
        DEAD                     └─────────────────────────────────────────── STABLE

(`group_types.TRANSITIONS` is that drawing as a table.)

Pure: methods take the time (`now_ms`, any monotonic milliseconds) and return effects; a request that is
wrong raises its typed error and has changed nothing. There are no timers in here. `next_deadline_ms` says
when `tick` is due, and a heartbeat only moves a number.

Always true:
* An assignment is answered only after `persisted` said its record is committed; a failed write
sends everybody back to join.
* A member is in at most one of: waiting for its join, waiting for its sync. Every waiter is answered once.
* Generations only grow. A request of an older generation changes nothing.

Source: Kafka's GroupCoordinator; KIP-62 (rebalance timeout), 134 (initial delay), 345 (static members), 394
(member id required), 559 (protocol checks), 814 (leader may skip the assignment).
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
from mansio.state.classic_group.members import GroupMembers, park_sync, take_sync_waiter
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
from mansio.wire.internal_records.offset_and_group_records import GroupMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.errors import MansioError

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""How long a member that has no generation yet may wait for one: nobody can tell whether its client lives."""

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = GroupState


class JoinPhase:
    """Deadline of the join phase of one group; infinity outside of a join phase.

    A rebalance ends when all known members have joined, or when the longest rebalance timeout has passed (KIP-62). The
    first rebalance of an empty group has no known members: it lasts for the initial delay, and for another delay while
    members join, but no longer than that timeout in total (KIP-134).
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
        """Whether new members are awaited: the phase does not end when all known members have joined."""
        return self._remaining_ms is not None

    def member_joined(self) -> None:
        """Record a new member: more may follow."""
        self._has_new_member = True

    def extended(self, now_ms: float) -> bool:
        """At the deadline: extend the initial delay if members joined meanwhile. Returns whether it was extended."""
        if not self._remaining_ms or not self._has_new_member:
            return False
        delay_ms = min(self._initial_delay_ms, self._remaining_ms)
        self._remaining_ms -= delay_ms
        self._has_new_member = False
        self.deadline_ms = now_ms + delay_ms
        return True

    def end(self) -> None:
        """End the phase."""
        self._remaining_ms = None
        self.deadline_ms = math.inf


class ClassicGroup:
    """The machine. Read its attributes freely; change them only through its methods."""

    __slots__ = (
        "_assignment_write",
        "_converted_generations",
        "_static_writes",
        "_tokens",
        "_unsynced",
        "generation",
        "group_id",
        "join_phase",
        "members",
        "pending",
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
        self.pending: dict[str, float] = {}  # ids given out (KIP-394) -> when they lapse
        self.join_phase = JoinPhase(initial_delay_ms)
        self.sync_deadline_ms = math.inf
        self._converted_generations: dict[
            str, int
        ] = {}  # of members that have yet to join since `restore_converted`
        self._unsynced: set[str] = set()  # members that have not asked for their assignment yet
        self._tokens = 0
        self._assignment_write: tuple[int, dict[str, bytes]] | None = None
        self._static_writes: dict[int, tuple[str, Any, JoinResponse]] = {}

    # ------------------------------------------------------------------ events: requests

    def join(self, request: Join, waiter: Any, new_member_id: str, now_ms: float) -> list[Effect]:
        """A member joins. The answer comes as an effect: at once, or with the end of the rebalance.

        `new_member_id` is used if the member has none. Raises `CoordinatorNotAvailable`,
        `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `UnknownMember`, `FencedInstanceId`.
        """
        self._check_alive()
        self._check_capacity(request)
        self._check_protocols(request)
        if not request.member_id:
            return self._join_without_id(request, waiter, new_member_id, now_ms)
        if request.member_id in self.pending and request.instance_id is None:
            return self._add(request, waiter, request.member_id, now_ms)
        member = self.members.validated(request.member_id, request.instance_id)
        told_before = self.state is COMPLETING or (
            self.state is STABLE and member.member_id != self.members.leader
        )
        if told_before and member.protocols == request.protocols:
            # The answer got lost, or a member of a stable group reconnected: tell it again, disturb nobody.
            member.extend_session(now_ms)
            return [Response(waiter, self._join_response(member))]
        self.members.update(member, request)
        return [*self.members.park_join(member, waiter), *self._rebalance(now_ms)]

    def sync(self, request: Sync, waiter: Any, now_ms: float) -> list[Effect]:
        """A member asks for its assignment; the leader brings everyone's.

        Raises `CoordinatorNotAvailable`, `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`,
        `InconsistentGroupProtocol`, `RebalanceInProgress`.
        """
        self._check_alive()
        member = self.members.validated(request.member_id, request.instance_id)
        self._check_generation(member, request.generation)
        if request.protocol_type not in (None, self.protocol_type):
            raise InconsistentGroupProtocol(f"the group does {self.protocol_type}")
        if request.protocol not in (None, self.protocol):
            raise InconsistentGroupProtocol(f"the group has agreed on {self.protocol}")
        if self.state is PREPARING:
            raise RebalanceInProgress
        self._unsynced.discard(member.member_id)
        if self.state is STABLE:
            member.extend_session(now_ms)
            return [Response(waiter, self._sync_response(member))]
        effects: list[Effect] = [*park_sync(member, waiter)]
        if member.member_id == self.members.leader and self._assignment_write is None:
            assignments = {each: request.assignments.get(each, b"") for each in self.members.by_id}
            persist = self._persist(assignments)
            self._assignment_write = (persist.token, assignments)
            effects.append(persist)
        return effects

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, now_ms: float) -> None:
        """A member is alive. Raises `RebalanceInProgress` when it has to join again, and as `sync` does."""
        self._check_alive()
        member = self.members.validated(member_id, instance_id)
        self._check_generation(member, generation)
        member.extend_session(now_ms)
        if self.state is PREPARING:
            raise RebalanceInProgress

    def leave(self, member_id: str, instance_id: str | None, now_ms: float) -> list[Effect]:
        """A member goes (a static one may be named by its instance id alone: KIP-345)."""
        self._check_alive()
        if not member_id and instance_id is not None:
            member_id = self.members.static_members.get(instance_id, "")
        elif member_id in self.pending and instance_id is None:
            del self.pending[member_id]
            return self._try_complete_join(now_ms)
        return self._remove(self.members.validated(member_id, instance_id), now_ms)

    def check_commit(self, member_id: str, instance_id: str | None, generation: int, now_ms: float) -> None:
        """Whether this sender may commit offsets now. Without a generation (-1), only to a group that has no
        members. Raises `UnknownMember`, `FencedInstanceId`, `IllegalGeneration`, `RebalanceInProgress`."""
        self._check_alive()
        if generation < 0 and self.state is EMPTY:
            return
        if generation < 0 and not member_id and instance_id is None:
            raise UnknownMember(f"group {self.group_id} has members; only they may commit")
        member = self.members.validated(member_id, instance_id)
        self._check_generation(member, generation)
        if self.state is COMPLETING:
            raise RebalanceInProgress
        member.extend_session(now_ms)

    # ------------------------------------------------------------------ events: time, storage, administration

    def next_deadline_ms(self) -> float:
        """When `tick` has something to do, unless something happens before; infinity for never."""
        return min(
            self.join_phase.deadline_ms,
            self.sync_deadline_ms,
            min(self.pending.values(), default=math.inf),
            min((each.deadline_ms for each in self.members if each.may_expire()), default=math.inf),
        )

    def tick(self, now_ms: float) -> list[Effect]:
        """Do what is due: end sessions, lapse ids that were given out, end the join and the sync phase."""
        effects: list[Effect] = []
        for member_id in [each for each, lapse_ms in self.pending.items() if lapse_ms <= now_ms]:
            del self.pending[member_id]
        for member in self.members:
            still_here = self.members.by_id.get(member.member_id) is member
            if still_here and member.deadline_ms <= now_ms and member.may_expire():
                effects += self._remove(member, now_ms)
        effects += self._try_complete_join(now_ms)
        if self.join_phase.deadline_ms <= now_ms and not self.join_phase.extended(now_ms):
            effects += self._complete_join(now_ms)
        if self.sync_deadline_ms <= now_ms:
            effects += self._end_sync_phase(now_ms)
        return effects

    def persisted(self, token: int, error: MansioError | None, now_ms: float) -> list[Effect]:
        """The record of `Persist(token)` is committed, or could not be written (`error`)."""
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
                return [Response(waiter, answer if error is None else error)]
        return []

    def delete(self) -> None:
        """Close the group for good: only an empty one. Raises `NonEmptyGroup`."""
        self._check_alive()
        if self.state is not EMPTY:
            raise NonEmptyGroup(f"group {self.group_id} has {len(self.members)} members")
        self._transition(DEAD)

    def undelete(self) -> None:
        """The deletion could not be written: the group is what it was."""
        self._transition(EMPTY)

    def restore(self, metadata: GroupMetadata, now_ms: float) -> None:
        """Begin from a stored record: members carry on with their heartbeats, their sessions begin anew."""
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
        """Come into the place of a group of another kind that has these members left: all of them are to join.

        `generations`: what each of them has for its generation, older than that of `metadata`. Until the rebalance ends
        it commits in that one, and is told by it to join, so that it loses nothing of what it has done. Only this
        object knows of them: in a group that was restored instead, a member finds out that its generation is none.
        """
        self.restore(metadata, now_ms)
        self._converted_generations = dict(generations)
        self._rebalance(now_ms)

    def generation_of(self, member: Member) -> int:
        """The generation a member is in: the group's, or the one it came with to `restore_converted`."""
        return self._converted_generations.get(member.member_id, self.generation)

    def is_idle(self) -> bool:
        """Nobody is in it, or about to be."""
        return self.state is EMPTY and not self.pending

    # ------------------------------------------------------------------ checks

    def _check_alive(self) -> None:
        if self.state is DEAD:
            raise CoordinatorNotAvailable(f"group {self.group_id} is being deleted")

    def _check_generation(self, member: Member, generation: int) -> None:
        current = self.generation_of(member)
        if generation != current:
            raise IllegalGeneration(f"group {self.group_id} is at generation {current}, not {generation}")

    def _check_capacity(self, request: Join) -> None:
        """A full group takes nobody new. In a rebalance those who have joined count, and the static members that
        may still come back; the first to join keep their places."""
        member_id = request.member_id or self.members.static_members.get(request.instance_id or "", "")
        member = self.members.by_id.get(member_id)
        if self.state is PREPARING:
            has_place = member is not None and self.members.survives_join_phase(member)
            full = not has_place and self.members.surviving_count() >= self.size_max
        else:
            full = member is None and len(self.members) >= self.size_max
        if not request.member_id and request.must_know_member_id and request.instance_id is None:
            full = full or len(self.pending) >= self.size_max
        if full:
            self.pending.pop(request.member_id, None)
            raise GroupMaxSizeReached(f"group {self.group_id} may have {self.size_max} members")

    def _check_protocols(self, request: Join) -> None:
        """A member fits if it has the group's protocol type, and all members can do one of its protocols."""
        fits = bool(request.protocol_type and request.protocols)
        if self.members.by_id:
            fits = request.protocol_type == self.protocol_type and self.members.has_common_protocol(
                request.protocols
            )
        if not fits:
            raise InconsistentGroupProtocol(f"the member's protocols do not fit those of {self.group_id}")

    # ------------------------------------------------------------------ members come and go

    def _join_without_id(self, request: Join, waiter: Any, new_member_id: str, now_ms: float) -> list[Effect]:
        previous = self.members.static_members.get(request.instance_id or "")
        if previous is not None:
            return self._replace_static(self.members.by_id[previous], request, waiter, new_member_id, now_ms)
        if request.instance_id is None and request.must_know_member_id:
            self.pending[new_member_id] = now_ms + request.session_timeout_ms
            return [Response(waiter, JoinResponse(new_member_id, must_rejoin=True))]
        return self._add(request, waiter, new_member_id, now_ms)

    def _add(self, request: Join, waiter: Any, member_id: str, now_ms: float) -> list[Effect]:
        self.pending.pop(member_id, None)
        if not self.members.by_id:
            self.protocol_type = request.protocol_type
        if self.state is PREPARING and self.generation == 0:
            self.join_phase.member_joined()
        member = _member(request, member_id, now_ms + NEW_MEMBER_JOIN_TIMEOUT_MS)
        self.members.add(member)
        return [*self.members.park_join(member, waiter), *self._rebalance(now_ms)]

    def _replace_static(
        self, old: Member, request: Join, waiter: Any, member_id: str, now_ms: float
    ) -> list[Effect]:
        """A static member came back under a new member id: it takes over the old one's place (KIP-345)."""
        leader_before = self.members.leader or ""
        fenced = FencedInstanceId(f"instance id {request.instance_id} joined again")
        effects: list[Effect] = [*self.members.remove(old, fenced)]
        self._unsynced.discard(old.member_id)
        patience_ms = NEW_MEMBER_JOIN_TIMEOUT_MS if old.is_new else request.session_timeout_ms
        member = _member(request, member_id, now_ms + patience_ms)
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
        """The group stays stable, so nobody has to compute an assignment. A client that knows KIP-814 is told
        that it leads and may skip it; an older one is told the leader's old id, so it does not think it
        leads."""
        answer = self._join_response(member)
        if member.member_id != self.members.leader:
            return answer
        if request.can_skip_assignment:
            return replace(answer, skip_assignment=True)
        return replace(answer, leader=leader_before, members=())

    def _remove(self, member: Member, now_ms: float) -> list[Effect]:
        gone = UnknownMember(f"member {member.member_id} was removed from group {self.group_id}")
        self._unsynced.discard(member.member_id)
        return [*self.members.remove(member, gone), *self._rebalance(now_ms)]

    # ------------------------------------------------------------------ the join phase

    def _rebalance(self, now_ms: float) -> list[Effect]:
        """Make sure a rebalance is under way, and end it if everybody is there."""
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
        if self.state is not PREPARING or self.join_phase.awaits_new_members or self.pending:
            return []
        return self._complete_join(now_ms) if self.members.all_joined() else []

    def _complete_join(self, now_ms: float) -> list[Effect]:
        for member in self.members:
            if member.join_waiter is None and member.instance_id is None:
                self.members.remove(member, UnknownMember())
        if self.members.by_id and not self.members.elect_joined_leader():
            # Only static members, and none of them is back yet: wait until one is, or its session ends.
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
            if (waiter := take_sync_waiter(member)) is not None:
                member.extend_session(now_ms)
                effects.append(Response(waiter, self._sync_response(member)))
        return effects

    def _end_sync_phase(self, now_ms: float) -> list[Effect]:
        """Members that never asked for their assignment within the rebalance timeout are gone."""
        self.sync_deadline_ms = math.inf
        if not self._unsynced:
            return []
        for member_id in self._unsynced:
            self.members.remove(self.members.by_id[member_id], UnknownMember())
        return self._rebalance(now_ms)

    # ------------------------------------------------------------------ answers and records

    def _join_response(self, member: Member) -> JoinResponse:
        leader = self.members.leader or ""
        listed = self.members.listed(self.protocol) if member.member_id == leader else ()
        return JoinResponse(
            member.member_id, self.generation, self.protocol_type, self.protocol, leader, listed
        )

    def _sync_response(self, member: Member) -> SyncResponse:
        return SyncResponse(member.assignment, self.protocol_type, self.protocol)

    def _persist(self, assignments: dict[str, bytes]) -> Persist:
        self._tokens += 1
        members = self.members.stored(self.protocol, assignments)
        return Persist(
            self._tokens,
            GroupMetadata(
                self.protocol_type or "", self.generation, self.protocol, self.members.leader, -1, members
            ),
        )

    def _transition(self, state: GroupState) -> None:
        if state not in TRANSITIONS[self.state]:
            message = f"group {self.group_id} cannot go from {self.state} to {state}"
            raise AssertionError(message)
        self.state = state


def _member(request: Join, member_id: str, deadline_ms: float) -> Member:
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
