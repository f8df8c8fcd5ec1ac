"""What a consumer group does to itself, whichever event makes it: who enters and goes, new epochs, steps to a target.

The part of `consumer_group` below its events: that module has the theory, and says which event does what of this. An
event has been checked when it gets here, so nothing in here is refused, but what `check_...` refuses.

Always true: * A new target is stored together with the group epoch it was made of.
* What is done to the group and its members goes through `stored`, so that it is a record.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mansio.errors import CoordinatorNotAvailable, GroupMaxSizeReached, UnsupportedAssignor
from mansio.state.consumer_group.member import ConsumerMember
from mansio.state.consumer_group.reconciliation import next_assignment
from mansio.state.consumer_group.stored_state import StoredGroup
from mansio.state.consumer_group.target_assignment import (
    all_subscribed,
    compute_target,
    metadata_hash,
    preferred_server_assignor,
    resolve_regexes,
    subscribed,
)
from mansio.state.consumer_group.types import (
    NO_PARTITIONS,
    RECONCILING_HEARTBEAT_INTERVAL_MS,
    HeartbeatResponse,
    MemberState,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.state.assignors import Assignor
    from mansio.state.consumer_group.records import MemberMetadata
    from mansio.state.consumer_group.types import (
        ClassicCodec,
        ConsumerGroupSettings,
        Heartbeat,
        TopicPartition,
        Topics,
    )


class ConsumerCore:
    """See the module. `topics` and `deleted` are not stored: the topics as the group saw them last, and that its
    deletion is being written."""

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
        self.codec = codec
        self.stored = StoredGroup(group_id)
        self._assignors = assignors
        self._default_assignor = default_assignor
        self.topics: Topics | None = None  # as the group saw them last
        self.deleted = False

    @property
    def members(self) -> Mapping[str, ConsumerMember]:
        return self.stored.members

    @property
    def assignor(self) -> str:
        """The name of the assignor that most members ask for; without any wish the default."""
        return preferred_server_assignor(self.stored, self._default_assignor)

    # ------------------------------------------------------------------ checks

    def check_alive(self) -> None:
        if self.deleted:
            raise CoordinatorNotAvailable(f"group {self.group_id} is being deleted")

    def check_capacity(self, existing: ConsumerMember | None) -> None:
        if existing is None and len(self.stored.members) >= self.settings.size_max:
            raise GroupMaxSizeReached(f"group {self.group_id} may have {self.settings.size_max} members")

    def check_assignor(self, request: Heartbeat) -> None:
        if request.assignor is not None and request.assignor not in self._assignors:
            known = ", ".join(self._assignors)
            raise UnsupportedAssignor(f"there is no assignor {request.assignor!r}, but {known}")

    # ------------------------------------------------------------------ steps

    def add_or_replace_member(
        self, existing: ConsumerMember | None, member_id: str, metadata: MemberMetadata, topics: Topics
    ) -> ConsumerMember:
        """A member comes: a new one, one that is known (`existing`), or one that takes over a static member's place."""
        if existing is None:
            member = ConsumerMember(member_id, metadata)
            self.stored.set_metadata(member, metadata)
            self.stored.set_target(member, NO_PARTITIONS)
            self.update_target_assignment(topics, changed=True)
        elif existing.member_id != member_id:
            member = self.stored.replace_static_member(existing, member_id, existing.metadata)
            self.update(member, metadata, topics)
        else:
            member = existing
            self.update(member, metadata, topics)
        return member

    def remove(self, members: list[ConsumerMember], topics: Topics) -> None:
        """Members go, and with them everything they held."""
        for member in members:
            self.stored.remove(member)
        self.update_target_assignment(topics, changed=True)

    def reconcile(
        self, member: ConsumerMember, owned: frozenset[TopicPartition] | None, topics: Topics, now_ms: float
    ) -> None:
        """Take the member as far towards its target as what it says allows."""
        stored, before = self.stored, member.current
        unrevoked = before.state == MemberState.UNREVOKED
        current = next_assignment(
            before,
            member.target,
            stored.assignment_epoch,
            subscribed(stored, member.metadata, topics) if unrevoked else frozenset(),
            owned,
            stored.owners.__contains__,
        )
        if current is not before:
            stored.set_current(member, current)
            if current.state != MemberState.UNREVOKED:
                member.revoke_deadline_ms = math.inf
            elif not unrevoked or not before.pending <= current.pending:
                member.revoke_deadline_ms = now_ms + member.metadata.rebalance_timeout_ms
        member.reconciled_version = stored.version

    def update(self, member: ConsumerMember, metadata: MemberMetadata, topics: Topics) -> None:
        """Store what is new about a member; whether everybody's target is affected is for the group to see."""
        before = member.metadata
        changed = False
        if metadata != before:
            assignor = self.assignor
            self.stored.set_metadata(member, metadata)
            wants = (metadata.topic_names, metadata.topic_regex, metadata.instance_id)
            changed = wants != (before.topic_names, before.topic_regex, before.instance_id)
            changed |= assignor != self.assignor
        self.update_target_assignment(topics, changed=changed)

    def update_target_assignment(self, topics: Topics, *, changed: bool = False) -> None:
        """A new group epoch and a new target, if something `changed` or the topics are not what they were."""
        stored = self.stored
        if not changed and topics is self.topics and stored.group_epoch == stored.assignment_epoch:
            return
        self.topics = topics
        resolve_regexes(stored, topics)
        subscriptions = all_subscribed(stored, topics)
        hashed = metadata_hash(subscriptions, topics)
        if changed or hashed != stored.metadata_hash:
            stored.set_epoch(stored.group_epoch + 1, hashed)
        if stored.group_epoch > stored.assignment_epoch:
            name = self.assignor
            assignor = self._assignors.get(name, self._assignors[self._default_assignor])
            compute_target(stored, assignor, subscriptions, topics)

    def answer(self, member: ConsumerMember, *, assigned: bool) -> HeartbeatResponse:
        interval_ms = self.settings.heartbeat_interval_ms
        if member.current.state != MemberState.STABLE:
            interval_ms = min(interval_ms, RECONCILING_HEARTBEAT_INTERVAL_MS)
        assignment = tuple(sorted(member.current.assigned)) if assigned else None
        return HeartbeatResponse(member.member_id, member.current.epoch, interval_ms, assignment)
