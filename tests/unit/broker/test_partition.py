"""Partition on a simulated disk: when records become readable, when waiting requests are answered, and the effect of a
failed sync."""

from __future__ import annotations

import asyncio
import errno
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import (
    DiskFull,
    FencedLeaderEpoch,
    InvalidRecord,
    InvalidTimestamp,
    LogFailed,
    MansioError,
    MessageTooLarge,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    StorageError,
    TransactionalIdMissing,
    UnknownLeaderEpoch,
)
from mansio.storage.log import Log
from mansio.wire.batch.record_batch import TimestampType, build_batch
from mansio.wire.batch.record_reader import read_records
from support.partition_bench import RULES, PartitionBench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.partition.append_validation import AppendRules
    from mansio.testing.disk import SimulatedDisk
    from mansio.wire.batch.record_batch import BatchHeader


def new_bench(
    disk: SimulatedDisk | None = None, rules: AppendRules = RULES, features: Sequence[str] = ()
) -> PartitionBench:
    return PartitionBench(disk, directory="data/t", leader_epoch=3, rules=rules, features=features)


def batch(*values: bytes, sequence: int = -1, producer_id: int = -1, timestamp_ms: int = 0) -> bytes:
    records = [(timestamp_ms, None, value, ()) for value in values]
    epoch = 0 if producer_id >= 0 else -1
    return build_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def values(bench: PartitionBench, offset: int = 0) -> list[bytes | None]:
    found: list[bytes | None] = []
    while (part := bench.partition.read(offset, 1)) is not None:
        found += [record.value for record in read_records(part.read(), output_bytes_max=1 << 20)]
        offset = part.next_offset
    return found


def test_nothing_is_readable_before_it_is_synced() -> None:
    bench = new_bench()
    appended = bench.partition.append(batch(b"a", b"b"))
    assert (appended.base_offset, appended.end_offset, bench.partition.end_offset) == (0, 2, 2)
    assert bench.partition.high_watermark == 0
    assert bench.partition.read(0, 1 << 20) is None
    bench.background.run_all()
    assert bench.partition.high_watermark == 2
    assert values(bench) == [b"a", b"b"]


def test_a_sync_that_began_before_an_append_does_not_cover_it() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"a"))
    reported: list[str] = []
    bench.partition.append(batch(b"b"))
    assert not bench.partition.when_committed(2, lambda error: reported.append(f"b {error}"))
    assert not bench.partition.when_committed(1, lambda error: reported.append(f"a {error}"))
    bench.background.run_one()
    assert reported == ["a None"], "the first sync was taken for a alone"
    bench.background.run_all()
    assert reported == ["a None", "b None"]


def test_only_what_was_acknowledged_before_its_flush_is_waited_for() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"acks=all"))
    assert bench.partition.uncommitted_end == 0, "it is acknowledged when it is readable"
    bench.partition.append(batch(b"acks=1"), urgent=False)
    bench.partition.append(batch(b"acks=all"))
    assert bench.partition.uncommitted_end == 2
    bench.background.run_all()
    assert (bench.partition.high_watermark, bench.partition.uncommitted_end) == (3, 0)


def test_a_log_that_failed_has_nothing_to_wait_for() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"a"), urgent=False)
    bench.disk.fail_when = lambda operation, path: errno.EIO if "sync" in operation else None
    bench.partition.request_flush()
    bench.background.run_all()
    assert bench.partition.uncommitted_end == 0


def test_waits_are_kept_in_the_order_of_their_offsets_when_an_old_batch_is_repeated() -> None:
    bench = new_bench()
    reported: list[int] = []
    for _ in range(3):
        bench.partition.append(batch(b"x"))
    for end in (1, 3, 2):
        bench.partition.when_committed(end, partial(lambda end, error: reported.append(end), end))
    bench.background.run_all()
    assert sorted(reported) == [1, 2, 3]


def test_a_wait_that_begins_while_others_are_completed_completes_none_of_them_twice() -> None:
    bench = new_bench()
    partition = bench.partition
    reported: list[str] = []
    for _ in range(2):
        partition.append(batch(b"x"), urgent=False)
    partition.request_flush()
    for _ in range(3):
        partition.append(batch(b"x"), urgent=False)

    def first(error: MansioError | None) -> None:
        reported.append(f"1 {error}")
        assert not partition.when_committed(3, lambda error: reported.append(f"3 {error}"))

    assert not partition.when_committed(1, first)
    assert not partition.when_committed(2, lambda error: reported.append(f"2 {error}"))
    assert not partition.when_committed(5, lambda error: reported.append(f"5 {error}"))
    bench.background.run_one()
    assert reported == ["1 None", "2 None"]
    partition.request_flush()
    bench.background.run_all()
    assert reported == ["1 None", "2 None", "3 None", "5 None"]


