"""State of the groups on this broker: the coordinator's view of `__consumer_offsets`.

Each group has an entry with the state machine of its members, the committed offsets, and the stored records. Offsets
and stored records change only in `apply`, that is, after they were appended to the log. The state machine of a classic
group is newer than its stored record during a rebalance. The state machine of a consumer or share group is newer than
its stored records only between a change and its append.

The stored records of a group determine its protocol. `rebuild` creates the state machine from the records, after a load
and whenever a change could not be written.

Invariants:
* The group id determines the partition of a group, by Java's string hash as in Kafka, so that the topic is compatible.
* An entry without members, offsets, pending offsets and records is removed.
* An offset that a transaction committed is pending until the end marker of the transaction. At a commit it becomes the
  committed offset, unless a record at a later offset of the log has committed or deleted the partition's offset.
* An entry that was unloaded is never used again, even if its group is loaded on this broker again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.coordinator.group.visible_topics import VisibleTopics
from mansio.broker.routing import routes
from mansio.errors import CoordinatorNotAvailable, CorruptLog
from mansio.state.classic_group.group import ClassicGroup
from mansio.wire.internal_records.consumer_group_records import (
    CONSUMER_GROUP_METADATA,
    CONSUMER_GROUP_RECORD_TYPES,
    SHARE_GROUP_RECORD_TYPES,
    decode_group_record_key,
)
from mansio.wire.internal_records.offset_and_group_records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.broker.coordinator.group.group_factory import GroupFactory
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.runtime import CoordinatorRuntime, KeyValue
    from mansio.broker.coordinator.view import TransactionalView
    from mansio.ports import Clock, Promise, Timer
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import Topics
    from mansio.state.share_group.group import ShareGroup
    from mansio.wire.internal_records.consumer_group_records import GroupRecordKey

    OffsetListener = Callable[[str, str, int, CommittedOffset | None], None]
    CommitListener = Callable[[str, str, int, int, int], None]
    Group = ClassicGroup | ConsumerGroup | ShareGroup


class PendingOffset(NamedTuple):
    """An offset that an open transaction has committed. `committed`: None if a later record of the log has committed
    another offset. `record_offset`: offset of its record in the log."""

    committed: CommittedOffset | None
    record_offset: int


class PartitionOffsets(NamedTuple):
    """The offsets of a group in one partition: the committed one, if any, and the pending ones."""

    committed: CommittedOffset | None
    pending: tuple[PendingOffset, ...]


class OpenTransaction:
    """A producer's open transaction in one partition of `__consumer_offsets`. `first_offset`: offset of its first
    record; `group_ids`: the groups for which it committed offsets; `is_ending`: its end marker may be in the log."""

    __slots__ = ("first_offset", "group_ids", "is_ending", "producer_epoch")

    def __init__(self, producer_epoch: int, first_offset: int) -> None:
        self.producer_epoch = producer_epoch
        self.first_offset = first_offset
        self.group_ids: set[str] = set()
        self.is_ending = False


class GroupEntry:
    """State of one group in memory.

    `group`: state machine of the members. `index`: partition of `__consumer_offsets` that stores the group. `offsets`:
    topic -> partition -> committed offset. `pending_offsets`: (topic, partition) -> producer id -> offset committed in
    an open transaction. `group_metadata_value`: stored value of a classic group's record.
    `group_records`: stored records of a consumer or share group, by key. `resolved_view`: the `Topics` object and the
    version of the group with which its regular expressions were resolved last. `committed_generation`: generation, or
    epoch, in which the group has committed offsets last, or with which it was loaded. `is_unloaded`: the entry is not
    used any more, because another broker or a later load has the group.
    """

    __slots__ = (
        "_visible",
        "committed_generation",
        "grace_until_ms",
        "group",
        "group_metadata_value",
        "group_records",
        "index",
        "is_unloaded",
        "offsets",
        "pending_offsets",
        "resolved_view",
        "state_timestamp_ms",
        "timer",
        "timer_due_ms",
    )

    def __init__(self, group: Group, index: int) -> None:
        self.group: Group = group
        self.index = index
        self.is_unloaded = False
        self.offsets: dict[str, dict[int, CommittedOffset]] = {}
        self.pending_offsets: dict[tuple[str, int], dict[int, PendingOffset]] = {}
        self.group_metadata_value: bytes | None = None
        self.group_records: dict[bytes, bytes] = {}
        self.resolved_view: tuple[Topics, int] | None = None
        self._visible: VisibleTopics | None = None
        self.state_timestamp_ms = -1  # wall-clock time at which the group entered its stored state
        self.timer: Timer | None = None
        self.timer_due_ms = 0.0
        self.committed_generation = 0
        self.grace_until_ms = 0.0  # after a stall of this process: time before which no deadline applies

    def visible(self, base: Topics) -> VisibleTopics:
        """Return what keeps the topics that the members may see; made from `base` the first time."""
        if self._visible is None:
            self._visible = VisibleTopics(base)
        return self._visible

    @property
    def is_empty(self) -> bool:
        """Whether the entry has no members, offsets, pending offsets and records, so that it can be removed."""
        return (
            not self.offsets
            and not self.pending_offsets
            and self.group_metadata_value is None
            and not self.group_records
            and self.group.is_idle()
        )

    @property
    def generation(self) -> int:
        """Generation of a classic group, epoch of another one: it increases when members join and leave."""
        group = self.group
        return group.generation if isinstance(group, ClassicGroup) else group.group_epoch

    @property
    def is_deleted(self) -> bool:
        """Whether the deletion of the group is being written."""
        return self.group.state == "Dead"

    @property
    def member_count(self) -> int:
        """Number of members."""
        return len(self.group.members)

    def is_unchanged(self, topic: str, partition: int, known: PartitionOffsets) -> bool:
        """Whether no offset of a partition was committed or became pending since `known` was read."""
        now = self.offsets_of(topic, partition)
        return now.committed is known.committed and now.pending == known.pending

    def offsets_of(self, topic: str, partition: int) -> PartitionOffsets:
        """Return the committed offset and the pending offsets of a partition."""
        return PartitionOffsets(
            self.offsets.get(topic, {}).get(partition),
            tuple(self.pending_offsets.get((topic, partition), {}).values()),
        )

    def known_partitions(self) -> list[tuple[str, int]]:
        """Return the partitions (topic, index) that have a committed or a pending offset."""
        committed = [(topic, partition) for topic, partition, _ in self.committed_offsets()]
        if not self.pending_offsets:
            return committed
        return list(dict.fromkeys([*committed, *self.pending_offsets]))

    def committed_offsets(self) -> Iterator[tuple[str, int, CommittedOffset]]:
        """Yield topic, partition and committed offset of each partition that has one."""
        for topic, partitions in list(self.offsets.items()):
            for partition, committed in list(partitions.items()):
                yield topic, partition, committed


class GroupStore:
    """The groups that this broker coordinates, as a view of `__consumer_offsets`. `runtime` appends to the topic and
    applies the appended records to this object.

    `open_runtime` creates the runtime for a view. The store calls `on_offset` with every committed offset that is
    stored (with None when one is deleted or unloaded), and `on_loaded` and `on_unloaded` with the index of a partition
    whose groups were loaded or unloaded.
    """

    def __init__(
        self,
        settings: GroupSettings,
        clock: Clock,
        factory: GroupFactory,
        open_runtime: Callable[[TransactionalView], CoordinatorRuntime],
        *,
        on_offset: OffsetListener,
        on_loaded: Callable[[int], None],
        on_unloaded: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._factory = factory
        self._on_offset = on_offset
        self.on_commit: CommitListener = lambda *_: None
        """Called with a group, topic and partition, the committed offset before, -1 for none, and the new one, when it
        becomes visible; not when it is loaded."""
        self._loaded: set[int] = set()
        self._on_loaded = on_loaded
        self._on_unloaded = on_unloaded
        self.runtime = open_runtime(self)
        self.entries: dict[str, GroupEntry] = {}
        self._by_partition: dict[int, dict[str, GroupEntry]] = {}
        self._transactions: dict[int, dict[int, OpenTransaction]] = {}

    def monotonic_ms(self) -> float:
        return self._clock.monotonic() * 1000

    def partition_for(self, group_id: str) -> int:
        """Return the index of the partition of `__consumer_offsets` that stores a group."""
        return routes.partition_for(group_id, self.runtime.partition_count)

    def find(self, group_id: str) -> GroupEntry | None:
        """Return the entry of a group, or None. Raises `CoordinatorLoadInProgress` during a load, and in a cluster
        `NotCoordinator` if another broker coordinates the group."""
        self.runtime.check_available()
        if self.runtime.partition_count:
            self.runtime.check_loaded(self.partition_for(group_id))
        return self.entries.get(group_id)

    async def find_or_create(self, group_id: str) -> GroupEntry:
        """Return the entry of a group; creates the entry and the topic `__consumer_offsets` if they do not exist.
        Raises the errors of `find`, and `CoordinatorNotAvailable` if the maximum number of groups is reached or the
        topic cannot be created."""
        await self.runtime.ensure_topic_exists()
        entry = self.find(group_id)
        if entry is None:
            if len(self.entries) >= self._settings.groups_max:
                raise CoordinatorNotAvailable(f"the maximum of {self._settings.groups_max} groups is reached")
            entry = self._create(group_id, self.partition_for(group_id))
        return entry

    def remove_if_empty(self, entry: GroupEntry) -> None:
        """Remove the entry if it has no members, offsets or records."""
        if entry.is_empty and self.entries.get(entry.group.group_id) is entry:
            self.remove(entry)

    def remove(self, entry: GroupEntry) -> None:
        """Cancel the timer of an entry and remove the entry."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        group_id = entry.group.group_id
        if self.entries.get(group_id) is entry:
            del self.entries[group_id]
            del self._by_partition[entry.index][group_id]

    def entries_of_partition(self, index: int) -> list[GroupEntry]:
        """Return the entries of the groups that one partition of `__consumer_offsets` stores."""
        return list(self._by_partition.get(index, {}).values())

    def append(self, group_id: str, records: Sequence[KeyValue], *, atomic: bool = False) -> Promise[None]:
        """Append records of one group; the promise completes when they are committed. `atomic`: append all records as
        one batch, so that a crash loses either all or none of them."""
        return self.runtime.append(self.partition_for(group_id), records, atomic=atomic)

    def append_in_transaction(
        self, group_id: str, records: Sequence[tuple[bytes, bytes]], *, producer_id: int, producer_epoch: int
    ) -> Promise[None]:
        """Append offset records of one group as a batch of a producer's transaction; the promise completes when they
        are committed. See `CoordinatorRuntime.append_in_transaction`."""
        return self.runtime.append_in_transaction(
            self.partition_for(group_id), records, producer_id=producer_id, producer_epoch=producer_epoch
        )

    def has_open_transaction(self, index: int, producer_id: int, producer_epoch: int) -> bool:
        """Whether a producer has added records to a partition in a transaction that is not ended, and whose end marker
        is not expected."""
        transaction = self._transactions.get(index, {}).get(producer_id)
        return (
            transaction is not None
            and transaction.producer_epoch == producer_epoch
            and not transaction.is_ending
        )

    def expect_end(self, index: int, producer_id: int) -> None:
        """Note that the end marker of a producer's transaction may be in the log of a partition."""
        transaction = self._transactions.get(index, {}).get(producer_id)
        if transaction is not None:
            transaction.is_ending = True

    async def wait_until_committed(self, group_id: str) -> None:
        """Wait until all appended records of the partition that stores the group are committed."""
        if self.runtime.partition_count:
            await self.runtime.wait_until_committed(self.partition_for(group_id))

    def stored_metadata(self, entry: GroupEntry) -> GroupMetadata | None:
        """Decode the stored record of a classic group; None if there is none. Raises `CorruptLog`."""
        return None if entry.group_metadata_value is None else decode_group_value(entry.group_metadata_value)

    def rebuild(self, entry: GroupEntry) -> None:
        """Replace the state machine of a group by one that is created from the stored records. Raises `CorruptLog`."""
        now_ms, group_id = self.monotonic_ms(), entry.group.group_id
        entry.resolved_view = None
        keys = [(decode_group_record_key(key), value) for key, value in entry.group_records.items()]
        if any(key is not None and key.record_type in CONSUMER_GROUP_RECORD_TYPES for key, _ in keys):
            group = self._factory.consumer_group(group_id)
            for key, value in keys:
                if key is not None and key.record_type not in SHARE_GROUP_RECORD_TYPES:
                    group.apply(key, value)
            group.finish_restore(now_ms)
            entry.group = group
            return
        if any(key is not None and key.record_type in SHARE_GROUP_RECORD_TYPES for key, _ in keys):
            share = self._factory.share_group(group_id)
            for key, value in keys:
                if key is not None:
                    share.apply(key, value)
            share.finish_restore(now_ms)
            entry.group = share
            return
        classic = self._factory.classic_group(group_id)
        if entry.group_metadata_value is not None:
            classic.restore(decode_group_value(entry.group_metadata_value), now_ms)
        entry.group = classic

    def _create(self, group_id: str, index: int) -> GroupEntry:
        entry = self.entries[group_id] = GroupEntry(self._factory.classic_group(group_id), index)
        self._by_partition.setdefault(index, {})[group_id] = entry
        return entry

    # ------------------------------------------------------------------ TransactionalView

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        decoded = decode_key(key)
        if isinstance(decoded, OffsetKey):
            self._apply_offset(index, decoded, value, offset)
        elif isinstance(decoded, GroupKey):
            self._apply_classic_record(index, decoded, value)
        elif (group_key := decode_group_record_key(key)) is not None:
            self._apply_group_record(index, group_key, key, value)

    def _apply_group_record(
        self, index: int, decoded: GroupRecordKey, key: bytes, value: bytes | None
    ) -> None:
        entry = self.entries.get(decoded.group)
        if value is None:
            if entry is not None:
                entry.group_records.pop(key, None)
            return
        entry = entry or self._create(decoded.group, index)
        entry.group_records[key] = value
        if decoded.record_type == CONSUMER_GROUP_METADATA:
            # The records do not contain the time at which the last member left. The current time is an upper bound, so
            # after a load the offsets may be retained longer than necessary, never shorter.
            entry.state_timestamp_ms = self._clock.wall_ms()

    def _apply_offset(self, index: int, key: OffsetKey, value: bytes | None, offset: int) -> None:
        entry = self.entries.get(key.group)
        if value is not None:
            entry = entry or self._create(key.group, index)
            self._set_committed(entry, key.topic, key.partition, decode_offset_value(value), offset)
            return
        if entry is None:
            return
        entry.pending_offsets.pop((key.topic, key.partition), None)
        if (partitions := entry.offsets.get(key.topic)) is not None:
            partitions.pop(key.partition, None)
            if not partitions:
                del entry.offsets[key.topic]
            self._on_offset(key.group, key.topic, key.partition, None)

    def _set_committed(
        self, entry: GroupEntry, topic: str, partition: int, committed: CommittedOffset, record_offset: int
    ) -> None:
        """Set a committed offset, whose record is at `record_offset` of the log. Pending offsets of earlier records
        will not replace it."""
        offsets = entry.offsets.setdefault(topic, {})
        if entry.index in self._loaded:
            before = offsets.get(partition)
            self.on_commit(
                entry.group.group_id,
                topic,
                partition,
                -1 if before is None else before.offset,
                committed.offset,
            )
        offsets[partition] = committed
        if entry.pending_offsets and (pending := entry.pending_offsets.get((topic, partition))):
            for producer_id, each in pending.items():
                if each.record_offset < record_offset:
                    pending[producer_id] = PendingOffset(None, each.record_offset)
        self._on_offset(entry.group.group_id, topic, partition, committed)

    def add_pending(
        self, index: int, producer_id: int, producer_epoch: int, key: bytes, value: bytes, offset: int
    ) -> None:
        decoded = decode_key(key)
        if decoded is None:
            return
        if not isinstance(decoded, OffsetKey):
            raise CorruptLog(
                "__consumer_offsets: a transaction contains a record that is no committed offset"
            )
        entry = self.entries.get(decoded.group) or self._create(decoded.group, index)
        by_producer = entry.pending_offsets.setdefault((decoded.topic, decoded.partition), {})
        by_producer[producer_id] = PendingOffset(decode_offset_value(value), offset)
        transactions = self._transactions.setdefault(index, {})
        transaction = transactions.get(producer_id)
        if transaction is None:
            transaction = transactions[producer_id] = OpenTransaction(producer_epoch, offset)
        transaction.producer_epoch = producer_epoch
        transaction.first_offset = min(transaction.first_offset, offset)  # a load adds records in any order
        transaction.group_ids.add(decoded.group)

    def end_transaction(self, index: int, producer_id: int, *, is_commit: bool) -> None:
        transaction = self._transactions.get(index, {}).pop(producer_id, None)
        if transaction is None:
            return
        for group_id in transaction.group_ids:
            entry = self.entries.get(group_id)
            if entry is None:
                continue
            for (topic, partition), by_producer in list(entry.pending_offsets.items()):
                pending = by_producer.pop(producer_id, None)
                if not by_producer:
                    del entry.pending_offsets[topic, partition]
                if is_commit and pending is not None and pending.committed is not None:
                    self._set_committed(entry, topic, partition, pending.committed, pending.record_offset)
            self.remove_if_empty(entry)

    def first_pending_offset(self, index: int) -> int | None:
        transactions = self._transactions.get(index)
        return min(each.first_offset for each in transactions.values()) if transactions else None

    def _apply_classic_record(self, index: int, key: GroupKey, value: bytes | None) -> None:
        entry = self.entries.get(key.group)
        if value is None:
            if entry is not None:
                entry.group_metadata_value = None
                entry.state_timestamp_ms = -1
            return
        state_timestamp_ms = decode_group_value(value).state_ms
        entry = entry or self._create(key.group, index)
        entry.group_metadata_value = value
        entry.state_timestamp_ms = state_timestamp_ms

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        for entry in self.entries_of_partition(index):
            group_id = entry.group.group_id
            if entry.group_metadata_value is not None:
                yield encode_group_key(GroupKey(group_id)), entry.group_metadata_value
            yield from list(entry.group_records.items())
            for topic, partition, committed in entry.committed_offsets():
                yield (
                    encode_offset_key(OffsetKey(group_id, topic, partition)),
                    encode_offset_value(committed),
                )

    def finish_load(self, index: int) -> None:
        """Create the state machines of a partition's groups after a load; the sessions of all members start again.
        Raises `CorruptLog`."""
        for entry in self.entries_of_partition(index):
            if entry.group_metadata_value is not None or entry.group_records:
                self.rebuild(entry)
                entry.committed_generation = entry.generation
            self.remove_if_empty(entry)
        self._loaded.add(index)
        self._on_loaded(index)

    def unload(self, index: int) -> None:
        """Cancel the timers and remove the entries of a partition. `is_unloaded` is set, so that pending operations do
        not use an entry any more."""
        self._loaded.discard(index)
        self._transactions.pop(index, None)
        for group_id, entry in self._by_partition.pop(index, {}).items():
            entry.is_unloaded = True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            del self.entries[group_id]
            for topic, partition, _ in entry.committed_offsets():
                self._on_offset(group_id, topic, partition, None)
        self._on_unloaded(index)
