"""Stored state of a consumer group: epochs, members, target assignments and resolved regular expressions.

Each change is also kept as a record until `take_changes` returns it.

Invariants:
* `snapshot` equals the result of applying all records: nothing else influences a target or current assignment.
* `owners` maps a partition to the only member that has it assigned or pending revocation.
* The instance id of a static member maps to its current member id only.
* `version` increases with every change.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, FencedInstanceId, UnknownMember, UnreleasedInstanceId
from mansio.state.consumer_group.types import LEAVE_STATIC_EPOCH, NO_PARTITIONS, MemberState
from mansio.wire.internal_records.consumer_group_records import (
    CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
    CONSUMER_GROUP_MEMBER_METADATA,
    CONSUMER_GROUP_METADATA,
    CONSUMER_GROUP_PARTITION_METADATA,
    CONSUMER_GROUP_REGULAR_EXPRESSION,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA,
    CurrentAssignment,
    GroupEpoch,
    GroupRecordKey,
    MemberMetadata,
    ResolvedRegex,
    TargetEpoch,
    decode_current_assignment,
    decode_group_epoch,
    decode_member_metadata,
    decode_resolved_regex,
    decode_target_assignment,
    decode_target_epoch,
    encode_current_assignment,
    encode_group_epoch,
    encode_group_record_key,
    encode_member_metadata,
    encode_resolved_regex,
    encode_target_assignment,
    encode_target_epoch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.state.consumer_group.types import ConsumerGroupSettings, Records, Topics
    from mansio.wire.topic_partition import TopicIdPartition

JOINING = CurrentAssignment(0, 0, MemberState.STABLE, NO_PARTITIONS)
"""Current assignment of a member that has not received an assignment yet."""


@dataclass(slots=True)
class ConsumerMember:
    """One member of a consumer group. Its records change through methods of `StoredGroup` only.

    `metadata`, `current` (current assignment) and `target` (target assignment) are its three records in the log. The
    other attributes are kept in memory only and are initialized by a load. `session_deadline_ms`: end of its session
    unless a heartbeat arrives before. `revoke_deadline_ms`: time by which the member has to revoke the pending
    partitions. `rejoin_deadline_ms`: time by which a classic member has to join again or, after its join
    (`is_awaiting_sync`), to sync. `reconciled_version`: version of the group at which the member needed no further
    change.
    """

    member_id: str
    metadata: MemberMetadata
    current: CurrentAssignment = JOINING
    target: frozenset[TopicIdPartition] = NO_PARTITIONS
    session_deadline_ms: float = math.inf
    revoke_deadline_ms: float = math.inf
    rejoin_deadline_ms: float = math.inf
    is_awaiting_sync: bool = False
    reconciled_version: int = -1

    @property
    def is_classic(self) -> bool:
        """Whether the member uses the classic protocol."""
        return self.metadata.classic is not None

    @property
    def is_static_offline(self) -> bool:
        """Whether the member is static, has left and may return; its client reads no partition."""
        return self.current.epoch == LEAVE_STATIC_EPOCH

    def extend_session(self, settings: ConsumerGroupSettings, now_ms: float) -> None:
        """Restart the session timeout of the member."""
        classic = self.metadata.classic
        timeout_ms = settings.session_timeout_ms if classic is None else classic.session_timeout_ms
        self.session_deadline_ms = now_ms + timeout_ms

    def deadline_ms(self) -> float:
        """Return the time at which the member is removed if it does nothing before."""
        return min(self.session_deadline_ms, self.revoke_deadline_ms, self.rejoin_deadline_ms)

    def owned_or_revoking(self) -> frozenset[TopicIdPartition]:
        """Return the partitions that cannot be assigned to other members, because this member may read them or has not
        confirmed their revocation."""
        return self.current.assigned | self.current.pending

    def is_reconciled(self, assignment_epoch: int) -> bool:
        """Whether the member has exactly its target assignment. A classic member whose partitions do not change need
        not have joined in the current epoch."""
        current = self.current
        if current.assigned != self.target or current.pending:
            return False
        if self.is_classic:
            return current.state != MemberState.UNREVOKED
        return current.state == MemberState.STABLE and (
            self.is_static_offline or current.epoch == assignment_epoch
        )


class StoredGroup:
    """State of one group that is derived from its records. `members`: by member id, in the order in which they
    joined."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = 0
        self.metadata_hash = 0
        self.assignment_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.static_members: dict[str, str] = {}  # instance id -> member id
        self.resolved_regexes: dict[str, ResolvedRegex] = {}
        self.owners: dict[TopicIdPartition, str] = {}
        self.version = 0
        self._has_old_metadata = False  # there is a record of kind 4, written by an older broker
        self._changes: dict[bytes, bytes | None] = {}
        self._loaded: dict[GroupRecordKey, bytes] = {}

    def __iter__(self) -> Iterator[ConsumerMember]:
        """Iterate over a copy of the members, so that callers can add and remove members meanwhile."""
        return iter(list(self.members.values()))

    # ------------------------------------------------------------------ look-ups

    def find_valid(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """Return the member that sent a request. Raises `UnknownMember`, or `FencedInstanceId` if another member has
        taken over its instance id."""
        if instance_id is not None:
            current = self.static_members.get(instance_id)
            if current is None:
                raise UnknownMember(f"the group has no member with instance id {instance_id}")
            if current != member_id:
                raise FencedInstanceId(f"instance id {instance_id} belongs to another member now")
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"the group has no member {member_id!r}")
        return member

    def find_member_or_static(self, member_id: str, instance_id: str | None) -> ConsumerMember | None:
        """Return the member that joins again, or the static member with this instance id that the joining member
        replaces; None for a new member.

        Raises `UnreleasedInstanceId`, `FencedInstanceId`.
        """
        known = self.members.get(member_id)
        static_id = self.static_members.get(instance_id or "")
        if instance_id is None or static_id is None or static_id == member_id:
            return known
        if known is not None:
            raise FencedInstanceId(f"instance id {instance_id} belongs to another member")
        static = self.members[static_id]
        if not static.is_static_offline and not static.is_classic:
            raise UnreleasedInstanceId(f"instance id {instance_id} is still used by another member")
        return static

    def all_unowned(self, partitions: Iterable[TopicIdPartition]) -> bool:
        """Whether no member has any of these partitions assigned or pending revocation."""
        return not any(each in self.owners for each in partitions)

    def preferred_assignor(self, default: str) -> str:
        """Return the assignor that most members request, in a tie the first by name; `default` if no member requests
        one."""
        votes = Counter(each.metadata.assignor for each in self.members.values() if each.metadata.assignor)
        return min(votes, key=lambda name: (-votes[name], name), default=default)

    def subscribed_topic_ids(self, metadata: MemberMetadata, topics: Topics) -> frozenset[bytes]:
        """Return the ids of the existing topics to which a member with this metadata subscribes."""
        names = metadata.topic_names
        if metadata.topic_regex and (regex := self.resolved_regexes.get(metadata.topic_regex)) is not None:
            names += regex.topics
        return frozenset(topics.ids[name] for name in names if name in topics.ids)

    def all_subscribed_topic_ids(self, topics: Topics) -> dict[str, frozenset[bytes]]:
        """Return the subscribed topic ids of all members, by member id; members with equal subscriptions share
        one set."""
        known: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
        found = {}
        for member in self.members.values():
            subscription = (member.metadata.topic_names, member.metadata.topic_regex)
            if subscription not in known:
                known[subscription] = self.subscribed_topic_ids(member.metadata, topics)
            found[member.member_id] = known[subscription]
        return found

    # ------------------------------------------------------------------ changes

    def take_changes(self) -> Records:
        """Return the records of all changes since the last call, only the latest of each key."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def set_epoch(self, group_epoch: int, metadata_hash: int) -> None:
        self.group_epoch, self.metadata_hash = group_epoch, metadata_hash
        self._put(CONSUMER_GROUP_METADATA, "", encode_group_epoch(GroupEpoch(group_epoch, metadata_hash)))

    def set_assignment_epoch(self, epoch: int) -> None:
        self.assignment_epoch = epoch
        self._put(CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA, "", encode_target_epoch(TargetEpoch(epoch)))

    def set_metadata(self, member: ConsumerMember, metadata: MemberMetadata) -> None:
        """Set the metadata of a member; adds a new member."""
        if (instance_id := member.metadata.instance_id) is not None:
            self.static_members.pop(instance_id, None)
        member.metadata = metadata
        self.members[member.member_id] = member
        if metadata.instance_id is not None:
            self.static_members[metadata.instance_id] = member.member_id
        self._put(CONSUMER_GROUP_MEMBER_METADATA, member.member_id, encode_member_metadata(metadata))

    def set_target(self, member: ConsumerMember, target: frozenset[TopicIdPartition]) -> None:
        member.target = target
        self._put(CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER, member.member_id, encode_target_assignment(target))

    def set_current(self, member: ConsumerMember, current: CurrentAssignment) -> None:
        self._release_partitions(member)
        member.current = current
        self._acquire_partitions(member)
        self._put(
            CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT, member.member_id, encode_current_assignment(current)
        )

    def resolve_regexes(self, topics: Topics) -> None:
        """Store the topics that the members' regular expressions match now. An expression that `topics` does not
        contain keeps its stored matches."""
        in_use = {
            each.metadata.topic_regex: None for each in self.members.values() if each.metadata.topic_regex
        }
        for pattern in in_use:
            matched = topics.matches.get(pattern)
            known = self.resolved_regexes.get(pattern)
            if matched is not None and (known is None or known.topics != tuple(sorted(matched))):
                regex = ResolvedRegex(tuple(sorted(matched)), self.group_epoch, 0)
                self.resolved_regexes[pattern] = regex
                self._put(CONSUMER_GROUP_REGULAR_EXPRESSION, pattern, encode_resolved_regex(regex))
        for pattern in [each for each in self.resolved_regexes if each not in in_use]:
            del self.resolved_regexes[pattern]
            self._put(CONSUMER_GROUP_REGULAR_EXPRESSION, pattern, None)

    def remove(self, member: ConsumerMember) -> None:
        self._release_partitions(member)
        del self.members[member.member_id]
        if member.metadata.instance_id is not None:
            del self.static_members[member.metadata.instance_id]
        for kind in (
            CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
            CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
            CONSUMER_GROUP_MEMBER_METADATA,
        ):
            self._put(kind, member.member_id, None)

    def replace_static_member(
        self, old: ConsumerMember, member_id: str, metadata: MemberMetadata
    ) -> ConsumerMember:
        """Replace a static member by one with another member id, which inherits the assigned partitions and the
        target."""
        self.remove(old)
        member = ConsumerMember(member_id, metadata)
        self.set_metadata(member, metadata)
        self.set_target(member, old.target)
        self.set_current(member, JOINING._replace(assigned=old.current.assigned))
        return member

    def release_all(self, member: ConsumerMember) -> None:
        """Release the partitions of a member that joins again; reconciliation assigns its target to the member
        again."""
        epoch = max(member.current.epoch, 0)
        self.set_current(
            member, JOINING._replace(epoch=epoch, previous_epoch=epoch, state=MemberState.UNRELEASED)
        )

    def tombstones(self) -> Records:
        """Return the records that delete the whole group."""
        keys = [key for key, _ in self.snapshot()]
        if self._has_old_metadata:
            keys.append(
                encode_group_record_key(GroupRecordKey(CONSUMER_GROUP_PARTITION_METADATA, self.group_id))
            )
        return [(key, None) for key in keys]

    def _put(self, kind: int, item: str, value: bytes | None) -> None:
        key = encode_group_record_key(GroupRecordKey(kind, self.group_id, item))
        self._changes.pop(key, None)
        self._changes[key] = value
        self.version += 1

    def _release_partitions(self, member: ConsumerMember) -> None:
        for each in member.owned_or_revoking():
            del self.owners[each]

    def _acquire_partitions(self, member: ConsumerMember) -> None:
        for each in member.owned_or_revoking():
            if self.owners.setdefault(each, member.member_id) != member.member_id:
                message = (
                    f"group {self.group_id}: a partition of member {self.owners[each]} was assigned to"
                    f" {member.member_id}"
                )
                raise AssertionError(message)

    # ------------------------------------------------------------------ records

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the records of the group, each key once."""

        def encoded(kind: int, value: bytes, item: str = "") -> tuple[bytes, bytes]:
            return encode_group_record_key(GroupRecordKey(kind, self.group_id, item)), value

        if self.group_epoch == 0:
            return
        yield encoded(
            CONSUMER_GROUP_METADATA, encode_group_epoch(GroupEpoch(self.group_epoch, self.metadata_hash))
        )
        yield encoded(
            CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA, encode_target_epoch(TargetEpoch(self.assignment_epoch))
        )
        for member in self.members.values():
            yield encoded(
                CONSUMER_GROUP_MEMBER_METADATA, encode_member_metadata(member.metadata), member.member_id
            )
            yield encoded(
                CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
                encode_target_assignment(member.target),
                member.member_id,
            )
            yield encoded(
                CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
                encode_current_assignment(member.current),
                member.member_id,
            )
        for pattern, regex in self.resolved_regexes.items():
            yield encoded(CONSUMER_GROUP_REGULAR_EXPRESSION, encode_resolved_regex(regex), pattern)

    def apply(self, key: GroupRecordKey, value: bytes | None) -> None:
        """Apply a stored record; the order does not matter between different keys. `finish_restore` then creates the
        members."""
        if value is None:
            self._loaded.pop(key, None)
        else:
            self._loaded[key] = value

    def finish_restore(self, settings: ConsumerGroupSettings, now_ms: float) -> None:
        """Build the group from the applied records. Session and rebalance timeouts start again. Records of unknown
        members are ignored. Raises `CorruptLog`."""
        loaded, self._loaded = self._loaded, {}
        for key, value in loaded.items():
            if key.record_type == CONSUMER_GROUP_METADATA:
                self.group_epoch, self.metadata_hash = decode_group_epoch(value)
            elif key.record_type == CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA:
                self.assignment_epoch = decode_target_epoch(value).epoch
            elif key.record_type == CONSUMER_GROUP_REGULAR_EXPRESSION:
                self.resolved_regexes[key.member_or_regex] = decode_resolved_regex(value)
            elif key.record_type == CONSUMER_GROUP_MEMBER_METADATA:
                self.members[key.member_or_regex] = ConsumerMember(
                    key.member_or_regex, decode_member_metadata(value)
                )
            self._has_old_metadata |= key.record_type == CONSUMER_GROUP_PARTITION_METADATA
        for member in self.members.values():
            if (
                current := loaded.get(
                    GroupRecordKey(CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT, self.group_id, member.member_id)
                )
            ) is not None:
                member.current = decode_current_assignment(current)
            if (
                target := loaded.get(
                    GroupRecordKey(CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER, self.group_id, member.member_id)
                )
            ) is not None:
                member.target = decode_target_assignment(target)
            if not self.all_unowned(member.owned_or_revoking()):
                raise CorruptLog(
                    f"__consumer_offsets: two members of group {self.group_id} own the same partition"
                )
            self._acquire_partitions(member)
            if member.metadata.instance_id is not None:
                self.static_members[member.metadata.instance_id] = member.member_id
            member.extend_session(settings, now_ms)
            is_unrevoked = member.current.state == MemberState.UNREVOKED
            timeout_ms = member.metadata.rebalance_timeout_ms
            member.revoke_deadline_ms = now_ms + timeout_ms if is_unrevoked else math.inf
