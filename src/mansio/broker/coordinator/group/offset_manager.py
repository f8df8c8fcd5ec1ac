"""Committed offsets of groups: commit, fetch, delete and expire.

Invariants:
* A commit is checked against the generation or member epoch, appended, and only then visible; the client receives the
  response when the commit is durable. There is no `await` between the check and the append, so a member that has lost
  its partitions cannot overwrite the commit of their new owner.
* Offsets that cannot be expired now (the partition is being loaded, has moved, or cannot be written) are expired at the
  next interval.

* An offset that is committed in a transaction is pending until the transaction ends: it is not visible, and does not
  expire. A deletion of the partition's offset, of the group or of the topic deletes it, too.

Source: Kafka's OffsetMetadataManager; KIP-211 (expiration), KIP-320 (leader epochs), KIP-447 (commits in transactions,
stable offsets), KIP-890 (no record of a transaction after its end).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.broker.coordinator.group.error_mapping import check_offsets_group_id
from mansio.broker.coordinator.group.group_inspection import CONSUMER, topics_of_subscription
from mansio.broker.features.holds.retention_holds import is_hold
from mansio.errors import (
    CoordinatorLoadInProgress,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    IllegalGeneration,
    MansioError,
    NonEmptyGroup,
    NotCoordinator,
    OffsetMetadataTooLarge,
    UnknownTopicOrPartition,
)
from mansio.logs import fields
from mansio.state.classic_group.group import EMPTY, STABLE, ClassicGroup
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup
from mansio.tracebacks import result_of
from mansio.wire.internal_records.offset_and_group_records import (
    CommittedOffset,
    GroupKey,
    OffsetKey,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore, PartitionOffsets
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.runtime import KeyValue
    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.ports import Clock, Scheduler
    from mansio.wire.batch.end_marker import EndMarker

logger = logging.getLogger(__name__)


class OffsetToCommit(NamedTuple):
    """Offset to commit for one partition. `leader_epoch`: leader epoch of the last consumed record, -1 if unknown.
    `metadata`: text chosen by the client."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class StableOffsets(NamedTuple):
    """Committed offsets by partition (topic, index), and the requested partitions whose offset a transaction that is
    not ended may change."""

    committed: dict[tuple[str, int], CommittedOffset]
    unstable: frozenset[tuple[str, int]]


class Verification:
    """Verification of a transactional commit with the transaction coordinator. `is_outdated`: the producer's
    transaction has ended in the partition since, so a record that is appended now might belong to no transaction."""

    __slots__ = ("is_outdated", "key")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.is_outdated = False


