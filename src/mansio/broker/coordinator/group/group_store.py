"""What this broker knows of its groups: the view of `__consumer_offsets`.

Owns an entry per group: the state machine with its members, the committed offsets, and the group's records as
last stored. Offsets and stored records change only in `apply`, that is: after they are in the log. The machine of a
classic group runs ahead of its stored record between the start of a rebalance and its end; that of a consumer group is
what its stored records say, but for the moment between a change and its append.

Which machine a group has follows from its records: `rebuild` makes it of them, after a load and whenever a change could
not be written.

Always true: a group lives in the partition its id hashes to (Java's string hash, as Kafka has it, so that the
topic means the same to both); an entry that holds nothing is dropped; one that was unloaded is never used again, not
even when its group is loaded here once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import CoordinatorNotAvailable
from mansio.state.classic_group.group import ClassicGroup
from mansio.wire.internal_records.consumer_group_records import (
    CONSUMER_KINDS,
    GROUP_EPOCH,
    SHARE_KINDS,
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

    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.runtime import CoordinatorRuntime, KeyValue
    from mansio.ports import Clock, Promise, Timer
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import Topics
    from mansio.state.share_group.group import ShareGroup
    from mansio.wire.internal_records.consumer_group_records import GroupRecordKey

    OffsetListener = Callable[[str, str, int, CommittedOffset | None], None]
    Group = ClassicGroup | ConsumerGroup | ShareGroup

_HASH_MASK: Final = 0xFFFFFFFF


class GroupEntry:
    """One group. `offsets`: topic -> partition -> committed offset. `stored`: the value in the log of its record as a
    classic group; `modern`: its records as a group of another kind, by their keys.

    `resolved`: the topics, and the version of the group, for which its regular expressions were looked up last.
    `index`: the partition of `__consumer_offsets` it lives in. `gone`: another broker, or a later load, has it now.
    """

    __slots__ = (
        "gone",
        "grace_until_ms",
        "group",
        "index",
        "modern",
        "offsets",
        "resolved",
        "state_timestamp_ms",
        "stored",
        "timer",
        "timer_due_ms",
    )

    def __init__(self, group: Group, index: int) -> None:
        self.group: Group = group
        self.index = index
        self.gone = False
        self.offsets: dict[str, dict[int, CommittedOffset]] = {}
        self.stored: bytes | None = None
        self.modern: dict[bytes, bytes] = {}
        self.resolved: tuple[Topics, int] | None = None
        self.state_timestamp_ms = -1  # wall clock: when it came into the state that is stored
        self.timer: Timer | None = None
        self.timer_due_ms = 0.0
        self.grace_until_ms = 0.0  # after a stall: nothing is due before

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost with it."""
        return not self.offsets and self.stored is None and not self.modern and self.group.is_idle()

    @property
    def is_deleted(self) -> bool:
        """Its deletion is being written."""
        return self.group.state == "Dead"

    @property
    def member_count(self) -> int:
        return len(self.group.roster if isinstance(self.group, ClassicGroup) else self.group.members)

    def each_offset(self) -> Iterator[tuple[str, int, CommittedOffset]]:
        for topic, partitions in list(self.offsets.items()):
            for partition, committed in list(partitions.items()):
                yield topic, partition, committed


