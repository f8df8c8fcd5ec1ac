"""Partitions of one topic on a simulated disk, as leader or follower, whose clock, timers and worker the test drives.

The parts that a test does not name are manual ones; a test on virtual time passes its own. `FEATURES` is the one place
that knows how a feature of partitions is attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from mansio.broker.log_view.replay import ViewReplay
from mansio.broker.log_view.view import LogView
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.deduplication_view import DeduplicationView
from mansio.broker.partition.deduplicator import Deduplicator
from mansio.broker.partition.delay_manager import DelayManager
from mansio.broker.partition.delayed_records import DelayedRecords
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.priority_view import PriorityView
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.config import topic_config
from mansio.state.replica import NO_LEADER, FollowerReplica, ReplicationProgress
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import TimestampType, read_header
from mansio.wire.batch.record_reader import read_records
from support.logs import LogBench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mansio.testing.disk import SimulatedDisk
    from mansio.wire.batch.record_reader import Record

V = TypeVar("V", bound=LogView[Any])

TOPIC_ID = UUID(int=1)
BROKER_ID = 1
DIRECTORY = "/data/t-0"
"""Directory of the first partition of a bench."""
RULES = AppendRules(10_000, TimestampType.CREATE, 1 << 62, 1 << 62)
LARGE_RULES = AppendRules(1 << 20, TimestampType.CREATE, 1 << 60, 1 << 60, inspects_records=True)
SMALL_SEGMENTS = LogSettings(
    segment_bytes=3000, segment_ms=600_000, index_interval_bytes=1, index_snapshot_bytes=800
)
FLUSH_ROUNDS = 4


class PartitionBench(LogBench):
    """Partitions of one topic on a simulated disk, without hooks but those of its features."""

    producers: ProducerHook
    deduplication: ViewReplay[DeduplicationView]
    deduplicator: Deduplicator
    delayed_records: ViewReplay[DelayedRecords]
    delay_manager: DelayManager
    priorities: ViewReplay[PriorityView]

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        directory: str = "/data/t",
        settings: Sequence[Mapping[str, str]] = ({},),
        features: Sequence[str] = (),
        is_follower: bool = False,
        leader_epoch: int | None = None,
        log_settings: LogSettings | None = None,
        rules: AppendRules = RULES,
        seconds: float | None = None,
        topic: str = "t",
        topic_id: UUID = TOPIC_ID,
        broker_id: int = BROKER_ID,
        replicas: int = 1,
        internal: bool = False,
        **parts: Any,
    ) -> None:
        """`directory`: of a partition, without its index; `settings`: of the topic, one mapping for each partition;
        `leader_epoch`: None for the one after the latest of the log; `replicas`: how many each partition has, which
        settings may depend on; `seconds`: what the manual clock shows; `parts`:
        those of `LogBench`."""
        super().__init__(disk, root=directory.rpartition("/")[0], **parts)
        if seconds is not None:
            self.clock.seconds = seconds
        self.topic = topic
        self.topic_id = topic_id
        self.broker_id = broker_id
        self.replicas = replicas
        self.internal = internal
        self.log_settings = log_settings
        self.is_follower = is_follower
        self.leader_epoch = leader_epoch
        self.features = [FEATURES[name] for name in features]
        self.rules = rules
        for feature in self.features:
            self.rules = self.rules._replace(**feature.rules)
        self.directory = directory
        self.partitions: list[Partition] = []
        for one in settings:
            self.open_partition(one)

    def open_partition(self, settings: Mapping[str, str] | None = None, **options: Any) -> Partition:
        """Open or create the next partition. `settings`: of the topic; `options`: of `Partition`."""
        index = len(self.partitions)
        epoch = -1 if self.leader_epoch is None else self.leader_epoch
        log = self.open_log(f"{self.directory}-{index}", self.log_settings, leader_epoch=epoch)
        if self.leader_epoch is None:
            epoch = 0 if self.is_follower else log.leader_epochs.latest_epoch + 1
        texts = dict(settings or {})
        for feature in self.features:
            texts |= feature.settings
        partition = Partition(
            topic=self.topic,
            topic_id=self.topic_id,
            index=index,
            broker_id=self.broker_id,
            log=log,
            group_commit=self.group_commit,
            replica=FollowerReplica(NO_LEADER, epoch, log.start_offset, log.durable_end_offset)
            if self.is_follower
            else ReplicationProgress(
                self.broker_id, epoch, frozenset({self.broker_id}), log.durable_end_offset
            ),
            rules=self.rules,
            clock=self.clock,
            scheduler=self.scheduler,
            settings=topic_config.resolve_topic_settings(texts, {}, self.replicas),
            internal=self.internal,
            **options,
        )
        self.partitions.append(partition)
        for feature in self.features:
            feature.attach(self, partition)
        return partition

    def attach(self, feature: str) -> None:
        """Attach a feature that the rules of the first partition need not know."""
        FEATURES[feature].attach(self, self.partition)

    @property
    def partition(self) -> Partition:
        """The first or only partition."""
        return self.partitions[0]

    def flush(self) -> None:
        """Make all records of the first partition durable, and run what follows from that."""
        self.partition.request_flush()
        for _ in range(FLUSH_ROUNDS):
            self.scheduler.fire()
            self.background.run_all()
        self.scheduler.run()

    def records(self) -> Iterator[Record]:
        """Each record of the first partition's log, also of that part which is not committed."""
        for batch in self.log.batches(self.log.start_offset):
            if not read_header(batch).is_control:
                yield from read_records(batch, output_bytes_max=1 << 20)

    def visible(self) -> dict[int, bytes]:
        """Offset -> value of each of these records."""
        return {record.offset: record.value or b"" for record in self.records()}


