"""`DelayService`: what it answers is committed, and one damaged record keeps no other from being copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.broker.features.delays.delay_manager import DELAY_READER, DelayManager
from mansio.broker.features.delays.delay_service import DelayService
from mansio.broker.features.delays.delayed_records import DelayedRecords
from mansio.broker.log_view.snapshots import snapshot_names
from mansio.broker.maintenance.retention import RetentionManager
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.authorization import Authorization
from mansio.errors import CorruptMessage, RequestTimedOut
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from unit.broker.features.delays.test_schedule_owners import ScheduledCluster

if TYPE_CHECKING:
    from collections.abc import Coroutine

MINUTE_MS = 60_000


class _Leader:
    """The leader of a cluster with pending records, and the service for them."""

    def __init__(self, **options: Any) -> None:
        self.cluster = ScheduledCluster(seed=1, **options)
        self.manager = self.cluster.managers[1]
        self.partition = self.manager.partition
        self.partition.rules = self.partition.rules._replace(inspects_records=True, readers=(DELAY_READER,))
        partitions = SimpleNamespace(
            find=lambda *_: self.partition, name_of=lambda _: "t", delay_manager=lambda _: self.manager
        )
        node = self.cluster[1]
        self.service = DelayService(
            cast("Any", partitions),
            clock=node.clock,
            scheduler=node.scheduler,
            wait_ms_max=MINUTE_MS,
            authorization=Authorization(None),
        )

    def publish(self, count: int) -> None:
        for number in range(count):
            now_ms = self.partition.clock.wall_ms()
            self.partition.append(
                build_batch([(now_ms, None, b"r%d" % number, [("mansio-delay-ms", b"60000")])])
            )
        self.cluster.run_for(500)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine on virtual time. Raises its error."""
        found: list[Any] = []

        async def keep() -> None:
            try:
                found.append(await work)
            except Exception as error:  # noqa: BLE001  # raised below
                found.append(error)

        self.cluster[1].scheduler.spawn(keep(), name="test")
        self.cluster.run_for(2_000)
        (result,) = found
        if isinstance(result, Exception):
            raise result
        return result

    def locations(self) -> list[int]:
        return [record.location for record in self.manager.view.pending.select(0, 1 << 60)]


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
def test_that_a_record_is_not_pending_is_answered_when_that_is_committed(change: str) -> None:
    leader = _Leader()
    leader.publish(2)
    method = getattr(leader.service, change)
    assert leader.run(method(b"", 0, [0, 7], timeout_ms=1_000, caller=ANONYMOUS)) == [0]
    leader.cluster.network.isolate(1)
    for _ in range(2):  # the second one finds nothing to cancel, but the first is not committed
        with pytest.raises(RequestTimedOut, match="may not be committed"):
            leader.run(leader.service.cancel(b"", 0, [1], timeout_ms=1_000, caller=ANONYMOUS))


def test_a_damaged_record_keeps_no_other_from_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = _Leader()
    leader.publish(3)
    damaged, *intact = leader.locations()
    stored = DelayManager._stored

    def read(self: DelayManager, location: int) -> Any:
        if location == damaged:
            raise CorruptMessage("damaged")
        return stored(self, location)

    with monkeypatch.context() as patch:
        patch.setattr(DelayManager, "_stored", read)
        end = leader.partition.high_watermark
        leader.run(leader.partition.release_below(end))
        assert leader.locations()[0] == damaged
        assert min(leader.locations()[1:]) >= end > max(intact)
        leader.cluster.run_for(MINUTE_MS)
    leader.cluster.run_for(11_000)  # it was repaired
    assert leader.locations() == []
    due_ms = [
        int(dict(record.headers)["mansio-due-at-ms"] or -1)
        for batch in leader.partition.log.batches(leader.partition.start_offset)
        for record in read_records(batch, output_bytes_max=1 << 20)
        if "mansio-due-at-ms" in dict(record.headers)
    ]
    assert len(due_ms) == 3
    assert max(due_ms) - min(due_ms) < 1_000, "a delivery that was tried again says when the record was due"


def test_a_truncation_below_all_snapshots_leaves_the_directory_marked() -> None:
    """Without a file `*.delays` a broker does not look for pending records if the setting is off at its next start."""
    leader = _Leader()
    leader.publish(4)
    replay, log = leader.manager.replay, leader.partition.log
    disk = leader.cluster[1].disk
    for end_offset in (3, 4):
        replay.snapshots.save(replay.view, end_offset, replay.view.freeze(end_offset))
    log.truncate_to(2)
    replay.on_truncate(2)
    assert snapshot_names(disk, log.directory, DelayedRecords.suffix)
    leader.cluster.run_for(500)
    assert leader.locations() == [0, 1]


def test_a_record_delayed_by_a_year_keeps_no_more_of_the_log_than_retention_allows() -> None:
    """Its topic keeps 1 MB in segments of 512 KiB: two of them, and the active one."""
    leader = _Leader(
        configs={"retention.bytes": "1000000"},
        log_settings=LogSettings(segment_bytes=512 << 10, index_interval_bytes=4096),
    )
    partition, node = leader.partition, leader.cluster[1]
    retention = RetentionManager(
        [partition], clock=node.clock, scheduler=node.scheduler, check_interval_ms=MINUTE_MS
    )
    year_ms = 365 * 24 * 60 * MINUTE_MS
    now_ms = partition.clock.wall_ms()
    delay = [("mansio-delay-ms", b"%d" % year_ms)]
    partition.append(build_batch([(now_ms, None, b"next year", delay)]))
    for _ in range(12):
        for _ in range(16):
            partition.append(build_batch([(partition.clock.wall_ms(), None, bytes(50_000), [])]))
        leader.cluster.run_for(500)
        for _ in range(2):  # the first one has it copied
            retention.check_partition(partition)
            leader.cluster.run_for(500)
        assert len(partition.log.segment_base_offsets()) <= 3
    (record,) = leader.manager.view.pending.select(0, 1 << 62)
    assert (record.id, leader.manager.read(record)[2]) == (0, b"next year")
    assert record.location >= partition.start_offset > 0
    assert retention.counts.failures == 0
