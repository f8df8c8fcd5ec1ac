"""Partitions that share few open files: each batch is appended after few flushes, whatever the others do."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from mansio.broker.partition.batch_processing import BatchProcessor
from mansio.errors import DescriptorsExhausted, MansioError
from mansio.storage.active_files import SERVED_PER_FLUSH_MAX, ActiveFiles, ActiveFilesInUse
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from support.logs import ManualBackground
from support.partition_bench import PartitionBench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.partition.partition_hook import AppendResult

FLUSHES_MAX = 4
"""Number of flushes for which the first in the queue may wait: the one that runs, and that of what was appended until
it was asked to give up its file, for the file of each log that is not asked in vain."""


class FairBench(PartitionBench):
    """Clients that each have one batch in flight for a partition."""

    def __init__(self, partitions: int, active_files_max: int) -> None:
        super().__init__(
            settings=[{}] * partitions, active_files_max=active_files_max, sync_all_files_min=100
        )
        self.batch_processor = BatchProcessor(ManualBackground())
        self.sent = [0] * partitions
        self.outcomes: list[list[AppendResult | MansioError]] = [[] for _ in range(partitions)]

    def send(self, index: int, *, urgent: bool = True) -> None:
        """Send the next batch, unless the last one has no answer."""
        if self.sent[index] > len(self.outcomes[index]):
            return
        batch = build_batch([(0, None, b"%d" % self.sent[index], ())])
        self.sent[index] += 1
        self.batch_processor.append(
            self.partitions[index], batch, urgent=urgent, on_appended=self.outcomes[index].append
        )

    def flush_once(self) -> None:
        self.background.run_one()
        self.scheduler.fire(0)

    def values(self, index: int) -> Iterator[bytes | None]:
        log = self.logs[index]
        for batch in log.batches(0):
            for record in read_records(batch, output_bytes_max=1 << 20):
                yield record.value


@pytest.mark.parametrize("urgent", [True, False], ids=["acks=all", "acks=1"])
def test_a_batch_for_a_closed_log_does_not_wait_for_logs_that_are_written_to_during_each_flush(
    urgent: bool,
) -> None:
    hot = 5
    bench = FairBench(hot + 1, active_files_max=hot)
    for index in range(hot + 1):
        bench.send(index, urgent=urgent)
    assert not bench.outcomes[hot], "all files are in use"
    for flushes in range(FLUSHES_MAX):  # noqa: B007
        for index in range(hot):
            bench.send(index, urgent=urgent)
        bench.flush_once()
        if bench.outcomes[hot]:
            break
    assert bench.outcomes[hot], f"it still waits after {flushes + 1} flushes"
    assert not isinstance(bench.outcomes[hot][0], MansioError)


def test_each_partition_is_served_in_turn_when_more_are_written_to_than_files_may_be_open() -> None:
    partitions, files_max = 20, 4
    bench = FairBench(partitions, files_max)
    turn = random.Random(1)
    last = [0] * partitions
    longest = 0
    for flushes in range(600):
        before = [len(each) for each in bench.outcomes]
        for index in turn.sample(range(partitions), partitions):
            bench.send(index, urgent=turn.random() < 0.7)
        bench.flush_once()
        for index in range(partitions):
            if len(bench.outcomes[index]) > before[index]:
                last[index] = flushes
            longest = max(longest, flushes - last[index])
        assert bench.files is not None
        assert bench.files.active.open_files <= files_max
        assert len(bench.files.active._waiting) <= partitions
    assert longest <= FLUSHES_MAX * (partitions / files_max + 1)
    for _ in range(10 * partitions):
        bench.flush_once()
    bench.scheduler.fire()
    bench.background.run_all()
    assert not bench.batch_processor.queues
    for index in range(partitions):
        assert not any(isinstance(each, MansioError) for each in bench.outcomes[index])
        assert list(bench.values(index)) == [b"%d" % number for number in range(bench.sent[index])]
    counts = [len(each) for each in bench.outcomes]
    assert max(counts) <= 2 * min(counts), counts


def test_what_the_broker_appends_itself_needs_not_wait_for_batches_of_clients() -> None:
    """The marker of a transaction is refused at once if it cannot be appended; without a reserve, always."""
    bench = FairBench(10, active_files_max=8)
    for index in range(9):
        bench.send(index)
    assert not bench.outcomes[8]
    marker = build_batch([(0, None, b"m", ())])
    assert bench.partitions[9].append(marker, internal=True).base_offset == 0
    with pytest.raises(DescriptorsExhausted):
        bench.partitions[8].append(marker)


def test_a_log_keeps_its_file_when_the_queue_is_empty() -> None:
    bench = FairBench(3, active_files_max=2)
    for index in range(3):
        bench.send(index)
    assert not bench.outcomes[2]
    assert bench.logs[0]._gives_up_file
    bench.send(0)
    assert len(bench.outcomes[0]) == 1, "it is behind the one that waits"
    for _ in range(4):
        bench.flush_once()
    assert len(bench.outcomes[2]) == 1
    assert len(bench.outcomes[0]) == 2
    for _ in range(4):
        bench.flush_once()
    assert not bench.files.active._waiting  # type: ignore[union-attr]
    bench.send(0)
    assert len(bench.outcomes[0]) == 3
    assert not bench.logs[0]._gives_up_file


def test_a_roll_waits_for_the_files_of_its_segments() -> None:
    bench = FairBench(3, active_files_max=3)
    for index in range(3):
        bench.send(index)
    with pytest.raises(ActiveFilesInUse):
        bench.partitions[0].roll()
    rolling = bench.partitions[0].roll_when_possible()
    rolling.send(None)
    for _ in range(FLUSHES_MAX):
        bench.flush_once()
    with pytest.raises(StopIteration):
        rolling.send(None)
    assert bench.logs[0].segment_base_offsets() == [0, 1]


def test_a_batch_whose_log_is_deleted_while_it_waits_gets_an_error_and_the_next_one_its_file() -> None:
    bench = FairBench(4, active_files_max=2)
    for index in range(4):
        bench.send(index)
    deleted = bench.logs[2]
    bench.group_commit.unregister(deleted)
    deleted.close()
    for _ in range(4):
        bench.flush_once()
    assert isinstance(bench.outcomes[2][0], MansioError)
    assert not isinstance(bench.outcomes[3][0], MansioError)
    assert not bench.batch_processor.queues


def test_a_file_that_becomes_free_belongs_to_the_first_in_the_queue() -> None:
    bench = FairBench(4, active_files_max=2)
    for index in range(3):
        bench.send(index)
    bench.background.run_all()
    bench.send(3)  # before those who wait are called
    assert not bench.outcomes[3]
    bench.scheduler.fire(0)
    assert len(bench.outcomes[2]) == 1
    for _ in range(3):
        bench.flush_once()
    assert len(bench.outcomes[3]) == 1


class Queue:
    """Those who wait for the files of `ActiveFiles`, and the flushes after which they are called."""

    def __init__(self) -> None:
        self.files = ActiveFiles(2)
        self.after_job: list[Callable[[], None]] = []
        self.called: list[int] = []

    def call_after_job(self, callback: Callable[[], None]) -> bool:
        self.after_job.append(callback)
        return True

    def wait(self, number: int, attempt: Callable[[], object] | None = None) -> None:
        assert self.files.wait(number, attempt or partial(self.called.append, number), self.call_after_job)

    def finish_job(self) -> list[int]:
        """Finish a job; return who was called."""
        self.called.clear()
        callbacks, self.after_job = self.after_job, []
        assert len(callbacks) <= 1
        for callback in callbacks:
            callback()
        return list(self.called)


def test_who_has_to_wait_again_keeps_the_place_and_ends_the_turn() -> None:
    queue = Queue()
    left = 2

    def attempt() -> None:
        nonlocal left
        queue.called.append(0)
        left -= 1
        if left:
            queue.wait(0, attempt)

    queue.wait(0, attempt)
    for number in (1, 2, 1):
        queue.wait(number)
    assert queue.finish_job() == [0]
    assert queue.finish_job() == [0, 1, 2]
    assert not queue.after_job


def test_a_bounded_number_of_those_who_wait_is_called_in_one_turn() -> None:
    queue = Queue()
    for number in range(SERVED_PER_FLUSH_MAX + 1):
        queue.wait(number)
    assert queue.finish_job() == list(range(SERVED_PER_FLUSH_MAX))
    assert queue.finish_job() == [SERVED_PER_FLUSH_MAX]


def test_a_defect_of_one_who_waits_does_not_end_the_wait_of_others() -> None:
    queue = Queue()

    def fail() -> None:
        raise ZeroDivisionError

    queue.wait(0, fail)
    queue.wait(1)
    with pytest.raises(ZeroDivisionError):
        queue.finish_job()
    assert queue.finish_job() == [1]
    assert not queue.files.has_waiting


def test_a_wait_is_refused_if_there_is_nothing_to_flush() -> None:
    queue = Queue()
    assert not queue.files.wait(0, lambda: None, lambda _: False)
    assert not queue.files.has_waiting