class OffsetManager:
    """The committed offsets of all groups of one coordinator."""

    def __init__(
        self,
        store: GroupStore,
        settings: GroupSettings,
        clock: Clock,
        partition_exists: Callable[[str, int], bool],
    ) -> None:
        """`partition_exists` returns whether a partition (topic, index) exists on any broker of the cluster."""
        self._store = store
        self._settings = settings
        self._clock = clock
        self._partition_exists = partition_exists
        self._verifications: dict[tuple[int, int], set[Verification]] = {}

    async def commit(
        self,
        group_id: str,
        offsets: Sequence[OffsetToCommit],
        *,
        member_id: str = "",
        instance_id: str | None = None,
        generation: int = -1,
    ) -> list[MansioError | None]:
        """Commit the valid offsets; returns when they are durable. The result has one entry per offset: None, or the
        error of an invalid one. Raises `InvalidGroupId` and the errors of the group's `check_commit`, which concern all
        offsets.

        `generation`: generation of the group, or member epoch. A client with manual assignment, and an administrator,
        commit without member id and generation, to a group without members.
        """
        check_offsets_group_id(group_id)
        if generation >= 0 and self._store.find(group_id) is None:
            raise IllegalGeneration(f"there is no group {group_id!r}")
        entry = await self._store.find_or_create(group_id)
        try:
            entry.group.check_commit(member_id, instance_id, generation, self._store.monotonic_ms())
            results = [self._commit_error(each) for each in offsets]
            records = self._records(group_id, offsets, results)
            durable = self._store.append(group_id, records) if records else None
            entry.committed_generation = entry.generation
        finally:
            self._store.remove_if_empty(entry)
        if durable is not None:
            await durable
        return results

    async def commit_in_transaction(
        self,
        group_id: str,
        member_id: str,
        generation: int,
        producer_id: int,
        producer_epoch: int,
        offsets: Sequence[OffsetToCommit],
        *,
        instance_id: str | None = None,
    ) -> list[MansioError | None]:
        """Append the valid offsets to the producer's transaction, which has to contain the partition that stores the
        group; returns when they are durable. They become visible when the transaction is committed. The result is as
        that of `commit`.

        Raises `InvalidGroupId`, `InvalidProducerEpoch`, and the errors of the group's `check_transactional_commit`. A
        producer that sends neither member id nor generation (-1) is not checked as a member.
        """
        check_offsets_group_id(group_id)
        if generation >= 0 and self._store.find(group_id) is None:
            raise IllegalGeneration(f"there is no group {group_id!r}")
        entry = await self._store.find_or_create(group_id)
        try:
            entry.group.check_transactional_commit(member_id, instance_id, generation)
            results = [self._commit_error(each) for each in offsets]
            records = self._records(group_id, offsets, results)
            stored = None
            if records:
                stored = self._store.append_in_transaction(
                    group_id, records, producer_id=producer_id, producer_epoch=producer_epoch
                )
                entry.committed_generation = entry.generation
        finally:
            self._store.remove_if_empty(entry)
        if stored is not None:
            await stored
        return results

    def expect_marker(self, index: int, producer_id: int) -> None:
        """Prepare for an end marker that is about to be appended to partition `index` of `__consumer_offsets`: until
        the marker is applied, no record of the producer is appended without a verification that begins after this
        call, so that none follows the marker."""
        for verification in self._verifications.get((index, producer_id), ()):
            verification.is_outdated = True
        self._store.expect_end(index, producer_id)

    def apply_marker(self, index: int, marker: EndMarker) -> None:
        """Apply a committed end marker of partition `index` of `__consumer_offsets`: the pending offsets of its
        producer become committed or are dropped. Must be called on the leader, before the writer of the marker is
        answered; a later leader reads the marker from the log."""
        self.expect_marker(index, marker.producer_id)
        self._store.runtime.apply_marker(index, marker)

    async def begin_verification(
        self, group_id: str, producer_id: int, producer_epoch: int
    ) -> tuple[int, Verification | None]:
        """Begin to verify with the transaction coordinator that the transaction of a producer contains the partition
        that stores the group. Returns the index of this partition; and None if the transaction has records there, so
        that a verification is not necessary. The caller ends the verification by `end_verification`. Raises the errors
        of `commit_in_transaction` that do not depend on the group's members."""
        check_offsets_group_id(group_id)
        await self._store.runtime.ensure_topic_exists()
        self._store.find(group_id)
        index = self._store.partition_for(group_id)
        if self._store.has_open_transaction(index, producer_id, producer_epoch):
            return index, None
        verification = Verification((index, producer_id))
        self._verifications.setdefault(verification.key, set()).add(verification)
        return index, verification

    def end_verification(self, verification: Verification) -> None:
        """End a verification; `is_outdated` does not change any more."""
        known = self._verifications[verification.key]
        known.discard(verification)
        if not known:
            del self._verifications[verification.key]

    def _records(
        self, group_id: str, offsets: Sequence[OffsetToCommit], results: Sequence[MansioError | None]
    ) -> list[tuple[bytes, bytes]]:
        """Encode the records of the offsets without an error."""
        now_ms = self._clock.wall_ms()
        return [
            (
                encode_offset_key(OffsetKey(group_id, each.topic, each.partition)),
                encode_offset_value(CommittedOffset(each.offset, each.leader_epoch, each.metadata, now_ms)),
            )
            for each, problem in zip(offsets, results, strict=True)
            if problem is None
        ]

    async def fetch(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
    ) -> dict[tuple[str, int], CommittedOffset]:
        """Return the committed offsets of a group, of these partitions or, if None, of all; partitions without a
        committed offset are omitted.

        A member of a consumer group passes its id and epoch. Raises `UnknownMember` or `StaleMemberEpoch` if they are
        not current, and `GroupIdNotFound` if the group is being deleted.
        """
        fetched = await self.fetch_stable(
            group_id, partitions, member_id=member_id, member_epoch=member_epoch, requires_stable=False
        )
        return fetched.committed

    async def fetch_stable(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        member_id: str = "",
        member_epoch: int = -1,
        requires_stable: bool = True,
    ) -> StableOffsets:
        """Return the committed offsets as `fetch` does. With `requires_stable`, partitions with an offset of an open
        transaction are in `unstable` instead; if `partitions` is None, only if they have a committed offset, as in
        Kafka."""
        check_offsets_group_id(group_id)
        entry = self._store.find(group_id)
        if entry is None:
            return StableOffsets({}, frozenset())
        if entry.is_deleted:
            raise GroupIdNotFound(f"group {group_id} is being deleted")
        if isinstance(entry.group, ConsumerGroup):
            entry.group.check_fetch(member_id, member_epoch)
        found = {}
        if partitions is None:
            found = {
                (topic, partition): committed for topic, partition, committed in entry.committed_offsets()
            }
        else:
            partitions = list(partitions)
            for topic, partition in partitions:
                if (committed := entry.offsets.get(topic, {}).get(partition)) is not None:
                    found[topic, partition] = committed
        unstable: frozenset[tuple[str, int]] = frozenset()
        if requires_stable and entry.pending_offsets:
            unstable = frozenset(
                each
                for each in (found if partitions is None else partitions)
                if each in entry.pending_offsets
            )
            for each in unstable:
                found.pop(each, None)
        await self._store.wait_until_committed(group_id)  # commits made after this call need not be durable
        return StableOffsets(found, unstable)

    async def delete(self, group_id: str, partitions: Sequence[tuple[str, int]]) -> list[MansioError | None]:
        """Delete the committed offsets of these partitions (KIP-496). Returns None or an error for each partition; an
        error if a member of the group subscribes to the topic.

        As in Kafka, a member of a classic group whose subscription is unknown counts as subscribed to every topic.
        Raises `GroupIdNotFound`, and `NonEmptyGroup` for a classic group with members of another protocol type than
        "consumer", whose metadata the broker cannot decode.
        """
        check_offsets_group_id(group_id)
        entry = self._store.find(group_id)
        if entry is None or entry.is_deleted:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        group = entry.group
        subscribed: frozenset[str] | None = frozenset()
        if group.state != EMPTY:
            if isinstance(group, ClassicGroup) and group.protocol_type != CONSUMER:
                raise NonEmptyGroup(f"group {group_id} has members of protocol type {group.protocol_type!r}")
            subscribed = subscribed_topics(entry)
        results: list[MansioError | None] = []
        deletions: list[tuple[str, int]] = []
        for topic, partition in partitions:
            known = partition in entry.offsets.get(topic, {}) or (topic, partition) in entry.pending_offsets
            if subscribed is None or topic in subscribed:
                results.append(GroupSubscribedToTopic(f"group {group_id} reads {topic}"))
            elif not known and not self._partition_exists(topic, partition):
                results.append(UnknownTopicOrPartition(f"there is no partition {topic}-{partition}"))
            else:
                results.append(None)
                if known:
                    deletions.append((topic, partition))
        if deletions:
            promise = self._store.append(group_id, tombstones(entry, partitions=deletions))
            self._store.remove_if_empty(entry)
            await result_of(promise)
        return results

    def delete_offsets_of_topic(self, topic: str) -> Coroutine[Any, Any, None]:
        """Delete the committed offsets of a deleted topic, which would be wrong for a new topic with the same name.
        Each coordinator deletes the offsets of its own groups. This call collects the offsets; the returned coroutine
        deletes those that are still unchanged."""
        return self._delete_unchanged_offsets(
            _find_offsets_of_deleted_topics(list(self._store.entries.values()), lambda name: name == topic)
        )

    def delete_offsets_of_missing_topics(
        self, entries: Iterable[GroupEntry], topic_exists: Callable[[str], bool]
    ) -> Coroutine[Any, Any, None]:
        """Delete the committed offsets of topics that do not exist any more; the groups may have had no coordinator
        when the topics were deleted. Returns a coroutine, as `delete_offsets_of_topic` does."""
        return self._delete_unchanged_offsets(
            _find_offsets_of_deleted_topics(entries, lambda name: not topic_exists(name))
        )

    async def _delete_unchanged_offsets(
        self, deletions: list[tuple[GroupEntry, dict[tuple[str, int], PartitionOffsets]]]
    ) -> None:
        """Delete offsets that are unchanged since they were collected. A later commit belongs to a new topic with the
        same name, and stays."""
        for entry, known in deletions:
            unchanged = [
                (topic, partition)
                for (topic, partition), offsets in known.items()
                if entry.is_unchanged(topic, partition, offsets)
            ]
            if not unchanged or entry.is_unloaded:
                continue
            group_id = entry.group.group_id
            try:
                stored = self._store.append(group_id, tombstones(entry, partitions=unchanged))
                self._store.remove_if_empty(entry)
                await stored
            except MansioError as error:  # the next coordinator of the group checks again
                topics = len({topic for topic, _ in unchanged})
                logger.warning(
                    "offsets_of_deleted_topics_not_deleted",
                    extra=fields(group=group_id, topics=topics, reason=error),
                )

    def expired_offsets(self, entry: GroupEntry, now_ms: int) -> list[tuple[str, int]]:
        """Return the partitions (topic, index) whose committed offset has expired (KIP-211). The offset of a partition
        does not expire while an open transaction has committed another one.

        A group without members retains offsets for the retention time after its last member left or its last commit,
        whichever is later. A group with members retains the offsets of subscribed topics without limit. The offsets of
        a retention hold (`mansio.broker.features.holds.retention_holds`) never expire, because its pipeline would lose
        records without an error.
        """
        group = entry.group
        if group.is_idle() and not entry.is_deleted:
            retained: frozenset[str] = frozenset()
        elif group.state == STABLE and (subscribed := subscribed_topics(entry)) is not None:
            retained = subscribed
        else:
            return []
        retention_ms = self._settings.offsets_retention_ms
        empty_since_ms = entry.state_timestamp_ms if group.is_idle() else -1

        def is_expired(committed: CommittedOffset) -> bool:
            if committed.expire_ms >= 0:
                return now_ms >= committed.expire_ms
            return now_ms - max(committed.commit_ms, empty_since_ms) >= retention_ms

        return [
            (topic, partition)
            for topic, partition, committed in entry.committed_offsets()
            if topic not in retained
            and is_expired(committed)
            and (topic, partition) not in entry.pending_offsets
            and not is_hold(group.group_id, committed.metadata)
        ]

    def _commit_error(self, offset: OffsetToCommit) -> MansioError | None:
        if len(offset.metadata.encode()) > self._settings.offset_metadata_max_bytes:
            return OffsetMetadataTooLarge()
        if not self._partition_exists(offset.topic, offset.partition):
            return UnknownTopicOrPartition(f"there is no partition {offset.topic}-{offset.partition}")
        return None


