"""Committed offsets: taking them, giving them out, deleting and expiring them.

Always true: a commit is checked against the group's generation, appended, and only then visible; it is
answered when it is durable. Between the check and the append nothing can come in between (there is no
`await`), so a member that has lost its partitions cannot commit over the one that has them now.

Source: Kafka's OffsetMetadataManager; KIP-211 (expiry), KIP-320 (leader epochs), KIP-447 (require stable:
without transactions every committed offset is stable).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.broker.coordinator.group.error_mapping import check_offsets_group_id
from mansio.broker.coordinator.group.group_inspection import CONSUMER, topics_of_subscription
from mansio.broker.partition.retention_holds import is_hold
from mansio.errors import (
    GroupIdNotFound,
    GroupSubscribedToTopic,
    IllegalGeneration,
    MansioError,
    NonEmptyGroup,
    OffsetMetadataTooLarge,
    UnknownTopicOrPartition,
)
from mansio.logs import fields
from mansio.state.classic_group.group import EMPTY, STABLE
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.offset_and_group_records import (
    CommittedOffset,
    GroupKey,
    OffsetKey,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.runtime import KeyValue
    from mansio.ports import Clock

logger = logging.getLogger(__name__)


class OffsetToCommit(NamedTuple):
    """One partition's new position. `leader_epoch` is -1 where the client knows none."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class OffsetManager:
    """The committed offsets of all groups."""

    def __init__(
        self,
        store: GroupStore,
        settings: GroupSettings,
        clock: Clock,
        exists: Callable[[str, int], bool],
    ) -> None:
        """`exists(topic, partition)`: is there such a partition, here or elsewhere?"""
        self._store = store
        self._settings = settings
        self._clock = clock
        self._exists = exists

    async def commit(
        self,
        group_id: str,
        offsets: Sequence[OffsetToCommit],
        *,
        member_id: str = "",
        instance_id: str | None = None,
        generation: int = -1,
    ) -> list[MansioError | None]:
        """Commit what can be committed; says for each offset what was wrong with it, or None. Returns when
        they are durable. Raises `InvalidGroupId`, and what `check_commit` of the group's machine raises, for all of
        them. `generation`: that of the group, or the member's epoch.

        Without member and generation: an assigned or admin client's commit, for a group without members.
        """
        check_offsets_group_id(group_id)
        if generation >= 0 and self._store.find(group_id) is None:
            raise IllegalGeneration(f"there is no group {group_id!r}")
        entry = await self._store.find_or_create(group_id)
        try:
            entry.group.check_commit(member_id, instance_id, generation, self._store.monotonic_ms())
            results = [self._problem(each) for each in offsets]
            now_ms = self._clock.wall_ms()
            records: list[KeyValue] = [
                (
                    encode_offset_key(OffsetKey(group_id, each.topic, each.partition)),
                    encode_offset_value(
                        CommittedOffset(each.offset, each.leader_epoch, each.metadata, now_ms)
                    ),
                )
                for each, problem in zip(offsets, results, strict=True)
                if problem is None
            ]
            durable = self._store.append(group_id, records) if records else None
        finally:
            self._store.drop_if_unused(entry)
        if durable is not None:
            await durable
        return results

    async def fetch(
        self,
        group_id: str,
        wanted: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
    ) -> dict[tuple[str, int], CommittedOffset]:
        """The committed offsets of a group, of the wanted partitions or of all. Those without one are left
        out. A member of a group of the new protocol names itself and its epoch: raises `UnknownMember`,
        `StaleMemberEpoch`.
        """
        check_offsets_group_id(group_id)
        entry = self._store.find(group_id)
        if entry is None:
            return {}
        if entry.is_deleted:
            raise GroupIdNotFound(f"group {group_id} is being deleted")
        if isinstance(entry.group, ConsumerGroup):
            entry.group.check_fetch(member_id, member_epoch)
        found = {}
        if wanted is None:
            found = {(topic, partition): committed for topic, partition, committed in entry.each_offset()}
        else:
            for topic, partition in wanted:
                if (committed := entry.offsets.get(topic, {}).get(partition)) is not None:
                    found[topic, partition] = committed
        await self._store.committed(group_id)  # what is committed meanwhile may not be durable when this ends
        return found

    async def delete(self, group_id: str, wanted: Sequence[tuple[str, int]]) -> list[MansioError | None]:
        """Forget offsets (KIP-496): of a group without members, or of topics that none of them reads."""
        check_offsets_group_id(group_id)
        entry = self._store.find(group_id)
        if entry is None or entry.is_deleted:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        subscribed = frozenset() if entry.group.state == EMPTY else subscribed_topics(entry)
        if subscribed is None:
            raise NonEmptyGroup(f"group {group_id} has members, and it is unknown what they read")
        results: list[MansioError | None] = []
        gone: list[tuple[str, int]] = []
        for topic, partition in wanted:
            known = partition in entry.offsets.get(topic, {})
            if topic in subscribed:
                results.append(GroupSubscribedToTopic(f"group {group_id} reads {topic}"))
            elif not known and not self._exists(topic, partition):
                results.append(UnknownTopicOrPartition(f"there is no partition {topic}-{partition}"))
            else:
                results.append(None)
                if known:
                    gone.append((topic, partition))
        if gone:
            promise = self._store.append(group_id, tombstones(entry, only=gone))
            self._store.drop_if_unused(entry)
            await promise
        return results

    def forget_topic(self, topic: str) -> Coroutine[Any, Any, None]:
        """The topic was deleted: its offsets would be wrong for another topic of that name. Each coordinator forgets
        those of the groups it has. Which these are is noted now; what is awaited is that they are forgotten."""
        return self._forget(_committed_of(list(self._store.entries.values()), lambda name: name == topic))

    def delete_offsets_of_missing_topics(
        self, entries: Iterable[GroupEntry], is_there: Callable[[str], bool]
    ) -> Coroutine[Any, Any, None]:
        """Forget what these groups have committed of topics that are there no more: nobody may have coordinated them
        when those were deleted."""
        return self._forget(_committed_of(entries, lambda name: not is_there(name)))

    async def _forget(
        self, deletions: list[tuple[GroupEntry, dict[tuple[str, int], CommittedOffset]]]
    ) -> None:
        """What has been committed since stays: it is of another topic of that name."""
        for entry, known in deletions:
            gone = [
                (topic, partition)
                for (topic, partition), committed in known.items()
                if entry.offsets.get(topic, {}).get(partition) is committed
            ]
            if not gone or entry.gone:
                continue
            group_id = entry.group.group_id
            try:
                await self._store.append(group_id, tombstones(entry, only=gone))
            except MansioError as error:  # whoever coordinates the group next looks again
                known_topics = len({topic for topic, _ in gone})
                logger.warning(
                    "offsets of deleted topics not forgotten",
                    extra=fields(group=group_id, topics=known_topics, reason=error),
                )

    def expired(self, entry: GroupEntry, now_ms: int) -> list[tuple[str, int]]:
        """The offsets of a group whose time is over (KIP-211): a group without members keeps them for the
        retention time after its last member left or its last commit, whichever is later; one with members
        keeps what they read for ever. What a pipeline holds back with (`mansio.broker.partition.retention_holds`)
        has no such time: it would begin to lose records without anybody being told."""
        group = entry.group
        if group.is_idle() and not entry.is_deleted:
            kept: frozenset[str] = frozenset()
        elif group.state == STABLE and (subscribed := subscribed_topics(entry)) is not None:
            kept = subscribed
        else:
            return []
        retention_ms = self._settings.offsets_retention_ms
        empty_since_ms = entry.state_timestamp_ms if group.is_idle() else -1

        def is_over(committed: CommittedOffset) -> bool:
            if committed.expire_ms >= 0:
                return now_ms >= committed.expire_ms
            return now_ms - max(committed.commit_ms, empty_since_ms) >= retention_ms

        return [
            (topic, partition)
            for topic, partition, committed in entry.each_offset()
            if topic not in kept and is_over(committed) and not is_hold(group.group_id, committed.metadata)
        ]

    def _problem(self, offset: OffsetToCommit) -> MansioError | None:
        if len(offset.metadata.encode()) > self._settings.offset_metadata_max_bytes:
            return OffsetMetadataTooLarge()
        if not self._exists(offset.topic, offset.partition):
            return UnknownTopicOrPartition(f"there is no partition {offset.topic}-{offset.partition}")
        return None


