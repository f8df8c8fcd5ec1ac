"""What is stored of a consumer group: its epochs, members, targets and expressions; every change of it is a record.

Always true: * `snapshot` is what the records so far add up to: nothing that decides about a target or an assignment is
remembered in any other way.
* `owners` says who holds a partition: nobody but that one member has it assigned or pending revocation.
* A static member's instance id maps to its current member id and to nothing else.
* `version` grows with every change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, FencedInstanceId, UnknownMember
from mansio.state.consumer_group.member import JOINING, ConsumerMember
from mansio.state.consumer_group.records import (
    CURRENT,
    GROUP_EPOCH,
    MEMBER,
    PARTITION_METADATA,
    REGEX,
    TARGET,
    TARGET_EPOCH,
    CurrentAssignment,
    GroupEpoch,
    GroupRecordKey,
    MemberMetadata,
    ResolvedRegex,
    TargetEpoch,
    decode_current,
    decode_group_epoch,
    decode_member,
    decode_resolved_regex,
    decode_target,
    decode_target_epoch,
    encode_current,
    encode_group_epoch,
    encode_group_record_key,
    encode_member,
    encode_resolved_regex,
    encode_target,
    encode_target_epoch,
)
from mansio.state.consumer_group.types import MemberState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.state.consumer_group.types import ConsumerGroupSettings, Records, TopicPartition


class StoredGroup:
    """See the module. `members` are in the order they came."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = 0
        self.metadata_hash = 0
        self.assignment_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.static_members: dict[str, str] = {}  # instance id -> member id
        self.resolved_regexes: dict[str, ResolvedRegex] = {}
        self.owners: dict[TopicPartition, str] = {}
        self.version = 0
        self._old_metadata = False  # there is a record of kind 4, of an older broker
        self._changes: dict[bytes, bytes | None] = {}
        self._loaded: dict[GroupRecordKey, bytes] = {}

    def __iter__(self) -> Iterator[ConsumerMember]:
        """The members as they are now; they may come and go meanwhile."""
        return iter(list(self.members.values()))

    def validated(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """The member a request comes from. Raises `UnknownMember`, or `FencedInstanceId` if another one has taken over
        its instance id."""
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

    def all_unowned(self, partitions: Iterable[TopicPartition]) -> bool:
        return not any(each in self.owners for each in partitions)

    # ------------------------------------------------------------------ changes

    def take_changes(self) -> Records:
        """The records of what has changed since the last time, the last of each key."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def set_epoch(self, group_epoch: int, metadata_hash: int) -> None:
        self.group_epoch, self.metadata_hash = group_epoch, metadata_hash
        self._put(GROUP_EPOCH, "", encode_group_epoch(GroupEpoch(group_epoch, metadata_hash)))

    def set_assignment_epoch(self, epoch: int) -> None:
        self.assignment_epoch = epoch
        self._put(TARGET_EPOCH, "", encode_target_epoch(TargetEpoch(epoch)))

    def set_metadata(self, member: ConsumerMember, metadata: MemberMetadata) -> None:
        """Also how a member that is made anew comes in."""
        if (instance_id := member.metadata.instance_id) is not None:
            self.static_members.pop(instance_id, None)
        member.metadata = metadata
        self.members[member.member_id] = member
        if metadata.instance_id is not None:
            self.static_members[metadata.instance_id] = member.member_id
        self._put(MEMBER, member.member_id, encode_member(metadata))

    def set_target(self, member: ConsumerMember, target: frozenset[TopicPartition]) -> None:
        member.target = target
        self._put(TARGET, member.member_id, encode_target(target))

    def set_current(self, member: ConsumerMember, current: CurrentAssignment) -> None:
        self._release(member)
        member.current = current
        self._acquire(member)
        self._put(CURRENT, member.member_id, encode_current(current))

    def set_resolved_regex(self, pattern: str, topics: tuple[str, ...]) -> None:
        expression = self.resolved_regexes[pattern] = ResolvedRegex(topics, self.group_epoch, 0)
        self._put(REGEX, pattern, encode_resolved_regex(expression))

    def remove_resolved_regex(self, pattern: str) -> None:
        del self.resolved_regexes[pattern]
        self._put(REGEX, pattern, None)

    def remove(self, member: ConsumerMember) -> None:
        self._release(member)
        del self.members[member.member_id]
        if member.metadata.instance_id is not None:
            del self.static_members[member.metadata.instance_id]
        for kind in (CURRENT, TARGET, MEMBER):
            self._put(kind, member.member_id, None)

    def replace_static_member(
        self, old: ConsumerMember, member_id: str, metadata: MemberMetadata
    ) -> ConsumerMember:
        """Another member id for a static member: it gets what the old one has, and its target."""
        self.remove(old)
        member = ConsumerMember(member_id, metadata)
        self.set_metadata(member, metadata)
        self.set_target(member, old.target)
        self.set_current(member, JOINING._replace(assigned=old.current.assigned))
        return member

    def release_all(self, member: ConsumerMember) -> None:
        """It joins anew: what it held is free, and the next step gives it what of its target is."""
        epoch = max(member.current.epoch, 0)
        self.set_current(
            member, JOINING._replace(epoch=epoch, previous_epoch=epoch, state=MemberState.UNRELEASED)
        )

    def tombstones(self) -> Records:
        """What deletes the whole group."""
        keys = [key for key, _ in self.snapshot()]
        if self._old_metadata:
            keys.append(encode_group_record_key(GroupRecordKey(PARTITION_METADATA, self.group_id)))
        return [(key, None) for key in keys]

    def _put(self, kind: int, item: str, value: bytes | None) -> None:
        key = encode_group_record_key(GroupRecordKey(kind, self.group_id, item))
        self._changes.pop(key, None)
        self._changes[key] = value
        self.version += 1

    def _release(self, member: ConsumerMember) -> None:
        for each in member.owned_or_revoking():
            del self.owners[each]

    def _acquire(self, member: ConsumerMember) -> None:
        for each in member.owned_or_revoking():
            if self.owners.setdefault(each, member.member_id) != member.member_id:
                message = (
                    f"group {self.group_id}: a partition of {self.owners[each]} went to {member.member_id}"
                )
                raise AssertionError(message)

    # ------------------------------------------------------------------ from and to the log

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """The records that make up the group, each key once."""

        def encoded(kind: int, value: bytes, item: str = "") -> tuple[bytes, bytes]:
            return encode_group_record_key(GroupRecordKey(kind, self.group_id, item)), value

        if self.group_epoch == 0:
            return
        yield encoded(GROUP_EPOCH, encode_group_epoch(GroupEpoch(self.group_epoch, self.metadata_hash)))
        yield encoded(TARGET_EPOCH, encode_target_epoch(TargetEpoch(self.assignment_epoch)))
        for member in self.members.values():
            yield encoded(MEMBER, encode_member(member.metadata), member.member_id)
            yield encoded(TARGET, encode_target(member.target), member.member_id)
            yield encoded(CURRENT, encode_current(member.current), member.member_id)
        for pattern, expression in self.resolved_regexes.items():
            yield encoded(REGEX, encode_resolved_regex(expression), pattern)

    def apply(self, key: GroupRecordKey, value: bytes | None) -> None:
        """Take in a stored record, in whatever order; `restored` makes the group of them."""
        if value is None:
            self._loaded.pop(key, None)
        else:
            self._loaded[key] = value

    def restored(self, settings: ConsumerGroupSettings, now_ms: float) -> None:
        """Members carry on; sessions and rebalance timeouts begin anew. What belongs to no member is left out."""
        loaded, self._loaded = self._loaded, {}
        for key, value in loaded.items():
            if key.kind == GROUP_EPOCH:
                self.group_epoch, self.metadata_hash = decode_group_epoch(value)
            elif key.kind == TARGET_EPOCH:
                self.assignment_epoch = decode_target_epoch(value).epoch
            elif key.kind == REGEX:
                self.resolved_regexes[key.item] = decode_resolved_regex(value)
            elif key.kind == MEMBER:
                self.members[key.item] = ConsumerMember(key.item, decode_member(value))
            self._old_metadata |= key.kind == PARTITION_METADATA
        for member in self.members.values():
            if (current := loaded.get(GroupRecordKey(CURRENT, self.group_id, member.member_id))) is not None:
                member.current = decode_current(current)
            if (target := loaded.get(GroupRecordKey(TARGET, self.group_id, member.member_id))) is not None:
                member.target = decode_target(target)
            if not self.all_unowned(member.owned_or_revoking()):
                raise CorruptLog(
                    f"__consumer_offsets: two members of group {self.group_id} hold one partition"
                )
            self._acquire(member)
            if member.metadata.instance_id is not None:
                self.static_members[member.metadata.instance_id] = member.member_id
            member.extend_session(settings, now_ms)
            unrevoked = member.current.state == MemberState.UNREVOKED
            timeout_ms = member.metadata.rebalance_timeout_ms
            member.revoke_deadline_ms = now_ms + timeout_ms if unrevoked else math.inf