def _find_offsets_of_deleted_topics(
    entries: Iterable[GroupEntry], is_deleted: Callable[[str], bool]
) -> list[tuple[GroupEntry, dict[tuple[str, int], PartitionOffsets]]]:
    """Return the committed and pending offsets of deleted topics, by group entry and partition."""
    found = []
    for entry in entries:
        offsets = {
            (topic, partition): entry.offsets_of(topic, partition)
            for topic, partition in entry.known_partitions()
            if is_deleted(topic)
        }
        if offsets:
            found.append((entry, offsets))
    return found


def tombstones(
    entry: GroupEntry, *, partitions: Iterable[tuple[str, int]] | None = None, with_group: bool = False
) -> list[KeyValue]:
    """Return the records that delete the committed and pending offsets of a group, of these partitions or, if None, of
    all. With `with_group` also the records that delete the group itself."""
    group_id = entry.group.group_id
    if partitions is None:
        partitions = entry.known_partitions()
    records: list[KeyValue] = [
        (encode_offset_key(OffsetKey(group_id, topic, partition)), None) for topic, partition in partitions
    ]
    if with_group and entry.group_metadata_value is not None:
        records.append((encode_group_key(GroupKey(group_id)), None))
    if with_group:
        records += [(key, None) for key in entry.group_records]
    return records