def test_failed_sync_fails_every_wait_and_every_later_append_and_keeps_serving_what_was_durable() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"kept"))
    bench.background.run_all()
    bench.partition.append(batch(b"lost"))
    errors: list[MansioError | None] = []
    woken: list[int] = []
    bench.partition.when_committed(2, errors.append)
    bench.partition.park(lambda: woken.append(1))
    bench.disk.fail_when = lambda operation, path: errno.EIO if "sync" in operation else None
    bench.background.run_all()
    bench.disk.fail_when = None
    assert len(errors) == 1
    assert isinstance(errors[0], StorageError)
    assert woken, "a parked fetch learns of it"
    with pytest.raises(StorageError):
        bench.partition.append(batch(b"later"))
    bench.background.run_all()
    assert bench.partition.high_watermark == 1, "a failed sync is not made good by a later one"
    assert values(bench) == [b"kept"]


def test_closing_ends_all_waits_and_refuses_clients() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"a"))
    errors: list[MansioError | None] = []
    bench.partition.when_committed(1, errors.append)
    bench.partition.close()
    assert [type(error) for error in errors] == [NotLeaderOrFollower]
    with pytest.raises(NotLeaderOrFollower):
        bench.partition.append(batch(b"b"))


def test_parked_readers_are_woken_by_the_commit_and_not_after_they_left() -> None:
    bench = new_bench()
    woken: list[str] = []

    def first() -> None:
        woken.append("first")
        bench.partition.waits.unpark(first)

    def second() -> None:
        woken.append("second")

    bench.partition.park(first)
    bench.partition.park(second)
    for _ in range(2):
        bench.partition.append(batch(b"a"), urgent=False)
        assert "second" not in woken or len(woken) == 2
        bench.background.run_all()
    assert woken == ["first", "second", "second"]