def java_string_hash(text: str) -> int:
    """`String.hashCode` of Java: 32 bits over the UTF-16 code units; the result here is not signed."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & _HASH_MASK
    return value


class GroupStore:
    """See the module. `topic` is set right after construction: the two refer to each other.

    `on_offset` is told of every committed offset of any group that is stored, or deleted or unloaded (None).
    `on_loaded` and `on_unloaded` are told of a partition whose groups have come to life, or are gone.
    """

    def __init__(
        self,
        settings: GroupSettings,
        clock: Clock,
        on_offset: OffsetListener = lambda *_: None,
        *,
        consumer_group: Callable[[str], ConsumerGroup],
        share_group: Callable[[str], ShareGroup],
    ) -> None:
        """`consumer_group` and `share_group` make an empty one of that id."""
        self._settings = settings
        self._clock = clock
        self._offset_listener = on_offset
        self.consumer_group = consumer_group
        self.share_group = share_group
        self.topic: CoordinatorRuntime
        self.entries: dict[str, GroupEntry] = {}
        self._by_partition: dict[int, dict[str, GroupEntry]] = {}
        self.on_loaded: Callable[[int], None] = lambda _: None
        self.on_unloaded: Callable[[int], None] = lambda _: None

    def monotonic_ms(self) -> float:
        return self._clock.monotonic() * 1000

    def index_of(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` a group lives in."""
        return (java_string_hash(group_id) & 0x7FFFFFFF) % self.topic.partition_count

    def find(self, group_id: str) -> GroupEntry | None:
        """The group's entry if there is one. Raises `CoordinatorLoadInProgress` while nobody can know, in a cluster
        `NotCoordinator` where another broker may."""
        self.topic.check_available()
        if self.topic.partition_count:
            self.topic.check_loaded(self.index_of(group_id))
        return self.entries.get(group_id)

    async def find_or_create(self, group_id: str) -> GroupEntry:
        """The group's entry, with everything in place to store it."""
        await self.topic.ready()
        entry = self.find(group_id)
        if entry is None:
            if len(self.entries) >= self._settings.groups_max:
                raise CoordinatorNotAvailable(f"there are {self._settings.groups_max} groups already")
            entry = self._create(group_id, self.index_of(group_id))
        return entry

    def drop_if_unused(self, entry: GroupEntry) -> None:
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
        """The groups that live in one partition."""
        return list(self._by_partition.get(index, {}).values())

    def append(self, group_id: str, records: Sequence[KeyValue], *, whole: bool = False) -> Promise[None]:
        """Append records of one group; the promise is kept when they are committed. `whole`: all of them or none, also
        after a crash."""
        return self.topic.append(self.index_of(group_id), records, whole=whole)

    async def committed(self, group_id: str) -> None:
        """Wait until all that is known of the group is committed."""
        if self.topic.partition_count:
            await self.topic.committed(self.index_of(group_id))

    # ------------------------------------------------------------------ the view

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:  # noqa: ARG002 - the signature of `CoordinatorView`
        decoded = decode_key(key)
        if isinstance(decoded, OffsetKey):
            self._apply_offset(index, decoded, value)
        elif isinstance(decoded, GroupKey):
            self._apply_group(index, decoded, value)
        elif (modern := decode_group_record_key(key)) is not None:
            self._apply_modern(index, modern, key, value)

    def _apply_modern(self, index: int, decoded: GroupRecordKey, key: bytes, value: bytes | None) -> None:
        entry = self.entries.get(decoded.group)
        if value is None:
            if entry is not None:
                entry.modern.pop(key, None)
            return
        entry = entry or self._create(decoded.group, index)
        entry.modern[key] = value
        if decoded.kind == GROUP_EPOCH:
            # Its records do not say since when a group has no members. At the latest from now on, so after a load its
            # offsets may be kept for longer than they need be, never for less.
            entry.state_timestamp_ms = self._clock.wall_ms()

    def _apply_offset(self, index: int, key: OffsetKey, value: bytes | None) -> None:
        entry = self.entries.get(key.group)
        if value is not None:
            committed = decode_offset_value(value)
            entry = entry or self._create(key.group, index)
            entry.offsets.setdefault(key.topic, {})[key.partition] = committed
            self._offset_listener(key.group, key.topic, key.partition, committed)
        elif entry is not None and (partitions := entry.offsets.get(key.topic)) is not None:
            partitions.pop(key.partition, None)
            if not partitions:
                del entry.offsets[key.topic]
            self._offset_listener(key.group, key.topic, key.partition, None)

    def _apply_group(self, index: int, key: GroupKey, value: bytes | None) -> None:
        entry = self.entries.get(key.group)
        if value is None:
            if entry is not None:
                entry.stored = None
                entry.state_timestamp_ms = -1
            return
        state_ms = decode_group_value(value).state_ms
        entry = entry or self._create(key.group, index)
        entry.stored = value
        entry.state_timestamp_ms = state_ms

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        for entry in self.of_partition(index):
            group_id = entry.group.group_id
            if entry.stored is not None:
                yield encode_group_key(GroupKey(group_id)), entry.stored
            yield from list(entry.modern.items())
            for topic, partition, committed in entry.each_offset():
                yield (
                    encode_offset_key(OffsetKey(group_id, topic, partition)),
                    encode_offset_value(committed),
                )

    def loaded(self, index: int) -> None:
        """Bring the groups of a partition to life from their stored records; the sessions of their members begin
        anew. Raises `CorruptLog`."""
        for entry in self.of_partition(index):
            if entry.stored is not None or entry.modern:
                self.rebuild(entry)
            self.drop_if_unused(entry)
        self.on_loaded(index)

    def rebuild(self, entry: GroupEntry) -> None:
        """Make the group's machine of its stored records, and of nothing else. Raises `CorruptLog`."""
        now_ms, group_id = self.monotonic_ms(), entry.group.group_id
        entry.resolved = None
        keys = [(decode_group_record_key(key), value) for key, value in entry.modern.items()]
        if any(key is not None and key.kind in CONSUMER_KINDS for key, _ in keys):
            group = self.consumer_group(group_id)
            for key, value in keys:
                if key is not None and key.kind not in SHARE_KINDS:
                    group.apply(key, value)
            group.restored(now_ms)
            entry.group = group
            return
        if any(key is not None and key.kind in SHARE_KINDS for key, _ in keys):
            share = self.share_group(group_id)
            for key, value in keys:
                if key is not None:
                    share.apply(key, value)
            share.restored(now_ms)
            entry.group = share
            return
        classic = self.classic_group(group_id)
        if entry.stored is not None:
            classic.restore(decode_group_value(entry.stored), now_ms)
        entry.group = classic

    def classic_group(self, group_id: str) -> ClassicGroup:
        """An empty one."""
        return ClassicGroup(
            group_id,
            initial_delay_ms=self._settings.initial_rebalance_delay_ms,
            size_max=self._settings.members_max,
        )

    def unload(self, index: int) -> None:
        """Timers end, entries are let go. What is under way on behalf of one finds it `gone`."""
        for group_id, entry in self._by_partition.pop(index, {}).items():
            entry.gone = True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            del self.entries[group_id]
            for topic, partition, _ in entry.each_offset():
                self._offset_listener(group_id, topic, partition, None)
        self.on_unloaded(index)

    def stored_metadata(self, entry: GroupEntry) -> GroupMetadata | None:
        return None if entry.stored is None else decode_group_value(entry.stored)

    def _create(self, group_id: str, index: int) -> GroupEntry:
        entry = self.entries[group_id] = GroupEntry(self.classic_group(group_id), index)
        self._by_partition.setdefault(index, {})[group_id] = entry
        return entry
