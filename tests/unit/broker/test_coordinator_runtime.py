"""The mechanism of internal topics: append-then-apply, load, checkpoints."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.broker.coordinator.checkpoint import (
    RECORDS_PER_YIELD,
    CheckpointStorage,
    decode_checkpoint,
    encode_checkpoint,
)
from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.errors import CoordinatorLoadInProgress, CoordinatorNotAvailable, CorruptLog, StorageError
from mansio.testing.disk import SimulatedDisk
from support.tiers import examples
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator


class DictView:
    """The simplest view: the newest value of each key."""

    def __init__(self) -> None:
        self.values: list[dict[bytes, bytes]] = [{}, {}]
        self.ready: set[int] = set()

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        if value is None:
            self.values[index].pop(key, None)
        else:
            self.values[index][key] = value

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        for key in list(self.values[index]):
            if key in self.values[index]:
                yield key, self.values[index][key]

    def finish_load(self, index: int) -> None:
        self.ready.add(index)

    def unload(self, index: int) -> None:
        self.values[index] = {}
        self.ready.discard(index)


class RuntimeBench:
    def __init__(
        self,
        partitions: list[MemoryPartition] | None = None,
        *,
        disk: SimulatedDisk | None = None,
        interval_bytes: int = 1 << 30,
        scheduler: VirtualScheduler | None = None,
    ) -> None:
        self.scheduler = scheduler or VirtualScheduler()
        self.view = DictView()
        self.partitions = partitions or []
        self.created = 0
        room = None
        if disk is not None:
            room = CheckpointStorage(disk, self.scheduler, "data/views", interval_bytes)
        self.topic = CoordinatorRuntime(
            "__views",
            view=self.view,
            create=self.create,
            scheduler=self.scheduler,
            clock=self.scheduler,
            checkpoints=room,
        )

    async def create(self) -> list[MemoryPartition]:
        self.created += 1
        turn = self.scheduler.promise()
        self.scheduler.call_later(5, turn.set_result, None)
        await turn
        self.partitions = [MemoryPartition(self.scheduler), MemoryPartition(self.scheduler)]
        return self.partitions

    def begin(self) -> RuntimeBench:
        self.scheduler.run(self.topic.start(self.partitions))
        return self

    def write(self, key: bytes, value: bytes | None, index: int = 0) -> None:
        async def work() -> None:
            await self.topic.ensure_topic_exists()
            await self.topic.append(index, [(key, value)])

        self.scheduler.run(work())

    def restarted(self, **options: object) -> RuntimeBench:
        scheduler = VirtualScheduler()
        kept = [each.after_power_loss(scheduler) for each in self.partitions]
        return RuntimeBench(kept, scheduler=scheduler, **options).begin()  # type: ignore[arg-type]  # the test knows its own types


def test_the_topic_is_created_once_by_the_first_writer() -> None:
    room = RuntimeBench().begin()
    assert room.created == 0
    first, second = (
        room.scheduler.start(room.topic.ensure_topic_exists()),
        room.scheduler.start(room.topic.ensure_topic_exists()),
    )
    room.scheduler.pass_time(5)
    assert first.done()
    assert second.done()
    assert room.created == 1


@pytest.mark.timeout(20)
def test_who_needs_a_topic_that_an_attempt_left_half_made_gets_an_error_and_the_loop_goes_on() -> None:
    room = RuntimeBench().begin()

    async def there_already() -> list[MemoryPartition]:
        return []

    room.topic._create = there_already
    with pytest.raises(CoordinatorNotAvailable, match="is being created"):
        room.scheduler.run(room.topic.ensure_topic_exists())


def test_nothing_is_written_before_the_load_began() -> None:
    room = RuntimeBench()
    with pytest.raises(CoordinatorLoadInProgress):
        room.scheduler.run(room.topic.ensure_topic_exists())


def test_an_append_is_answered_only_when_it_is_committed() -> None:
    room = RuntimeBench().begin()
    room.write(b"a", b"1")
    room.partitions[0].holds = True
    promise = room.topic.append(0, [(b"b", b"2")])
    reader = room.scheduler.start(room.topic.wait_until_committed(0))
    room.scheduler.pass_time(10_000)
    assert not promise.done()
    assert not reader.done()
    assert not room.topic.is_committed(0)
    room.partitions[0].sync()
    room.scheduler.turn()
    assert promise.done()
    assert reader.done()


def test_a_refused_append_leaves_the_view_as_it_was() -> None:
    room = RuntimeBench().begin()
    room.write(b"a", b"1")
    room.partitions[0].refuses = StorageError()
    with pytest.raises(StorageError):
        room.topic.append(0, [(b"a", b"2")])
    assert room.view.values[0] == {b"a": b"1"}


def test_the_view_after_a_power_loss_is_what_was_durable() -> None:
    room = RuntimeBench().begin()
    for number in range(10):
        room.write(b"%d" % (number % 3), b"%d" % number)
    room.write(b"0", None)
    durable = dict(room.view.values[0])
    room.partitions[0].holds = True
    room.topic.append(0, [(b"lost", b"x")])
    assert room.restarted().view.values[0] == durable == {b"1": b"7", b"2": b"8"}


def test_many_records_are_split_into_batches() -> None:
    room = RuntimeBench().begin()
    room.write(b"a", b"1")
    records = [(b"%d" % number, b"v") for number in range(2500)]
    room.topic.append(0, records)
    assert len(room.partitions[0].stored) == 4
    room.scheduler.turn()
    assert len(room.restarted().view.values[0]) == 2501


def test_an_unreadable_record_stops_its_partition_and_no_other() -> None:
    room = RuntimeBench().begin()
    room.write(b"a", b"1", 0)
    room.write(b"b", b"2", 1)
    damaged = bytearray(room.partitions[0].stored[0])
    damaged[-3] ^= 0xFF  # inside the record: its lengths no longer fit
    damaged[61] ^= 0x40
    room.partitions[0].stored[0] = bytes(damaged)
    again = room.restarted()
    with pytest.raises(CoordinatorNotAvailable):
        again.topic.check_loaded(0)
    with pytest.raises(CoordinatorNotAvailable):
        again.topic.append(0, [(b"a", b"2")])
    again.topic.check_loaded(1)
    assert again.view.values[1] == {b"b": b"2"}


def test_a_clean_stop_leaves_a_checkpoint_and_the_next_start_reads_no_log() -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk).begin()
    for number in range(5):
        room.write(b"%d" % number, b"x")
    room.scheduler.run(room.topic.close())
    again = room.restarted(disk=disk)
    assert again.partitions[0].batches_read == 0
    assert again.view.values[0] == room.view.values[0]
    again.write(b"new", b"y")
    once_more = again.restarted(disk=disk)
    assert once_more.partitions[0].batches_read == 1
    assert once_more.view.values[0] == again.view.values[0]


def test_a_checkpoint_is_written_while_writes_go_on_and_a_start_reads_little() -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk, interval_bytes=20_000).begin()
    for number in range(2000):
        room.write(b"%d" % (number % 50), b"%d" % number)
        if number % 7 == 0:
            room.write(b"%d" % (number % 50), None)
    again = room.restarted(disk=disk)
    assert again.view.values[0] == room.view.values[0]
    assert again.partitions[0].batches_read < 600


def test_a_checkpoint_never_holds_what_is_not_committed() -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk, interval_bytes=1).begin()
    room.write(b"a", b"1")
    room.scheduler.turn()
    room.partitions[0].holds = True
    room.topic.append(0, [(b"a", b"not durable")])
    room.scheduler.pass_time(10_000)
    again = room.restarted(disk=disk)
    assert again.view.values[0] == {b"a": b"1"}


def test_a_write_during_a_checkpoint_is_in_it_only_once_it_is_durable() -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk).begin()
    room.write(b"first", b"1")
    room.topic.append(0, [(b"%d" % number, b"old") for number in range(RECORDS_PER_YIELD)])
    room.scheduler.turn()
    last = b"%d" % (RECORDS_PER_YIELD - 1)

    def write_late() -> None:
        room.partitions[0].holds = True
        room.topic.append(0, [(last, b"not durable")])

    checkpoints = room.topic._checkpoints
    assert checkpoints is not None
    room.scheduler.spawn(checkpoints.write(room.topic._contexts[0]), name="checkpoint")
    room.scheduler.call_soon(write_late)  # between the first slice of the snapshot and the second
    room.scheduler.turn()
    assert room.view.values[0][last] == b"not durable"
    assert room.restarted(disk=disk).view.values[0][last] == b"old"


@pytest.mark.parametrize("harm", ["flip", "cut", "beyond"])
def test_a_bad_checkpoint_costs_time_and_nothing_else(harm: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk).begin()
    for number in range(5):
        room.write(b"%d" % number, b"x")
    room.scheduler.run(room.topic.close())
    path = "data/views/__views-0.checkpoint"
    if harm == "flip":
        disk.flip_bit(path, 150)
    elif harm == "cut":
        disk.truncate_file(path, 20)
    else:
        room.partitions[0].stored.pop()  # the log lost its end: the checkpoint is not of this log any more
        room.partitions[0].high_watermark = 4
    again = room.restarted(disk=disk)
    kept = 4 if harm == "beyond" else 5
    assert again.view.values[0] == {b"%d" % number: b"x" for number in range(kept)}
    assert len(caplog.records) == 1
    again.write(b"later", b"y")
    again.write(b"latest", b"z")
    assert again.restarted(disk=disk).view.values[0] == again.view.values[0]


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_a_crash_while_a_checkpoint_is_written_loses_nothing(seed: int) -> None:
    disk = SimulatedDisk()
    room = RuntimeBench(disk=disk).begin()
    room.write(b"a", b"1")
    room.scheduler.run(room.topic.close())
    room = room.restarted(disk=disk)
    room.write(b"a", b"2")
    disk.fail_call(seed + 1)
    room.scheduler.run(room.topic.close())
    assert room.restarted(disk=disk.crash(Random(seed))).view.values[0] == {b"a": b"2"}


def test_checkpoint_bytes_are_whole_or_refused() -> None:
    data = encode_checkpoint(7, [(b"k", b"v"), (b"", b"")])
    assert decode_checkpoint(data) == (7, [(b"k", b"v"), (b"", b"")])
    for length in range(len(data)):
        with pytest.raises(CorruptLog):
            decode_checkpoint(data[:length])


def test_compaction_learns_from_where_on_deletions_are_still_to_be_read() -> None:
    """The checkpoint knows the key as alive; only the tombstone in the log takes it away after the next start."""
    disk, scheduler = SimulatedDisk(), VirtualScheduler()
    partitions = [MemoryPartition(scheduler), MemoryPartition(scheduler)]
    first = RuntimeBench(partitions, disk=disk, scheduler=scheduler).begin()
    first.write(b"gone", b"1")
    first.write(b"kept", b"1")
    assert first.topic.replay_start_offset(0) == 0
    first.scheduler.run(first.topic.close())
    assert first.topic.replay_start_offset(0) == 2
    again = RuntimeBench(partitions, disk=disk, scheduler=scheduler).begin()
    assert again.topic.replay_start_offset(0) == 2
    again.write(b"gone", None)
    assert again.topic.replay_start_offset(0) == 2
    assert RuntimeBench(partitions, disk=disk, scheduler=scheduler).begin().view.values[0] == {b"kept": b"1"}


def test_checkpoint_with_any_bit_flipped_is_damaged() -> None:
    data = encode_checkpoint(7, [(b"key", b"value"), (b"", b"")])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptLog):
            decode_checkpoint(bytes(flipped))
