"""State of the groups on this broker: the coordinator's view of `__consumer_offsets`.

Holds an entry per group: the state machine with its members, the committed offsets, and the stored records. Offsets and
stored records change only in `apply`, that is, after they were appended to the log. The state machine of a classic
group is ahead of its stored record between the start of a rebalance and its end; that of a consumer or share group
equals its stored records except between a change and its append.

The records of a group determine its protocol: `rebuild` creates the state machine from them, after a load and whenever
a change could not be written.

Invariants:
* The group id determines the partition of a group: Java's string hash, as in Kafka, so that the topic is compatible.
* An entry that holds nothing is removed.
* An entry that was unloaded is never used again, not even if its group is loaded here once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import CoordinatorNotAvailable
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
    from mansio.broker.coordinator.view import CoordinatorView
    from mansio.ports import Clock, Promise, Timer
    from mansio.state.classic_group.group import ClassicGroup
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import Topics
    from mansio.state.share_group.group import ShareGroup
    from mansio.wire.internal_records.consumer_group_records import GroupRecordKey

    OffsetListener = Callable[[str, str, int, CommittedOffset | None], None]
    Group = ClassicGroup | ConsumerGroup | ShareGroup

_HASH_MASK: Final = 0xFFFFFFFF


class GroupEntry:
    """One group.

    `offsets`: topic -> partition -> committed offset. `classic_record`: stored value of its record as a classic group;
    `group_records`: its stored records as a consumer or share group, by key. `resolved_view`: the topics and the
    version of the group for which its regular expressions were resolved last. `index`: its partition of
    `__consumer_offsets`. `is_unloaded`: another broker, or a later load, has the group now.
    """

    __slots__ = (
        "classic_record",
        "grace_until_ms",
        "group",
        "group_records",
        "index",
        "is_unloaded",
        "offsets",
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
        self.classic_record: bytes | None = None
        self.group_records: dict[bytes, bytes] = {}
        self.resolved_view: tuple[Topics, int] | None = None
        self.state_timestamp_ms = -1  # wall clock: when the group entered its stored state
        self.timer: Timer | None = None
        self.timer_due_ms = 0.0
        self.grace_until_ms = 0.0  # after a stall of this process: no deadline applies before

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost when the entry is removed."""
        return (
            not self.offsets
            and self.classic_record is None
            and not self.group_records
            and self.group.is_idle()
        )

    @property
    def is_deleted(self) -> bool:
        """Whether its deletion is being written."""
        return self.group.state == "Dead"

    @property
    def member_count(self) -> int:
        return len(self.group.members)

    def each_offset(self) -> Iterator[tuple[str, int, CommittedOffset]]:
        for topic, partitions in list(self.offsets.items()):
            for partition, committed in list(partitions.items()):
                yield topic, partition, committed


