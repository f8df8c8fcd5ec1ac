"""Partitions of one topic on a simulated disk, as leader or follower, whose clock, timers and worker the test drives.

The parts that a test does not name are manual ones; a test on virtual time passes its own. `FEATURES` is the one place
that knows what a feature of partitions needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from mansio.broker.features.deduplication.deduplication_feature import DeduplicationFeature
from mansio.broker.features.deduplication.deduplicator import Deduplicator
from mansio.broker.features.delays.delay_feature import DelayFeature
from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.broker.features.known_features import create_features
from mansio.broker.features.priorities.priority_feature import PriorityFeature
from mansio.broker.features.priorities.priority_view import PriorityView
from mansio.broker.features.schema_validation.schema_validation_feature import SchemaValidationFeature
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.config import topic_config
from mansio.state.replica import NO_LEADER, FollowerReplica, ReplicationProgress
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import TimestampType, read_header
from mansio.wire.batch.record_reader import read_records
from support.logs import LogBench

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mansio.broker.features.deduplication.deduplication_view import DeduplicationView
    from mansio.broker.features.delays.delayed_records import DelayedRecords
    from mansio.broker.log_view.replay import ViewReplay
    from mansio.broker.partition.partition import PartitionFeature
    from mansio.storage.log import Log
    from mansio.testing.disk import SimulatedDisk
    from mansio.wire.batch.record_reader import Record

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
    priorities: PriorityView

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
        self.has_producers = "producers" in features
        self.features = [FEATURES[name] for name in features if name != "producers"]
        self.rules = rules
        ports = FeaturePorts(self.disk, self.background, self.scheduler, self.clock)
        self.known_features = create_features(ports)
        for known in self.known_features:
            known.close()  # what is due is delivered where the test delivers it
        self._read_records()
        self.directory = directory
        self.partitions: list[Partition] = []
        for one in settings:
            self.open_partition(one)

    def _read_records(self) -> None:
        """Let the rules contain what the features read."""
        texts = {key: text for feature in self.features for key, text in feature.settings.items()}
        settings = topic_config.resolve_topic_settings(texts, {}, self.replicas)
        readers = [one.reader(settings) for one in self.known_features]
        found = tuple(reader for reader in readers if reader is not None)
        if found:
            self.rules = self.rules._replace(readers=found, inspects_records=True)

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
            producers=self._new_producers(log) if self.has_producers else None,
            **options,
        )
        self.partitions.append(partition)
        for kind in self.known_features:
            for feature in self.features:
                if feature.kind is type(kind):
                    partition.attach(kind, is_new=feature.is_new)
        self._look_up(partition)
        if self.features:
            self.scheduler.run()
        return partition

    def _look_up(self, partition: Partition) -> None:
        """Keep the parts of the features, which a closed partition does not have any more."""
        if partition.producers is not None:
            self.producers = partition.producers
        if (deduplicator := partition.find_feature(Deduplicator)) is not None:
            self.deduplicator, self.deduplication = deduplicator, deduplicator.replay
        if (manager := partition.find_feature(DelayManager)) is not None:
            self.delay_manager, self.delayed_records = manager, manager.replay
        if (priorities := partition.find_feature(PriorityView)) is not None:
            self.priorities = priorities

    def _new_producers(self, log: Log) -> ProducerHook:
        return ProducerHook(self.disk, self.clock, self.background, log.directory, log, expiration_ms=1 << 40)

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
    """A feature of partitions: its class, one of `KNOWN_FEATURES`, and the settings with which a topic has it."""

    kind: type[PartitionFeature]
    is_new: bool
    settings: dict[str, str]


WINDOW_MS = 2_000

FEATURES = {
    "deduplication": Feature(
        DeduplicationFeature,
        False,
        {"mansio.dedup.ms": str(WINDOW_MS)},
    ),
    "schema validation": Feature(
        SchemaValidationFeature,
        False,
        {"mansio.value.schema.validation": "true"},
    ),
    "delays": Feature(
        DelayFeature,
        False,
        {"mansio.delay.enable": "true"},
    ),
    "priorities": Feature(
        PriorityFeature,
        False,
        {"mansio.priority.enable": "true"},
    ),
    "new priorities": Feature(
        PriorityFeature,
        True,
        {"mansio.priority.enable": "true"},
    ),
}
"""What a bench can have besides "producers", by name. Deduplication needs producers."""