def small_bench(
    disk: SimulatedDisk | None = None,
    *features: str,
    seconds: float = 1_000.0,
    is_follower: bool = False,
    rules: AppendRules = LARGE_RULES,
) -> PartitionBench:
    """A partition of small segments, so that few batches fill several of them."""
    return PartitionBench(
        disk,
        features=features,
        seconds=seconds,
        is_follower=is_follower,
        log_settings=SMALL_SEGMENTS,
        rules=rules,
    )


def deduplicated(
    disk: SimulatedDisk | None = None, *, seconds: float = 1_000.0, is_follower: bool = False
) -> PartitionBench:
    """A partition of small segments with a deduplication window of `WINDOW_MS`."""
    return small_bench(disk, "producers", "deduplication", seconds=seconds, is_follower=is_follower)


class Feature(NamedTuple):
    """A feature of partitions: what it changes in their rules and settings, and what it attaches to one."""

    attach: Callable[[PartitionBench, Partition], None]
    rules: dict[str, Any] = {}  # noqa: RUF012 - never changed
    settings: dict[str, str] = {}  # noqa: RUF012 - never changed


WINDOW_MS = 2_000


def _attach_producers(bench: PartitionBench, partition: Partition) -> None:
    bench.producers = ProducerHook(
        bench.disk,
        bench.clock,
        bench.background,
        partition.log.directory,
        partition.log,
        expiration_ms=1 << 40,
    )
    partition.add_hook(bench.producers)


def _attach_deduplication(bench: PartitionBench, partition: Partition) -> None:
    bench.producers.has_shorter_batches = True
    view = DeduplicationView(bench.disk, bench.clock, partition.log, window_ms=lambda: WINDOW_MS)
    replay = bench.deduplication = _replay(bench, partition, view)
    bench.deduplicator = Deduplicator(partition, replay)
    partition.check_ids = bench.deduplicator.check
    partition.first_offset_of_repeat = bench.deduplicator.with_first_offset


def _attach_delays(bench: PartitionBench, partition: Partition) -> None:
    replay = bench.delayed_records = _replay(bench, partition, DelayedRecords(partition.log))
    bench.delay_manager = DelayManager(partition, replay)
    partition.convert_delayed = bench.delay_manager.convert


def _attach_priorities(bench: PartitionBench, partition: Partition, *, is_new: bool = False) -> None:
    view = PriorityView(partition.log, is_new=is_new, on_complete=partition.wake_readers)
    replay = bench.priorities = _replay(bench, partition, view)
    partition.priorities, partition.stage_priorities = view, replay.stage


def _attach_new_priorities(bench: PartitionBench, partition: Partition) -> None:
    _attach_priorities(bench, partition, is_new=True)


def _replay(bench: PartitionBench, partition: Partition, view: V) -> ViewReplay[V]:
    """Keep a view of the log, and wait until it is complete."""
    replay = ViewReplay(
        view,
        bench.disk,
        bench.background,
        bench.scheduler,
        partition.log,
        is_leader=lambda: partition.is_leader,
        on_damage=partition.report_damage,
    )
    partition.add_hook(replay)
    bench.scheduler.run()
    assert replay.is_complete
    return replay


FEATURES = {
    "producers": Feature(_attach_producers),
    "deduplication": Feature(
        _attach_deduplication,
        {"deduplicates": True, "inspects_records": True},
        {"mansio.dedup.ms": str(WINDOW_MS)},
    ),
    "delays": Feature(
        _attach_delays, {"accepts_delays": True, "inspects_records": True}, {"mansio.delay.enable": "true"}
    ),
    "priorities": Feature(
        _attach_priorities,
        {"has_priorities": True, "inspects_records": True},
        {"mansio.priority.enable": "true"},
    ),
    "new priorities": Feature(
        _attach_new_priorities,
        {"has_priorities": True, "inspects_records": True},
        {"mansio.priority.enable": "true"},
    ),
}
"""What a bench can have, by name; in the order in which they are attached. Deduplication needs producers."""