def java_string_hash(text: str) -> int:
    """Java's `String.hashCode`: 32 bits over the UTF-16 code units; returned unsigned."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & _HASH_MASK
    return value


class GroupStore:
    """The groups of this broker. `runtime` appends to `__consumer_offsets` and applies what was appended here.

    `open_runtime` creates the runtime of the topic for a view. `on_offset` is called with every committed offset that
    is stored, or deleted or unloaded (None); `on_loaded` and `on_unloaded` with the index of a partition whose groups
    were loaded or unloaded.
    """

    def __init__(
        self,
        settings: GroupSettings,
        clock: Clock,
        factory: GroupFactory,
        open_runtime: Callable[[CoordinatorView], CoordinatorRuntime],
        *,
        on_offset: OffsetListener,
        on_loaded: Callable[[int], None],
        on_unloaded: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._factory = factory
        self._on_offset = on_offset
        self._on_loaded = on_loaded
        self._on_unloaded = on_unloaded
        self.runtime = open_runtime(self)
        self.entries: dict[str, GroupEntry] = {}
        self._by_partition: dict[int, dict[str, GroupEntry]] = {}

    def monotonic_ms(self) -> float:
        return self._clock.monotonic() * 1000

    def index_of(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that stores a group."""
        return (java_string_hash(group_id) & 0x7FFFFFFF) % self.runtime.partition_count

    def find(self, group_id: str) -> GroupEntry | None:
        """The entry of a group, if there is one. Raises `CoordinatorLoadInProgress` during a load, in a cluster
        `NotCoordinator` where another broker coordinates the group."""
        self.runtime.check_available()
        if self.runtime.partition_count:
            self.runtime.check_loaded(self.index_of(group_id))
        return self.entries.get(group_id)

    async def find_or_create(self, group_id: str) -> GroupEntry:
        """The entry of a group; creates the entry and `__consumer_offsets` if needed. Raises as `find`, and
        `CoordinatorNotAvailable`."""
        await self.runtime.ready()
        entry = self.find(group_id)
        if entry is None:
            if len(self.entries) >= self._settings.groups_max:
                raise CoordinatorNotAvailable(f"the maximum of {self._settings.groups_max} groups is reached")
            entry = self._create(group_id, self.index_of(group_id))
        return entry

    def remove_if_empty(self, entry: GroupEntry) -> None:
        if entry.is_empty and self.entries.get(entry.group.group_id) is entry:
            self.remove(entry)

    def remove(self, entry: GroupEntry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        group_id = entry.group.group_id
        if self.entries.get(group_id) is entry:
            del self.entries[group_id]
            del self._by_partition[entry.index][group_id]

    def of_partition(self, index: int) -> list[GroupEntry]:
        """The groups that one partition stores."""
        return list(self._by_partition.get(index, {}).values())

    def append(self, group_id: str, records: Sequence[KeyValue], *, whole: bool = False) -> Promise[None]:
        """Append records of one group; the promise completes when they are committed. `whole`: as one batch, which is
        also atomic in a crash."""
        return self.runtime.append(self.index_of(group_id), records, whole=whole)

    async def committed(self, group_id: str) -> None:
        """Wait until the whole known state of the group is committed."""
        if self.runtime.partition_count:
            await self.runtime.committed(self.index_of(group_id))

    def stored_metadata(self, entry: GroupEntry) -> GroupMetadata | None:
        return None if entry.classic_record is None else decode_group_value(entry.classic_record)

    def rebuild(self, entry: GroupEntry) -> None:
        """Create the state machine of a group from its stored records only. Raises `CorruptLog`."""
        now_ms, group_id = self.monotonic_ms(), entry.group.group_id
        entry.resolved_view = None
        keys = [(decode_group_record_key(key), value) for key, value in entry.group_records.items()]
        if any(key is not None and key.record_type in CONSUMER_GROUP_RECORD_TYPES for key, _ in keys):
            group = self._factory.consumer_group(group_id)
            for key, value in keys:
                if key is not None and key.record_type not in SHARE_GROUP_RECORD_TYPES:
                    group.apply(key, value)
            group.restored(now_ms)
            entry.group = group
            return
        if any(key is not None and key.record_type in SHARE_GROUP_RECORD_TYPES for key, _ in keys):
            share = self._factory.share_group(group_id)
            for key, value in keys:
                if key is not None:
                    share.apply(key, value)
            share.restored(now_ms)
            entry.group = share
            return
        classic = self._factory.classic_group(group_id)
        if entry.classic_record is not None:
            classic.restore(decode_group_value(entry.classic_record), now_ms)
        entry.group = classic

    def _create(self, group_id: str, index: int) -> GroupEntry:
        entry = self.entries[group_id] = GroupEntry(self._factory.classic_group(group_id), index)
        self._by_partition.setdefault(index, {})[group_id] = entry
        return entry

    # ------------------------------------------------------------------ CoordinatorView

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:  # noqa: ARG002 - the signature of `CoordinatorView`
        decoded = decode_key(key)
        if isinstance(decoded, OffsetKey):
            self._apply_offset(index, decoded, value)
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

    def _apply_offset(self, index: int, key: OffsetKey, value: bytes | None) -> None:
        entry = self.entries.get(key.group)
        if value is not None:
            committed = decode_offset_value(value)
            entry = entry or self._create(key.group, index)
            entry.offsets.setdefault(key.topic, {})[key.partition] = committed
            self._on_offset(key.group, key.topic, key.partition, committed)
        elif entry is not None and (partitions := entry.offsets.get(key.topic)) is not None:
            partitions.pop(key.partition, None)
            if not partitions:
                del entry.offsets[key.topic]
            self._on_offset(key.group, key.topic, key.partition, None)

    def _apply_classic_record(self, index: int, key: GroupKey, value: bytes | None) -> None:
        entry = self.entries.get(key.group)
        if value is None:
            if entry is not None:
                entry.classic_record = None
                entry.state_timestamp_ms = -1
            return
        state_timestamp_ms = decode_group_value(value).state_ms
        entry = entry or self._create(key.group, index)
        entry.classic_record = value
        entry.state_timestamp_ms = state_timestamp_ms

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        for entry in self.of_partition(index):
            group_id = entry.group.group_id
            if entry.classic_record is not None:
                yield encode_group_key(GroupKey(group_id)), entry.classic_record
            yield from list(entry.group_records.items())
            for topic, partition, committed in entry.each_offset():
                yield (
                    encode_offset_key(OffsetKey(group_id, topic, partition)),
                    encode_offset_value(committed),
                )

    def loaded(self, index: int) -> None:
        """Build the state machines of a partition's groups; the sessions of their members start again. Raises
        `CorruptLog`."""
        for entry in self.of_partition(index):
            if entry.classic_record is not None or entry.group_records:
                self.rebuild(entry)
            self.remove_if_empty(entry)
        self._on_loaded(index)

    def unload(self, index: int) -> None:
        """Cancel the timers and remove the entries of a partition. Work in progress finds its entry `is_unloaded`."""
        for group_id, entry in self._by_partition.pop(index, {}).items():
            entry.is_unloaded = True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            del self.entries[group_id]
            for topic, partition, _ in entry.each_offset():
                self._on_offset(group_id, topic, partition, None)
        self._on_unloaded(index)
