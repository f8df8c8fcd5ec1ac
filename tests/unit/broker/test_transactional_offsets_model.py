"""Random histories of commits, transactional commits, markers, deletions, expiry, compaction and reloads against a
model: the visible offset of a partition is the one with the highest record offset in the log above the last deletion,
among those that were committed outside of transactions or in committed transactions."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.broker.routing.caller import ANONYMOUS
from mansio.testing.disk import SimulatedDisk
from support.tiers import examples
from unit.broker.transactional_offsets_fixtures import TOPIC, OffsetsRoom

if TYPE_CHECKING:
    from mansio.wire.batch.end_marker import EndMarker

GROUPS = ("a", "b", "c")
PARTITIONS = range(2)
PRODUCERS = (11, 12, 13)
RETENTION_MS = 1000
STEPS = 60

Key = tuple[str, int]


class Written(NamedTuple):
    """A record of an offset in the log; `transaction` is None outside of transactions."""

    record_offset: int
    key: Key
    committed: int
    commit_ms: int
    transaction: int | None


class Model:
    """What was written, by partition of `__consumer_offsets`."""

    def __init__(self) -> None:
        self.written: list[tuple[int, Written]] = []
        self.deleted: dict[Key, int] = {}
        self.results: dict[int, bool | None] = {}
        """Transaction -> whether it was committed, None while it is open."""

    def newest(self, key: Key) -> Written | None:
        found = [
            each
            for _, each in self.written
            if each.key == key
            and each.record_offset > self.deleted.get(key, -1)
            and (each.transaction is None or self.results[each.transaction])
        ]
        return max(found, default=None)

    def is_pending(self, key: Key) -> bool:
        return any(
            each.key == key
            and each.record_offset > self.deleted.get(key, -1)
            and each.transaction is not None
            and self.results[each.transaction] is None
            for _, each in self.written
        )

    def first_open_offset(self, index: int) -> int | None:
        """The first offset of an open transaction; deletions do not end it."""
        return min(
            (
                each.record_offset
                for at, each in self.written
                if at == index and each.transaction is not None and self.results[each.transaction] is None
            ),
            default=None,
        )

    def aborted_offsets(self, index: int) -> set[int]:
        return {
            each.record_offset
            for at, each in self.written
            if at == index and each.transaction is not None and self.results[each.transaction] is False
        }


class History:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.model = Model()
        has_checkpoints = self.random.random() < 0.6
        self.room = OffsetsRoom(
            self.random.choice((1, 2)),
            disk=SimulatedDisk() if has_checkpoints else None,
            interval_bytes=self.random.choice((1, 300, 1 << 30)),
            offsets_retention_ms=RETENTION_MS,
        )
        self.room.run(self.room.groups.ensure_topic_exists())
        self.open: dict[tuple[int, int], int] = {}
        """(partition of `__consumer_offsets`, producer id) -> open transaction."""
        self.late: list[tuple[int, EndMarker]] = []
        """Markers in the log of which the coordinator does not know yet."""
        self.epochs = dict.fromkeys(PRODUCERS, 0)
        self.offset = 0

    def run(self) -> None:
        steps = {
            self.commit: 6,
            self.commit_in_transaction: 8,
            self.end_transaction: 4,
            self.apply_late_marker: 3,
            self.delete_offset: 2,
            self.delete_group: 1,
            self.delete_topic: 0.3,
            self.expire: 1,
            self.compact: 2,
            self.restart: 2,
        }
        for _ in range(STEPS):
            [step] = self.random.choices(list(steps), list(steps.values()))
            step()
            self.check()

    def draw(self) -> tuple[str, list[int], int]:
        group = self.random.choice(GROUPS)
        partitions = self.random.sample(PARTITIONS, self.random.choice((1, 1, 2)))
        return group, partitions, self.room.index_of(group)

    def note(self, group: str, partitions: list[int], transaction: int | None, base: int) -> None:
        index, now_ms = self.room.index_of(group), self.room.scheduler.wall_ms()
        for delta, partition in enumerate(partitions):
            written = Written(base + delta, (group, partition), self.offset + delta, now_ms, transaction)
            self.model.written.append((index, written))

    def offsets(self, partitions: list[int]) -> list[OffsetToCommit]:
        self.offset += 10
        return [OffsetToCommit(TOPIC, each, self.offset + delta) for delta, each in enumerate(partitions)]

    def commit(self) -> None:
        group, partitions, index = self.draw()
        base = self.room.partitions[index].end_offset
        assert not any(
            self.room.run(self.room.service.commit_offsets(group, self.offsets(partitions), caller=ANONYMOUS))
        )
        self.note(group, partitions, None, base)

    def commit_in_transaction(self) -> None:
        group, partitions, index = self.draw()
        producer = self.random.choice(PRODUCERS)
        if any((at, each.producer_id) == (index, producer) for at, each in self.late):
            return  # a producer begins a transaction only after the end of the last one
        transaction = self.open.get((index, producer))
        if transaction is None:
            transaction = self.open[index, producer] = len(self.model.results)
            self.model.results[transaction] = None
            self.epochs[producer] += self.random.choice((0, 1))
        base = self.room.partitions[index].end_offset
        work = self.room.service.commit_offsets_in_transaction(
            "x", group, producer, self.epochs[producer], self.offsets(partitions), adds=True, caller=ANONYMOUS
        )
        assert not any(self.room.run(work))
        self.note(group, partitions, transaction, base)

    def end_transaction(self) -> None:
        if not self.open:
            return
        index, producer = self.random.choice(list(self.open))
        is_commit = self.random.random() < 0.7
        for at, known in self.late:
            if (at, known.producer_id) == (index, producer):
                is_commit = known.is_commit  # a repeated request has the same result
        marker = self.room.write_marker(index, producer, self.epochs[producer], is_commit=is_commit)
        self.late.append((index, marker))
        if self.random.random() < 0.6:
            self.apply_late_marker()

    def apply_late_marker(self) -> None:
        if self.late:
            index, marker = self.late.pop(self.random.randrange(len(self.late)))
            self.room.groups.offsets.apply_marker(index, marker)
            self.ended(index, marker)
            if self.random.random() < 0.2:  # once more, as after a repeated request
                self.room.groups.offsets.apply_marker(index, marker)

    def ended(self, index: int, marker: EndMarker) -> None:
        transaction = self.open.pop((index, marker.producer_id), None)
        if transaction is not None:
            self.model.results[transaction] = marker.is_commit

    def known(self, group: str) -> list[Key]:
        keys = [(group, each) for each in PARTITIONS]
        return [key for key in keys if self.model.newest(key) is not None or self.model.is_pending(key)]

    def tombstoned(self, keys: list[Key], index: int) -> None:
        for key in keys:
            self.model.deleted[key] = self.room.partitions[index].end_offset - 1

    def delete_offset(self) -> None:
        group, partitions, index = self.draw()
        if not self.known(group):
            return
        wanted = [(TOPIC, each) for each in partitions]
        assert not any(self.room.run(self.room.service.delete_offsets(group, wanted, caller=ANONYMOUS)))
        self.tombstoned([(group, each) for each in partitions], index)

    def delete_group(self) -> None:
        group, _, index = self.draw()
        exists = bool(self.known(group))
        [error] = self.room.run(self.room.service.delete([group], caller=ANONYMOUS))
        assert (error is None) == exists
        self.tombstoned([(group, each) for each in PARTITIONS], index)

    def delete_topic(self) -> None:
        self.room.run(self.room.groups.offsets.delete_offsets_of_topic(TOPIC))
        for group in GROUPS:
            self.tombstoned([(group, each) for each in PARTITIONS], self.room.index_of(group))

    def expire(self) -> None:
        self.room.scheduler.pass_time(RETENTION_MS * self.random.choice((0.5, 1)))
        now_ms = self.room.scheduler.wall_ms()
        self.room.run(self.room.groups.offset_expiration.expire())
        for group in GROUPS:
            for partition in PARTITIONS:
                newest = self.model.newest((group, partition))
                if (
                    newest is not None
                    and now_ms - newest.commit_ms >= RETENTION_MS
                    and not self.model.is_pending((group, partition))
                ):
                    self.tombstoned([(group, partition)], self.room.index_of(group))

    def compact(self) -> None:
        """Compact up to the first open transaction."""
        for index, partition in enumerate(self.room.partitions):
            first_open = self.model.first_open_offset(index)
            aborted = self.model.aborted_offsets(index)
            floor = self.room.groups.runtime.replay_start_offset(index)
            partition.compact(
                partition.end_offset if first_open is None else first_open,
                partial(lambda aborted, header: header.base_offset in aborted, aborted),
                now_ms=self.room.scheduler.wall_ms(),
                tombstone_floor=1 << 62 if floor is None else floor,
            )
        self.room.scheduler.pass_time(1)  # tombstones that were found are due at the next compaction

    def restart(self) -> None:
        self.room = self.room.restarted(is_clean=self.random.random() < 0.4)
        self.room.groups.runtime.check_all_loaded()
        for index, marker in self.late:  # the load has read them
            self.ended(index, marker)
        late, self.late = self.late, []
        if late and self.random.random() < 0.5:  # another request for a marker that is known
            index, marker = late[0]
            self.room.groups.offsets.apply_marker(index, marker)

    def check(self) -> None:
        visible: dict[Any, Any] = {}
        for group in GROUPS:
            newest = {each: self.model.newest((group, each)) for each in PARTITIONS}
            pending = {each for each in PARTITIONS if self.model.is_pending((group, each))}
            wanted = {(TOPIC, each): found.committed for each, found in newest.items() if found is not None}
            visible |= {(group, *key): offset for key, offset in wanted.items()}
            every = [(TOPIC, each) for each in PARTITIONS]
            found = self.room.run(
                self.room.service.fetch_offsets(group, requires_stable=False, caller=ANONYMOUS)
            ).committed
            assert {key: each.offset for key, each in found.items()} == wanted
            stable = self.room.run(self.room.service.fetch_offsets(group, every, caller=ANONYMOUS))
            assert stable.unstable == {(TOPIC, each) for each in pending}
            assert {key: each.offset for key, each in stable.committed.items()} == {
                key: offset for key, offset in wanted.items() if key[1] not in pending
            }
            assert (group in self.room.groups.store.entries) == bool(wanted or pending)
        assert {key: each.offset for key, each in self.room.reported.items()} == visible


@pytest.mark.parametrize("first", range(0, examples(40, 500), 20))
def test_visible_and_pending_offsets_follow_the_order_of_the_log(first: int) -> None:
    for seed in range(first, first + 20):
        History(seed).run()
