"""State machine of one share group: members, their assignments, and the partitions that have share state.

It is simpler than that of a consumer group: members share partitions, so no member has to revoke a partition before
another one gets it. A member receives its target assignment with its next heartbeat, and then has the epoch of the
group.

    EMPTY ── a member joins ──► STABLE ── the last one leaves, or its session ends ──► EMPTY ── deleted ──► DEAD

The state machine does no I/O. Methods take the time (`now_ms`, milliseconds of any monotonic clock) and return records.
The caller appends the records at once, in one batch, and sends the responses when the records are committed. If that
fails, the caller drops the state machine and restores it from the log.

Invariants:
* Epochs never decrease. The epoch of a member is never above that of the group.
* Every member has a target assignment from its first heartbeat on; a heartbeat that changes nothing returns no records.
* Every assigned partition is recorded as having share state. A topic whose share state is being deleted stays recorded
  until `finish_state_deletion`, so that a restarted broker continues the deletion.

Source: KIP-932; Apache Kafka's ShareGroup and GroupMetadataManager.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    CoordinatorNotAvailable,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    InconsistentGroupProtocol,
    InvalidRequest,
    NonEmptyGroup,
    UnknownMember,
)
from mansio.state.assignors.simple import assign_simple
from mansio.state.consumer_group.types import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    NO_PARTITIONS,
    ConsumerGroupSettings,
    ConsumerGroupState,
    HeartbeatResponse,
    MemberState,
    Topics,
)
from mansio.wire.internal_records.consumer_group_records import (
    SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
    SHARE_GROUP_MEMBER_METADATA,
    SHARE_GROUP_METADATA,
    SHARE_GROUP_STATE_PARTITION_METADATA,
    SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
    SHARE_GROUP_TARGET_ASSIGNMENT_METADATA,
    CurrentAssignment,
    GroupEpoch,
    GroupRecordKey,
    ShareMember,
    ShareStatePartitions,
    ShareStateTopic,
    TargetEpoch,
    decode_share_current_assignment,
    decode_share_group_epoch,
    decode_share_member_metadata,
    decode_state_partitions,
    decode_target_assignment,
    decode_target_epoch,
    encode_group_record_key,
    encode_share_current_assignment,
    encode_share_group_epoch,
    encode_share_member_metadata,
    encode_state_partitions,
    encode_target_assignment,
    encode_target_epoch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.state.consumer_group.types import Records
    from mansio.wire.topic_partition import TopicIdPartition

_NO_STATE_PARTITIONS: Final = ShareStatePartitions((), (), ())
_JOINING: Final = CurrentAssignment(0, 0, MemberState.STABLE, NO_PARTITIONS)


class ShareHeartbeat(NamedTuple):
    """ShareGroupHeartbeat request. `topic_names`: None if the subscription is unchanged."""

    member_id: str
    member_epoch: int
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] | None = None


@dataclass(slots=True)
class ShareGroupMember:
    """Member of a share group. `metadata`, `current` (current assignment) and `target` (target assignment) are its
    records."""

    member_id: str
    metadata: ShareMember
    current: CurrentAssignment = _JOINING
    target: frozenset[TopicIdPartition] = NO_PARTITIONS
    session_deadline_ms: float = math.inf


class ShareGroup:
    """State machine of one share group. Callers may read the attributes; only methods change them (`settings` may be
    replaced)."""

    def __init__(self, group_id: str, *, settings: ConsumerGroupSettings) -> None:
        self.group_id = group_id
        self.settings = settings
        self.group_epoch = 0
        self.metadata_hash = 0
        self.assignment_epoch = 0
        self.members: dict[str, ShareGroupMember] = {}
        self.state_partitions = _NO_STATE_PARTITIONS
        self.added_partitions: list[TopicIdPartition] = []
        """Partitions that were added to topics which the group reads already. The caller takes them from this list and
        initializes their share state at offset 0, so that the group also reads their first records."""
        self._topics: Topics | None = None
        self._is_deleted = False
        self._changes: dict[bytes, bytes | None] = {}
        self._loaded: dict[GroupRecordKey, bytes] = {}

    @property
    def state(self) -> ConsumerGroupState:
        """State of the group: EMPTY, STABLE or DEAD."""
        if self._is_deleted:
            return ConsumerGroupState.DEAD
        return ConsumerGroupState.STABLE if self.members else ConsumerGroupState.EMPTY

    # ------------------------------------------------------------------ events

    def heartbeat(
        self, request: ShareHeartbeat, topics: Topics, now_ms: float
    ) -> tuple[HeartbeatResponse, Records]:
        """Handle the heartbeat of a member. Epoch 0: the member joins; -1: it leaves.

        Raises `CoordinatorNotAvailable` (the group is being deleted), `InvalidRequest`, `GroupMaxSizeReached`,
        `UnknownMember`, `FencedMemberEpoch`.
        """
        self._check_alive()
        if not request.member_id:
            raise InvalidRequest("a member of a share group chooses its id")
        if request.member_epoch < LEAVE_EPOCH:
            raise InvalidRequest(f"there is no member epoch {request.member_epoch}")
        if request.member_epoch == JOIN_EPOCH:
            return self._join(request, topics, now_ms)
        member = self.members.get(request.member_id)
        if member is None:
            raise UnknownMember(f"the group has no member {request.member_id!r}")
        if request.member_epoch == LEAVE_EPOCH:
            self._remove_members([member], topics)
            return HeartbeatResponse(member.member_id, LEAVE_EPOCH, 0, None), self._take_changes()
        current = member.current
        if request.member_epoch not in (current.epoch, current.previous_epoch):
            raise FencedMemberEpoch(f"member {member.member_id} is at epoch {current.epoch}")
        if request.topic_names is not None:
            self._update_metadata(member, request)
        self._extend_session(member, now_ms)
        self._update_target(topics)
        self._assign_target(member)
        missed = request.member_epoch != current.epoch
        has_news = missed or request.topic_names is not None or member.current.assigned != current.assigned
        return self._heartbeat_response(member, with_assignment=has_news), self._take_changes()

    def _join(
        self, request: ShareHeartbeat, topics: Topics, now_ms: float
    ) -> tuple[HeartbeatResponse, Records]:
        if request.topic_names is None:
            raise InvalidRequest("a member joins with a subscription")
        member = self.members.get(request.member_id)
        if member is None and len(self.members) >= self.settings.size_max:
            raise GroupMaxSizeReached(f"group {self.group_id} may have {self.settings.size_max} members")
        if member is None:
            member = ShareGroupMember(request.member_id, ShareMember(None, "", "", ()))
            self.members[request.member_id] = member
            self._put(
                SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
                member.member_id,
                encode_target_assignment(member.target),
            )
            self._topics = None  # a new target, also if it subscribes to nothing new
        self._update_metadata(member, request)
        self._extend_session(member, now_ms)
        self._update_target(topics)
        self._assign_target(member)
        return self._heartbeat_response(member, with_assignment=True), self._take_changes()

    def create(self) -> Records:
        """Create the group without members, by an administrator; returns its records."""
        self.group_epoch = self.assignment_epoch = 1
        self._put(SHARE_GROUP_METADATA, "", encode_share_group_epoch(GroupEpoch(self.group_epoch, 0)))
        self._put(
            SHARE_GROUP_TARGET_ASSIGNMENT_METADATA,
            "",
            encode_target_epoch(TargetEpoch(self.assignment_epoch)),
        )
        return self._take_changes()

    def handle_topic_change(self, topics: Topics, now_ms: float) -> Records:  # noqa: ARG002 - the signature of all events
        """Handle topics that were created, deleted or got more partitions."""
        if self.members and not self._is_deleted:
            self._update_target(topics)
        return self._take_changes()

    def next_deadline_ms(self) -> float:
        """Return the time at which `tick` has to be called next; infinity if there is no deadline."""
        return min((each.session_deadline_ms for each in self.members.values()), default=math.inf)

    def tick(self, topics: Topics, now_ms: float) -> Records:
        """Remove members whose session has ended."""
        overdue = [each for each in self.members.values() if each.session_deadline_ms <= now_ms]
        if overdue:
            self._remove_members(overdue, topics)
        return self._take_changes()

    def is_idle(self) -> bool:
        """Whether the group has no members."""
        return not self.members

    def delete(self) -> Records:
        """Delete the group, which must have no members; returns the records that delete all of its state. Raises
        `NonEmptyGroup`."""
        self._check_alive()
        self._check_empty()
        self._is_deleted = True
        return [(key, None) for key, _ in self.snapshot()]

    def check_commit(self, member_id: str, instance_id: str | None, epoch: int, now_ms: float) -> None:  # noqa: ARG002 - the signature of all groups
        """Raise `InconsistentGroupProtocol`, because a share group has no committed offsets."""
        raise InconsistentGroupProtocol(
            f"group {self.group_id!r} is a share group: it has no committed offsets"
        )

    def check_transactional_commit(self, member_id: str, instance_id: str | None, epoch: int) -> None:
        """Raise `InconsistentGroupProtocol`, because a share group has no committed offsets."""
        self.check_commit(member_id, instance_id, epoch, 0)

    def undelete(self) -> None:
        """Cancel the deletion of the group, because it could not be written."""
        self._is_deleted = False

    # ------------------------------------------------------------------ which partitions have state

    def start_state_deletion(self, topic_ids: Iterable[bytes]) -> Records:
        """Record that the share state of these topics is being deleted. Raises `NonEmptyGroup` if a member has one of
        them in its target assignment."""
        gone = set(topic_ids)
        if any(partition[0] in gone for member in self.members.values() for partition in member.target):
            raise NonEmptyGroup(f"group {self.group_id} has members that fetch from these topics")
        kept, known = self.state_partitions, {each.topic_id for each in self.state_partitions.deleting}
        more = [each for each in kept.initialized if each.topic_id in gone and each.topic_id not in known]
        self._set_state_partitions(
            ShareStatePartitions(
                tuple(each for each in kept.initializing if each.topic_id not in gone),
                tuple(each for each in kept.initialized if each.topic_id not in gone),
                (*kept.deleting, *(ShareStateTopic(each.topic_id, each.name) for each in more)),
            )
        )
        return self._take_changes()

    def finish_state_deletion(self, topic_ids: Iterable[bytes]) -> Records:
        """Record that the share state of these topics is deleted."""
        gone, kept = set(topic_ids), self.state_partitions
        self._set_state_partitions(
            kept._replace(deleting=tuple(each for each in kept.deleting if each.topic_id not in gone))
        )
        return self._take_changes()

    def add_initialized_partitions(self, topic_id: bytes, name: str, partitions: Iterable[int]) -> Records:
        """Record that these partitions have share state, whether or not they were ever assigned to a member."""
        self._add_initialized({topic_id: set(partitions)}, {topic_id: name})
        return self._take_changes()

    def _add_initialized(self, wanted: dict[bytes, set[int]], names: dict[bytes, str]) -> None:
        kept = self.state_partitions
        topics = {each.topic_id: each for each in kept.initialized}
        for topic_id, partitions in sorted(wanted.items()):
            known = topics.get(topic_id, ShareStateTopic(topic_id, names[topic_id]))
            topics[topic_id] = known._replace(partitions=tuple(sorted(partitions.union(known.partitions))))
        self._set_state_partitions(kept._replace(initialized=tuple(topics.values())))

    def _set_state_partitions(self, value: ShareStatePartitions) -> None:
        if value != self.state_partitions:
            self.state_partitions = value
            encoded = None if value == _NO_STATE_PARTITIONS else encode_state_partitions(value)
            self._put(SHARE_GROUP_STATE_PARTITION_METADATA, "", encoded)

    # ------------------------------------------------------------------ members and targets

    def _check_alive(self) -> None:
        if self._is_deleted:
            raise CoordinatorNotAvailable(f"group {self.group_id} is being deleted")

    def _check_empty(self) -> None:
        if self.members:
            raise NonEmptyGroup(f"group {self.group_id} has members")

    def _update_metadata(self, member: ShareGroupMember, request: ShareHeartbeat) -> None:
        names = tuple(sorted(set(request.topic_names or ())))
        rack_id = member.metadata.rack_id if request.rack_id is None else request.rack_id
        metadata = ShareMember(rack_id, request.client_id, request.client_host, names)
        if metadata != member.metadata:
            if names != member.metadata.topic_names:
                self._topics = None
            member.metadata = metadata
            self._put(SHARE_GROUP_MEMBER_METADATA, member.member_id, encode_share_member_metadata(metadata))

    def _extend_session(self, member: ShareGroupMember, now_ms: float) -> None:
        member.session_deadline_ms = now_ms + self.settings.session_timeout_ms

    def _remove_members(self, members: list[ShareGroupMember], topics: Topics) -> None:
        for member in members:
            del self.members[member.member_id]
            for kind in (
                SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
                SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
                SHARE_GROUP_MEMBER_METADATA,
            ):
                self._put(kind, member.member_id, None)
        self._topics = None
        self._update_target(topics)

    def _update_target(self, topics: Topics) -> None:
        """Compute new target assignments in a new group epoch if members, subscriptions or topics have changed."""
        if self._topics is topics:
            return
        members_unchanged, self._topics = self._topics is not None, topics
        subscriptions = {
            each.member_id: frozenset(
                topics.ids[name] for name in each.metadata.topic_names if name in topics.ids
            )
            for each in self.members.values()
        }
        metadata_hash = _metadata_hash(subscriptions, topics)
        if members_unchanged and metadata_hash == self.metadata_hash:
            return
        self.group_epoch, self.metadata_hash = self.group_epoch + 1, metadata_hash
        self._put(
            SHARE_GROUP_METADATA, "", encode_share_group_epoch(GroupEpoch(self.group_epoch, metadata_hash))
        )
        before = {each.member_id: each.target for each in self.members.values()}
        targets = assign_simple(subscriptions, topics.partitions, before)
        for member in self.members.values():
            if targets[member.member_id] != member.target:
                member.target = targets[member.member_id]
                self._put(
                    SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
                    member.member_id,
                    encode_target_assignment(member.target),
                )
        self.assignment_epoch = self.group_epoch
        self._put(
            SHARE_GROUP_TARGET_ASSIGNMENT_METADATA,
            "",
            encode_target_epoch(TargetEpoch(self.assignment_epoch)),
        )
        self._add_assigned_partitions(targets.values(), topics)

    def _add_assigned_partitions(
        self, targets: Iterable[frozenset[TopicIdPartition]], topics: Topics
    ) -> None:
        wanted: dict[bytes, set[int]] = {}
        for topic_id, index in {each for target in targets for each in target}:
            wanted.setdefault(topic_id, set()).add(index)
        for known in self.state_partitions.initialized:
            highest = max(known.partitions, default=math.inf)
            more = sorted(index for index in wanted.get(known.topic_id, ()) if index > highest)
            self.added_partitions += [(known.topic_id, index) for index in more]
        self._add_initialized(wanted, {topic_id: name for name, topic_id in topics.ids.items()})

    def _assign_target(self, member: ShareGroupMember) -> None:
        current = member.current
        if current.epoch != self.assignment_epoch or current.assigned != member.target:
            member.current = CurrentAssignment(
                self.assignment_epoch, current.epoch, MemberState.STABLE, member.target
            )
            self._put(
                SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
                member.member_id,
                encode_share_current_assignment(member.current),
            )

    def _heartbeat_response(self, member: ShareGroupMember, *, with_assignment: bool) -> HeartbeatResponse:
        return HeartbeatResponse(
            member.member_id,
            member.current.epoch,
            self.settings.heartbeat_interval_ms,
            tuple(sorted(member.current.assigned)) if with_assignment else None,
        )

    # ------------------------------------------------------------------ from and to the log

    def _put(self, kind: int, item: str, value: bytes | None) -> None:
        key = encode_group_record_key(GroupRecordKey(kind, self.group_id, item))
        self._changes.pop(key, None)
        self._changes[key] = value

    def _take_changes(self) -> Records:
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the records of the group, each key once."""

        def encoded(kind: int, value: bytes, item: str = "") -> tuple[bytes, bytes]:
            return encode_group_record_key(GroupRecordKey(kind, self.group_id, item)), value

        if self.group_epoch:
            epoch = GroupEpoch(self.group_epoch, self.metadata_hash)
            yield encoded(SHARE_GROUP_METADATA, encode_share_group_epoch(epoch))
            yield encoded(
                SHARE_GROUP_TARGET_ASSIGNMENT_METADATA,
                encode_target_epoch(TargetEpoch(self.assignment_epoch)),
            )
        if self.state_partitions != _NO_STATE_PARTITIONS:
            yield encoded(
                SHARE_GROUP_STATE_PARTITION_METADATA, encode_state_partitions(self.state_partitions)
            )
        for member in self.members.values():
            yield encoded(
                SHARE_GROUP_MEMBER_METADATA, encode_share_member_metadata(member.metadata), member.member_id
            )
            yield encoded(
                SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
                encode_target_assignment(member.target),
                member.member_id,
            )
            yield encoded(
                SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
                encode_share_current_assignment(member.current),
                member.member_id,
            )

    def apply(self, key: GroupRecordKey, value: bytes | None) -> None:
        """Apply a stored record (kinds 10 to 15). Of several records with the same key the last one counts."""
        if value is None:
            self._loaded.pop(key, None)
        else:
            self._loaded[key] = value

    def finish_restore(self, now_ms: float) -> None:
        """Create the members after all stored records were applied; their sessions start again. Raises `CorruptLog`."""
        loaded, self._loaded = self._loaded, {}
        for key, value in loaded.items():
            if key.record_type == SHARE_GROUP_METADATA:
                self.group_epoch, self.metadata_hash = decode_share_group_epoch(value)
            elif key.record_type == SHARE_GROUP_TARGET_ASSIGNMENT_METADATA:
                self.assignment_epoch = decode_target_epoch(value).epoch
            elif key.record_type == SHARE_GROUP_STATE_PARTITION_METADATA:
                self.state_partitions = decode_state_partitions(value)
            elif key.record_type == SHARE_GROUP_MEMBER_METADATA:
                self.members[key.member_or_regex] = ShareGroupMember(
                    key.member_or_regex, decode_share_member_metadata(value)
                )
        for member in self.members.values():
            if (
                target := loaded.get(
                    GroupRecordKey(SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER, self.group_id, member.member_id)
                )
            ) is not None:
                member.target = decode_target_assignment(target)
            if (
                current := loaded.get(
                    GroupRecordKey(SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT, self.group_id, member.member_id)
                )
            ) is not None:
                member.current = decode_share_current_assignment(current)
            self._extend_session(member, now_ms)


def _metadata_hash(subscriptions: dict[str, frozenset[bytes]], topics: Topics) -> int:
    """Return a 64-bit hash that changes when a subscribed topic is created, deleted, recreated or gets partitions; 0
    without topics."""
    wanted = {topic for each in subscriptions.values() for topic in each}
    if not wanted:
        return 0
    digest = blake2b(digest_size=8)
    for topic_id in sorted(wanted):
        digest.update(topic_id + topics.partitions.get(topic_id, 0).to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)
