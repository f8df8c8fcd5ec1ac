"""A partition directory that is missing when a broker starts: a lost replica is distinguished from one that was never
created."""

from __future__ import annotations

import errno
from typing import Any
from uuid import UUID

import pytest

from mansio.broker.partition.partition import Partition
from mansio.broker.partition.partition_files import (
    HOSTED_PARTITIONS_FILE_NAME,
    HostedPartitions,
    topic_directory,
)
from mansio.broker.partition.partition_set import PartitionSet
from mansio.config.settings import Settings
from mansio.errors import CorruptLog, StorageError
from mansio.metadata.model import TOPIC_LIVE, PartitionState, Topic
from mansio.storage.file_cache import FileCache
from mansio.storage.group_commit import GroupCommit
from mansio.testing.disk import SimulatedDisk
from mansio.testing.scheduler import SimulatedBackground, SimulatedClock, Simulation

NODE = 2


def topic(number: int, *, isr: tuple[int, ...] = (1, NODE), touched: bool = True) -> Topic:
    state = PartitionState((1, NODE), 1, 3 * touched, isr, 5 * touched)
    return Topic(f"t{number}", UUID(int=number), (state,), 2, {}, False, TOPIC_LIVE, number)


class Broker:
    """The partitions of one life of broker 2. `trusted`: its disk is the one it registered with."""

    def __init__(self, disk: SimulatedDisk | None = None, *, trusted: bool = True) -> None:
        self.simulation = Simulation(1)
        self.disk = disk or SimulatedDisk()
        self.trusted = trusted
        scheduler = self.scheduler = self.simulation.scheduler("broker")
        clock = SimulatedClock(self.simulation)
        thread = SimulatedBackground(scheduler, lambda: 1.0)
        self.verification_thread = SimulatedBackground(scheduler, lambda: 1000.0)
        self.disk.make_directory("data")
        self.partitions = PartitionSet(
            settings=Settings(data_dir="data", node_id=NODE, etcd_endpoints="http://etcd:2379"),
            disk=self.disk,
            clock=clock,
            scheduler=scheduler,
            group_commit=GroupCommit(self.disk, thread, "data", scheduler=scheduler),
            files=FileCache(self.disk),
            sync_thread=thread,
            file_thread=thread,
            verification_thread=self.verification_thread,
            batch_thread=thread,
        )

    def is_new(self, state: PartitionState) -> bool:
        return NODE not in state.isr or (self.trusted and state.leader_epoch == state.partition_epoch == 0)

    def do(self, work: Any) -> None:
        ended: list[StorageError | None] = []

        async def run() -> None:
            try:
                await work
                ended.append(None)
            except StorageError as error:
                ended.append(error)

        self.scheduler.spawn(run(), name="test")
        self.simulation.run_until(lambda: ended)
        if ended[0] is not None:
            raise ended[0]

    def start(self, *topics: Topic) -> list[Any]:
        """What came of each topic's partition."""
        self.do(self.partitions.open_existing_topics(topics, self.is_new))
        return [self.partitions.partitions_or_errors(one)[0] for one in topics]

    def registered(self) -> Broker:
        self.do(self.partitions.create_hosted_partitions_file())
        return self

    def after_power_loss(self, *lost: Topic, emptied: bool = False) -> Broker:
        """`emptied`: of what is lost, the directories are there still."""
        disk = self.disk.crash(self.simulation.random)
        for one in lost:
            directory = topic_directory("data", one)
            disk.remove_tree(directory)
            if emptied:
                disk.make_directory(f"{directory}/0")
        return Broker(disk)


def test_partition_that_was_placed_here_while_the_broker_was_away_is_new_whichever_broker_led_it_since() -> (
    None
):
    """Its session stood when the topic was made, not its process; then that ended, too, and the leader changed."""
    before = Broker()
    before.start(topic(1, touched=False))
    (kept,) = before.registered().after_power_loss().start(topic(2))
    assert isinstance(kept, Partition)


@pytest.mark.parametrize("emptied", [False, True])
def test_partition_that_was_open_here_and_is_gone_is_lost(*, emptied: bool) -> None:
    first, second = topic(1, touched=False), topic(2)
    before = Broker()
    before.start(first)
    before.registered().do(before.partitions.open_partitions(second))
    lost = before.after_power_loss(first, second, emptied=emptied).start(first, second)
    assert all(isinstance(one, CorruptLog) for one in lost)