def subscribed_topics(entry: GroupEntry) -> frozenset[str] | None:
    """Return the names of the topics to which the members of a group subscribe; None if unknown: a classic group of
    another protocol type or without a protocol, or with metadata that cannot be decoded."""
    group = entry.group
    if isinstance(group, ConsumerGroup):
        return frozenset(group.subscribed_topic_names())
    if isinstance(group, ShareGroup):
        return frozenset(name for member in group.members.values() for name in member.metadata.topic_names)
    if group.protocol_type != CONSUMER or group.protocol is None:
        return None
    topics: set[str] = set()
    for member in group.members:
        subscription = topics_of_subscription(member.metadata_for(group.protocol))
        if subscription is None:
            return None
        topics.update(subscription)
    return frozenset(topics)


class OffsetExpiration:
    """Periodic deletion of expired committed offsets, and of groups that have neither members nor other offsets.

    `delete_group` deletes a group without members by its id. In a cluster (`lookup` is not None) the task also deletes
    the offsets of topics that were deleted while the group had no coordinator.
    """

    def __init__(
        self,
        store: GroupStore,
        offsets: OffsetManager,
        *,
        interval_ms: int,
        clock: Clock,
        scheduler: Scheduler,
        delete_group: Callable[[str], Awaitable[None]],
        lookup: CoordinatorLookup | None,
    ) -> None:
        self._store = store
        self._offsets = offsets
        self._interval_ms = interval_ms
        self._clock = clock
        self._scheduler = scheduler
        self._delete_group = delete_group
        self._lookup = lookup
        self._timer: Any = None

    def start(self) -> None:
        """Start the periodic task; the first run is after one interval."""
        self._timer = self._scheduler.call_later(self._interval_ms, self._run)

    def stop(self) -> None:
        """Cancel the next run."""
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._scheduler.spawn(self.expire(), name="expire committed offsets")
        self.delete_offsets_of_missing_topics(list(self._store.entries.values()))
        self.start()

    def delete_offsets_of_missing_topics(self, entries: Iterable[GroupEntry]) -> None:
        """In a cluster, start to delete the committed offsets of deleted topics. Does nothing on a single broker, which
        handles the deletion of each topic at once.

        The metadata with which this broker became leader are newer than any offset committed under previous leaders, so
        a topic that is missing in the metadata was deleted.
        """
        if self._lookup is not None:
            work = self._offsets.delete_offsets_of_missing_topics(list(entries), self._lookup.has_topic)
            self._scheduler.spawn(work, name="delete offsets of deleted topics")

    async def expire(self) -> int:
        """Delete the expired offsets of all groups, and groups that have neither members nor offsets then.

        Groups that are being loaded are skipped. Returns the number of expired offsets.
        """
        now_ms = self._clock.wall_ms()
        expired = 0
        for group_id in list(self._store.entries):
            try:
                expired += await self._expire_group(group_id, now_ms)
            except (CoordinatorLoadInProgress, NotCoordinator):
                continue
            except MansioError as error:
                logger.warning("offsets_not_expired", extra=fields(group=group_id, reason=error))
        return expired

    async def _expire_group(self, group_id: str, now_ms: int) -> int:
        entry = self._store.find(group_id)
        if entry is None:
            return 0
        expired = self._offsets.expired_offsets(entry, now_ms)
        has_others = len(entry.known_partitions()) > len(expired)
        if not has_others and entry.group.is_idle() and not isinstance(entry.group, ShareGroup):
            await self._delete_group(group_id)
        elif expired:
            await self._store.append(group_id, tombstones(entry, partitions=expired))
        return len(expired)
