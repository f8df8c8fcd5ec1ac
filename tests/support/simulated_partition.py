"""A partition on a simulated disk, as leader or follower, without hooks but that of producers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.config import topic_config
from mansio.state.replica import NO_LEADER, FollowerReplica, ReplicationProgress
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log, LogSettings
from mansio.wire.batch.record_batch import TimestampType, read_header
from mansio.wire.batch.record_reader import read_records
from support.logs import ManualBackground, ManualClock, ManualScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.testing.disk import SimulatedDisk

ROOT = "/data"
DIRECTORY = "/data/p"
SETTINGS = LogSettings(
    segment_bytes=3000, segment_ms=600_000, index_interval_bytes=1, index_snapshot_bytes=800
)
RULES = AppendRules(1 << 20, TimestampType.CREATE, 1 << 60, 1 << 60, inspects_records=True)


class _Promise:
    """As much of a promise as is used here. A coroutine that waits for it yields until it is done."""

    def __init__(self) -> None:
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: object) -> None:
        self._is_done = True

    def set_exception(self, _: BaseException) -> None:
        self._is_done = True

    def __await__(self) -> Iterator[None]:
        while not self._is_done:
            yield


class _Scheduler(ManualScheduler):
    def __init__(self) -> None:
        super().__init__()
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append(lambda: callback(*args))

    def promise(self) -> _Promise:
        return _Promise()

    async def sleep(self, delay_ms: float) -> None:
        del delay_ms

    def run(self) -> None:
        while self.soon:
            self.soon.pop(0)()


class SimulatedPartition:
    """A partition on a simulated disk."""

    def __init__(
        self,
        disk: SimulatedDisk,
        seconds: float,
        *,
        rules: AppendRules = RULES,
        is_follower: bool = False,
        **settings: str,
    ) -> None:
        """`settings`: of the topic, with underscores for dots."""
        self.disk = disk
        self.clock = ManualClock()
        self.clock.seconds = seconds
        self.scheduler = _Scheduler()
        self.background = ManualBackground()
        self.group_commit = GroupCommit(disk, self.background, ROOT, scheduler=self.scheduler)
        self.log = Log.open(disk, self.clock, DIRECTORY, SETTINGS)
        self.group_commit.register(self.log)
        epoch = self.log.leader_epochs.latest_epoch + 1
        self.partition = Partition(
            topic="t",
            topic_id=UUID(int=1),
            index=0,
            broker_id=1,
            log=self.log,
            group_commit=self.group_commit,
            replica=FollowerReplica(NO_LEADER, 0, self.log.start_offset, self.log.durable_end_offset)
            if is_follower
            else ReplicationProgress(1, epoch, frozenset({1}), self.log.durable_end_offset),
            rules=rules,
            clock=self.clock,
            scheduler=self.scheduler,  # type: ignore[arg-type]
            settings=topic_config.resolve_topic_settings(
                {name.replace("_", "."): value for name, value in settings.items()}, {}, 1
            ),
        )
        self.producers = ProducerHook(
            disk, self.clock, self.background, DIRECTORY, self.log, expiration_ms=1 << 40
        )
        self.partition.add_hook(self.producers)

    def flush(self) -> None:
        self.partition.request_flush()
        for _ in range(4):
            self.scheduler.fire()
            self.background.run_all()
        self.scheduler.run()

    def visible(self) -> dict[int, bytes]:
        """Offset -> value of each record that consumers see."""
        return {
            record.offset: record.value or b""
            for batch in self.log.batches(self.log.start_offset)
            if not read_header(batch).is_control
            for record in read_records(batch, output_bytes_max=1 << 20)
        }