def test_directory_that_the_disk_does_not_list_costs_its_own_partition_and_no_other() -> None:
    first, second = topic(1, touched=False), topic(2, touched=False)
    before = Broker()
    before.start(first, second)
    after = before.registered().after_power_loss()
    broken = f"{topic_directory('data', first)}/0"
    after.disk.fail_when = lambda operation, path: (
        errno.EIO if (operation, path) == ("list", broken) else None
    )
    failed, served = after.start(first, second)
    assert isinstance(failed, StorageError)
    assert not isinstance(failed, CorruptLog)  # it may be there: nothing is known to be lost
    assert isinstance(served, Partition)


def test_partition_that_is_gone_is_lost_also_where_it_is_not_in_sync_and_begins_again_on_request() -> None:
    before = Broker()
    before.start(topic(1, touched=False))
    broker = before.registered().after_power_loss(topic(1))
    assert isinstance(broker.start(topic(1, isr=(1,)))[0], CorruptLog)
    broker.do(broker.partitions.recreate(topic(1, isr=(1,)), 0))
    (begun,) = broker.partitions.partitions_or_errors(topic(1, isr=(1,)))
    assert isinstance(begun, Partition)


def test_what_is_missing_on_another_disk_is_lost_at_every_start_until_the_broker_has_registered() -> None:
    replaced = Broker(trusted=False)
    assert isinstance(replaced.start(topic(1))[0], CorruptLog)
    again = Broker(replaced.disk.crash(replaced.simulation.random), trusted=False)
    assert isinstance(again.start(topic(1))[0], CorruptLog)


def test_directory_that_cannot_be_noted_is_not_open_and_is_noted_the_next_time() -> None:
    broker = Broker()
    broker.start()
    broker.registered()
    broker.disk.fail_when = lambda operation, path: (
        errno.EIO if path.endswith(HOSTED_PARTITIONS_FILE_NAME) else None
    )
    with pytest.raises(StorageError):
        broker.do(broker.partitions.open_partitions(topic(1)))
    assert broker.partitions.partitions_or_errors(topic(1)) == [None]
    broker.disk.clear_failures()
    broker.do(broker.partitions.open_partitions(topic(1)))
    assert isinstance(broker.after_power_loss(topic(1)).start(topic(1))[0], CorruptLog)


def test_torn_entry_hides_none_of_the_others_and_is_written_over() -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    places = [(UUID(int=number), number) for number in range(5)]
    made = HostedPartitions(disk, "data")
    made.create()
    made.add(places[:3])
    path = f"data/{HOSTED_PARTITIONS_FILE_NAME}"
    disk.truncate_file(path, len(disk.read_file(path)) - 7)
    again = HostedPartitions(disk, "data")
    again.load([topic_id for topic_id, _ in places])
    assert [again.contains(*place) for place in places] == [True, True, False, False, False]
    again.add(places[3:])
    last = HostedPartitions(disk, "data")
    last.load([topic_id for topic_id, _ in places])
    assert [last.contains(*place) for place in places] == [True, True, False, True, True]


def test_deleted_topics_go_from_the_list_in_time() -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    made = HostedPartitions(disk, "data")
    made.create()
    made.add((UUID(int=number), 0) for number in range(10))
    before = len(disk.read_file(f"data/{HOSTED_PARTITIONS_FILE_NAME}"))
    again = HostedPartitions(disk, "data")
    again.load([UUID(int=3)])
    assert len(disk.read_file(f"data/{HOSTED_PARTITIONS_FILE_NAME}")) * 10 == before
    assert again.contains(UUID(int=3), 0)


def test_deletion_of_a_topic_waits_for_a_repair_that_writes_into_its_directory() -> None:
    broker, deleted = Broker(), topic(1, touched=False)
    broker.start(deleted)
    directory = topic_directory("data", deleted)

    def write_copy() -> None:
        assert broker.disk.exists(directory)
        broker.disk.open(f"{directory}/0/{0:020d}.log.tmp", create=True)

    broker.verification_thread.submit(write_copy, lambda _, error: errors.append(error))
    errors: list[BaseException | None] = []
    broker.do(broker.partitions.close_partitions(deleted))
    assert errors == [None]
    assert not broker.disk.exists(directory)