def _committed_of(
    entries: Iterable[GroupEntry], is_gone: Callable[[str], bool]
) -> list[tuple[GroupEntry, dict[tuple[str, int], CommittedOffset]]]:
    """What groups have committed, as of now, of topics that are gone."""
    found = []
    for entry in entries:
        offsets = {
            (topic, partition): committed
            for topic, partitions in entry.offsets.items()
            if is_gone(topic)
            for partition, committed in partitions.items()
        }
        if offsets:
            found.append((entry, offsets))
    return found


def tombstones(
    entry: GroupEntry, *, only: Iterable[tuple[str, int]] | None = None, with_group: bool = False
) -> list[KeyValue]:
    """Records that delete a group's offsets (all, or `only` some) and, if asked, its metadata."""
    group_id = entry.group.group_id
    if only is None:
        only = [(topic, partition) for topic, partition, _ in entry.each_offset()]
    records: list[KeyValue] = [
        (encode_offset_key(OffsetKey(group_id, topic, partition)), None) for topic, partition in only
    ]
    if with_group and entry.stored is not None:
        records.append((encode_group_key(GroupKey(group_id)), None))
    if with_group:
        records += [(key, None) for key in entry.modern]
    return records


def subscribed_topics(entry: GroupEntry) -> frozenset[str] | None:
    """What the members of a group read; None if their bytes are not ours to read or make no sense."""
    group = entry.group
    if isinstance(group, ConsumerGroup):
        return frozenset(group.subscribed_topic_names())
    if isinstance(group, ShareGroup):
        return frozenset(name for member in group.members.values() for name in member.metadata.topic_names)
    if group.protocol_type != CONSUMER or group.protocol is None:
        return None
    topics: set[str] = set()
    for member in group.roster:
        subscription = topics_of_subscription(member.metadata_for(group.protocol))
        if subscription is None:
            return None
        topics.update(subscription)
    return frozenset(topics)
