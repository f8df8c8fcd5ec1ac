"""Damaged segments of replicas on virtual time: replaced from an in-sync replica, on leaders and followers, and never
served, lost or mixed with other records meanwhile."""

from __future__ import annotations

import errno
import random
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.broker.replication.log_repairer import FREE_BYTES_MIN, RepairCounts
from mansio.errors import CorruptLog, DamagedRange, StorageError, VerificationPending
from mansio.storage.active_files import ActiveFilesInUse
from mansio.storage.log import LogSettings
from mansio.storage.repair import SYNC_BYTES, SegmentCopy
from mansio.storage.segment import Segment
from mansio.testing.disk import SimulatedDisk, SimulatedFile
from mansio.wire.batch.end_marker import EndMarker
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from support.replicas import Cluster
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Buffer
    from support.replicas import Node

SEGMENT_BYTES = 1000
COUNT = 60
DIRECTORY = "data/t-0"
SECTOR_BYTES = 4096


def value(offset: int) -> bytes:
    return b"record %d " % offset * (1 + offset % 5)


def written(seed: int = 0) -> Cluster:
    """Three brokers, 1 leads, with the same log of many segments; each was restarted, so that nothing is verified."""
    cluster = Cluster(
        seed=seed, log_settings=LogSettings(segment_bytes=SEGMENT_BYTES, index_interval_bytes=1)
    )
    cluster.run_for(1000)
    for first in range(0, COUNT, 3):
        ack = cluster[1].append(*(value(offset) for offset in range(first, first + 3)))
        cluster.run_until(lambda ack=ack: ack.settled, 10_000)
        assert ack.acknowledged, ack.error
    cluster.run_for(2000)
    for node_id in (2, 3, 1):
        cluster[node_id].log.close()
        cluster.kill(node_id)
        cluster.restart(node_id)
        cluster.elect(2 if node_id == 1 else 1)
        cluster.tell()
        cluster.run_until(lambda: len(cluster.state().isr) == 3)
    cluster.elect(1)
    cluster.tell()
    cluster.run_for(2000)
    return cluster


def segments(node: Node) -> list[str]:
    return [f"{DIRECTORY}/{name}" for name in node.disk.list_directory(DIRECTORY) if name.endswith(".log")]


def flip(node: Node, path: str, position: int) -> None:
    node.disk.flip_bit(path, 8 * position + 3)


def values_read(partition: Partition, *, within: Cluster | None = None) -> dict[int, bytes | None]:
    """Everything that a reader of this replica gets, without what it gets an error for."""
    found: dict[int, bytes | None] = {}
    offset = partition.start_offset
    waited = 0
    while offset < partition.high_watermark:
        try:
            part = partition.read(offset, 1)
        except VerificationPending:
            assert within is not None
            waited += 1
            assert waited < 3000
            within.run_for(10)
        except CorruptLog:
            offset += 1
        else:
            assert part is not None
            for record in read_records(part.read(), output_bytes_max=1 << 20):
                found[record.offset] = record.value
            offset = part.next_offset
    return found


ALL = {offset: value(offset) for offset in range(COUNT)}