@pytest.mark.parametrize(
    ("rules", "sent", "error"),
    [
        (RULES._replace(message_bytes_max=70), batch(b"x" * 50), MessageTooLarge),
        (RULES._replace(timestamp_after_max_ms=0), batch(b"x", timestamp_ms=1 << 50), InvalidTimestamp),
        (RULES._replace(timestamp_before_max_ms=0), batch(b"x", timestamp_ms=1), InvalidTimestamp),
        (RULES, build_batch([(0, b"k", b"v", ())], control=True), InvalidRecord),
        (
            RULES,
            build_batch(
                [(0, b"k", b"v", ())], transactional=True, producer_id=1, producer_epoch=0, base_sequence=0
            ),
            TransactionalIdMissing,
        ),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused_and_leaves_no_trace(
    rules: AppendRules, sent: bytes, error: type[MansioError]
) -> None:
    bench = new_bench(rules=rules)
    with pytest.raises(error):
        bench.partition.append(sent)
    assert bench.partition.end_offset == 0


def test_log_append_time_is_stamped_and_checks_out() -> None:
    bench = new_bench(rules=RULES._replace(timestamp_type=TimestampType.LOG_APPEND))
    appended = bench.partition.append(batch(b"a", b"b", timestamp_ms=5))
    bench.background.run_all()
    part = bench.partition.read(0, 1 << 20)
    assert part is not None
    stamps = {record.timestamp_ms for record in read_records(part.read(), output_bytes_max=1 << 20)}
    assert stamps == {appended.append_time_ms} == {bench.clock.wall_ms()}


def test_leader_epochs_fence_readers_that_know_another_one() -> None:
    partition = new_bench().partition
    partition.check_leader_epoch(-1)
    partition.check_leader_epoch(3)
    with pytest.raises(FencedLeaderEpoch):
        partition.check_leader_epoch(2)
    with pytest.raises(UnknownLeaderEpoch):
        partition.check_leader_epoch(4)


def test_reading_above_the_end_is_out_of_range_and_between_high_watermark_and_end_is_empty() -> None:
    bench = new_bench()
    bench.partition.append(batch(b"a", b"b"))
    assert bench.partition.read(1, 100) is None
    assert bench.partition.read(2, 100) is None
    with pytest.raises(OffsetOutOfRange):
        bench.partition.read(3, 100)


def test_a_hook_bounds_what_is_readable_and_what_retention_may_take() -> None:
    bench = new_bench()

    class Bound:
        trimmed = -1

        def before_append(self, header: BatchHeader) -> None: ...

        def on_append(self, header: BatchHeader, base_offset: int, contents: object = None) -> None: ...

        def on_committed(self, high_watermark: int) -> None: ...

        def on_trim(self, start_offset: int) -> None:
            self.trimmed = start_offset

        def on_truncate(self, end_offset: int) -> None: ...

        def readable_end(self, isolation_level: int) -> int | None:
            return 1 if isolation_level else None

        def retention_floor(self) -> int | None:
            return 7

        def close(self, *, save: bool) -> None: ...

    bound = Bound()
    bench.partition.add_hook(bound)
    for value in (b"a", b"b"):
        bench.partition.append(batch(value))
    bench.background.run_all()
    assert bench.partition.readable_end(0) == 2
    assert bench.partition.readable_end(1) == 1
    assert bench.partition.read(1, 100, isolation_level=1) is None
    assert bench.partition.retention_floor() == 7
    bench.partition.trim(1)
    assert bound.trimmed == bench.partition.start_offset == 1
    with pytest.raises(OffsetOutOfRange):
        bench.partition.trim(3)


def test_a_repeated_batch_is_answered_from_memory_also_after_a_crash() -> None:
    bench = new_bench(features=("producers",))
    sent = batch(b"a", b"b", producer_id=9, sequence=0)
    first = bench.partition.append(sent)
    bench.background.run_all()
    again = bench.partition.append(sent)
    assert (again.base_offset, again.end_offset, again.duplicate) == (
        first.base_offset,
        first.end_offset,
        True,
    )

    after = new_bench(disk=bench.disk, features=("producers",))  # no close: as after kill -9
    third = after.partition.append(sent)
    assert third.duplicate
    assert after.partition.end_offset == 2
    assert not after.partition.append(batch(b"c", producer_id=9, sequence=2)).duplicate


def test_a_producer_snapshot_saves_the_replay_and_a_damaged_one_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mansio.broker.log_view.snapshots.SNAPSHOT_INTERVAL_BYTES", 100)
    bench = new_bench(features=("producers",))
    for sequence in range(20):
        bench.partition.append(batch(b"v" * 40, producer_id=9, sequence=sequence))
        bench.background.run_all()
    bench.partition.close()
    names = sorted(path for path in bench.disk.files() if path.endswith(".producers"))
    assert len(names) == 2
    replayed: list[int] = []
    true_batches = Log.headers_with_control_batches

    def counted(self: Log, from_offset: int, on_damage: Any) -> Any:
        replayed.append(from_offset)
        return true_batches(self, from_offset, on_damage)

    monkeypatch.setattr(Log, "headers_with_control_batches", counted)
    bench.disk.flip_bit(names[-1], 200)
    after = new_bench(disk=bench.disk, features=("producers",))
    hook = after.producers
    assert 0 < replayed[-1] < 20, "the older snapshot was used"
    assert hook.table.get(9) is not None
    assert after.partition.append(batch(b"v" * 40, producer_id=9, sequence=19)).duplicate


def test_committed_promise_is_kept_or_broken() -> None:
    async def work() -> None:
        bench = new_bench()
        bench.scheduler.promise = asyncio.get_running_loop().create_future  # as the real one
        bench.partition.append(batch(b"a"))
        promise = bench.partition.commit_promise(1)
        assert not promise.done()
        bench.background.run_all()
        await promise
        bench.partition.append(batch(b"b"))
        broken = bench.partition.commit_promise(2)
        bench.disk.fail_when = lambda operation, path: errno.EIO if "sync" in operation else None
        bench.background.run_all()
        with pytest.raises(StorageError):
            await broken
        with pytest.raises(StorageError):
            await bench.partition.commit_promise(2)

    asyncio.run(work())


def test_writers_that_keep_trying_a_failed_log_learn_why_and_leave_nothing_behind() -> None:
    """An error that is raised again and again keeps the frames, and with them the batches, of all who met it."""
    bench = new_bench()
    bench.disk.fail_when = lambda operation, path: errno.EIO if "sync" in operation else None
    bench.partition.append(batch(b"a"))
    bench.background.run_all()
    for _ in range(10):
        with pytest.raises(LogFailed, match="t-0: its log failed and accepts no writes") as refused:
            bench.partition.append(batch(b"b"))
        assert "data/" not in str(refused.value)
    failure = bench.log.failure
    assert failure is not None
    assert len(traceback.extract_tb(failure.__traceback__)) <= 1


def test_full_disk_has_its_own_error_and_the_next_append_that_fits_ends_it() -> None:
    bench = new_bench()
    bench.disk.fail_when = lambda operation, path: errno.ENOSPC if operation == "write" else None
    for _ in range(3):
        with pytest.raises(DiskFull, match="t-0: the broker's disk is full"):
            bench.partition.append(batch(b"a"))
    hooks = len(bench.partition._after_append)
    bench.disk.fail_when = None
    assert bench.partition.append(batch(b"b")).base_offset == 0
    assert len(bench.partition._after_append) == hooks - 1, "a healthy append pays nothing"


def test_a_repeat_after_a_failed_sync_is_refused_at_once_instead_of_waiting_for_what_cannot_come() -> None:
    bench = new_bench(features=("producers",))
    sent = batch(b"a", producer_id=9, sequence=0)
    bench.partition.append(sent)
    bench.disk.fail_when = lambda operation, path: errno.EIO if "sync" in operation else None
    bench.background.run_all()
    with pytest.raises(StorageError):
        bench.partition.append(sent)


def test_an_unreadable_producer_snapshot_costs_a_replay_and_not_the_partition() -> None:
    bench = new_bench(features=("producers",))
    sent = batch(b"a", producer_id=9, sequence=0)
    bench.partition.append(sent)
    bench.background.run_all()
    bench.partition.close()
    assert any(path.endswith(".producers") for path in bench.disk.files())
    bench.disk.fail_when = lambda operation, path: errno.EIO if path.endswith(".producers") else None
    after = new_bench(disk=bench.disk, features=("producers",))
    assert after.partition.append(sent).duplicate
