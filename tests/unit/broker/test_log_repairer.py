"""Damaged segments of replicas on virtual time: replaced from an in-sync replica, on leaders and followers, and never
served, lost or mixed with other records meanwhile."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from mansio.errors import CorruptLog, VerificationPending
from mansio.storage.log import LogSettings
from mansio.wire.batch.record_reader import read_records
from support.replicas import Cluster

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition
    from support.replicas import Node

SEGMENT_BYTES = 1000
COUNT = 60
DIRECTORY = "data/t-0"


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
            for record in read_records(part.read(), max_output_bytes=1 << 20):
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
        reads += [record.offset for record in read_records(part.read(), max_output_bytes=1 << 20)]
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


def test_batch_of_another_leader_epoch_is_not_taken_over() -> None:
    cluster = written()
    leader = cluster[1]
    flip(leader, segments(leader)[1], 200)
    known = leader.log.leader_epochs
    leader.log.leader_epochs = SimpleNamespace(  # type: ignore[assignment]  # enough of one
        **{name: getattr(known, name) for name in ("entries", "last", "trim_to", "end_offset_for")},
        epoch_at=lambda _: 99,
    )
    found = values_read(leader.partition, within=cluster)
    assert leader.repairer.counts.ranges == 0
    assert leader.repairer.counts.failures
    assert found == {offset: ALL[offset] for offset in found}
    assert len(ALL) - len(found) == 3


@pytest.mark.parametrize("seed", range(30))
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
    for number in range(1, 40, 2):
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