@pytest.mark.parametrize("node_id", [1, 2], ids=["leader", "follower"])
@pytest.mark.parametrize("kind", ["flip", "cut", "cut to nothing", "missing", "length"])
def test_damage_is_repaired_from_a_replica_and_the_file_is_the_same_as_before(
    node_id: int, kind: str
) -> None:
    cluster = written()
    node = cluster[node_id]
    path = segments(node)[2]
    before = node.disk.files()[path]
    if kind == "flip":
        flip(node, path, len(before) // 2)
    elif kind == "length":
        flip(node, path, 8)
    elif kind == "missing":
        node.disk.remove(path)
    else:
        node.disk.truncate_file(path, 0 if kind == "cut to nothing" else len(before) // 2)
    node.scrub()
    cluster.run_until(lambda: node.repairer.counts.ranges > 0 or node.repairer.counts.failures)
    assert node.repairer.counts.failures == 0
    cluster.run_for(1000)
    assert node.disk.files()[path] == before
    assert not node.storage_health.damaged
    assert len(cluster.state().isr) == 3
    assert values_read(node.partition, within=cluster) == ALL
    cluster.check_same()


@pytest.mark.parametrize("node_id", [1, 2], ids=["leader", "follower"])
def test_transactions_whose_markers_were_damaged_are_decided_after_the_repair(node_id: int) -> None:
    cluster = Cluster(log_settings=LogSettings(segment_bytes=SEGMENT_BYTES, index_interval_bytes=1))
    cluster.run_for(1000)
    leader = cluster[1].partition
    for sequence, is_commit in enumerate((False, True, True)):
        records: list[Any] = [(1000, None, b"%d" % sequence, ())]
        data = build_batch(
            records, producer_id=7, producer_epoch=0, base_sequence=sequence, transactional=True
        )
        leader.append(data, transactional=True)
        if not sequence:
            marker_at = leader.log.size_bytes
        leader.append_marker(EndMarker(7, 0, is_commit, 3))
    for number in range(30):
        cluster[1].append(b"plain %d" % number * 20)
    cluster.run_until(lambda: leader.high_watermark == leader.end_offset)
    cluster.run_for(2000)
    cluster.kill(node_id)
    disk = cluster[node_id].disk
    for name in disk.list_directory(DIRECTORY):
        if name.endswith(".producers"):
            disk.remove(f"{DIRECTORY}/{name}")
    path = segments(cluster[node_id])[0]
    disk.flip_bit(path, 8 * (marker_at + 16))
    node = cluster.restart(node_id)
    assert not node.storage_health.damaged, "the damage is reported when the partition can be found"
    producers = node.partition.producers
    assert producers is not None
    assert producers.transactions.first_undecided_offset == 0
    cluster.elect(3 - node_id)
    cluster.tell()
    cluster.run_until(lambda: node.repairer.counts.ranges)
    cluster.run_for(1000)
    assert not producers.transactions.open
    assert [one.first_offset for one in producers.transactions.aborted()] == [0]
    assert node.partition.last_stable_offset == node.partition.high_watermark == node.log.end_offset
    assert not node.storage_health.damaged


def test_damage_that_was_reported_before_the_repairer_starts_is_repaired() -> None:
    cluster = written()
    node = cluster[2]
    path = segments(node)[2]
    before = node.disk.files()[path]
    cluster.kill(2)
    flip(node, path, len(before) // 2)
    node = cluster.restart(2)
    offset = int(path.rpartition("/")[2].partition(".")[0])
    waiting = node.repairer
    node.storage_health._damage_listeners.clear()
    node.partition.report_damage(offset, CorruptLog("found while the partition was opened"))
    waiting.start()
    cluster.run_until(lambda: waiting.counts.ranges)
    cluster.run_for(1000)
    assert node.disk.files()[path] == before


def test_reader_of_a_damaged_leader_waits_for_the_repair_and_gets_no_error() -> None:
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[1], 200)
    reads: list[int] = []
    offset = 0
    while offset < COUNT:
        try:
            part = leader.partition.read(offset, 1)
        except VerificationPending:
            cluster.run_for(5)
            continue
        assert part is not None
        reads += [record.offset for record in read_records(part.read(), output_bytes_max=1 << 20)]
        offset = part.next_offset
    assert reads == list(range(COUNT))
    assert leader.repairer.counts.ranges == 1


def test_damage_that_no_replica_can_repair_is_an_error_for_readers_until_one_can() -> None:
    cluster = written()
    leader = cluster[1]
    cluster.network.isolate(1)
    flip(leader, segments(leader)[1], 200)
    found = values_read(leader.partition, within=cluster)
    lost = ALL.keys() - found.keys()
    assert len(lost) == 3
    assert found == {offset: ALL[offset] for offset in found}
    assert leader.repairer.counts.failures > 0
    cluster.network.cut.clear()
    cluster.run_until(lambda: leader.repairer.counts.ranges == 1, 200_000)
    assert values_read(leader.partition, within=cluster) == ALL


def test_replicas_that_are_damaged_in_different_places_repair_each_other() -> None:
    cluster = written()
    for node_id in (1, 2, 3):
        node = cluster[node_id]
        for number, path in enumerate(segments(node)[:-1]):
            if number % 3 == node_id - 1:
                flip(node, path, 100)
    for node_id in (1, 2, 3):
        cluster[node_id].scrub()
    cluster.run_until(
        lambda: not any(cluster[node_id].storage_health.damaged for node_id in (1, 2, 3)), 60_000
    )
    cluster.run_for(20_000)
    cluster.check_same()
    for node_id in (1, 2, 3):
        assert cluster[node_id].repairer.counts.ranges
        assert values_read(cluster[node_id].partition, within=cluster) == ALL


def test_damage_in_the_active_segment_is_repaired_after_a_roll() -> None:
    cluster = written()
    leader = cluster[1]
    active = segments(leader)[-1]
    before = leader.disk.files()[active]
    flip(leader, active, 100)
    assert values_read(leader.partition, within=cluster) == ALL
    assert leader.repairer.counts.ranges == 1
    repaired = leader.disk.files()[active]
    assert before[: len(repaired)] == repaired
    assert not before[len(repaired) :].strip(b"\0")
    ack = leader.append(b"later")
    cluster.run_until(lambda: ack.settled)
    assert ack.acknowledged


def test_a_repair_waits_until_the_active_segment_may_be_rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others have taken all files of active segments, it is not a failure."""
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[-1], 100)
    roll = leader.log.roll
    attempts: list[Callable[[], object]] = []

    def refuse_first() -> bool:
        if not attempts:
            raise ActiveFilesInUse("others have taken all files")
        return roll()

    def wait(_: object, attempt: Callable[[], object], __: object) -> bool:
        attempts.append(attempt)
        leader.scheduler.call_later(20, attempt)
        return True

    monkeypatch.setattr(leader.log, "roll", refuse_first)
    monkeypatch.setattr(leader.log, "wait_for_file", wait)
    assert values_read(leader.partition, within=cluster) == ALL
    assert len(attempts) == 1
    assert leader.repairer.counts.ranges == 1
    assert leader.repairer.counts.failures == 0


def test_batch_of_another_leader_epoch_is_not_taken_over() -> None:
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[1], 200)
    known = leader.log.leader_epochs
    leader.log.leader_epochs = SimpleNamespace(  # type: ignore[assignment]  # enough of one
        **{name: getattr(known, name) for name in ("entries", "latest_epoch", "trim_to", "end_offset_for")},
        epoch_for_offset=lambda _: 99,
    )
    found = values_read(leader.partition, within=cluster)
    assert leader.repairer.counts.ranges == 0
    assert leader.repairer.counts.failures
    assert found == {offset: ALL[offset] for offset in found}
    assert len(ALL) - len(found) == 3


@pytest.mark.parametrize("seed", range(examples(8, 30)))
def test_crash_in_the_middle_of_a_repair_leaves_the_old_or_the_repaired_segment(seed: int) -> None:
    cluster = written(seed)
    chance = random.Random(seed)
    node = cluster[2]
    path = segments(node)[1]
    before = node.disk.files()[path]
    node.disk.truncate_file(path, chance.randrange(len(before)))
    damaged = node.disk.files()[path]
    node.scrub()
    cluster.run_until(lambda: bool(node.storage_health.damaged))
    if seed % 2:
        cluster.run_until(lambda: node.repairer.counts.ranges > 0)
    else:
        cluster.run_for(chance.uniform(0, 120))
    cluster.kill(2, power=True)
    node = cluster.restart(2)
    assert node.disk.files()[path] in (before, damaged)
    assert not [name for name in node.disk.list_directory(DIRECTORY) if name.endswith(".log.tmp")]
    cluster.elect(1)
    cluster.tell()
    node.scrub()
    cluster.run_for(20_000)
    assert node.disk.files()[path] == before
    assert values_read(node.partition, within=cluster) == ALL
    cluster.check_same()


def test_failing_disk_call_in_a_repair_is_retried_and_the_log_stays_in_service() -> None:
    cluster = written()
    node = cluster[2]
    path = segments(node)[1]
    before = node.disk.files()[path]
    for number in range(1, 40, examples(6, 2, 2)):
        flip(node, path, len(before) // 2)
        node.log.forget_checks()
        node.disk.fail_call(number)
        node.scrub()
        cluster.run_for(40_000)
        node.disk.clear_failures()
        cluster.run_for(120_000)
        if node.log.failure is not None:  # a flush of the log failed, not the repair
            cluster.kill(2)
            node = cluster.restart(2)
            node.scrub()
            cluster.run_for(120_000)
        assert node.disk.files()[path] == before
    assert node.repairer.counts.ranges


@contextmanager
def copies_written() -> Iterator[list[int]]:
    """Sizes of what repairs write into copies of segments."""
    sizes: list[int] = []
    add = SegmentCopy.add

    def counted(self: SegmentCopy, batches: Buffer) -> None:
        sizes.append(len(batches))
        add(self, batches)

    SegmentCopy.add = counted  # until the end of the test
    try:
        yield sizes
    finally:
        SegmentCopy.add = add


def test_defect_in_the_repair_of_one_segment_neither_holds_up_readers_nor_other_repairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = written()
    leader = cluster[1]
    read, calls = leader.repairer.read, []

    async def defective(*arguments: Any) -> tuple[int, bytes]:
        calls.append(arguments)
        if len(calls) <= 2:
            raise ValueError("a defect")
        return await read(*arguments)

    monkeypatch.setattr(leader.repairer, "read", defective)
    flip(leader, segments(leader)[1], 200)
    found = values_read(leader.partition, within=cluster)
    assert len(ALL.keys() - found.keys()) == 3
    assert leader.repairer.counts.failures == 1
    flip(leader, segments(leader)[2], 200)
    cluster.run_for(10_000)
    assert values_read(leader.partition, within=cluster) == ALL


def test_reader_of_damage_that_is_found_during_a_repair_waits_for_the_next_one() -> None:
    cluster = written()
    leader = cluster[1]
    bases = leader.log.segment_base_offsets()
    for path in (segments(leader)[0], segments(leader)[2]):
        flip(leader, path, 100)
    with pytest.raises(VerificationPending):
        leader.partition.read(bases[0], 1)
    cluster.run_until(lambda: leader.storage_health.damaged)
    for _ in range(3000):
        try:
            if leader.partition.read(bases[2], 1) is not None:
                break
        except VerificationPending:
            cluster.run_for(1)
    assert leader.repairer.counts.ranges == 2
    assert values_read(leader.partition, within=cluster) == ALL


@pytest.mark.parametrize("start_offset", [24, 28], ids=["between batches", "within the damaged batch"])
def test_damage_below_the_start_of_the_log_does_not_keep_the_rest_of_the_segment_from_repair(
    start_offset: int,
) -> None:
    cluster = written()
    leader = cluster[1]
    path = segments(leader)[1]
    positions = [at for at, _ in iterate_batches(leader.disk.files()[path])]
    leader.partition.delete_records(start_offset)
    cluster.run_for(3000)
    assert leader.log.durable_start_offset == start_offset
    for number in (0, 3):  # offsets 18 to 20 and 27 to 29
        flip(leader, path, positions[number] + 70)
    leader.scrub()
    cluster.run_for(5000)
    wanted = {offset: kept for offset, kept in ALL.items() if offset >= 27}
    assert wanted.items() <= values_read(leader.partition, within=cluster).items()
    assert leader.repairer.counts.failures == 0
    assert not leader.storage_health.damaged
    leader.log.verify()
    leader.log.close()
    cluster.kill(1)
    leader = cluster.restart(1)
    leader.scrub()
    cluster.elect(2)
    cluster.tell()
    cluster.run_until(lambda: len(cluster.state().isr) == 3)
    cluster.elect(1)
    cluster.tell()
    cluster.run_for(2000)
    assert leader.partition.start_offset == start_offset
    assert wanted.items() <= values_read(leader.partition, within=cluster).items()


def test_damage_below_the_start_of_the_log_alone_is_neither_reported_nor_repaired() -> None:
    cluster = written()
    leader = cluster[1]
    path = segments(leader)[1]
    leader.partition.delete_records(24)
    cluster.run_for(3000)
    flip(leader, path, 100)
    leader.scrub()
    cluster.run_for(5000)
    assert not leader.storage_health.damaged
    assert leader.repairer.counts == RepairCounts()


def test_repair_without_another_replica_writes_nothing_and_begins_when_one_is_in_sync(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = written()
    leader = cluster[1]
    path = segments(leader)[1]
    sources, leader.repairer._sources = leader.repairer._sources, lambda _: []
    flip(leader, path, len(leader.disk.files()[path]) - 20)
    with copies_written() as written_sizes:
        leader.scrub()
        cluster.run_for(300_000)
        assert not written_sizes
    assert leader.repairer.counts.failures == 1
    assert [each.message for each in caplog.records].count("repair_failed") == 1
    leader.repairer._sources = sources
    cluster.run_for(61_000)
    assert leader.repairer.counts.ranges == 1
    assert values_read(leader.partition, within=cluster) == ALL


def test_damage_that_every_replica_has_is_not_copied_again_and_again() -> None:
    cluster = written()
    leader = cluster[1]
    path = segments(leader)[1]
    at = len(leader.disk.files()[path]) - 20
    for node_id in (1, 2, 3):
        flip(cluster[node_id], path, at)
    with copies_written() as written_sizes:
        leader.scrub()
        cluster.run_for(300_000)
        assert not written_sizes
    assert leader.repairer.counts.failures <= 4  # one for each reason
    cluster[3].disk.flip_bit(path, 8 * at + 3)
    cluster[3].log.forget_checks()
    cluster.run_for(120_000)
    assert leader.repairer.counts.ranges == 1


def test_segment_that_was_compacted_is_not_repaired_again_and_again() -> None:
    cluster = written()
    leader = cluster[1]
    leader.log._segments.sparse_end_offset = COUNT
    flip(leader, segments(leader)[1], 200)
    requests: list[bytes] = []
    cluster.network.spy = lambda sender, _, request: (
        requests.append(request) if sender == 1 and b"mansio-repair" in request else None
    )
    with copies_written() as written_sizes:
        leader.scrub()
        cluster.run_for(300_000)
        assert not written_sizes
    assert not requests
    assert leader.repairer.counts.failures == 1


@pytest.mark.full
def test_repair_whose_copy_cannot_be_used_is_retried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = written()
    leader = cluster[1]

    def failing(*_: object) -> bool:
        raise StorageError("not intact")

    with monkeypatch.context() as patched, copies_written() as written_sizes:
        patched.setattr(SegmentCopy, "verify", failing)
        flip(leader, segments(leader)[1], 200)
        leader.scrub()
        cluster.run_for(600_000)
        assert 1 < len(written_sizes) / 3 < 7
    assert leader.repairer.counts.failures == 1
    cluster.run_for(600_000)
    assert leader.repairer.counts.ranges == 1


def test_repair_waits_for_space_for_the_copy() -> None:
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[1], 200)
    leader.disk.capacity_bytes = sum(map(len, leader.disk.files().values())) + 1000
    with copies_written() as written_sizes:
        leader.scrub()
        cluster.run_for(200_000)
        assert not written_sizes
    assert leader.repairer.counts.failures == 1
    leader.disk.capacity_bytes += FREE_BYTES_MIN
    cluster.run_for(61_000)
    assert leader.repairer.counts.ranges == 1


def test_copy_is_flushed_in_steps_while_it_is_written() -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    segment = Segment("data", 0)
    copy = SegmentCopy(disk, segment, index_interval_bytes=4096)
    flushed = 0
    disk.fail_when = lambda operation, _: sizes.append(copy.size) if operation == "sync" else None
    sizes: list[int] = []
    for _ in range(10):
        copy.add(bytes(1 << 20))
    for size in (*sizes, copy.size):
        assert size - flushed <= SYNC_BYTES
        flushed = size


def test_repair_in_a_log_that_is_being_removed_leaves_its_directory_alone() -> None:
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[1], 200)
    leader.scrub()
    with copies_written() as written_sizes:
        cluster.run_until(lambda: written_sizes)
        leader.partition.close(save=False)
        leader.log.close(save=False)
        calls: list[str] = []
        leader.disk.fail_when = lambda operation, _: calls.append(operation)
        cluster.run_for(5000)
        assert "remove" not in calls


@contextmanager
def bad_sector(node: Node, path: str, position: int) -> Iterator[None]:
    """Reads of the sector of this byte of the file that has this path now fail; the others succeed."""
    inode = node.disk._inode(path)
    read_at = SimulatedFile.read_at
    first = position // SECTOR_BYTES * SECTOR_BYTES

    def failing(self: SimulatedFile, length: int, at: int) -> bytes:
        if self._inode is inode and at < first + SECTOR_BYTES and first < at + length:
            raise OSError(errno.EIO, "Input/output error")
        return read_at(self, length, at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SimulatedFile, "read_at", failing)
        yield


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("finder", ["scrub", "reader", "load"])
def test_part_that_the_disk_cannot_read_is_reported_and_repaired(finder: str, *, verified: bool) -> None:
    cluster = written()
    leader = cluster[1]
    if verified:
        assert values_read(leader.partition, within=cluster) == ALL
    path = segments(leader)[1]
    with bad_sector(leader, path, 500):
        if finder == "scrub":
            leader.scrub()
        elif finder == "load":
            coordinator_of(leader)
        else:
            with pytest.raises((StorageError, VerificationPending)):
                leader.partition.read(25, 1)
        cluster.run_until(lambda: leader.storage_health.damaged)
        cluster.run_until(lambda: leader.repairer.counts.ranges)
        cluster.run_for(5000)
        assert not leader.storage_health.damaged
        assert leader.repairer.counts.failures == 0
        assert values_read(leader.partition, within=cluster) == ALL
        cluster.check_same()


def test_part_that_the_disk_cannot_read_is_an_error_where_no_replica_can_repair_it() -> None:
    cluster = written()
    leader = cluster[1]
    leader.repairer._sources = lambda _: []
    with bad_sector(leader, segments(leader)[1], 500):
        found = values_read(leader.partition, within=cluster)
        assert found == {offset: ALL[offset] for offset in ALL if not 18 <= offset < 33}  # one sector
        with pytest.raises(DamagedRange, match="Input/output error"):
            leader.partition.read(20, 1)
        assert leader.storage_health.damaged


def coordinator_of(node: Node) -> CoordinatorRuntime:
    """A coordinator that loads the partition of a broker."""

    class View:
        def apply(self, *_: object) -> None: ...
        def snapshot(self, _: int) -> Iterator[tuple[bytes, bytes]]:
            return iter(())

        def finish_load(self, _: int) -> None: ...
        def unload(self, _: int) -> None: ...

    async def create() -> list[Any]:
        return []

    coordinator = CoordinatorRuntime(
        "t", view=View(), create=create, scheduler=node.scheduler, clock=node.clock, checkpoints=None
    )
    node.scheduler.spawn(coordinator.start([node.partition]), name="load")
    return coordinator


@pytest.mark.parametrize("segment", [1, -1], ids=["closed", "active"])
@pytest.mark.parametrize("position", [100, 9], ids=["content", "length"])
def test_damage_that_the_load_of_a_coordinator_finds_is_reported_and_repaired(
    segment: int, position: int
) -> None:
    cluster = written()
    leader = cluster[1]
    path = segments(leader)[segment]
    assert leader.log.recovery.end_offset == COUNT
    flip(leader, path, position)
    coordinator = coordinator_of(leader)
    cluster.run_until(lambda: leader.storage_health.damaged)
    cluster.run_until(lambda: leader.repairer.counts.ranges)
    cluster.run_for(60_000)
    assert not leader.storage_health.damaged
    if coordinator._contexts[0].failure is not None:  # a single node loads once
        coordinator = coordinator_of(leader)
        cluster.run_for(1000)
    assert coordinator.is_loaded
    assert values_read(leader.partition, within=cluster) == ALL


def test_segment_that_was_repaired_is_not_copied_again_for_the_sake_of_one_that_cannot_be() -> None:
    cluster = written()
    leader = cluster[1]
    first, second = segments(leader)[:2]
    flip(leader, first, 100)
    for node_id in (1, 2, 3):
        flip(cluster[node_id], second, 100)
    sources, leader.repairer._sources = leader.repairer._sources, lambda _: []
    values_read(leader.partition, within=cluster)
    leader.repairer._sources = sources
    with copies_written() as written_sizes:
        cluster.run_for(120_000)
        assert leader.repairer.counts.ranges == 1
        del written_sizes[:]
        cluster.run_for(300_000)
        assert not written_sizes
